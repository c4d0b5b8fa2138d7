"""StepPlan: a step as plain numbers. It holds no request, and can be sent to another process as bytes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..blocks.manager import Copy
from ..requests.request import Request
from ..scheduler.schedule import AskedRows, ReportParams, Schedule

if TYPE_CHECKING:
    from ..architectures.towers import VisionSpec
    from ..scheduler.towers import TowerSteps
    from .image_rows import ImageRows, SeenImages

IN_SEAT = -1  # as number of tokens to send, and as last token: the seat has it


class SeatChange(NamedTuple):
    """What changes in a seat before a step: tokens, and block table entries from first_entry on.

    row: the seat's row in the step; a number past the last row if the seat is not in the step.
    num_tokens: how many of the plan's tokens belong to the row; IN_SEAT if the row computes the seat's last
        token instead.
    last_token: the newest token of the request; IN_SEAT if it is the token that the last step drew.
    """

    row: int
    seat: int
    num_tokens: int
    last_token: int
    first_entry: int
    num_entries: int


@dataclass(slots=True)
class ComputedPart:
    """What every rank computes in a step.

    The rows are sequences: first decodes without drafts, then decodes with drafts, then the rest. A decode
    with drafts draws a token after each of its tokens.

    Every process stores each seat's last token and block tables. Therefore only seat, start and count (1) are
    sent for a decode whose block tables have not grown, plus the last token if the process does not draw
    tokens itself.

    swap_out, swap_in, copies, state_moves, settled, unapplied: see `Schedule`.
    starts, counts: how many tokens of each row were computed before the step, and how many the step computes.
    rope_lens: the length of each row's prompt, or of the whole request; see `Planner`.
    tokens, entries: the tokens and the block table entries of `changes`, one change after another; entries
        are given for each layer group.
    sampled, sampled_seats: for each drawn token, the row that it is drawn for, and the seat that gets it.
        Rows with drafts occur once for each of their tokens.
    asked: the prompt positions on which this step reports; see `AskedRows`.
    last_tokens: the last tokens of decodes without drafts; empty if the processes have them in the seats.
    images: the tokens that get embeddings of images. They are not written as bytes.
    last_keys: the last position that each token sees; None: its own.
    rope_offsets: how much the rotation of each row's tokens differs from their positions; None if none does.
    grid_positions: the time, row and column that each token is rotated by, [3, num_tokens]; None: all are one
        number.
    towers: what the vision tower does before the step. It is not written as bytes.
    adapters: the slot of each row's LoRA adapter, -1 for a row without; empty if no row has one.
    adapter_loads: pairs of an adapter and the slot that it is copied into before the step.
    """

    swap_out: Sequence[Copy] = ()
    swap_in: Sequence[Copy] = ()
    copies: Sequence[Copy] = ()
    state_moves: Sequence[Copy] = field(default_factory=list)
    settled: Sequence[tuple[int, int, int]] = ()
    unapplied: list[int] = field(default_factory=list)
    num_decodes: int = 0
    num_drafting: int = 0
    seats: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    rope_lens: list[int] = field(default_factory=list)
    changes: list[SeatChange] = field(default_factory=list)
    tokens: array[int] = field(default_factory=lambda: array("i"))
    entries: list[array[int]] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    sampled_seats: list[int] = field(default_factory=list)
    asked: Sequence[AskedRows] = ()
    last_tokens: array[int] = field(default_factory=lambda: array("i"))
    images: Sequence[ImageRows] = ()
    last_keys: array[int] | None = None
    rope_offsets: list[int] | None = None
    grid_positions: array[int] | None = None
    towers: TowerSteps | None = None
    adapters: Sequence[int] = ()
    adapter_loads: Sequence[tuple[int, int]] = ()

    @property
    def is_decode(self) -> bool:
        """Whether every row decodes: it computes one token and is sampled."""
        return self.num_decodes == len(self.seats) == len(self.sampled)

    @property
    def absent_seats(self) -> list[int]:
        """The seats that change although no row of this step has them."""
        return [change.seat for change in self.changes if change.row >= len(self.seats)]

    def repeats(self, seats: Sequence[int]) -> bool:
        """Return whether this is another decode of exactly these seats. Block tables may have grown."""
        if not self.is_decode or self.seats != seats or self.unapplied:
            return False
        return not self.changes or all(change.last_token == IN_SEAT for change in self.changes)

    def positions(self) -> list[int]:
        """Return the position of each token that is drawn."""
        starts = self.starts
        counts = self.counts
        if not self.num_drafting:
            return [starts[row] + counts[row] for row in self.sampled]
        first = self.num_decodes
        positions = [start + 1 for start in starts[:first]]
        for row in range(first, first + self.num_drafting):
            positions += range(starts[row] + 1, starts[row] + 1 + counts[row])
        return positions + [starts[row] + counts[row] for row in self.sampled[len(positions) :]]


class NewTokens(NamedTuple):
    """New tokens of a seat, for a sampler that needs them to edit logits.

    start: the position of the first of them.
    drafts: the drafts that the step computes after these tokens.
    """

    seat: int
    start: int
    tokens: list[int]
    drafts: list[int]


@dataclass(slots=True)
class SampledPart:
    """The part of a plan for the process that samples.

    new_tokens: the new tokens of sampled seats whose requests edit their logits.
    reports: what to report for each entry of the computed part's `asked`.
    """

    new_tokens: list[NewTokens] = field(default_factory=list)
    reports: list[ReportParams] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """A step as two values: the part that every rank computes, and the part for the process that samples."""

    computed: ComputedPart
    sampled: SampledPart


class Planner:
    """Makes the plan of each schedule, in the order in which the steps are launched.

    with_prompt_lens: whether rope depends on the length of each row's prompt.
    with_lens: whether rope depends on the length of each row's whole request.
    with_last_tokens: whether plans contain the last tokens of decodes, for processes that do not draw tokens.
    with_pending: whether steps are planned before the tokens of the steps in flight are known.
    vision: the vision part of the model; None if it has none.
    """

    def __init__(
        self,
        block_size: int,
        num_groups: int,
        *,
        vision: VisionSpec | None = None,
        with_prompt_lens: bool = False,
        with_lens: bool = False,
        with_last_tokens: bool = False,
        with_pending: bool = False,
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self.with_prompt_lens = with_prompt_lens
        self.with_lens = with_lens
        self.with_last_tokens = with_last_tokens
        self.with_pending = with_pending
        self._seen: SeenImages | None = None
        if vision is not None:
            from .image_rows import SeenImages

            self._seen = SeenImages(vision)
        # The seats whose requests edit their logits, and how many of its tokens the sampler was told of each.
        self._editing = dict[int, int]()

    def plan(self, schedule: Schedule) -> StepPlan:
        """Make the plan of a schedule whose blocks are allocated. Its lists are not changed later."""
        asked = schedule.asked_rows()
        computed = ComputedPart(
            swap_out=schedule.swap_out,
            swap_in=schedule.swap_in,
            copies=schedule.copies,
            state_moves=schedule.state_moves,
            settled=schedule.settled,
            unapplied=schedule.unapplied,
            num_decodes=schedule.num_decode_tokens,
            seats=schedule.seats,
            starts=schedule.num_computed_tokens,
            counts=schedule.num_new_tokens,
            entries=[array("i") for _ in range(self.num_groups)],
            sampled=schedule.sampled,
            sampled_seats=schedule.sampled_seats,
            asked=asked,
            towers=schedule.towers,
        )
        if schedule.drafts:
            _draw_after_drafts(schedule, computed)
        if self.with_last_tokens:
            decodes = schedule.requests[: computed.num_decodes]
            computed.last_tokens = array("i", [request.token_ids[-1] for request in decodes])
        if self.with_prompt_lens:
            computed.rope_lens = [request.num_prompt_tokens for request in schedule.requests]
        elif self.with_lens:
            computed.rope_lens = [request.num_tokens for request in schedule.requests]
        if schedule.grown:
            self._add_grown_tables(schedule, computed)
        if schedule.newcomers or schedule.corrected or not schedule.is_decode:
            self._add_newcomers_and_prompts(schedule, computed)
        if self._seen is not None:
            seen = self._seen.of(schedule, computed.starts, computed.counts)
            computed.images, computed.last_keys, computed.rope_offsets, computed.grid_positions = seen
        if schedule.adapters is not None:
            computed.adapters, computed.adapter_loads = schedule.adapters
        sampled = SampledPart()
        if schedule.newcomers or schedule.vacated:
            for seat in schedule.vacated:
                self._editing.pop(seat, None)
            edited = (r for r in schedule.newcomers if r.inputs.params.edits_logits)
            self._editing.update((r.seat, r.num_tokens) for r in edited)
        if self._editing:
            sampled.new_tokens = self._new_tokens(schedule)
        if asked:
            sampled.reports = [_report_params(schedule.requests[rows.row], rows) for rows in asked]
        return StepPlan(computed, sampled)

    def _add_grown_tables(self, schedule: Schedule, part: ComputedPart) -> None:
        """Add the new entries of grown block tables, except of requests whose tokens are sent as well."""
        sent = {*schedule.newcomers, *schedule.corrected}
        for row in schedule.grown:
            request = schedule.requests[row]
            if request not in sent:
                _add_change(part, row, request, part.starts[row] // self.block_size)

    def _add_newcomers_and_prompts(self, schedule: Schedule, part: ComputedPart) -> None:
        """Add the tokens and entries of newcomers and of rows that compute a prompt, in the order of rows.

        Newcomers and corrected requests that are not in the step come last.
        """
        requests = schedule.requests
        newcomers = {*schedule.newcomers}
        corrected = {*schedule.corrected}
        first_prompt = part.num_decodes + part.num_drafting
        for row, request in enumerate(requests):
            is_new = request in newcomers
            if is_new or row >= part.num_decodes or request in corrected:
                start = part.starts[row]
                count = part.counts[row]
                part.tokens.extend(request.token_ids[start : start + count])
                if part.num_decodes <= row < first_prompt:
                    part.tokens.extend(schedule.drafts[row - part.num_decodes])
                first_entry = 0 if is_new else start // self.block_size
                # The last token also where none is drawn: it may be the only one that the next step computes.
                _add_change(part, row, request, first_entry, count, request.token_ids[-1])
        present = {*requests}
        changed = dict.fromkeys([*schedule.newcomers, *schedule.corrected])
        absent = [request for request in changed if request not in present]
        for row, request in enumerate(absent, len(requests)):
            _add_change(part, row, request, 0, 0, request.token_ids[-1])

    def _new_tokens(self, schedule: Schedule) -> list[NewTokens]:
        """Return the tokens that this step computes, for each sampled request that edits its logits.

        The sampler has the tokens before, and all tokens of a newcomer. Pending tokens follow once known.
        """
        rows = zip(schedule.sampled_requests, schedule.sampled, schedule.sampled_seats, strict=True)
        starts = schedule.num_computed_tokens
        drafts = dict(enumerate(schedule.drafts, schedule.num_decode_tokens))
        new = list[NewTokens]()
        for request, row, seat in rows:
            if seat in self._editing:
                start = min(starts[row], self._editing[seat]) if self.with_pending else starts[row]
                new.append(NewTokens(seat, start, request.token_ids[start:], drafts.get(row, [])))
                self._editing[seat] = request.num_tokens
        return new


def _draw_after_drafts(schedule: Schedule, part: ComputedPart) -> None:
    """Draw a token after each token of the rows with drafts."""
    part.num_drafting = len(schedule.drafts)
    part.sampled = [*range(part.num_decodes)]
    for row, drafts in enumerate(schedule.drafts, part.num_decodes):
        part.sampled += [row] * (1 + len(drafts))
    first_prompt = part.num_decodes + part.num_drafting
    part.sampled_seats = [part.seats[row] for row in part.sampled] + schedule.sampled_seats[first_prompt:]
    part.sampled += schedule.sampled[first_prompt:]


def _add_change(
    part: ComputedPart,
    row: int,
    request: Request,
    first_entry: int,
    num_tokens: int = IN_SEAT,
    last_token: int = IN_SEAT,
) -> None:
    """Add a `SeatChange`, with the entries of the block tables from first_entry on."""
    tables = request.blocks.tables
    num_entries = len(tables[0]) - first_entry
    part.changes.append(SeatChange(row, request.seat, num_tokens, last_token, first_entry, num_entries))
    for sent, table in zip(part.entries, tables, strict=True):
        sent += table[first_entry:]


def _report_params(request: Request, rows: AskedRows) -> ReportParams:
    assert request.report is not None, "no report asks for these rows"
    num_top = request.report.num_top
    next_tokens = [] if num_top is None else request.token_ids[rows.start + 1 : rows.end + 1]
    return ReportParams(num_top, next_tokens)
