"""Drafts of a step: how many of them decodes get, and which turned out right."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..blocks.manager import BlockManager
from ..drafting.drafter import Draft, Drafter
from ..requests.request import Request
from .schedule import Schedule, StepOutput

logger = logging.getLogger(__name__)

MOST_PAUSE = 64  # tokens
MOST_PAUSES = 1024  # beyond which the requests that have ended are forgotten


class _Pause(NamedTuple):
    """For how many tokens a request gets no drafts, and how many tokens it has then."""

    length: int
    end: int


class Drafts:
    """Extends the decodes of a step by drafts, within the tokens and blocks that are left.

    A drafter that raises or proposes what is no token is switched off. A request whose first draft was wrong
    gets none for its next token, after another such run for two, and so on up to MOST_PAUSE.

    most: drafts of a request in a step.
    vocab_size: of the model; proposed tokens are below.
    max_rows: from how many rows a step may sample.
    in_blocks: whether the drafter is a model with K and V in the blocks of the requests. Then drafts have
        blocks before they are proposed, and a step that moves blocks has none: it moves them later.
    """

    def __init__(
        self, drafter: Drafter, most: int, vocab_size: int, max_rows: int, *, in_blocks: bool = False
    ) -> None:
        self._drafter: Drafter | None = drafter
        self._most = most
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._in_blocks = in_blocks
        self._pauses: dict[Request, _Pause] = {}

    def extend(
        self,
        schedule: Schedule,
        manager: BlockManager,
        budget: int,
        max_chunk: int,
        num_spare_blocks: Callable[[], int],
    ) -> None:
        """Add drafts to the decodes of a step.

        budget: the tokens that the step has left.
        num_spare_blocks: returns how many blocks drafts may take.
        """
        if self._drafter is None or (self._in_blocks and schedule.moves_blocks):
            return
        left = min(budget, self._max_rows - len(schedule.sampled))
        most = min(self._most, max_chunk - 1, left)
        if most < 1:
            return
        limits = {
            row: limit
            for row in range(schedule.num_decode_tokens)
            if (limit := self._limit(schedule.requests[row], most)) > 0
        }
        if self._in_blocks:
            limits = {
                row: _grow(schedule.requests[row], limit, schedule, manager, num_spare_blocks)
                for row, limit in limits.items()
            }
        proposed = self._proposed([schedule.requests[row] for row in limits], [*limits.values()])
        found = [(row, draft) for row, draft in zip(limits, proposed, strict=False) if draft.tokens]
        if sum(len(draft.tokens) for _, draft in found) > left:
            found.sort(key=lambda each: -each[1].confidence)
        drafts = {}
        for row, draft in found:
            request = schedule.requests[row]
            num = _grow(request, min(len(draft.tokens), left), schedule, manager, num_spare_blocks)
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

    def _limit(self, request: Request, most: int) -> int:
        """Return how many drafts a request may get now."""
        pause = self._pauses.get(request)
        if pause is not None and request.num_tokens < pause.end:
            return 0
        return most_drafts(request, most)

    def record(self, request: Request, num_accepted: int) -> None:
        """Learn how many drafts of a request's last run were right."""
        if num_accepted:
            self._pauses.pop(request, None)
            return
        if len(self._pauses) >= MOST_PAUSES:
            self._pauses = {r: pause for r, pause in self._pauses.items() if r.finish_reason is None}
        last = self._pauses.get(request)
        length = 1 if last is None else min(2 * last.length, MOST_PAUSE)
        self._pauses[request] = _Pause(length, request.num_tokens + length)

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
            if not all(isinstance(token, int) and 0 <= token < self._vocab_size for token in tokens):
                return f"it proposed {tokens}, which are not all token ids below {self._vocab_size}"
        return ""


def most_drafts(request: Request, most: int) -> int:
    """Return how many drafts a decode may get at most: none where a sampled token would not count."""
    inputs = request.inputs
    num_tokens = request.num_tokens
    if inputs.max_drafts is not None:
        most = min(most, inputs.max_drafts)
    most = min(most, inputs.max_total_tokens - num_tokens - 1)
    if inputs.long_from is not None and num_tokens < inputs.long_from:
        # Behind it all K and V are others: a token that is sampled there would be computed anew.
        most = min(most, inputs.long_from - num_tokens - 1)
    return most


def _grow(
    request: Request, num: int, schedule: Schedule, manager: BlockManager, num_spare_blocks: Callable[[], int]
) -> int:
    """Allocate blocks for a request's drafts. Return how many of them have one."""
    blocks = request.blocks
    start = request.num_computed_tokens
    end = start + 1 + num
    if end <= blocks.capacity:
        return num
    if manager.missing_blocks(blocks, end) <= num_spare_blocks():
        if start + 1 > blocks.register_at:
            manager.register(blocks, request.token_ids, start)
        if manager.grow(blocks, start, end, schedule.copies):
            return num
    return blocks.capacity - start - 1


def verified(schedule: Schedule, drawn: StepOutput) -> StepOutput:
    """Return the output of a step with drafts by rows of schedule.sampled_requests.

    drawn: a token for each of the plan's sampled rows, so several for a request with drafts. Its run ends
        with the first token that is not its draft. It also ends before a row with an error: the next step
        computes that again as the first row, where the error ends the request as without drafts.
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
