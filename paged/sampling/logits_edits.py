"""LogitsEdits: what the parameters of one batch's requests change in their logits before the filters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..kernels.backend import Kernels
from ..requests.request import Request
from ..sampling_params import SamplingParams, num_arguments
from .dry import DryHistory
from .token_history import TokenHistory

Rows = list[tuple[int, Request]]


class LogitsEdits:
    """Made for the requests of one batch, and good as long as the same ones are sampled from.

    A request's edits come in the order of SamplingParams. Lists are per request; on the device they are the
    places of single logits: row * vocab_size + token.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        kernels: Kernels,
        history: TokenHistory,
        dry: DryHistory,
        vocab_size: int,
    ) -> None:
        self.kernels, self.history, self.dry, self.vocab_size = kernels, history, dry, vocab_size
        self.device = history.slots.device
        rows = [*enumerate(requests)]
        self._allowed = self._allowed_tokens([(r, q) for r, q in rows if q.inputs.params.allowed_token_ids])
        words = [(r, q) for r, q in rows if q.inputs.rules.bad_words]
        # Words of one token are banned always, others when all but their last token were generated just now.
        self._banned = [
            self._place(r, w[0]) for r, q in words for w in q.inputs.rules.bad_words if len(w) == 1
        ]
        self._words = [(r, q, w) for r, q in words if (w := _by_last_but_one(q.inputs.rules.bad_words))]
        self._early: Rows = [(r, q) for r, q in rows if q.inputs.params.min_tokens and q.inputs.stop_ids]
        self._biases = self._logit_biases([(r, q) for r, q in rows if q.inputs.params.logit_bias])
        penalized = [(r, q) for r, q in rows if q.inputs.params.penalizes]
        history.keep([request for _, request in penalized])
        self._penalties = self._penalty_columns(penalized)
        repeating = [
            (r, q) for r, q in rows if q.inputs.params.dry_multiplier and q.inputs.params.dry_penalty_last_n
        ]
        dry.keep([request for _, request in repeating])
        self._dry_rows = self._longs(self._place(row, 0) for row, _ in repeating) if repeating else None
        self._processed: Rows = [(r, q) for r, q in rows if q.inputs.params.logits_processors]
        self._num_arguments = {
            row: [*map(num_arguments, q.inputs.params.logits_processors)] for row, q in self._processed
        }

    @property
    def may_leave_none(self) -> bool:
        """Whether a row may have no finite maximum afterwards that had one before."""
        bans = self._allowed is not None or self._banned or self._words or self._early
        return bool(bans or self._dry_rows is not None or self._processed)

    def apply(self, logits: Tensor) -> dict[int, str]:
        """Edit f32[num_rows, vocab_size] in place. Returns which rows failed, and why."""
        flat = logits.view(-1)
        if self._allowed is not None:
            rows, places = self._allowed
            kept = flat[places]
            logits.index_fill_(0, rows, -torch.inf)
            flat[places] = kept
        if banned := self._banned + self._finished_words() + self._early_stops():
            flat.index_fill_(0, self._longs(banned), -torch.inf)
        if self._biases is not None:
            flat.index_add_(0, *self._biases)
        if self._penalties is not None:
            rows, *columns = self._penalties
            history = self.history
            history.update()
            self.kernels.apply_penalties(
                logits, rows, history.slots, history.output_counts, history.seen, *columns
            )
        if self._dry_rows is not None:
            self.dry.update()
            self.dry.apply(flat, self._dry_rows)
        numbers = self._num_arguments
        return {r: message for r, q in self._processed if (message := _process(logits, r, q, numbers[r]))}

    def _allowed_tokens(self, rows: Rows) -> tuple[Tensor, Tensor] | None:
        if not rows:
            return None
        places = [
            self._place(row, token) for row, q in rows for token in q.inputs.params.allowed_token_ids or ()
        ]
        return self._longs(row for row, _ in rows), self._longs(places)

    def _logit_biases(self, rows: Rows) -> tuple[Tensor, Tensor] | None:
        biases = {
            self._place(row, token): bias
            for row, q in rows
            for token, bias in (q.inputs.params.logit_bias or {}).items()
        }
        if not biases:
            return None
        return self._longs(biases), torch.tensor([*biases.values()], device=self.device)

    def _penalty_columns(self, rows: Rows) -> tuple[Tensor, ...] | None:
        if not rows:
            return None
        values = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in _params(rows)]
        columns = torch.tensor(values, dtype=torch.float32, device=self.device).T.contiguous()
        return self._longs(row for row, _ in rows), *columns

    def _finished_words(self) -> list[int]:
        """The last tokens of bad words of which the rest was generated just now."""
        banned = []
        for row, request, words in self._words:
            token_ids, start = request.token_ids, request.num_prompt_tokens
            if len(token_ids) == start:
                continue
            for word in words.get(token_ids[-1], ()):
                first = len(token_ids) - len(word) + 1
                if first >= start and token_ids[first:] == [*word[:-1]]:
                    banned.append(self._place(row, word[-1]))
        return banned

    def _early_stops(self) -> list[int]:
        """The stop tokens of those who have not reached min_tokens."""
        if not self._early:
            return []
        self._early = [(row, q) for row, q in self._early if q.num_output_tokens < q.inputs.params.min_tokens]
        return [self._place(row, token) for row, q in self._early for token in q.inputs.stop_ids]

    def _place(self, row: int, token: int) -> int:
        return row * self.vocab_size + token

    def _longs(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor([*numbers], dtype=torch.int64, device=self.device)


def _params(rows: Rows) -> list[SamplingParams]:
    return [request.inputs.params for _, request in rows]


def _by_last_but_one(words: Iterable[tuple[int, ...]]) -> dict[int, list[tuple[int, ...]]]:
    """The words of several tokens by the one before the last."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for word in words:
        if len(word) > 1:
            found.setdefault(word[-2], []).append(word)
    return found


def _process(logits: Tensor, row: int, request: Request, numbers: Sequence[int]) -> str | None:
    """Let a request's own functions, of so many arguments each, change its row. Returns what went wrong."""
    for i, processor in enumerate(request.inputs.params.logits_processors):
        name = f"logits_processors[{i}]"
        try:
            # Copies: it may keep them, or change them and fail.
            given = ([*request.inputs.prompt_token_ids], request.output_token_ids, logits[row].clone())
            changed = processor(*given[-numbers[i] :])
        except Exception as error:  # whatever a user's function raises is the error of its request
            return f"{name} raised {type(error).__name__}: {error}"
        if not isinstance(changed, Tensor) or changed.shape != logits[row].shape:
            got = f"shape {[*changed.shape]}" if isinstance(changed, Tensor) else f"{type(changed).__name__}"
            return f"{name} must return a tensor of shape {[*logits[row].shape]}, got {got}"
        logits[row] = changed
    return None
