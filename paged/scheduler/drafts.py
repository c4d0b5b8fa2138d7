"""Drafts of a step: how many of them decodes get, and which turned out right."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ..blocks.manager import BlockManager
from ..drafting.drafter import Draft, Drafter
from ..drafting.lengths import DraftLengths
from ..requests.request import Request
from .schedule import Schedule, StepOutput

logger = logging.getLogger(__name__)


class Drafts:
    """Adds drafts to the decodes of a step, within the tokens and blocks that the step has left.

    A drafter that raises, or proposes something that is not a token, is switched off.

    most: maximum number of draft tokens of a request in a step.
    vocab_size: the size of the model's vocabulary; proposed token ids must be smaller.
    max_rows: maximum number of rows that a step may sample.
    lengths: chooses how many of the proposed tokens are verified; None verifies as many as fit.
    in_blocks: whether the drafter is a model with K and V in the requests' blocks. Blocks are then allocated
        before drafts are proposed, and a step that moves blocks gets no drafts, because it moves them only
        later.
    """

    def __init__(
        self,
        drafter: Drafter,
        most: int,
        vocab_size: int,
        max_rows: int,
        lengths: DraftLengths | None = None,
        *,
        in_blocks: bool = False,
    ) -> None:
        self._drafter: Drafter | None = drafter
        self._most = most
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self.lengths = lengths
        self._in_blocks = in_blocks
        self._num_accepted = 0  # of the step that is updated

    def extend(
        self,
        schedule: Schedule,
        manager: BlockManager,
        budget: int,
        max_chunk: int,
        num_spare_blocks: Callable[[], int],
    ) -> None:
        """Add drafts to the decodes of a step.

        budget: the number of tokens that the step has left.
        num_spare_blocks: returns the number of blocks that drafts may take.
        """
        lengths = self.lengths
        # A step with prompts gets none: they would come later, and such a step computes many rows anyway.
        if lengths is not None and not (schedule.is_decode and lengths.begin_step()):
            return
        if self._drafter is None or (self._in_blocks and schedule.moves_blocks):
            return
        left = min(budget, self._max_rows - len(schedule.sampled))
        most = min(self._most if lengths is None else lengths.limit, max_chunk - 1, left)
        if most < 1:
            return
        shape = len(schedule.requests), _context(schedule)
        if lengths is not None and not lengths.wants_guesses(*shape):
            return
        limits = {
            row: limit
            for row in range(schedule.num_decode_tokens)
            if (limit := most_drafts(schedule.requests[row], most)) > 0
        }
        grow = partial(_grow, schedule=schedule, manager=manager, num_spare_blocks=num_spare_blocks)
        if self._in_blocks:
            limits = {row: grow(schedule.requests[row], limit) for row, limit in limits.items()}
        drafts = {}
        for row, draft in self._chosen(schedule, limits, shape, left):
            num = grow(schedule.requests[row], min(len(draft.tokens), left))
            if num:
                drafts[row] = draft.tokens[:num]
                left -= num
        if self._in_blocks:
            for row in limits:
                request = schedule.requests[row]
                num = len(drafts.get(row, ()))
                manager.truncate(request.blocks, request.num_computed_tokens + 1 + num)
        if drafts:
            schedule.add_drafts(drafts)

    def _chosen(
        self, schedule: Schedule, limits: Mapping[int, int], shape: tuple[int, int], left: int
    ) -> list[tuple[int, Draft]]:
        """Return the drafts to verify by row, the likeliest first if there is no room for all.

        limits: how many each row may get.
        shape: see `DraftLengths.choose`.
        left: how many all may get.
        """
        asked = [schedule.requests[row] for row in limits]
        proposed = [*map(_allowed, asked, self._proposed(asked, [*limits.values()]))]
        if self.lengths is not None and proposed:
            counts = self.lengths.choose(asked, proposed, *shape, left)
            proposed = [Draft(d.tokens[:num], d.confidence) for d, num in zip(proposed, counts, strict=True)]
        found = [(row, draft) for row, draft in zip(limits, proposed, strict=False) if draft.tokens]
        if sum(len(draft.tokens) for _, draft in found) > left:
            found.sort(key=lambda each: -each[1].confidence)
        return found

    @property
    def is_idle(self) -> bool:
        """Whether the next steps will probably get no drafts."""
        return self._drafter is None or (self.lengths is not None and self.lengths.is_idle)

    @property
    def seconds_won(self) -> float:
        """The seconds that drafts have saved so far; 0 if their number is fixed, and nothing is measured."""
        return 0.0 if self.lengths is None else self.lengths.ledger.won

    def record(self, num_accepted: int) -> None:
        """Count the accepted drafts of one request in the step whose results are being recorded."""
        self._num_accepted += num_accepted

    def end_step(self, schedule: Schedule, clock: Callable[[], float]) -> None:
        """Update the estimates after a step whose accepted drafts were recorded."""
        lengths = self.lengths
        if lengths is None or (lengths.is_idle and schedule.is_decode):
            return
        if schedule.has_prompts or schedule.swap_out or schedule.swap_in or not schedule.requests:
            lengths.end_other_step()
        else:
            shape = len(schedule.requests), _context(schedule), schedule.num_tokens
            lengths.end_step(*shape, clock() - schedule.scheduled_time, self._num_accepted)
        self._num_accepted = 0

    def _proposed(self, requests: list[Request], limits: list[int]) -> list[Draft]:
        """Return the drafter's guesses, one for each request; none if it fails."""
        if self._drafter is None or not requests:
            return []
        try:
            drafts = self._drafter.propose(requests, limits)
            error = self._error_in(drafts, limits)
        except Exception as raised:  # whatever is wrong with a drafter must not end a request
            error = f"it raised {type(raised).__name__}: {raised}"
        if error:
            logger.warning("no tokens are guessed any more, as the drafter fails: %s", error)
            self._drafter = None
            return []
        return drafts

    def _error_in(self, drafts: Sequence[Draft], limits: Sequence[int]) -> str:
        """Say what is wrong with proposed drafts; "" if nothing is."""
        if len(drafts) != len(limits):
            return f"it proposed {len(drafts)} drafts for {len(limits)} requests"
        for (tokens, _), limit in zip(drafts, limits, strict=True):
            if len(tokens) > limit:
                return f"it proposed {len(tokens)} tokens where at most {limit} were asked for"
            if tokens and not self._are_ids(tokens):
                return f"it proposed {tokens}, which are not all token ids below {self._vocab_size}"
        return ""

    def _are_ids(self, tokens: list[int]) -> bool:
        """Return whether some tokens are all in the vocabulary. Without a loop in Python, for each step."""
        return {*map(type, tokens)} == {int} and min(tokens) >= 0 and max(tokens) < self._vocab_size


