"""The releases of what paged needs: the oldest, or the newest, that pyproject.toml allows.

    python -m tests.support.requirements oldest > oldest.txt && pip install --target FOLDER -r oldest.txt

oldest: of each dependency the lower bound.
newest: the newest within the bounds, which pip finds.
beyond: the newest there is. If the tests pass, upper bounds may be raised.

With -light behind it (oldest-light), torch and triton are left out, which take gigabytes; with -torchless
what is of no use without torch, too. Those of tests and of Ray are left out always.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS = ("cpu", "plots", "structured", "server", "otel")
LEFT_OUT = {
    "": (),
    "light": ("torch", "triton"),
    "torchless": ("torch", "triton", "numba", "matplotlib"),
}
KINDS = ("oldest", "newest", "beyond")
# name, extras of it, bounds, and where it is needed
_FORM = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?((?:[<>=]+[\w.]+,?)*)(?:; *(.*))?")


def requirements(kind: str) -> list[str]:
    """Return the lines of a requirements file, in the order of pyproject.toml."""
    releases, _, share = kind.partition("-")
    if releases not in KINDS or share not in LEFT_OUT:
        raise ValueError(
            f"expected one of {', '.join(KINDS)}, with -light or -torchless or not; got {kind!r}"
        )
    return [_line(releases, *parts) for parts in declared() if parts[0] not in LEFT_OUT[share]]


def declared() -> list[tuple[str, str, str]]:
    """Return name, bounds and marker of each dependency. Those that paged's extras have of each other go."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"]]
    for extra in EXTRAS:
        texts += project["optional-dependencies"][extra]
    found = []
    for text in texts:
        match = _FORM.fullmatch(text)
        assert match, f"{text!r} in pyproject.toml has a form that this module does not read"
        if match[1] != project["name"]:
            found.append((match[1], match[2], match[3] or ""))
    return found


def _line(kind: str, name: str, bounds: str, marker: str) -> str:
    (lowest,) = (bound.removeprefix(">=") for bound in bounds.split(",") if bound.startswith(">="))
    version = {"oldest": f"=={lowest}", "newest": bounds, "beyond": f">={lowest}"}[kind]
    return f"{name}{version}" + (f"; {marker}" if marker else "")


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
