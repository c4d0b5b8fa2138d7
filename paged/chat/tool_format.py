"""ToolFormat: the parser of calls of one chat format, and the structural tags that force them.

ForcedCalls: the calls of an answer which a grammar makes calls and nothing else, also when it is cut.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from .call_parser import CallParser
from .forced_arguments import (
    Format,
    any_arguments,
    arguments_of,
    either,
    in_slashes,
    optional,
    sequence,
    tag,
    text,
)
from .formats import JSON_CALLS, CallSyntax, ChatSyntax
from .harmony import CHANNEL, MESSAGE, ROLE, TOKENS, HarmonyParser
from .parts import ContentDelta, OutputParser, Part, ToolArgumentsDelta, ToolCallStart
from .tool_prompts import Message, ToolPrompt
from .tools import ANY_OBJECT, MAX_CALLS, Tool
from .writing import written_arguments, written_call

_NAME_GOES_ON = re.compile(r"[A-Za-z0-9_-]{2}")


class ForcedCalls:
    """Finds the calls in an answer that consists of calls only.

    max_tokens or a stop string may cut the answer anywhere. Text outside arguments then belongs to the
    beginning or the end of a call, not to content. If that text contains a tool's name, it is reported as a
    call without arguments.

    calls: the parser of the calls.
    opening: the text before the first call.
    begins: for each tool name, the text of its call up to the arguments.
    name_at: the position of the name in each of these texts.
    new_id: makes the id of a call.
    """

    def __init__(
        self,
        calls: OutputParser,
        opening: str,
        begins: Mapping[str, str],
        name_at: int,
        new_id: Callable[[], str],
    ) -> None:
        self._calls = calls
        self._opening = opening
        self._begins = begins
        self._name_at = name_at
        self._new_id = new_id
        self._num_calls = 0
        self._rest = ""  # text after the last call that is in no call
        self._is_begun = self._is_cut = False

    @property
    def has_whole_calls(self) -> bool:
        """Whether the answer has a call, and the arguments of all its calls are complete."""
        return self._calls.has_whole_calls and not self._is_cut

    def feed(self, text: str) -> list[Part]:
        """Take more text. Return the parts of the answer that are certain."""
        self._is_begun = self._is_begun or bool(text)
        return self._without_rest(self._calls.feed(text))

    def finish(self) -> list[Part]:
        """End the text. Return the remaining parts."""
        parts = self._without_rest(self._calls.finish())
        if any(isinstance(part, ToolCallStart) for part in parts):
            # The parser took the end of the text for a call without arguments.
            self._is_cut = True
            return [part for part in parts if not isinstance(part, ToolArgumentsDelta)]
        name = self._cut_name()
        if name is not None:
            self._is_cut = True
            parts.append(ToolCallStart(self._num_calls, self._new_id(), name))
        return parts

    def _without_rest(self, parts: list[Part]) -> list[Part]:
        """Keep text outside of calls, unless arguments have stopped being JSON: then it is content."""
        kept = list[Part]()
        for part in parts:
            if isinstance(part, ToolCallStart):
                self._num_calls += 1
                self._rest = ""
            if isinstance(part, ContentDelta) and (not self._num_calls or self._calls.has_whole_calls):
                self._rest += part.text
            else:
                kept.append(part)
        return kept

    def _cut_name(self) -> str | None:
        """Return the tool whose call the rest begins; None if it begins none, or does not tell which."""
        names = [*self._begins]
        length = 0
        opening = "" if self._num_calls else self._opening
        for start in range(len(self._rest)):
            text = self._rest[start:]
            found = self._begun_by(text, opening) or self._begun_by(text, "")
            if found:
                names = found
                length = len(text)
                break
        if len(names) != 1 or not self._is_begun:
            return None
        # A first call must come. The rest of a later one may be the end of the call before it.
        return names[0] if not self._num_calls or length >= max(self._name_at, 1) else None

    def _begun_by(self, text: str, opening: str) -> list[str]:
        """Return the tools whose call a text begins, or goes on with after its name."""
        begins = {name: opening + begin for name, begin in self._begins.items()}
        return [
            name
            for name, begin in begins.items()
            if begin.startswith(text)
            or (text.startswith(begin) and not _NAME_GOES_ON.match(text, len(begin) - 1))
        ]


ALPHANUMERIC = string.ascii_letters + string.digits
FINAL = f"{CHANNEL}final{MESSAGE}"
PREAMBLE = f"{CHANNEL}commentary{MESSAGE}"
_END = "<|end|>"


class ToolFormat:
    """How a model writes tool calls.

    entry: the format's entry in the table of formats.
    template: the chat template, which selects the variant.
    special_tokens: the special tokens of the tokenizer.
    """

    def __init__(self, entry: ChatSyntax, template: str = "", special_tokens: Collection[str] = ()) -> None:
        self.entry = entry
        self.syntax: CallSyntax = entry.calls(template)
        self._special_tokens = frozenset(special_tokens)

    @property
    def name(self) -> str:
        """The name of the format."""
        return self.entry.name

    @property
    def has_channels(self) -> bool:
        """Whether an answer consists of messages with channels."""
        return self.entry.has_channels

    @property
    def markers(self) -> list[str]:
        """Texts that may be special tokens; outputs must then keep special tokens in their text."""
        if self.has_channels:
            return [*TOKENS]
        return self.syntax.markers

    # Reading

    def new_parser(
        self, tools: Sequence[Tool], prompt: str, *, is_split: bool = True, is_forced: bool = False
    ) -> OutputParser:
        """Return a parser for one answer to a prompt, which may call these tools.

        is_split: whether reasoning in a channel of its own is separated from content.
        """
        if self.has_channels:
            names = [tool.name for tool in tools]
            return HarmonyParser(names, self.new_id, prompt, is_split=is_split, keeps_header=is_forced)
        # Where any answer may begin with calls, <|python_tag|> means something only if it is a token.
        left_out = () if self.syntax.begin else frozenset(self.syntax.also) - self._special_tokens
        # The first variant reads the others, too.
        return CallParser(self.entry.variants[0][1], tools, self.new_id, left_out)

    def new_forced_parser(self, tools: Sequence[Tool], prompt: str, *, is_split: bool = True) -> OutputParser:
        """Return a parser for one answer in the format that `calls` returns."""
        begins = {tool.name: self.syntax.begun(tool.name) for tool in tools}
        calls = self.new_parser(tools, prompt, is_split=is_split, is_forced=True)
        return ForcedCalls(calls, self.syntax.section[0], begins, len(self.syntax.before_name), self.new_id)

    def new_id(self) -> str:
        """Return an id for a call."""
        if self.entry.id_length is not None:
            return "".join(secrets.choice(ALPHANUMERIC) for _ in range(self.entry.id_length))
        return f"call_{secrets.token_hex(12)}"

    # Showing tools to a model whose template does not

    def messages_with(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, shows_system: bool
    ) -> list[Message]:
        """Return a conversation in which plain messages describe tools, calls and results."""
        opening, closing = self.syntax.section
        prompt = ToolPrompt(self._example, opening, self.syntax.separator, closing)
        written = partial(written_call, self.syntax)
        return prompt.messages(messages, tools, written, shows_system=shows_system)

    @property
    def _example(self) -> str:
        """A call with <name> in place of its tool's, and <arguments> or one of them."""
        if self.syntax.arguments in ("json", "gemma"):
            return self.syntax.written("<name>", "<arguments>")
        return self.syntax.written("<name>", written_arguments(self.syntax, {"<key>": "<value>"}))

    # Forcing

    def calls(self, tools: Sequence[Tool], *, is_single: bool) -> Format:
        """Return the format of one call, or of 1 to MAX_CALLS calls. Arguments match their schemas."""
        syntax = self.syntax
        tags = [self._call(tool) for tool in tools]
        if self.has_channels:
            return either(*tags)  # an answer ends with its first call
        content = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": syntax.separator,
            "at_least_one": True,
            "stop_after_first": is_single,
            "max_tags": MAX_CALLS,
        }
        return tag(syntax.section[0], content, syntax.section[1]) if any(syntax.section) else content

    def text_with_calls(self, tools: Sequence[Tool], *, is_single: bool, reasoning: Iterable[str]) -> Format:
        """Return the format of text with calls, perhaps none. A single call ends the text.

        The arguments of strict tools match their schemas; other tools get any object.

        reasoning: texts that begin reasoning.
        """
        syntax = self.syntax
        loose = [tool if tool.strict else Tool(tool.name, ANY_OBJECT, place=None) for tool in tools]
        if self.has_channels:
            preamble = optional(sequence(tag(PREAMBLE, {"type": "any_text"}, _END), text(ROLE)))
            final = sequence(text(FINAL), {"type": "any_text"})
            return either(final, sequence(preamble, self.calls(loose, is_single=True)))
        calls = self.calls(loose, is_single=is_single)
        if not syntax.begin:
            known = [word for word in syntax.also if word in self._special_tokens]
            return either(
                _text_that_is_no_call(self._beginning(tools), [*syntax.also, *reasoning]),
                calls,
                *(sequence(text(word), calls) for word in known),
            )
        is_list = any(syntax.section)
        return {
            "type": "triggered_tags",
            "triggers": [syntax.begin],
            "tags": [calls] if is_list else [self._call(tool) for tool in loose],
            "stop_after_first": is_single or is_list,
            "max_tags": MAX_CALLS,
        }

    def _call(self, tool: Tool) -> Format:
        """Return the format of one call."""
        syntax = self.syntax
        if syntax.arguments == "json":
            content = {"type": "json_schema", "json_schema": tool.parameters, "name": tool.place}
        elif tool.parameters == ANY_OBJECT:
            content = any_arguments(syntax)
        else:
            content = arguments_of(syntax, tool)
        # In Harmony a token that ends the answer follows, whichever the model chooses.
        return tag(syntax.begun(tool.name), content, "" if self.has_channels else syntax.after_arguments)

    def _beginning(self, tools: Sequence[Tool]) -> str:
        """Return an expression of what begins calls at the beginning of an answer."""
        opening = self.syntax.section[0] + self.syntax.before_name
        if opening:
            return re.escape(opening[0])
        names = "|".join(re.escape(tool.name) for tool in tools)
        return rf"({names})[ \t\r]*\n"


JSON_FORMAT = ToolFormat(JSON_CALLS)


def _text_that_is_no_call(begin: str, words: Iterable[str]) -> Format:
    """Return the format of text that does not begin as a call does, also after blanks.

    words: texts that begin calls or reasoning anywhere, which the text does not have.
    """
    without = [rf"~/(.|\n)*{in_slashes(word)}(.|\n)*/" for word in words]
    without.append(rf"~/[ \t\n\r]*{begin}(.|\n)*/")
    return {"type": "grammar", "grammar": f"start: TEXT\nTEXT: /(.|\\n)*/ & {' & '.join(without)}\n"}
