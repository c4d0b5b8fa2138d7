"""Parameters that change logits: the biases of tokens, and logits processors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ..base.errors import RequestError
from ..base.kinds import Number
from ..base.validation import check_int, plain

BIAS = Number(-100.0, 100.0)  # of a token's logit


def num_arguments(processor: Callable[..., Any]) -> int:
    """Return the number of arguments of a logits processor: 2 or 3, or 0 if it accepts neither."""
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):  # compiled code may have no signature
        return 2
    for number in (2, 3):
        with suppress(TypeError):
            signature.bind(*[None] * number)
            return number
    return 0


def biases_of(pairs: Iterable[tuple[Any, Any]]) -> dict[int, float]:
    """Validate (token id, bias) pairs; ids may be text. Raises RequestError naming a wrong value."""
    biases = dict[int, float]()
    for key, bias in pairs:
        number = int(key) if _is_number(key) else plain(key)
        token_id = check_int(RequestError, "a token id in logit_bias", number, 0)
        if token_id in biases:
            raise RequestError(
                f"logit_bias has token {token_id} twice, with {biases[token_id]} and {bias}",
                param="logit_bias",
            )
        number = plain(bias)
        BIAS.check(f"logit_bias[{token_id}]", number)
        biases[token_id] = float(number)
    return biases


def _is_number(key: Any) -> bool:
    """Return whether a key is the text of an int that fits, as keys in JSON are."""
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
