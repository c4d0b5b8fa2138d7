"""Frames between the front end and an engine process: their schema, and how they are cut from a stream.

A frame is its length in 4 bytes, little-endian, and a msgpack array that begins with the name of its type.
docs/serving-processes.md describes each.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Generic, Self, TypeVar, overload

import msgspec

from ..base.errors import RequestError
from ..base.validation import MAX_INT
from ..engine.embedding import EmbeddingRequestOutput, EmbeddingSpec
from ..engine.reports import ReportTerms
from ..engine.request_spec import SampleSoFar
from ..engine.scoring import ScoreOutput, ScoreSpec
from ..options.lora_request import LoRARequest
from ..options.sampling_params import SamplingParams
from ..requests.request import CompletionOutput, ErrorKind, FinishReason, Logprob, PromptImage, RequestMetrics
from ..scheduler.picture import EnginePicture
from ..scheduler.stats import EngineStats
from .telemetry.log_lines import LogFormat

T = TypeVar("T")
P = TypeVar("P")

NOT_SENT = {"logits_processors": "Python functions cannot cross to the engine's process"}
LENGTH_BYTES = 4
MOST_FRAME_BYTES = 2**31 - 1
CANDIDATES_OF_FRAME = 4096  # the event loop decodes a frame at once
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams) if field.name not in NOT_SENT}
_HINTS = typing.get_type_hints(SamplingParams)

# The fields of SamplingParams that differ from their defaults, each of its type.
Params: type[msgspec.Struct] = msgspec.defstruct(
    "Params",
    [(name, _HINTS[name] | msgspec.UnsetType, msgspec.UNSET) for name in _DEFAULTS],
    kw_only=True,
    forbid_unknown_fields=True,
)

# The token ids, log-probabilities, ranks and texts of the candidates at one place of a text. By columns they
# are decoded several times as fast: the event loop waits for it.
Place = tuple[list[int], list[float], list[int], list[str | None]]


class Frame(msgspec.Struct, array_like=True, tag=True):
    """A message between front end and engine process.

    key: the front end's number for the request.
    """


class Adapter(msgspec.Struct, array_like=True):
    """A LoRA adapter: see `LoRARequest`. content_hash: None for the first one that reads it."""

    name: str
    number: int
    path: str
    content_hash: str | None = None

    @classmethod
    def of(cls, request: LoRARequest | None) -> Self | None:
        """Return the frame's form of a request's adapter; None for None."""
        return None if request is None else cls.named(request)

    @classmethod
    def named(cls, request: LoRARequest) -> Self:
        """Return what is sent of an adapter."""
        return cls(request.lora_name, request.lora_int_id, request.lora_path, request.content_hash)

    def request(self) -> LoRARequest:
        """Return the request for the adapter."""
        return LoRARequest(self.name, self.number, self.path, content_hash=self.content_hash)


# From the front end


class Start(Frame):
    """The first frame: make an engine with these arguments of `LLMEngine`.

    log_format: the format of the process's lines on stderr.
    replica: the number of this process among num_replicas. The processes share the cores, or have a GPU each.
    host: the name of the front end's machine.
    adapters: the LoRA adapters that the engine reads before it serves. The start fails if one cannot be
        read; but if the adapter's content_hash is known, only its own requests fail.
    prefixes: the folder of pinned prefixes to load before serving; "" for none.
    """

    options: dict[str, Any]
    stream_interval_s: float
    log_format: LogFormat
    replica: int
    num_replicas: int
    host: str
    adapters: list[Adapter] = []
    prefixes: str = ""


class Generate(Frame):
    """Add a request.

    namespace: what the KV of the prompt depends on besides its tokens.
    resumed: the samples to continue, if the process that had the request has ended.
    is_whole: whether the reader gets a single output, so that deltas need not be sent often.
    part_of: see `RequestInputs`.
    images: of the prompt.
    """

    key: int
    request_id: str
    token_ids: list[int]
    namespace: bytes
    params: Params  # type: ignore[valid-type]
    tenant: str
    generated_token_ids: list[int]
    resumed: list[SampleSoFar] | None = None
    is_whole: bool = False
    part_of: str = ""
    images: tuple[PromptImage, ...] = ()
    adapter: Adapter | None = None


class Fork(Frame):
    """Duplicate an unfinished request. new_request_id is the id of the fork."""

    key: int
    request_id: str
    new_request_id: str
    params: Params | None  # type: ignore[valid-type]


class Embed(Frame):
    """Embed a prompt."""

    key: int
    request_id: str
    spec: EmbeddingSpec
    terms: ReportTerms
    adapter: Adapter | None = None


class ScoreTokens(Frame):
    """Report the log-probabilities of the last tokens of a prompt."""

    key: int
    request_id: str
    spec: ScoreSpec
    terms: ReportTerms
    adapter: Adapter | None = None


class Abort(Frame):
    """End a request, if it is unfinished."""

    key: int


class Pause(Frame):
    """Stop computing some requests for now, because their reader is slow."""

    keys: list[int]


class Resume(Frame):
    """Continue paused requests."""

    keys: list[int]


class Weigh(Frame):
    """Divide the engine's service among tenants by these weights from now on, under policy "fair"."""

    weights: dict[str, float]


