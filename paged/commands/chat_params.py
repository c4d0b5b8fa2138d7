"""ChatParams: the sampling parameters of a conversation in the terminal, which /params shows and sets."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from ..architectures.generation_config import SHAPES
from ..base.errors import RequestError
from ..base.validation import shown
from ..options.sampling_params import SamplingParams
from . import common
from .common import CliError

# Those that are shown where nothing sets them.
ALWAYS_SHOWN = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
# What an answer as text has no place for.
NOT_OF_A_TEXT = {
    "n": "a turn has one answer",
    "best_of": "a turn has one answer",
    "logprobs": "a chat shows text alone",
    "prompt_logprobs": "a chat shows text alone",
    "detokenize": "a chat shows text",
}
SETTABLE = [name for name in common.SAMPLING[1] if name not in NOT_OF_A_TEXT]


class ChatParams:
    """The sampling parameters of a conversation, by their source.

    given: the parameters that the user gave.
    checkpoint: the parameters that the checkpoint sets, if known.
    chat: the defaults of a chat. They apply unless the user sets a parameter that selects how to sample.
    """

    def __init__(
        self, given: Mapping[str, Any], *, checkpoint: Mapping[str, Any], chat: Mapping[str, Any]
    ) -> None:
        self._checkpoint = checkpoint
        self._chat = chat if SHAPES.isdisjoint(given) else {}
        self._given = {**given}

    @property
    def values(self) -> dict[str, Any]:
        """Arguments of SamplingParams that the user or the chat sets, without the checkpoint's defaults."""
        return {**self._chat, **self._given}

    def describe(self) -> str:
        """Return a line for each parameter, with its source."""
        defaults = {"max_tokens": None}
        layers = [
            ("default", {name: defaults.get(name, getattr(SamplingParams(), name)) for name in ALWAYS_SHOWN}),
            ("of a chat", self._chat),
            ("of the checkpoint", self._checkpoint),
            ("yours", self._given),
        ]
        found = {name: (value, source) for source, values in layers for name, value in values.items()}
        lines = []
        for name, (value, source) in found.items():
            text = f"{name}={_as_text(value)}"
            lines.append(text if source == "default" else f"{text:<24}{source}")
        return "\n".join(lines)

    def set(self, text: str) -> None:
        """Set parameters from NAME=VALUE pairs. NAME= restores the default. Raises CliError."""
        changed = {**self._given}
        try:
            pairs = shlex.split(text)
        except ValueError as error:
            raise CliError(f"/params: {error}; got {shown(text)}") from error
        for pair in pairs:
            name, is_pair, value = pair.partition("=")
            _check_name(name)
            if not is_pair:
                raise CliError(f"/params takes NAME=VALUE, such as temperature=0.5; got {shown(pair)}")
            changed.pop(name, None)
            if value:
                changed[name] = _value_of(value)
        try:
            check_one_text(changed)
        except RequestError as error:
            raise CliError(f"/params: {error}") from error
        self._given = changed


def check_one_text(given: Mapping[str, Any]) -> None:
    """Raise CliError if the parameters ask for several outputs, and RequestError if they are wrong."""
    params = SamplingParams(**{"max_tokens": None, **given})
    if params.num_samples > 1:
        raise CliError("--n and --best-of have no place in a chat, where a turn has one answer")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            raise CliError(f"--{name.replace('_', '-')} has no place in a chat, which shows text alone")
    if not params.detokenize:
        raise CliError("--no-detokenize leaves nothing to show of a chat")


def _check_name(name: str) -> None:
    """Raise CliError unless /params can set a parameter."""
    if name in NOT_OF_A_TEXT:
        raise CliError(f"/params cannot set {name}: {NOT_OF_A_TEXT[name]}")
    if name == "seed":
        raise CliError("/params cannot set seed, which --seed gives to the engine or the server")
    if name not in SETTABLE:
        raise CliError(f"there is no parameter {shown(name)}; /params sets {', '.join(SETTABLE)}")


def _value_of(text: str) -> Any:
    """Return a value from JSON, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _as_text(value: Any) -> str:
    fits_json = isinstance(value, str | int | float | list | tuple | dict | None)
    return json.dumps(value, ensure_ascii=False) if fits_json else str(value)
