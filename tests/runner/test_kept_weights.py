"""Starts from kept weights compute what others do, and no trouble with the cache changes more."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from paged import ConfigError, LLMEngine, SamplingParams
from paged.checkpoints.library.named import named_digests
from paged.checkpoints.weights_cache import file, folder
from paged.device import host_memory
from paged.model.weights import kept, loading
from paged.options.config import EngineConfig
from paged.runner import kept_weights, load
from tests import golden
from tests.support.checkpoints import SHAPE, checkpoint, new_engine, ragged_prompts, random_model
from tests.support.gguf_models import write_model
from tests.support.images import seeing
from tests.support.quantised import Sizes, gptq, nvfp4, quantised_checkpoint
from tests.support.ranks import ranked_engines
from tests.support.served import eventually

pytest.importorskip("numba")

PROMPTS = ragged_prompts([3, 17])
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
# Tables and heads are large enough for 12 bits.
WIDE = {
    **SHAPE,
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 128,
}


@pytest.fixture(autouse=True)
def _keeps_any_size(monkeypatch):
    monkeypatch.setattr(load, "LEAST_KEPT_BYTES", 0)
    folder.warn_once.cache_clear()


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "kept" / "weights"


def started(model: str | Path, cache: Path | bool, **options: Any) -> LLMEngine:
    """Start an engine, and wait until its weights are kept."""
    engine = new_engine(model, weights_cache=cache if cache is False else str(cache), **options)
    for each in models_of(engine):
        if each.kept_weights is not None:
            each.kept_weights.wait()
    return engine


def models_of(engine: LLMEngine) -> list[Any]:
    draft = engine.runner.draft_model
    return [engine.runner.model, *([draft.model] if draft is not None else [])]


def contents(engine: LLMEngine) -> tuple[list[Any], list[Tensor]]:
    """Return all parameters and forms of an engine's models, as values and tensors."""
    tensors: list[Tensor] = []

    def put(tensor: Tensor) -> str:
        tensors.append(tensor.contiguous().reshape(-1).view(torch.uint8))
        return f"{tensor.dtype}{list(tensor.shape)}"

    values = []
    for model in models_of(engine):
        for module in model.loadables():
            values += [(name, put(x.data)) for name, x in module.named_parameters(recurse=False)]
            if hasattr(module, "form"):
                values.append(kept._described(module.form, put))
    return values, tensors


def assert_same(own: LLMEngine, other: LLMEngine) -> None:
    (values, tensors), (other_values, other_tensors) = contents(own), contents(other)
    assert values == other_values
    assert all(map(torch.equal, tensors, other_tensors))
    assert tokens_of(own) == tokens_of(other)


def tokens_of(engine: LLMEngine) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in engine.generate(PROMPTS, GREEDY, use_tqdm=False)]


