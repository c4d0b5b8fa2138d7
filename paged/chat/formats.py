"""The table of chat formats: how each family of models writes reasoning and tool calls.

An entry is data. From it come the streaming parser (`call_parser`), the grammar that forces calls
(`tool_format`), the choice of a format by the chat template (`chat_format`) and the table of
docs/tool-calls.md. docs/add-a-chat-format.md shows how to add one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Arguments = Literal["json", "tagged", "python", "gemma"]
_SLOT = re.compile(r"\$(name|arguments|key|value)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How a model writes the calls of an answer.

    call: one call as the model writes it, with $name and $arguments. A blank in it matches any blanks.
    begin: the text that begins calls, often a special token; "": calls begin only at the start of the answer.
    also: other texts that begin calls. They are read, but never forced.
    section: the texts before and after all calls of an answer.
    separator: the text between two calls.
    arguments: the notation of arguments. "json": a JSON object. "tagged": one element for each parameter.
        "python": keyword arguments with Python literals. "gemma": Gemma's braces with bare keys.
    parameter: one element of tagged arguments, with $key and $value.
    quote: the quotation mark around texts in Gemma's braces.
    identity: the text between a call's name and its id; "" if calls have no ids.
    """

    call: str
    begin: str = ""
    also: Sequence[str] = ()
    section: tuple[str, str] = ("", "")
    separator: str = ""
    arguments: Arguments = "json"
    parameter: str = ""
    quote: str = ""
    identity: str = ""

    @property
    def before_name(self) -> str:
        """The text of a call before its tool's name."""
        return _SLOT.split(self.call)[0]

    @property
    def after_name(self) -> str:
        """The text between the name and the arguments."""
        return _SLOT.split(self.call)[2]

    @property
    def after_arguments(self) -> str:
        """The text after the arguments."""
        return _SLOT.split(self.call)[4]

    @property
    def parameter_texts(self) -> tuple[str, str, str]:
        """The texts of a tagged parameter: before its key, between key and value, and after the value."""
        before, _, between, _, after = _SLOT.split(self.parameter)
        return before, between, after

    @property
    def markers(self) -> list[str]:
        """The texts that mark calls and their parts, without surrounding blanks."""
        texts = [self.begin, *self.also, self.quote, self.identity, *self.section]
        texts += re.split(r"\$\w+", f"{self.call} {self.parameter}")
        return [word for text in texts for word in text.split() if not word.isalnum()]

    @property
    def is_object(self) -> bool:
        """Whether a call is a JSON object with the tool's name as a member."""
        return self.before_name.endswith('"name": "')

    def begun(self, name: str) -> str:
        """Return the text of a call up to its arguments."""
        return f"{self.before_name}{name}{self.after_name}"

    def written(self, name: str, arguments: str) -> str:
        """Return the text of a call."""
        return f"{self.begun(name)}{arguments}{self.after_arguments}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningSyntax:
    """How a model marks reasoning, which comes before its answer.

    begins, ends: the texts before and after reasoning. A grammar writes the first of each.
    answer: the texts before and after the answer that follows the reasoning; they belong to neither.
    has_channels: whether each message of an answer names its channel, as in Harmony.
    """

    name: str
    begins: Sequence[str]
    ends: Sequence[str]
    answer: tuple[str, str] = ("", "")
    has_channels: bool = False

    @property
    def markers(self) -> list[str]:
        """All texts that mark reasoning or answer, without surrounding blanks."""
        return [text.strip() for text in (*self.begins, *self.ends, *filter(None, self.answer))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSyntax:
    """A chat format.

    name, aliases: values of --tool-call-parser; the aliases are vLLM's names.
    families: the families of models that use the format, for the documentation.
    present, absent: texts that the chat templates of these families contain, and texts that they do not
        contain. Of a tuple of texts, a template contains at least one. The first format in the table that
        fits a template is taken.
    model_types: values of model_type in config.json that select the format if there is no template.
    variants: the ways to write calls. The first variant whose texts the template contains is taken, or else
        the last. The parser of the first variant reads the others too.
    ends: special tokens that end an answer, even if generation_config.json does not list them.
    reasoning: names of REASONINGS that these models have, for the documentation.
    id_length: the length of a call's id, if the templates demand one.
    has_channels: whether each message of an answer has a header with its channel, as in Harmony.
    """

    name: str
    families: str
    variants: Sequence[tuple[Sequence[str], CallSyntax]]
    aliases: Sequence[str] = ()
    present: Sequence[str | tuple[str, ...]] = ()
    absent: Sequence[str] = ()
    model_types: Sequence[str] = ()
    ends: Sequence[str] = ()
    reasoning: Sequence[str] = ()
    id_length: int | None = None
    has_channels: bool = False

    def fits(self, template: str) -> bool:
        """Return whether a chat template may belong to a model that writes this format."""
        return bool(self.marks_in(template))

    def marks_in(self, template: str) -> list[str]:
        """Return the texts of `present` that a fitting chat template contains; of another template none."""
        choices = [(texts,) if isinstance(texts, str) else texts for texts in self.present]
        found = [[text for text in texts if text in template] for texts in choices]
        is_other = any(text in template for text in self.absent)
        return [] if is_other or not all(found) else [text for texts in found for text in texts]

    def calls(self, template: str) -> CallSyntax:
        """Return how a model with this chat template writes calls."""
        found = (syntax for texts, syntax in self.variants if all(text in template for text in texts))
        return next(found, self.variants[-1][1])


def _only(syntax: CallSyntax) -> Sequence[tuple[Sequence[str], CallSyntax]]:
    return [((), syntax)]


THINK = ReasoningSyntax(name="think", begins=["<think>"], ends=["</think>"])
# The first whose beginning or end a template has.
REASONINGS: Sequence[ReasoningSyntax] = (
    ReasoningSyntax(
        name="harmony",
        begins=["<|channel|>analysis<|message|>"],
        ends=["<|end|>"],
        has_channels=True,
    ),
    ReasoningSyntax(name="gemma4", begins=["<|channel>thought\n", "<|channel>thought"], ends=["<channel|>"]),
    ReasoningSyntax(name="mistral", begins=["[THINK]"], ends=["[/THINK]"]),
    ReasoningSyntax(
        name="granite",
        begins=["Here is my thought process:", "Here's my thought process:"],
        ends=["Here is my response:", "Here's my response:"],
    ),
    ReasoningSyntax(
        name="granite_tags", begins=["<think>"], ends=["</think>"], answer=("<response>", "</response>")
    ),
    THINK,
)
_REASONING_ALIASES = {
    "openai_gptoss": "harmony",
    "openai": "harmony",
    **dict.fromkeys(
        (
            *("qwen3", "deepseek_r1", "deepseek_v3", "deepseek_v31", "glm45", "glm47", "minimax_m2", "olmo3"),
            *("minimax_m2_append_think", "hunyuan_a13b", "nemotron_v3", "holo2", "step3", "ernie45", "mimo"),
        ),
        "think",
    ),
}
# Parsers of vLLM under which an answer begins inside of reasoning even where the prompt does not say so.
BEGIN_INSIDE = ("deepseek_r1", "minimax_m2", "step3")

_NAMED_OBJECT = '{"name": "$name", "arguments": $arguments}'


def _deepseek(call: str, separator: str = "") -> CallSyntax:
    return CallSyntax(
        begin="<｜tool▁calls▁begin｜>",
        also=["<｜tool▁call▁begin｜>"],
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=call,
        separator=separator,
    )


# The most specific first.
CHAT_FORMATS: Sequence[ChatSyntax] = (
    ChatSyntax(
        name="harmony",
        families="gpt-oss",
        aliases=["openai", "openai_gptoss", "gpt_oss"],
        present=["<|channel|>", "<|message|>", "<|start|>"],
        model_types=["gpt_oss"],
        reasoning=["harmony"],
        has_channels=True,
        ends=["<|return|>", "<|call|>"],
        variants=_only(
            CallSyntax(
                call="<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments<|call|>"
            )
        ),
    ),
    ChatSyntax(
        name="gemma4",
        families="Gemma 4",
        present=["<|tool_call>call:"],
        model_types=["gemma4", "gemma4_text"],
        reasoning=["gemma4"],
        ends=["<turn|>", "<|tool_response>"],
        variants=_only(
            CallSyntax(
                begin="<|tool_call>",
                call="<|tool_call>call:$name$arguments<tool_call|>",
                arguments="gemma",
                quote='<|"|>',
            )
        ),
    ),
    ChatSyntax(
        name="minimax_m2",
        families="MiniMax-M2",
        present=["<minimax:tool_call>"],
        model_types=["minimax_m2"],
        reasoning=["think"],
        variants=_only(
            CallSyntax(
                begin="<minimax:tool_call>",
                section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
                call='<invoke name="$name">\n$arguments</invoke>\n',
                arguments="tagged",
                parameter='<parameter name="$key">$value</parameter>\n',
            )
        ),
    ),
    ChatSyntax(
        name="glm45",
        families="GLM-4.5 to 4.7",
        aliases=["glm45_moe", "glm47", "glm47_moe"],
        present=["<arg_key>", "<arg_value>"],
        model_types=["glm4_moe"],
        reasoning=["think"],
        ends=["<|user|>", "<|observation|>"],
        variants=[
            (
                ["</arg_key><arg_value>"],  # 4.7 puts nothing between the elements
                CallSyntax(
                    begin="<tool_call>",
                    call="<tool_call>$name$arguments</tool_call>",
                    arguments="tagged",
                    parameter="<arg_key>$key</arg_key><arg_value>$value</arg_value>",
                ),
            ),
            (
                [],
                CallSyntax(
                    begin="<tool_call>",
                    call="<tool_call>$name\n$arguments</tool_call>",
                    separator="\n",
                    arguments="tagged",
                    parameter="<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n",
                ),
            ),
        ],
    ),
    ChatSyntax(
        name="qwen3_coder",
        families="Qwen3-Coder, Qwen 3.5 and 3.6, Nemotron 3",
        aliases=["qwen3_xml", "qwen3_5", "mimo"],
        present=["<function=", "<parameter=", "<tool_call>"],
        reasoning=["think"],
        variants=_only(
            CallSyntax(
                begin="<tool_call>",
                also=["<function="],
                call="<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
                separator="\n",
                arguments="tagged",
                parameter="<parameter=$key>\n$value\n</parameter>\n",
            )
        ),
    ),
    ChatSyntax(
        name="deepseek_v3",
        families="DeepSeek V3, R1 and its distills",
        aliases=["deepseek_r1"],
        present=["<｜tool▁sep｜>", "```json"],
        reasoning=["think"],
        variants=_only(
            _deepseek(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
                "\n",
            )
        ),
    ),
    ChatSyntax(
        name="deepseek_v31",
        families="DeepSeek V3.1",
        present=["<｜tool▁sep｜>"],
        absent=["```json"],
        reasoning=["think"],
        variants=_only(_deepseek("<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>")),
    ),
    ChatSyntax(
        name="olmo3",
        families="OLMo 3",
        present=["<function_calls>"],
        model_types=["olmo3"],
        reasoning=["think"],
        variants=_only(
            CallSyntax(
                begin="<function_calls>",
                section=("<function_calls>", "</function_calls>"),
                call="$name($arguments)",
                separator="\n",
                arguments="python",
            )
        ),
    ),
    ChatSyntax(
        name="lfm2",
        families="LFM2 and 2.5",
        present=[("<|tool_list_start|>", "<|tool_call_start|>")],  # only some versions show both
        model_types=["lfm2", "lfm2_moe"],
        reasoning=["think"],
        variants=_only(
            CallSyntax(
                begin="<|tool_call_start|>",
                section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
                call="$name($arguments)",
                separator=", ",
                arguments="python",
            )
        ),
    ),
    ChatSyntax(
        name="nemotron_json",
        families="Nemotron-H and Nemotron Nano 2",
        present=["<TOOLCALL>"],
        reasoning=["think"],
        variants=_only(
            CallSyntax(
                begin="<TOOLCALL>",
                section=("<TOOLCALL>[", "]</TOOLCALL>"),
                call=_NAMED_OBJECT,
                separator=", ",
            )
        ),
    ),
    ChatSyntax(
        name="granite",
        families="Granite 3",
        present=["<|start_of_role|>"],
        absent=["</tool_call>"],
        reasoning=["granite_tags", "granite"],
        variants=_only(
            CallSyntax(
                begin="<|tool_call|>",
                also=["<tool_call>"],
                section=("<|tool_call|>[", "]"),
                call=_NAMED_OBJECT,
                separator=", ",
            )
        ),
    ),
    ChatSyntax(
        name="phi4_mini",
        families="Phi-4-mini",
        aliases=["phi4_mini_json"],
        present=["<|tool|>", "<|/tool|>"],
        reasoning=["think"],
        variants=_only(
            CallSyntax(
                begin="<|tool_call|>",
                also=["functools"],
                section=("<|tool_call|>[", "]<|/tool_call|>"),
                call=_NAMED_OBJECT,
                separator=", ",
            )
        ),
    ),
    ChatSyntax(
        name="mistral",
        families="Mistral and Ministral, v3 to v13",
        present=["[TOOL_CALLS]"],
        reasoning=["mistral"],
        id_length=9,
        variants=[
            (
                ["[CALL_ID]"],
                CallSyntax(
                    begin="[TOOL_CALLS]", call="[TOOL_CALLS]$name[ARGS]$arguments", identity="[CALL_ID]"
                ),
            ),
            (
                ["[ARGS]"],
                CallSyntax(
                    begin="[TOOL_CALLS]", call="[TOOL_CALLS]$name[ARGS]$arguments", identity="[CALL_ID]"
                ),
            ),
            (
                ["[TOOL_CALLS] ["],
                CallSyntax(
                    begin="[TOOL_CALLS]",
                    section=("[TOOL_CALLS] [", "]"),
                    call=_NAMED_OBJECT,
                    separator=", ",
                ),
            ),
            (
                [],
                CallSyntax(
                    begin="[TOOL_CALLS]",
                    section=("[TOOL_CALLS][", "]"),
                    call=_NAMED_OBJECT,
                    separator=", ",
                ),
            ),
        ],
    ),
    ChatSyntax(
        name="hermes",
        families="Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4, Falcon-H1",
        aliases=["qwen25", "granite4"],
        present=["<tool_call>", "</tool_call>"],
        reasoning=["think"],
        variants=_only(
            CallSyntax(
                begin="<tool_call>",
                call='<tool_call>\n{"name": "$name", "arguments": $arguments}\n</tool_call>',
                separator="\n",
            )
        ),
    ),
    ChatSyntax(
        name="llama_pythonic",
        families="Llama 3.2 and 4 with a template of Python's calls",
        aliases=["pythonic", "llama4_pythonic"],
        present=["func_name1(params_name1="],
        ends=["<|eom_id|>", "<|eom|>"],
        variants=_only(
            CallSyntax(
                also=["<|python_start|>", "<|python_tag|>"],
                section=("[", "]"),
                call="$name($arguments)",
                separator=", ",
                arguments="python",
            )
        ),
    ),
    ChatSyntax(
        name="llama3_json",
        families="Llama 3.1 to 3.3",
        aliases=["llama4_json", "llama3"],
        present=['"parameters"', "ipython"],
        ends=["<|eom_id|>"],
        variants=_only(
            CallSyntax(
                also=["<|python_tag|>"],
                call='{"name": "$name", "parameters": $arguments}',
                separator="; ",
            )
        ),
    ),
    ChatSyntax(
        name="glm4",
        families="GLM-4-0414",
        present=["[gMASK]", "<|observation|>"],
        model_types=["glm4"],
        reasoning=["think"],
        ends=["<|user|>", "<|observation|>"],
        variants=_only(CallSyntax(call="$name\n$arguments", separator="\n")),
    ),
    ChatSyntax(
        name="json",
        families="templates that show no tools (SmolLM2)",
        variants=_only(CallSyntax(section=("[", "]"), call=_NAMED_OBJECT, separator=", ")),
    ),
)
BY_NAME = {name: entry for entry in CHAT_FORMATS for name in (entry.name, *entry.aliases)}
REASONING_BY_NAME = {entry.name: entry for entry in REASONINGS}
REASONING_BY_NAME |= {name: REASONING_BY_NAME[target] for name, target in _REASONING_ALIASES.items()}
JSON_CALLS = BY_NAME["json"]

# The texts of all formats, and of results. A tokenizer has some of them as added tokens.
MARKERS = frozenset(
    [
        *(word for entry in CHAT_FORMATS for _, syntax in entry.variants for word in syntax.markers),
        *(word for reasoning in REASONINGS for word in reasoning.markers),
        *("<tool_response>", "</tool_response>"),
    ]
)


def formats_of(template: str, model_type: str | None = None) -> list[ChatSyntax]:
    """Return the formats that fit a chat template, best first; if none fits, the model type's formats."""
    fitting = [entry for entry in CHAT_FORMATS if entry.fits(template)]
    return fitting or [entry for entry in CHAT_FORMATS if model_type in entry.model_types]


def reasoning_of(template: str, calls: ChatSyntax | None) -> ReasoningSyntax | None:
    """Return how models with this chat template mark reasoning; None if the template does not show it.

    calls: the format of the model's calls.
    """
    for entry in REASONINGS:
        if entry.has_channels:
            found = calls is not None and calls.has_channels
        elif entry.answer != ("", ""):
            is_known = calls is not None and entry.name in calls.reasoning
            found = is_known and all(text in template for text in (entry.begins[0], entry.answer[0]))
        else:
            found = any(text.strip() in template for text in (*entry.begins, *entry.ends))
        if found:
            return entry
    if calls is not None and not calls.fits(template) and calls.reasoning:
        return REASONING_BY_NAME[calls.reasoning[0]]
    return None
