"""The fields of Ollama's bodies, and of their options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...base.errors import RequestError
from ...base.fields import Field, FieldTable, ObjectOf, ignored, refused
from ...base.json_kinds import Choice, JSONObject, ListOf, OneOf, Text
from ...base.kinds import Boolean, Integer, Kind, Number, Schema
from ...base.validation import check_int, shown
from ...chat.tools import MAX_TOOLS
from ..fields.common import KEEP_ALIVE
from ..fields.tools import TOOL_TABLE, TOOLS
from ..limits import MAX_MESSAGES, MAX_NAME_LENGTH, MAX_PROMPTS, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS

DEFAULT_LAST_N = 64  # of repeat_penalty, as in llama.cpp
_AT_LOAD = "the server decides how models are loaded"
OPTIONS = FieldTable(
    "options",
    [
        Field("num_predict", Integer(-2), "most tokens to generate; -1 and -2: up to the context's end"),
        Field("num_ctx", Integer(1), "most tokens of prompt and answer together, at most the loaded context"),
        Field("temperature", Number(0.0), "temperature"),
        Field("top_k", Integer(-1), "top_k; 0 and -1 turn it off"),
        Field("top_p", Number(0.0, 1.0), "top_p; 0 takes the most likely token"),
        Field("min_p", Number(0.0, 1.0), "min_p"),
        Field("typical_p", Number(0.0, 1.0), "typical_p; 1 turns it off"),
        Field("repeat_penalty", Number(0.0), "repetition_penalty of the last tokens; 0 turns it off"),
        Field(
            "repeat_last_n",
            Integer(-1),
            "at how many last tokens repeat_penalty looks, by default 64; -1 takes all, 0 none",
        ),
        Field("presence_penalty", Number(-2.0, 2.0), "presence_penalty"),
        Field("frequency_penalty", Number(-2.0, 2.0), "frequency_penalty"),
        Field("seed", Integer(-1), "seed; -1 takes none"),
        Field(
            "stop", OneOf((Text(1), ListOf(Text(1), longest=MAX_STOP_STRINGS))), "texts that end the answer"
        ),
        *refused("mirostat", "it is not implemented; see min_p", 0),
        *refused("tfs_z", "it is not implemented; see min_p", 1, 1.0),
        *ignored("mirostat_tau mirostat_eta", "mirostat is not implemented"),
        *ignored("penalize_newline", "newlines count as other tokens"),
        *ignored("num_keep", "no tokens of a conversation are dropped"),
        *ignored("numa num_batch num_gqa num_gpu main_gpu num_thread", _AT_LOAD),
        *refused("rope_frequency_base rope_frequency_scale", "the checkpoint's own are taken"),
        *ignored("low_vram f16_kv use_mmap use_mlock", _AT_LOAD),
        *refused("logits_all vocab_only embedding_only", _AT_LOAD, False),
    ],
)


class FormatKind(Kind):
    """A JSON schema, "json", or "" for none."""

    types = (str, dict)
    _object = JSONObject('{"type": "object"}')

    def parse(self, name: str, value: Any) -> Any:
        if isinstance(value, str):
            if value not in ("", "json"):
                raise RequestError(f'{name} must be "json", a JSON schema, or empty; got {shown(value)}')
            return value
        return self._object.parse(name, value)

    def schema(self) -> Schema:
        return {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]}

    def __str__(self) -> str:
        return '"json", or a JSON schema'


class ThinkKind(Kind):
    """Whether to think, or how much."""

    types = (bool, str)
    _levels = Choice(("low", "medium", "high", "max"))

    def parse(self, name: str, value: Any) -> Any:
        return value if isinstance(value, bool) else self._levels.parse(name, value)

    def schema(self) -> Schema:
        return {"anyOf": [{"type": "boolean"}, self._levels.schema()]}

    def __str__(self) -> str:
        return f"boolean, or {self._levels}"


MODEL = Field("model", Text(1, MAX_NAME_LENGTH), "a name of the model, perhaps with :latest", required=True)
_IMAGES = [Field("images", ListOf(Text(1)), "images in base64, which stand before the text")]
_STREAM = Field("stream", Boolean(), "send lines of JSON while the answer is generated, by default true")
_THINK = Field("think", ThinkKind(), "enable_thinking, or reasoning_effort, of the template")
_ANSWER = [
    _STREAM,
    Field("format", FormatKind(), 'the JSON schema of the answer, or "json"'),
    Field("options", ObjectOf(OPTIONS), "how to sample, by Ollama's names"),
    KEEP_ALIVE,
    _THINK,
    Field("logprobs", Boolean(), "report the log-probability of every token"),
    Field(
        "top_logprobs",
        Integer(0, MAX_TOP_LOGPROBS),
        "report this many most likely tokens at each position, too; needs logprobs",
    ),
    *ignored(
        "truncate shift", "nothing is cut from a prompt, and no tokens are dropped; too long is an error"
    ),
    *refused("_debug_render_only", "see /apply-template", False),
]
_CALLED = FieldTable(
    "a called function",
    [
        Field("name", Text(1), "its name", required=True),
        Field("arguments", OneOf((JSONObject('{"city": "Paris"}'), Text())), "its arguments"),
    ],
    is_open=True,
)
_CALL = FieldTable(
    "a call",
    [
        Field("id", Text(), "what the tool_call_id of its answer repeats"),
        Field("type", Choice(("function",)), "what is called"),
        Field("function", ObjectOf(_CALLED), "the function, and with what it was called", required=True),
    ],
    is_open=True,
)
MESSAGE = FieldTable(
    "a message",
    [
        Field("role", Text(1), "system, user, assistant or tool", required=True),
        Field("content", Text(), "the text"),
        Field("thinking", Text(), "the assistant's reasoning"),
        Field("tool_calls", ListOf(ObjectOf(_CALL)), "calls that the assistant made"),
        Field("tool_name", Text(), "the function whose result a tool's message has"),
        Field("name", Text(), "the older name of tool_name"),
        Field("tool_call_id", Text(), "the call that a tool's message answers"),
        *_IMAGES,
    ],
)
_TYPE, _FUNCTION = TOOL_TABLE.fields
TOOL = FieldTable(
    "a tool", [replace(_TYPE, required=False), _FUNCTION, *ignored("items", "a tool is a function")]
)
CHAT = FieldTable(
    "/api/chat",
    [
        MODEL,
        Field(
            "messages",
            ListOf(ObjectOf(MESSAGE), longest=MAX_MESSAGES),
            "the conversation; without any the model is loaded, or with keep_alive 0 unloaded",
        ),
        replace(TOOLS, kind=ListOf(ObjectOf(TOOL), longest=MAX_TOOLS)),
        *_ANSWER,
    ],
)
GENERATE = FieldTable(
    "/api/generate",
    [
        MODEL,
        Field("prompt", Text(), "the text; without it the model is loaded, or with keep_alive 0 unloaded"),
        Field("system", Text(), "the system prompt"),
        Field("raw", Boolean(), "complete the prompt as it is, without the chat template"),
        *refused("context", "send the conversation to /api/chat", []),
        *refused("suffix", "see /infill", ""),
        *refused("template", "Go's templates are not read; models.toml has a Jinja template of a model", ""),
        *refused("width height steps", "no images are generated"),
        *_IMAGES,
        *_ANSWER,
    ],
)
_INPUT = OneOf((Text(), ListOf(Text(1), 0, MAX_PROMPTS)))
EMBED = FieldTable(
    "/api/embed",
    [
        MODEL,
        Field("input", _INPUT, "the text to embed, or a list; an empty one loads the model", required=True),
        Field("truncate", Boolean(), "cut the end off what is longer than the context, by default true"),
        Field("dimensions", Integer(1), "keep so many of the first numbers of each vector"),
        *ignored("options", "none changes a vector"),
        KEEP_ALIVE,
    ],
)
EMBEDDINGS = FieldTable(
    "/api/embeddings",
    [
        MODEL,
        Field("prompt", Text(1), "the text to embed", required=True),
        *ignored("options", "none changes a vector"),
        KEEP_ALIVE,
    ],
)


def sampling_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of SamplingParams that Ollama's options stand for. Raises RequestError."""
    given: dict[str, Any] = {
        name: options[name]
        for name in ("temperature", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "stop")
        if name in options
    }
    if "top_k" in options:
        given["top_k"] = options["top_k"] or -1
    if "top_p" in options:
        given["top_p"] = options["top_p"] or 1.0
        if not options["top_p"]:
            given["top_k"] = 1
    if options.get("typical_p") == 0.0:
        given["typical_p"] = 1.0
    if options.get("seed", -1) >= 0:
        given["seed"] = check_int(RequestError, "options.seed", options["seed"], 0)
    penalty = options.get("repeat_penalty", 0.0)
    last_n = options.get("repeat_last_n", DEFAULT_LAST_N)
    if penalty not in (0, 1) and last_n != 0:
        given["repetition_penalty"] = penalty
        # Over all tokens, a step counts only its own.
        covers_all = "num_ctx" in options and last_n >= options["num_ctx"]
        given["repetition_penalty_last_n"] = -1 if covers_all else last_n
    num_predict = options.get("num_predict", -1)
    if num_predict == 0:
        raise RequestError(
            "options.num_predict 0 generates nothing; give -1 for no limit", param="options.num_predict"
        )
    if num_predict > 0:
        given["max_tokens"] = num_predict
    return given
