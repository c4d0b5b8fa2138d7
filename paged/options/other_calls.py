"""The parameters of calls that do not sample: embeddings and beam search."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from ..base.arguments import strict
from ..base.errors import RequestError
from ..base.kinds import Boolean, Integer, Number, check_fields, of_kind
from ..base.validation import shown


@partial(strict, vllm="PoolingParams", assignable=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Options of an embedding, with vLLM's names; `LLMEngine.embed` has more.

    dimensions: keep this many numbers from the start of the embedding and normalize them again (matryoshka
        embeddings).
    use_activation: scale each embedding to a Euclidean norm of 1; None follows the checkpoint.

    Raises RequestError naming the value and what is allowed.
    """

    dimensions: int | None = of_kind(Integer(1), None)
    use_activation: bool | None = of_kind(Boolean(), None)

    def __post_init__(self) -> None:
        check_fields(self)


@partial(strict, vllm="BeamSearchParams", assignable=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search. The names are vLLM's; where vLLM and transformers differ, the meaning is
    that of transformers.

    beam_width: how many continuations are followed and returned.
    max_tokens: maximum number of tokens to generate.
    ignore_eos: treat EOS as any other token.
    temperature: must be 0: continuations are ranked by the model's own log-probabilities.
    length_penalty: a score is the log-probability divided by (generated tokens, EOS included) to this power.
        Above 0 it favours longer continuations, below 0 shorter ones.
    early_stopping: when beam_width continuations have ended with EOS, stop at once (True), or when no live
        beam could score better at its present length (False) or at any length up to max_tokens ("never").

    Raises RequestError naming the value and what is allowed.
    """

    beam_width: int = field(metadata={"kind": Integer(1)})
    max_tokens: int = field(metadata={"kind": Integer(1)})
    ignore_eos: bool = of_kind(Boolean(), False)
    temperature: float = of_kind(Number(0.0), 0.0)
    # Within these bounds no possible length overflows a float.
    length_penalty: float = of_kind(Number(-50.0, 50.0), 1.0)
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.temperature:
            raise RequestError(
                f"temperature must be 0 in beam search, got {self.temperature!r}; sample with n for variety",
                param="temperature",
            )
        if self.early_stopping != "never" and not isinstance(self.early_stopping, bool):
            raise RequestError(
                f"early_stopping must be True, False or 'never', got {shown(self.early_stopping)}",
                param="early_stopping",
            )
