"""`paged chat`: a conversation in the terminal or through a pipe, one line per turn."""

from __future__ import annotations

import base64
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from ..architectures.generation_config import CHAT_DEFAULTS
from ..base.errors import PagedError, RequestError
from ..engine.async_base import STREAM_INTERVAL_S, check_interval, next_publish_time
from . import common
from .answers import Answers, ChatAnswer, EngineAnswers, ServerAnswers
from .api_client import ApiAddress, ApiClient, ApiError
from .chat_params import ChatParams, check_one_text
from .common import CliError
from .headings import MODEL
from .options import with_options

MARKER = ">>> "
CONTINUATION = "... "
SYSTEM_HELP = "The system message, before the first turn. [default: none]"
TEMPLATE_KWARGS_HELP = """More variables for the template as a JSON object, such as
{"enable_thinking": false}. [default: {}]"""
INTERVAL_HELP = """Longest time in seconds for which tokens are held back to be shown together, where showing
each by itself would take more than one percent of the time; 0 shows each."""
# What help shows where the defaults are not those of the API.
_DEFAULTS = {
    "max_tokens": "from generation_config.json, else to the context's end",
    **{name: f"from generation_config.json, else {value:g}" for name, value in CHAT_DEFAULTS.items()},
}
HELP = """\
/help           show this list
/reset          forget the conversation, but not the system message
/system TEXT    set the system message; without TEXT, remove it
/image FILE     show an image with the next turn
/retry          replace the last answer by another one
/params         show the sampling parameters, and where they come from
/params X=1 Y=  set X to 1, and take the default of Y again
/save FILE      write the conversation to FILE as JSON
/exit           leave, as Ctrl-D does
A line that ends in \\ continues on the next line. A line that begins with // is a turn that begins with /.
Ctrl-C stops an answer, a second one leaves."""


@with_options(
    (ApiAddress, ("url", "api_key")), common.SAMPLING, common.ENGINE, common.ADAPTER, defaults=_DEFAULTS
)
def chat(
    model: common.ModelArgument = None,
    model_option: common.ModelOption = None,
    system: Annotated[str | None, typer.Option(help=SYSTEM_HELP)] = None,
    chat_template: common.ChatTemplate = None,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help=TEMPLATE_KWARGS_HELP, rich_help_panel=MODEL)
    ] = None,
    json_schema: common.JsonSchema = None,
    json_object: common.JsonObject = False,
    regex: common.Regex = None,
    choice: common.Choice = None,
    grammar: common.Grammar = None,
    stream_interval_s: Annotated[float, typer.Option(help=INTERVAL_HELP)] = STREAM_INTERVAL_S,
    **options: Any,
) -> int:
    """Talk with a model, here or, with --url, on a server. /help lists the commands of the conversation."""
    structured: dict[str, Any] = {"json_schema": json_schema, "json_object": json_object}
    structured |= {"regex": regex, "choice": choice, "grammar": grammar}
    check_interval(stream_interval_s)
    name = common.one_model(model, model_option)
    sampling = common.sampling_options(options | structured)
    template: dict[str, Any] = {
        "chat_template": common.template_text(chat_template),
        "chat_template_kwargs": _variables(chat_template_kwargs),
    }
    if options["url"] is None:
        entry = common.named(name)
        sampling = {**entry.sampling, **sampling}
        if chat_template is None:
            template["chat_template"] = common.template_text(entry.template)
        system = entry.system if system is None else system
        lora_request = common.take_adapter(options)
        own = _of_engine(name, options, sampling, template)
        own.lora_request = lora_request
        answers: Answers = own
    elif options.pop("lora") is not None:
        raise CliError("--lora is for a model here; on a server an adapter is a model: give its name")
    else:
        answers = _of_server(name, options, sampling, template)
    return Chat(answers, system, stream_interval_s).run()


def _of_engine(
    model: str | None, options: Mapping[str, Any], sampling: Mapping[str, Any], template: Mapping[str, Any]
) -> EngineAnswers:
    """Start an engine that answers."""
    if options["api_key"] is not None:
        raise CliError("--api-key is for a server, whose address --url gives")
    engine_options = common.driver_options(model, options)
    check_one_text(sampling)
    engine = common.start(engine_options)
    engine.chat_templates.source(template["chat_template"])  # raises now if there is no template
    engine.params_of(sampling)  # raises now if a value does not go with the checkpoint's
    return EngineAnswers(engine, sampling, template)


