"""The error of a checkpoint without weights that can be read: what is there instead, and what to do."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..architectures.gguf_paths import is_gguf
from ..base.errors import CheckpointError, MissingModelError

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_VARIANT = re.compile(r"model\.\w+\.safetensors|model\.safetensors\.index\.\w+\.json")


def missing_weights_error(directory: Path, single: str, index: str, others: list[str]) -> CheckpointError:
    """Return the error for a directory without readable weights. It names what is there instead.

    single, index: the names of the files that were looked for.
    others: the names of the safetensors files and index files that are there.
    """
    names = sorted(os.listdir(directory))
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return CheckpointError(
            f"{directory}: {pickles[0]} is a pickle, which can run any code when loaded and is refused; "
            f"convert the checkpoint to safetensors (save_pretrained in transformers)"
        )
    message = (
        f"{directory / single} does not exist, nor {index}, which names the files of a larger checkpoint"
    )
    if gguf := [name for name in names if is_gguf(name)]:
        return CheckpointError(f"{message}; {gguf[0]} is there: give the path of the file")
    indexes = [name for name in others if name.endswith(".json")]
    if not others:
        return MissingModelError(f"{message}; only safetensors are read")
    name = (indexes or others)[0]
    if name.startswith("consolidated"):
        advice = ", in its author's own layout: fetch the files whose names begin with model"
    elif _VARIANT.fullmatch(name):
        advice = f", a variant: rename it to {index if indexes else single}"
    elif len(others) == 1:
        advice = f": fetch the index, or rename a single file to {single}"
    else:
        advice = f": fetch the index of these {len(others)} files"
    return MissingModelError(f"{message}; {name} is there{advice}")
