"""Where Ray is not installed: `import paged.ray` succeeds, and every door says what to install."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import paged
from paged.base.errors import ClusterError
from paged.commands import common

INSTALL = "needs ray, which is not installed: pip install 'paged\\[ray\\]'"


def test_every_door_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("paged.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    doors = importlib.import_module("paged.ray")
    assert dir(doors) == ["app", "generate"]
    for name in doors.__all__:
        with pytest.raises(ModuleNotFoundError, match=INSTALL):
            getattr(doors, name)
    for name in ("serve", "data"):
        with pytest.raises(ModuleNotFoundError, match=INSTALL):
            importlib.import_module(f"paged.ray.{name}")
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        doors.other  # noqa: B018
    with pytest.raises(ClusterError, match=INSTALL):
        common.launcher_of("", {}, 1)


def test_nothing_else_imports_ray():
    root = Path(paged.__file__).parent
    for file in root.rglob("*.py"):
        if file.relative_to(root).parts[0] != "ray":
            found = re.search(r"\b(import|from) (ray|pyarrow)\b", file.read_text(encoding="utf-8"))
            assert found is None, file