def _of_server(
    model: str | None, options: Mapping[str, Any], sampling: Mapping[str, Any], template: Mapping[str, Any]
) -> ServerAnswers:
    """Find the server that answers."""
    of_engine = common.given(options, (name for name in common.ENGINE[1] if name != "seed"))
    if of_engine:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in of_engine)
        raise CliError(f"with --url the engine is the server's, which takes these options: {flags}")
    check_one_text(sampling)
    client = ApiClient(options["url"], options["api_key"])
    name, chat_defaults = _described(client, model)
    print(f"{name} at {client.url}", file=sys.stderr)
    params = ChatParams(sampling, checkpoint={}, chat=chat_defaults)
    fields = {name: value for name, value in template.items() if value}
    return ServerAnswers(client, {"model": name, **fields}, params, options["seed"])


def _described(client: ApiClient, model: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return a model's name, by default the first, and the parameters that its server says a chat takes.

    Raises ApiError if no name is given and the server lists none.
    """
    models: list[dict[str, Any]] = []
    with suppress(ApiError) if model is not None else nullcontext():  # some servers list none
        models = client.models()
    entry: dict[str, Any] = next((each for each in models if model in (None, each["id"])), {"id": model})
    defaults = entry.get("chat_defaults")
    known = defaults if isinstance(defaults, dict) else {}
    found = {name: known[name] for name in CHAT_DEFAULTS if isinstance(known.get(name), int | float)}
    return str(entry["id"]), found


class CommandError(CliError):
    """A command of the conversation that cannot be run. It does not change the conversation."""


def _variables(text: str | None) -> Mapping[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise CliError(f"--chat-template-kwargs must be JSON: {error}; got {text!r}") from error
    if not isinstance(value, dict):
        raise CliError(f"--chat-template-kwargs must be a JSON object, got {text!r}")
    return value


@dataclass(slots=True)
class _Interrupts:
    """Counts Ctrl-C since the last line was typed."""

    count: int = 0

    @contextmanager
    def counted(self, call: Callable[[], None]) -> Iterator[None]:
        """Count the first Ctrl-C instead of raising, and call. A second one ends the program."""

        def count(_signal: int, _frame: FrameType | None) -> None:
            self.count += 1
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            call()

        before = signal.signal(signal.SIGINT, count)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class Chat:
    """A conversation whose turns are read from stdin.

    stream_interval_s: the longest time in seconds for which tokens are held back to be shown together.
    """

    def __init__(self, answers: Answers, system: str | None, stream_interval_s: float) -> None:
        self._answers = answers
        self._system = system
        self._stream_interval_s = stream_interval_s
        self._turns: list[dict[str, Any]] = []
        self._images: list[dict[str, Any]] = []  # parts of the next turn
        self._interrupts = _Interrupts()
        self._interactive = sys.stdin.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/reset": lambda _: self._reset(),
            "/image": self._show,
            "/system": self._set_system,
            "/retry": lambda _: self._retry(),
            "/params": self._params,
            "/save": self._save,
        }

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns]

    def run(self) -> int:
        """Answer until stdin ends or the user quits. Return the exit code."""
        if self._interactive:
            with suppress(ImportError):  # gives input() history and editing keys
                import readline  # noqa: F401
            print("/help lists the commands; Ctrl-D leaves", file=sys.stderr)
        code = 0
        while (line := self._read()) is not None:
            try:
                if not self._take(line):
                    break
            except (PagedError, OSError) as error:
                # Through a pipe a missing turn would go unnoticed, and later turns may depend on it.
                if not self._interactive and not isinstance(error, CommandError):
                    raise
                common.complain(str(error))
                code = 0 if self._interactive else common.EXIT_FAILED
        return code

    def _take(self, line: str) -> bool:
        """Run a line as a command or a turn. Return False if it ends the conversation."""
        command, _, argument = line.partition(" ")
        if not line.strip():
            return True
        if line.startswith("/") and not line.startswith("//"):
            if command in ("/exit", "/quit", "/bye"):
                return False
            if command not in self._commands:
                raise CommandError(
                    f"there is no command {command!r}; /help lists them, // begins a turn with /"
                )
            self._commands[command](argument.strip())
        else:
            self._ask(line.removeprefix("/") if line.startswith("//") else line)
        return True

    # Reading

    def _read(self) -> str | None:
        """Read a line with its continuation lines. Return None at the end of stdin."""
        lines = [self._read_line(MARKER)]
        while lines[-1] is not None and lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read_line(CONTINUATION))
        if lines[0] is None:
            return None
        return "\n".join(line for line in lines if line is not None)

    def _read_line(self, marker: str) -> str | None:
        if not self._interactive:
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while True:
                try:
                    line = input(marker)
                except EOFError:
                    print()
                    return None
                except KeyboardInterrupt:
                    print()
                    self._interrupts.count += 1
                    if self._interrupts.count > 1:
                        return None
                    print("Ctrl-C again, Ctrl-D or /exit leaves", file=sys.stderr)
                else:
                    self._interrupts.count = 0
                    return line
        finally:
            signal.signal(signal.SIGINT, before)

    # Commands

    def _reset(self) -> None:
        self._turns.clear()
        self._images.clear()

    def _set_system(self, text: str) -> None:
        self._system = text or None

    def _show(self, file: str) -> None:
        """Show an image with the next turn."""
        if not file:
            raise CommandError("/image needs a file")
        from ..text.images import bytes_of_file, is_file_url, is_remote, path_of_url

        url = file
        if not is_remote(file):
            try:
                path = path_of_url("/image", file) if is_file_url(file) else file
                data = bytes_of_file("/image", Path(path).expanduser())
            except RequestError as error:
                raise CommandError(str(error)) from error
            url = f"data:;base64,{base64.b64encode(data).decode()}"
        self._images.append({"type": "image_url", "image_url": {"url": url}})

    def _save(self, file: str) -> None:
        if not file:
            raise CommandError("/save needs a file to write to")
        text = json.dumps(self.messages, ensure_ascii=False, indent=2)
        try:
            Path(file).expanduser().write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise CommandError(f"/save: {file}: {error.strerror}") from error

    def _params(self, text: str) -> None:
        try:
            self._answers.params.set(text)
        except CliError as error:
            raise CommandError(str(error)) from error
        if not text:
            print(self._answers.params.describe())

    def _retry(self) -> None:
        if not self._turns:
            raise CliError("there is no answer yet to try again")
        question, answer = self._turns[-2:]
        del self._turns[-2:]
        try:
            self._ask(question["content"])
        except PagedError:
            self._turns += [question, answer]
            raise

    # Answers

    def _ask(self, given: str | list[dict[str, Any]]) -> None:
        """Answer a turn, with the images that are to be shown. If that fails, the turn is removed."""
        content: str | list[dict[str, Any]] = given
        if self._images and isinstance(given, str):
            content = [*self._images, {"type": "text", "text": given}]
        self._images = []
        self._turns.append({"role": "user", "content": content})
        try:
            answer = self._answer()
        except BaseException:
            del self._turns[-1]
            raise
        reasoning = {"reasoning": answer.reasoning} if answer.reasoning else {}
        self._turns.append({"role": "assistant", "content": answer.content, **reasoning})

    def _answer(self) -> ChatAnswer:
        """Stream the answer to stdout and its reasoning to stderr. Return it, or the part before Ctrl-C."""
        answer = shown = ChatAnswer()
        answers = self._answers
        with self._interrupts.counted(answers.give_up) if self._interactive else nullcontext():
            print_at = -math.inf
            with closing(answers.stream(self.messages)) as growing:
                try:
                    for answer in growing:
                        started = time.monotonic()
                        if started >= print_at:
                            _print_more(answer, shown)
                            shown = answer
                            print_at = next_publish_time(started, time.monotonic(), self._stream_interval_s)
                        if self._interrupts.count:
                            break
                except PagedError:
                    if answer.content:
                        _print_more(answer, shown, end="\n")
                    raise
        _print_more(answer, shown, end="\n")
        answers.report_end()
        return answer


def _print_more(answer: ChatAnswer, shown: ChatAnswer, end: str = "") -> None:
    """Print what an answer has more than is shown of it: reasoning to stderr, and dim in a terminal."""
    if more := answer.reasoning[len(shown.reasoning) :]:
        print(f"\x1b[2m{more}\x1b[0m" if sys.stderr.isatty() else more, end="", file=sys.stderr, flush=True)
    if answer.reasoning and answer.content and not shown.content:
        print(file=sys.stderr, flush=True)
    print(answer.content[len(shown.content) :], end=end, flush=True)