class ShareThreads(Frame):
    """Compute with an equal share of the CPU threads, as so many engines are busy on this machine."""

    num_engines: int


class ForgetPrefixes(Frame):
    """Forget all cached prefixes. Running requests keep their blocks."""


class LoadAdapter(Frame):
    """Read a LoRA adapter into memory, and answer with its hash."""

    key: int
    adapter: Adapter


class ForgetAdapter(Frame):
    """Free the memory of an adapter. Unfinished requests keep it."""

    content_hash: str


class Pin(Frame):
    """Pin the cached blocks of a prefix, or allow them to be evicted again, and answer with `Counted`."""

    key: int
    token_ids: list[int]
    namespace: bytes
    is_pinned: bool


class KeepPinned(Frame):
    """Write the pinned prefixes to a folder, and answer with `Counted`.

    most_bytes: that the files of all models, in folders beside it, may take.
    """

    key: int
    folder: str
    most_bytes: int


class Ask(Frame):
    """Answer with the current `EngineStats`, between two steps."""

    key: int


class Look(Frame):
    """Answer with an `EnginePicture` of the next step, or of an idle engine."""

    key: int


Order = (
    Start
    | Generate
    | Fork
    | Embed
    | ScoreTokens
    | Abort
    | Pause
    | Resume
    | Weigh
    | ShareThreads
    | ForgetPrefixes
    | LoadAdapter
    | ForgetAdapter
    | Pin
    | KeepPinned
    | Ask
    | Look
)

# From the engine process


class Ready(Frame):
    """The engine is made.

    device: the type of the device that computes, such as "cpu".
    adapters: the hashes of the LoRA adapters in `Start`.
    """

    max_model_len: int
    block_size: int
    description: str
    stats: EngineStats
    device: str
    adapters: list[str] = []


class Refused(Frame):
    """An error: of a request if `key` is set, otherwise of the start. `kind` is the name of the error's
    class.

    param: the wrong parameter; see `PagedError`.
    """

    key: int | None
    kind: str
    message: str
    param: str | None = None


