"""LogitsEdits: the changes that requests' parameters make to their logits, before the filters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..device.transfers import Sent, Upload
from ..options.logits import num_arguments
from ..options.sampling_params import SamplingParams
from ..scheduler.schedule import RowError
from .dry import DryHistory
from .seats import DraftRow, Sampled
from .token_history import Recount, TokenHistory

if TYPE_CHECKING:
    from ..kernels.operations import Kernels
    from .row_penalties import RowPenalties

IndexedRequests = list[tuple[int, Sampled, SamplingParams]]  # row of the logits, request, its parameters


class StepEdits(NamedTuple):
    """The edits of one step, in addition to the edits of the batch.

    banned: flat indices of the logits that only this step bans.
    repeated: flat indices of the logits of the last tokens of requests that penalize these alone, and their
        penalties.
    """

    banned: Sent | None
    recount: Recount | None
    repeated: tuple[Sent, Sent] | None


class LogitsEdits:
    """The edits of one batch's logits. The object stays valid while the same requests are sampled.

    Edits are applied in the order of SamplingParams. A single logit is addressed by its flat index, row *
    vocab_size + token.
    """

    def __init__(
        self,
        requests: Sequence[tuple[int, Sampled]],  # with the rows of their logits
        kernels: Kernels,
        history: TokenHistory,
        dry: DryHistory,
        vocab_size: int,
        upload: Upload,
    ) -> None:
        self.kernels = kernels
        self.history = history
        self.dry = dry
        self.vocab_size = vocab_size
        rows = [(row, request, request.inputs.params) for row, request in requests]
        self._allowed = self._allowed_tokens([(r, q, p) for r, q, p in rows if p.allowed_token_ids], upload)
        words = [(r, q, bad) for r, q, _ in rows if (bad := q.inputs.rules.bad_words)]
        # A bad word of one token is always banned; a longer one, if all its tokens but the last were just
        # generated.
        banned = [self._flat_index(r, w[0]) for r, _, bad in words for w in bad if len(w) == 1]
        self._banned = upload.put(banned, torch.int64) if banned else None
        self._words = [(r, q, long) for r, q, bad in words if (long := _by_last_but_one(bad))]
        self._early = [(r, q, p) for r, q, p in rows if p.min_tokens and q.stop_ids]
        self._biases = self._logit_biases([(r, q, p) for r, q, p in rows if p.logit_bias], upload)
        self._repeating = [(r, q, p) for r, q, p in rows if p.penalizes_last]
        penalized = [(r, q, p) for r, q, p in rows if p.penalizes]
        history.keep([request for _, request, _ in penalized], upload)
        self._penalized = penalized
        self._penalized_rows = [row for row, _, _ in penalized]
        self._penalties = self._penalty_columns(penalized, upload)
        repeating: dict[Sampled, list[tuple[int, Sampled]]] = {}  # the rows of each request, its own first
        for r, q, p in rows:
            if p.dry_multiplier and p.dry_penalty_last_n:
                repeating.setdefault(q.seat if isinstance(q, DraftRow) else q, []).append((r, q))
        dry.keep([*repeating])
        # The first logits of each request's own row, of those behind a draft, and so on; 0 for none.
        starts = [
            [0 if row is None else self._flat_index(row[0], 0) for row in behind]
            for behind in zip_longest(*repeating.values())
        ]
        self._dry_rows = upload.put(starts, torch.int64) if repeating else None
        self._dry_ends = [of_request[-1][1] for of_request in repeating.values()]
        self._processed = [
            (r, q, [*map(num_arguments, ps)]) for r, q, p in rows if (ps := p.logits_processors)
        ]

    @property
    def may_ban_all(self) -> bool:
        """Whether the edits may set every finite logit of a row to -inf."""
        bans = self._allowed is not None or self._banned or self._words or self._early
        return bool(bans or self._dry_rows is not None or self._processed)

    def put_penalties(self, of_rows: RowPenalties, upload: Upload) -> None:
        """Send the penalties of the batch, if it has any, to the memory that CUDA graphs read."""
        if self._penalties is None or self.history.slots is None:
            return
        columns = [*zip(*(_penalties_of(params) for _, _, params in self._penalized), strict=True)]
        of_rows.put(self._penalized_rows, self.history.slots.numbers.tolist(), columns, upload)

    def are_penalties(self, step: StepEdits) -> bool:
        """Return whether the edits of a step are penalties only, for requests without drafts."""
        of_batch = self._allowed, self._banned, self._biases, self._dry_rows, step.banned
        of_texts = self._words or self._early or self._repeating or self._processed
        is_more = any(sent is not None for sent in of_batch) or of_texts
        return not is_more and step.recount is not None and step.recount.drafts is None

    def prepare(self, positions: Sequence[int], upload: Upload) -> StepEdits:
        """Send the edits that depend on the tokens so far.

        positions: the position of the token that each row draws.
        """
        banned = self._last_tokens_of_words() + self._early_stops(positions)
        recount = None
        if self._penalties is not None:
            recount = self.history.prepare([positions[row] for row in self._penalized_rows], upload)
        sent = upload.put(banned, torch.int64) if banned else None
        return StepEdits(sent, recount, self._last_tokens(upload))

    def apply(self, logits: Tensor, step: StepEdits) -> dict[int, RowError]:
        """Edit the logits f32[num_rows, vocab_size] in place. Return the errors of failed rows."""
        flat = logits.view(-1)
        if self._allowed is not None:
            rows, allowed = (sent.tensor for sent in self._allowed)
            kept = flat[allowed]
            logits.index_fill_(0, rows, -torch.inf)
            flat[allowed] = kept
        for banned in (self._banned, step.banned):
            if banned is not None:
                flat.index_fill_(0, banned.tensor, -torch.inf)
        if self._biases is not None:
            flat.index_add_(0, *(sent.tensor for sent in self._biases))
        if step.repeated is not None:
            index, penalty = (sent.tensor for sent in step.repeated)
            values = flat[index]
            flat[index] = torch.where(values > 0, values / penalty, values * penalty)
        if self._penalties is not None and step.recount is not None:
            rows, *columns = (sent.tensor for sent in self._penalties)
            history = self.history
            history.count(step.recount)
            assert history.slots is not None, "no request has a slot"
            counts = history.output_counts, history.seen
            self.kernels.apply_penalties(logits, rows, history.slots.tensor, *counts, *columns)
        if self._dry_rows is not None:
            rows = self._dry_rows.tensor
            self.dry.update()
            self.dry.apply(flat, rows[0])
            if len(rows) > 1:
                self.dry.apply_behind_drafts(flat, rows[1:], [end.token_ids for end in self._dry_ends])
        messages = {row: _process(logits, row, request, num) for row, request, num in self._processed}
        return {row: RowError(message, "request") for row, message in messages.items() if message}

    def record(self, tokens: Tensor, step: StepEdits) -> None:
        """Count the drawn tokens, i64[num_rows], for later penalties."""
        if self._penalties is not None and step.recount is not None:
            self.history.record(tokens, self._penalties[0].tensor, step.recount.drafts)

    def _allowed_tokens(self, rows: IndexedRequests, upload: Upload) -> tuple[Sent, Sent] | None:
        if not rows:
            return None
        allowed = [self._flat_index(row, token) for row, _, p in rows for token in p.allowed_token_ids or ()]
        return upload.put([row for row, _, _ in rows], torch.int64), upload.put(allowed, torch.int64)

    def _logit_biases(self, rows: IndexedRequests, upload: Upload) -> tuple[Sent, Sent] | None:
        biases = {
            self._flat_index(row, token): bias
            for row, _, params in rows
            for token, bias in (params.logit_bias or {}).items()
        }
        if not biases:
            return None
        return upload.put([*biases], torch.int64), upload.put([*biases.values()], torch.float32)

    def _penalty_columns(self, rows: IndexedRequests, upload: Upload) -> tuple[Sent, ...] | None:
        if not rows:
            return None
        columns = zip(*(_penalties_of(params) for _, _, params in rows), strict=True)
        sent = (upload.put(column, torch.float32) for column in columns)
        return upload.put(self._penalized_rows, torch.int64), *sent

    def _last_tokens_of_words(self) -> list[int]:
        """Return the last tokens of bad words whose other tokens were just generated."""
        banned = []
        for row, request, words in self._words:
            token_ids = request.token_ids
            start = request.num_prompt_tokens
            if len(token_ids) == start:
                continue
            for word in words.get(token_ids[-1], ()):
                first = len(token_ids) - len(word) + 1
                if first >= start and token_ids[first:] == [*word[:-1]]:
                    banned.append(self._flat_index(row, word[-1]))
        return banned

    def _last_tokens(self, upload: Upload) -> tuple[Sent, Sent] | None:
        """Send the tokens of each window of repetition_penalty_last_n, and their penalties."""
        if not self._repeating:
            return None
        penalties = {
            self._flat_index(row, token): p.repetition_penalty
            for row, q, p in self._repeating
            for token in q.token_ids[-p.repetition_penalty_last_n :]
        }
        return upload.put([*penalties], torch.int64), upload.put([*penalties.values()], torch.float32)

    def _early_stops(self, positions: Sequence[int]) -> list[int]:
        """Return the stop tokens of requests that have not reached min_tokens."""
        if not self._early:
            return []
        self._early = [
            (row, q, p) for row, q, p in self._early if positions[row] - q.num_prompt_tokens < p.min_tokens
        ]
        return [self._flat_index(row, token) for row, q, _ in self._early for token in q.stop_ids]

    def _flat_index(self, row: int, token: int) -> int:
        return row * self.vocab_size + token


def _penalties_of(params: SamplingParams) -> tuple[float, float, float]:
    of_all = params.repetition_penalty if params.repetition_penalty_last_n < 0 else 1.0
    return of_all, params.frequency_penalty, params.presence_penalty


def _by_last_but_one(words: Iterable[tuple[int, ...]]) -> dict[int, list[tuple[int, ...]]]:
    """Group the words of at least two tokens by the token before their last."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for word in words:
        if len(word) > 1:
            found.setdefault(word[-2], []).append(word)
    return found


def _process(logits: Tensor, row: int, request: Sampled, numbers: Sequence[int]) -> str | None:
    """Let a request's logits processors change its row. Return an error message if one fails.

    numbers: how many arguments each processor takes.
    """
    shape = logits[row].shape
    device = logits.device
    for i, processor in enumerate(request.inputs.params.logits_processors):
        name = f"logits_processors[{i}]"
        try:
            # Copies, because it may keep them, or change them and then fail.
            given = ([*request.inputs.prompt_token_ids], request.output_token_ids, logits[row].clone())
            changed = processor(*given[-numbers[i] :])
        except Exception as error:  # any error of a user's function is its request's
            return f"{name} raised {type(error).__name__}: {error}"
        if not isinstance(changed, Tensor) or changed.shape != shape:
            got = f"shape {[*changed.shape]}" if isinstance(changed, Tensor) else f"{type(changed).__name__}"
            return f"{name} must return a tensor of shape {[*shape]}, got {got}"
        if changed.device != device:
            return f"{name} must return a tensor on {device}, as its logits are, got {changed.device}"
        logits[row] = changed
    return None
