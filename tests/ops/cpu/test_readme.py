"""kernels/cpu/README.md says what the code does."""

import re

from tests.support.cpu_table import README, table, written


def test_the_table_of_formats_is_fresh():
    assert written() == table(), "run python -m tests.support.cpu_table --write"


def test_files_that_the_readme_names_exist():
    root = README.parents[2]
    names = re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", README.read_text())
    assert len(names) > 15
    assert not [name for name in names if not ((README.parent / name).exists() or (root / name).exists())]
