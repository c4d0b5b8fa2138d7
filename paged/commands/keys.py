"""`paged keys new`: a new key for the file of `paged serve --api-keys`."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from ..base.errors import ConfigError
from ..server.access.key_file import KEY_TABLE, Moment, line_of, new_key
from .headings import CommandGroup, GroupedCommand

keys = typer.Typer(cls=CommandGroup)
_MEANINGS = {field.name: field.meaning[0].upper() + field.meaning[1:] + "." for field in KEY_TABLE.fields}


@keys.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Make keys for paged serve --api-keys."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def _option(name: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=_MEANINGS[name], show_default=False)
    return option


@keys.command(cls=GroupedCommand)
def new(
    tenant: Annotated[str, _option("tenant")],
    weight: Annotated[float | None, _option("weight")] = None,
    cache: Annotated[str | None, _option("cache")] = None,
    priorities: Annotated[tuple[str, str] | None, _option("priorities")] = None,
    models: Annotated[list[str] | None, _option("models")] = None,
    requests_per_minute: Annotated[int | None, _option("requests_per_minute")] = None,
    tokens_per_minute: Annotated[int | None, _option("tokens_per_minute")] = None,
    concurrent_requests: Annotated[int | None, _option("concurrent_requests")] = None,
    concurrent_sequences: Annotated[int | None, _option("concurrent_sequences")] = None,
    expires: Annotated[str | None, _option("expires")] = None,
) -> int:
    """Make a key, show it once on stderr, and print its line for the file: paged keys new ... >> FILE.

    The file holds only the sha256 of the key, from which the key cannot be recovered.
    """
    key = new_key()
    line = line_of(
        key,
        tenant=tenant,
        weight=weight,
        cache=cache,
        priorities=None if priorities is None else [_priority(text) for text in priorities],
        models=models or None,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent_requests=concurrent_requests,
        concurrent_sequences=concurrent_sequences,
        expires=expires,
    )
    if expires is not None and Moment().parse("expires", expires) <= time.time():
        raise ConfigError(f"--expires {expires} has passed already; give a later time, or none")
    print(line)
    print(f"the key, which is not shown again: {key}", file=sys.stderr)
    return 0


def _priority(text: str) -> str | float:
    try:
        number = json.loads(text)
    except ValueError:
        return text
    if not isinstance(number, int | float):
        raise ConfigError(f"a priority is a number, high, normal or low; got {text!r}")
    return number
