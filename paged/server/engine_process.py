"""The process that runs an engine for a front end: see `frames`.

Its main thread makes the engine and steps it. Other threads read the orders of the front end, send the
heartbeat, and end the process when the front end has ended, however that came about.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import EngineDeadError, PagedError, QueueFullError, ResourceError
from ..base.interrupts import leave_signals_to_parent
from ..device.threads import share_threads
from ..engine.async_base import Deadline, is_compiled_quickly
from ..engine.engine import LLMEngine
from ..engine.loop import EngineLoop, Recipient
from ..engine.reports import ReportSpec
from ..engine.request_spec import RequestSpec
from ..engine.scoring import ScoreOutput
from ..options.config import EngineConfig
from ..options.sampling_params import RequestOutputKind, SamplingParams
from ..requests.request import Logprob, Request, RequestOutput
from ..scheduler.picture import EnginePicture
from ..text.prompt_parser import ParsedPrompt
from . import frames
from .interpreter import Garbage, switch_often
from .preparations import Preparation, Preparations
from .telemetry.log_lines import formatter_of
from .telemetry.log_queue import log_to_stderr, log_uncaught_errors

if TYPE_CHECKING:
    from ..engine.pinned_files import PinnedPrefixes

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
# Between two outputs of a request whose reader gets all of it at the end: what is computed again at most
# when its process ends.
WHOLE_S = 4.0
STATS_S = 0.25  # they are collected at most this often
MOST_PREPARED = 2  # requests with a grammar or long texts that are prepared beside the steps
RECEIVED_BYTES = 2**16


class Link:
    """The engine process's end of the socket to the front end."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def send(self, report: frames.Report) -> None:
        """Send a frame. Any thread may call this."""
        data = frames.encode(report)
        # A front end that has ended ends this process, too.
        with self._lock, suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def orders(self) -> Iterator[frames.Order | frames.Refused]:
        """Yield the orders of the front end, until the front end ends."""
        reader = frames.FrameReader(frames.decode_order)
        with suppress(ConnectionResetError):
            while data := self._socket.recv(RECEIVED_BYTES):
                yield from reader.feed(data)


def end_with_front_end(connection: socket.socket) -> None:
    """End this process as soon as the other end of the socket is closed, even during a step."""
    poll = select.poll()
    poll.register(connection, 0)  # a hang-up is reported without being asked for
    poll.poll()
    os._exit(0)


class FrameOutbox(Recipient):
    """The outbox of one request: puts the request's outputs into the frame of the step."""

    def __init__(self, key: int, request_id: str, server: EngineServer, *, is_whole: bool = False) -> None:
        super().__init__()
        self._is_whole = is_whole
        self._put_at = -math.inf  # the first one is not late: routers count a request without any for more
        self.key = key
        self.request_id = request_id
        self._server = server
        self.is_gone = False  # the front end wants no more
        self.is_held = False  # its reader is slow
        self._sent_metrics = False

    def wants(self, kind: RequestOutputKind) -> bool:
        """Return whether outputs of an unfinished request are wanted now."""
        if self._is_whole and time.monotonic() - self._put_at < WHOLE_S:
            return False
        return super().wants(kind)

    def put(self, output: RequestOutput) -> None:
        """Add an output to the frame."""
        self._put_at = time.monotonic()
        self._server.forget(self, output.finished)
        first = not self._sent_metrics
        self._sent_metrics = True
        self._server.outputs.append(
            frames.Output(
                self.key,
                [frames.completion_to_wire(completion) for completion in output.outputs],
                output.finished,
                output.num_cached_tokens,
                output.metrics if first or output.finished else None,
            )
        )

    def put_prompt(self, places: Sequence[dict[int, Logprob] | None]) -> bool:
        """Send the next log-probabilities of the prompt, without storing them here."""
        for frame in frames.prompt_places(self.key, places):
            self._server.link.send(frame)
        return True

    def fail(self, error: BaseException) -> None:
        """Refuse the request, unless the whole engine ends."""
        self._server.forget(self, True)
        if not isinstance(error, EngineDeadError):
            self._server.link.send(frames.Refused(self.key, *described(error)))


class ReportOutbox(FrameOutbox):
    """The outbox of a request that only reports on its prompt."""

    def __init__(self, key: int, request_id: str, server: EngineServer, spec: ReportSpec[Any]) -> None:
        super().__init__(key, request_id, server)
        self._spec = spec
        self.request: Request | None = None

    def put(self, output: RequestOutput) -> None:  # noqa: ARG002
        """Add the result of the report to the frame."""
        self._server.forget(self, True)
        assert self.request is not None
        found = self._spec.output(self.request)
        server = self._server
        results = server.scores if isinstance(found, ScoreOutput) else server.embeddings
        results.append((self.key, found))