def assert_starts_from(cache: Path, engine: LLMEngine, model: str | Path, **options: Any) -> None:
    """Check that another start has the same weights, and reads none of the checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "read_rows", lambda *_: pytest.fail("a weight is read"))
        again = started(model, cache, **options)
    assert_same(again, engine)


def no_files(cache: Path) -> bool:
    return not list(cache.glob("*.unfinished"))


def in_gguf(directory: Path) -> Path:
    model = random_model(LlamaConfig(**{**SHAPE, "hidden_size": 256, "intermediate_size": 512}))
    kinds = {"attn_v.weight": "Q6_K", "token_embd.weight": "Q8_0", "ffn_down.weight": "Q4_K"}
    return write_model(directory / "m.gguf", model, lambda own: kinds.get(own.split(".", 2)[-1], "Q4_0"))


def wide(directory: Path) -> Path:
    random_model(LlamaConfig(**WIDE)).bfloat16().save_pretrained(directory / "wide")
    return directory / "wide"


def in_gptq(directory: Path) -> Path:
    writer = gptq(Sizes(group=16, scale=0.02), act_order=True)
    write = lambda name: writer if ".layers." in name else None  # noqa: E731
    return quantised_checkpoint(checkpoint("llama"), directory, GPTQ, write)[0]


def in_nvfp4(directory: Path) -> Path:
    writer = nvfp4(0.02 / 16, modelopt=True, scale=1)
    write = lambda name: writer if ".layers." in name else None  # noqa: E731
    return quantised_checkpoint(checkpoint("llama"), directory, NVFP4, write)[0]


def named(name: str) -> Callable[[Path], Path]:
    return lambda _: checkpoint(name)


FORMS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "float32": (named("llama-tied-bias"), {}),
    "bfloat16": (wide, {"dtype": "bfloat16"}),
    "narrowed": (wide, {"dtype": "float32"}),
    "float16": (named("llama"), {"dtype": "float16"}),
    "int8": (named("qwen2"), {"quantization": "int8"}),
    "int4": (wide, {"quantization": "int4", "dtype": "bfloat16"}),
    "experts": (named("qwen2_moe"), {"dtype": "bfloat16"}),
    "experts-with-biases": (named("gpt_oss"), {}),
    "layer-inputs": (named("gemma4"), {}),
    "bounds-of-a-tower": (lambda _: seeing("gemma4"), {}),  # single numbers
    "positions": (named("gpt2"), {}),
    "states": (named("qwen3_next"), {"quantization": "int8"}),
    "convolutions": (named("lfm2"), {"dtype": "bfloat16"}),
    "gptq": (in_gptq, {}),
    "nvfp4": (in_nvfp4, {}),
    "gguf": (in_gguf, {}),
    "draft": (named("llama"), {"speculative_config": {"model": str(checkpoint("qwen3"))}}),
}


@pytest.mark.parametrize("case", FORMS)
def test_a_start_from_kept_weights_has_their_bits(case, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))  # of GGUF's directories
    make, options = FORMS[case]
    model = make(tmp_path)
    engine = started(model, cache, **options)
    assert len(list(cache.glob("*.weights"))) == len(models_of(engine))
    assert_same(engine, started(model, False, **options))
    assert_starts_from(cache, engine, model, **options)
    assert (cache.stat().st_mode & 0o777, no_files(cache)) == (0o700, True)
    assert {each.stat().st_mode & 0o077 for each in cache.iterdir()} == {0}


@pytest.mark.parametrize(("stages", "shards"), [(2, 1), (1, 2)])
def test_parts_of_ranks_are_kept_apart(stages, shards, cache, monkeypatch):
    with ranked_engines(stages, shards):
        first = tokens_of(new_engine(checkpoint("llama"), weights_cache=str(cache)))
    # The threads of followers end with their files.
    eventually(lambda: len(list(cache.glob("*.weights"))) == 2 and no_files(cache))
    assert tokens_of(new_engine(checkpoint("llama"))) == first
    monkeypatch.setattr(loading, "read_rows", lambda *_: pytest.fail("a weight is read"))
    with ranked_engines(stages, shards):
        assert tokens_of(new_engine(checkpoint("llama"), weights_cache=str(cache))) == first


def test_two_instruction_sets_share_a_folder(cache, monkeypatch):
    started(checkpoint("llama"), cache)
    monkeypatch.setattr(kept_weights, "HAS_TILES", not kept_weights.HAS_TILES)
    started(checkpoint("llama"), cache)
    monkeypatch.setattr(kept_weights, "packer", lambda: "another version")
    started(checkpoint("llama"), cache)
    assert len(list(cache.glob("*.weights"))) == 3


def test_the_content_of_a_checkpoint_decides_and_not_its_path(cache, tmp_path):
    first, copy = tmp_path / "a", tmp_path / "b"
    shutil.copytree(checkpoint("llama"), first)
    engine = started(first, cache)
    shutil.copytree(first, copy)
    assert_starts_from(cache, engine, copy)
    assert len(list(cache.glob("*.weights"))) == 1
    # Other numbers under the same name and size; only the time tells.
    weights = first / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-64:] = bytes(64)
    weights.write_bytes(content)
    changed = started(first, cache)
    assert_same(changed, started(first, False))
    assert tokens_of(changed) != tokens_of(engine) or contents(changed)[1] != contents(engine)[1]
    assert len(list(cache.glob("*.weights"))) == 2


def test_a_changed_file_of_the_same_stamp_is_noticed_if_asked(cache, tmp_path, monkeypatch):
    model = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), model)
    monkeypatch.setattr("paged.checkpoints.weights_cache.content._RACY_NS", 0)
    monkeypatch.setattr("paged.checkpoints.open_file.stamp_of", lambda _: "0 0 1 1")
    monkeypatch.setattr("paged.checkpoints.weights_cache.content.stamp_of", lambda _: "0 0 1 1")
    engine = started(model, cache)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64] + bytes(64))
    assert_same(started(model, cache), engine)
    assert_same(started(model, cache, verify_weights_cache=True), started(model, False))


def test_the_golden_record_holds_from_kept_weights(cache, monkeypatch):
    expected = golden.recorded()["tokens"]
    assert golden.tokens(weights_cache=str(cache)) == expected
    eventually(lambda: any(cache.glob("*.weights")))
    monkeypatch.setattr(loading, "read_rows", lambda *_: pytest.fail("a weight is read"))
    assert golden.tokens(weights_cache=str(cache)) == expected


def test_a_file_system_without_locks_is_said_in_one_line(cache, monkeypatch, caplog):
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(folder.fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING):
        started(checkpoint("llama"), cache)
    (line,) = caplog.messages
    assert line.endswith("Operation not supported")
    assert not list(cache.glob("*.weights"))


def damaged(content: bytes, choose: random.Random) -> bytes:
    """Return the content of a file with one of many damages."""
    place = choose.randrange(len(content))
    length = choose.choice([1, 8, 100, 4096, 70_000])
    kind = choose.randrange(7)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + bytes([content[place] ^ 1 << choose.randrange(8)]) + content[place + 1 :]
    if kind == 2:
        return content[:place] + bytes(length) + content[place + length :]
    if kind == 3:
        return content[:place] + choose.randbytes(length) + content[place + length :]
    if kind == 4:
        return content[:place] + content[place + length :]
    if kind == 5:
        other = choose.randrange(len(content))
        return content[:place] + content[other : other + length] + content[place + length :]
    return choose.choice([b"", choose.randbytes(length), content * 2, content + bytes(length)])


def test_a_damaged_file_never_gives_wrong_numbers(cache, caplog):
    engine = started(checkpoint("llama"), cache)
    (path,) = cache.glob("*.weights")
    content = path.read_bytes()
    choose = random.Random(64)
    weights = engine.runner.model.kept_weights
    digest = kept_header(path)["content"]
    num_damaged = 0
    for _ in range(300):
        broken = damaged(content, choose)
        path.unlink(missing_ok=True)
        path.write_bytes(broken)
        path.chmod(0o600)
        found = weights._open(digest)
        if broken == content:
            continue
        num_damaged += 1
        assert found is None
        assert not path.exists()
    assert num_damaged > 280
    path.write_bytes(content[:-1])
    path.chmod(0o600)
    folder.warn_once.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again = started(checkpoint("llama"), cache)
    assert [f"{path} are damaged" in text for text in caplog.messages] == [True]
    assert_same(again, engine)
    assert kept_header(path)["content"] == digest


def kept_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        return file.read_header(stream).header


def test_a_file_of_another_model_under_the_name_is_not_used(cache):
    engine = started(checkpoint("llama"), cache)
    (path,) = cache.glob("*.weights")
    other = cache.parent / "other"
    started(checkpoint("qwen2"), other)
    shutil.copyfile(next(other.glob("*.weights")), cache.parent / "file")
    (cache.parent / "file").replace(path)
    assert_same(started(checkpoint("llama"), cache), engine)


def unusable(kind: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder that cannot be used."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "a file":
        place.write_text("")
    elif kind == "below a file":
        place.parent.rmdir()
        place.parent.write_text("")
    else:
        place.mkdir()
    if kind == "of another user":
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    elif kind == "open to others":
        place.chmod(0o777)
    elif kind == "not writable":
        monkeypatch.setattr(folder.WeightsCache, "is_writable", False)
    elif kind == "full":
        monkeypatch.setattr(file, "write", _full)


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


UNUSABLE = {
    "a file": "is a file",
    "below a file": "is a file",
    "of another user": "belongs to another user",
    "open to others": "other users may write",
    "not writable": "cannot be written",
    "full": "No space left on device",
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_folder_that_cannot_be_used_is_said_in_one_line(kind, cache, monkeypatch, caplog):
    unusable(kind, cache, monkeypatch)
    with caplog.at_level(logging.WARNING):
        engine = started(checkpoint("llama"), cache)
    (line,) = caplog.messages
    assert UNUSABLE[kind] in line
    assert "not kept" in line
    assert "\n" not in line
    assert not cache.is_dir() or (not list(cache.glob("*.weights")) and no_files(cache))
    assert len(tokens_of(engine)) == 2


def test_a_file_system_without_mmap_is_said_in_one_line(cache, monkeypatch, caplog):
    engine = started(checkpoint("llama"), cache)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(file, "_Mapping", refuse)
    with caplog.at_level(logging.WARNING):
        assert_same(started(checkpoint("llama"), cache), engine)
    (line,) = caplog.messages
    assert "cannot be mapped: No such device" in line


@pytest.mark.parametrize("value", [True, 5, "", 1.5, b"x", Path("x"), []])
def test_a_cache_of_another_type_is_refused(value):
    with pytest.raises(ConfigError, match="weights_cache must be a folder, False or None, got"):
        EngineConfig("demo", weights_cache=value)


def test_small_weights_are_not_kept(cache, monkeypatch):
    monkeypatch.undo()
    started("demo", cache)
    assert not cache.exists()


def test_the_least_recently_used_make_room(cache, monkeypatch, caplog):
    monkeypatch.setattr(folder, "KEPT_SHARE", 1.0)
    names = ["llama", "qwen2", "mistral"]
    for number, name in enumerate(names):
        started(checkpoint(name), cache)
        for each in cache.glob("*.weights"):
            if each.stat().st_mtime > 10:
                os.utime(each, (number, number))
    sizes = [each.num_bytes for each in folder.WeightsCache(cache).kept()]
    started(checkpoint("llama"), cache)  # used last now
    usage = shutil.disk_usage(cache)
    room = sum(sizes) + sizes[0] // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=room - sum(sizes)))
    before = {each.path for each in folder.WeightsCache(cache).kept()}
    started(checkpoint("olmo2"), cache)
    assert before - {each.path for each in folder.WeightsCache(cache).kept()}
    used = [str(each.title) for each in listed(cache)]
    assert used[0].startswith("olmo2")
    assert any(title.startswith("llama") for title in used)
    assert not any(title.startswith("qwen2") for title in used)
    monkeypatch.setattr(folder, "KEPT_SHARE", 1e-9)
    with caplog.at_level(logging.WARNING):
        started(checkpoint("phi3"), cache)
    assert "would be more than" in caplog.messages[-1]


def listed(cache: Path) -> Iterator[file.Listed]:
    return file.listed(folder.WeightsCache(cache))


def test_two_that_write_the_same_lose_nothing(cache):
    """The second one finds the file locked, or renamed already; a killed one leaves no lock."""
    cache.mkdir(parents=True)
    own = folder.WeightsCache(cache)
    with own.writing("a") as first:
        first.write(b"one")
        with own.writing("a") as second:
            assert second is None
        assert (cache / "a.unfinished").read_bytes() == b"one"
    assert (cache / "a.weights").read_bytes() == b"one"
    (cache / "b.unfinished").write_bytes(b"left by a process that was killed")
    with own.writing("c") as third:
        third.write(b"three")
    assert sorted(each.name for each in cache.iterdir()) == ["a.weights", "c.weights"]
    with suppress(RuntimeError), own.writing("d") as fourth:
        fourth.write(b"four")
        raise RuntimeError
    assert not list(cache.glob("d.*"))


def test_a_kill_at_any_moment_leaves_nothing_that_is_used(cache):
    """A process that ends after any write has left an unfinished file, which no start reads."""
    engine = started(checkpoint("llama"), cache)
    (path,) = cache.glob("*.weights")
    whole = path.read_bytes()
    path.unlink()
    for share in (0.0, 0.3, 0.999):
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(whole[: int(len(whole) * share)])
        again = started(checkpoint("llama"), cache)
        assert_same(again, engine)
        assert [each.name for each in cache.glob("*.weights")] == [path.name]
        assert no_files(cache)
        path.unlink()


def test_two_starts_at_once_that_end_at_once(cache):
    """Each waits at its end for the file that it writes: a short command would otherwise never keep any."""
    model = checkpoint("llama")
    script = f"""
