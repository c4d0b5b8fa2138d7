"""PrefixChain: what a sequence's full blocks are called in the prefix cache."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

# Digest of a block from the digest of the blocks before it and its own token ids, as bytes of i32.
HashBlock = Callable[[bytes, bytes], bytes]


def sha256_block(parent: bytes, tokens: bytes) -> bytes:
    """sha256 of all that the KV of a block follows from."""
    return hashlib.sha256(parent + tokens).digest()


def first_digest(namespace: bytes, hash_block: HashBlock = sha256_block) -> bytes:
    """What stands for the digest of the block before the first one."""
    return hash_block(b"", namespace) if namespace else b""


def key_of(digest: bytes) -> int:
    """The key of a block by its digest: 56 bits, which take 32 bytes as an int of CPython."""
    return int.from_bytes(digest[:7], "little")


class PrefixChain:
    """Keys of a sequence's full blocks, each from the block's tokens and the key of the one before.

    namespace: whatever else changes the KV: the cache salt, a rope length. Sequences of different
        namespaces share nothing.

    A key is the first 56 bits of a sha256. It only finds a block: `BlockPool.match` then compares all
    tokens, so that a collision costs a hit and never gives one.
    """

    __slots__ = ("_digest", "_hash", "data", "keys", "namespace")

    def __init__(self, namespace: bytes = b"", hash_block: HashBlock = sha256_block) -> None:
        self.namespace = namespace
        self.keys: list[int] = []
        self.data = bytearray()  # the tokens of the blocks that have keys, as i32
        self._hash = hash_block
        self._digest = first_digest(namespace, hash_block)

    def extend(self, token_ids: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Make sure that the first num_blocks blocks have keys."""
        done = len(self.keys)
        if num_blocks <= done:
            return
        added = array("i", token_ids[done * block_size : num_blocks * block_size]).tobytes()
        self.data += added
        digest, digests, hash_block, size = self._digest, [], self._hash, 4 * block_size
        for start in range(0, len(added), size):
            digest = hash_block(digest, added[start : start + size])
            digests.append(digest)
        self._digest = digest
        self.keys += map(key_of, digests)

    def fork(self) -> PrefixChain:
        """A copy that goes on by itself."""
        copy = PrefixChain.__new__(PrefixChain)
        copy.namespace, copy._hash, copy._digest = self.namespace, self._hash, self._digest
        copy.keys, copy.data = self.keys.copy(), self.data.copy()
        return copy
