"""Text of a special or added token in a grammar is that text, spelled with ordinary tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from paged import StructuredOutputsParams
from paged.sampling.structured_outputs import Grammars
from paged.text.tokenizer import Tokenizer
from tests.support.chat_checkpoints import chat_checkpoint

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = "abcdefghijklmnopqrstuvwxyz<>|/_ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Special, added and both inside of others; with blanks, with letters of a vocabulary's own words, not ASCII.
ADDED = ["<think>", "</think>", "<｜end▁of｜>", "<|im_end|>", "<|im_end|>x>", "<tool call>"]
SPECIAL = ["[INST]", "end", "<|sep|>"]


def byte_level(directory: Path) -> None:
    chat_checkpoint(directory)


def _save(directory: Path, backend: Backend) -> None:
    backend.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    backend.add_special_tokens(SPECIAL)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)


def sentencepiece(directory: Path) -> None:
    """Write a tokenizer like Llama 2's, which puts a blank before a text, and spells "the" as t, he."""
    pieces = ["<unk>", "<s>", "</s>", *BYTES, "▁", *LETTERS, "he", "th", "▁th", "en", "end"]
    backend = Backend(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("h", "e"), ("t", "h"), ("▁", "th"), ("e", "n"), ("en", "d")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = _sentencepiece_decoder()
    _save(directory, backend)


def unigram(directory: Path) -> None:
    """Write a tokenizer whose model has the special tokens as pieces, and which lowers letters."""
    pieces = ["<unk>", "<s>", "</s>", *BYTES, "▁", *LETTERS, "▁the", "think"]
    scores = [(piece, -float(i)) for i, piece in enumerate(pieces)]
    backend = Backend(models.Unigram(scores, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    backend.decoder = _sentencepiece_decoder()
    _save(directory, backend)


def _sentencepiece_decoder() -> Any:
    strip = decoders.Strip(" ", 1, 0)
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])


@pytest.fixture(scope="module", params=[byte_level, sentencepiece, unigram], ids=lambda f: f.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    write: Callable[[Path], None] = request.param
    directory = tmp_path_factory.mktemp("tokenizer")
    write(directory)
    return Tokenizer(directory)


def forced(grammars: Grammars, **language: Any) -> list[int]:
    """Return an output, of which the last tokens that are possible are chosen."""
    state = grammars.start(StructuredOutputsParams(**language))
    tokens = list[int]()
    while possible := state.possible(frozenset()):
        tokens.append(max(possible))
        assert state.matcher.consume_token(tokens[-1])
        assert len(tokens) < 400
    assert state.matcher.is_accepting()
    return tokens


def test_texts_of_all_added_tokens(tokenizer):
    eos = tokenizer.hf.eos_token_id
    grammars = Grammars(tokenizer, len(tokenizer.hf) + 3, frozenset([eos]))
    added = {str(token) for token in tokenizer.hf.added_tokens_decoder.values()}
    assert len(added) > 7
    for text in [*added, " ".join(added), "É Ａ"]:
        whole = f"the {text} end{text}"
        tag = {"format": {"type": "json_schema", "json_schema": {"enum": [whole]}}}
        escaped = "".join(f"\\x{{{ord(c):x}}}" for c in whole)
        cases: list[tuple[dict[str, Any], str]] = [
            ({"choice": [whole]}, whole),
            ({"regex": escaped}, whole),
            ({"json": {"const": whole}}, json.dumps(whole, ensure_ascii=False)),
            ({"json": {"type": "string", "pattern": f"^{escaped}$"}}, json.dumps(whole, ensure_ascii=False)),
            ({"structural_tag": tag}, json.dumps(whole, ensure_ascii=False)),
            ({"grammar": f"start: {json.dumps(whole, ensure_ascii=False)}"}, whole),
        ]
        for language, expected in cases:
            tokens = forced(grammars, **language)
            shown = tokenizer.hf.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert shown.removeprefix(" ") == expected, (language, tokens)


def test_other_text_keeps_the_tokenizers_own_spelling(tokenizer):
    grammars = Grammars(tokenizer, len(tokenizer.hf), frozenset([tokenizer.hf.eos_token_id]))
    text = "so the thing then that the other"
    own = tokenizer.hf.encode(text, add_special_tokens=False)
    found = forced(grammars, choice=[text])
    # At its beginning the tokenizer may have a blank of its own; at its end a longer token was possible.
    assert found[-8:-4] == own[-8:-4]
