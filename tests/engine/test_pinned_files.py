"""Pinned prefixes in files: within their bytes, pinned again by the next engine of the same model alone."""

from __future__ import annotations

import logging
import os

import pytest

from paged import LLMEngine, SamplingParams
from paged.base.errors import UsageError
from paged.engine.pinned_files import PinnedPrefixes

GREEDY = SamplingParams(max_tokens=4, temperature=0)
SIZE = 16


def new_engine(**options: object) -> LLMEngine:
    return LLMEngine("demo", device="cpu", num_blocks=64, num_threads=1, **{"block_size": SIZE, **options})


def pinned(engine: LLMEngine, *prefixes: list[int]) -> PinnedPrefixes:
    """Compute and pin prefixes of tokens."""
    found = PinnedPrefixes(engine)
    for token_ids in prefixes:
        engine.generate({"prompt_token_ids": token_ids}, GREEDY, use_tqdm=False)
        assert found.pin(token_ids, b"") == len(token_ids) // SIZE * SIZE
    return found


def files(folder: object) -> list[str]:
    return sorted(each.name for each in folder.glob("*/*.prefix"))  # type: ignore[attr-defined]


def test_what_is_kept_is_pinned_again_and_gives_the_same_bits(tmp_path):
    prefix = [*range(10, 10 + 5 * SIZE), 7]
    prompt = {"prompt_token_ids": [*prefix, 3, 4]}
    engine = new_engine()
    wanted = engine.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0]
    assert pinned(engine, prefix, [9] * 40).keep(tmp_path / "a", 2**30) == 2
    engine.shutdown()
    another = new_engine()
    found = PinnedPrefixes(another)
    assert found.load(tmp_path / "a") == 2
    assert another.stats().num_pinned_blocks == 5 + 2
    (output,) = another.generate(prompt, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 5 * SIZE
    assert output.outputs[0].token_ids == wanted.token_ids
    assert found.unpin(prefix, b"") == 5 * SIZE
    with pytest.raises(UsageError, match="not pinned"):
        found.unpin(prefix, b"")
    # What is no longer pinned has no file any more.
    assert found.keep(tmp_path / "a", 2**30) == len(files(tmp_path)) == 1
    found.forget()
    assert found.keep(tmp_path / "a", 2**30) == len(files(tmp_path)) == 0
    another.shutdown()


def test_files_keep_within_the_bytes_and_what_is_lost_is_logged(tmp_path, caplog):
    engine = new_engine()
    long, short = [*range(10, 10 + 8 * SIZE)], [*range(200, 200 + 2 * SIZE)]
    found = pinned(engine, long, short)
    assert found.keep(tmp_path / "a", 2**30) == 2
    sizes = sorted(path.stat().st_size for path in tmp_path.glob("a/*.prefix"))
    for path in tmp_path.glob("a/*.prefix"):
        os.utime(path, (1, 1))
    slack = 2**17
    with caplog.at_level(logging.WARNING):
        # The newest first: the short one; the long one has no room.
        assert found.keep(tmp_path / "b", sizes[0] + slack) == 1
    text = caplog.text
    assert "it makes room for another one" in text  # the files of the other model were older
    assert f"a pinned prefix of {8 * SIZE:,} tokens is lost: it takes" in text
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.prefix")) <= sizes[0] + slack
    assert len(files(tmp_path)) == 1
    engine.shutdown()


def test_damaged_files_and_those_of_another_engine_are_left_out(tmp_path, caplog):
    engine = new_engine()
    assert pinned(engine, [*range(10, 10 + 2 * SIZE)]).keep(tmp_path / "a", 2**30) == 1
    engine.shutdown()
    (tmp_path / "a" / "x.prefix").write_bytes(b"no file of prefixes")
    another = new_engine(block_size=8)
    assert PinnedPrefixes(another).load(tmp_path / "a") == 0
    assert caplog.text.count("is lost: ") == 2
    assert another.stats().num_pinned_blocks == 0
    another.shutdown()
