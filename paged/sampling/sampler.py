"""Sampler: logits to tokens. Random numbers are a function of (request seed, position) alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..device.transfers import Download, Received, Sent, Transfers, Upload
from ..scheduler.schedule import NOT_FINITE, RowError, StepOutput
from .parameters import SentParameters, columns_of
from .seats import Sampled

if TYPE_CHECKING:
    from ..kernels.operations import Kernels
    from ..requests.prompt_report import TokenLogprobs
    from .dry import DryHistory
    from .logits_edits import LogitsEdits, StepEdits
    from .row_penalties import RowPenalties
    from .seat_parameters import SeatedParameters, SeatParameters
    from .structured_outputs import GrammarMasks
    from .token_history import TokenHistory

NONE_LEFT = RowError(
    "no token is left: bad_words, min_tokens or a logits processor ban everything that allowed_token_ids and "
    "structured_outputs allow",
    "request",
)
OVERFLOW = RowError("the sampling parameters made logits that are not finite", "request")


class Sampler:
    """Chooses a token for each request.

    The parameters stay on the device as long as the same requests are sampled.

    max_num_seqs: maximum number of requests in a batch; on a GPU, memory for their penalties is allocated at
        once.
    of_seats: the parameters of all seats, if the device keeps them; it then computes the positions of drawn
        tokens too.
    """

    def __init__(
        self,
        kernels: Kernels,
        vocab_size: int,
        device: torch.device,
        max_num_seqs: int = 1,
        of_seats: SeatParameters | None = None,
    ) -> None:
        self.kernels = kernels
        self.vocab_size = vocab_size
        self.device = device
        self._max_num_seqs = max_num_seqs
        self.of_seats = of_seats
        self.row_penalties: RowPenalties | None = None  # where CUDA graphs read penalties
        if device.type == "cuda":
            assert self.history, "its memory is allocated at once"
        self._last: _Batch | None = None

    @cached_property
    def history(self) -> TokenHistory:
        """The tokens of requests with penalties."""
        from .token_history import MIN_SLOTS, SCRATCH_SLOT, TokenHistory

        num_slots = SCRATCH_SLOT + 1 + self._max_num_seqs if self.device.type == "cuda" else MIN_SLOTS
        return TokenHistory(self.vocab_size, self.device, num_slots)

    @cached_property
    def dry(self) -> DryHistory:
        """The texts of requests that use DRY."""
        from .dry import DryHistory

        return DryHistory(self.device)

    def prepare(
        self,
        requests: Sequence[Sampled],
        positions: Callable[[], Sequence[int]],
        upload: Upload,
        seats: Sequence[int] = (),
    ) -> Draw:
        """Send the tensors needed to sample a token for each request.

        positions: returns the positions of the tokens to draw.
        """
        batch = self._last
        if batch is None or batch.requests != requests:
            # Before the new batch changes the histories: the old one is invalid even if that fails half-way.
            self._last = None
            batch = self._last = _Batch(requests, self, upload, seats)
        return Draw(batch, positions, upload)

    def write(self) -> None:
        """Store the parameters of a new batch on the device, once their upload is sent."""
        if self.of_seats is not None:
            self.of_seats.write()
        if self.row_penalties is not None:
            self.row_penalties.write()

    def forget(self) -> None:
        """Drop the parameters of the last batch, because their upload may have failed."""
        self._last = None
        if self.of_seats is not None:
            self.of_seats.forget()

    def sample(
        self,
        logits: Tensor,
        requests: Sequence[Sampled],
        grammar_masks: GrammarMasks | None = None,
        best: tuple[Tensor, Tensor] | None = None,
    ) -> StepOutput:
        """Choose a token for each row of f32[len(requests), vocab_size], and wait for it; see `Draw.run`."""
        transfers = Transfers(self.device)
        upload = transfers.new_upload()
        download = transfers.new_download()
        draw = self.prepare(requests, lambda: [len(request.token_ids) for request in requests], upload)
        upload.send()
        draw.run(logits, download, grammar_masks, best)
        download.send()
        download.wait()
        return draw.result()


class Draw:
    """One step's draw: a token for each request of a batch."""

    __slots__ = (
        "_edited",
        "_edits",
        "_errors",
        "_kernels",
        "_logprobs",
        "_of_model",
        "_positions",
        "_tokens",
        "batch",
        "requests",
    )

    def __init__(self, batch: _Batch, positions: Callable[[], Sequence[int]], upload: Upload) -> None:
        self.batch = batch
        self._kernels = batch.kernels
        self.requests = batch.requests
        self._edits: StepEdits | None = None
        self._positions: Sent | None = None
        is_drawn = batch.parameters is not None and batch.of_seats is None
        if batch.edits is not None or is_drawn:
            known = positions()
            self._edits = None if batch.edits is None else batch.edits.prepare(known, upload)
            if is_drawn:
                self._positions = upload.put(known, torch.int64)
        self._errors: dict[int, RowError] = {}
        self._tokens: Received | None = None
        self._of_model: Received | None = None  # each row's highest logit
        self._edited: Received | None = None  # after all edits; None: as the model's
        self._logprobs: list[list[Received]] = []

    def take(self, tokens: Tensor, highest: Tensor, download: Download) -> None:
        """Take tokens that were already drawn with the parameters of this batch.

        highest: each row's highest logit.
        """
        self._tokens = download.get(tokens)
        self._of_model = download.get(highest)

    @property
    def only_penalizes(self) -> bool:
        """Whether penalties are the only edits of the logits, and no row follows drafts."""
        edits = self.batch.edits
        return edits is not None and self._edits is not None and edits.are_penalties(self._edits)

    def count_history(self) -> None:
        """Count the tokens of new requests with penalties. The replay of a graph counts the drawn tokens."""
        edits = self.batch.edits
        if edits is not None and self._edits is not None and self._edits.recount is not None:
            edits.history.count(self._edits.recount)
            edits.history.note_drawn()

    def start_masks(self) -> GrammarMasks | None:
        """Start to compute the masks of requests with a grammar. Return None if no request has one."""
        rows = self.batch.with_grammar
        if not rows:
            return None
        from .structured_outputs import GrammarMasks

        return GrammarMasks(rows, [self.requests[row] for row in rows])

    def run(
        self,
        logits: Tensor,
        download: Download,
        grammar_masks: GrammarMasks | None = None,
        best: tuple[Tensor, Tensor] | None = None,
        places: Any = None,
    ) -> Tensor | None:
        """Choose one token for each row of f32[num_requests, vocab_size], which is changed in place.

        best: the result of `kernels.greedy` for the logits, if already computed.
        places: the `SampledPlaces` of the rows, if the device keeps parameters by seat.

        Returns the tokens, i64[num_requests]; None if there are no requests. A row gets an error instead of a
        token if its logits are not finite, or if the request's own parameters allow no token.
        """
        batch = self.batch
        kernels = self._kernels
        if not self.requests:
            return None
        is_edited = batch.edits is not None or grammar_masks is not None
        highest: Tensor | None
        if batch.parameters is None and not (is_edited or batch.asked):
            tokens, highest = best or kernels.greedy(logits)
        else:
            raw = batch.raw_rows(logits, changed=grammar_masks is not None)
            of_model = best or (kernels.greedy(logits) if is_edited else None)
            may_ban_all = batch.may_ban_all or grammar_masks is not None
            edited: Tensor | None
            chosen = None
            if grammar_masks is not None and batch.edits is None:
                assert of_model is not None, "masks are edits"
                chosen = grammar_masks.choose(kernels, logits, of_model)
            if chosen is not None and batch.parameters is None:
                tokens, edited = chosen
            else:
                known = None if chosen is None else chosen[1]
                places = places if self._positions is None else self._positions.tensor
                tokens, edited = self._choose(
                    logits, grammar_masks, best, places, highest=known, may_ban_all=may_ban_all
                )
            if may_ban_all and edited is not None:
                self._edited = download.get(edited)
            highest = edited if of_model is None else of_model[1]
            if raw is not None:
                self._logprobs = batch.compute_logprobs(raw, tokens, download)
        assert highest is not None, "nothing tells the highest logits"
        self._tokens = download.get(tokens)
        self._of_model = download.get(highest)
        return tokens

    def _choose(
        self,
        logits: Tensor,
        grammar_masks: GrammarMasks | None,
        best: tuple[Tensor, Tensor] | None,
        places: Any,
        *,
        highest: Tensor | None,
        may_ban_all: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Edit the logits and choose. Return the tokens and the highest edited logits, if they are needed.

        highest: the latter, if known.
        """
        batch = self.batch
        if grammar_masks is not None:
            grammar_masks.apply(self._kernels, logits)
        if batch.edits is not None and self._edits is not None:
            self._errors = batch.edits.apply(logits, self._edits)
        if batch.parameters is None:
            is_edited = batch.edits is not None or grammar_masks is not None
            tokens, highest = self._kernels.greedy(logits) if is_edited or best is None else best
        else:
            assert places is not None, "random numbers depend on the position"
            found: Tensor | None = None
            if highest is None and (best is None or may_ban_all):
                highest = found = torch.empty(len(logits), device=logits.device)
            tokens = batch.parameters.sample(self._kernels, logits, places, found)
        if batch.edits is not None and self._edits is not None:
            batch.edits.record(tokens, self._edits)
        return tokens, highest

    def result(self) -> StepOutput:
        """Return the tokens and errors. The download must have arrived."""
        if self._tokens is None or self._of_model is None:
            return StepOutput()
        drawn = self._tokens.numbers.tolist()
        of_model = self._of_model.numbers.tolist()
        if self._edited is None and not self._errors and math.isfinite(sum(of_model)):
            return StepOutput(drawn, self.batch.reports(self._logprobs) if self._logprobs else {})
        edited = of_model if self._edited is None else self._edited.numbers.tolist()
        errors = self._errors | _not_finite(of_model, edited, self._errors)
        tokens = [None if row in errors else token for row, token in enumerate(drawn)]
        reports = self.batch.reports(self._logprobs)
        return StepOutput(tokens, {row: reports[row] for row in reports if row not in errors}, errors)


class _Batch:
    """The parameters of a batch's requests on the device, sent once.

    parameters: of `sample_tokens`; None: every row is greedy.
    asked: the rows that report log-probabilities.
    with_grammar: the rows of requests that have a grammar.
    """

    def __init__(
        self, requests: Sequence[Sampled], sampler: Sampler, upload: Upload, seats: Sequence[int]
    ) -> None:
        self.requests = requests
        self.of_seats = sampler.of_seats
        self.kernels = sampler.kernels
        columns = columns_of(requests, sampler.vocab_size)
        self.edits: LogitsEdits | None = None
        if columns["has_edits"].any():
            from .logits_edits import LogitsEdits

            edited = [(row, requests[row]) for row in np.flatnonzero(columns["has_edits"]).tolist()]
            histories = sampler.history, sampler.dry
            self.edits = LogitsEdits(edited, sampler.kernels, *histories, sampler.vocab_size, upload)
            if sampler.row_penalties is not None:
                self.edits.put_penalties(sampler.row_penalties, upload)
        else:
            if "history" in vars(sampler):
                sampler.history.keep([], upload)
            if "dry" in vars(sampler):
                sampler.dry.keep([])
        self.may_ban_all = self.edits is not None and self.edits.may_ban_all
        self.parameters: SentParameters | SeatedParameters | None = None
        of_seats = sampler.of_seats
        if of_seats is not None:
            of_seats.put(seats, requests, columns, upload)
        if columns["temperature"].any():
            self.parameters = (
                SentParameters(columns, sampler.vocab_size, upload)
                if of_seats is None
                else of_seats.of_rows(columns, sampler.vocab_size)
            )
        self.with_grammar = [row for row, r in enumerate(requests) if r.sampling.grammar is not None]
        self.asked = np.flatnonzero(columns["wants_logprobs"]).tolist()
        if self.asked:
            from .logprobs import AskedLogprobs

            num_tops = [requests[row].inputs.params.logprobs or 0 for row in self.asked]
            self._logprobs = AskedLogprobs(num_tops, sampler.vocab_size, upload)
            self._asked_rows = upload.put(self.asked, torch.int64)
        self._raw: Tensor | None = None

    def raw_rows(self, logits: Tensor, *, changed: bool) -> Tensor | None:
        """Return the logits of rows that report log-probabilities, copied if anything will change them.

        changed: whether grammar masks will change logits. The copy reuses the last step's memory, as
        allocating this much costs more than the copy.
        """
        if not self.asked:
            return None
        if len(self.asked) == len(self.requests) and not (changed or self.edits or self.parameters):
            return logits
        if self._raw is None:
            self._raw = logits.new_empty(len(self.asked), logits.shape[1])
        return self.kernels.take_rows(logits, self._asked_rows.tensor, self._raw)

    def compute_logprobs(self, raw: Tensor, tokens: Tensor, download: Download) -> list[list[Received]]:
        """Compute the requested log-probabilities, of the rows that `raw_rows` returned."""
        if len(self.asked) < len(self.requests):
            tokens = tokens.index_select(0, self._asked_rows.tensor)
        return self._logprobs.compute(self.kernels, raw, tokens, download)

    def reports(self, found: list[list[Received]]) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities by row; NaN for rows that are not finite."""
        return dict(zip(self.asked, self._logprobs.reports(found), strict=True)) if self.asked else {}


def _not_finite(
    of_model: list[float], edited: list[float], known: dict[int, RowError]
) -> dict[int, RowError]:
    """Return errors for the rows without a finite maximum, in the model's own logits or after all edits."""
    errors = {row: NOT_FINITE for row, value in enumerate(of_model) if not math.isfinite(value)}
    for row, value in enumerate(edited):
        if not math.isfinite(value) and row not in errors and row not in known:
            errors[row] = NONE_LEFT if value == -math.inf else OVERFLOW
    return errors
