"""Runs: the rows of a step that got several tokens, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..blocks.manager import BlockManager
from ..requests.request import Request
from .policy import Policy
from .preemption import Preemption
from .running import RunningSet
from .schedule import SchedulerCounters


class Runs:
    """Records the results of rows for which a step drew several tokens, or none.

    num_accepted: how many drafts the last run with drafts accepted.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        running: RunningSet,
        preemption: Preemption,
        counters: SchedulerCounters,
        policy: Policy,
    ) -> None:
        self._manager = block_manager
        self._running = running
        self._preemption = preemption
        self._counters = counters
        self._policy = policy
        self.num_accepted = 0

    def take(
        self,
        request: Request,
        run: Sequence[int],
        now: float,
        drafts: Sequence[int] | None,
        end_at_stop_string: Callable[[Request], None] | None,
    ) -> None:
        """Append the tokens of a run to a request, up to the token that ends its output.

        If the run is empty, the next step computes the request's last token again and samples after it.

        drafts: the drafts that the step computed after the request's last token. The run equals them, except
            perhaps its last token. None if the step computed no drafts.
        """
        num_known = request.num_tokens
        for token in run:
            request.token_ids.append(token)
            if request.num_tokens >= request.on_token_from or token in request.stop_ids:
                request.on_token(token, now)
            if end_at_stop_string is not None and request.inputs.params.stop:
                end_at_stop_string(request)
            if request.has_just_grown_long:
                self._preemption.hold_grown_long(request)
            if not request.ready:  # finished, or grown long
                break
        del request.sampling.logprobs[request.num_output_tokens :]
        if drafts is None and self._manager.has_states and not run and request.ready:
            # Its state has seen the last token, which is computed once more: only from the start.
            self._preemption.hold_grown_long(request)
        elif drafts is None:
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            self._manager.rewind(request.blocks, request.num_computed_tokens)
            self._running.resend(request)  # its seat knows another last token
        else:
            # The step has counted the first token of the run.
            num_right = request.num_tokens - request.num_computed_tokens
            request.num_computed_tokens = request.num_tokens - 1
            if self._running.states is not None:
                self._running.states.end_run(request, num_right)
            self._manager.truncate(request.blocks, request.num_computed_tokens)
            self._running.correct(request)
            # A run whose next row has an error ends with a draft.
            self.num_accepted = num_accepted = len(run) - (run[-1:] != drafts[len(run) - 1 : len(run)])
            self._counters.count_drafts(len(drafts), num_accepted)
            request.metrics.num_drafts += 1
            request.metrics.num_draft_tokens += len(drafts)
            request.metrics.num_accepted_tokens += num_accepted
        num_more = request.num_tokens - num_known - 1  # than the one that is counted for each row
        self._counters.num_generated_tokens += num_more
        self._policy.generated([request] * num_more)
