"""Tokenizers that multiply text are refused by arithmetic, before anything of them runs."""

from __future__ import annotations

import math
import random
from itertools import pairwise, product
from typing import Any

import pytest
import tokenizers
from tokenizers.normalizers import Normalizer

from paged.base.errors import CheckpointError
from paged.checkpoints.tokenizer_patterns import CL100K
from paged.text.tokenizer import Tokenizer
from paged.text.tokenizer_bounds import why_unbounded
from paged.text.tokenizer_growth import growth, why_growing
from paged.text.tokenizer_published import is_published
from paged.text.worker import Worker
from tests.text.test_hostile_tokenizers import BPE, FLAGS, description, replace, split, template, write

METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def in_turn(key: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", key: [*steps]}


def nested(key: str, steps: list[Any]) -> dict[str, Any]:
    """Return steps in sequences that hold each other."""
    whole = in_turn(key, *steps[:1])
    for step in steps[1:]:
        whole = in_turn(key, whole, step)
    return whole


def special(name: str, num_ids: int) -> dict[str, Any]:
    return {"id": name, "ids": [0] * num_ids, "tokens": ["<unk>"] * num_ids}


def growing(chance: random.Random) -> dict[str, Any]:
    """Return a part of a tokenizer that makes text more than a ten thousand times as long, or repeats it."""
    letters = "abcdefghijkl"
    each = chance.randint(3, 60)
    num_steps = math.ceil(math.log(10_000) / math.log(each))
    form = chance.choice(["String", "Regex"])
    chain = [replace(a, b * each, form) for a, b in pairwise(letters)][:num_steps]
    same = [replace("a", "a" * each, form)] * num_steps
    prefix = chance.choice(["▁", "a", "日本"])
    grown = [{"type": "Prepend", "prepend": prefix * 2000}, replace(prefix[0], "b" * 9, form)]
    wide = [replace("a", "a" * 9000, form)]
    steps = chance.choice([chain, same, wide])
    made = chance.choice(["decoder", "normalizer", "nested", "prepend", "pre-tokenizer", "template", "token"])
    return {
        "decoder": {"decoder": in_turn("decoders", {"type": "Fuse"}, *steps, {"type": "ByteFallback"})},
        "normalizer": {"normalizer": in_turn("normalizers", {"type": "NFC"}, *steps, {"type": "Lowercase"})},
        "nested": chance.choice(
            [{"normalizer": nested("normalizers", steps)}, {"decoder": nested("decoders", steps)}]
        ),
        "prepend": {"normalizer": in_turn("normalizers", *grown)},
        "pre-tokenizer": {"pre_tokenizer": nested("pretokenizers", [split("a"), *[BYTE_LEVEL] * 14])},
        "template": {"post_processor": template("<x>", "A", **{"<x>": special("<x>", 2000)})}
        if chance.random() < 0.5
        else {"post_processor": in_turn("processors", *[template("A", "A")] * 8)},
        "token": chance.choice(
            [
                {"model": {**BPE, "vocab": {**BPE["vocab"], "x" * 70_000: 4}}},
                {"added_tokens": [{"id": 9, "content": "y" * 70_000, **FLAGS, "special": False}]},
                {
                    "model": {**BPE, "vocab": {**BPE["vocab"], "x" * 5000: 4}},
                    "decoder": replace("x", "x" * 50),
                },
            ]
        ),
    }[made]


@pytest.mark.parametrize("seed", range(4))
def test_what_grows_is_refused_before_anything_runs(seed, tmp_path, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("something of it was run")

    monkeypatch.setattr(Worker, "__init__", fail)
    monkeypatch.setattr(tokenizers, "Tokenizer", fail)
    monkeypatch.setattr("paged.text.tokenizer_files.Tokenizer", fail)
    monkeypatch.setattr("paged.text.tokenizer_worker.load", fail)
    chance = random.Random(seed)
    for _ in range(40):
        parts = growing(chance)
        write(tmp_path, settings=chance.choice([None, {"tokenizer_class": "BertTokenizer"}]), **parts)
        with pytest.raises(CheckpointError) as caught:
            Tokenizer(tmp_path)
        message = str(caught.value)
        assert message.startswith(f"{tmp_path / 'tokenizer.json'}: it"), message
        assert "supported" in message
        assert len(message) <= 500


def test_a_long_token_of_the_settings_is_refused(tmp_path):
    write(tmp_path, settings={"additional_special_tokens": ["z" * 70_000]})
    with pytest.raises(CheckpointError, match="additional_special_tokens must be"):
        Tokenizer(tmp_path)


def test_many_steps_are_refused_at_once():
    for steps in ([replace("a", "b")] * 10_000, [in_turn("decoders")] * 10_000):
        assert "steps" in (why_growing(description(decoder=in_turn("decoders", *steps))) or "")


# Parts of published tokenizers.
USUAL = {
    "llama": {
        "normalizer": in_turn("normalizers", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
        "decoder": in_turn(
            "decoders", replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip"}
        ),
    },
    "albert": {
        "normalizer": in_turn(
            "normalizers",
            *(replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"}),
            *({"type": "Lowercase"}, {"type": "Precompiled"}, replace(" {2,}", "▁", "Regex")),
        ),
        "pre_tokenizer": in_turn("pretokenizers", {"type": "WhitespaceSplit"}, METASPACE),
        "decoder": METASPACE,
    },
    "bert": {"normalizer": {"type": "BertNormalizer"}, "decoder": {"type": "WordPiece", "prefix": "##"}},
    "gpt2": {"pre_tokenizer": BYTE_LEVEL, "decoder": BYTE_LEVEL, "post_processor": BYTE_LEVEL},
    "many independent": {
        "normalizer": in_turn("normalizers", *(replace(each, "... ") for each in "½¼¾…–—‘’“”«»‹›•"))
    },
    "pair": {"post_processor": template("<x>", "A", "<x>", **{"<x>": special("<x>", 1)})},
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_tokenizers_do_not_grow(name):
    assert why_growing(description(**USUAL[name])) is None


def test_the_bound_holds():
    """Of random chains, by the library itself, for texts of the letters that they multiply."""
    chance = random.Random(0)
    num_grown = 0
    for _ in range(1500):
        steps = []
        for _ in range(chance.randint(1, 5)):
            pattern = "".join(chance.choices("abcé", k=chance.randint(1, 3)))
            content = "".join(chance.choices("abcé", k=chance.randint(0, 5)))
            steps.append(replace(pattern, content, chance.choice(["String", "Regex"])))
        texts = ["".join(chance.choices("abcé", k=chance.randint(1, 9))) for _ in range(4)]
        bound = growth("decoder", [in_turn("decoders", *steps)], 10**9)
        replaces = [tokenizers.decoders.Replace(*arguments(step)) for step in steps]
        decoder = tokenizers.decoders.Sequence(replaces)
        for text in texts:
            made = decoder.decode([text])
            assert len(made.encode()) <= bound * len(text.encode()) + 1e-6, (steps, text)
            num_grown += len(made) > len(text)
        if chance.random() < 0.5:
            steps.append({"type": "Prepend", "prepend": "ab"})
            chance.shuffle(steps)
        bound = growth("normalizer", [in_turn("normalizers", *steps)], 10**9)
        normalizer: Normalizer = tokenizers.normalizers.Sequence([made_of(step) for step in steps])
        for text in texts:
            made = normalizer.normalize_str(text)
            assert len(made.encode()) <= bound * len(text.encode()) + 1e-6, (steps, text)
    assert num_grown > 1000


def arguments(step: dict[str, Any]) -> tuple[Any, str]:
    ((form, pattern),) = step["pattern"].items()
    return tokenizers.Regex(pattern) if form == "Regex" else pattern, step["content"]


def made_of(step: dict[str, Any]) -> Normalizer:
    if step["type"] == "Prepend":
        return tokenizers.normalizers.Prepend(step["prepend"])
    return tokenizers.normalizers.Replace(*arguments(step))


def test_files_without_sense_are_left_to_other_checks():
    for parts in ({"decoder": {"type": 5}}, {"decoder": []}, {"model": {"vocab": 3}}, {"normalizer": "x"}):
        assert why_growing(description(**parts)) is None
    assert why_growing({}) is None


# Parts of published tokenizers, and parts that differ from them in one place.
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
TO_SPACE = [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
AT_SPACE = {**split(""), "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
BOS = template("<s>", "A", **{"<s>": special("<s>", 1)})
DRAWN_PARTS: dict[str, list[Any]] = {
    "normalizer": [
        None,
        {"type": "NFC"},
        in_turn("normalizers", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
        replace(" ", "▁"),
        {"type": "Strip"},
        replace(" ", ""),
    ],
    "pre_tokenizer": [
        None,
        BYTE_LEVEL,
        AT_SPACE,
        in_turn("pretokenizers", split(CL100K), BYTE_LEVEL),
        in_turn("pretokenizers", {"type": "Digits", "individual_digits": True}, BYTE_LEVEL),
        in_turn("pretokenizers", split("(a+)+$"), BYTE_LEVEL),
        in_turn("pretokenizers", *[BYTE_LEVEL] * 9),
        in_turn("pretokenizers", *[split(CL100K)] * 16, BYTE_LEVEL),
    ],
    "decoder": [
        BYTE_LEVEL,
        in_turn("decoders", *TO_SPACE, STRIP),
        in_turn("decoders", *TO_SPACE),
        in_turn("decoders", *TO_SPACE, {**STRIP, "stop": 1}),
        replace("▁", "x" * 99),
        None,
    ],
    "post_processor": [
        None,
        BYTE_LEVEL,
        BOS,
        in_turn("processors", BYTE_LEVEL, BOS),
        template("<s>", "A"),
        template("A", "A"),
        template("<s>", "A", **{"<s>": special("<s>", 200)}),
        in_turn("processors", BOS, in_turn("processors", BOS)),
    ],
    "model": [
        BPE,
        {**BPE, "unk_token": None},
        {**BPE, "unk_token": "[UNK]"},
        {**BPE, "continuing_subword_prefix": "##"},
        {**BPE, "vocab": {"<unk>": 0, "a" * 40_000: 1}},
        {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None},
    ],
    "added_tokens": [
        [],
        [{"id": 0, "content": "<unk>", **FLAGS, "special": True}],
        [{"id": 0, "content": "", **FLAGS, "special": True}],
        [{"id": 0, "content": "x" * 2**21, **FLAGS, "special": True}],
    ],
}


def test_what_is_published_is_bounded():
    """Of each combination: what is accepted without an analysis is accepted by the analysis too."""
    accepted = []
    for chosen in product(*DRAWN_PARTS.values()):
        found = description(**dict(zip(DRAWN_PARTS, chosen, strict=True)))
        if is_published(found):
            accepted.append(found)
            assert why_unbounded(found) is None
            assert why_growing(found) is None
    chains = {repr((found["normalizer"], found["pre_tokenizer"], found["decoder"])) for found in accepted}
    # Three chains of bytes, each without and with NFC, and two of SentencePiece.
    assert (len(chains), len(accepted)) == (8, 8 * 4 * 2 * 2)
    assert not is_published({})
    assert not is_published({**accepted[0], "decoder": 5})
