"""ServeOptions: every option of `paged serve` besides the engine's, validated once."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ..base.arguments import strict
from ..base.byte_sizes import parse_bytes
from ..base.durations import parse_duration
from ..base.errors import ConfigError, RequestError
from ..base.validation import check_bool, check_int, check_number, shown
from ..chat.chat_format import check_parsers
from ..engine.async_base import STREAM_INTERVAL_S, check_interval
from ..options.lora_request import lora_modules_of
from ..options.sampling_params import MAX_LOGPROBS
from ..protocol.limits import MAX_PROMPTS
from .restart_terms import DEFAULT_TERMS, RestartTerms
from .router import ROUTERS

# Of each engine, by default. The MAX_PROMPTS prompts of one body must fit an idle engine's queue, or it would
# be refused each time; beside it there is room for those of another one, or of as many clients.
MAX_WAITING = 2 * MAX_PROMPTS
PREFIX_BYTES = "1GiB"
KEEP_ALIVE_S = 300.0  # as Ollama's
LOAD_WAIT_S = 300.0
LOG_FORMATS = ("text", "json")
_HOST_NAME = re.compile(r"\*|[\w.-]+", re.ASCII)
_HOST_HEADER = re.compile(r"(?:\[([^\[\]]*)\]|([^\[\]:]*))(?::\d*)?", re.ASCII)
_OPTIONAL_TEXTS = (
    "uds",
    "api_keys",
    "root_path",
    "chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "ssl_keyfile",
    "ssl_certfile",
    "otlp_traces_endpoint",
    "ray",
    "models",
)
_TEXTS = ("host", "metrics_prefix")
_LISTS = (
    "api_key",
    "served_model_name",
    "lora_modules",
    "allowed_origins",
    "allowed_hosts",
    "preload",
    "api",
)
_TIMEOUTS = ("head_timeout_s", "body_timeout_s", "keep_alive_timeout_s", "slow_client_timeout_s")
_SWITCHES = (
    "enable_auto_tool_choice",
    "trust_request_chat_template",
    "enable_prompt_tokens_details",
    "page",
    "ignore_builtin_tools",
    "allow_model_changes",
    "allow_runtime_lora_updating",
)
# What goes with several models alone.
_OF_MODELS = (
    *("memory", "keep_alive", "preload", "max_load_wait_s", "allow_model_changes"),
    *("prefix_dir", "prefix_bytes"),
)
APIS = ("ollama",)


@partial(strict, error=ConfigError, name="paged serve")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of the server.

    host: the address to listen on. "0.0.0.0" or "::" lets other machines reach the server, which then needs
        keys.
    port: the port to listen on; 0 takes a free one.
    uds: a Unix domain socket to listen on, in place of host and port.
    ssl_keyfile: the private key of the certificate, to serve HTTPS.
    ssl_certfile: the certificate, in PEM.
    root_path: the path under which a proxy serves this server, such as /llm.
    api_key: a key for clients. Requests must carry one of the keys in the header Authorization, except to
        /health, /ready, /version, /metrics and /openapi.json. All users of the machine can see a flag, for
        example in ps; they cannot see PAGED_API_KEY.
    api_keys: a file of keys, each with a tenant and limits. "paged keys new" makes a line of the file, and
        SIGHUP makes the server read the file again. /health and /ready need no key.
    admin_key: the key of the routes below /admin/, which list and end requests, pause the server and so on.
        Without an admin key, these routes refuse all requests. Give the key as PAGED_ADMIN_KEY or in the
        file.
    metrics_port: another port of the same host for /metrics, /health and /ready, which need no key there; 0
        takes a free one.
    default_reservation: maximum number of output tokens that a request reserves when it begins, if its key
        has the limit tokens_per_minute; 1,024 by default with api_keys.
    allowed_hosts: a name under which clients may reach the server besides localhost, such as llm.example, or
        * for all names. The server checks names if this is given, or if it listens on a loopback address.
    allowed_origins: a website whose pages may call the server from a browser, such as https://example.com, or
        * for all websites.
    served_model_name: a name of the model for requests; responses have the first name. The default is MODEL
        as given to `paged serve`.
    lora_modules: a LoRA adapter as NAME=PATH, one of several; requests choose it by NAME as their model. It
        needs enable_lora.
    allow_runtime_lora_updating: let the operator load and unload LoRA adapters while the server runs, by
        /v1/load_lora_adapter and /v1/unload_lora_adapter. They read paths that the request names, and need
        the admin key.
    max_request_bytes: maximum size of a request's body. The default is 16 MiB, or 64 MiB for a model that
        sees images.
    head_timeout_s: seconds in which the head of a request must arrive. They count from its first byte, or for
        the first request from the connection.
    body_timeout_s: seconds in which the body of a request must arrive.
    keep_alive_timeout_s: seconds after which a connection without a further request is closed. The timeout
        should be longer than a load balancer's, so that the load balancer closes its connections first.
    slow_client_timeout_s: seconds after which a client that reads nothing of a waiting response loses its
        connection, and its request ends.
    max_connections: maximum number of open connections; further connections are refused. The default depends
        on the system's limit of open files and is at most 8,192.
    max_logprobs: maximum number of log-probabilities that a request may ask for at each position.
    chat_template: a Jinja template in place of the checkpoint's: a file, the template itself, the name of one
        of the checkpoint's templates, or plain, which writes roles as words.
    default_chat_template_kwargs: variables of the chat template as a JSON object, for requests that do not
        give them.
    trust_request_chat_template: let requests contain their own chat template.
    enable_prompt_tokens_details: tell clients how many tokens of their prompts were in the prefix cache.
        Clients may learn from this number what others sent.
    enable_auto_tool_choice: let the model decide whether to call a tool if tool_choice is "auto".
    tool_call_parser: the format in which the model writes tool calls, by a name of docs/tool-calls.md; auto
        finds the format from the chat template, and none reads no calls.
    reasoning_parser: the format in which the model marks its reasoning; auto and none work as for
        tool_call_parser.
    ignore_builtin_tools: ignore the built-in tools of hosted APIs in requests, such as a web search;
        otherwise such requests are refused.
    response_store: bytes of memory for responses that previous_response_id can continue. When they are full,
        the oldest responses are dropped; 0 stores none.
    replicas: number of engine processes, each with its own GPU or share of the cores.
    ray: a Ray cluster whose nodes run the engine processes: HOST:PORT, "auto" for the cluster that runs on
        this machine, or "local" to start a cluster here. The flag without a value takes RAY_ADDRESS, or
        "local" if that is not set.
    router: how the replica for a request is chosen: "round-robin", "least-loaded" or "prefix-aware".
    stream_interval_s: maximum seconds for which tokens of a stream are held back to be sent together. They
        are held back only if sending each token alone would take more than one percent of the time; 0 never
        holds back.
    metrics_prefix: the prefix of the names at /metrics; vllm gives the names of vLLM.
    log_format: "text" or "json", the format of the line that each request writes to the log.
    otlp_traces_endpoint: the URL of a collector to which a span of each request is sent.
    models: serve all models of this models.toml and of the hub's cache; without a value, the file is the
        user's own. Several names as MODEL serve only these models.
    memory: bytes that all engines of several models may take together, such as 12GiB; by default four fifths
        of what is free at the start.
    keep_alive: how long each of several models stays loaded without a request, where neither models.toml nor
        a request says it: seconds, or a text such as 10m; 0 not at all, -1 for ever. By default 5m.
    preload: a model that is loaded when the server starts.
    max_load_wait_s: seconds for which a request waits until its model is loaded, by default 300.
    prefix_dir: a folder in which the pinned prefixes of a model that is unloaded are kept for its next load.
    prefix_bytes: bytes that the files in prefix_dir may take together, such as 2GiB; by default 1GiB. The
        least recently used go first, and what does not fit is lost and logged.
    allow_model_changes: let clients download, remove and copy models by /api/pull, /api/delete, /api/copy.
    api: an API whose usual port is listened to besides; "ollama" is at 11434.
    page: serve a page at / to chat with the model and to watch the engine's blocks.
    resume: when an engine process dies, continue its requests in another process; otherwise they end with an
        error.
    max_restarts: how many times a replica's process is replaced within ten minutes. After that, the server
        ends with exit code 1.
    step_timeout: seconds after which a process is replaced because its step has not ended.
    drain_delay: seconds from SIGTERM until new requests are refused. Meanwhile /ready returns 503; a load
        balancer notices within the interval of its checks.
    drain_timeout: seconds after drain_delay in which the requests in progress may finish before they are
        ended.

    Raises ConfigError naming the value and what is allowed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    root_path: str | None = None
    api_key: Sequence[str] = field(default=(), repr=False)
    api_keys: str | None = None
    admin_key: str | None = field(default=None, repr=False)
    metrics_port: int | None = None
    default_reservation: int | None = None
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    served_model_name: Sequence[str] = ()
    lora_modules: Sequence[str] = ()
    allow_runtime_lora_updating: bool = False
    max_request_bytes: int | None = None
    head_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    keep_alive_timeout_s: float = 75.0
    slow_client_timeout_s: float = 60.0
    max_connections: int | None = None
    max_logprobs: int = 20
    chat_template: str | None = None
    default_chat_template_kwargs: str | Mapping[str, Any] | None = None
    trust_request_chat_template: bool = False
    enable_prompt_tokens_details: bool = False
    enable_auto_tool_choice: bool = True
    tool_call_parser: str | None = "auto"
    reasoning_parser: str | None = "auto"
    ignore_builtin_tools: bool = False
    response_store: int = 0
    replicas: int = 1
    ray: str | None = None
    router: Literal["round-robin", "least-loaded", "prefix-aware"] = "prefix-aware"
    stream_interval_s: float = STREAM_INTERVAL_S
    metrics_prefix: str = "paged"
    log_format: Literal["text", "json"] = "text"
    otlp_traces_endpoint: str | None = None
    models: str | None = None
    memory: str | int | None = None
    keep_alive: str | float | None = None
    preload: Sequence[str] = ()
    max_load_wait_s: float | None = None
    prefix_dir: str | None = None
    prefix_bytes: str | int | None = None
    allow_model_changes: bool = False
    api: Sequence[str] = ()
    page: bool = True
    resume: bool = DEFAULT_TERMS.resume
    max_restarts: int = DEFAULT_TERMS.max_restarts
    step_timeout: float = DEFAULT_TERMS.step_timeout
    drain_delay: float = 0.0
    drain_timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in (*_TEXTS, *_OPTIONAL_TEXTS):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name in _OPTIONAL_TEXTS):
                raise ConfigError(f"{name} must be a string, got {shown(value)}")
        for name in _LISTS:
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for name in _SWITCHES:
            check_bool(ConfigError, name, getattr(self, name))
        check_int(ConfigError, "port", self.port, 0, 65535)
        if self.metrics_port is not None:
            check_int(ConfigError, "metrics_port", self.metrics_port, 0, 65535)
            if self.metrics_port == self.port != 0 and self.uds is None:
                raise ConfigError(f"metrics_port must be another one than port, got {self.port} for both")
        check_int(ConfigError, "response_store", self.response_store, 0)
        check_int(ConfigError, "replicas", self.replicas, 1, 1024)
        check_interval(self.stream_interval_s)
        if self.max_request_bytes is not None:
            check_int(ConfigError, "max_request_bytes", self.max_request_bytes, 1024)
        for name in _TIMEOUTS:
            check_number(ConfigError, name, getattr(self, name), 0.001)
        RestartTerms(resume=self.resume, max_restarts=self.max_restarts, step_timeout=self.step_timeout)
        for name in ("drain_delay", "drain_timeout"):
            check_number(ConfigError, name, getattr(self, name), 0.0)
        if self.max_connections is not None:
            check_int(ConfigError, "max_connections", self.max_connections, 1)
        self._check_keys()
        lora_modules_of(self.lora_modules)
        if self.allow_runtime_lora_updating and self.admin_key is None:
            raise ConfigError(
                "allow_runtime_lora_updating needs admin_key, as its routes read paths that a request names"
            )
        for host in self.allowed_hosts:
            if not (_HOST_NAME.fullmatch(host) or _is_address(host)):
                raise ConfigError(
                    f"allowed_hosts must be names such as llm.example without ports, or *; got {shown(host)}"
                )
        check_int(ConfigError, "max_logprobs", self.max_logprobs, 0, MAX_LOGPROBS)
        for name, choices in (("router", ROUTERS), ("log_format", LOG_FORMATS)):
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {shown(value)}")
        if not self.metrics_prefix.isidentifier() or not self.metrics_prefix.isascii():
            raise ConfigError(
                f"metrics_prefix must be letters, digits and underscores, got {shown(self.metrics_prefix)}"
            )
        if self.root_path is not None:
            object.__setattr__(self, "root_path", self.root_path.rstrip("/"))
            if self.root_path and not self.root_path.startswith("/"):
                raise ConfigError(f"root_path must begin with a slash, got {shown(self.root_path)}")
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        self._check_certificate()
        _object("default_chat_template_kwargs", self.default_chat_template_kwargs)
        self._check_models()

    def _check_models(self) -> None:
        if self.memory is not None:
            parse_bytes("memory", self.memory)
        if self.keep_alive is not None:
            self._keep_alive_s()
        if self.prefix_bytes is not None:
            parse_bytes("prefix_bytes", self.prefix_bytes)
            if self.prefix_dir is None:
                raise ConfigError("prefix_bytes goes with prefix_dir, the folder that it bounds")
        if self.max_load_wait_s is not None:
            check_number(ConfigError, "max_load_wait_s", self.max_load_wait_s, 0.0, above=True)
        for each in self.api:
            if each not in APIS:
                raise ConfigError(f"api must be one of {', '.join(APIS)}; got {shown(each)}")

    def _keep_alive_s(self) -> float:
        try:
            return parse_duration("keep_alive", self.keep_alive)
        except RequestError as error:
            raise ConfigError(str(error)) from None

    @property
    def keep_alive_s(self) -> float:
        """Seconds for which a model stays loaded without a request; inf for ever."""
        return KEEP_ALIVE_S if self.keep_alive is None else self._keep_alive_s()

    @property
    def most_prefix_bytes(self) -> int:
        """Bytes that the files in prefix_dir may take together."""
        return parse_bytes("prefix_bytes", PREFIX_BYTES if self.prefix_bytes is None else self.prefix_bytes)

    @property
    def load_wait_s(self) -> float:
        """Seconds for which a request waits until its model is loaded."""
        return LOAD_WAIT_S if self.max_load_wait_s is None else self.max_load_wait_s

    def check_one_model(self) -> None:
        """Raise ConfigError for an option that goes with several models alone."""
        given = [name for name in _OF_MODELS if getattr(self, name) not in (None, (), False)]
        if given:
            raise ConfigError(
                f"{given[0]} goes with several models, which come and go: name them, or give --models"
            )

    def check_many_models(self) -> None:
        """Raise ConfigError for an option that goes with one model alone."""
        given = {
            "served_model_name": self.served_model_name,
            "lora_modules": self.lora_modules,
            "allow_runtime_lora_updating": self.allow_runtime_lora_updating,
            "ray": self.ray is not None,
            "replicas": self.replicas > 1,
        }
        for name, is_given in given.items():
            if is_given:
                raise ConfigError(f"{name} goes with one model, and this server has several")

    def _check_keys(self) -> None:
        for key in self.api_key:
            _check_key("api_key", key)
        if self.admin_key is not None:
            if not isinstance(self.admin_key, str) or not self.admin_key:
                raise ConfigError("admin_key must be a text that is not empty")
            _check_key("admin_key", self.admin_key)
            if self.admin_key in self.api_key:
                raise ConfigError("admin_key must be another one than each api_key")
        if self.api_key and self.api_keys is not None:
            raise ConfigError("api_key and api_keys exclude each other; add the key to the file")
        if self.default_reservation is not None:
            check_int(ConfigError, "default_reservation", self.default_reservation, 1)
            if self.api_keys is None:
                raise ConfigError("default_reservation goes with api_keys, whose keys have limits of tokens")

    @property
    def has_keys(self) -> bool:
        """Whether most routes need a key."""
        return bool(self.api_key) or self.api_keys is not None

    def _check_certificate(self) -> None:
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("ssl_keyfile needs ssl_certfile, the certificate of the key")
        for name in ("ssl_keyfile", "ssl_certfile"):
            path = getattr(self, name)
            if path is not None and not os.access(path, os.R_OK):
                raise ConfigError(f"{name} {path!r} is not a file that can be read")
        if self.ssl_certfile:
            try:
                # Without the password, a library would ask for that of an encrypted key.
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
            except (ssl.SSLError, OSError) as error:
                key = f"with ssl_keyfile {self.ssl_keyfile!r}" if self.ssl_keyfile else "without ssl_keyfile"
                raise ConfigError(
                    f"ssl_certfile {self.ssl_certfile!r} {key} must be a certificate and its key in PEM, "
                    f"without a password: {error}"
                ) from None

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """The parsed default_chat_template_kwargs."""
        return _object("default_chat_template_kwargs", self.default_chat_template_kwargs)

    @property
    def is_exposed(self) -> bool:
        """Whether other machines may reach the server without a key."""
        return self.uds is None and not is_loopback(self.host) and not self.has_keys

    @property
    def checks_hosts(self) -> bool:
        """Whether requests must name a known host.

        This protects a server on a loopback address from DNS rebinding, where a website's name resolves to
        the loopback address, so that its pages can call the server from a browser on this machine.
        """
        if "*" in self.allowed_hosts:
            return False
        return (self.uds is None and is_loopback(self.host)) or bool(self.allowed_hosts)

    def allows_host(self, header: str | None) -> bool:
        """Return whether requests may name this host, perhaps with a port.

        header: None, as HTTP/1.0 allows, is accepted, since browsers always name a host.
        """
        if not self.checks_hosts or header is None:
            return True
        found = _HOST_HEADER.fullmatch(header)
        name = "" if found is None else (found[1] or found[2] or "").rstrip(".").lower()
        return is_loopback(name) or name in {host.lower() for host in (self.host, *self.allowed_hosts)}


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached only from this machine."""
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_key(name: str, key: str) -> None:
    """Raise ConfigError for a key that no request can bear, without showing it."""
    if key != key.strip():
        raise ConfigError(f"{name} must have no white space at its ends, which clients and servers cut off")
    if not key.isprintable() or any(ord(character) > 255 for character in key):
        raise ConfigError(
            f"{name} must be printable and of latin-1, as it is sent in a header; ASCII letters and digits "
            "are understood by all clients"
        )


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Return one text or several as a tuple. A text in brackets is a JSON list, as vLLM takes origins.

    A key may begin with a bracket, and is not part of an error.
    """
    values = [value] if isinstance(value, str) else value
    if name == "lora_modules" and isinstance(values, Sequence):  # a file and a list in JSON may have objects
        values = [json.dumps(each) if isinstance(each, Mapping) else each for each in values]
    is_secret = name == "api_key"
    if not is_secret and isinstance(values, Sequence) and len(values) == 1 and str(values[0]).startswith("["):
        values = _json(name, values[0])
    if not isinstance(values, Sequence) or not all(isinstance(text, str) and text for text in values):
        got = "" if is_secret else f", got {shown(value)}"
        raise ConfigError(f"{name} must be a text or a list of texts, none of them empty{got}")
    return tuple(values)


def _object(name: str, value: Any) -> Mapping[str, Any]:
    given = _json(name, value) if isinstance(value, str) else value
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'{name} must be a JSON object such as {{"enable_thinking": false}}, got {shown(value)}'
        )
    return given


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} must be JSON: {error}; got {shown(text)}") from None