class Completion(msgspec.Struct, array_like=True):
    """The new part of a sample since its last output, with the fields of `CompletionOutput`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[Place] | None = None
    cumulative_logprob: float | None = None
    error_kind: ErrorKind | None = None


class Output(msgspec.Struct, array_like=True):
    """The new part of a request, with the fields of `RequestOutput`.

    `metrics` is sent with the first and the last output. `PromptPlaces` come before the first token.
    """

    key: int
    completions: list[Completion]
    finished: bool
    num_cached_tokens: int | None
    metrics: RequestMetrics | None


class PromptPlaces(Frame):
    """The next log-probabilities of a prompt: at most CANDIDATES_OF_FRAME candidates, or one place."""

    key: int
    places: list[Place | None]


class Begun(Frame):
    """The requests that the next step is the first to compute. The frame is sent before that step.

    step: see `Outputs`.
    """

    step: int
    keys: list[int]


class Outputs(Frame):
    """All outputs of a step, and the reports that the step finished.

    step: the number of steps so far.
    """

    step: int
    outputs: list[Output]
    embeddings: list[tuple[int, EmbeddingRequestOutput]]
    scores: list[tuple[int, ScoreOutput]]


class Answer(Frame):
    """The answer to `Ask`."""

    key: int
    stats: EngineStats


class Seen(Frame):
    """The answer to `Look`."""

    key: int
    picture: EnginePicture


class AdapterLoaded(Frame):
    """The answer to `LoadAdapter`."""

    key: int
    content_hash: str


class Counted(Frame):
    """The answer to `Pin`: of how many tokens; and to `KeepPinned`: how many prefixes were written."""

    key: int
    count: int


class Heartbeat(Frame):
    """A sign of life. A separate thread sends it every second, since a step may take longer.

    step: the number of steps so far.
    stats: the stats as of the last step that ended.
    is_busy: whether a step is being computed or prepared.
    """

    step: int
    stats: EngineStats
    is_busy: bool


class Dead(Frame):
    """A step raised, and the process ends."""

    message: str


Report = (
    Ready
    | Refused
    | PromptPlaces
    | Begun
    | Outputs
    | Answer
    | Seen
    | AdapterLoaded
    | Counted
    | Heartbeat
    | Dead
)


def _plain(value: Any) -> Any:
    """Return the value of a subclass of float, such as `RoundedFloat`, as a float."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"objects of type {type(value).__name__} are unsupported")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_order_decoder = msgspec.msgpack.Decoder(Order)
decode_report: Callable[[Any], Report] = msgspec.msgpack.Decoder(Report).decode


def encode(frame: Order | Report) -> bytes:
    """Return a frame preceded by its length. Raises RequestError for values that msgpack cannot hold."""
    buffer = bytearray(LENGTH_BYTES)
    try:
        _encoder.encode_into(frame, buffer, LENGTH_BYTES)
    except (OverflowError, TypeError, UnicodeEncodeError) as error:  # 2**64, an object, a lone surrogate
        raise RequestError(f"the request cannot be sent to the engine's process: {error}") from error
    size = len(buffer) - LENGTH_BYTES
    if size > MOST_FRAME_BYTES:
        raise RequestError(f"a request of {size:,} bytes is too large for the engine's process")
    buffer[:LENGTH_BYTES] = size.to_bytes(LENGTH_BYTES, "little")
    return bytes(buffer)


def decode_order(content: bytes | memoryview) -> Order | Refused:
    """Decode an order. If a value of a request has the wrong type, return the request's refusal."""
    try:
        order: Order = _order_decoder.decode(content)
        return order
    except msgspec.ValidationError as error:
        given = msgspec.msgpack.decode(content)
        if isinstance(given, list) and len(given) > 1 and isinstance(given[1], int):
            return Refused(given[1], "RequestError", f"the engine's process refuses the request: {error}")
        raise


