"""SamplingParams: how one request chooses its tokens and when it stops, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from .errors import RequestError, reject_unknown
from .validation import check_int, check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request, with vLLM's names and meanings.

    n: how many samples to take of the prompt, which is computed once for all of them.
    temperature: 0 is greedy; logits are divided by it before anything else.
    min_p: keep tokens at least this likely relative to the most likely one; 0 keeps all.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens that holds this probability; 1 keeps all.
    seed: the same seed gives the same tokens whatever the request is batched with; None derives one
        from the engine's seed and the request id.
    max_tokens: most tokens to generate; None goes on until EOS, a stop or the end of the context.
    min_tokens: no EOS, stop_token_ids or stop string ends the output before this many tokens.
    stop: strings that end the output, which stops before them.
    stop_token_ids: token ids that end the output like EOS does.
    ignore_eos: treat EOS as any other token.

    Raises RequestError naming the value and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __new__(cls, **kwargs: Any) -> Self:
        # Before __init__ sees them: its own message names neither the field meant nor the way out.
        reject_unknown("SamplingParams", kwargs, {field.name for field in fields(cls)})
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_number(RequestError, "temperature", self.temperature, 0.0)
        check_number(RequestError, "top_p", self.top_p, 0.0, 1.0, above=True)
        check_number(RequestError, "min_p", self.min_p, 0.0, 1.0)
        check_int(RequestError, "n", self.n, 1)
        check_int(RequestError, "top_k", self.top_k, -1)
        check_int(RequestError, "min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_int(RequestError, "max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.seed is not None:
            check_int(RequestError, "seed", self.seed, -(2**63), 2**63 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        self._freeze_stops()

    def _freeze_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"stop must be a non-empty string or a list of them, got {self.stop!r}")
        if not isinstance(self.stop_token_ids, Sequence) or isinstance(self.stop_token_ids, str):
            raise RequestError(f"stop_token_ids must be a list of ints, got {self.stop_token_ids!r}")
        for token_id in self.stop_token_ids:
            check_int(RequestError, "stop_token_ids", token_id, 0)
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