class EngineServer:
    """Serves the requests of a front end with an engine.

    outputs, embeddings, scores: the contents of the next frame.
    """

    def __init__(
        self,
        engine: LLMEngine,
        stream_interval_s: float,
        link: Link,
        orders: Iterator[frames.Order | frames.Refused],
        adapters: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        self.link = link
        self._adapters = adapters
        self._orders = orders
        self.loop = EngineLoop(engine, stream_interval_s, self._deliver, self._tell_newcomers)
        self.outputs: list[frames.Output] = []
        self.embeddings: list[tuple[int, Any]] = []
        self.scores: list[tuple[int, Any]] = []
        self.stats = engine.stats()
        self._stats_at = time.monotonic()
        self._outboxes: dict[int, FrameOutbox] = {}  # of unfinished requests, by key
        self._preparations = Preparations[Any](MOST_PREPARED)
        self._garbage = Garbage()

    @property
    def ready(self) -> frames.Ready:
        """The first message to the front end."""
        engine = self.engine
        size = engine.block_manager.block_size
        device = engine.core.runner.device.type
        adapters = [*self._adapters]
        return frames.Ready(engine.max_model_len, size, engine.describe(), self.stats, device, adapters)

    @cached_property
    def pinned(self) -> PinnedPrefixes:
        """The pinned prefixes. They are made at the first use, since most engines have none."""
        from ..engine.pinned_files import PinnedPrefixes

        return PinnedPrefixes(self.engine)

    def load_pinned(self, folder: Path) -> None:
        """Load and pin the prefixes that were kept in a folder, before the engine serves."""
        if folder.exists():
            self.pinned.load(folder)
            self.stats = self.engine.stats()

    def run(self) -> None:
        """Serve until a step raises. If the front end ends, the reading thread ends this process."""
        link = self.link
        threading.Thread(target=self._read, name="paged-orders", daemon=True).start()
        threading.Thread(target=self._beat, name="paged-heartbeat", daemon=True).start()
        self.loop.run()
        assert self.loop.dead is not None
        if self.loop.dead.__cause__ is not None:
            link.send(frames.Dead(str(self.loop.dead)))

    def forget(self, outbox: FrameOutbox, finished: bool) -> None:
        """Drop the outbox of a finished request."""
        if finished:
            self._outboxes.pop(outbox.key, None)

    # On the loop's thread

    def _deliver(self) -> None:
        """Send all outputs of a step in one frame."""
        now = time.monotonic()
        if now - self._stats_at >= STATS_S or not self.engine.core.has_work():
            self.stats = self.engine.stats()
            self._stats_at = now
        if self.outputs or self.embeddings or self.scores:
            step = self.engine.scheduler.counters.num_steps
            self.link.send(frames.Outputs(step, self.outputs, self.embeddings, self.scores))
            self.outputs = []
            self.embeddings = []
            self.scores = []

    def _tell_newcomers(self, newcomers: Sequence[Request]) -> None:
        """Tell the front end what a step begins with: it may be what ends this process."""
        step = self.engine.scheduler.counters.num_steps
        outboxes = [group.outbox for group in self.engine.core.groups_of(newcomers)]
        keys = {outbox.key for outbox in outboxes if isinstance(outbox, FrameOutbox)}
        if keys:
            self.link.send(frames.Begun(step, sorted(keys)))

    # On the thread that reads

    def _read(self) -> None:
        code = 1
        try:
            for order in self._orders:
                try:
                    self._take(order)
                except EngineDeadError:
                    pass  # the front end is told once
                except Exception as error:  # of a request; the others go on
                    self.link.send(frames.Refused(getattr(order, "key", None), *described(error)))
            code = 0  # the front end has ended
        except BaseException:  # of any kind: the process ends, and is replaced
            logger.exception("the orders of the front end cannot be read")
        finally:
            self.end(code)

    def end(self, code: int) -> None:
        """End the process."""
        logging.shutdown()  # writes what is buffered
        os._exit(code)

    def _take(self, order: frames.Order | frames.Refused) -> None:
        match order:
            case frames.Refused():
                self.link.send(order)
            case frames.Generate():
                self._generate(order)
            case frames.Fork():
                self._fork(order)
            case frames.Embed() | frames.ScoreTokens():
                self._report(order)
            case frames.Abort():
                self._abort(order.key)
            case frames.Pause():
                self._hold(order.keys, True)
            case frames.Resume():
                self._hold(order.keys, False)
            case frames.Weigh():
                self._tell(lambda engine: engine.set_tenant_weights(order.weights))
            case frames.ShareThreads():
                self._tell(lambda _: share_threads(order.num_engines))
            case frames.ForgetPrefixes():
                self._tell(self._forget_prefixes)
            case frames.LoadAdapter():
                self._load_adapter(order)
            case frames.ForgetAdapter():
                self._tell(lambda engine: self._forget_adapter(engine, order.content_hash))
            case frames.Pin() | frames.KeepPinned():
                self._count(order)
            case frames.Ask():
                self.loop.call(lambda engine: self._answer(order.key, engine))
            case frames.Look():
                self.loop.look().add_done_callback(lambda seen: self._show(order.key, seen))
            case frames.Start():
                raise AssertionError("the engine is made already")

    def _forget_prefixes(self, engine: LLMEngine) -> None:
        engine.reset_prefix_cache()
        if "pinned" in vars(self):
            self.pinned.forget()

    def _forget_adapter(self, engine: LLMEngine, content_hash: str) -> None:
        engine.forget_adapter(content_hash)
        if "pinned" in vars(self):
            self.pinned.unpin_all_of(content_hash)

    def _count(self, order: frames.Pin | frames.KeepPinned) -> None:
        """Do what an order about pinned prefixes says between two steps, and answer."""

        def done(call: Future[int]) -> None:
            error = call.exception()
            if error is None:
                self.link.send(frames.Counted(order.key, call.result()))
            elif not isinstance(error, EngineDeadError):
                self.link.send(frames.Refused(order.key, *described(error)))

        self.loop.call(lambda _: self._counted(order)).add_done_callback(done)

    def _counted(self, order: frames.Pin | frames.KeepPinned) -> int:
        if isinstance(order, frames.KeepPinned):
            if "pinned" not in vars(self):
                return 0
            return self.pinned.keep(Path(order.folder), order.most_bytes)
        pinned = self.pinned
        return (pinned.pin if order.is_pinned else pinned.unpin)(order.token_ids, order.namespace)

    def _answer(self, key: int, engine: LLMEngine) -> None:
        """Send the current stats. Later heartbeats must not have older ones, or counts would fall."""
        self.stats = engine.stats()
        self._stats_at = time.monotonic()
        self.link.send(frames.Answer(key, self.stats))

    def _show(self, key: int, seen: Future[EnginePicture]) -> None:
        """Send a picture, unless the engine has stopped; another frame tells the front end that."""
        error = seen.exception()
        if error is None:
            self.link.send(frames.Seen(key, seen.result()))
        elif not isinstance(error, EngineDeadError):
            logger.error("there is no picture of the engine", exc_info=error)
            self.link.send(frames.Refused(key, *described(error)))

    def _tell(self, function: Callable[[LLMEngine], object]) -> None:
        """Call a function of the engine between two steps, and log what it raises."""

        def log(call: Future[object]) -> None:
            if not call.cancelled() and (error := call.exception()) is not None:
                logger.error("unexpected error", exc_info=error)

        self.loop.call(function).add_done_callback(log)

    def _load_adapter(self, order: frames.LoadAdapter) -> None:
        """Read an adapter while the engine computes steps, and tell the front end its hash."""

        def answer(loading: Future[str]) -> None:
            if (error := loading.exception()) is not None:
                fail(error)
            else:
                self.link.send(frames.AdapterLoaded(order.key, loading.result()))

        def fail(error: BaseException) -> None:
            if not isinstance(error, EngineDeadError):
                self.link.send(frames.Refused(order.key, *described(error)))

        def add(read: Any) -> None:
            with suppress(EngineDeadError):
                self.loop.call(lambda engine: engine.load_adapter(read)).add_done_callback(answer)

        preparation = Preparation(
            key=order.key,
            tenant="",
            left_s=None,
            prepare=lambda: self.loop.prepare_adapter(order.adapter.request()),
            add=add,
            fail=fail,
            give_up=lambda: None,
        )
        self._preparations.submit(preparation)

    def _report(self, order: frames.Embed | frames.ScoreTokens) -> None:
        spec = order.spec
        outbox = ReportOutbox(order.key, order.request_id, self, spec)
        self._outboxes[order.key] = outbox
        deadline = Deadline(order.terms.timeout_s)
        request = None if order.adapter is None else order.adapter.request()

        def add(adapter: Any) -> None:
            def add_to(engine: LLMEngine) -> None:
                engine.prompts.check_parsed(spec.prompt)
                terms = order.terms._replace(timeout_s=deadline.left_s, lora_request=adapter)
                # Set before a step may finish it.
                outbox.request = engine.core.add_report(order.request_id, spec, terms, outbox)

            self._submit(add_to, outbox)

        if not self.loop.reads(request):
            add(request)
            return
        preparation = Preparation(
            key=outbox,
            tenant=order.terms.tenant,
            left_s=deadline.left_s,
            prepare=lambda: self.loop.prepare_adapter(request),
            add=add,
            fail=outbox.fail,
            give_up=lambda: add(request),
        )
        self._preparations.submit(preparation)

    def _generate(self, order: frames.Generate) -> None:
        outbox = FrameOutbox(order.key, order.request_id, self, is_whole=order.is_whole)
        self._outboxes[order.key] = outbox
        try:
            params = frames.params_from_wire(order.params)
        except PagedError as error:
            outbox.fail(error)
            return
        most = None if order.resumed is not None else self.engine.config.max_waiting
        deadline = Deadline(params.timeout_s)

        def add(spec: RequestSpec) -> None:
            def add_to(engine: LLMEngine) -> None:
                engine.core.add(order.request_id, replace(spec, timeout_s=deadline.left_s), outbox)

            self._submit(add_to, outbox)

        adapter = None if order.adapter is None else order.adapter.request()
        if is_compiled_quickly(params) and not self.loop.reads(adapter):
            try:
                spec = self._prepared(order, params)
            except Exception as error:  # told to the front end, whose request it is
                outbox.fail(error)
                return
            add(spec)
        elif most is not None and len(self._preparations) >= most:
            outbox.fail(
                QueueFullError(
                    f"{most} requests wait for their grammars or adapters and max_waiting is {most}; try "
                    "again later"
                )
            )
        else:
            preparation = Preparation(
                key=outbox,
                tenant=order.tenant,
                left_s=deadline.left_s,
                prepare=lambda: self._prepared(order, params),
                add=add,
                fail=outbox.fail,
                # Its reader may wait for a last output: it is added, and aborted at once.
                give_up=lambda: add(self._prepared(order, _shortened(params))),
            )
            self._preparations.submit(preparation)

    def _prepared(self, order: frames.Generate, params: SamplingParams) -> RequestSpec:
        prompt = ParsedPrompt(None, order.token_ids, order.namespace, order.images)
        spec = RequestSpec(
            prompt,
            params,
            tenant=order.tenant,
            generated_token_ids=order.generated_token_ids,
            resumed=order.resumed,
            part_of=order.part_of,
            lora_request=None if order.adapter is None else order.adapter.request(),
        )
        return self.loop.prepare(spec)

    def _fork(self, order: frames.Fork) -> None:
        outbox = self._outboxes[order.key] = FrameOutbox(order.key, order.new_request_id, self)
        params = None if order.params is None else frames.params_from_wire(order.params)
        names = order.request_id, order.new_request_id
        self._submit(lambda engine: engine.core.fork(*names, params, outbox), outbox)

    def _submit(self, add: Callable[[LLMEngine], object], outbox: FrameOutbox) -> None:
        def add_unless_gone(engine: LLMEngine) -> None:
            add(engine)
            if outbox.is_gone:  # aborted meanwhile: its reader may wait for the last output
                engine.abort_request(outbox.request_id)
            elif outbox.is_held:
                engine.core.hold(outbox.request_id, True)

        with suppress(EngineDeadError):
            self.loop.add(add_unless_gone, outbox)

    def _abort(self, key: int) -> None:
        if (outbox := self._outboxes.get(key)) is not None:
            outbox.is_gone = True
            self._preparations.drop(outbox)
            self.loop.abort(outbox.request_id, outbox)

    def _hold(self, keys: list[int], is_held: bool) -> None:
        for key in keys:
            if (outbox := self._outboxes.get(key)) is not None:
                outbox.is_held = is_held  # for a request that is not added yet
                self.loop.hold(outbox.request_id, outbox, is_held)

    # On the thread of the heartbeat

    def _beat(self) -> None:
        while self.loop.dead is None:
            step = self.engine.scheduler.counters.num_steps
            self.link.send(frames.Heartbeat(step, self.stats, not self.loop.is_waiting))
            self._garbage.collect(is_idle=not self.engine.core.has_work())
            time.sleep(HEARTBEAT_S)


def _shortened(params: SamplingParams) -> SamplingParams:
    """Return the parameters without the fields that take long to prepare."""
    return replace(params, structured_outputs=None, dry_multiplier=0.0, stop=[], bad_words=[])


def described(error: BaseException) -> tuple[str, str, str | None]:
    """Return class name, message and param of an error, as `frames.Refused` stores them."""
    if isinstance(error, PagedError):
        return type(error).__name__, str(error), error.param
    logger.error("unexpected error", exc_info=error)
    return "RuntimeError", f"{type(error).__name__}: {error}", None


def refusal_of(start: frames.Start, error: BaseException) -> frames.Refused:
    """Return the message about an error during the start. It says whether another machine may succeed."""
    kind, message, param = described(error)
    host = socket.gethostname()
    where = "" if host == start.host else f"on the machine {host}: "
    return frames.Refused(None, kind, where + message, param)


def check_affinity() -> None:
    """Raise ResourceError if this system cannot bind processes to cores."""
    if sys.platform != "linux":
        raise ResourceError("several replicas on a CPU need Linux, where each gets its share of the cores")


def read_adapters(engine: LLMEngine, adapters: Sequence[frames.Adapter]) -> list[str]:
    """Read the LoRA adapters of a start. Return their hashes.

    If an earlier process has read one, its requests alone need it: as many as stay in memory are read again,
    the newest, and one that cannot be read is logged.

    Raises RequestError for any other one that cannot be read.
    """
    hashes = []
    most = engine.config.max_cpu_loras or engine.config.max_loras
    for i, adapter in enumerate(adapters):
        if adapter.content_hash is None:
            hashes.append(engine.load_adapter(adapter.request()))
            continue
        hashes.append(adapter.content_hash)
        if i >= len(adapters) - most:
            try:
                engine.load_adapter(adapter.request())
            except PagedError as error:
                logger.error("%s", error)
    return hashes


def take_share(start: frames.Start) -> None:
    """Restrict this process, and its model's other processes, to their GPUs or their share of the cores.

    Raises ResourceError if there are fewer GPUs or cores than processes.
    """
    if start.num_replicas == 1:
        return
    import torch

    options = start.options
    num_ranks = EngineConfig(**options).num_ranks
    num_processes = start.num_replicas * num_ranks
    num_gpus = 0 if options.get("device") == "cpu" else torch.cuda.device_count()  # does not start CUDA
    if not num_gpus:
        check_affinity()
    cores = [] if num_gpus else sorted(os.sched_getaffinity(0))
    count, what = (num_gpus, "GPUs") if num_gpus else (len(cores), "CPU cores")
    if count < num_processes:
        of_each = f" of {num_ranks} processes each" if num_ranks > 1 else ""
        raise ResourceError(
            f"{start.num_replicas} replicas{of_each} need {num_processes} {what}; there are {count}"
        )
    if num_gpus:
        # Read when CUDA or ROCm starts.
        name = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
        listed = os.environ.get(name) or os.environ.get("CUDA_VISIBLE_DEVICES", "")
        shown = [each for each in listed.split(",") if each]
        gpus = shown or [*map(str, range(num_gpus))]
        os.environ[name] = ",".join(gpus[start.replica * num_ranks : (start.replica + 1) * num_ranks])
        return
    size = len(cores) // start.num_replicas
    os.sched_setaffinity(0, cores[start.replica * size : (start.replica + 1) * size])


def main() -> None:
    """Serve the front end at the other end of a socket, whose descriptor is the command's argument."""
    leave_signals_to_parent()
    log = log_to_stderr()
    log_uncaught_errors()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    switch_often()
    threading.Thread(target=end_with_front_end, args=(connection,), name="paged-parent", daemon=True).start()
    link = Link(connection)
    start = next(orders := link.orders(), None)
    if not isinstance(start, frames.Start):
        return
    log.setFormatter(formatter_of(start.log_format))
    # The front end has read the same defaults.
    logging.getLogger("paged.engine.model_text").setLevel(logging.ERROR)
    gc.disable()  # what imports and the engine create stays until the process ends
    try:
        take_share(start)
        engine = LLMEngine(**start.options)
        adapters = read_adapters(engine, start.adapters)
        server = EngineServer(engine, start.stream_interval_s, link, orders, adapters)
        if start.prefixes:
            server.load_pinned(Path(start.prefixes))
    except Exception as error:
        link.send(refusal_of(start, error))
        return
    link.send(server.ready)
    server.run()


if __name__ == "__main__":
    main()
