"""EngineArgs and FlexibleArgumentParser: for scripts of vLLM that take the options of an engine as flags."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, Self, TypeVar

from ..base.docstrings import field_texts
from ..base.errors import ConfigError
from ..base.from_vllm import Neutral, neutral_of
from ..options.config import EngineConfig
from .options import SHORT, SWITCHED_OFF, is_mapping, option_type
from .vllm_options import SEVERAL, is_switch, value_of

Group = TypeVar("Group", bound="argparse._ActionsContainer")


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that accepts underscores in flags, as vLLM's parser does."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments, reading --max_model_len=5 as --max-model-len=5."""
        if args is None:
            import sys

            args = sys.argv[1:]
        return super().parse_known_args([_with_dashes(text) for text in args], namespace)


class EngineArgs(EngineConfig):
    """`EngineConfig` under vLLM's name, made from flags: `LLM(**vars(args))`, `LLM.from_engine_args(...)`."""

    @staticmethod
    def add_cli_args(parser: Group) -> Group:
        """Add a flag for each option of an engine. vLLM's flags without effect here are accepted too.

        Values are checked when the engine is made.
        """
        texts = field_texts(EngineConfig)
        for field in fields(EngineConfig):
            flags = [f"--{field.name.replace('_', '-')}", *_short(field.name)]
            default = None if field.default is MISSING else field.default
            described = texts.get(field.name, "").replace("%", "%%")
            parser.add_argument(*flags, default=default, help=described, **_kind(field.name))
        for off, name in SWITCHED_OFF.items():
            flag = f"--{off.replace('_', '-')}"
            parser.add_argument(flag, dest=name, action="store_const", const=False, default=argparse.SUPPRESS)
        for name, neutral in neutral_of("EngineArgs").items():
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
                **_neutral_kind(name, neutral),
            )
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the engine options among parsed arguments. Raises ConfigError for a wrong value."""
        known = {field.name for field in fields(EngineConfig)} | neutral_of("EngineArgs").keys()
        given = {name: value for name, value in vars(args).items() if name in known}
        if given.get("model") is None:
            raise ConfigError("give --model: a directory, a GGUF file, a hub id or 'demo'")
        return cls(**given)


def _with_dashes(text: str) -> str:
    if not text.startswith("--"):
        return text
    flag, equals, value = text.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}"


def _short(name: str) -> Sequence[str]:
    return [SHORT[name]] if name in SHORT else []


def _kind(name: str) -> dict[str, Any]:
    kind = option_type(EngineConfig, name)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind == list[int]:
        return {"type": int, "nargs": "+"}
    if is_mapping(EngineConfig, name):
        return {"type": json.loads}
    if kind == list[str]:
        return {"nargs": "+", "action": _Texts}
    types: dict[Any, Callable[[str], Any]] = {int: int, float: float}
    return {"type": types.get(kind, str)}


class _Texts(argparse.Action):
    """Takes texts, or a list of them in JSON."""

    def __call__(self, _: Any, namespace: Any, values: Any, __: Any = None) -> None:
        if len(values) == 1 and values[0].startswith("["):
            try:
                values = json.loads(values[0])
            except ValueError as error:
                raise argparse.ArgumentError(self, f"{values[0]} is not JSON: {error}") from None
        setattr(namespace, self.dest, values)


def _neutral_kind(name: str, neutral: Neutral) -> dict[str, Any]:
    if is_switch(name):
        return {"action": argparse.BooleanOptionalAction}
    if name in SEVERAL:
        return {"type": lambda text: value_of(text, neutral), "nargs": "+", "action": _OneOrSeveral}
    return {"type": lambda text: value_of(text, neutral)}


class _OneOrSeveral(argparse.Action):
    """Takes one value as it is, and several as a list."""

    def __call__(self, _: Any, namespace: Any, values: Any, __: Any = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)
