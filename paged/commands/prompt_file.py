"""PromptFile: completes a file of prompts and writes the results in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..base.errors import PagedError
from ..protocol.jobs import Job, outcome_of
from ..protocol.result_file import NO_RESULTS, Earlier
from . import common

if TYPE_CHECKING:
    from ..engine.engine import LLMEngine
    from ..options.lora_request import LoRARequest

DEFAULT_COMPLETION_TOKENS = 256


class PromptFile:
    """Completes the prompts of a file and writes the results in order.

    write: called with each result as soon as it and all earlier ones exist.
    earlier: the results of an interrupted run, which are not computed again.
    begin: called once an engine runs, before the first result.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        write: Callable[[dict[str, Any]], object],
        earlier: Earlier = NO_RESULTS,
        begin: Callable[[], object] = bool,
    ) -> None:
        self._jobs = jobs
        self._write = write
        self._begin = begin
        self._earlier = earlier
        self._num_failed = earlier.num_failed
        self.lora_request: LoRARequest | None = None  # of all prompts

    def complete(self, engine_options: Mapping[str, Any], *, live: bool = False, hidden: bool = False) -> int:
        """Complete the prompts that have no result yet. Return the exit code.

        live: whether to show the engine's state.
        hidden: whether to show no progress.
        """
        total = len(self._jobs)
        num_done = self._earlier.num_done
        if num_done < total:
            engine = common.start(engine_options)
            self._begin()
            self._run(engine, live=live, hidden=hidden)
        else:
            self._begin()
            if num_done:
                common.complain(f"nothing to do: all {total:,} prompts have results")
        if self._num_failed:
            common.complain(
                f"{self._num_failed} of {total} prompts failed; the error in their lines says why"
            )
        return common.EXIT_FAILED if self._num_failed else 0

    def _run(self, engine: LLMEngine, *, live: bool, hidden: bool) -> None:
        from tqdm import tqdm

        from .live_view import LiveView

        total = len(self._jobs)
        num_written = self._earlier.num_done
        started = time.perf_counter()
        num_tokens = 0
        done: dict[int, dict[str, Any]] = {}
        with (
            LiveView(engine.stats, total) if live else nullcontext() as view,
            # On a terminal the lines themselves, or the live view, show the progress.
            tqdm(
                total=total, initial=num_written, desc="Generating", unit="prompt", disable=live or hidden
            ) as bar,
        ):
            if view is not None:
                view.num_done = num_written
            for index, outcome in self._outcomes(engine, view.update if view is not None else lambda: None):
                if view is not None:
                    view.num_done += 1
                done[index] = self._jobs[index].result(index, outcome)
                self._num_failed += "error" in outcome
                samples = outcome.get("outputs", [outcome])
                num_tokens += sum(len(sample.get("token_ids", ())) for sample in samples)
                rate = num_tokens / (time.perf_counter() - started)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                bar.update()
                while num_written in done:
                    self._write(done.pop(num_written))
                    num_written += 1

    def _outcomes(
        self, engine: LLMEngine, after_step: Callable[[], None]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield index and outcome of each job as it finishes. A refused job has an error as its outcome."""
        pending = deque(range(self._earlier.num_done, len(self._jobs)))
        most_waiting = engine.config.max_waiting or len(self._jobs)
        while pending or engine.has_unfinished_requests():
            while pending and engine.scheduler.num_waiting < most_waiting:
                index = pending.popleft()
                job = self._jobs[index]
                try:
                    params = engine.params_of(job.sampling, DEFAULT_COMPLETION_TOKENS)
                    # The id, from which the seed is derived, is the same in every run.
                    engine.add_request(
                        str(index), job.prompt, params, tenant=job.tenant, lora_request=self.lora_request
                    )
                except PagedError as error:
                    yield index, {"error": str(error)}
            for output in engine.step():
                if output.finished:
                    yield int(output.request_id), outcome_of(output)
            after_step()
