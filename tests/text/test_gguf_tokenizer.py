"""Tokenizers of GGUF files: the ids of those that they were converted from, on 2,000 texts."""

from __future__ import annotations

import heapq
import json
import random
import re
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer

from paged import CheckpointError, UnsupportedModelError
from paged.checkpoints.gguf.metadata import Metadata
from paged.checkpoints.gguf.tokenizer import make_tokenizer, read_ends
from paged.text import tokenizer as text_tokenizer

DOCS = Path(__file__).parents[2] / "docs"
# As the tokenizer.json of Llama 3 and of Qwen 2 have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN3_5 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"^\s\p{L}", r"^\s\p{L}\p{M}")
NUM_TEXTS = 2000
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6


@cache
def corpus() -> str:
    text = "\n".join(file.read_text() for file in sorted(DOCS.glob("*.md")))
    return re.sub(r"</?s>|<\|im_end\|>|<end_of_turn>|<think>", "", text)[:150_000]  # no special tokens


@cache
def texts() -> list[str]:
    """Return pieces of real text, and random characters of many kinds."""
    choose = random.Random(0)
    kinds = [
        "abcdefgh klmnopqrstuvwxyz",
        "ABC xyz'sdtm",
        "01234 5678",
        "\n\t \r  ",
        "äöéñ e\u0301",
        "日本語かな한국",
    ]
    kinds += ["🙂👩‍👩‍👧🏽", "\u0301\u200d\ufeff", "{}[]()/\\|&%$#@!?.,;:-_", "русский हिन्दी", "½²Ⅷ٣"]
    found = []
    for i in range(NUM_TEXTS):
        if i % 2:
            start = choose.randrange(len(corpus()) - 300)
            found.append(corpus()[start : start + choose.randint(1, 300)])
        else:
            found.append("".join(choose.choice(choose.choice(kinds)) for _ in range(choose.randint(0, 40))))
    return found