class FrameReader(Generic[T]):
    """Cuts frames from a stream of bytes, and decodes them."""

    def __init__(self, decode: Callable[[Any], T]) -> None:
        self._decode = decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Add received bytes. Return the frames that are now complete."""
        self._buffer += data
        at = 0
        found = []
        with memoryview(self._buffer) as view:
            while at + LENGTH_BYTES <= len(view):
                start = at + LENGTH_BYTES
                end = start + int.from_bytes(view[at:start], "little")
                if end > len(view):
                    break
                with view[start:end] as content:
                    found.append(self._decode(content))
                at = end
        del self._buffer[:at]
        return found


def params_to_wire(params: SamplingParams, **changes: Any) -> Any:
    """Convert parameters for a frame. Raises RequestError for values that cannot be sent.

    changes: valid values that override those of `params`.
    """
    for name, reason in NOT_SENT.items():
        if getattr(params, name):
            raise RequestError(f"{name} cannot be given here: {reason}")
    given = {name: getattr(params, name) for name in _DEFAULTS} | changes
    sent = {name: _sendable(value) for name, value in given.items() if value != _DEFAULTS[name]}
    return Params(**sent)


def _sendable(value: Any) -> Any:
    """Return an int of more than 64 bits, which a frame cannot hold, as the float that it stands for."""
    return float(value) if isinstance(value, int) and not -MAX_INT - 1 <= value <= MAX_INT else value


def params_from_wire(params: Any) -> SamplingParams:
    """Convert the parameters in a frame to SamplingParams."""
    given = {name: getattr(params, name) for name in _DEFAULTS}
    return SamplingParams(**{name: value for name, value in given.items() if value is not msgspec.UNSET})


def completion_to_wire(completion: CompletionOutput) -> Completion:
    """Convert a sample's output for a frame."""
    logprobs = completion.logprobs
    return Completion(
        completion.index,
        completion.text,
        [*completion.token_ids],
        completion.finish_reason,
        completion.stop_reason,
        None if logprobs is None else [place_to_wire(place) for place in logprobs],
        completion.cumulative_logprob,
        completion.error_kind,
    )


def place_to_wire(place: dict[int, Logprob]) -> Place:
    """Convert the candidates at one position of a text for a frame."""
    candidates = [*place.values()]
    return (
        [*place],
        [candidate.logprob for candidate in candidates],
        [candidate.rank for candidate in candidates],
        [candidate.decoded_token for candidate in candidates],
    )


def prompt_places(key: int, prompt_logprobs: Sequence[dict[int, Logprob] | None]) -> Iterator[PromptPlaces]:
    """Yield frames with the next log-probabilities of a prompt."""
    places: list[Place | None] = []
    num = 0
    for candidates in prompt_logprobs:
        size = 0 if candidates is None else len(candidates)
        if places and num + size > CANDIDATES_OF_FRAME:
            yield PromptPlaces(key, places)
            places = []
            num = 0
        places.append(None if candidates is None else place_to_wire(candidates))
        num += size
    yield PromptPlaces(key, places)


def place_from_wire(place: Place) -> dict[int, Logprob]:
    """Convert the candidates in a frame to Logprobs by token id."""
    return dict(zip(place[0], map(Logprob, *place[1:]), strict=True))


class Places(Sequence[P]):
    """The candidates at positions of a text, decoded from frames each time they are read.

    Read on a worker thread, since decoding takes long; add on the event loop.
    """

    __slots__ = ("_stop", "_wire")

    def __init__(self, wire: Sequence[Place | None] = ()) -> None:
        self._wire = [*wire]
        self._stop: int | None = None

    def so_far(self) -> Places[P]:
        """Return a view of the current positions, without a copy. Positions added later are not in it."""
        places = Places[P]()
        places._wire = self._wire
        places._stop = len(self)
        return places

    def add(self, wire: Sequence[Place | None]) -> None:
        """Add the candidates at the next positions."""
        self._wire += wire

    @property
    def num_candidates(self) -> int:
        """The approximate number of candidates at all positions, estimated without decoding."""
        num = len(self)
        last = self._wire[num - 1] if num else None
        return 0 if last is None else num * len(last[0])

    def __len__(self) -> int:
        return len(self._wire) if self._stop is None else self._stop

    @overload
    def __getitem__(self, index: int) -> P: ...

    @overload
    def __getitem__(self, index: slice) -> list[P]: ...

    def __getitem__(self, index: int | slice) -> Any:
        found = range(len(self))[index]
        if isinstance(found, range):
            return [self._read(i) for i in found]
        return self._read(found)

    def _read(self, index: int) -> dict[int, Logprob] | None:
        place = self._wire[index]
        return place and place_from_wire(place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == [*other]

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        return repr(self[:])
