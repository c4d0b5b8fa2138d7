"""The seeds of requests and samples that have none of their own."""

from __future__ import annotations

import hashlib


def derived_seed(engine_seed: int, request_id: str) -> int:
    """Return the seed of a request, of 64 bits, from the engine's seed and the request's id."""
    return _digest(f"{engine_seed}/{request_id}")


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of a sample: the request's for the first one, so that it equals the output of n=1."""
    return _digest(f"{seed}#{index}") if index else seed


def _digest(text: str) -> int:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little")