def metadata_of(**keys: Any) -> Metadata:
    values = {"general.architecture": "llama"}
    values |= {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    return Metadata(Path("a.gguf"), values)


def trained(steps: Sequence[Any], normalizer: Any = None) -> Tokenizer:
    """Train a tokenizer of bytes, with the tokens <s> and <|im_end|>, and <think>, which is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([corpus()], trainer)
    tokenizer.add_special_tokens(["<s>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def split_by(expression: str) -> list[Any]:
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


BYTE_LEVEL = {
    "llama-bpe": (split_by(LLAMA3), None),
    "lfm2": (split_by(LLAMA3), None),
    "qwen2": (split_by(QWEN2), normalizers.NFC()),
    "qwen35": (split_by(QWEN3_5), normalizers.NFC()),
    "gpt-2": ([pre_tokenizers.ByteLevel(add_prefix_space=False)], None),
    "mpt": ([pre_tokenizers.ByteLevel(add_prefix_space=False)], normalizers.NFC()),
    "smollm": (
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        None,
    ),
}


def converted(tokenizer: Tokenizer, pre: str, **more: Any) -> Metadata:
    """Return the metadata that llama.cpp's script writes for a tokenizer of bytes."""
    own = json.loads(tokenizer.to_str())
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = [1] * len(tokens)
    for each in own["added_tokens"]:
        types[each["id"]] = CONTROL if each["special"] else USER_DEFINED
    tokens += ["[PAD7]", "[PAD8]"]  # of a vocabulary that is padded
    ids = {"bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("<s>")}
    merges = [" ".join(pair) for pair in own["model"]["merges"]]
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": array("i", [*types, 5, 5])}
    return metadata_of(**keys, merges=merges, **{**ids, **more})


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level(pre):
    original = trained(*BYTE_LEVEL[pre])
    whole, _ = make_tokenizer(converted(original, pre, add_bos_token=False))
    own = Tokenizer.from_str(json.dumps(whole))
    special = [f"{text[:20]}<s>{text[20:]} <think>\n<|im_end|>" for text in texts()[:100]]
    for text in texts() + special:
        assert own.encode(text).ids == original.encode(text).ids, text
        ids = original.encode(text).ids
        assert own.decode(ids) == original.decode(ids)


def pieces_of(spaces: Sequence[str]) -> tuple[list[str], list[int], list[float]]:
    """Return tokens, types and scores like those of SentencePiece. spaces: user-defined tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)|\n"), "isolated")
    tokenizer.train_from_iterator([corpus()], trainers.BpeTrainer(vocab_size=1200, show_progress=False))
    learned = sorted(tokenizer.get_vocab(), key=lambda token: tokenizer.token_to_id(token))
    learned = [token for token in learned if token not in spaces]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "<end_of_turn>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *spaces,
        *learned,
    ]
    types = [
        UNKNOWN,
        CONTROL,
        CONTROL,
        CONTROL,
        *[BYTE] * 256,
        *[USER_DEFINED] * len(spaces),
        *[1] * len(learned),
    ]
    scores = [0.0] * (len(tokens) - len(learned)) + [-float(i) for i in range(len(learned))]
    return tokens, types, scores


def sentencepiece_ids(
    text: str, tokens: list[str], types: list[int], scores: list[float], prefix: bool
) -> list[int]:
    """Tokenize as SentencePiece does: merge the pair that makes the best token, of equal ones the first."""
    own = {token: i for i, token in enumerate(tokens) if types[i] == USER_DEFINED}
    ids = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    text = "▁" * bool(prefix and text) + text.replace(" ", "▁")
    symbols: list[str | None] = []
    whole = set[int]()
    place = 0
    while place < len(text):
        longest = max((t for t in own if text.startswith(t.replace(" ", "▁"), place)), key=len, default="")
        if longest:
            whole.add(len(symbols))
        symbols.append(text[place : place + max(1, len(longest))])
        place += max(1, len(longest))
    while True:
        places = [i for i, symbol in enumerate(symbols) if symbol is not None]
        pairs = []
        for i, j in pairwise(places):
            joined = f"{symbols[i]}{symbols[j]}"
            if i not in whole and j not in whole and joined in ids:
                pairs.append((-scores[ids[joined]], i, j))
        if not pairs:
            break
        _, i, j = heapq.nsmallest(1, pairs)[0]
        symbols[i], symbols[j] = f"{symbols[i]}{symbols[j]}", None
    found = []
    for symbol in symbols:
        if symbol is None:
            continue
        named = ids.get(symbol, own.get(symbol.replace("▁", " ")))
        found += (
            [named] if named is not None else [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
        )
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix):
    """With and without a space before the text; with tokens of several spaces, as Gemma has them."""
    tokens, types, scores = pieces_of([] if prefix else ["  ", "    ", "\n\n"])
    keys = {"tokens": tokens, "token_type": array("i", types), "scores": array("f", scores)}
    metadata = metadata_of(model="llama", add_bos_token=False, add_space_prefix=prefix, **keys)
    whole, _ = make_tokenizer(metadata)
    own = Tokenizer.from_str(json.dumps(whole))
    controls = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    for text in (text[:100] for text in texts()):
        if text and not any(token in text for token in controls):  # SentencePiece reads them as text
            expected = sentencepiece_ids(text, tokens, types, scores, prefix)
            assert own.encode(text).ids == expected, text
            assert own.decode(expected) == text


def written(directory: Path, metadata: Metadata, **config: Any) -> text_tokenizer.Tokenizer:
    whole, settings = make_tokenizer(metadata)
    config = {"gguf_architecture": "llama", **config}
    for name, content in {"tokenizer": whole, "tokenizer_config": settings, "config": config}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return text_tokenizer.Tokenizer(directory)


def test_rules_and_templates(tmp_path):
    """BOS, EOS and chat templates, in the engine's own tokenizer, which takes transformers' place."""
    original = trained(*BYTE_LEVEL["llama-bpe"])
    bos = original.token_to_id("<s>")
    metadata = converted(original, "llama-bpe", add_eos_token=True)
    values = {**metadata.values, "tokenizer.chat_template": "{{ messages }}"}
    own = written(tmp_path, Metadata(metadata.path, values))
    assert own.encode("a b") == [
        bos,
        *original.encode("a b").ids,
        bos,
    ]  # Llama 3's add BOS if nothing is said
    assert own.encode("a b", add_special_tokens=False) == original.encode("a b").ids
    assert own.chat_templates == {"default": "{{ messages }}"}
    assert own.special_tokens == {"bos_token": "<s>", "eos_token": "<s>"}
    assert own.decode(own.encode("a<think><|im_end|>")) == "a<think>"
    assert read_ends(metadata) == [bos, original.token_to_id("<|im_end|>")]  # which EOS does not name
    values |= {"tokenizer.chat_templates": ["tools"], "tokenizer.chat_template.tools": "{{ tools }}"}
    assert written(tmp_path, Metadata(metadata.path, values)).chat_templates["tools"] == "{{ tools }}"


def test_gemma4():
    """Spaces are letters of words, merges are listed, and what has no token is bytes."""
    letters = ["a", "b", "c", "▁", "\n"]
    made = ["ab", "▁▁", "▁a", "\n\n", "▁ab", "abc"]
    merges = [("a", "b"), ("▁", "▁"), ("▁", "ab"), ("▁", "a"), ("\n", "\n"), ("ab", "c")]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *letters, *made, *(f"<0x{i:02X}>" for i in range(256))]
    vocab = {token: i for i, token in enumerate(tokens)}
    theirs = GemmaTokenizer(vocab=vocab, merges=merges)
    keys = {
        "tokens": tokens,
        "token_type": array("i", [3] * 4 + [1] * 11 + [6] * 256),
        "merges": [" ".join(merge) for merge in merges],
        "model": "gemma4",
    } | {f"{name}_token_id": i for i, name in enumerate(("padding", "eos", "bos", "unknown"))}
    whole, _ = make_tokenizer(metadata_of(**keys))
    own = Tokenizer.from_str(json.dumps(whole))
    for text in ("ab  abc\n\n\n", " a b", "é<eos>cab", "", "\n ab"):
        ids = own.encode(text).ids
        assert ids == [2, *theirs(text, add_special_tokens=False).input_ids]
        assert own.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert own.encode("é").ids == [2, vocab["<0xC3>"], vocab["<0xA9>"]]


def test_ends_of_gpt_oss():
    """Its <|end|> ends a part of an answer, unlike Phi-3's."""
    for tokens, expected in (
        (["a", "<|end|>", "<|endoftext|>"], [1, 2]),
        (["a", "<|end|>", "<|call|>", "<|return|>"], [2, 3]),
    ):
        types = array("i", [1] + [3] * (len(tokens) - 1))
        values = {"model": "gpt2", "tokens": tokens, "token_type": types, "eos_token_id": len(tokens) - 1}
        assert read_ends(metadata_of(**values)) == expected


def test_phi3_takes_blanks_after_its_tokens(tmp_path):
    tokens, types, scores = pieces_of([])
    keys = {"tokens": tokens, "token_type": array("i", types), "scores": array("f", scores), "model": "llama"}
    for architecture, expected in {"llama": 1, "phi3": 0}.items():
        values = metadata_of(**keys).values | {"general.architecture": architecture}
        own = written(tmp_path, Metadata(Path("a.gguf"), values))
        ids = own.encode("<end_of_turn>\n</s>", add_special_tokens=False)
        assert ids.count(tokens.index("<0x0A>") if "\n" not in tokens else tokens.index("\n")) == expected


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "rwkv"}, "tokenizer.ggml.model 'rwkv' is not supported"),
    "pre": ({"pre": "falcon"}, "tokenizer.ggml.pre 'falcon' is not supported; supported are gpt-2"),
    "no-pre": ({"pre": None}, "tokenizer.ggml.pre, which says how texts are split, is missing"),
    "types": ({"token_type": array("i", [1])}, "token_type has 1 values for"),
    "kind": ({"tokens": array("i", [1])}, "tokens must be an array of strings"),
    "twice": ({"tokens": ["a", "a"], "token_type": array("i", [1, 1])}, "token 'a' is there twice"),
    "merge": ({"merges": ["ab"]}, "merges has 'ab', which makes no token of two"),
    "id": ({"eos_token_id": 10**6}, "eos_token_id is 1000000, but there are"),
    "bos": ({"bos_token_id": None}, "add_bos_token is true, but tokenizer.ggml.bos_token_id is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_missing_or_wrong_is_refused(name):
    changes, expected = WRONG[name]
    sound = converted(trained(*BYTE_LEVEL["llama-bpe"]), "llama-bpe").values
    sound = {key.removeprefix("tokenizer.ggml."): value for key, value in sound.items() if "ggml" in key}
    with pytest.raises((CheckpointError, UnsupportedModelError)) as info:
        make_tokenizer(metadata_of(**{**sound, **changes}))
    assert expected in str(info.value)
    assert str(info.value).startswith("a.gguf: ")
