"""Prompts without end through an engine with bounded memory: what `generate` and `stream` run on."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Integral
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from tqdm import tqdm

from ..errors import PagedError, RequestError
from ..requests.request import Outbox, Prompt, PromptReport, Request, RequestGroup, RequestOutput
from ..sampling_params import SamplingParams
from ..text.prompt_parser import ParsedPrompt
from .core import EngineCore

T = TypeVar("T")
# How many prompts are taken ahead of the outputs that were handed out: enough to keep every step full, and
# so many that the lists people have are checked as a whole before anything runs.
WINDOW = 4096
_END = object()


class Row(NamedTuple):
    """A prompt and what it runs under."""

    prompt: Prompt
    sampling_params: SamplingParams
    priority: float | None
    tenant: str
    timeout_s: float | None


class Rows:
    """The prompts and, one for all or one for each, what they run under: taken one by one as they are needed.

    Raises RequestError if there are more or fewer of one than of the prompts: at once where both have a
    length, else when that is found out.
    """

    def __init__(self, prompts: Any, sampling_params: Any, **columns: Any) -> None:
        prompts = as_iterable(prompts)
        self.num_prompts = len(prompts) if isinstance(prompts, Sized) else None
        columns = {"sampling_params": sampling_params, **columns}
        if columns["sampling_params"] is None:
            columns["sampling_params"] = SamplingParams()
        self._lists = {name: value for name, value in columns.items() if _is_many(value)}
        for name, value in self._lists.items():
            if self.num_prompts is not None and isinstance(value, Sized) and len(value) != self.num_prompts:
                raise RequestError(f"{len(value)} {name} for {self.num_prompts} prompts; give one or as many")
        self._constants = {name: value for name, value in columns.items() if name not in self._lists}
        self._num_taken = 0
        self._rows = itertools.zip_longest(prompts, *self._lists.values(), fillvalue=_END)

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        prompt, *values = next(self._rows)
        for name, value in zip(self._lists, values, strict=True):
            if (value is _END) != (prompt is _END):
                than = "more" if prompt is _END else "fewer"
                raise RequestError(
                    f"there are {than} {name} than prompts, of which {self._num_taken} were taken"
                )
        self._num_taken += 1
        return Row(prompt, **self._constants, **dict(zip(self._lists, values, strict=True)))


class Generation:
    """One call's requests on their way through an engine.

    Of the requests made, at most `window` are not handed out. A prompt that is wrong ends the reading: its
    error is raised at once in the first window, before anything runs, and else when those before it are done.
    """

    def __init__(self, core: EngineCore, rows: Rows, *, use_tqdm: bool) -> None:
        self._core, self._rows = core, rows
        self._use_tqdm = use_tqdm
        self.window = max(WINDOW, 2 * core.scheduler.max_num_seqs)
        self._outbox = Outbox()
        self._unfinished: dict[str, int] = {}  # ids, and the places of their prompts
        self._pending: deque[RequestGroup] = deque()  # those that the scheduler has not got yet
        self._num_made, self._num_handed_out = 0, 0
        self._is_exhausted = False
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        try:
            self._read_ahead()
            if self._error is not None:
                raise self._error
        except BaseException:
            self._abort()
            raise
        self._started, self._num_tokens = time.perf_counter(), 0
        self._bar = tqdm(
            total=self._rows.num_prompts, desc="Generating", unit="request", disable=not self._use_tqdm
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._abort()

    def is_running(self) -> bool:
        """Read on as far as the window goes. Whether there is anything left to run.

        Raises the error of a prompt that is wrong, once those before it are done.
        """
        self._read_ahead()
        if not self._unfinished and self._error is not None:
            raise self._error
        return bool(self._unfinished)

    def step(self, *, every_token: bool) -> list[tuple[int, RequestOutput]]:
        """Run a step. Returns who finished or, with every_token, got one: place of the prompt, and output."""
        core = self._core
        _queue(core, self._pending)
        advanced = core.advance()
        # Most steps finish nobody, and need not be looked through.
        core.publish([g for g in core.groups_of(advanced) if g.outbox is self._outbox] if every_token else [])
        self._num_tokens += len(advanced)
        return [self._book(output) for output in self._outbox.take()]

    def hand_out(self, output: RequestOutput) -> RequestOutput:
        """The output. If it is a last one, there is place for another request."""
        self._num_handed_out += output.finished
        return output

    def _book(self, output: RequestOutput) -> tuple[int, RequestOutput]:
        if not output.finished:
            return self._unfinished[output.request_id], output
        rate = self._num_tokens / (time.perf_counter() - self._started)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update()
        return self._unfinished.pop(output.request_id), output

    def _read_ahead(self) -> None:
        while not self._is_exhausted and self._num_made - self._num_handed_out < self.window:
            try:
                group = named(f"prompts[{self._num_made}]", self._next_group)
            except StopIteration:
                self._is_exhausted = True
            except Exception as error:
                self._is_exhausted = True
                self._error = error
            else:
                self._unfinished[group.request_id] = self._num_made
                self._pending.append(group)
                self._num_made += 1

    def _next_group(self) -> RequestGroup:
        row = next(self._rows)
        return self._core.new_group(self._core.next_id(), *row, outbox=self._outbox)

    def _abort(self) -> None:
        """After an error, an interrupt or an end before the end nobody takes what is left."""
        for request_id in [*self._unfinished]:
            # Its last output may wait for nobody any more, and somebody else have the id.
            group = self._core.groups.get(request_id)
            if group is not None and group.outbox is self._outbox:
                self._core.abort(request_id)


def run_reports(
    core: EngineCore,
    name: str,
    wanted: Sequence[tuple[ParsedPrompt, PromptReport]],
    priority: float,
    tenant: str,
    *,
    use_tqdm: bool,
) -> list[Request]:
    """Compute prompts only for what is to be reported of them; what is wrong is told by name."""
    groups, outbox = list[RequestGroup](), Outbox()
    try:
        for i, terms in enumerate(wanted):
            now, new = core.scheduler.clock(), core.factory.new_report
            group = named(f"{name}[{i}]", new, core.next_id(), *terms, priority, tenant, now)
            core.book(group, outbox)
            groups.append(group)
        pending, num_left = deque(groups), len(groups)
        with tqdm(total=num_left, desc="Computing", unit="prompt", disable=not use_tqdm) as bar:
            while num_left:
                _queue(core, pending)
                core.advance_others()
                num_finished = len(outbox.take())
                num_left -= num_finished
                bar.update(num_finished)
    finally:
        for group in groups:
            core.abort(group.request_id)
    return [group.samples[0] for group in groups]


def _queue(core: EngineCore, pending: deque[RequestGroup]) -> None:
    """Give the scheduler as many as may wait."""
    scheduler, most = core.scheduler, core.scheduler.max_waiting
    while pending and (most is None or scheduler.num_waiting < most):
        group = pending.popleft()
        if not group.finished:  # aborted by its id
            scheduler.add(group.samples[0])


def in_order(core: EngineCore, rows: Rows, *, use_tqdm: bool) -> Iterator[RequestOutput]:
    """The last output of each prompt, in the order of the prompts."""
    with Generation(core, rows, use_tqdm=use_tqdm) as generation:
        done, place = dict[int, RequestOutput](), 0
        while generation.is_running():
            done |= generation.step(every_token=False)
            while place in done:
                yield generation.hand_out(done.pop(place))
                place += 1


def as_they_come(core: EngineCore, rows: Rows) -> Iterator[RequestOutput]:
    """Every output of every prompt."""
    with Generation(core, rows, use_tqdm=False) as generation:
        while generation.is_running():
            for _, output in generation.step(every_token=True):
                yield generation.hand_out(output)


def as_iterable(prompts: Any) -> Iterable[Prompt]:
    """One prompt, or many of them, as many. A list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping | bytes | bytearray):
        return [prompts]
    if not _is_iterable(prompts):
        raise RequestError(f"prompts must be a prompt or an iterable of them, got {prompts!r}")
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], Integral):
        return [prompts]
    iterable: Iterable[Prompt] = prompts
    return iterable


def as_list(prompts: Any) -> list[Prompt]:
    """As `as_iterable`, and at least one."""
    listed = [*as_iterable(prompts)]
    if not listed:
        raise RequestError("prompts must have at least one entry, got []")
    return listed


def named(name: str, function: Callable[..., T], *args: Any) -> T:
    """The function of these arguments; what it refuses is refused under a name."""
    try:
        return function(*args)
    except PagedError as error:
        raise type(error)(f"{name}: {error}") from error


def _is_many(value: Any) -> bool:
    return _is_iterable(value) and not isinstance(value, str | Mapping | bytes)


def _is_iterable(value: Any) -> bool:
    # A tensor of one number has the methods, and is none.
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0
