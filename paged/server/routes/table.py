"""What answers each route of `protocol/endpoints.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ...protocol import endpoints
from ...protocol.endpoints import Endpoint
from ..front_end import FrontEnd
from ..http.exchange import Exchange
from . import admin, llamacpp, ollama, service
from .adapters import load_adapter, unload_adapter
from .generation import AnswerRoute, answer_prompts
from .page import PageRoute, stream_pictures
from .pins import pin, unpin
from .responses import ResponsesRoute, cancel_response, delete_response, get_response
from .tokens import convert_text
from .vectors import embed, score

Handler = Callable[[Exchange], Awaitable[None]]


def with_front(answer: Callable[[Any, Exchange], Awaitable[None]]) -> Callable[[Any], Handler]:
    """Return a function that makes the handler of a front end: `answer` with this front end."""
    return partial(partial, answer)


_ANSWERS: dict[Endpoint, Callable[[Any, Exchange], Awaitable[None]]] = {
    endpoints.POST_COUNT_TOKENS: convert_text,
    endpoints.POST_EMBEDDINGS: embed,
    endpoints.POST_SCORE: score,
    endpoints.POST_TOKENIZE: convert_text,
    endpoints.POST_DETOKENIZE: convert_text,
    endpoints.POST_OLLAMA_EMBED: embed,
    endpoints.POST_OLLAMA_EMBEDDINGS: embed,
    endpoints.POST_OLLAMA_SHOW: ollama.show_model,
    endpoints.POST_OLLAMA_PULL: ollama.refuse_change,
    endpoints.POST_OLLAMA_COPY: ollama.refuse_change,
    endpoints.DELETE_OLLAMA: ollama.refuse_change,
    endpoints.POST_APPLY_TEMPLATE: convert_text,
    endpoints.POST_GENERATE: answer_prompts,
    endpoints.POST_GENERATE_BATCH: answer_prompts,
    endpoints.POST_LOAD_ADAPTER: load_adapter,
    endpoints.POST_UNLOAD_ADAPTER: unload_adapter,
    endpoints.GET_RESPONSE: get_response,
    endpoints.DELETE_RESPONSE: delete_response,
    endpoints.POST_CANCEL: cancel_response,
    endpoints.GET_PROPS: llamacpp.tell_props,
    endpoints.GET_SLOTS: llamacpp.list_slots,
    endpoints.GET_TAGS: ollama.list_tags,
    endpoints.GET_PS: ollama.list_running,
    endpoints.GET_LMSTUDIO_MODELS: ollama.list_for_lmstudio,
    endpoints.GET_LMSTUDIO_MODEL: ollama.list_for_lmstudio,
    endpoints.GET_OLLAMA_VERSION: service.tell_version,
    endpoints.GET_MODELS: service.list_models,
    endpoints.GET_MODEL: service.describe_model,
    endpoints.GET_HEALTH: service.tell_health,
    endpoints.GET_READY: service.tell_readiness,
    endpoints.GET_VERSION: service.tell_version,
    endpoints.GET_METRICS: service.export_metrics,
    endpoints.GET_OPENAPI: service.describe_api,
    endpoints.GET_WATCH: stream_pictures,
    endpoints.GET_REQUESTS: admin.list_requests,
    endpoints.POST_END: admin.end_requests,
    endpoints.POST_LOAD: admin.refuse_model_change,
    endpoints.POST_UNLOAD: admin.refuse_model_change,
    endpoints.POST_PIN: pin,
    endpoints.POST_UNPIN: unpin,
    endpoints.POST_REPLICAS: admin.resize,
    endpoints.POST_PAUSE: admin.pause,
    endpoints.POST_RESUME: admin.resume,
    endpoints.POST_DRAIN: admin.drain,
    endpoints.POST_RESET_PREFIX_CACHE: admin.reset_prefix_cache,
    endpoints.POST_RELOAD_KEYS: admin.reload_keys,
}
# Each makes what answers a route of a front end.
HANDLERS: dict[Endpoint, Callable[[FrontEnd], Handler]] = {
    **{endpoint: with_front(answer) for endpoint, answer in _ANSWERS.items()},
    endpoints.POST_CHAT: AnswerRoute,
    endpoints.POST_COMPLETIONS: AnswerRoute,
    endpoints.POST_RESPONSE: ResponsesRoute,
    endpoints.POST_MESSAGE: AnswerRoute,
    endpoints.POST_OLLAMA_CHAT: AnswerRoute,
    endpoints.POST_OLLAMA_GENERATE: AnswerRoute,
    endpoints.POST_NATIVE: AnswerRoute,
    endpoints.POST_INFILL: AnswerRoute,
    **{endpoint: partial(PageRoute, endpoint, file) for endpoint, file in endpoints.PAGE_FILES.items()},
}
_UNANSWERED = [endpoint.path for endpoint in endpoints.ROUTES if endpoint not in HANDLERS]
assert not _UNANSWERED, f"nothing answers {', '.join(_UNANSWERED)}: see docs/add-a-route.md"
