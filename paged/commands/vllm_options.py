"""Options of vLLM's command line: those without effect here are accepted, the others refused with the reason.

The tables of `base/vllm.toml` decide, as for the arguments of Python's API.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from ..base.errors import ConfigError
from ..base.from_vllm import SECRETS, Neutral, neutral_of, without_neutral

# Options that take several values after one flag.
SEVERAL = (
    *("served_model_name", "ignore_patterns", "logits_processors", "collect_detailed_traces", "device_ids"),
    *("kv_cache_dtype_skip_layers", "numa_bind_nodes", "numa_bind_cpus", "sleep_preserve_parameter_names"),
)
_SHORT = {
    "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-ep": "enable_expert_parallel",
}


def without_flag(command: str, args: list[str], unknown: str) -> list[str] | None:
    """Return a command's arguments without an unknown flag. Return None if vLLM does not have the flag
    either.

    unknown: the flag as the parser reports it: without its value, and of several letters after one dash only
        the first.

    Raises ConfigError if vLLM has the flag, but the given value is not supported here.
    """
    flags = [text.partition("=")[0] for text in args]
    found = (i for i, flag in enumerate(flags) if flag == unknown or (flag in _SHORT and flag[:2] == unknown))
    at = next(found, None)
    if at is None:
        return None
    flag, equals, value = args[at].partition("=")
    name, dot, _ = flag.removeprefix("--").replace("-", "_").partition(".")
    name = _SHORT.get(flag, name)
    is_off = name.startswith("no_") and name not in _neutral()
    name = name.removeprefix("no_") if is_off else name
    if name not in _neutral():
        return None
    rest = args[at + 1 :]
    if not equals and not is_switch(name) and rest and not rest[0].startswith("--"):
        value = rest.pop(0)
    if name in SEVERAL and not equals:
        while rest and not rest[0].startswith("-"):
            value = f"{value} {rest.pop(0)}"
    given = value_of(value, _neutral()[name])
    if is_switch(name) and not equals:
        given = not is_off
    if dot:  # --speculative-config.method: a part of the value
        given = {flag: value}
    written = flag if name in SECRETS or not value else f"{flag} {value}"
    without_neutral(command, {name: given}, _neutral(), ConfigError, written)
    return [*args[:at], *rest]


def without_options(owner: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return options of a file or the environment without vLLM's options that have neutral values.

    owner: where the options come from, for messages. known: the names of the options that exist here.

    Raises ConfigError for another value of an option of vLLM.
    """
    unknown = given.keys() - known
    theirs = {name: _neutral()[name] for name in unknown if name in _neutral()}
    typed = {
        name: value_of(value, theirs[name]) if name in theirs and isinstance(value, str) else value
        for name, value in given.items()
    }
    return without_neutral(owner, typed, theirs, ConfigError)


@cache
def _neutral() -> dict[str, Neutral]:
    """Return the options of vLLM that change nothing here, by name."""
    return {**neutral_of("serve"), **neutral_of("EngineArgs")}


def is_switch(name: str) -> bool:
    """Return whether an option's flag takes no value."""
    return name not in SECRETS and any(isinstance(value, bool) for value in _neutral()[name].values)


def value_of(text: str, neutral: Neutral) -> Any:
    """Return the neutral value that a text stands for. Without one, return a number, or else the text."""
    for value in neutral.values:
        if str(value).lower() == text.lower() or value == [text]:
            return value
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
