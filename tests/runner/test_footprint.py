"""Footprints: planned bytes are those that an engine then holds, and what is said to fit does."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paged import CheckpointError, ConfigError, EngineConfig
from paged.architectures.hf_config import read_config
from paged.checkpoints.gguf import gguf_file
from paged.checkpoints.headers import write_header
from paged.checkpoints.model_directory import resolve_headers
from paged.model.part import ModelPart, Shard
from paged.model.weights import samples
from paged.runner.graph_memory import RESERVE, planned_bytes, planned_sizes
from paged.simulate.cost import DATA_SHEETS
from paged.simulate.model import read_model
from paged.simulate.plan import make_plan
from tests.support.checkpoints import checkpoint, edit_json, new_engine, random_model
from tests.support.gguf_models import write_model
from tests.support.quantised import Sizes, compressed, float_group, fp8, gptq, quantised_checkpoint

L4 = DATA_SHEETS["L4"]
OPTION = re.compile(r"(\w+)=('\w+'|True|\d+)(?: with max_model_len=(\d+))?")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch):
    monkeypatch.setattr("paged.simulate.plan.measure", lambda *_: None)


def planned(model: str | Path, **options: Any) -> Any:
    return make_plan(EngineConfig(str(model), **{"device": "cpu", **options})).footprint


def tensors_in(value: object, seen: set[int]) -> Iterator[Tensor]:
    """Yield all tensors that an object holds, but no list of the rows that were read."""
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    parts: list[object] = []
    if isinstance(value, dict):
        parts = [part for key, part in value.items() if key not in ("stored", "kernels")]
    elif isinstance(value, list | tuple):
        parts = [*value]
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, nn.Module) or hasattr(value, "__dict__"):
        parts = [vars(value)]
    for part in parts:
        yield from tensors_in(part, seen)


def bytes_held(engine: Any) -> int:
    """Return the bytes of an engine's model and KV cache."""
    runner = engine.runner
    found = [*tensors_in(runner.model, set()), *runner.kv_cache.tensors.values()]
    opaque = sum(tensor.nbytes for tensor in found if tensor.is_mkldnn)
    storages = [t.untyped_storage() for t in found if not t.is_mkldnn and not t.is_meta]
    return opaque + sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def gguf(directory: Path) -> Path:
    """Write a model with types of three widths, as llama.cpp mixes them."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    kinds = {"ffn_down.weight": "Q6_K", "token_embd.weight": "Q8_0", "output.weight": "Q6_K"}

    def type_of(name: str) -> str:
        return next((kind for end, kind in kinds.items() if name.endswith(end)), "Q4_K")

    return write_model(directory / "model.gguf", random_model(config), type_of)


def in_symmetric_gptq(directory: Path) -> Path:
    """Write a checkpoint in GPTQ whose zeros say nothing, and take nothing in memory."""
    writer = gptq(Sizes(dtype=torch.float16, group=16, scale=0.02), symmetric=True)
    config = {**GPTQ, "group_size": 16, "desc_act": False, "sym": True}
    return quantised_checkpoint(
        checkpoint("llama"), directory, config, lambda name: writer if ".layers." in name else None
    )[0]


def in_fp8_but_stacks(directory: Path) -> Path:
    """Write a checkpoint whose linear modules are in fp8, but not its experts, which are no modules."""
    config = compressed("float-quantized", float_group(8, "channel"), ignore=["re:.*router", "lm_head"])
    writer = fp8("channel", dtype=torch.bfloat16, scale=0.001)
    return quantised_checkpoint(
        checkpoint("granitemoe"),
        directory,
        config,
        lambda name: writer if re.search(r"self_attn.*_proj", name) else None,
    )[0]


def in_gptq(directory: Path) -> Path:
    """Write a checkpoint in GPTQ, with groups of inputs that do not follow each other."""
    writer = gptq(Sizes(dtype=torch.float16, scale=0.02), act_order=True)
    return quantised_checkpoint(
        checkpoint("llama"), directory, GPTQ, lambda name: writer if ".layers." in name else None
    )[0]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("demo", {}),
        ("demo", {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("demo", {"quantization": "int4"}),
        ("demo", {"quantization": "int4", "attention_backend": "torch"}),
        ("demo", {"dtype": "float32", "attention_backend": "torch"}),
        ("llama-tied-bias", {"dtype": "float32"}),
        ("gemma3", {"dtype": "float32"}),  # windows
        ("gemma4", {"dtype": "float32"}),  # inputs of layers, and K and V of two shapes
        (in_gptq, {"dtype": "float32"}),
        (in_symmetric_gptq, {"dtype": "float32"}),
        (in_fp8_but_stacks, {"dtype": "float32"}),
        ("qwen3_vl_moe", {"dtype": "float32", "quantization": "int8"}),  # a tower in floats
        (gguf, {"dtype": "float32"}),
        (gguf, {"dtype": "bfloat16"}),
    ],
)
def test_memory_is_what_the_engine_then_takes(tmp_path, monkeypatch, model, options):
    if options:  # else bfloat16 is encoded, but only large weights are
        monkeypatch.setattr(samples, "_SAMPLE_NUMBERS", 2**14)
    model = model(tmp_path) if callable(model) else model if model == "demo" else checkpoint(model)
    options = {"dtype": "auto", "num_blocks": 40, "max_model_len": 64, **options}
    plan = planned(model, **options)
    taken = bytes_held(new_engine(model, **options))
    assert plan.num_bytes - plan.activation_bytes == pytest.approx(taken, rel=0.03)
    assert plan.kv_bytes > 0.01 * taken


def test_stacks_are_floats_to_a_rule_of_linear_modules(tmp_path):
    """What a config alone says of its layers is what files have, and `test_memory…` loads."""
    directory = in_fp8_but_stacks(tmp_path)
    in_files = read_model(str(directory)).layer_bits
    assert read_config(directory).layer_bits == pytest.approx(in_files, rel=0.01)
    named = json.loads((directory / "config.json").read_text())["quantization_config"]
    named["config_groups"]["group_0"]["targets"] = ["re:.*"]  # stacks too, by their names
    edit_json(directory / "config.json", quantization_config=named)
    assert read_config(directory).layer_bits < 0.4 * in_files


def test_windows_and_groups_limit_what_fits():
    """Gemma 3 with windows of 24 tokens in 4 of 5 layers, in groups of one layer each."""
    plan = planned(checkpoint("gemma3"), dtype="float32", num_blocks=50, max_num_seqs=9, max_model_len=128)
    manager = plan.sizes.new_block_manager(50)
    assert len(plan.sizes.model.layer_groups) == 5
    for length in (16, 64, 128):
        assert plan.num_sequences(length) == min(9, 50 // manager.most_blocks(length))
    assert plan.longest == 128
    assert planned(checkpoint("gemma3"), dtype="float32", num_blocks=50).longest == manager.longest_fit(512)


def test_only_headers_are_read(tmp_path):
    """A file whose data was never written has the same plan."""
    directory = in_gptq(tmp_path)
    whole = planned(directory, dtype="float32", num_blocks=4)
    with (directory / "model.safetensors").open("rb") as file:
        write_header(file, tmp_path / "header")
    shutil.move(tmp_path / "header", directory / "model.safetensors")
    alone = planned(directory, dtype="float32", num_blocks=4)
    # But for the order of inputs, which is in the data.
    assert alone.num_bytes == pytest.approx(whole.num_bytes, rel=0.01)
    with pytest.raises(CheckpointError, match=r"has a header alone, so that .* cannot be read"):
        new_engine(directory)


def test_of_gguf_files_on_the_hub_only_headers_are_read(tmp_path, monkeypatch):
    """And small tensors that the config is made of; the plan is that of the whole file."""
    path = gguf(tmp_path)
    monkeypatch.setattr(gguf_file, "_CHUNK", 4096)
    remote = Counting(path.read_bytes())
    monkeypatch.setattr("huggingface_hub.HfFileSystem", lambda: SimpleNamespace(open=lambda *_, **__: remote))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    siblings = [SimpleNamespace(rfilename="m-Q4_K_M.gguf")]
    monkeypatch.setattr(
        "huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=siblings)
    )
    directory = resolve_headers("owner/name:Q4_K_M")
    assert remote.num_read < path.stat().st_size / 10
    assert (directory / "m-Q4_K_M.gguf").stat().st_size == path.stat().st_size
    alone, whole = (planned(model, dtype="float32", num_blocks=4) for model in (directory, path))
    assert alone.num_bytes == whole.num_bytes
    with pytest.raises(CheckpointError, match=r"has a header alone, so that .* cannot be read"):
        new_engine(directory)


class Counting(io.BytesIO):
    """A file that counts the bytes which are read."""

    num_read = 0

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        self.num_read += len(found)
        return found


def on_gpu(monkeypatch: pytest.MonkeyPatch, mib: float, **options: Any) -> Any:
    """Return the plan of the demo on a GPU of this size with nothing else in it."""
    monkeypatch.setitem(DATA_SHEETS, "L4", replace(L4, memory_gib=mib / 1024))
    monkeypatch.setattr("paged.simulate.plan.GPU_OVERHEAD", 0)
    return make_plan(EngineConfig("demo", device="L4", **options))


def test_gpu_has_what_its_utilization_leaves(monkeypatch):
    plan = on_gpu(monkeypatch, 600, gpu_memory_utilization=0.5).footprint
    assert plan.model.num_bytes == 2 * plan.sizes.model.num_params + 2 * 256 * 9  # norms
    own = plan.model.num_bytes + plan.activation_bytes + plan.state_bytes + plan.rope_bytes
    free = 300 * 2**20 - own - plan.graph_bytes
    assert plan.num_blocks == free // plan.sizes.block_bytes < plan.sizes.max_useful_blocks
    assert plan.num_bytes <= 300 * 2**20
    # Block tables, and for each token a count and a flag.
    assert plan.state_bytes == 256 * (4 * 2048 // plan.sizes.block_size + 5 * 4096)
    assert plan.rope_bytes == 4 * 64 * 2048


@pytest.mark.parametrize(("mib", "eager"), [(30, True), (90, True), (210, False)])
def test_what_is_said_to_fit_does(monkeypatch, mib, eager):
    made = on_gpu(monkeypatch, mib, enforce_eager=eager)
    assert not made.footprint.fits
    assert made.would_fit
    for text in made.would_fit:
        name, value, length = OPTION.fullmatch(text).groups()
        options = {name: json.loads(value.replace("'", '"').replace("True", "true"))}
        if length:
            options["max_model_len"] = int(length)
        options = {"enforce_eager": eager, **options}
        assert on_gpu(monkeypatch, mib, **options).footprint.fits, text
        if value.isdigit():
            assert not made.footprint.with_options(**{name: int(value) + 1}).fits, text
    assert any("enforce_eager=True" in text for text in made.would_fit) == (not eager)


def test_graphs_are_counted(monkeypatch):
    """Logits and activations of the largest size, once for all sizes; and each graph's launches."""
    plans = {most: on_gpu(monkeypatch, 4000, max_cudagraph_capture_size=most).footprint for most in (8, 64)}
    eager = plans[8].with_options(enforce_eager=True)
    assert eager.graph_bytes == 0
    assert eager.num_bytes == plans[8].num_bytes - plans[8].graph_bytes
    more = plans[64].graph_bytes - plans[8].graph_bytes
    # In float32: the logits of a graph, a copy to draw from, and those that graphs end with.
    logits = 3 * 4 * 56 * 4096
    launches = 4 * 7 * 10 * 4 * 12 * 1024  # of 7 more sizes, and 4 layers
    shapes = plans[8].sizes.model.kv_shapes.values()
    sizes = 2048, plans[8].sizes.num_heads, max(shape.value_dim for shape in shapes)
    partial = plans[8].kernels.partial_bytes
    assert more == logits + launches + partial(64, *sizes) - partial(8, *sizes)
    drafting = plans[8].with_options(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert drafting.graph_bytes > plans[8].graph_bytes  # runs of four tokens
    stages = [replace(plans[8].sizes, part=ModelPart(layers, 4)) for layers in (range(2), range(2, 4))]
    kernels = plans[8].kernels
    of_one = planned_sizes(stages[0], kernels)[:1]
    first, last = (planned_bytes(each, kernels, of_one, 0) for each in stages)
    assert first == RESERVE + 2 * 2 * 10 * 12 * 1024  # which draws no token
    assert last == first + 4 * 4096
    short = replace(stages[0], config=replace(stages[0].config, max_model_len=kernels.split_keys))
    assert planned_bytes(short, kernels, of_one, 0) == RESERVE + (first - RESERVE) // 2  # contexts of a split
    adapted = replace(stages[0], config=replace(stages[0].config, enable_lora=True))
    assert planned_bytes(adapted, kernels, of_one, 0) == RESERVE + 2 * 2 * (10 + 14) * 12 * 1024
    shard = replace(plans[8].sizes, part=ModelPart(range(4), 4, Shard(0, 2)))
    assert planned_sizes(shard, plans[8].kernels) == []


def test_engine_that_does_not_fit_says_what_would(monkeypatch):
    monkeypatch.setattr("paged.runner.memory.free_on_cpu", lambda: 7_000_000)
    message = r"^no memory for the weights on cpu: weights 0\.01 GiB.* would fit: quantization=.int8. with "
    with pytest.raises(ConfigError, match=message):
        new_engine("demo", dtype="auto", num_blocks=None)
