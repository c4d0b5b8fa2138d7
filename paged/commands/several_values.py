"""Options that take several values after one flag, as vLLM's do; the parser takes one value a flag."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError

_MODULES = "--lora-modules"
_MODULE = re.compile(r"[^-=/][^=/]*=.|\{")  # NAME=PATH, or an object in JSON


def one_value_each(parameters: Sequence[Any], args: Sequence[str]) -> list[str]:
    """Return a command's arguments with the flag of an option before each of its values.

    Further values belong to the option if all of the command's arguments are given elsewhere. Otherwise they
    are the model, prompt or file that is missing, unless only the option can have them.

    Raises ConfigError for a value that may be a model although the environment or a file names one.
    """
    options = {
        flag: each
        for each in parameters
        if each.param_type_name == "option" and not each.is_flag
        for flag in each.opts
    }
    arguments = [each.name for each in parameters if each.param_type_name == "argument"]
    found = [*_with_options(options, args)]
    num_given = sum(flag == "" for _, flag in found)
    if arguments == ["model"]:
        num_given += any(text.partition("=")[0] == "--model" for text, flag in found if flag is None)
    result: list[str] = []
    unclear = ""
    for text, flag in found:
        if flag and (num_given >= len(arguments) or (flag == _MODULES and _MODULE.match(text))):
            result.append(flag)
        elif flag:
            unclear = flag
        result.append(text)
    if unclear and arguments == ["model"] and (elsewhere := _model_elsewhere(options, args)):
        raise ConfigError(  # without the value, which may be a key
            f"the second value after {unclear} may be one more of its values, or the model, which "
            f"{elsewhere} names, too: write {unclear} before each value, or the model before all flags"
        )
    return result


def _model_elsewhere(options: Mapping[str, Any], args: Sequence[str]) -> str | None:
    """Return what names the model beside the arguments, in a command that reads more than these."""
    if "--config" not in options:
        return None
    if os.environ.get("PAGED_MODEL"):
        return "PAGED_MODEL"
    file = os.environ.get("PAGED_CONFIG")
    for i, text in enumerate(args):
        if text.startswith("--config="):
            file = text.partition("=")[2]
        elif text == "--config":
            file = args[i + 1] if i + 1 < len(args) else None
    if not file:
        return None
    import yaml

    with suppress(OSError, ValueError, yaml.YAMLError):  # which the command's own reading explains
        given = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        if isinstance(given, Mapping) and given.get("model"):
            return file
    return None


def _with_options(options: Mapping[str, Any], args: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each argument with the flag of several values that it may be a further value of.

    That is None for flags and their first values, and "" for arguments that follow no such flag.

    options: the options that have a value, by their flags.
    """
    needs_value = False
    several = ""
    for i, text in enumerate(args):
        if needs_value:
            needs_value = False
            yield text, None
        elif text == "--":
            yield text, None
            yield from ((rest, "") for rest in args[i + 1 :])
            return
        elif text.startswith("-") and text != "-":
            option = options.get(text)
            needs_value = option is not None
            several = text if option is not None and option.multiple else ""
            yield text, None
        else:
            yield text, several
