"""Any number of prompts through an engine with bounded memory: what `generate` and `stream` run on."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Integral
from types import TracebackType
from typing import Any, Self, TypeVar

from tqdm import tqdm

from ..base.errors import PagedError, RequestError
from ..requests.request import Outbox, Prompt, RequestGroup, RequestOutput
from .core import EngineCore
from .request_spec import RequestSpec

T = TypeVar("T")
Progress = bool | Callable[..., "tqdm[Any]"]
# How many prompts are read ahead of the outputs that were returned: enough to keep every step full, and so
# many that lists of usual length are validated as a whole before anything runs.
WINDOW = 4096
_END = object()


class RequestSource(Iterator[RequestSpec]):
    """The requests of one call, read one by one: prompts, with parameters given once or per prompt.

    Raises RequestError if the numbers of parameters and prompts differ: at once if both have a length,
    otherwise when the shorter iterable ends.
    """

    def __init__(
        self,
        prompts: Any,
        sampling_params: Any,
        priority: Any = None,
        tenant: Any = "",
        timeout_s: Any = None,
        lora_request: Any = None,
    ) -> None:
        prompts = as_iterable(prompts)
        self.num_prompts = len(prompts) if isinstance(prompts, Sized) else None
        columns = {
            "sampling_params": sampling_params,
            "priority": priority,
            "tenant": tenant,
            "timeout_s": timeout_s,
            "lora_request": lora_request,
        }
        self._lists = {name: value for name, value in columns.items() if _is_many(value)}
        for name, value in self._lists.items():
            if self.num_prompts is not None and isinstance(value, Sized) and len(value) != self.num_prompts:
                raise RequestError(f"{len(value)} {name} for {self.num_prompts} prompts; give one or as many")
        self._constants = {name: value for name, value in columns.items() if name not in self._lists}
        self._num_taken = 0
        self._rows = itertools.zip_longest(prompts, *self._lists.values(), fillvalue=_END)

    def __next__(self) -> RequestSpec:
        prompt, *values = next(self._rows)
        for name, value in zip(self._lists, values, strict=True):
            if (value is _END) != (prompt is _END):
                than = "more" if prompt is _END else "fewer"
                raise RequestError(
                    f"there are {than} {name} than prompts, of which {self._num_taken} were read"
                )
        self._num_taken += 1
        return RequestSpec(prompt, **self._constants, **dict(zip(self._lists, values, strict=True)))


class Generation:
    """Runs the requests of one call. It is a context manager, whose end aborts unfinished requests.

    At most `window` prompts are in progress: from when a prompt is read until its last output is released. An
    invalid prompt ends the reading. If it is in the first window, its error is raised at once, before
    anything runs; otherwise it is raised when the prompts before it are done.
    """

    def __init__(self, core: EngineCore, source: RequestSource, *, use_tqdm: Progress) -> None:
        self._core = core
        self._source = source
        self._use_tqdm = use_tqdm
        self.window = max(WINDOW, 2 * core.scheduler.max_num_seqs)
        self._outbox = Outbox()
        self._unfinished: dict[str, int] = {}  # from a request's id to the index of its prompt
        self._pending: deque[RequestGroup] = deque()  # requests that the scheduler has not got yet
        self._num_made = 0
        self._num_released = 0
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
        self._started = time.perf_counter()
        self._num_tokens = 0
        self._bar = progress_bar(self._use_tqdm, self._source.num_prompts, "Generating", "request")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._abort()

    def is_running(self) -> bool:
        """Read prompts until the window is full. Return whether any request is unfinished.

        Raises the error of an invalid prompt once the prompts before it are done.
        """
        self._read_ahead()
        if not self._unfinished and self._error is not None:
            raise self._error
        return bool(self._unfinished)

    def step(self, *, every_token: bool) -> list[tuple[int, RequestOutput]]:
        """Run a step. Return the index of the prompt and the output of each request that finished.

        every_token: whether to return also an output of each unfinished request that got a token.
        """
        queue(self._core, self._pending)
        advanced = self._core.step(self._outbox if every_token else None)
        self._num_tokens += len(advanced)
        return [self._record(output) for output in self._outbox.take()]

    def release_output(self, output: RequestOutput) -> RequestOutput:
        """Return the output. If it is the last one of its prompt, let another prompt be read."""
        self._num_released += output.finished
        return output

    def _record(self, output: RequestOutput) -> tuple[int, RequestOutput]:
        if not output.finished:
            return self._unfinished[output.request_id], output
        rate = self._num_tokens / (time.perf_counter() - self._started)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update()
        return self._unfinished.pop(output.request_id), output

    def _read_ahead(self) -> None:
        while not self._is_exhausted and self._num_made - self._num_released < self.window:
            try:
                group = call_with_error_prefix(f"prompts[{self._num_made}]", self._next_group)
            except StopIteration:
                self._is_exhausted = True
            except Exception as error:  # raised once the prompts before it are done
                self._is_exhausted = True
                self._error = error
            else:
                self._unfinished[group.request_id] = self._num_made
                self._pending.append(group)
                self._num_made += 1

    def _next_group(self) -> RequestGroup:
        spec = next(self._source)
        return self._core.new_group(self._core.next_id(), spec, self._outbox)

    def _abort(self) -> None:
        """Abort the requests that are left after an error, an interrupt or an early end."""
        for request_id in [*self._unfinished]:
            # The request may be finished and its id taken by another one.
            group = self._core.groups.get(request_id)
            if group is not None and group.outbox is self._outbox:
                self._core.abort(request_id)


def queue(core: EngineCore, pending: deque[RequestGroup]) -> None:
    """Queue pending requests until the scheduler refuses one."""
    while pending and core.scheduler.refusal(pending[0].samples[0]) is None:
        group = pending.popleft()
        if not group.finished:  # it may have been aborted by its id
            core.enqueue(group)


def generate_in_order(
    core: EngineCore, source: RequestSource, *, use_tqdm: Progress
) -> Iterator[RequestOutput]:
    """Yield the last output of each prompt, in the order of the prompts."""
    with Generation(core, source, use_tqdm=use_tqdm) as generation:
        done = dict[int, RequestOutput]()
        index = 0
        while generation.is_running():
            done |= generation.step(every_token=False)
            while index in done:
                yield generation.release_output(done.pop(index))
                index += 1


def generate_as_completed(
    core: EngineCore, source: RequestSource, *, use_tqdm: Progress
) -> Iterator[RequestOutput]:
    """Yield the last output of each prompt as soon as it exists."""
    with Generation(core, source, use_tqdm=use_tqdm) as generation:
        while generation.is_running():
            for _, output in generation.step(every_token=False):
                yield generation.release_output(output)


def generate_stream(core: EngineCore, source: RequestSource) -> Iterator[RequestOutput]:
    """Yield every output of every prompt as soon as it exists."""
    with Generation(core, source, use_tqdm=False) as generation:
        while generation.is_running():
            for _, output in generation.step(every_token=True):
                yield generation.release_output(output)


def progress_bar(use_tqdm: Progress, total: int | None, desc: str, unit: str) -> tqdm[Any]:
    """Make a progress bar.

    use_tqdm: False hides the bar. It may also be the class of the bar.
    """
    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc=desc, unit=unit, disable=not use_tqdm)


def prompts_of(prompts: Any, prompt_token_ids: Any) -> Any:
    """Return the one of the two arguments that is given. Raises RequestError unless exactly one is given."""
    if (prompts is None) == (prompt_token_ids is None):
        given = "neither" if prompts is None else "both"
        raise RequestError(f"generate takes either prompts or prompt_token_ids, got {given}")
    return prompt_token_ids if prompts is None else prompts


def as_iterable(prompts: Any) -> Iterable[Prompt]:
    """Return one prompt or many as an iterable. A list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping | bytes | bytearray):
        return [prompts]
    if not _is_iterable(prompts):
        raise RequestError(f"prompts must be a prompt or an iterable of them, got {prompts!r}")
    if _is_row(prompts):
        return [prompts]
    iterable: Iterable[Prompt] = prompts
    return iterable


def as_list(prompts: Any) -> list[Prompt]:
    """Return one prompt or many as a list. Raises RequestError if the list is empty."""
    listed = [*as_iterable(prompts)]
    if not listed:
        raise RequestError("prompts must have at least one entry, got []")
    return listed


def call_with_error_prefix(prefix: str, function: Callable[..., T], *args: Any) -> T:
    """Return function(*args). Put the prefix before the message of any PagedError that it raises."""
    try:
        return function(*args)
    except PagedError as error:
        raise type(error)(f"{prefix}: {error}") from error


def _is_row(prompts: Any) -> bool:
    """Return whether this is one prompt of token ids: a list of ints, or an array of one dimension."""
    if getattr(prompts, "ndim", 0) == 1 and hasattr(prompts, "tolist"):
        prompts = prompts[:1].tolist()
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], Integral)


def _is_many(value: Any) -> bool:
    return _is_iterable(value) and not isinstance(value, str | Mapping | bytes)


def _is_iterable(value: Any) -> bool:
    # A tensor of one number is an instance of Iterable, but cannot be iterated over.
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0
