"""Every route of the server, declared once: the router, keys, metrics and /openapi.json follow from it.

`server/routes/table.py` says what answers each. docs/add-a-route.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from ..base.errors import RequestError
from ..base.validation import shown
from .answers.schemas import RESPONSES
from .calls.adapters import LoadAdapterCall, UnloadAdapterCall
from .calls.call import Call
from .calls.chat import ChatCall
from .calls.completions import CompletionCall
from .calls.generate import GenerateCall
from .calls.tokens import DetokenizeCall, TokenizeCall
from .calls.vectors import EmbeddingCall, ScoreCall
from .limits import Limits
from .llamacpp.calls import ApplyTemplateCall, InfillCall, NativeCall
from .messages.call import MessageCall, MessageCountCall
from .messages.events import message_error
from .ollama.answers import ollama_error
from .ollama.calls import (
    CopyCall,
    NamedCall,
    OllamaChatCall,
    OllamaEmbedCall,
    OllamaEmbeddingsCall,
    OllamaGenerateCall,
    PullCall,
)
from .responses.call import ResponseCall

JSON = "application/json"
LINES = "application/x-ndjson"
EVENTS = "text/event-stream"
_PLAIN = "text/plain"
_LISTED: list[Endpoint] = []
# Who may use a route. all: everyone, as a monitor or a load balancer may have no key. keys: who has a key of
# the server. public: everyone, unless there are tenants (--api-keys): then who has a key. operator: the same,
# but then who has the admin key, as it tells of all tenants.
# admin: who has the admin key. watch: the same, and who has a key of the server, who sees what is the key's.
Access = Literal["all", "keys", "public", "operator", "admin", "watch"]
MESSAGES_PATH = "/v1/messages"
ADMIN_PREFIX = "/admin/"  # of the paths of that access, but for those that vLLM has elsewhere
ADMIN_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One entry of ROUTES: a method and a path of the server.

    summary: what the endpoint does, for /openapi.json.
    answer: the name of the response's schema in RESPONSES; None if the response is not JSON.
    call: the class that parses the body; None if there is no body.
    media: the content type of the answer.
    streamed: the content type of a streamed answer; None if it cannot be streamed.
    error: the name of the errors' schema.
    access: who may use the endpoint, see `Access`.
    is_probe: whether requests are answered even on connections beyond the limit, because monitors send them.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    answer: str | None
    _: KW_ONLY
    call: type[Call] | None = None
    media: str = JSON
    streamed: str | None = None
    error: str = "Error"
    access: Access = "keys"
    is_probe: bool = False

    @property
    def needs_key(self) -> bool:
        """Whether requests need a key, if the server has keys."""
        return self.access in ("keys", "admin", "watch")

    def __post_init__(self) -> None:
        where = f"{self.method} {self.path}"
        assert self.path.startswith("/"), f"{where}: a path begins with a slash"
        is_below = self.path.startswith(ADMIN_PREFIX)
        is_admin = is_below or self.path in ADMIN_PATHS
        assert is_admin == (self.access == "admin"), f"{where}: {ADMIN_PREFIX} is for the admin key"
        has_call = self.method == "POST" and not is_below and "{" not in self.path
        assert has_call == (self.call is not None), (
            f"{where}: POST has a call, GET and admin have none, and neither has what names its object"
        )
        assert (self.answer is None) == (self.media != JSON), f"{where}: JSON has a schema, all else none"
        assert self.answer in (None, *RESPONSES), f"{where}: no schema is named {self.answer!r}"
        access_here = [route.access for route in _LISTED if route.path == self.path]
        assert {*access_here} <= {self.access}, f"{where}: a path has one access for all methods"
        others = [(route.method, route.path) for route in _LISTED]
        assert (self.method, self.path) not in others, f"{where} is declared twice"
        _LISTED.append(self)


POST_CHAT = Endpoint(
    "POST", "/v1/chat/completions", "Answer a conversation", "ChatCompletion", call=ChatCall, streamed=EVENTS
)
POST_COMPLETIONS = Endpoint(
    "POST",
    "/v1/completions",
    "Complete one or several prompts",
    "Completion",
    call=CompletionCall,
    streamed=EVENTS,
)
POST_RESPONSE = Endpoint(
    "POST",
    "/v1/responses",
    "Answer the items of a conversation",
    "Response",
    call=ResponseCall,
    streamed=EVENTS,
)
GET_RESPONSE = Endpoint(
    "GET", "/v1/responses/{response}", "Return a response that is stored or in progress", "Response"
)
DELETE_RESPONSE = Endpoint("DELETE", "/v1/responses/{response}", "Forget a stored response", "Any")
POST_CANCEL = Endpoint("POST", "/v1/responses/{response}/cancel", "End a response in progress", "Response")
POST_MESSAGE = Endpoint(
    "POST",
    MESSAGES_PATH,
    "Answer the messages of a conversation",
    "Message",
    call=MessageCall,
    error="MessageError",
    streamed=EVENTS,
)
POST_COUNT_TOKENS = Endpoint(
    "POST",
    f"{MESSAGES_PATH}/count_tokens",
    "Return how many tokens the messages have",
    "MessageTokens",
    call=MessageCountCall,
    error="MessageError",
)
POST_EMBEDDINGS = Endpoint(
    "POST", "/v1/embeddings", "Embed one or several texts", "Embeddings", call=EmbeddingCall
)
POST_SCORE = Endpoint(
    "POST", "/v1/score", "Return the log-probabilities of continuations", "Scores", call=ScoreCall
)
POST_TOKENIZE = Endpoint(
    "POST", "/tokenize", "Return the tokens of a text or a conversation", "Tokens", call=TokenizeCall
)
POST_DETOKENIZE = Endpoint("POST", "/detokenize", "Return the text of tokens", "Text", call=DetokenizeCall)
POST_NATIVE, POST_INFILL = (
    Endpoint("POST", path, summary, "Any", call=call, streamed=EVENTS)
    for path, summary, call in (
        ("/completion", "Complete a prompt, in llama.cpp's form", NativeCall),
        ("/infill", "Fill in the middle of a text, in llama.cpp's form", InfillCall),
    )
)
POST_APPLY_TEMPLATE = Endpoint(
    "POST", "/apply-template", "Return the prompt of a conversation", "Any", call=ApplyTemplateCall
)
GET_PROPS, GET_SLOTS = (
    Endpoint("GET", path, summary, "Any")
    for path, summary in (
        ("/props", "Describe the model, in llama.cpp's form"),
        ("/slots", "List the requests in progress, in llama.cpp's form"),
    )
)
POST_GENERATE, POST_GENERATE_BATCH = (
    Endpoint(
        "POST",
        path,
        "Complete prompts, each with its own result",
        "Results",
        call=GenerateCall,
        streamed=LINES,
    )
    for path in ("/generate", "/generate/batch")
)
POST_OLLAMA_CHAT, POST_OLLAMA_GENERATE = (
    Endpoint("POST", f"/api/{name}", summary, "Any", call=call, streamed=LINES, error="OllamaError")
    for name, summary, call in (
        ("chat", "Answer a conversation, in Ollama's form", OllamaChatCall),
        ("generate", "Answer a prompt, in Ollama's form", OllamaGenerateCall),
    )
)
POST_OLLAMA_EMBED, POST_OLLAMA_EMBEDDINGS, POST_OLLAMA_SHOW, POST_OLLAMA_PULL, POST_OLLAMA_COPY = (
    Endpoint("POST", f"/api/{name}", summary, "Any", call=call, streamed=streamed, error="OllamaError")
    for name, summary, call, streamed in (
        ("embed", "Embed one or several texts, in Ollama's form", OllamaEmbedCall, None),
        ("embeddings", "Embed a text, in Ollama's older form", OllamaEmbeddingsCall, None),
        ("show", "Describe a model, in Ollama's form", NamedCall, None),
        ("pull", "Download a model of the hub; only with --allow-model-changes", PullCall, LINES),
        ("copy", "Give a model another name; only with --allow-model-changes", CopyCall, None),
    )
)
DELETE_OLLAMA = Endpoint(
    "DELETE",
    "/api/delete",
    "Remove the model that the body names; only with --allow-model-changes",
    "Any",
    error="OllamaError",
)
GET_TAGS, GET_PS = (
    Endpoint("GET", f"/api/{name}", summary, "Any", error="OllamaError")
    for name, summary in (
        ("tags", "List the models, in Ollama's form"),
        ("ps", "List the models that are loaded, in Ollama's form"),
    )
)
GET_OLLAMA_VERSION = Endpoint(
    "GET", "/api/version", "Return the version of paged", "Version", error="OllamaError", access="public"
)
GET_LMSTUDIO_MODELS = Endpoint("GET", "/api/v0/models", "List the models, in LM Studio's form", "Any")
GET_LMSTUDIO_MODEL = Endpoint(
    "GET", "/api/v0/models/{model}", "Return one of the models, in LM Studio's form", "Any"
)
# Paths of other servers that are not here, and why.
NOT_HERE = {
    "/api/create": "models are not made here: models.toml gives a checkpoint a name, a template and options",
    "/api/push": "models are not uploaded from here",
    "/api/blobs": "models are not uploaded to here: paged pull downloads them",
}
GET_MODELS = Endpoint("GET", "/v1/models", "List the model's names", "Models")
GET_MODEL = Endpoint("GET", "/v1/models/{model}", "Return one of the model's names", "Model")
GET_HEALTH = Endpoint("GET", "/health", "Return whether the engine runs", "Any", access="all", is_probe=True)
GET_READY = Endpoint(
    "GET", "/ready", "Return whether requests are accepted", "Any", access="all", is_probe=True
)
GET_VERSION = Endpoint("GET", "/version", "Return the version of paged", "Version", access="public")
GET_METRICS = Endpoint(
    "GET",
    "/metrics",
    "Return metrics in the form of Prometheus",
    None,
    media=_PLAIN,
    access="operator",
    is_probe=True,
)
GET_OPENAPI = Endpoint("GET", "/openapi.json", "Return this description", "Any", access="public")
GET_WATCH = Endpoint(
    "GET",
    "/watch",
    "Tell what the engines compute and whose their blocks are, up to four times a second",
    None,
    media=EVENTS,
    access="watch",
)
# The page, by the path of each of its files.
PAGE_FILES = {
    Endpoint("GET", path, summary, None, media=media, access="all"): path.removeprefix("/")
    or "page/index.html"
    for path, media, summary in (
        ("/", "text/html", "Return the page to chat with the model and to watch the engine"),
        ("/page/style.css", "text/css", "Return the look of the page"),
        ("/page/main.js", "text/javascript", "Return the script of the page"),
        ("/page/api.js", "text/javascript", "Return the part of the script that calls the server"),
        ("/page/chat.js", "text/javascript", "Return the part of the script that chats"),
        (
            "/page/conversations.js",
            "text/javascript",
            "Return the part of the script that keeps conversations",
        ),
        ("/page/engine.js", "text/javascript", "Return the part of the script that draws the engine"),
        ("/page/markdown.js", "text/javascript", "Return the part of the script that shows Markdown"),
        ("/page/markdown-it.js", "text/javascript", "Return the library that reads Markdown"),
        ("/page/markdown-it.LICENSE.txt", "text/plain", "Return the licences of that library"),
    )
}
GET_REQUESTS = Endpoint(
    "GET", "/admin/requests", "List the requests in progress, without their prompts", "Any", access="admin"
)
POST_END = Endpoint(
    "POST",
    "/admin/requests/{request}/end",
    "End the requests in progress that have this id",
    "Any",
    access="admin",
)
POST_LOAD, POST_UNLOAD, POST_PIN, POST_UNPIN = (
    Endpoint("POST", f"{ADMIN_PREFIX}models/{{model}}/{verb}", summary, "Any", access="admin")
    for verb, summary in (
        ("load", "Load a model of a server that has several, and answer when it is loaded"),
        ("unload", "Unload a model of a server that has several, once no request uses it"),
        ("pin", "Keep the KV of a prompt or of messages for a model or an adapter, also after --prefix-dir"),
        ("unpin", "Let the KV of a pinned prompt be evicted"),
    )
)
POST_LOAD_ADAPTER, POST_UNLOAD_ADAPTER = (
    Endpoint("POST", path, summary, None, media=_PLAIN, call=call, access="admin")
    for path, summary, call in zip(
        ADMIN_PATHS,
        (
            "Load a LoRA adapter from a path of the server; only with --allow-runtime-lora-updating",
            "Unload a LoRA adapter; only with --allow-runtime-lora-updating",
        ),
        (LoadAdapterCall, UnloadAdapterCall),
        strict=True,
    )
)
POST_REPLICAS = Endpoint(
    method="POST",
    path=f"{ADMIN_PREFIX}replicas/{{replicas}}",
    summary="Add or remove engine processes until there are so many, while requests run",
    answer="Any",
    access="admin",
)
POST_PAUSE, POST_RESUME, POST_DRAIN, POST_RESET_PREFIX_CACHE, POST_RELOAD_KEYS = (
    Endpoint("POST", f"{ADMIN_PREFIX}{name}", summary, "Any", access="admin")
    for name, summary in (
        ("pause", "Refuse new requests until /admin/resume; those in progress go on"),
        ("resume", "Accept new requests again"),
        ("drain", "End the server, as SIGTERM does"),
        ("reset-prefix-cache", "Forget all cached prefixes"),
        ("reload-keys", "Read the file of --api-keys again"),
    )
)

ROUTES = tuple(_LISTED)
# The routes that take a body, and what parses it.
ENDPOINTS: dict[str, type[Call]] = {route.path: route.call for route in ROUTES if route.call is not None}
ACCESS: dict[str, Access] = {route.path: route.access for route in ROUTES}
# On --metrics-port.
MONITORED = (GET_HEALTH, GET_READY, GET_METRICS)
PROBES = frozenset(route.path for route in ROUTES if route.is_probe)
DEFAULT_LIMITS = Limits()


def access_of(path: str) -> Access:
    """Return who may use a path. Unknown paths need a key too, so that they look like known ones."""
    return "admin" if path.startswith(ADMIN_PREFIX) else ACCESS.get(path, "keys")


def is_of_messages(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API, which has its own format of keys and errors."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def is_of_ollama(path: str) -> bool:
    """Return whether a path belongs to Ollama's API, whose errors have another form."""
    return path.startswith("/api/") and not path.startswith("/api/v0/")


def error_in_form_of(path: str, status: int, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """Convert the body of an error to the format of the API that a path belongs to.

    body: the error in OpenAI's format.
    """
    if is_of_ollama(path):
        return ollama_error(body)
    return message_error(status, body, request_id) if is_of_messages(path) else body


def parse_call(url: Any, body: Any, limits: Limits = DEFAULT_LIMITS) -> Call:
    """Parse the body of a request to a URL path.

    Raises RequestError or UnknownArgumentError. The error's `param` is the wrong field.
    """
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise RequestError(f"url {shown(url)} is not supported; it is one of {', '.join(ENDPOINTS)}")
    if not isinstance(body, Mapping):
        raise RequestError(f"body must be an object, got {shown(body)}")
    return ENDPOINTS[url](body, limits)
