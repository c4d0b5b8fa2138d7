"""Text from tokens, a few at a time: never half a character, and in the end what decoding at once gives."""

from __future__ import annotations

import itertools
import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from paged.errors import CheckpointError, RequestError
from paged.tokenizer import Detokenizer, Tokenizer
from paged.weights import DEMO

TEXTS = [
    "naïve 日本語 🙂",
    "語",
    "def add(a, b):\n    return a + b\n",
    "👩‍👩‍👧 é é ​ ½",
    " leading and trailing ",
]


@pytest.fixture(scope="module")
def byte_level():
    """GPT-2's kind: tokens are bytes, spaces belong to words."""
    return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """Llama 2's kind: a leading space vanishes at the start of a text, unknown characters become bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abdefnrt(),:+\n"]
    backend = Backend(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    directory = tmp_path_factory.mktemp("byte-fallback")
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(directory)


def shown(tokenizer: Tokenizer, prompt: list[int], pieces: list[list[int]]) -> list[str]:
    """The text after each piece, and after the end."""
    detokenizer = Detokenizer(tokenizer, prompt)
    texts = []
    for piece in pieces:
        detokenizer.append(piece)
        texts.append(detokenizer.text)
    detokenizer.finish()
    return [*texts, detokenizer.text]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("before", ["def b", "日本語"], ids=ascii)
@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_token_by_token_equals_decoding_at_once(kind, chunk, before, text, request):
    tokenizer = request.getfixturevalue(kind)
    prompt = tokenizer.encode(before)
    # Without the space that a Llama puts before a text: characters made of bytes then follow one another.
    ids = tokenizer.encode(text)[kind == "byte_fallback" :]
    whole = tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]
    texts = shown(tokenizer, prompt, [ids[i : i + chunk] for i in range(0, len(ids), chunk)])
    assert texts[-1] == whole
    assert text.strip() in whole
    assert "\ufffd" not in "".join(texts)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == texts[-2], "whole characters were held back until the end"


def test_half_a_character_waits_and_is_a_replacement_only_at_the_end(byte_level):
    prompt, ids = byte_level.encode("x"), byte_level.encode("🙂")
    assert len(ids) > 2
    texts = shown(byte_level, prompt, [[i] for i in ids[:-1]])
    assert texts[:-1] == [""] * (len(ids) - 1)
    assert set(texts[-1]) == {"\ufffd"}


def test_special_tokens_are_not_text(byte_level):
    ids = byte_level.encode("a b")
    special = byte_level.hf.eos_token_id
    assert shown(byte_level, [special], [[special], ids, [special]])[-1] == "a b"


def test_space_after_a_special_token_stays(byte_fallback):
    special = byte_fallback.hf.eos_token_id
    first, second = byte_fallback.encode("a"), byte_fallback.encode("b")
    pieces = [[token] for token in (*first, special, special, *second)]
    assert shown(byte_fallback, byte_fallback.encode("d"), pieces)[-1] == " a b"


def test_long_text_costs_linear_time(byte_level, monkeypatch):
    ids = byte_level.encode("def add(a, b):\n") * 50
    decoded = 0
    decode = byte_level.decode

    def counting(token_ids):
        nonlocal decoded
        decoded += len(token_ids)
        return decode(token_ids)

    monkeypatch.setattr(byte_level, "decode", counting)
    assert shown(byte_level, ids, [[i] for i in ids])[-1] == "def add(a, b):\n" * 50
    assert decoded < 20 * len(ids)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"], ids=ascii)
def test_lone_surrogate_is_refused(byte_level, text):
    with pytest.raises(RequestError, match="not valid Unicode"):
        byte_level.encode(text)


def test_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"(?s)tokenizer cannot be loaded.*skip_tokenizer_init") as info:
        Tokenizer(tmp_path)
    assert str(tmp_path) in str(info.value)
