"""PrefixChain: digests of the full blocks of a sequence, by which the prefix cache finds them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

# (digest of the blocks before it, its token ids as i32) -> digest of a block
HashBlock = Callable[[bytes, bytes], bytes]


def sha256_block(parent: bytes, tokens: bytes) -> bytes:
    """Return the sha256 of everything that determines the KV of a block."""
    return hashlib.sha256(parent + tokens).digest()


def first_digest(namespace: bytes, hash_block: HashBlock = sha256_block) -> bytes:
    """Return the digest that the first block of a namespace has as its predecessor."""
    return hash_block(b"", namespace) if namespace else b""


def short_digest(digest: bytes) -> int:
    """Return the first 56 bits of a digest. As an int of CPython, they take 32 bytes."""
    return int.from_bytes(digest[:7], "little")


class PrefixChain:
    """Digests of the full blocks of a sequence; each covers the tokens up to the end of its block.

    namespace: what the KV depends on besides the tokens, such as the cache salt; see `Request.namespace`.
        Sequences share blocks only within a namespace.

    A digest is kept as its first 56 bits. It only finds a block: `BlockPool.match` then compares all tokens,
    so a collision can lose a hit but never produces a wrong one.
    """

    __slots__ = ("_hash", "_last", "data", "digests", "namespace")

    def __init__(self, namespace: bytes = b"", hash_block: HashBlock = sha256_block) -> None:
        self.namespace = namespace
        self.digests: list[int] = []
        self.data = bytearray()  # token ids of the blocks that have digests, as i32
        self._hash = hash_block
        self._last = first_digest(namespace, hash_block)

    def extend(self, token_ids: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Add the missing digests of the first num_blocks blocks."""
        done = len(self.digests)
        if num_blocks <= done:
            return
        added = array("i", token_ids[done * block_size : num_blocks * block_size]).tobytes()
        self.data += added
        digest = self._last
        digests = []
        hash_block = self._hash
        size = 4 * block_size
        for start in range(0, len(added), size):
            digest = hash_block(digest, added[start : start + size])
            digests.append(digest)
        self._last = digest
        self.digests += map(short_digest, digests)

    def content(self, index: int) -> bytes:  # noqa: ARG002
        """Return the content of a block as bytes: none, unless the chain is a `ContentChain`."""
        return b""

    def fork(self) -> PrefixChain:
        """Return an independent copy."""
        copy = PrefixChain.__new__(PrefixChain)
        copy.namespace = self.namespace
        copy._hash = self._hash
        copy._last = self._last
        copy.digests = self.digests.copy()
        copy.data = self.data.copy()
        return copy
