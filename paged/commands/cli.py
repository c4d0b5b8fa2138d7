"""The command line: `paged generate`, `chat`, `run-batch`, `serve`, `models`, `warmup`, `plan`,
`simulate`, `top`, `keys`, `cache` and `bench`.

Arguments are validated before torch is imported and the model loaded. Every error is one line on stderr; only
generated text and results go to stdout.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from .. import __version__
from ..base.errors import PagedError, RequestError, is_final
from ..base.interrupts import end_at_ctrl_c
from .bench import bench
from .cache import cache
from .chat import chat
from .common import EXIT_FAILED, EXIT_USAGE, CliError, complain
from .generate import generate
from .headings import CommandGroup, GroupedCommand
from .keys import keys
from .models import models, warmup
from .plan import plan
from .run_batch import run_batch
from .serve import serve
from .simulate import simulate
from .top import top

# The base class of parser errors: click's in older versions of Typer, Typer's own copy in newer ones.
PARSER_ERROR: type[Any] = typer.BadParameter.__mro__[2]

TYPED = (CliError, RequestError)  # errors of flags and prompts

app = typer.Typer(
    cls=CommandGroup,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line and exit with its code.

    2 is for what would be wrong again: what was typed, or a model that is damaged or not supported. 1 is for
    what cannot be done here and now.
    """
    end_at_ctrl_c()
    # Characters that the terminal cannot encode are escaped.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        sys.exit(app(_spelled_out(sys.argv[1:]), prog_name="paged", standalone_mode=False))
    except (KeyboardInterrupt, typer.Abort):  # a command had Ctrl-C raise, and it came beside what it was for
        end_at_ctrl_c()
        signal.raise_signal(signal.SIGINT)
        code = EXIT_FAILED
    except PARSER_ERROR as error:
        where = error.ctx.command_path if error.ctx is not None else "paged"
        complain(f"{error.format_message()} (see {where} --help)")
        code = EXIT_USAGE
    except PagedError as error:
        complain(str(error))
        code = EXIT_USAGE if isinstance(error, TYPED) or is_final(error) else EXIT_FAILED
    except UnicodeDecodeError as error:  # from stdin, or a file that is no text
        complain(str(error))
        code = EXIT_FAILED
    except OSError as error:
        complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        code = EXIT_FAILED
    sys.exit(code)


def _spelled_out(arguments: Sequence[str]) -> list[str]:
    """Return arguments in which --ray has a value, which may be left out. The parser has no such options."""
    result = list[str]()
    for argument in arguments:
        if result[-1:] == ["--ray"] and argument.startswith("-"):
            result[-1] = "--ray="
        result.append(argument)
    return [*result[:-1], "--ray="] if result[-1:] == ["--ray"] else result


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Run large language models with paged attention."""
    if version:
        print(f"paged {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


for command in (generate, chat, run_batch, serve, top, models, warmup, plan, simulate):
    app.command(cls=GroupedCommand)(command)
app.add_typer(bench, name="bench")
app.add_typer(keys, name="keys")
app.add_typer(cache, name="cache")