import paged.runner.load as load
load.LEAST_KEPT_BYTES = 0
from paged import LLMEngine
options = dict(num_blocks=64, dtype="float32", skip_tokenizer_init=True)
LLMEngine({str(model)!r}, weights_cache={str(cache)!r}, **options)
"""
    starts = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) for _ in range(2)]
    assert [(start.communicate()[1], start.returncode) for start in starts] == [(b"", 0), (b"", 0)]
    assert_starts_from(cache, started(model, False), model)


def test_two_engines_share_the_pages_of_a_file(cache, monkeypatch):
    """One alone copies them into huge pages, where those of the file are small."""
    monkeypatch.setattr(file, "_may_have_huge_pages", lambda: True)
    monkeypatch.setattr(file, "_has_huge_pages", lambda _: False)
    alone: list[bool] = []
    read = file.PackedTensors._read
    note = lambda tensors, packed: (alone.append(not tensors.is_mapped), read(tensors, packed))  # noqa: E731
    monkeypatch.setattr(file.PackedTensors, "_read", note)
    started(checkpoint("llama"), cache)
    first = started(checkpoint("llama"), cache)
    second = started(checkpoint("llama"), cache)
    assert_same(first, second)
    assert alone == [True, False]
    del first, second
    gc.collect()
    started(checkpoint("llama"), cache)
    assert alone == [True, False, True]


def test_mapped_weights_are_not_free_memory(cache, monkeypatch):
    monkeypatch.setattr(file, "_may_have_huge_pages", lambda: False)
    started(checkpoint("llama"), cache)
    held = host_memory.held_in_files
    engine = started(checkpoint("llama"), cache)
    (path,) = cache.glob("*.weights")
    assert 0 < host_memory.held_in_files - held <= path.stat().st_size
    del engine
    gc.collect()
    assert host_memory.held_in_files == held
    monkeypatch.setattr(host_memory, "held_in_files", 300)
    monkeypatch.setattr(host_memory, "_cgroup_free_bytes", lambda: 1000.0)
    assert host_memory.free_on_cpu() == 700


def test_weights_of_named_models_go_last(cache, monkeypatch, caplog):
    cache.mkdir(mode=0o700, parents=True)
    place = folder.WeightsCache(cache)
    digests = ["1" * 64, "2" * 64, "3" * 64]
    for age, digest in enumerate(digests):
        path = place.path(f"key-{digest[: folder.NAME_DIGITS]}")
        path.write_bytes(bytes(100))
        os.utime(path, (100 - age, 100 - age))
    monkeypatch.setattr(folder, "KEPT_SHARE", 1.0)
    usage = shutil.disk_usage(cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    named = {"mine": digests[2]}  # the least recently used
    with caplog.at_level(logging.WARNING):
        assert place.make_room(0, lambda: named)
        assert len(place.kept()) == 3
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
        assert place.make_room(150, lambda: named)
        left = [folder.content_of(each.path)[0] for each in place.kept()]
        assert left == ["1", "3"]
        assert not caplog.text
        assert place.make_room(250, lambda: named)
    assert not place.kept()
    assert "those of mine" in caplog.text


def test_the_models_of_models_toml_are_known_once_they_were_packed(cache, monkeypatch, tmp_path):
    model = checkpoint("llama")
    started(model, cache)
    models = tmp_path / "models.toml"
    models.write_text(f'[mine]\ncheckpoint = "{model}"\n[gone]\ncheckpoint = "{tmp_path / "gone"}"\n')
    monkeypatch.setenv("PAGED_MODELS", str(models))
    place = folder.WeightsCache(cache)
    (one,) = listed(cache)
    assert named_digests(place) == {"mine": one.content}
    models.write_text("[mine]\ncheckpoint = 5")
    assert named_digests(place) == {}
