"""Whether two shapes cost the same: what they store and compute, counted from their checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

from safetensors import safe_open

from benchmarks.common import Workload
from benchmarks.peers.limit import workload_cost
from benchmarks.peers.report import Row
from paged.simulate.model import read_model


def counts(name: str, directory: str, workload: Workload, dtype: str) -> Row:
    """Return the numbers of a checkpoint, and what any engine must move and compute for a workload."""
    shapes = []
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            shapes += [tensors.get_slice(tensor).get_shape() for tensor in tensors.keys()]  # noqa: SIM118
    model = read_model(directory)
    prompt_lens = [*map(len, workload.prompts)]
    moved, flops = workload_cost(model, dtype, prompt_lens, workload.max_tokens)
    return {
        "shape": name,
        "weights of matrices": sum(math.prod(shape) for shape in shapes if len(shape) > 1),
        "weights of norms": sum(math.prod(shape) for shape in shapes if len(shape) == 1),
        "KV numbers per token": sum(sum(shape.part_sizes) for shape in model.kv_shapes.values()),
        "bytes of the workload": int(moved),
        "FLOPs of the workload": flops,
    }


def assert_equal_cost(ours: Row, twin: Row) -> None:
    """Assert that all counts but those of names and norms are equal."""
    for key in ours.keys() - {"shape", "weights of norms"}:
        assert ours[key] == twin[key], (
            f"{key}: {ours[key]} of {ours['shape']}, {twin[key]} of {twin['shape']}"
        )


def assert_within_windows(directory: str, longest: int) -> None:
    """Assert that no sliding window hides a token, so that all layers attend to as much as full ones."""
    windows = [group.window for group in read_model(directory).layer_groups if group.window is not None]
    assert longest <= min(windows, default=longest), f"{longest} tokens, and windows of {sorted({*windows})}"
