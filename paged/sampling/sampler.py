"""Sampler: logits to tokens. Random numbers are a function of (request seed, position) alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.backend import Kernels
from ..requests.request import Request, TokenLogprobs
from ..sampling_params import SamplingParams
from ..scheduler.schedule import NOT_FINITE, StepOutput
from .dry import DryHistory
from .logits_edits import LogitsEdits
from .logprobs import token_logprobs
from .structured_outputs import GrammarMasks
from .token_history import TokenHistory

NONE_LEFT = (
    "no token is left: bad_words, min_tokens or a logits processor ban everything that allowed_token_ids and "
    "structured_outputs allow"
)
OVERFLOW = "the sampling parameters made logits that are not finite"


class Sampler:
    """Chooses a token for each request.

    Tensors made from the requests' parameters are kept while the same requests are sampled.
    """

    def __init__(self, kernels: Kernels, vocab_size: int, device: torch.device) -> None:
        self.kernels, self.vocab_size, self.device = kernels, vocab_size, device
        self.history, self.dry = TokenHistory(vocab_size, device), DryHistory(device)
        self._last: _Batch | None = None

    def sample(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        grammar_masks: GrammarMasks | None = None,
        best: tuple[Tensor, Tensor] | None = None,
    ) -> StepOutput:
        """Choose one token for each row of f32[len(requests), vocab_size], which is changed in place.

        best: `kernels.greedy` of the logits, if already computed.

        A row gets an error instead of a token if the model's logits are not finite, or if the request's own
        parameters leave no token.
        """
        if not requests:
            return StepOutput()
        batch = self._last
        if batch is None or batch.requests != requests:
            # Before the new batch changes the histories: the old one is invalid even if that fails half-way.
            self._last = None
            batch = self._last = _Batch(requests, self)
        tokens, highest = best or self.kernels.greedy(logits)
        if batch.is_greedy and grammar_masks is None:
            return _greedy(tokens.tolist(), highest.tolist())
        return self._sample(logits, highest, batch, grammar_masks)

    def _sample(
        self, logits: Tensor, highest: Tensor, batch: _Batch, grammar_masks: GrammarMasks | None
    ) -> StepOutput:
        raw = batch.raw_rows(logits, changed=grammar_masks is not None)
        errors: dict[int, str] = {}
        if grammar_masks is not None:
            grammar_masks.apply(logits)
        if batch.edits is not None:
            errors = batch.edits.apply(logits)
        may_ban_all = batch.may_ban_all or grammar_masks is not None
        edited = self.kernels.greedy(logits)[1] if may_ban_all else None
        drawn = batch.draw(logits).tolist()
        reports = batch.reports(raw, drawn)
        of_model = highest.tolist()
        errors.update(_not_finite(of_model, of_model if edited is None else edited.tolist(), errors))
        tokens = [None if row in errors else token for row, token in enumerate(drawn)]
        return StepOutput(tokens, {row: reports[row] for row in reports if row not in errors}, errors)


class _Batch:
    """The parameters of a batch's requests as tensors, computed once."""

    def __init__(self, requests: Sequence[Request], sampler: Sampler) -> None:
        self.requests, self.kernels, self.device = requests, sampler.kernels, sampler.device
        self.vocab_size = vocab_size = sampler.vocab_size
        self.is_greedy = all(request.inputs.is_greedy for request in requests)
        self.edits: LogitsEdits | None = None
        if any(request.inputs.params.edits_logits for request in requests):
            self.edits = LogitsEdits(requests, sampler.kernels, sampler.history, sampler.dry, vocab_size)
        else:
            sampler.history.keep([])
            sampler.dry.keep([])
        self.may_ban_all = self.edits is not None and self.edits.may_ban_all
        self._asked = [row for row, request in enumerate(requests) if request.inputs.wants_logprobs]
        self._raw: Tensor | None = None
        self._drawn = [row for row, request in enumerate(requests) if request.inputs.params.temperature > 0.0]
        drawn = [requests[row] for row in self._drawn]
        self._rows = torch.tensor(self._drawn, device=self.device)
        self._seeds = torch.tensor([_signed(request.sampling.seed) for request in drawn], device=self.device)
        self._filters = _filters([r.inputs.params for r in drawn], vocab_size, self.device) if drawn else {}

    def raw_rows(self, logits: Tensor, *, changed: bool) -> Tensor | None:
        """Return the logits of rows that report log-probabilities, copied if anything will change them.

        changed: whether grammar masks will. The copy reuses the last step's memory, as allocating this much
        costs more than the copy.
        """
        if not self._asked:
            return None
        if len(self._asked) == len(self.requests) and not (changed or self.edits or self._drawn):
            return logits
        if self._raw is None:
            self._raw = logits.new_empty(len(self._asked), logits.shape[1])
            self._asked_rows = torch.tensor(self._asked, device=self.device)
        return self.kernels.take_rows(logits, self._asked_rows, self._raw)

    def draw(self, logits: Tensor) -> Tensor:
        """Draw a token for each row: i64[num_rows]. Destroys the logits."""
        if not self._drawn:
            return self.kernels.greedy(logits)[0]
        positions = [len(self.requests[row].token_ids) for row in self._drawn]
        all_drawn = len(positions) == len(self.requests)
        tokens = self.kernels.greedy(logits)[0] if not all_drawn else None
        drawn = self.kernels.sample_tokens(
            logits if tokens is None else self.kernels.take_rows(logits, self._rows),
            self._seeds,
            torch.tensor(positions, device=self.device),
            **self._filters,
        )
        return drawn if tokens is None else tokens.index_copy_(0, self._rows, drawn)

    def reports(self, raw: Tensor | None, tokens: list[int]) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities that requests asked for; NaN for rows that are not finite."""
        if raw is None:
            return {}
        num_tops = [self.requests[row].inputs.params.logprobs or 0 for row in self._asked]
        logprobs = token_logprobs(self.kernels, raw, [tokens[row] for row in self._asked], num_tops)
        return dict(zip(self._asked, logprobs, strict=True))


def _greedy(tokens: list[int | None], highest: list[float]) -> StepOutput:
    """Return the most likely token of each row, and an error for rows that are not finite."""
    if math.isfinite(sum(highest)):
        return StepOutput(tokens)
    errors = {row: NOT_FINITE for row, value in enumerate(highest) if not math.isfinite(value)}
    return StepOutput([None if row in errors else token for row, token in enumerate(tokens)], errors=errors)


def _not_finite(of_model: list[float], edited: list[float], known: dict[int, str]) -> dict[int, str]:
    """Return errors for the rows without a finite maximum, in the model's own logits or after all edits."""
    errors = {row: NOT_FINITE for row, value in enumerate(of_model) if not math.isfinite(value)}
    for row, value in enumerate(edited):
        if not math.isfinite(value) and row not in errors and row not in known:
            errors[row] = NONE_LEFT if value == -math.inf else OVERFLOW
    return errors


def _filters(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> dict[str, Any]:
    """Return a column for each parameter of `sample_tokens`, None where no request filters by it."""

    def column(values: Sequence[float], unused: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
        if all(value == unused for value in values):
            return None
        return torch.tensor(values, dtype=dtype, device=device)

    # Some allowed temperatures are too large for float32.
    most = torch.finfo(torch.float32).max
    temperatures = [min(p.temperature, most) for p in params]
    top_ks = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    return {
        "temperature": torch.tensor(temperatures, dtype=torch.float32, device=device),
        "min_p": column([p.min_p for p in params], 0.0),
        "top_n_sigma": column([min(p.top_n_sigma, most) for p in params], 0.0),
        "typical_p": column([p.typical_p for p in params], 1.0),
        "top_k": column(top_ks, vocab_size, torch.int32),
        "top_p": column([p.top_p for p in params], 1.0),
    }


def _signed(seed: int) -> int:
    """Return the int64 with the same 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63
