"""Detects parameters that together leave no token to generate, before a request is added."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.errors import RequestError
from ..options.sampling_params import SamplingParams
from .request import Grammar
from .token_rules import TokenRules


def check_possible(
    params: SamplingParams,
    stop_ids: frozenset[int],
    rules: TokenRules,
    grammar: Grammar | None,
    *,
    vocab_size: int,
    num_tokens: int = 0,
) -> None:
    """Check that some token may come next, and that min_tokens can be reached.

    stop_ids: the token ids that end the output (EOS and stop_token_ids). They are banned before min_tokens.
    grammar: the state of the grammar after the output so far.
    num_tokens: the number of output tokens that a fork takes over from its parent.

    Raises RequestError naming the parameters that contradict each other.
    """
    if params.structured_outputs is not None and params.structured_outputs.choice is not None:
        _check_choice(params.structured_outputs.choice, params, stop_ids)
    place = "next" if num_tokens else "first"
    banned = {word[0]: "bad_words" for word in rules.bad_words if len(word) == 1}
    if num_tokens < params.min_tokens:
        banned |= dict.fromkeys(stop_ids, f"min_tokens {params.min_tokens}")
    allowed = params.allowed_token_ids
    if allowed is not None and all(token in banned for token in allowed):
        raise _impossible("allowed_token_ids", {banned[token] for token in allowed}, place)
    if len(banned) == vocab_size:
        param = "bad_words" if "bad_words" in banned.values() else "min_tokens"
        raise _impossible("the vocabulary", {*banned.values()}, place, param=param)
    if grammar is None or (stop_ids and not (banned or allowed)):
        return
    possible = grammar.possible(stop_ids)
    if not possible:
        raise RequestError(
            "structured_outputs allows nothing but the end of the output, and neither EOS nor stop_token_ids "
            f"would let that be the {place} token",
            param="structured_outputs",
        )
    left = possible if allowed is None else possible.intersection(allowed)
    if all(token in banned for token in left):
        names = {banned[token] for token in left} | (set() if allowed is None else {"allowed_token_ids"})
        raise _impossible("structured_outputs", names, place)


def _check_choice(choice: Sequence[str], params: SamplingParams, stop_ids: frozenset[int]) -> None:
    """Check that a choice can be long enough (at most a token per byte) and can end."""
    longest = max(len(text.encode()) for text in choice)
    if params.min_tokens > longest:
        raise RequestError(
            f"min_tokens {params.min_tokens} is more than any choice of structured_outputs can have; the "
            f"longest has {longest} bytes",
            param="min_tokens",
        )
    may_be_cut = bool(params.stop) or (params.max_tokens is not None and params.max_tokens <= longest)
    allowed = params.allowed_token_ids
    if allowed is not None and stop_ids and stop_ids.isdisjoint(allowed) and not may_be_cut:
        raise RequestError(
            "allowed_token_ids has neither EOS nor any of stop_token_ids, and so no choice of "
            "structured_outputs could end; allow one of these, or give ignore_eos=True",
            param="allowed_token_ids",
        )


def _impossible(name: str, others: set[str], place: str, *, param: str | None = None) -> RequestError:
    return RequestError(
        f"{name} leaves no token that {' and '.join(sorted(others))} would let be the {place}",
        param=param or name,
    )
