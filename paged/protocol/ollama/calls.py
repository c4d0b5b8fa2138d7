"""Calls of Ollama's API: /api/chat, /api/generate, /api/embed and /api/embeddings, and bodies with a name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...base.errors import RequestError
from ...base.fields import Field, FieldTable, ignored, refused
from ...base.json_kinds import Text
from ...base.kinds import Boolean
from ...chat.chat_format import ChatFormat
from ...engine.embedding import EmbeddingRequestOutput
from ...options.sampling_params import SamplingParams
from ...requests.request import Prompt, RequestOutput
from ..answers.chunks import Head
from ..calls.call import Call, OwnNames
from ..calls.conversation_call import ConversationCall
from ..calls.tokens import encoded
from ..calls.vectors import EmbeddingCall
from ..fields.images import image_part, with_images
from ..fields.sampling import check_most_logprobs
from ..limits import MAX_NAME_LENGTH, Limits
from .answers import Durations, OllamaLines, done_without_text
from .fields import CHAT, EMBED, EMBEDDINGS, GENERATE, MODEL, sampling_of

if TYPE_CHECKING:
    from ...engine.model_text import ModelText

_NAMES = OwnNames(
    (r"\bresponse_format\.json_schema\.schema\b", "format"),
    (r"\bresponse_format\b", "format"),
    (
        r"^(temperature|top_k|top_p|min_p|typical_p|presence_penalty|frequency_penalty|stop|seed)\b",
        r"options.\1",
    ),
    (r"^repetition_penalty\b", "options.repeat_penalty"),
    (r"^max_tokens\b", "options.num_predict"),
    (r"^multi_modal_data\b", "images"),
)


class _OllamaCall(ConversationCall):
    """A body of Ollama's that asks for an answer.

    IS_CHAT: whether the answer is a message.
    """

    IS_CHAT: bool
    NAMES = _NAMES

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        self._began = time.monotonic()
        super().__init__(body, limits)
        self.stream = self.values.get("stream", True)
        self._options: dict[str, Any] = self.values.get("options", {})
        self._max_num_ctx()
        self._num_prompt: int | None = None
        self.sampling |= sampling_of(self._options)
        if self.values.get("logprobs", False):
            self.sampling["logprobs"] = self.values.get("top_logprobs", 0)
            check_most_logprobs("top_logprobs", self.sampling["logprobs"], limits.max_logprobs)
        elif self.values.get("top_logprobs", 0):
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        else:
            self.sampling.pop("logprobs", None)

    def read(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of the body by the names that all calls share, and those without effect."""
        values, without_effect = super().read(body)
        wanted = values.pop("format", "")
        if wanted == "json":
            values["response_format"] = {"type": "json_object"}
        elif wanted:
            values["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted}}
        return values, without_effect

    def _max_num_ctx(self) -> None:
        """Raise RequestError for a num_ctx beyond the context that is loaded."""
        wanted = self._options.get("num_ctx")
        most = self.limits.max_model_len
        if wanted is not None and most is not None and wanted > most:
            raise RequestError(
                f"options.num_ctx {wanted:,} is more than the {most:,} tokens of the loaded model; "
                "max_model_len in models.toml sets its context",
                param="options.num_ctx",
            )

    def immediate(self, model: str) -> dict[str, Any] | None:
        """Return the answer to a body without a prompt, which loads or unloads its model; else None."""
        if self._has_prompt:
            return None
        reason = "unload" if self.keep_alive == 0 else "load"
        return done_without_text(model, reason, is_chat=self.IS_CHAT)

    @property
    def _has_prompt(self) -> bool:
        raise NotImplementedError

    def _variables(self) -> dict[str, Any]:
        """Return the variables of the template that `think` sets."""
        think = self.values.get("think")
        if think is None:
            return {}
        if isinstance(think, bool):
            return {"enable_thinking": think}
        return {"enable_thinking": True, "reasoning_effort": think}

    def prompts(self, text: ModelText) -> Sequence[Prompt]:
        """Return the prompt, whose tokens are counted if num_ctx bounds the request."""
        prompts = super().prompts(text)
        self._count(text, prompts)
        return prompts

    def _count(self, text: ModelText, prompts: Sequence[Any]) -> None:
        if "num_ctx" in self._options and text.tokenizer is not None:
            (prompt,) = prompts
            self._num_prompt = len(encoded(text, text.tokenizer, prompt))

    def given_params(self) -> dict[str, Any]:
        """Return the arguments of SamplingParams that the body gives, after `prompts`."""
        given = super().given_params()
        if self._num_prompt is not None:
            num_ctx = self._options["num_ctx"]
            left = num_ctx - self._num_prompt
            if left < 1:
                raise RequestError(
                    f"the prompt has {self._num_prompt:,} tokens, and options.num_ctx is {num_ctx:,}; "
                    "nothing is cut from a prompt",
                    param="options.num_ctx",
                )
            given["max_tokens"] = min(left, given.get("max_tokens", left))
        return given

    def params(self, text: ModelText, *, stream: bool | None = None) -> SamplingParams:
        """Return the parameters. Where nothing says how to sample, a model is talked to as on the page."""
        defaults = {name: value for name, value in text.chat_defaults.items() if name not in self.sampling}
        if not {"temperature", "top_p", "top_k", "min_p"} & self.sampling.keys():
            self.sampling |= defaults
        return super().params(text, stream=stream)

    def body(
        self, outputs: Sequence[RequestOutput], identity: str, created: int, model: str
    ) -> dict[str, Any]:
        """Return the answer."""
        (output,) = outputs
        return self.chunks(identity, created, model).whole_of(output)

    def chunks(self, identity: str, created: int, model: str) -> OllamaLines:
        """Return what makes the lines of the answer."""
        return OllamaLines(
            Head(identity, "ollama", created, self.model or model),
            self.new_form(include_reasoning=self.values.get("think") is not False),
            self.count_tokens,
            Durations(self._began, self.load_s),
            is_chat=self.IS_CHAT,
        )


class OllamaChatCall(_OllamaCall):
    """A body of /api/chat."""

    table = CHAT
    PROMPT_FIELD = "messages"
    IS_CHAT = True

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        messages = self.values.get("messages", [])
        values = {
            "messages": _with_ids(messages) or [{"role": "user", "content": ""}],
            "chat_template_kwargs": self._variables(),
        }
        if self.values.get("tools"):
            values["tools"] = [{"type": "function", **tool} for tool in self.values["tools"]]
        self.converse(values)

    @property
    def _has_prompt(self) -> bool:
        return bool(self.values.get("messages"))


class OllamaGenerateCall(_OllamaCall):
    """A body of /api/generate."""

    table = GENERATE
    PROMPT_FIELD = "prompt"
    IS_CHAT = False

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        self._is_raw = body.get("raw") is True
        if self._is_raw:  # the text is the model's own
            limits = replace(limits, chat_format=ChatFormat())
        super().__init__(body, limits)
        prompt = self.values.get("prompt", "")
        images = self.values.get("images", ())
        messages = [{"role": "user", "content": prompt if self._is_raw else _shown("images", images, prompt)}]
        if self.values.get("system"):
            if self._is_raw:
                raise RequestError(
                    "system goes with the chat template, and raw leaves it out", param="system"
                )
            messages = [{"role": "system", "content": self.values["system"]}, *messages]
        self.converse({"messages": messages, "chat_template_kwargs": self._variables()})

    @property
    def _has_prompt(self) -> bool:
        return bool(self.values.get("prompt") or self.values.get("images"))

    def prompts(self, text: ModelText) -> Sequence[Prompt]:
        """Return the prompt."""
        if not self._is_raw:
            return super().prompts(text)
        prompt: dict[str, Any] = {"prompt": self.values.get("prompt", ""), "add_special_tokens": True}
        if self.values.get("images"):
            prompt |= with_images(text, prompt["prompt"], "images", self.values["images"])
        prompts = [prompt]
        self._prompt = prompt["prompt"]
        self.decode_with(text.tokenizer)
        self._count(text, prompts)
        return prompts


def _with_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form: calls and their results have ids, which Ollama's need not have."""
    result = list[dict[str, Any]]()
    waiting = list[str]()
    count = 0
    for i, message in enumerate(messages):
        dropped = ("thinking", "tool_name", "images")
        own = {name: value for name, value in message.items() if name not in dropped}
        own.setdefault("content", "")
        if message.get("images"):
            place = f"messages[{i}].images"
            if message["role"] not in ("user", "tool"):
                raise RequestError(
                    f"{place} is of role {message['role']!r}; users and tools send images", param=place
                )
            own["content"] = _shown(place, message["images"], own["content"])
        if message.get("thinking"):
            own |= {"reasoning": message["thinking"], "reasoning_content": message["thinking"]}
        if message.get("tool_calls"):
            calls = []
            waiting = []
            for call in message["tool_calls"]:
                call_id = call.get("id") or f"call_{count}"
                count += 1
                waiting.append(call_id)
                function = {"arguments": {}, **call["function"]}
                calls.append({"id": call_id, "type": "function", "function": function})
            own["tool_calls"] = calls
        else:
            own.pop("tool_calls", None)
        if message["role"] == "tool":
            if "tool_name" in message:
                own["name"] = message["tool_name"]
            if "tool_call_id" not in own and waiting:
                own["tool_call_id"] = waiting.pop(0)
        result.append(own)
    return result


def _shown(place: str, images: Sequence[str], text: str) -> str | list[dict[str, Any]]:
    """Return a content that shows images before its text. place: of the images in the body."""
    if not images:
        return text
    parts = [image_part(f"{place}[{i}]", f"data:;base64,{image}") for i, image in enumerate(images)]
    return [*parts, {"type": "text", "text": text}]


class OllamaEmbedCall(EmbeddingCall):
    """A body of /api/embed."""

    table = EMBED

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        self._began = time.monotonic()
        super().__init__(body, limits)
        if not self.values["input"]:
            self.listed = []

    def prompts(self, text: ModelText) -> Sequence[Prompt]:
        """Return the texts; those that are too long are cut unless truncate is false."""
        prompts = super().prompts(text)
        most = self.limits.max_model_len
        if not self.values.get("truncate", True) or most is None or text.tokenizer is None:
            return prompts
        cut: list[Prompt] = []
        for prompt, own in zip(prompts, self.listed, strict=True):
            # A token has a character at least.
            tokens = text.tokenizer.encode(own, add_special_tokens=True) if len(own) > most else []
            cut.append({"prompt_token_ids": tokens[:most]} if len(tokens) > most else prompt)
        return cut

    def body(
        self, outputs: Sequence[EmbeddingRequestOutput], identity: str, created: int, model: str
    ) -> dict[str, Any]:
        """Return the vectors in the order of the inputs."""
        whole = super().body(outputs, identity, created, model)
        return {
            "model": self.model or model,
            "embeddings": [each["embedding"] for each in whole["data"]],
            **{
                name: value
                for name, value in Durations(self._began, self.load_s).as_json(None).items()
                if name in ("total_duration", "load_duration")
            },
            "prompt_eval_count": whole["usage"]["prompt_tokens"],
        }


class OllamaEmbeddingsCall(EmbeddingCall):
    """A body of /api/embeddings, the older form of /api/embed."""

    table = EMBEDDINGS
    PROMPT_FIELD = "prompt"

    def read(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of the body by the names that all calls share, and those without effect."""
        values, without_effect = super().read(body)
        return {**values, "input": values["prompt"]}, without_effect

    def body(
        self, outputs: Sequence[EmbeddingRequestOutput], identity: str, created: int, model: str
    ) -> dict[str, Any]:
        """Return the vector."""
        return {"embedding": super().body(outputs, identity, created, model)["data"][0]["embedding"]}


# Clients in Go send both names, the one that they do not mean as "".
_NAME = replace(MODEL, kind=Text(0, MAX_NAME_LENGTH), required=False)
_OLD_NAME = Field("name", Text(0, MAX_NAME_LENGTH), "the older name of model")
NAMED = FieldTable(
    "/api/show",
    [
        _NAME,
        _OLD_NAME,
        *ignored("verbose", "all that is known is shown"),
        *ignored("options", "a model is shown as it is"),
        *refused("system template", "models.toml has those of a model", ""),
    ],
)
PULL = FieldTable(
    "/api/pull",
    [
        replace(_NAME, meaning="a model of the hub: owner/name or owner/name:QUANT"),
        _OLD_NAME,
        Field("stream", Boolean(), "send lines of JSON with the progress, by default true"),
        *ignored("insecure username password", "the hub is Hugging Face's, and its key is HF_TOKEN"),
    ],
)
DELETE = FieldTable("/api/delete", [_NAME, _OLD_NAME])
COPY = FieldTable(
    "/api/copy",
    [
        Field("source", Text(1, MAX_NAME_LENGTH), "a model", required=True),
        Field("destination", Text(1, MAX_NAME_LENGTH), "its further name", required=True),
    ],
)


class NamedCall(Call):
    """A body that names a model, and asks for no tokens."""

    table = NAMED
    is_queued = False

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        self.stream = self.values.get("stream", True)

    @property
    def name(self) -> str:
        """The name of the model. Raises RequestError if it is missing."""
        name = self.values.get("model") or self.values.get("name")
        if not name:
            raise RequestError("model is missing", param="model")
        return str(name)


class PullCall(NamedCall):
    """A body of /api/pull."""

    table = PULL


class DeleteCall(NamedCall):
    """A body of /api/delete."""

    table = DELETE


class CopyCall(Call):
    """A body of /api/copy."""

    table = COPY
    is_queued = False
