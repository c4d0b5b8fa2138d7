"""The command line: `paged`, and the table of its commands.

A command's module is imported when it is chosen: help and completion need none of them.

Arguments are validated before torch is imported and the model loaded. Every error is one line on stderr; only
generated text and results go to stdout.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.main import get_command, get_group

from .. import __version__
from ..base.errors import PagedError, RequestError, is_final
from ..base.interrupts import end_at_ctrl_c
from .common import EXIT_FAILED, EXIT_USAGE, CliError, complain
from .headings import CommandGroup, GroupedCommand

# The base class of parser errors: click's in older versions of Typer, Typer's own copy in newer ones.
PARSER_ERROR: type[Any] = typer.BadParameter.__mro__[2]

# The class of completions: of click or of Typer's own copy of it, likewise.
COMPLETION: type[Any] = importlib.import_module(
    f"{PARSER_ERROR.__module__.rpartition('.')[0]}.shell_completion"
).CompletionItem
VALUELESS = ("--ray", "--models")  # may be given without a value, before another option or at the end
TYPED = (CliError, RequestError)  # errors of flags and prompts


class Command(NamedTuple):
    """The module of a command, and its description in `paged --help`."""

    module: str
    about: str


COMMANDS = {
    "generate": Command("generate", "Complete a prompt, or all prompts of a file."),
    "chat": Command("chat", "Talk with a model, here or on a server."),
    "run-batch": Command("run_batch", "Answer a file in OpenAI's batch format."),
    "serve": Command("serve", "Serve a model over HTTP with OpenAI's API."),
    "top": Command("top", "Show what a server does, as it changes."),
    "pull": Command("pull", "Download a model of the hub."),
    "models": Command("models", "List, name or remove the models that are here."),
    "warmup": Command("warmup", "Compile the kernels and pack the weights of a model."),
    "plan": Command("plan", "Predict memory and speed of an engine."),
    "simulate": Command("simulate", "Predict latency and throughput of a fleet."),
    "bench": Command("bench", "Measure throughput or latency."),
    "cache": Command("cache", "List the packed weights that are kept, or remove them."),
    "keys": Command("keys", "Make keys for paged serve --api-keys."),
}


class Commands(CommandGroup):
    """The group of all commands. A command's module is imported when the command is called."""

    def list_commands(self, _: Any) -> list[str]:
        """Return the names of the commands."""
        return [*COMMANDS]

    def get_command(self, _: Any, cmd_name: str) -> Any:
        """Import the command of this name. Return None if it does not exist."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            module = importlib.import_module(f".{COMMANDS[cmd_name].module}", __package__)
            found = getattr(module, cmd_name.replace("-", "_"))
            if isinstance(found, typer.Typer):
                command: Any = get_group(found)
            else:
                alone = typer.Typer(add_completion=False, rich_markup_mode=None)
                alone.command(cls=GroupedCommand)(found)
                command = get_command(alone)
            self.add_command(command, cmd_name)
        return self.commands.get(cmd_name)

    def format_commands(self, _: Any, formatter: Any) -> None:
        """Write the table of the commands into the help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.about) for name, command in COMMANDS.items()])

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the completions of a command's name, or of an option of `paged`."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [
            COMPLETION(name, help=command.about)
            for name, command in COMMANDS.items()
            if name.startswith(incomplete)
        ]


app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line and exit with its code.

    Exit code 2 means that the same command would fail again: it has a typing error, or the model is damaged
    or unsupported. Exit code 1 means any other failure, which may not occur again.
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
    """Return arguments in which options of VALUELESS have an empty value if they have none.

    The parser has no options that may go without.
    """
    result = list[str]()
    for argument in arguments:
        if result and result[-1] in VALUELESS and argument.startswith("-"):
            result[-1] += "="
        result.append(argument)
    if result and result[-1] in VALUELESS:
        result[-1] += "="
    return result


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
