"""Weights that are stored in units of rows load like floats: joined, permuted, transposed, part by part."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paged import CheckpointError, SamplingParams
from paged.architectures.config import LLAMA_NAMES
from paged.checkpoints import stored as sources
from paged.checkpoints.stored import Layout, StoredFormat, StoredPart, StoredRows, StoredTensor, read_rows
from paged.model.layers.linear import Linear
from paged.model.weights.choice import Forms
from paged.model.weights.coded_forms import CodedProduct
from paged.model.weights.forms import PlainWeight, Role, WeightForm
from paged.model.weights.joined_form import JoinedForm
from paged.model.weights.loading import Loader, check_weights
from paged.model.weights.quantization import Int8Weight
from paged.runner import load
from tests.support.checkpoints import checkpoint, new_engine, ragged_prompts

CPU = torch.device("cpu")
PACK, BLOCK, GROUP = 8, 128, 16  # outputs in an int32 and with one scale; inputs with one scale


@dataclass(frozen=True)
class PackedFormat(StoredFormat):
    """Codes of 4 bits, eight outputs in an int32, and a scale for each 128 outputs and 16 inputs."""

    title = "packed"

    def layouts(self, part: StoredPart) -> dict[str, Layout]:
        codes = Layout((part.num_inputs,), torch.uint8, 1, PACK, unpacked, (torch.int32,))
        scales = Layout((part.num_inputs // GROUP,), part.dtype, rows_per_entry=BLOCK)
        return {"codes": codes, "scales": scales}

    def weight(self, tensors: Mapping[str, Tensor]) -> Tensor:
        codes, scales = tensors["codes"], tensors["scales"]
        assert codes.dtype == torch.uint8
        return (codes.to(scales.dtype) - 8) * scales.repeat_interleave(GROUP, dim=1)


def packed_format(part: StoredPart) -> PackedFormat | None:
    return PackedFormat() if part.get("codes") else None


def unpacked(entries: Tensor) -> Tensor:
    shifts = 4 * torch.arange(PACK)[:, None]
    return (entries[:, None] >> shifts & 15).flatten(0, 1)


def numbers_of(codes: Tensor) -> Tensor:
    """Pack the codes of eight rows into an int32, the first one lowest."""
    shifts = 4 * torch.arange(PACK)[:, None]
    return (codes.view(-1, PACK, codes.shape[1]) << shifts).sum(1).to(torch.int32)  # may wrap round


def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantise a weight; return the tensors of PackedFormat and the floats that they stand for."""
    num_rows, num_inputs = weight.shape
    codes = torch.randint(0, 16, (num_rows, num_inputs))
    scales = torch.rand(-(-num_rows // BLOCK), num_inputs // GROUP) / 64
    floats = (codes.float() - 8) * scales.repeat_interleave(BLOCK, 0)[:num_rows].repeat_interleave(GROUP, 1)
    return {"codes": numbers_of(codes).T.contiguous(), "scales": scales}, floats


@pytest.fixture(autouse=True)
def _load_packed_too(monkeypatch):
    """Load PackedFormat, which no config.json names."""
    monkeypatch.setattr(load, "_recognizers_of", lambda *_: [packed_format])


@dataclass(frozen=True, slots=True)
class InMemory(StoredTensor):
    """A tensor of no file. It notes how many rows it is asked for at once."""

    data: Tensor
    asked: list[int]

    def read(self, rows: slice = slice(None), out: Tensor | None = None) -> Tensor:
        self.asked.append(len(self.data[rows]))
        return self.data[rows].clone() if out is None else out.copy_(self.data[rows])


def in_memory(name: str, data: Tensor) -> InMemory:
    return InMemory(Path("memory"), name, data.dtype, list(data.shape), data, [])


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_those_of_the_index(seed, monkeypatch):
    """In any unit, dimension and order, repeated or left out, from tensors one after the other."""
    choice = random.Random(seed)
    monkeypatch.setattr(sources, "TENSOR_PART_BYTES", choice.choice([64, 2**20]))
    num_inputs, dim = choice.choice([16, 48]), choice.choice([0, 1])
    unit, is_packed = choice.choice([(1, False), (8, False), (8, True), (128, False)])
    stored_tensors, rows = [], []
    for i in range(choice.randint(1, 3)):
        count = choice.randint(1, 200)
        if is_packed:  # the last number with less than eight
            stored = torch.randint(0, 16, (-(-count // PACK) * PACK, num_inputs))
            rows.append(stored[:count])
            data = numbers_of(stored)
        else:
            data = torch.randn(-(-count // unit), num_inputs)
            rows.append(data.repeat_interleave(unit, 0)[:count])
        stored_tensors.append((in_memory(str(i), data.movedim(0, dim).contiguous()), count))
    every = torch.cat(rows)
    index = None
    if choice.random() < 0.7:
        index = torch.randint(0, len(every), (choice.randint(1, 2 * len(every)),))
    dtype = torch.uint8 if is_packed else choice.choice([torch.float32, torch.bfloat16])
    layout = Layout((num_inputs,), dtype, dim, unit, unpacked if is_packed else None)
    out = read_rows(stored_tensors, index, layout, CPU)
    assert torch.equal(out, (every if index is None else every[index]).to(dtype))
    for tensor, _ in stored_tensors:
        if out.dtype != tensor.dtype or index is not None:
            assert max(tensor.asked) <= tensor.parts()[0].stop, "only a part is in memory"


# Q, K and V apart, with biases; as one, transposed; by head; a V made of K; interleaved
# and fused; rotated in part.
MODELS = ["llama-tied-bias", "gpt2", "gpt_neox", "gemma4-keys-as-values", "glm4", "phi3"]


@pytest.mark.parametrize("name", MODELS)
def test_packed_checkpoint_is_that_of_its_floats(name, tmp_path, monkeypatch):
    """Bit for bit in every weight, by the same loader. Half of the linear layers stay floats."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # plain weights, to be compared
    monkeypatch.setattr(sources, "TENSOR_PART_BYTES", 1000)
    source = checkpoint(name)
    is_transposed = name == "gpt2"
    num_packed = 0
    of_floats, of_codes = {}, {}
    for key, tensor in load_file(source / "model.safetensors").items():
        of_floats[key] = of_codes[key] = tensor
        if tensor.dim() != 2:
            continue
        weight = tensor.T if is_transposed else tensor
        if is_packed(key, *weight.shape):
            parts, floats = packed(weight)
            of_floats[key] = (floats.T if is_transposed else floats).contiguous()
            del of_codes[key]
            of_codes |= {f"{key.removesuffix('weight')}{part}": x for part, x in parts.items()}
            num_packed += 1
    assert num_packed
    found = []
    for tensors in (of_floats, of_codes):
        directory = tmp_path / str(len(found))
        shutil.copytree(source, directory)
        save_file(tensors, directory / "model.safetensors")
        engine = new_engine(directory, attention_backend="torch")
        found.append((weights_of(engine.runner.model), greedy(engine)))
    (expected, tokens), (weights, same_tokens) = found
    assert weights.keys() == expected.keys()
    for key, weight in weights.items():
        assert torch.equal(weight, expected[key]), key
    assert tokens == same_tokens


def is_packed(key: str, num_rows: int, num_inputs: int) -> bool:
    """Whether to pack a weight: those of attention but V in every layer, and of the MLP in the second.

    A product may thus consist of rows in two formats.
    """
    is_meant = "attn" in key or "attention" in key or ".1.mlp" in key
    return is_meant and "v_proj" not in key and num_rows % PACK == num_inputs % GROUP == 0


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    forms = {name: module.form for name, module in model.named_modules() if isinstance(module, Linear)}
    return {name: weight_of(form) for name, form in forms.items()} | dict(model.named_parameters())


def weight_of(form: WeightForm) -> Tensor:
    return torch.cat([each.weight for each in form.forms]) if isinstance(form, JoinedForm) else form.weight


def greedy(engine) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return [o.outputs[0].token_ids for o in engine.generate(ragged_prompts([9, 20]), params, use_tqdm=False)]


def linear_of(role: Role = "layer", **counts: int) -> Linear:
    with torch.device("meta"):
        return Linear(32, StoredRows(counts), bias=False, role=role)


def refusal(linear: Linear, tensors: Mapping[str, Tensor]) -> str:
    found = {name: in_memory(name, tensor) for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError) as info:
        check_weights([linear], found, LLAMA_NAMES, Path("directory"), [packed_format])
    return str(info.value)


def test_what_does_not_fit_its_units_is_named():
    codes, scales = torch.zeros(32, 2, dtype=torch.int32), torch.zeros(1, 2)
    sound = {"model.a.codes": codes, "model.a.scales": scales}
    linear = linear_of(**{"model.a": 16})
    found = {n: in_memory(n, x) for n, x in sound.items()}
    check_weights([linear], found, LLAMA_NAMES, Path("directory"), [packed_format])
    assert refusal(linear_of(**{"model.a": 17}), sound) == (
        "memory: model.a.codes has shape [32, 2], but config.json makes it [32, 3]"
    )
    assert "model.a.scales has shape [2, 2], but config.json makes it [1, 2]" in refusal(
        linear, {**sound, "model.a.scales": scales.repeat(2, 1)}
    )
    assert "model.a.codes is torch.float32; supported are torch.int32" in refusal(
        linear, {**sound, "model.a.codes": codes.float()}
    )
    assert "model.a.scales is missing" in refusal(linear, {"model.a.codes": codes})
    both = {**sound, "model.a.weight": torch.zeros(16, 32)}
    assert "model.a.weight is not part of the model" in refusal(linear, both)


def test_integers_are_no_floats():
    weight = {"model.a.weight": torch.zeros(16, 32, dtype=torch.int32)}
    assert "model.a.weight is torch.int32; supported are torch.float64" in refusal(
        linear_of(**{"model.a": 16}), weight
    )


def test_a_form_is_chosen_for_each_linear():
    """By what is stored of it and by what it is for."""
    codes, scales = torch.zeros(32, 2, dtype=torch.int32), torch.ones(1, 2)
    tensors = {"a.codes": codes, "a.scales": scales, "b.weight": torch.ones(16, 32)}
    tensors["head.weight"] = tensors["b.weight"]
    forms = Forms({"layer": PlainWeight, "head": Int8Weight}, CodedProduct)
    found = {name: in_memory(name, x) for name, x in tensors.items()}
    loader = Loader(found, forms, CPU, [packed_format])
    linears = [linear_of(a=16), linear_of(b=16), linear_of("head", head=16)]
    for linear in linears:
        linear.load(loader)
    assert [type(linear.form) for linear in linears] == [PlainWeight, PlainWeight, Int8Weight]
    assert [float(linear.form.weight[0, 0]) for linear in linears[:2]] == [-8, 1]
