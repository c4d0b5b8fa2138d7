"""Tokenizers that are read without transformers are those of transformers; the others are left to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from paged.architectures.config import DEMO
from paged.text.tokenizer import Tokenizer
from paged.text.tokenizer_files import DirectTokenizer

TEXTS = [
    "",
    "def f(x):\n    return ' naïve 日本語'",
    " <s>a b</s> ab<more> c",
    "<|endoftext|> \x00 don't , .",
]


def write(directory, backend=None, *, config=None, **settings):
    """Write a checkpoint's tokenizer, by default the demo's."""
    shutil.copy(DEMO / "config.json", directory)
    if backend is None:
        shutil.copy(DEMO / "tokenizer.json", directory)
        settings = json.loads((DEMO / "tokenizer_config.json").read_text()) | settings
    else:
        backend.save(str(directory / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"} | settings
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if config is not None:
        changed = json.loads((directory / "config.json").read_text()) | config
        (directory / "config.json").write_text(json.dumps(changed))
    return directory


def llama(*, begins=True):
    """Make one like Llama's, which puts <s> before a text, and truncates."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdef", "▁a"]
    backend = Backend(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.add_special_tokens(["<unk>", AddedToken("<s>", lstrip=True, normalized=True), "</s>"])
    backend.add_tokens([AddedToken("<more>", special=False, rstrip=True)])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single="<s>:0 $A:0", pair="<s>:0 $A:0 $B:1", special_tokens=[("<s>", 1)]
        )
    backend.enable_truncation(5)
    return backend


def padding():
    backend = llama()
    backend.enable_padding(length=9, pad_token="<unk>")
    return backend


def words():
    backend = Backend(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 2, "b": 3, ",": 4}, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def token(content, **changed):
    same = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": content, **same, "special": True, **changed}


DEMO_END = {"added_tokens_decoder": {"0": token("<|endoftext|>")}}
DIRECT = {
    "demo": {},
    "listed": DEMO_END,
    "template": {"chat_template": "{{ messages }}"},
    "cleaned-up": {"clean_up_tokenization_spaces": True},
    "llama": {"backend": llama()},
    "no-post-processor": {"backend": llama(begins=False), "eos_token": "</s>", "unk_token": "<unk>"},
    "words": {"backend": words(), "config": {"model_type": "qwen3"}},
}


@pytest.mark.parametrize("kind", DIRECT)
def test_it_is_equal_to_that_of_transformers(kind, tmp_path):
    directory = write(tmp_path, **DIRECT[kind])
    ours, theirs = DirectTokenizer.of(directory), AutoTokenizer.from_pretrained(directory)
    assert ours is not None
    assert len(ours) == len(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert {i: str(t) for i, t in ours.added_tokens_decoder.items()} == {
        i: str(t) for i, t in theirs.added_tokens_decoder.items()
    }
    for text in TEXTS:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours(text, add_special_tokens=special)["input_ids"] == ids
            both = [
                tokenizer.decode(ids, skip_special_tokens=special, clean_up_tokenization_spaces=False)
                for tokenizer in (ours, theirs)
            ]
            assert both[0] == both[1]


def test_a_template_in_its_own_file_comes_first(tmp_path):
    directory = write(tmp_path, chat_template="in the settings")
    (directory / "chat_template.jinja").write_text("in a file")
    assert DirectTokenizer.of(directory).chat_template == "in a file"
    assert AutoTokenizer.from_pretrained(directory).chat_template == "in a file"


LEFT = {
    "class": {"tokenizer_class": "LlamaTokenizer"},
    "no-class": {"tokenizer_class": None},
    "type-of-model": {"config": {"model_type": "mistral"}},
    "setting": {"add_prefix_space": True},
    "code": {"auto_map": {"AutoTokenizer": ["x.X", None]}},
    "new-special-token": {"pad_token": "<new>"},
    "token-with-settings": {"eos_token": {"__type": "AddedToken", **token("<|endoftext|>")}},
    "other-token": {"added_tokens_decoder": {"0": token("<|endoftext|>", lstrip=True)}},
    "token-not-listed": {"added_tokens_decoder": {}},
    "padding": {"backend": padding()},
    "templates": {"chat_template": [{"name": "default", "template": "x"}]},
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_transformers_would_change_is_left_to_it(kind, tmp_path):
    assert DirectTokenizer.of(write(tmp_path, **LEFT[kind])) is None


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "chat_template.json"])
def test_other_files_are_left_to_transformers(name, tmp_path):
    (write(tmp_path) / name).write_text("{}")
    assert DirectTokenizer.of(tmp_path) is None


def test_transformers_is_imported_for_its_tokenizers_alone(tmp_path):
    """And no model class, which take seconds and much memory to import. Users still get its tokenizer."""
    (write(tmp_path) / "special_tokens_map.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(DEMO / "model.safetensors")
    code = """
        import sys
        from importlib.util import find_spec
        from paged import LLMEngine, SamplingParams
        engine = LLMEngine("demo", device="cpu", num_blocks=16)
        engine.generate("def f(x):", SamplingParams(max_tokens=2), use_tqdm=False)
        assert "transformers" not in sys.modules
        other = LLMEngine(sys.argv[1], device="cpu", num_blocks=16)
        other.generate("def f(x):", SamplingParams(max_tokens=2), use_tqdm=False)
        assert "transformers" in sys.modules
        assert "transformers.modeling_utils" not in sys.modules  # which every model class imports
        assert find_spec("transformers.modeling_utils")
        assert engine.get_tokenizer()("def")["input_ids"] == engine.tokenizer.encode("def")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], check=True)


def test_a_tokenizer_of_transformers_is_loaded_once(tmp_path):
    tokenizer = Tokenizer(write(tmp_path, tokenizer_class="LlamaTokenizer"))
    assert tokenizer.hf is tokenizer.hf
    assert len(tokenizer) == len(tokenizer.hf)
