"""Shared by the commands: option groups, starting an engine, and error messages."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import ClusterError, PagedError, ResourceError
from ..options.config import EngineConfig
from ..options.logits import biases_of
from ..options.sampling_params import SamplingParams, StructuredOutputsParams
from .headings import MODEL, OUTPUT
from .options import option

if TYPE_CHECKING:
    from ..checkpoints.library.models_file import ModelEntry
    from ..engine.engine import LLMEngine
    from ..options.lora_request import LoRARequest
    from ..server.launcher import Launcher

EXIT_FAILED = 1
EXIT_USAGE = 2
DEFAULT_MODEL = "demo"

# The fields of the API that are not options of the commands, and why.
NO_FLAGS = {
    "structured_outputs": "its own fields are: --json-schema, --json-object, --regex, --choice, --grammar",
    "logits_processors": "they are Python functions",
    "no_stop_within": "text is not parsed for reasoning, except by a server",
    "output_kind": "a command shows text as it comes, and results when they are whole",
    "skip_tokenizer_init": "a command's prompts are text",
    "max_queued_tokens": "a command queues its own prompts, as many as max_waiting lets wait",
}
# Option groups for `with_options`. --model is declared below, and --seed is the engine's.
SAMPLING = (SamplingParams, [f.name for f in fields(SamplingParams) if f.name not in (*NO_FLAGS, "seed")])
ENGINE = (EngineConfig, [f.name for f in fields(EngineConfig) if f.name not in (*NO_FLAGS, "model")])


@dataclass(frozen=True, slots=True)
class AdapterOption:
    """The adapter that a command computes with.

    lora: a LoRA adapter: a directory with PEFT's files, or an id on the hub; max_lora_rank bounds its rank.
    """

    lora: str | None = None


ADAPTER = (AdapterOption, ["lora"])

# Every command takes --model; where no other argument is positional, MODEL may also be the first one.
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)
]
ModelOption = Annotated[str | None, option(EngineConfig, "model", "--model", default=DEFAULT_MODEL)]
SCHEMA_HELP = "Make the output JSON that fits this schema: a file, or the schema itself. [default: none]"
JsonSchema = Annotated[str | None, typer.Option(help=SCHEMA_HELP, rich_help_panel=OUTPUT)]
OBJECT_HELP = "Make the output a JSON object. [default: off]"
JsonObject = Annotated[bool, typer.Option("--json-object", help=OBJECT_HELP, rich_help_panel=OUTPUT)]
REGEX_HELP = "Make the output match this regular expression, in Rust's syntax. [default: none]"
Regex = Annotated[str | None, typer.Option(help=REGEX_HELP, rich_help_panel=OUTPUT)]
CHOICE_HELP = "Make the output one of these strings. Takes one value or several. [default: none]"
Choice = Annotated[list[str] | None, typer.Option(help=CHOICE_HELP, rich_help_panel=OUTPUT)]
GRAMMAR_HELP = """Make the output match this context-free grammar in EBNF: a file, or the grammar itself.
[default: none]"""
Grammar = Annotated[str | None, typer.Option(help=GRAMMAR_HELP, rich_help_panel=OUTPUT)]
TEMPLATE_HELP = """A Jinja template in place of the checkpoint's: a file, the template itself, the name of one
of several that the checkpoint has, or plain, which writes roles as words (often used with --stop User:).
[default: the checkpoint's]"""
ChatTemplate = Annotated[str | None, typer.Option(help=TEMPLATE_HELP, rich_help_panel=MODEL)]


UNKNOWN_OPTIONS = "the options of the earlier results in {} are not known; going on with those of this run"


class CliError(PagedError):
    """An error in the command line."""


class FailedError(PagedError):
    """A command failed: its answer ended with an error, or there was no answer."""


def complain(message: str) -> None:
    """Print a message to stderr as one line."""
    print("paged:", " ".join(message.split()), file=sys.stderr)


def require_server(command: str) -> None:
    """Raise ResourceError unless the packages that the server needs are installed."""
    for name in ("httptools", "msgspec", "prometheus_client", "starlette", "uvicorn", "uvloop", "yaml"):
        if find_spec(name) is None:  # importing all would take a tenth of a second
            raise ResourceError(
                f"{command} needs {name}, which is not installed: pip install 'paged[server]'"
            )


def launcher_of(ray: str | None, options: Mapping[str, Any], replicas: int) -> Launcher:
    """Return Ray's launcher of engine processes if `ray` is given, else the local one. Raises ConfigError."""
    from ..server.launcher import LocalLauncher

    if ray is None:
        return LocalLauncher()
    try:
        from ..ray.launcher import connect
    except ImportError:
        raise ClusterError("--ray needs ray, which is not installed: pip install 'paged[ray]'") from None
    return connect(ray or None, options, replicas)


def start(options: Mapping[str, Any]) -> LLMEngine:
    """Start an engine with these options and describe it on stderr."""
    # What imports and the engine create stays until the process ends. Looking for garbage in it would take a
    # third of the start and of the end.
    gc.disable()
    try:
        read_ahead(options["model"])
        from ..engine.engine import LLMEngine

        engine = LLMEngine(**options)
    finally:
        gc.freeze()
        gc.enable()
    print(engine.describe(), file=sys.stderr)
    return engine


def read_ahead(model: str) -> None:
    """Have the system read a local model's weights into the page cache meanwhile, if there is room."""
    path = Path(model)
    with suppress(OSError, ValueError, AttributeError):  # what is wrong is told later; macOS has no such call
        files = [path] if path.is_file() else [*path.glob("*.safetensors")]
        if sum(file.stat().st_size for file in files) > _free_bytes() // 2:
            return
        for file in files:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def driver_options(
    model: str | None, options: Mapping[str, Any], names: Iterable[str] = ENGINE[1]
) -> dict[str, Any]:
    """Return `engine_options` for a command that runs in this process.

    Under torchrun, this call returns only in rank 0. A process of another rank computes for rank 0 inside the
    call and exits when rank 0 ends.
    """
    result = engine_options(model, options, names)
    follow(result)
    return result


def take_adapter(options: dict[str, Any]) -> LoRARequest | None:
    """Return the request for the adapter of --lora; None if there is none.

    Adapters are enabled in these options.
    """
    path = options.pop("lora")
    if path is None:
        return None
    from ..options.lora_request import LoRARequest

    options["enable_lora"] = True
    return LoRARequest(path, 1, path)


def follow(options: Mapping[str, Any]) -> None:
    """Compute for rank 0 and exit, if torchrun started this process as another rank. Raises RankError."""
    config = EngineConfig(**options)
    if config.num_ranks == 1:
        return
    from ..ranks.place import follows

    if follows(config):
        from ..ranks.rank_process import follow_torchrun

        sys.exit(follow_torchrun(options))


def named(model: str | None) -> ModelEntry:
    """Look up a model by its name in models.toml, as `entry_of` does. None means the demo.

    Raises ConfigError if models.toml is wrong.
    """
    from ..checkpoints.library.models_file import ModelEntry, ModelsFile

    if model is None or model == DEFAULT_MODEL:
        return ModelEntry(name=DEFAULT_MODEL, checkpoint=DEFAULT_MODEL)
    from ..checkpoints.library.names import entry_of

    return entry_of(model, ModelsFile.of_user())


def one_model(argument: str | None, option: str | None) -> str | None:
    """Return the model given as an argument or as --model. Raises CliError if both are given and differ."""
    return one_of("model", "--model", argument, option)


def one_of(what: str, flag: str, argument: str | None, option: str | None) -> str | None:
    """Return the value given as an argument or by a flag. Raises CliError if both are given and differ."""
    if None not in (argument, option) and argument != option:
        raise CliError(f"the {what} is given twice, as {argument} and as {flag} {option}; leave one out")
    return argument if option is None else option


def given(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the named options that were given."""
    return {name: options[name] for name in names if options.get(name) not in (None, [], ())}


def engine_options(
    model: str | None, options: Mapping[str, Any], names: Iterable[str] = ENGINE[1]
) -> dict[str, Any]:
    """Return the named options as validated arguments of LLMEngine. Raises ConfigError.

    model: a name of models.toml too, whose options hold where none are given.
    """
    entry = named(model)
    known = {name: value for name, value in entry.engine.items() if name in {*names}}
    result = {"model": entry.checkpoint, **known, **given(options, names)}
    EngineConfig(**result)
    return result


def sampling_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of SamplingParams. Raises RequestError, CliError or OSError."""
    result = given(options, SAMPLING[1])
    if "logit_bias" in result:
        result["logit_bias"] = biases_of(map(_bias, result["logit_bias"]))
    structured = {
        "json": _text(options["json_schema"], is_file=lambda text: not text.lstrip().startswith("{")),
        "json_object": options["json_object"] or None,
        "regex": options["regex"],
        "choice": options["choice"] or None,
        "grammar": _text(options["grammar"], is_file=_names_a_file),
    }
    if any(value is not None for value in structured.values()):
        result["structured_outputs"] = StructuredOutputsParams(**structured)
    return result


def template_text(value: str | None) -> str | None:
    """Return the chat_template argument for `LLMEngine.chat`. Raises OSError if a file cannot be read."""
    # A template's name, unlike a file's, has neither a directory nor a suffix.
    return _text(
        value, is_file=lambda text: "{" not in text and (_names_a_file(text) or "/" in text or "." in text)
    )


def _bias(text: str) -> tuple[str, float]:
    token_id, _, bias = text.partition("=")
    try:
        if token_id.isascii() and token_id.isdigit():
            return token_id, float(bias)
    except ValueError:
        pass
    raise CliError(f"--logit-bias must be ID=BIAS such as 42=-100; got {text!r}")


def _text(value: str | None, is_file: Callable[[str], bool]) -> str | None:
    return Path(value).read_text(encoding="utf-8") if value and is_file(value) else value


def _names_a_file(text: str) -> bool:
    # Path.is_file would raise for a text that is too long to be a file's name.
    return os.path.isfile(text)
