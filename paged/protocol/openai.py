"""OpenAI's API as JSON: request bodies to prompts and SamplingParams, outputs to response bodies.

Fields have the meaning of OpenAI's API. Parameters that only `SamplingParams` has are accepted under its
names, as in vLLM; unknown fields are refused by name. Used by `paged run-batch`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import RequestError, reject_unknown
from ..requests.prompts import Prompt
from ..requests.request import CompletionOutput, Logprob, RequestOutput
from ..sampling_params import SamplingParams
from ..validation import check_bool, check_int, shown
from .jobs import SAMPLING_FIELDS, finite, sampling_from_json

if TYPE_CHECKING:
    from ..engine.engine import LLMEngine

MAX_TOP_LOGPROBS = 20
BAD_REQUEST, NOT_FOUND, TIMED_OUT, FAILED = 400, 404, 408, 500

# Fields that a body shares with SamplingParams. A response consists of text, so detokenize is none.
SAME = frozenset(SAMPLING_FIELDS) - {"logprobs", "prompt_logprobs", "detokenize"}
_COMMON = SAME | {"model", "user", "stream", "response_format"}
CHAT_ONLY = frozenset(
    {"messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice"}
    | {"add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"}
)
COMPLETION_ONLY = frozenset({"prompt", "logprobs", "echo", "add_special_tokens"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(ABC):
    """A request body, validated as far as possible without a model.

    DEFAULT_MAX_TOKENS: where neither the body nor generation_config.json limits the tokens.
    model: the name of the model; None accepts any.
    params: those of the body, without the engine's defaults.
    sampling: the arguments of SamplingParams that the body gives.
    tenant: the body's user.
    stream: whether to answer by server-sent events.
    """

    DEFAULT_MAX_TOKENS: ClassVar[int | None]
    model: str | None
    params: SamplingParams
    sampling: Mapping[str, Any]
    tenant: str = ""
    stream: bool = False

    @classmethod
    def _common(cls, given: Mapping[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
        if (structured := _structured_outputs(given.get("response_format"))) is not None:
            if "structured_outputs" in sampling:
                raise RequestError("response_format and structured_outputs say the same; give one of them")
            sampling["structured_outputs"] = structured
        sampling = sampling_from_json(sampling)
        for name in ("model", "user"):
            if not isinstance(given.get(name, ""), str):
                raise RequestError(f"{name} must be a string, got {shown(given[name])}")
        return {
            "model": given.get("model"),
            "tenant": given.get("user", ""),
            "stream": check_bool(RequestError, "stream", given.get("stream", False)),
            "params": SamplingParams(**{"max_tokens": cls.DEFAULT_MAX_TOKENS, **sampling}),
            "sampling": sampling,
        }

    @abstractmethod
    def prompts(self, engine: LLMEngine, chat_template: str | None = None) -> Sequence[Prompt]:
        """Return the prompts to complete. Raises RequestError.

        chat_template: the default for bodies without one; None takes the checkpoint's.
        """

    @abstractmethod
    def body(
        self, outputs: Sequence[RequestOutput], identity: str, created: int, model: str
    ) -> dict[str, Any]:
        """Return the response body.

        outputs: the finished output of each prompt.
        identity: unique among responses.
        created: seconds since 1970.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall(Call):
    """A body of /v1/chat/completions."""

    DEFAULT_MAX_TOKENS: ClassVar[int | None] = None  # up to the end of the context
    messages: Any
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ChatCall:
        """Parse a body. Raises RequestError or UnknownArgumentError naming the field."""
        given = _given(body, "/v1/chat/completions", _COMMON | CHAT_ONLY)
        if "messages" not in given:
            raise RequestError("messages is missing")
        sampling = {name: given[name] for name in SAME if name in given}
        if "max_completion_tokens" in given:
            if "max_tokens" in given:
                raise RequestError("max_tokens is the old name of max_completion_tokens; give one of them")
            sampling["max_tokens"] = given["max_completion_tokens"]
        sampling["logprobs"] = _chat_logprobs(given)
        names = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
        options = {name: given[name] for name in names if name in given}
        if given.get("tool_choice", "auto") not in ("auto", "none"):
            raise RequestError(f"tool_choice must be 'auto' or 'none', got {shown(given['tool_choice'])}")
        if "tools" in given and given.get("tool_choice") != "none":
            options["tools"] = given["tools"]
        return cls(messages=given["messages"], template_options=options, **cls._common(given, sampling))

    def prompts(self, engine: LLMEngine, chat_template: str | None = None) -> Sequence[Prompt]:
        """Return the rendered conversation."""
        options = {"chat_template": chat_template, **self.template_options}
        return [engine.render_chat(self.messages, **options)]

    def body(
        self, outputs: Sequence[RequestOutput], identity: str, created: int, model: str
    ) -> dict[str, Any]:
        """Return a chat.completion. Tool calls stay in the text as the model wrote them."""
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": completion.text},
                "logprobs": _chat_places(completion, self.params.logprobs or 0),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for i, completion in enumerate(outputs[0].outputs)
        ]
        return _response("chat.completion", f"chatcmpl-{identity}", created, model, choices, outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall(Call):
    """A body of /v1/completions."""

    DEFAULT_MAX_TOKENS: ClassVar[int | None] = 16
    listed: Sequence[Prompt]
    echo: bool = False

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> CompletionCall:
        """Parse a body. Raises RequestError or UnknownArgumentError naming the field."""
        given = _given(body, "/v1/completions", _COMMON | COMPLETION_ONLY)
        if "prompt" not in given:
            raise RequestError("prompt is missing")
        sampling = {name: given[name] for name in SAME | {"logprobs"} if name in given}
        listed: list[Prompt] = []
        for prompt in _prompts(given["prompt"]):
            if not isinstance(prompt, str):
                listed.append(prompt)
            else:
                add = given.get("add_special_tokens", True)
                listed.append({"prompt": prompt, "add_special_tokens": add})
        echo = check_bool(RequestError, "echo", given.get("echo", False))
        if echo and "logprobs" in given:
            raise RequestError("echo with logprobs, which asks for those of the prompt, is not supported")
        if echo and not all(isinstance(prompt, Mapping) for prompt in listed):
            raise RequestError("echo needs prompts that are text")
        return cls(listed=listed, echo=echo, **cls._common(given, sampling))

    def prompts(
        self,
        engine: LLMEngine,  # noqa: ARG002
        chat_template: str | None = None,  # noqa: ARG002
    ) -> Sequence[Prompt]:
        """Return the prompts of the body."""
        return self.listed

    def body(
        self, outputs: Sequence[RequestOutput], identity: str, created: int, model: str
    ) -> dict[str, Any]:
        """Return a text_completion with the choices in the order of the prompts."""
        choices = [
            {
                "index": i * self.params.n + j,
                "text": (output.prompt or "") + completion.text if self.echo else completion.text,
                "logprobs": _completion_places(completion),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for i, output in enumerate(outputs)
            for j, completion in enumerate(output.outputs)
        ]
        return _response("text_completion", f"cmpl-{identity}", created, model, choices, outputs)


ENDPOINTS: dict[str, Callable[[Mapping[str, Any]], Call]] = {
    "/v1/chat/completions": ChatCall.parse,
    "/v1/completions": CompletionCall.parse,
}


def parse_call(url: Any, body: Any) -> Call:
    """Parse the body of a request to a URL path. Raises RequestError or UnknownArgumentError."""
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise RequestError(f"url {url!r} is not supported; it is one of {', '.join(ENDPOINTS)}")
    if not isinstance(body, Mapping):
        raise RequestError(f"body must be an object, got {shown(body)}")
    return ENDPOINTS[url](body)


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error response."""
    kind = "invalid_request_error" if status in (BAD_REQUEST, NOT_FOUND) else "server_error"
    code = "model_not_found" if status == NOT_FOUND else None
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def failure_of(outputs: Sequence[RequestOutput]) -> tuple[int, str] | None:
    """Return status and message of the first output that failed or timed out; None if all succeeded."""
    for output in outputs:
        for completion in output.outputs:
            if completion.finish_reason in ("error", "abort"):
                status = FAILED if completion.finish_reason == "error" else TIMED_OUT
                return status, str(completion.stop_reason)
    return None


def _given(body: Mapping[str, Any], url: str, known: frozenset[str]) -> dict[str, Any]:
    """Return the fields of the body that are not null. Raises UnknownArgumentError."""
    reject_unknown(url, body, known)
    return {name: value for name, value in body.items() if value is not None}


def _structured_outputs(response_format: Any) -> dict[str, Any] | None:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json": {"type": "object"}}
    if kind == "json_schema":
        wrapped = response_format.get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
        if isinstance(schema, Mapping):
            return {"json": schema}
        raise RequestError(
            f'response_format needs {{"json_schema": {{"schema": ...}}}}, got {shown(response_format)}'
        )
    raise RequestError(
        f"response_format must be of type text, json_object or json_schema, got {shown(response_format)}"
    )


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    """Return how many candidates to report besides the chosen token; None without logprobs."""
    wanted = check_bool(RequestError, "logprobs", given.get("logprobs", False))
    if "top_logprobs" not in given:
        return 0 if wanted else None
    if not wanted:
        raise RequestError("top_logprobs needs logprobs: true")
    return check_int(RequestError, "top_logprobs", given["top_logprobs"], 0, MAX_TOP_LOGPROBS)


def _prompts(value: Any) -> list[Any]:
    """Return a list of prompts from a text, a list of texts, token ids, or a list of lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value) or all(isinstance(item, list) for item in value):
            return value
        if all(isinstance(item, int) for item in value):
            return [value]
    raise RequestError(f"prompt must be text, a list of token ids, or a list of such, got {shown(value)}")


def _response(
    kind: str,
    identity: str,
    created: int,
    model: str,
    choices: list[dict[str, Any]],
    outputs: Sequence[RequestOutput],
) -> dict[str, Any]:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    shared = {"id": identity, "object": kind, "created": created, "model": model}
    return {**shared, "choices": choices, "usage": usage}


def _chat_places(completion: CompletionOutput, num_top: int) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    content = []
    for place in completion.logprobs:
        chosen, *_ = candidates = [*place.values()]
        # The chosen token need not be among the most likely ones.
        top = sorted(candidates, key=lambda candidate: candidate.rank)[:num_top]
        content.append({**_candidate(chosen), "top_logprobs": [_candidate(c) for c in top]})
    return {"content": content}


def _candidate(candidate: Logprob) -> dict[str, Any]:
    token = candidate.decoded_token or ""
    # The token may be a part of a character, whose bytes its text does not give.
    bytes_ = None if "\ufffd" in token else list(token.encode("utf-8", "surrogatepass"))
    return {"token": token, "logprob": finite(candidate.logprob), "bytes": bytes_}


def _completion_places(completion: CompletionOutput) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    chosen = [next(iter(place.values())) for place in completion.logprobs]
    tokens = [candidate.decoded_token or "" for candidate in chosen]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(candidate.logprob) for candidate in chosen],
        "top_logprobs": [
            {c.decoded_token or "": finite(c.logprob) for c in place.values()}
            for place in completion.logprobs
        ],
        "text_offset": [*itertools.accumulate(map(len, tokens[:-1]), initial=0)] if tokens else [],
    }