def _context(schedule: Schedule) -> int:
    """Return the mean number of tokens that the requests of a step have computed."""
    return sum(schedule.num_computed_tokens) // len(schedule.num_computed_tokens)


def most_drafts(request: Request, most: int) -> int:
    """Return the maximum number of drafts of a request that decodes; 0 if its next token is its last."""
    inputs = request.inputs
    num_tokens = request.num_tokens
    if request.num_pending:
        return 0  # what it is guessed from is not known
    if inputs.params.num_speculative_tokens is not None:
        most = min(most, inputs.params.num_speculative_tokens)
    most = min(most, inputs.max_total_tokens - num_tokens - 1)
    if inputs.long_from is not None and num_tokens < inputs.long_from:
        # Behind it all K and V are others: a token that is sampled there would be computed anew.
        most = min(most, inputs.long_from - num_tokens - 1)
    return most


def _allowed(request: Request, draft: Draft) -> Draft:
    """Cut a draft before the first token that the request's grammar does not allow there."""
    grammar = request.sampling.grammar
    if grammar is None or not draft.tokens:
        return draft
    return draft._replace(tokens=draft.tokens[: grammar.num_allowed(request, draft.tokens)])


def _grow(
    request: Request,
    num: int,
    *,
    schedule: Schedule,
    manager: BlockManager,
    num_spare_blocks: Callable[[], int],
) -> int:
    """Allocate blocks for a request's drafts. Return how many of them have one."""
    blocks = request.blocks
    start = request.num_computed_tokens
    end = start + 1 + num
    if end <= blocks.capacity:
        return num
    if manager.blocks_taken(blocks, end) <= num_spare_blocks():
        if start + 1 > blocks.register_at:
            manager.register(blocks, request.token_ids, start)
        if manager.grow(blocks, start, end, schedule.copies):
            return num
    return blocks.capacity - start - 1


def verified(schedule: Schedule, drawn: StepOutput) -> StepOutput:
    """Compare a step's drafts with the drawn tokens. Return its output with a run of tokens per request.

    drawn: a token for each sampled row of the plan. A request with drafts has several rows.

    A run ends with the first token that differs from its draft. It also ends before a row with an error. The
    next step computes this row again, without drafts before it, and the error then ends the request.
    """
    output = StepOutput(reports=drawn.reports)
    first = schedule.num_decode_tokens
    last = first + len(schedule.drafts)
    at = 0
    for row in range(len(schedule.sampled_requests)):
        if not first <= row < last:
            _copy_row(drawn, at, output, row)
            at += 1
            continue
        drafts = schedule.drafts[row - first]
        run = list[int]()
        for i, token in enumerate(drawn.tokens[at : at + 1 + len(drafts)]):
            if token is None:
                break
            run.append(token)
            if drafts[i : i + 1] != [token]:
                break
        if run:
            output.tokens.append(None)
            output.runs[row] = run
            if at in drawn.logprobs:
                output.run_logprobs[row] = [drawn.logprobs[at + i] for i in range(len(run))]
        else:
            _copy_row(drawn, at, output, row)
        at += 1 + len(drafts)
    return output


def _copy_row(drawn: StepOutput, at: int, output: StepOutput, row: int) -> None:
    output.tokens.append(drawn.tokens[at])
    if at in drawn.logprobs:
        output.logprobs[row] = drawn.logprobs[at]
    if at in drawn.errors:
        output.errors[row] = drawn.errors[at]
    if at in drawn.runs:
        output.runs[row] = drawn.runs[at]
