"""Contents in prompts: a hit never comes from another image, whatever numbers and digests collide."""

from __future__ import annotations

import hashlib
import random
from array import array

import pytest

from paged.blocks import content_chain
from paged.blocks.content_chain import Content, ContentChain, numbers_of
from paged.blocks.manager import BlockManager
from paged.blocks.prefix_chain import sha256_block
from paged.scheduler.uncut import num_needed, num_uncut

BLOCK = 4
PLACEHOLDER = 99


def sha_of(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def test_each_place_has_a_negative_number_of_its_own():
    numbers = numbers_of(Content(3, 1003, sha_of("x")))
    assert len({*numbers}) == len(numbers) == 1000
    assert max(numbers) < 0
    assert numbers[:5] == numbers_of(Content(40, 45, sha_of("x")))
    assert not {*numbers} & {*numbers_of(Content(3, 1003, sha_of("y")))}


Turn = tuple[list[int], list[Content]]


def prompt_of(
    generator: random.Random, images: int
) -> tuple[list[int], list[Content], list[tuple[object, ...]]]:
    """Return a prompt of words and images, and what each of its tokens is."""
    token_ids: list[int] = []
    contents: list[Content] = []
    meaning: list[tuple[object, ...]] = []
    for _ in range(generator.randint(1, 5)):
        if generator.random() < 0.5:
            words = [generator.randint(0, 1) for _ in range(generator.randint(1, 5))]
            token_ids += words
            meaning += [("word", word) for word in words]
            continue
        image = generator.randrange(images)
        size = 3 + image % 3
        start = len(token_ids)
        contents.append(Content(start, start + size, sha_of(image)))
        token_ids += [PLACEHOLDER] * size
        meaning += [(image, place) for place in range(size)]
    return [*token_ids, 5], contents, [*meaning, ("word", 5)]


def check_conversations(seed: int, count: int, hash_block=None) -> int:
    """Look random prompts up, and register each. Return how many tokens were found."""
    generator = random.Random(seed)
    options = {} if hash_block is None else {"hash_block": hash_block}
    manager = BlockManager(64, BLOCK, **options)
    known: dict[int, list[tuple[object, ...]]] = {}  # what a block's tokens and all before them are
    num_found = 0
    for _ in range(count):
        token_ids, contents, meaning = prompt_of(generator, 5)
        seq = manager.open(token_ids, contents=contents)
        hits = manager.match(seq, token_ids)
        for i, block in enumerate(hits[0]):
            assert known[block] == meaning[: (i + 1) * BLOCK], "a hit comes from other contents"
        num_found += len(hits[0]) * BLOCK
        start = manager.start(seq, hits)
        assert manager.grow(seq, start, len(token_ids), [])
        manager.register(seq, token_ids, len(token_ids))
        for i, block in enumerate(seq.tables[0][: len(token_ids) // BLOCK]):
            known[block] = meaning[: (i + 1) * BLOCK]
        manager.release(seq)
        manager.check()
    return num_found


def test_a_hit_never_comes_from_other_contents():
    assert check_conversations(0, 2000) > 2000


@pytest.mark.parametrize("kind", ["numbers", "digests", "both", "of contents"])
def test_collisions_that_are_made_do_not_hit(kind, monkeypatch):
    """Of the 31 bits of every place, or of all digests: either is not enough, nor are both.

    In the last case, prompts collide that differ in their images alone.
    """
    if kind != "digests":
        monkeypatch.setattr(
            content_chain, "numbers_of", lambda content: numbers_of(content._replace(sha256=b""))
        )
    hash_block = None if kind == "numbers" else (lambda _, tokens: bytes([len(tokens) % 2]) * 32)
    if kind != "of contents":
        check_conversations(1, 400, hash_block)
        return
    check_conversations(1, 1000, lambda previous, data: sha256_block(previous, data[: 4 * BLOCK]))


def test_forks_and_later_tokens_go_on():
    contents = [Content(2, 7, sha_of("x"))]
    token_ids = [1, 2, *[PLACEHOLDER] * 5, *range(9)]
    chain = ContentChain(contents, BLOCK)
    chain.extend(token_ids, 1, BLOCK)
    copy = chain.fork()
    for each in (chain, copy):
        each.extend(token_ids, 4, BLOCK)
    whole = ContentChain(contents, BLOCK)
    whole.extend(token_ids, 4, BLOCK)
    assert chain.digests == copy.digests == whole.digests
    assert chain.data == whole.data
    assert [whole.content(i) for i in range(3)] == [sha_of("x")] * 2 + [b""]
    numbers = array("i", bytes(whole.data)).tolist()
    assert [number < 0 for number in numbers] == [False, False, *[True] * 5, *[False] * 9]
    assert numbers[7:] == token_ids[7:]


def test_a_digest_is_of_contents_too(monkeypatch):
    """Where the numbers of all images are equal."""
    monkeypatch.setattr(content_chain, "numbers_of", lambda content: numbers_of(content._replace(sha256=b"")))
    digests = []
    for name in ("x", "y"):
        chain = ContentChain([Content(1, 3, sha_of(name))], BLOCK)
        chain.extend([1, PLACEHOLDER, PLACEHOLDER, 2, 3, 4, 5, 6], 2, BLOCK)
        digests += chain.digests
    assert len({*digests}) == 4


@pytest.mark.parametrize(
    ("start", "num_new", "budget", "expected"),
    [
        (0, 4, 10, 4),
        (0, 6, 10, 5),  # before the run
        (5, 3, 10, 10),  # as much as the run needs
        (5, 3, 9, 0),
        (7, 2, 10, 8),  # what follows cached blocks
        (0, 15, 20, 15),
        (15, 3, 20, 3),
        (15, 8, 20, 5),
    ],
)
def test_runs_are_not_cut(start, num_new, budget, expected):
    uncut = [(5, 15), (20, 26)]
    assert num_uncut(uncut, start, num_new, budget) == expected
    if not expected:
        assert num_needed(uncut, start) == 10
