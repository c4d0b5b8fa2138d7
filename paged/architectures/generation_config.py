"""Read generation_config.json of a checkpoint: its EOS ids and default sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError, RequestError
from ..base.validation import shown
from ..options.sampling_params import SamplingParams
from .hf_config import read_json

_FILE = "generation_config.json"
# From fields of the file to those of SamplingParams.
GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
NO_DEFAULTS = ("paged", "vllm")  # values of EngineConfig.generation_config that name no file
# What people who try a small model expect, as llama.cpp has it: drawn from the whole distribution, one answer
# in three is nonsense. The API and other commands keep vLLM's defaults.
CHAT_DEFAULTS: Mapping[str, float] = {"temperature": 0.8, "min_p": 0.05}
# A checkpoint, or the user of a chat, who sets one of these says how to sample.
SHAPES = frozenset({"temperature", "top_p", "top_k", "min_p"})


def chat_defaults(source: str, found: Mapping[str, Any]) -> Mapping[str, float]:
    """Return default sampling parameters of `paged chat` and the page, beyond the parameters that the
    checkpoint sets.

    source: `EngineConfig.generation_config`; a name that is not a file asks for vLLM's defaults.
    found: the parameters that the checkpoint sets.
    """
    return {} if source in NO_DEFAULTS or not SHAPES.isdisjoint(found) else CHAT_DEFAULTS


def read_eos_token_ids(directory: Path) -> frozenset[int]:
    """Read the EOS token ids from generation_config.json, or else from config.json."""
    for name in (_FILE, "config.json"):
        file = directory / name
        found = read_json(file) if file.exists() else {}
        eos = found.get("eos_token_id")
        text = found.get("text_config")
        if eos is None and isinstance(text, dict):  # of a model with other parts
            eos = text.get("eos_token_id")
        if eos is not None:
            ids = eos if isinstance(eos, list) else [eos]
            if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                raise CheckpointError(
                    f"{file}: eos_token_id must be an int or a list of ints, got {shown(eos)}"
                )
            return frozenset(ids)
    return frozenset()


def read_sampling_defaults(directory: Path) -> dict[str, Any]:
    """Return the arguments of SamplingParams in generation_config.json; an empty dict if there is no such
    file.

    Other fields of the file, such as do_sample, have no effect, as in vLLM.

    Raises CheckpointError, which names the file, for a value that SamplingParams refuses.
    """
    file = directory / _FILE
    if not file.exists():
        return {}
    return sampling_defaults(read_json(file), str(file))


def sampling_defaults(fields: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the arguments of SamplingParams among `fields`. Raises CheckpointError, which names `place`."""
    given = {
        ours: fields[theirs] for theirs, ours in GENERATION_FIELDS.items() if fields.get(theirs) is not None
    }
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise CheckpointError(f"{place}: {error}") from error
    return given
