"""Workers that compute the masks of grammars while steps run, so that a slow grammar delays its own outputs.

There are two lanes. Grammars whose masks are fast share a pool of workers and the library's threads. A slow
one gets the single worker of the other lane, so that any number of them takes no more than one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLOW_S = 0.01  # a step waits no longer for masks: neither before its forward nor after it
MOST_FAST = 16  # grammars whose masks are computed at once
PROOFS = 4  # fast masks after which a slow grammar is taken for a fast one again


class CompiledGrammar:
    """A compiled grammar, shared by all outputs that use it.

    matcher: the state before the first token; each output gets a copy.
    first: the mask of tokens allowed first, i32[num_words], one bit per token.
    is_slow: whether the grammar's masks take long to compute.
    """

    def __init__(self, matcher: Any, first: NDArray[np.int32]) -> None:
        self.matcher = matcher
        self.first = first
        self._num_to_prove = 0

    @property
    def is_slow(self) -> bool:
        """Whether computing one of the last masks took longer than SLOW_S."""
        return self._num_to_prove > 0

    def record(self, *, was_slow: bool) -> None:
        """Record whether computing masks took longer than SLOW_S."""
        self._num_to_prove = PROOFS if was_slow else max(0, self._num_to_prove - 1)


class MaskJob:
    """A worker's job: the next masks of several outputs that use one grammar.

    If a step waits for a job longer than SLOW_S, the grammar counts as slow.

    advances: each output's matcher, and the tokens that the matcher has not consumed yet.
    in_logits: i32[num_words], a mask of the tokens that have a logit.
    done: a future that ends when all masks are computed, or with a library error that concerns all of them.
    bits: i32[len(advances), num_words], the masks, once they are computed.
    is_clean: whether all masks are computed, without an error, and each allows a token.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        advances: Sequence[tuple[Any, list[int]]],
        in_logits: NDArray[np.int32],
    ) -> None:
        self._grammar = grammar
        self._advances = advances
        self._in_logits = in_logits
        self.bits: NDArray[np.int32] = np.zeros((len(advances), len(in_logits)), np.int32)
        self.is_clean = False
        self._errors: dict[int, BaseException] = {}  # of single outputs, by their rows
        self._broken = frozenset[int]()  # rows of matchers in an error state
        lane, run = (_slow_lane(), self._run_slow) if grammar.is_slow else (_fast_lane(), self._run_fast)
        self.done: Future[None] = lane.submit(self._run, run)

    def mask(self, row: int) -> NDArray[np.int32]:
        """Wait for the mask of one output, i32[num_words]. Raises the error of the library."""
        self.done.result()
        if row in self._errors:
            raise self._errors[row]
        bits: NDArray[np.int32] = self.bits[row]
        return bits

    @property
    def has_failed(self) -> bool:
        """Return whether a mask of a finished job has an error, or its matcher is in an error state."""
        return self.done.exception() is not None or bool(self._errors or self._broken)

    @property
    def is_slow(self) -> bool:
        """Whether the masks of its grammar take long to compute."""
        return self._grammar.is_slow

    def record_late(self) -> None:
        """Record that a step stopped waiting for the job."""
        self._grammar.record(was_slow=True)

    def _run(self, compute: Callable[[], None]) -> None:
        compute()
        # All this is found out here, beside the steps.
        self.bits &= self._in_logits
        self._broken = frozenset(i for i, (matcher, _) in enumerate(self._advances) if matcher.is_error())
        self.is_clean = not (self._errors or self._broken) and bool(self.bits.any(1).all())

    def _run_fast(self) -> None:
        executor = _executor(is_slow=False)
        bits = self.bits
        self._consume(executor)
        rows = [(matcher, i) for i, (matcher, _) in enumerate(self._advances)]
        try:
            executor.unsafe_compute_mask_ptr(rows, bits.ctypes.data, bits.shape[1] * bits.itemsize, len(bits))
        except BaseException:  # of one output, and it is not known of which; a Rust panic is not an Exception
            for _, row in rows:
                self._compute_alone(row)

    def _run_slow(self) -> None:
        self._consume(_executor(is_slow=True))
        for row in range(len(self._advances)):
            started = time.thread_time()  # other work on the same cores does not make a grammar slow
            self._compute_alone(row)
            self._grammar.record(was_slow=time.thread_time() - started > SLOW_S / 4)

    def _compute_alone(self, row: int) -> None:
        """Compute the mask of one output, or keep its error."""
        matcher, _ = self._advances[row]
        bits = self.bits[row]
        try:
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        except BaseException as error:  # of this output alone; a Rust panic is not an Exception
            self._errors[row] = error

    def _consume(self, executor: Any) -> None:
        """Consume one token of each output at a time: these calls release the GIL."""
        for i in range(max(len(tokens) for _, tokens in self._advances)):
            executor.consume_token_par([(m, tokens[i]) for m, tokens in self._advances if i < len(tokens)])


def wait_for(jobs: Sequence[MaskJob]) -> None:
    """Wait until the jobs are done, SLOW_S at most. The grammars of unfinished jobs then count as slow."""
    late = wait([job.done for job in jobs], SLOW_S).not_done
    for job in jobs:
        if job.done in late:
            job.record_late()


@lru_cache(maxsize=1)
def _fast_lane() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_FAST, "paged-grammar-masks")


@lru_cache(maxsize=1)
def _slow_lane() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "paged-slow-grammar-masks")


@lru_cache(maxsize=2)
def _executor(*, is_slow: bool) -> Any:
    """Return the threads that compute masks: one for slow grammars, the library's default for the others."""
    from llguidance import LLExecutor

    return LLExecutor(num_threads=1) if is_slow else LLExecutor()
