"""Weights as quantised checkpoints hold them, and the floats that they stand for by each format's definition.

The definitions are slow on purpose: one number after the other, from the bits of what is stored.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


class Stored(NamedTuple):
    """The tensors of one weight, by the last part of their names, and what they stand for in float32."""

    tensors: dict[str, Tensor]
    floats: Tensor


Writer = Callable[[int, int, np.random.Generator], Stored]  # rows, inputs
One = np.float32
overflowing = np.errstate(over="ignore")  # as the largest scales do


def words(codes: np.ndarray, bits: int, *, axis: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes along an axis into int32: code i of a word at 4 or 8 bits places[i], by default i."""
    per_word = 32 // bits
    codes = np.moveaxis(codes, axis, -1)
    out = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), np.uint32)
    for row in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            place = (places or range(per_word))[i % per_word]
            out[row, i // per_word] |= np.uint32(int(codes[row, i]) << bits * place)
    return torch.from_numpy(np.moveaxis(out, -1, axis).astype(np.int32, copy=False).view(np.int32).copy())


def bits_of(word: int, bits: int, place: int) -> int:
    """Return the bits of an int32 at one of its places, the lowest first."""
    return (word & 0xFFFFFFFF) >> bits * place & (1 << bits) - 1


def e4m3(byte: int) -> float:
    """Return the number of a code of float8_e4m3fn."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


def e2m1(code: int) -> float:
    """Return the number of a code of 4 bits."""
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def scales_of(shape: tuple[int, ...], dtype: torch.dtype, random: np.random.Generator, size: float) -> Tensor:
    """Return scales around `size`; or with 0, of any size, of which some are the smallest, largest or -0."""
    if size:
        return torch.as_tensor(size * random.uniform(0.5, 1.5, shape)).to(dtype)
    info = torch.finfo(dtype)
    smallest = info.tiny * info.eps  # subnormal
    edges = torch.tensor([smallest, info.tiny, info.max, -info.max, -0.0, 1.0], dtype=torch.float64)
    values = torch.as_tensor(random.standard_normal(shape))
    picked = torch.as_tensor(random.integers(0, 3 * len(edges), shape))
    return torch.where(picked < len(edges), edges[picked % len(edges)], values).to(dtype)


class Sizes(NamedTuple):
    """What cases of one format differ in. scale: around which scales are; 0: of any size."""

    group: int = 32
    bits: int = 4
    dtype: torch.dtype = torch.float16
    scale: float = 0.0
    spread: int = 16  # of zeros around the middle

    def groups(self, inputs: int) -> int:
        return 1 if self.group == -1 else -(-inputs // self.group)

    def group_of(self, i: int) -> int:
        return 0 if self.group == -1 else i // self.group

    def scales(self, shape: tuple[int, ...], random: np.random.Generator) -> Tensor:
        return scales_of(shape, self.dtype, random, self.scale)

    def zeros(self, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
        """Return unsigned zeros; the first two are the least and the greatest."""
        middle = 1 << self.bits - 1
        low = max(0, middle - self.spread)
        high = min(2 * middle, middle + self.spread)
        zeros = random.integers(low, high, shape)
        zeros.flat[:2] = (low, high - 1)[: zeros.size]
        return zeros


def gptq(sizes: Sizes, *, plus_one: bool = True, act_order: bool = False, symmetric: bool = False) -> Writer:
    """GPTQ: inputs in words of qweight, outputs in words of qzeros."""

    @overflowing
    def write(rows: int, inputs: int, random: np.random.Generator) -> Stored:
        bits, num_groups = sizes.bits, sizes.groups(inputs)
        per_word = 32 // bits
        codes = random.integers(0, 1 << bits, (inputs, rows))
        zeros = sizes.zeros((num_groups, rows), random)
        if symmetric:
            zeros[:] = (1 << bits - 1) - plus_one
        g_idx = np.array([sizes.group_of(i) for i in range(inputs)], np.int32)
        if act_order:
            g_idx = random.permutation(g_idx)
        tensors = {
            "qweight": words(codes, bits, axis=0),
            "qzeros": words(zeros, bits, axis=1),
            "scales": sizes.scales((num_groups, rows), random),
            "g_idx": torch.from_numpy(g_idx),
        }
        qweight, qzeros = tensors["qweight"].tolist(), tensors["qzeros"].tolist()
        scales = tensors["scales"].float().numpy()
        floats = np.empty((rows, inputs), np.float32)
        for o in range(rows):
            for i in range(inputs):
                group = g_idx[i]
                code = bits_of(qweight[i // per_word][o], bits, i % per_word)
                zero = bits_of(qzeros[group][o // per_word], bits, o % per_word) + plus_one
                floats[o, i] = One(code - zero) * scales[group, o]
        return Stored(tensors, torch.from_numpy(floats))

    return write


def awq(sizes: Sizes) -> Writer:
    """AWQ: outputs in words, of which place i is output (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    places = tuple(order.index(output) for output in range(8))

    @overflowing
    def write(rows: int, inputs: int, random: np.random.Generator) -> Stored:
        num_groups = sizes.groups(inputs)
        tensors = {
            "qweight": words(random.integers(0, 16, (inputs, rows)), 4, axis=1, places=places),
            "qzeros": words(sizes.zeros((num_groups, rows), random), 4, axis=1, places=places),
            "scales": sizes.scales((num_groups, rows), random),
        }
        qweight, qzeros = tensors["qweight"].tolist(), tensors["qzeros"].tolist()
        scales = tensors["scales"].float().numpy()
        floats = np.empty((rows, inputs), np.float32)
        for i in range(inputs):
            group = sizes.group_of(i)
            for word in range(-(-rows // 8)):
                for place, output in enumerate(order):
                    o = 8 * word + output
                    if o < rows:
                        difference = bits_of(qweight[i][word], 4, place) - bits_of(
                            qzeros[group][word], 4, place
                        )
                        floats[o, i] = One(difference) * scales[group, o]
        return Stored(tensors, torch.from_numpy(floats))

    return write


def packed(sizes: Sizes, *, zeros: str = "", act_order: bool = False, per_tensor: bool = False) -> Writer:
    """compressed-tensors, pack-quantized. zeros: "packed" or "plain"."""

    @overflowing
    def write(rows: int, inputs: int, random: np.random.Generator) -> Stored:
        bits, num_groups = sizes.bits, sizes.groups(inputs)
        middle = 1 << bits - 1
        per_word = 32 // bits
        g_idx = np.array([sizes.group_of(i) for i in range(inputs)], np.int32)
        if act_order:
            g_idx = random.permutation(g_idx)
        tensors = {
            "weight_packed": words(random.integers(0, 2 * middle, (rows, inputs)), bits, axis=1),
            "weight_scale": sizes.scales((1,) if per_tensor else (rows, num_groups), random),
            "weight_shape": torch.tensor([rows, inputs]),
        }
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(g_idx)
        own = sizes.zeros((rows, num_groups), random)
        if zeros == "packed":
            tensors["weight_zero_point"] = words(own, bits, axis=0)
        elif zeros == "plain":
            tensors["weight_zero_point"] = torch.from_numpy((own - middle).astype(np.int8))
        stored, scales = tensors["weight_packed"].tolist(), tensors["weight_scale"].float().numpy()
        floats = np.empty((rows, inputs), np.float32)
        for o in range(rows):
            for i in range(inputs):
                group = g_idx[i]
                number = bits_of(stored[o][i // per_word], bits, i % per_word) - middle
                if zeros == "packed":
                    word = int(tensors["weight_zero_point"][o // per_word, group])
                    number -= bits_of(word, bits, o % per_word) - middle
                elif zeros == "plain":
                    number -= int(tensors["weight_zero_point"][o, group])
                floats[o, i] = One(number) * (scales[0] if per_tensor else scales[o, group])
        return Stored(tensors, torch.from_numpy(floats))

    return write


def integers(sizes: Sizes, *, zeros: bool = False, shape: str = "channel") -> Writer:
    """compressed-tensors, int-quantized."""

    @overflowing
    def write(rows: int, inputs: int, random: np.random.Generator) -> Stored:
        scale_shape = {"tensor": (1,), "channel": (rows, 1), "group": (rows, sizes.groups(inputs))}[shape]
        codes = random.integers(-128, 128, (rows, inputs)).astype(np.int8)
        tensors = {"weight": torch.from_numpy(codes), "weight_scale": sizes.scales(scale_shape, random)}
        if zeros:
            own = random.integers(-128, 128, scale_shape) // (16 if sizes.scale else 1)
            tensors["weight_zero_point"] = torch.from_numpy(own.astype(np.int8))
        scales = tensors["weight_scale"].float().numpy()
        floats = np.empty((rows, inputs), np.float32)
        for o in range(rows):
            for i in range(inputs):
                place = {"tensor": (0,), "channel": (o, 0), "group": (o, sizes.group_of(i))}[shape]
                zero = int(tensors["weight_zero_point"][place]) if zeros else 0
                floats[o, i] = One(int(codes[o, i]) - zero) * scales[place]
        return Stored(tensors, torch.from_numpy(floats))

    return write


def fp8(
    shape: str | tuple[int, int],
    *,
    name: str = "weight_scale",
    dtype: torch.dtype = torch.float32,
    scale: float = 0,
) -> Writer:
    """e4m3 with a scale that multiplies. shape: "scalar", "tensor", "outputs", "channel" or of a block."""

    @overflowing
    def write(rows: int, inputs: int, random: np.random.Generator) -> Stored:
        codes = random.integers(0, 256, (rows, inputs)).astype(np.uint8)
        codes[codes & 127 == 127] = 0  # NaN
        block = shape if isinstance(shape, tuple) else (1, 1)
        scale_shape = {
            "scalar": (),
            "tensor": (1,),
            "outputs": (rows,),
            "channel": (rows, 1),
            block: (-(-rows // block[0]), -(-inputs // block[1])),
        }[shape]
        if dtype == torch.float8_e8m0fnu:
            low, high = (118, 122) if scale else (0, 255)
            exponents = random.integers(low, high, scale_shape).astype(np.uint8)
            exponents.flat[0] = low
            scales = torch.from_numpy(exponents).view(dtype)
            values = np.vectorize(lambda e: math.ldexp(1.0, int(e) - 127))(exponents).astype(np.float32)
        else:
            scales = scales_of(scale_shape, dtype, random, scale)
            values = scales.float().numpy()
        tensors = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), name: scales}
        floats = np.empty((rows, inputs), np.float32)
        for o in range(rows):
            for i in range(inputs):
                place = {
                    "scalar": (),
                    "tensor": (0,),
                    "outputs": (o,),
                    "channel": (o, 0),
                    block: (o // block[0], i // block[1]),
                }[shape]
                floats[o, i] = One(e4m3(int(codes[o, i]))) * values[place]
        return Stored(tensors, torch.from_numpy(floats))

    return write


def mxfp4(*, scale: float = 0, dtype: torch.dtype = torch.uint8) -> Writer:
    """compressed-tensors, mxfp4-pack-quantized."""

    @overflowing
    def write(rows: int, inputs: int, random: np.random.Generator) -> Stored:
        codes = random.integers(0, 256, (rows, -(-inputs // 2))).astype(np.uint8)
        low, high = (121, 125) if scale else (0, 255)
        exponents = random.integers(low, high, (rows, -(-inputs // 32))).astype(np.uint8)
        exponents[0, 0] = low
        tensors = {
            "weight_packed": torch.from_numpy(codes),
            "weight_scale": torch.from_numpy(exponents).view(dtype),
        }
        floats = np.empty((rows, inputs), np.float32)
        for o in range(rows):
            for i in range(inputs):
                number = e2m1(codes[o, i // 2] >> 4 * (i % 2) & 15)
                floats[o, i] = One(number) * One(math.ldexp(1.0, int(exponents[o, i // 32]) - 127))
        return Stored(tensors, torch.from_numpy(floats))

    return write


def nvfp4(unit: float, *, modelopt: bool, scale: float = 0) -> Writer:
    """NVFP4 of compressed-tensors, whose unit divides, or of ModelOpt, whose unit multiplies."""

    @overflowing
    def write(rows: int, inputs: int, random: np.random.Generator) -> Stored:
        codes = random.integers(0, 256, (rows, -(-inputs // 2))).astype(np.uint8)
        low, high = (48, 64) if scale else (0, 127)
        scales = random.integers(low, high, (rows, -(-inputs // 16))).astype(np.uint8)
        own_unit = One(unit * (random.uniform(0.5, 2) if scale else 1))
        tensors = {
            "weight" if modelopt else "weight_packed": torch.from_numpy(codes),
            "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
            "weight_scale_2" if modelopt else "weight_global_scale": torch.tensor(
                own_unit if modelopt else [own_unit]
            ),
        }
        floats = np.empty((rows, inputs), np.float32)
        for o in range(rows):
            for i in range(inputs):
                number = e2m1(codes[o, i // 2] >> 4 * (i % 2) & 15)
                stored = One(e4m3(int(scales[o, i // 16])))
                floats[o, i] = One(number) * (stored * own_unit if modelopt else stored / own_unit)
        return Stored(tensors, torch.from_numpy(floats))

    return write


def int_group(bits: int, group: int | None, *, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    """Return the weights of one of compressed-tensors' config_groups, of integers."""
    strategy = {None: "tensor", -1: "channel"}.get(group, "group")
    size = {"group_size": group} if strategy == "group" else {}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, **size, **more}


def float_group(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    """Return the weights of one of compressed-tensors' config_groups, of floats."""
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, **more}


def compressed(stored: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors with one group."""
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights)}},
        "ignore": ["lm_head"],
        **more,
    }


def quantised_checkpoint(
    source: Path,
    directory: Path,
    config: Mapping[str, Any],
    write: Callable[[str], Writer | None],
    extra: Mapping[str, Tensor] | None = None,
) -> tuple[Path, Path]:
    """Write a checkpoint with some weights in codes, and one of the floats that they stand for.

    write: how to store a weight by its name; None: as it is.
    """
    of_codes, of_floats = directory / "codes", directory / "floats"
    random = np.random.default_rng(0)
    codes: dict[str, Tensor] = dict(extra or {})
    floats: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        is_stack = tensor.dim() == 3 and tensor.shape[1] > 1  # not the taps of a convolution
        writer = write(name) if tensor.dim() == 2 or is_stack else None
        if writer is None:
            codes[name] = floats[name] = tensor
            continue
        stored = _written(writer, tensor, random)
        module = name.removesuffix("weight")
        codes |= {f"{module}{last}": each for last, each in stored.tensors.items()}
        floats[name] = stored.floats
    for each, tensors in ((of_codes, codes), (of_floats, floats)):
        shutil.copytree(source, each)
        save_file(tensors, each / "model.safetensors", metadata={"format": "pt"})
    file = of_codes / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": dict(config)}))
    return of_codes, of_floats


def _written(writer: Writer, weight: Tensor, random: np.random.Generator) -> Stored:
    """Return a weight, or a stack of those of experts, as a writer stores it."""
    if weight.dim() == 2:
        return writer(*weight.shape, random)
    experts = [writer(*each.shape, random) for each in weight]
    tensors = {last: torch.stack([each.tensors[last] for each in experts]) for last in experts[0].tensors}
    return Stored(tensors, torch.stack([each.floats for each in experts]))
