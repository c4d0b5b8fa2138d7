"""LogitsEdits: the changes that requests' parameters make to their logits, before the filters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..kernels.backend import Kernels
from ..requests.request import Request
from ..sampling_params import SamplingParams, num_arguments
from .dry import DryHistory
from .token_history import TokenHistory

IndexedRequests = list[tuple[int, Request, SamplingParams]]  # row of the logits, request, its parameters


class LogitsEdits:
    """The edits for the requests of one batch, valid as long as the same requests are sampled from.

    Edits are applied in the order of SamplingParams. Single logits are addressed by their flat index,
    row * vocab_size + token.
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
        rows = [(row, request, request.inputs.params) for row, request in enumerate(requests)]
        self._allowed = self._allowed_tokens([(r, q, p) for r, q, p in rows if p.allowed_token_ids])
        words = [(r, q, bad) for r, q, _ in rows if (bad := q.inputs.rules.bad_words)]
        # A bad word of one token is always banned; a longer one, if all its tokens but the last were just
        # generated.
        self._banned = [self._flat_index(r, w[0]) for r, _, bad in words for w in bad if len(w) == 1]
        self._words = [(r, q, long) for r, q, bad in words if (long := _by_last_but_one(bad))]
        self._early = [(r, q, p) for r, q, p in rows if p.min_tokens and q.stop_ids]
        self._biases = self._logit_biases([(r, q, p) for r, q, p in rows if p.logit_bias])
        penalized = [(r, q, p) for r, q, p in rows if p.penalizes]
        history.keep([request for _, request, _ in penalized])
        self._penalties = self._penalty_columns(penalized)
        repeating = [(r, q) for r, q, p in rows if p.dry_multiplier and p.dry_penalty_last_n]
        dry.keep([request for _, request in repeating])
        self._dry_rows = self._longs(self._flat_index(row, 0) for row, _ in repeating) if repeating else None
        self._processed = [
            (r, q, [*map(num_arguments, ps)]) for r, q, p in rows if (ps := p.logits_processors)
        ]

    @property
    def may_ban_all(self) -> bool:
        """Whether the edits may set every finite logit of a row to -inf."""
        bans = self._allowed is not None or self._banned or self._words or self._early
        return bool(bans or self._dry_rows is not None or self._processed)

    def apply(self, logits: Tensor) -> dict[int, str]:
        """Edit f32[num_rows, vocab_size] in place. Return the errors of rows that failed."""
        flat = logits.view(-1)
        if self._allowed is not None:
            rows, allowed = self._allowed
            kept = flat[allowed]
            logits.index_fill_(0, rows, -torch.inf)
            flat[allowed] = kept
        if banned := self._banned + self._last_tokens_of_words() + self._early_stops():
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
        return {r: message for r, q, num in self._processed if (message := _process(logits, r, q, num))}

    def _allowed_tokens(self, rows: IndexedRequests) -> tuple[Tensor, Tensor] | None:
        if not rows:
            return None
        allowed = [self._flat_index(row, token) for row, _, p in rows for token in p.allowed_token_ids or ()]
        return self._longs(row for row, _, _ in rows), self._longs(allowed)

    def _logit_biases(self, rows: IndexedRequests) -> tuple[Tensor, Tensor] | None:
        biases = {
            self._flat_index(row, token): bias
            for row, _, params in rows
            for token, bias in (params.logit_bias or {}).items()
        }
        if not biases:
            return None
        return self._longs(biases), torch.tensor([*biases.values()], device=self.device)

    def _penalty_columns(self, rows: IndexedRequests) -> tuple[Tensor, ...] | None:
        if not rows:
            return None
        values = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, _, p in rows]
        columns = torch.tensor(values, dtype=torch.float32, device=self.device).T.contiguous()
        return self._longs(row for row, _, _ in rows), *columns

    def _last_tokens_of_words(self) -> list[int]:
        """Return the last tokens of bad words whose other tokens were just generated."""
        banned = []
        for row, request, words in self._words:
            token_ids, start = request.token_ids, request.num_prompt_tokens
            if len(token_ids) == start:
                continue
            for word in words.get(token_ids[-1], ()):
                first = len(token_ids) - len(word) + 1
                if first >= start and token_ids[first:] == [*word[:-1]]:
                    banned.append(self._flat_index(row, word[-1]))
        return banned

    def _early_stops(self) -> list[int]:
        """Return the stop tokens of requests that have not reached min_tokens."""
        if not self._early:
            return []
        self._early = [(row, q, p) for row, q, p in self._early if q.num_output_tokens < p.min_tokens]
        return [self._flat_index(row, token) for row, q, _ in self._early for token in q.stop_ids]

    def _flat_index(self, row: int, token: int) -> int:
        return row * self.vocab_size + token

    def _longs(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor([*numbers], dtype=torch.int64, device=self.device)


def _by_last_but_one(words: Iterable[tuple[int, ...]]) -> dict[int, list[tuple[int, ...]]]:
    """Group the words of several tokens by their last but one."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for word in words:
        if len(word) > 1:
            found.setdefault(word[-2], []).append(word)
    return found


def _process(logits: Tensor, row: int, request: Request, numbers: Sequence[int]) -> str | None:
    """Let a request's logits processors change its row. Return an error message if one fails.

    numbers: how many arguments each of them takes.
    """
    shape, device = logits[row].shape, logits.device
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
