"""The fields that several request bodies share, and priorities: a number, or one of its names."""

from __future__ import annotations

from typing import Any

from ...base.durations import parse_duration
from ...base.fields import Field, FieldTable, ObjectOf, ignored, refused
from ...base.json_kinds import Choice, JSONObject, ListOf, OneOf, PrintableText, Text, TokenIds
from ...base.kinds import Boolean, Kind, Number, Schema
from ..limits import MAX_NAME_LENGTH, MAX_PROMPTS, MAX_REQUEST_ID_LENGTH

# A lower number goes first.
PRIORITIES = {"high": -10.0, "normal": 0.0, "low": 10.0}


class PriorityKind(Kind):
    """A number, or a name in PRIORITIES, which is converted to its number."""

    types = (int, float, str)
    _kinds = OneOf((Number(), Choice(tuple(PRIORITIES))))

    def parse(self, name: str, value: Any) -> float:
        found, _ = self._kinds.parts(name, value)
        return PRIORITIES[found] if isinstance(found, str) else found

    def schema(self) -> Schema:
        return self._kinds.schema()

    def __str__(self) -> str:
        return str(self._kinds)


class DurationKind(Kind):
    """A time as Ollama takes it, which is parsed to seconds; inf for ever."""

    types = (int, float, str)

    def parse(self, name: str, value: Any) -> float:
        return parse_duration(name, value)

    def schema(self) -> Schema:
        return {"type": ["number", "string"]}

    def __str__(self) -> str:
        return 'number of seconds, or a string such as "5m"'


KEEP_ALIVE = Field(
    "keep_alive",
    DurationKind(),
    "how long the model stays loaded after the request, where a server has several: seconds, or "
    '"10m", 0 for not at all, -1 for ever',
)
STREAM_OPTIONS = FieldTable(
    "stream_options",
    [
        Field("include_usage", Boolean(), "send the counts of tokens in a last chunk"),
        Field("continuous_usage_stats", Boolean(), "send the counts of tokens so far with every chunk"),
        *ignored("include_obfuscation", "chunks are not padded"),
    ],
)
ADD_SPECIAL_TOKENS = Field(
    "add_special_tokens", Boolean(), "add the special tokens of the checkpoint to a prompt that is text"
)
# One prompt or several, each a text or token ids.
PROMPTS = OneOf((Text(1), TokenIds(1), ListOf(Text(1), 1, MAX_PROMPTS), ListOf(TokenIds(1), 1, MAX_PROMPTS)))
# In every body.
COMMON_FIELDS = [
    Field("model", Text(longest=MAX_NAME_LENGTH), "a name of the model; any model if it is not given"),
    Field(
        "user",
        Text(longest=MAX_NAME_LENGTH),
        "the tenant; scheduling_policy: fair divides the engine among tenants",
    ),
    Field(
        "request_id",
        PrintableText(1, MAX_REQUEST_ID_LENGTH),
        "the id of the request, from which those of responses are made",
    ),
    KEEP_ALIVE,
    *ignored("safety_identifier", "user names the tenant"),
    *ignored("session_id", "requests with common prefixes share blocks by themselves"),
    *refused("mm_processor_kwargs", "/v1/chat/completions takes it; else the engine's is for all images", {}),
    *refused("media_io_kwargs", "images are read as the engine's options say", {}),
    *refused("lora_request", "a LoRA adapter is chosen by its name as model: see docs/lora.md"),
]
UNSTORED_FIELDS = [*ignored("metadata store", "nothing is stored")]
# In the bodies whose answers are not stored.
BASE_FIELDS = [*COMMON_FIELDS, *UNSTORED_FIELDS]
# In the bodies of chats whose images may be processed in another way.
SEEING_FIELDS = [
    *(field for field in BASE_FIELDS if field.name != "mm_processor_kwargs"),
    Field(
        "mm_processor_kwargs",
        JSONObject('{"max_pixels": 500000}'),
        "values that replace the engine's and the checkpoint's for the images of this request",
    ),
]
# In the bodies that generate in OpenAI's form.
ANSWER_FIELDS = [
    Field("stream", Boolean(), "send the answer as server-sent events while it is generated"),
    Field("stream_options", ObjectOf(STREAM_OPTIONS), "which counts of tokens a stream has; needs stream"),
    Field("return_token_ids", Boolean(), "return the token ids of prompt and output"),
    Field(
        "return_tokens_as_token_ids",
        Boolean(),
        'name the tokens of log-probabilities "token_id:5", which tells apart those of equal text',
    ),
    *ignored("service_tier", "all requests are served alike; see priority"),
    *ignored("prompt_cache_key prompt_cache_retention prompt_cache_options", "prefixes are always cached"),
    *ignored("prediction", "predicted outputs are not used to speed up decoding"),
    *ignored("moderation", "nothing is moderated"),
]
EFFORTS = Choice(("none", "minimal", "low", "medium", "high", "xhigh", "max"))
TEMPLATE_KWARGS = Field(
    "chat_template_kwargs", JSONObject('{"enable_thinking": false}'), "variables for the template"
)
INCLUDE_REASONING = Field(
    "include_reasoning", Boolean(), "return the reasoning before the answer, by default true"
)
NO_THINKING_FIELD = refused("enable_thinking", 'its place is chat_template_kwargs: {"enable_thinking": ...}')
# In the bodies of chats.
TEMPLATE_FIELDS = [
    Field("add_generation_prompt", Boolean(), "end the prompt with the header of an answer"),
    Field(
        "continue_final_message",
        Boolean(),
        "continue the last message instead of answering it; needs add_generation_prompt: false",
    ),
    Field(
        "chat_template",
        Text(1),
        "a Jinja template or the name of one of the checkpoint's; only with --trust-request-chat-template",
    ),
    TEMPLATE_KWARGS,
    Field("documents", ListOf(JSONObject('{"title": ..., "text": ...}')), "documents for the template"),
    Field("reasoning_effort", EFFORTS, "a variable for the template"),
]
ENCODING_FORMAT = Choice(("float", "base64"))
