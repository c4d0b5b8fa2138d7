"""Frames survive the way to the other process, however the stream is cut, and are documented."""

from __future__ import annotations

import random
import re
import typing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paged import RequestError, SamplingParams, StructuredOutputsParams
from paged.requests.request import Logprob
from paged.server import frames

PAGE = Path(__file__).parents[2] / "docs" / "serving-processes.md"
EVERY = SamplingParams(
    n=2,
    best_of=3,
    temperature=0.5,
    top_k=7,
    seed=-3,
    logit_bias={5: -1.5},
    allowed_token_ids=[5, 6],
    bad_words=["a", "\ud7ff"],
    max_tokens=None,
    stop=["x", "é"],
    stop_token_ids=[3],
    logprobs=-1,
    timeout_s=2.5,
    cache_salt="s",
    structured_outputs=StructuredOutputsParams(json={"type": "object"}),
)


def test_frames_survive_any_cut():
    """Also one that is longer than a read, and several in one read."""
    sent: list[Any] = [
        frames.Generate(
            i, f"r{i}", [*range(7 * i)], b"\xff", frames.params_to_wire(replace(EVERY, seed=i)), "", []
        )
        for i in range(50)
    ]
    stream, rng = b"".join(map(frames.encode, sent)), random.Random(0)
    reader, found = frames.FrameReader(frames.decode_order), []
    while stream:
        size = rng.choice([1, 2, 3, 5, 100, 1000])
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert [each.token_ids for each in found] == [each.token_ids for each in sent]
    assert [frames.params_from_wire(f.params) for f in found] == [replace(EVERY, seed=i) for i in range(50)]


def test_every_parameter_crosses_or_is_refused():
    """The fields that differ from their defaults are sent, and no others."""
    large = frames.params_to_wire(SamplingParams(temperature=10**30))  # more than 64 bits
    assert frames.params_from_wire(msgspec.convert(large, type(large))).temperature == 1e30
    assert len(frames.encode(frames.Generate(0, "r", [1], b"", large, "", []))) > 0
    assert msgspec.structs.asdict(
        frames.params_to_wire(SamplingParams())
    ).keys() | frames.NOT_SENT.keys() == {field.name for field in fields(SamplingParams)}
    size = len(frames.encode(frames.Fork(1, "a", "b", frames.params_to_wire(SamplingParams()))))
    assert size < 20
    with pytest.raises(RequestError, match="logits_processors cannot be given here"):
        frames.params_to_wire(SamplingParams(logits_processors=[print]))


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"\x91\xa5Abort", b"\x92\xa5Abort\xa1x", b"\x93\xa5Abort\x01\xc1"],
    ids=str,
)
def test_what_is_no_frame_is_refused(content):
    with pytest.raises(msgspec.MsgspecError):
        frames.decode_order(content)


@pytest.mark.parametrize("kind", [*typing.get_args(frames.Order), *typing.get_args(frames.Report)])
def test_every_frame_is_documented(kind):
    row = re.search(rf"^\| `{kind.__name__}` \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    assert row is not None
    assert re.findall(r"`(\w+)`", row[1]) == [*kind.__struct_fields__]


@pytest.mark.parametrize("num_top", [1, 210, 5000])
def test_a_long_prompt_is_cut_into_frames_of_few_candidates(num_top):
    """A place with more candidates than a frame has is a frame by itself."""
    place = {i: Logprob(-1.0, i, "a") for i in range(num_top)}
    given = [None, *[place] * 40]
    sent = [*frames.prompt_places(7, given)]
    most = max(frames.CANDIDATES_OF_FRAME, num_top)
    assert all(sum(len(p[0]) for p in frame.places if p) <= most for frame in sent)
    assert len(sent) <= 2 + 40 * num_top // (most - num_top + 1)
    received = frames.Places()
    for frame in frames.FrameReader(frames.decode_report).feed(b"".join(map(frames.encode, sent))):
        assert frame.key == 7
        received.add(frame.places)
    assert received == given
