"""Command-line options from the fields of config dataclasses, which hold the only default and help text."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache, wraps
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer

from ..architectures.generation_config import GENERATION_FIELDS
from ..base.docstrings import field_texts
from ..base.errors import ConfigError
from ..options.sampling_params import SamplingParams
from .headings import heading_of
from .option_texts import IN_JSON, TOKEN_COUNTS, read_texts, stands_for_another

# Added to the help of fields that hold several values: how the command line writes one.
FORMS = {
    **{name: f" As '{example}'." for name, example in IN_JSON.items()},
    "logit_bias": " As ID=BIAS.",
    "tenant_weights": " As a=1,b=2.",
    "pipeline_layers": " As --pipeline-layers 12 10.",
    "lora_target_modules": " As --lora-target-modules q_proj v_proj.",
    "cudagraph_capture_sizes": " As --cudagraph-capture-sizes 1 8.",
}
# The flags that turn options off which are on by default, where they are not --no- and the name.
NEGATED = {"enable_auto_tool_choice": "no-auto-tool-choice"}
# The flags that set an option of text to False, by their names.
SWITCHED_OFF = {"no_weights_cache": "weights_cache"}
_OFF_HELP = {"no_weights_cache": "Look for no packed weights, and keep none. [default: off]"}
# vLLM's short names of options.
SHORT = {"pipeline_parallel_size": "-pp", "tensor_parallel_size": "-tp"}
# The types that the parser takes, where texts write more than it knows.
_PARSED = dict.fromkeys(TOKEN_COUNTS, str)
# What a docstring says of None, which cannot be typed: where it is the default, that is shown instead.
_NONE_MEANS = re.compile(r"[;.] None \w+ (.*?)(?=\. |\.$|; )")


def option(owner: type[Any], name: str, *flags: str, default: str | None = None) -> Any:
    """Return the command-line option for a field of a config. Its help is the field's text in the docstring
    of `owner`.

    flags: by default --name, or --name/--no-name for a switch, which another channel may turn on.
    default: the text that the help shows instead of the field's default.
    """
    text = _described(owner).texts.get(name, "") + FORMS.get(name, "")
    (field,) = (field for field in fields(owner) if field.name == name)
    value = field.default if field.default_factory is MISSING else None
    none = _NONE_MEANS.search(text)
    text = _NONE_MEANS.sub("", text)
    if name not in IN_JSON and _is_list(_described(owner).hints[name]):
        text += " Takes one value or several."
    if default is None and value is not MISSING:
        default = none[1] if value is None and none is not None else _shown(owner, name, value)
    if default is not None:
        text += f" [default: {default}]"
    if limits := field.metadata["kind"].limits if "kind" in field.metadata else "":
        text += f" [{limits}]"
    flag = name.replace("_", "-")
    short = [SHORT[name]] if name in SHORT else []
    is_switch = bool in _members(_described(owner).hints[name])
    flags = flags or (f"--{flag}/--{NEGATED.get(name, f'no-{flag}')}" if is_switch else f"--{flag}", *short)
    return typer.Option(
        *flags,
        help=text,
        show_default=default is None,
        rich_help_panel=heading_of(owner, name),
        metavar="INTEGER" if option_type(owner, name) in (int, list[int]) else None,
    )


def with_options(
    *given: tuple[type[Any], Iterable[str]], defaults: Mapping[str, str] | None = None
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate a command that takes **options: add an option for each named field of each class.

    Its arguments are the values of the fields. An option that is not given is None or an empty list.

    defaults: the default that the help shows, for options whose default the command itself sets.
    """
    shown = defaults or {}
    added = [_parameter(owner, name, shown.get(name)) for owner, names in given for name in names]
    kinds = {name: option_type(owner, name) for owner, names in given for name in names}
    added += [
        _off_parameter(owner, off)
        for owner, own in given
        for off, name in SWITCHED_OFF.items()
        if name in own
    ]

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        run = _with_values(command, kinds)
        # Typer reads this attribute.
        run.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        return run

    return decorate


def _off_parameter(owner: type[Any], name: str) -> inspect.Parameter:
    """Return the parameter of a flag that sets an option to False."""
    flag = name.replace("_", "-")
    given = typer.Option(
        f"--{flag}", help=_OFF_HELP[name], rich_help_panel=heading_of(owner, SWITCHED_OFF[name])
    )
    annotation = Annotated[bool, given]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)


def _with_values(command: Callable[..., int], kinds: Mapping[str, Any]) -> Callable[..., int]:
    """Return a command that gets the values that texts of options write, False for one that is turned off."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> int:
        options |= {
            name: value_of_flag(name, kinds[name], options[name]) for name in kinds if name in options
        }
        for off, name in SWITCHED_OFF.items():
            if options.pop(off, False):
                if options.get(name) is not None:
                    flags = (f"--{each.replace('_', '-')}" for each in (name, off))
                    raise ConfigError(f"{' and '.join(flags)} exclude each other; give one")
                options[name] = False
        return command(*args, **options)

    return run


def value_of_flag(name: str, kind: Any, value: Any) -> Any:
    """Return an option's value from what the parser returns. Raises ConfigError."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not stands_for_another(name, kind):
        return value
    return read_texts(name, kind, f"--{name.replace('_', '-')}", texts)


def option_type(owner: type[Any], name: str) -> Any:
    """Return the type that the command line uses for a field."""
    if name in IN_JSON:
        return str
    hint = _described(owner).hints[name]
    if _is_list(hint):
        return list[int] if any(get_args(member) == (int,) for member in _members(hint)) else list[str]
    # Of several types, such as a policy's name or object, the command line gives the first.
    kind = next(member for member in _members(hint) if member is not type(None))
    return str if get_origin(kind) is typing.Literal else kind


class _Described(NamedTuple):
    """What a class says of its fields: their types, and their parts of the docstring."""

    hints: dict[str, Any]
    texts: dict[str, str]


def _described(owner: type[Any]) -> _Described:
    # mypy holds classes to be unhashable.
    return _describe(owner)  # type: ignore[arg-type]


@cache  # it is slow, and asked for every option
def _describe(owner: type[Any]) -> _Described:
    return _Described(typing.get_type_hints(owner), field_texts(owner))


def _shown(owner: type[Any], name: str, value: Any) -> str:
    """Return a field's default as help shows it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(repr, value))
    from_file = owner is SamplingParams and name in GENERATION_FIELDS.values()
    return f"from generation_config.json, else {value}" if from_file else str(value)


def _parameter(owner: type[Any], name: str, default: str | None) -> inspect.Parameter:
    kind: Any = option_type(owner, name)
    kind = _PARSED.get(name, list[str] if kind == list[int] else kind)
    annotation = Annotated[kind | None, option(owner, name, default=default)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (UnionType, typing.Union) else (hint,)


def _is_list(hint: Any) -> bool:
    """Return whether a field holds several values, so that its option may be given several times."""
    return any(get_origin(member) in (Sequence, Mapping) for member in _members(hint))
