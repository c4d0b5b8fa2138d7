"""ContentChain: the digests of a sequence in which tokens stand for contents, such as images.

All images have the same placeholder. In the chain, each place of an image has a negative number in its stead,
made of the sha256 of the image, so that blocks compare contents as they compare tokens. A number has 31 bits;
the digest of a block also takes the whole sha256 of each content in it, which the pool compares too.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from .prefix_chain import HashBlock, PrefixChain, sha256_block, short_digest

_LOWEST = -(2**31)


class Content(NamedTuple):
    """Content, such as an image, for which the tokens [start, end) of a sequence are placeholders.

    It is identified by its sha256.
    """

    start: int
    end: int
    sha256: bytes


def numbers_of(content: Content) -> array[int]:
    """Return a negative number for each placeholder of a content. They replace the token ids in digests."""
    count = content.end - content.start
    numbers = array("i", hashlib.shake_256(content.sha256).digest(4 * count))
    return array("i", [number if number < 0 else number + _LOWEST for number in numbers])


class ContentChain(PrefixChain):
    """A `PrefixChain` of tokens and contents.

    contents: the contents in order, without overlaps.
    """

    __slots__ = ("_block_size", "contents")

    def __init__(
        self,
        contents: Sequence[Content],
        block_size: int,
        namespace: bytes = b"",
        hash_block: HashBlock = sha256_block,
    ) -> None:
        super().__init__(namespace, hash_block)
        self.contents = tuple(contents)
        self._block_size = block_size

    def extend(self, token_ids: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Add the missing digests of the first num_blocks blocks."""
        done = len(self.digests)
        if num_blocks <= done:
            return
        start = done * block_size
        end = num_blocks * block_size
        numbers = array("i", token_ids[start:end])
        for content in self.contents:
            first = max(start, content.start)
            last = min(end, content.end)
            if first < last:
                own = numbers_of(content)
                numbers[first - start : last - start] = own[first - content.start : last - content.start]
        added = numbers.tobytes()
        self.data += added
        size = 4 * block_size
        digest = self._last
        for index in range(done, num_blocks):
            at = (index - done) * size
            digest = self._hash(digest, added[at : at + size] + self.content(index))
            self.digests.append(short_digest(digest))
        self._last = digest

    def content(self, index: int) -> bytes:
        """Return the sha256 of each content in a block."""
        start = index * self._block_size
        end = start + self._block_size
        return b"".join(each.sha256 for each in self.contents if each.start < end and start < each.end)

    def fork(self) -> ContentChain:
        """Return an independent copy."""
        copy = ContentChain.__new__(ContentChain)
        copy.namespace = self.namespace
        copy._hash = self._hash
        copy._last = self._last
        copy.digests = self.digests.copy()
        copy.data = self.data.copy()
        copy.contents = self.contents
        copy._block_size = self._block_size
        return copy
