"""Tokens that end an answer in llama.cpp end one here, whatever type a GGUF file gives them."""

from __future__ import annotations

import json
import logging
from array import array
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from paged.checkpoints.gguf.directory import gguf_directory
from paged.checkpoints.gguf.metadata import Metadata
from paged.checkpoints.gguf.tokenizer import make_tokenizer, read_ends
from tests.support.gguf_models import write_model

# The lists of llama-vocab.cpp: of ends, and of tokens for the middle of a text, of which some end, too.
ENDS = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
]
OTHERS = [
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|prefix|>",
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|suffix|>",
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
    "<|middle|>",
]
ENDING = [
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
]
TYPES = {"normal": 1, "unknown": 2, "control": 3, "user-defined": 4, "unused": 5, "byte": 6}
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def vocabulary(kind: str, names: list[str], token_type: int) -> dict[str, Any]:
    """Return a file's tokenizer of letters and bytes, with tokens of these names and this type."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "▁", "ab"]
    tokens = [*(BYTES if kind == "llama" else []), *letters, "<bos>", "<stop>"]
    types = [*([6] * 256 if kind == "llama" else []), *[1] * len(letters), 3, 3]
    found: dict[str, Any] = {"model": kind, "tokens": [*tokens, *names]}
    found["token_type"] = array("i", [*types, *[token_type] * len(names)])
    found |= {"bos_token_id": tokens.index("<bos>"), "eos_token_id": tokens.index("<stop>")}
    if kind == "llama":
        scores = array("f", [0.0] * len(found["tokens"]))
        return found | {"scores": scores, "unknown_token_id": 0, "add_space_prefix": False}
    return found | {"pre": "gpt-2", "merges": ["a b"], "add_bos_token": False}


def metadata_of(kind: str, names: list[str], token_type: int = 1, **more: Any) -> Metadata:
    values = {"general.architecture": "llama"}
    given = vocabulary(kind, names, token_type) | more
    return Metadata(Path("a.gguf"), values | {f"tokenizer.ggml.{key}": each for key, each in given.items()})


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("token_type", TYPES)
def test_every_known_name_is_a_control_token(token_type, kind):
    """It is one token in a prompt, it is no text of an answer, and it ends one if it is an end."""
    for name in (*ENDS, *OTHERS, *ENDING):
        metadata = metadata_of(kind, [name], TYPES[token_type])
        own = len(metadata.values["tokenizer.ggml.tokens"]) - 1
        assert read_ends(metadata) == [own - 1] + [own] * (name not in OTHERS), name
        whole, _ = make_tokenizer(metadata)
        tokenizer = Tokenizer.from_str(json.dumps(whole))
        ids = tokenizer.encode(f"ab{name}c", add_special_tokens=False).ids
        assert ids.count(own) == 1, name
        assert tokenizer.decode(ids) == "abc", name


def test_other_names_keep_their_types():
    for name in ("<think>", "<|im_start|>", "<tool_call>"):
        metadata = metadata_of("gpt2", [name], TYPES["normal"])
        assert len(read_ends(metadata)) == 1
        assert name not in [each["content"] for each in make_tokenizer(metadata)[0]["added_tokens"]]


def test_names_that_are_no_ends_in_a_format():
    """<|end|> of gpt-oss and Solar Open ends a part of an answer; in Gemma 4 </s> is text of HTML."""
    for names, expected in (
        (["<|end|>", "<|call|>", "<|return|>"], [1, 2]),
        (["<|end|>", "<|calls|>", "<|flush|>"], [1, 2]),
        (["<|end|>", "<|call|>"], [0, 1]),
        (["</s>", "<|tool_response>"], [1]),
        (["</s>", "<eos>"], [0, 1]),
    ):
        metadata = metadata_of("gpt2", names)
        first = len(metadata.values["tokenizer.ggml.tokens"]) - len(names)
        assert read_ends(metadata) == [first - 1, *(first + i for i in expected)], names
        added = [each["content"] for each in make_tokenizer(metadata)[0]["added_tokens"]]
        assert ("</s>" in added) == ("</s>" in names and "<|tool_response>" not in names)


def test_tokens_for_the_middle_of_a_text_that_the_metadata_name():
    """Then no name counts; a number that no token has is as none."""
    names = ["<|fim_pad|>", "<|file_sep|>", "pad"]
    metadata = metadata_of("gpt2", names)
    first = len(metadata.values["tokenizer.ggml.tokens"]) - 3
    named = metadata_of("gpt2", names, fim_pad_token_id=first + 2, fim_sep_token_id=10**6)
    assert read_ends(metadata) == [first - 1, first, first + 1]
    assert read_ends(named) == [first - 1, first + 1, first + 2]
    added = [each["content"] for each in make_tokenizer(named)[0]["added_tokens"]]
    assert "<|fim_pad|>" not in added


def test_the_log_names_tokens_of_another_type_at_each_start(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = vocabulary("gpt2", ["<|im_end|>", "<|eot_id|>"], 1)
    given["token_type"][-1] = TYPES["control"]
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(given["tokens"]), num_key_value_heads=2, **size))
    given["token_type"] = [*given["token_type"]]
    more = {f"tokenizer.ggml.{key}": each for key, each in given.items()}
    write_model(tmp_path / "a.gguf", model, more=more)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            directory = gguf_directory(tmp_path / "a.gguf")
        assert "a.gguf: '<|im_end|>' should be of type CONTROL" in caplog.text
        assert "eot_id" not in caplog.text
    ends = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [len(given["tokens"]) - 3 + i for i in range(3)]
