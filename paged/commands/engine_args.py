"""EngineArgs and FlexibleArgumentParser: for scripts of vLLM that take the options of an engine as flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, Self, TypeVar

from ..base.docstrings import field_texts
from ..base.errors import ConfigError
from ..base.from_vllm import Neutral, neutral_of
from ..options.config import EngineConfig
from .option_texts import OBJECTS, read_texts
from .options import SHORT, SWITCHED_OFF, option_type
from .spelling import spelled_out
from .vllm_options import SEVERAL, is_switch, value_of

Group = TypeVar("Group", bound="argparse._ActionsContainer")


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that accepts underscores in flags, as vLLM's parser does."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments, reading --max_model_len=5 as --max-model-len=5."""
        if args is None:
            import sys

            args = sys.argv[1:]
        takes_value = {flag: each.nargs != 0 for flag, each in self._option_string_actions.items()}
        objects = [flag for flag, each in self._option_string_actions.items() if each.dest in OBJECTS]
        try:
            spelled = spelled_out(args, takes_value, objects)
        except ConfigError as error:
            self.error(str(error))
        return super().parse_known_args(spelled, namespace)


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


def _short(name: str) -> Sequence[str]:
    return [SHORT[name]] if name in SHORT else []


def _kind(name: str) -> dict[str, Any]:
    """Return how the parser takes an option: its texts are read as the commands read them."""
    kind = option_type(EngineConfig, name)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"action": _Texts, **({"nargs": "+"} if kind in (list[int], list[str]) else {})}


class _Texts(argparse.Action):
    """Reads the texts of an option."""

    def __call__(self, _: Any, namespace: Any, values: Any, __: Any = None) -> None:
        texts = [values] if isinstance(values, str) else values
        try:
            value = read_texts(self.dest, option_type(EngineConfig, self.dest), "the value", texts)
        except ConfigError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, value)


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
