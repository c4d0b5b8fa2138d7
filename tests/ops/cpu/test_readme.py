"""kernels/cpu/README.md says what the code does."""

import re
from pathlib import Path

README = Path(__file__).parents[3] / "kernels" / "cpu" / "README.md"


def test_files_that_the_readme_names_exist():
    root = README.parents[2]
    names = re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", README.read_text())
    assert len(names) > 15
    assert not [name for name in names if not ((README.parent / name).exists() or (root / name).exists())]
