"""What models among GGUF files are called: by their quantisation, as publishers write it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..base.errors import CheckpointError
from .gguf_paths import is_gguf, models_of, part_paths

# A quantisation as publishers write it into the names of GGUF files.
_QUANTISATION = re.compile(
    r"(?<![a-z0-9])((?:ud-)?(?:iq|q|tq|bf|f|fp|mxfp|nvfp)\d+(?:_[a-z0-9]+)*)(?![a-z0-9_])", re.IGNORECASE
)


def quantisation_of(name: str) -> str:
    """Return the quantisation in the name of a GGUF file, else in its folder's; without any its stem."""
    stem = stem_of(name)
    found = _QUANTISATION.findall(stem) or _QUANTISATION.findall(Path(name).parent.name)
    return str(found[-1]) if found else stem


def tags_of(names: Iterable[str]) -> dict[str, str]:
    """Return the first file of each model by what stands behind the colon of its name.

    That is the quantisation, or the stem of the file where several have the same quantisation. Models of
    which parts are missing have none.
    """
    there = [*filter(is_gguf, names)]
    by_quantisation = dict[str, list[str]]()
    for name in models_of(there):
        with suppress(CheckpointError):
            part_paths(Path(name), exists=there.__contains__)
            by_quantisation.setdefault(quantisation_of(name).casefold(), []).append(name)
    found = dict[str, str]()
    for same in by_quantisation.values():
        tag_of = quantisation_of if len(same) == 1 else stem_of
        if len({tag_of(name) for name in same}) < len(same):
            tag_of = _whole_name_of
        found |= {tag_of(name): name for name in same}
    return found


def stem_of(name: str) -> str:
    """Return the name of a GGUF file without its folder, the number of its part, and its ending."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", Path(name).stem)


def _whole_name_of(name: str) -> str:
    return "-".join((*Path(name).parent.parts, stem_of(name)))
