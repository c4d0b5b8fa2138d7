"""What answers each route of `protocol/endpoints.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from ...protocol import endpoints
from ...protocol.endpoints import Endpoint
from ..front_end import FrontEnd
from ..http.exchange import Exchange
from .adapters import LoadAdapterRoute, UnloadAdapterRoute
from .admin import (
    DrainRoute,
    EndRoute,
    OneModelRoute,
    PauseRoute,
    ReloadKeysRoute,
    ReplicasRoute,
    RequestsRoute,
    ResetPrefixCacheRoute,
    ResumeRoute,
)
from .generation import AnswerRoute, ResultRoute
from .llamacpp import PropsRoute, SlotsRoute
from .ollama import LmStudioRoute, NoChangeRoute, PsRoute, ShowRoute, TagsRoute
from .page import PageRoute, WatchRoute
from .responses import CancelRoute, DeleteResponseRoute, ResponseRoute, ResponsesRoute
from .service import (
    HealthRoute,
    MetricsRoute,
    ModelRoute,
    ModelsRoute,
    OpenAPIRoute,
    ReadyRoute,
    VersionRoute,
)
from .tokens import TextRoute
from .vectors import EmbeddingRoute, ScoreRoute

Handler = Callable[[Exchange], Awaitable[None]]


# What answers a body is told which route it is.
_OF_BODIES: dict[Endpoint, Callable[[str, FrontEnd], Handler]] = {
    endpoints.POST_CHAT: AnswerRoute,
    endpoints.POST_COMPLETIONS: AnswerRoute,
    endpoints.POST_RESPONSE: ResponsesRoute,
    endpoints.POST_MESSAGE: AnswerRoute,
    endpoints.POST_COUNT_TOKENS: TextRoute,
    endpoints.POST_EMBEDDINGS: EmbeddingRoute,
    endpoints.POST_SCORE: ScoreRoute,
    endpoints.POST_TOKENIZE: TextRoute,
    endpoints.POST_DETOKENIZE: TextRoute,
    endpoints.POST_OLLAMA_CHAT: AnswerRoute,
    endpoints.POST_OLLAMA_GENERATE: AnswerRoute,
    endpoints.POST_OLLAMA_EMBED: EmbeddingRoute,
    endpoints.POST_OLLAMA_EMBEDDINGS: EmbeddingRoute,
    endpoints.POST_OLLAMA_SHOW: ShowRoute,
    endpoints.POST_OLLAMA_PULL: NoChangeRoute,
    endpoints.POST_OLLAMA_COPY: NoChangeRoute,
    endpoints.POST_NATIVE: AnswerRoute,
    endpoints.POST_INFILL: AnswerRoute,
    endpoints.POST_APPLY_TEMPLATE: TextRoute,
    endpoints.POST_GENERATE: ResultRoute,
    endpoints.POST_GENERATE_BATCH: ResultRoute,
    endpoints.POST_LOAD_ADAPTER: LoadAdapterRoute,
    endpoints.POST_UNLOAD_ADAPTER: UnloadAdapterRoute,
}
HANDLERS: dict[Endpoint, Callable[[FrontEnd], Handler]] = {
    **{endpoint: partial(handler, endpoint.path) for endpoint, handler in _OF_BODIES.items()},
    endpoints.GET_RESPONSE: ResponseRoute,
    endpoints.DELETE_RESPONSE: DeleteResponseRoute,
    endpoints.POST_CANCEL: CancelRoute,
    endpoints.DELETE_OLLAMA: partial(NoChangeRoute, endpoints.DELETE_OLLAMA.path),
    endpoints.GET_PROPS: PropsRoute,
    endpoints.GET_SLOTS: SlotsRoute,
    endpoints.GET_TAGS: TagsRoute,
    endpoints.GET_PS: PsRoute,
    endpoints.GET_LMSTUDIO_MODELS: LmStudioRoute,
    endpoints.GET_LMSTUDIO_MODEL: LmStudioRoute,
    endpoints.GET_OLLAMA_VERSION: VersionRoute,
    endpoints.GET_MODELS: ModelsRoute,
    endpoints.GET_MODEL: ModelRoute,
    endpoints.GET_HEALTH: HealthRoute,
    endpoints.GET_READY: ReadyRoute,
    endpoints.GET_VERSION: VersionRoute,
    endpoints.GET_METRICS: MetricsRoute,
    endpoints.GET_OPENAPI: OpenAPIRoute,
    endpoints.GET_WATCH: WatchRoute,
    **{endpoint: partial(PageRoute, endpoint, file) for endpoint, file in endpoints.PAGE_FILES.items()},
    endpoints.GET_REQUESTS: RequestsRoute,
    endpoints.POST_END: EndRoute,
    endpoints.POST_LOAD: OneModelRoute,
    endpoints.POST_UNLOAD: OneModelRoute,
    endpoints.POST_PIN: OneModelRoute,
    endpoints.POST_UNPIN: OneModelRoute,
    endpoints.POST_REPLICAS: ReplicasRoute,
    endpoints.POST_PAUSE: PauseRoute,
    endpoints.POST_RESUME: ResumeRoute,
    endpoints.POST_DRAIN: DrainRoute,
    endpoints.POST_RESET_PREFIX_CACHE: ResetPrefixCacheRoute,
    endpoints.POST_RELOAD_KEYS: ReloadKeysRoute,
}
_UNANSWERED = [endpoint.path for endpoint in endpoints.ROUTES if endpoint not in HANDLERS]
assert not _UNANSWERED, f"nothing answers {', '.join(_UNANSWERED)}: see docs/add-a-route.md"
