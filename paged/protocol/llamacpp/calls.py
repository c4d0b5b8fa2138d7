"""Calls of llama.cpp's own API: /completion, /infill and /apply-template."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...base.errors import RequestError
from ...base.fields import Field, FieldTable, ObjectOf, ignored, refused
from ...base.json_kinds import JSONObject, ListOf, OneOf, Text, TokenIds
from ...base.kinds import Boolean, Integer
from ...requests.request import Prompt, RequestOutput
from ..answers.chunks import Form, Head
from ..calls.call import AnswerCall, OwnNames
from ..calls.conversation import Conversation
from ..calls.tokens import TextCall
from ..fields.common import COMMON_FIELDS, TEMPLATE_FIELDS
from ..fields.images import with_images
from ..fields.messages import MESSAGES
from ..fields.sampling import check_most_logprobs, sampling_field
from ..fields.tools import TOOLS
from ..limits import MAX_PROMPTS, MAX_TOP_LOGPROBS, Limits
from ..ollama.fields import OPTIONS, sampling_of
from .answers import ManyNativeChunks, NativeChunks
from .fill import fill_tokens_of

if TYPE_CHECKING:
    from ...engine.model_text import ModelText
    from ...options.sampling_params import SamplingParams

MAX_FILES = 256  # of input_extra
MEDIA_MARKER = "<__media__>"  # stands for an image in a prompt
MARKED = f'prompt: {{"prompt_string": "{MEDIA_MARKER}...", "multimodal_data": [BASE64]}}'
_OPTIONS = {field.name: field for field in OPTIONS.fields}
# What llama.cpp's bodies and Ollama's options call alike.
_SAMPLED = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n"),
    *("presence_penalty", "frequency_penalty", "seed", "stop"),
)
_ANSWER = [
    *COMMON_FIELDS,
    Field(
        "n_predict",
        Integer(-2),
        "most tokens to generate; -1 and -2: up to the context's end; 0: the prompt is cached alone",
    ),
    Field("n_indent", Integer(0), "the text ends before a line that is indented by fewer spaces and tabs"),
    *(_OPTIONS[name] for name in (*_SAMPLED, "mirostat", "mirostat_tau", "mirostat_eta")),
    *map(sampling_field, ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers")),
    sampling_field("dry_penalty_last_n"),
    *map(sampling_field, ("ignore_eos", "top_n_sigma", "logit_bias", "timeout_s")),
    Field("grammar", Text(), "a grammar in GBNF that the answer matches"),
    Field("json_schema", JSONObject('{"type": "object"}'), "the JSON schema of the answer"),
    Field("n_probs", Integer(0, MAX_TOP_LOGPROBS), "list so many of the most likely tokens at each position"),
    Field("stream", Boolean(), "send the answer as server-sent events while it is generated"),
    *ignored("cache_prompt n_cache_reuse", "prefixes are always cached"),
    *ignored("id_slot slot_id", "requests have no slots"),
    *ignored("penalize_nl", "newlines count as other tokens"),
    *ignored("api_key", "keys are sent as headers"),
    *ignored("n_keep n_discard", "no tokens of a prompt are dropped"),
    *ignored("samplers min_keep", "the order of filters is this engine's own"),
    *ignored("timings_per_token return_tokens", "the last event has the times, and each its tokens"),
    Field(
        "t_max_predict_ms",
        Integer(-1),
        "the answer ends with the first line end that comes so many milliseconds after its first token",
    ),
    *ignored("t_max_prompt_ms", "llama.cpp does not implement it either; timeout_s bounds the whole request"),
    *ignored("response_fields return_progress post_sampling_probs", "answers have all fields"),
    *refused("xtc_probability dynatemp_range", "they are not implemented", 0, 0.0),
    *ignored("xtc_threshold dynatemp_exponent", "XTC and dynamic temperatures are not implemented"),
    *refused("n_cmpl n", "/v1/completions has several samples", 1),
    *refused("tfs_z", "it is not implemented; see min_p", 1, 1.0),
    *refused("lora", "a LoRA adapter is chosen by its name as model: see docs/lora.md", []),
    *refused("image_data multimodal_data", f"{MARKED} shows images", []),
]
_PROMPT = FieldTable(
    "a prompt",
    [
        Field("prompt_string", Text(), f"the text, with {MEDIA_MARKER} where an image stands", required=True),
        Field("multimodal_data", ListOf(Text(1)), "the images in base64"),
    ],
)
_ONE_PROMPT = Text(1), TokenIds(1), ObjectOf(_PROMPT)
COMPLETION_FIELDS = FieldTable(
    "/completion",
    [
        Field(
            "prompt",
            OneOf((*_ONE_PROMPT, ListOf(OneOf(_ONE_PROMPT), 1, MAX_PROMPTS))),
            "the text to complete, its token ids, an object with images, or a list of these, to which the "
            "answer is a list",
            required=True,
        ),
        *_ANSWER,
    ],
)
_EXTRA = FieldTable(
    "an entry of input_extra",
    [
        Field("text", Text(), "the text of another file", required=True),
        Field("filename", Text(), "its name"),
        *ignored("time", "the files stand in the order in which they are given"),
    ],
)
_FILES = ListOf(ObjectOf(_EXTRA), longest=MAX_FILES)
INFILL = FieldTable(
    "/infill",
    [
        Field("input_prefix", Text(), "the text before the gap"),
        Field("input_suffix", Text(), "the text behind the gap"),
        Field("input_extra", _FILES, "other files, the most relevant last"),
        Field("prompt", Text(), "text with which the gap begins"),
        *_ANSWER,
    ],
)
APPLY = FieldTable("/apply-template", [MESSAGES, *COMMON_FIELDS, TOOLS, *TEMPLATE_FIELDS])


class NativeCall(AnswerCall):
    """A body of /completion."""

    table = COMPLETION_FIELDS
    DEFAULT_MAX_TOKENS = None
    NAMES = OwnNames(
        (r"\boptions\.num_predict\b", "n_predict"),
        (r"\boptions\.", ""),
        (r"\bresponse_format\.json_schema\.schema\b|\bresponse_format\b", "json_schema"),
        (r"^structured_outputs\b", "grammar"),
        (r"^repetition_penalty\b", "repeat_penalty"),
        (r"^max_tokens\b", "n_predict"),
        (r"^multi_modal_data\b", "prompt.multimodal_data"),
    )

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        values = self.values
        if self._lists:
            self.check_choices(len(values["prompt"]))
        # A number may be off here that SamplingParams has no such value for.
        own = {name: values[name] for name in _SAMPLED if name in values}
        self.least_indent = values.get("n_indent", 0)
        self.most_ms = max(values.get("t_max_predict_ms", 0), 0) or math.inf
        # Of a body that only warms the cache, a token is generated that the answer lacks.
        self._warms = values.get("n_predict") == 0
        if "n_predict" in values:
            own["num_predict"] = values["n_predict"] or 1
        for name in _SAMPLED:
            self.sampling.pop(name, None)
        with self.NAMES.in_errors():
            self.sampling |= sampling_of(own)
        self._num_probs: int | None = values.get("n_probs") or None
        self.sampling.pop("logprobs", None)
        if self._num_probs is not None:
            self.sampling["logprobs"] = self._num_probs
            check_most_logprobs("n_probs", self._num_probs, limits.max_logprobs)

    def read(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of the body by the names that all calls share, and those without effect."""
        values, without_effect = super().read(body)
        grammar = values.get("grammar")
        schema = values.get("json_schema")
        if grammar and schema is not None:
            raise RequestError("give either grammar or json_schema", param="grammar")
        if grammar:
            values["structured_outputs"] = {"grammar": grammar}
        elif schema is not None:
            values["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        return values, without_effect

    def prompts(self, text: ModelText) -> Sequence[Prompt]:
        """Return the prompts. Raises RequestError."""
        if not self._lists:
            return [_prompt_of(text, "prompt", self.values["prompt"])]
        return [_prompt_of(text, f"prompt[{i}]", each) for i, each in enumerate(self.values["prompt"])]

    @property
    def _lists(self) -> bool:
        """Whether the body has a list of prompts."""
        prompt = self.values.get("prompt")
        return isinstance(prompt, list) and not isinstance(prompt[0], int)

    def body(self, outputs: Sequence[RequestOutput], identity: str, created: int, model: str) -> Any:
        """Return the answer, or as llama.cpp does a list of the answers to several prompts."""
        head = Head(identity, "completion", created, model)
        chunks = self._chunks_of(head)
        for i, output in enumerate(outputs):
            chunks.add(i, output)
        return chunks.whole()

    def chunks(self, identity: str, created: int, model: str) -> ManyNativeChunks:
        """Return what makes the events of the answer."""
        return self._chunks_of(Head(identity, "completion", created, model))

    def _chunks_of(self, head: Head) -> ManyNativeChunks:
        num_prompts = len(self.values["prompt"]) if self._lists else 1
        return ManyNativeChunks(head, [self._chunks(head, i) for i in range(num_prompts)])

    def _chunks(self, head: Head, index: int) -> NativeChunks:
        return NativeChunks(
            head,
            Form(),
            index=index,
            num_probs=self._num_probs,
            is_empty=self._warms,
            least_indent=self.least_indent,
            most_ms=self.most_ms,
        )

    @property
    def ends_early(self) -> bool:
        """Whether the answer may end before the engine's output."""
        return self.least_indent > 0 or self.most_ms < math.inf

    def params(self, text: ModelText, *, stream: bool | None = None) -> SamplingParams:
        """Return the sampling parameters, for deltas if the answer may end early. Raises RequestError."""
        return super().params(text, stream=self.stream or self.ends_early if stream is None else stream)


def _prompt_of(text: ModelText, place: str, prompt: Any) -> Prompt:
    """Return the prompt at a place of a body. Raises RequestError."""
    if isinstance(prompt, dict):
        return _with_images(text, place, prompt["prompt_string"], prompt.get("multimodal_data", ()))
    if isinstance(prompt, str):
        return {"prompt": prompt, "add_special_tokens": True}
    return {"prompt_token_ids": prompt}


def _with_images(text: ModelText, place: str, prompt: str, images: Sequence[str]) -> Prompt:
    """Return a prompt with a placeholder for each marker. Raises RequestError."""
    data = f"{place}.multimodal_data"
    if (num := prompt.count(MEDIA_MARKER)) != len(images):
        raise RequestError(
            f"{place}.prompt_string has {num} times {MEDIA_MARKER}, and {data} {len(images)} images",
            param=f"{place}.prompt_string",
        )
    if text.images is not None:
        prompt = prompt.replace(MEDIA_MARKER, text.images.written)
    given: Any = with_images(text, prompt, data, images) if images else {"prompt": prompt}
    return {**given, "add_special_tokens": True}


class InfillCall(NativeCall):
    """A body of /infill."""

    table = INFILL

    def prompts(self, text: ModelText) -> Sequence[Prompt]:
        """Return the prompt with the special tokens of the model's family.

        Raises RequestError if the model has none.
        """
        tokenizer = text.tokenizer
        found = (
            None
            if tokenizer is None
            else fill_tokens_of(tokenizer.special_ids.keys() | tokenizer.added_texts)
        )
        if tokenizer is None or found is None:
            raise RequestError(
                "this model has no special tokens for filling in the middle; take one that was trained for "
                "it, such as a Qwen Coder"
            )

        def tokens(value: str) -> list[int]:
            return tokenizer.encode(value, add_special_tokens=False) if value else []

        ids = list[int]()
        for extra in self.values.get("input_extra", ()):
            name = extra.get("filename", "")
            ids += tokens(f"{found.file}{name}\n{extra['text']}\n")
        prefix = self.values.get("input_prefix", "")
        suffix = [*tokens(found.suffix), *tokens(self.values.get("input_suffix", ""))]
        begun = self.values.get("prompt", "")
        if found.middle:
            ids += [*tokens(found.prefix), *tokens(prefix), *suffix, *tokens(found.middle), *tokens(begun)]
        else:
            ids += [*suffix, *tokens(found.prefix), *tokens(prefix + begun)]
        return [{"prompt_token_ids": ids}]


class ApplyTemplateCall(TextCall):
    """A body of /apply-template."""

    table = APPLY
    conversation: Conversation

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        self.conversation = Conversation(self.values, limits)
        self.conversation.tools = self.values.get("tools")

    def answer(self, text: ModelText, max_model_len: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the rendered conversation. Raises RequestError."""
        with self.naming_field("messages"):
            return {"prompt": self.conversation.prompt(text)["prompt"]}
