"""Which kernels batches of a model launch, by their keys; nothing is compiled but what counting is tried on.

python -m tests.support.aot_variants        # JSON; needs TRITON_INTERPRET unset
"""

import collections
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch

from paged import EngineConfig, SamplingParams
from paged.architectures.hf_config import read_config
from paged.checkpoints.model_directory import resolve
from paged.kernels.backend import load_kernels
from paged.kernels.checks import TrustedContents
from paged.kernels.gpu.target import listening
from paged.requests.request import Request, RequestInputs
from paged.runner import load
from paged.runner.model_runner import ModelRunner
from paged.runner.warm_up import warm_up
from tests.support.absent_gpu import DATA_CENTER_TARGETS, always, compiling
from tests.support.kernel_launches import (
    CODED_CASES,
    EXPERTS_CASES,
    NUM_CODED_ROWS,
    NUM_EXPERTS_ROWS,
    experts_of,
    launch_attention,
    launch_coded_linear,
    launch_coded_rows,
    launch_grouped_linear,
    launch_others,
    launch_rotary_store_kv,
    launch_routing,
    launch_sampling,
    packed_of,
)


def count_compiled(target: str) -> tuple[int, int]:
    """Count the kernels that were compiled, and the calls of a listener."""
    told: list[None] = []
    with compiling(target) as launches, listening(lambda: told.append(None)):
        launch_others(load_kernels("triton"), torch.bfloat16)
    return len({launch.key for launch in launches if launch.binary}), len(told)


# Heads, and what else attention needs, of models: num_heads, num_kv_heads, head_dim, and for each kind of
# layer its options.
MODELS: dict[str, tuple[int, int, int, list[dict[str, Any]]]] = {
    "GQA": (28, 4, 128, [{}]),
    "MHA": (32, 32, 96, [{}]),
    "MQA": (32, 1, 256, [{}]),
    "window and full": (64, 8, 64, [{"window": 128, "sinks": True}, {"sinks": True}]),
    "int8 cache": (32, 8, 128, [{"cache": "int8"}]),
}

CODED_WEIGHT = packed_of(CODED_CASES[0])
EXPERTS_WEIGHT = experts_of(EXPERTS_CASES[0])


def count_variants(target: str, model: str) -> dict[str, int]:
    """Count the binaries that each kernel needs for batches of every awkward size of one model."""
    kernels = load_kernels("triton")
    num_heads, num_kv_heads, head_dim, layers = MODELS[model]
    keys = collections.defaultdict(set)
    with compiling(target, always) as launches:
        for num_tokens, num_seqs, max_blocks in [(1, 1, 33), (16, 2, 48), (17, 16, 1024), (3, 3, 1001)]:
            sizes = {"num_tokens": num_tokens, "num_seqs": num_seqs, "max_blocks": max_blocks}
            for options in layers:
                group = num_heads // num_kv_heads
                launch_attention(kernels, head_dim, group, torch.bfloat16, 64, **options, **sizes)
                heads = num_heads, num_kv_heads, head_dim
                cache = options.get("cache")
                launch_rotary_store_kv(kernels, *heads, torch.bfloat16, "", num_tokens, cache_dtype=cache)
            launch_others(kernels, torch.bfloat16, num_tokens)
            launch_coded_linear(CODED_CASES[0], CODED_WEIGHT, num_tokens)
            launch_coded_rows(CODED_CASES[0], CODED_WEIGHT, num_tokens)
            launch_routing(kernels, torch.bfloat16, num_tokens)
            launch_grouped_linear(EXPERTS_CASES[0], EXPERTS_WEIGHT, num_tokens)
            for filters in [(), ("top_k",), ("min_p", "top_p"), ("top_n_sigma", "typical_p")]:
                launch_sampling(*filters, num_rows=num_tokens)
    for launch in launches:
        keys[launch.kernel].add(launch.key)
    return {kernel: len(found) for kernel, found in keys.items()}


def count_products(target: str, launches: Sequence[Callable[[], None]]) -> tuple[int, int]:
    """Count the kernels that are compiled for a weight by its first product, and by all others."""
    told: list[None] = []
    counts = []
    with compiling(target, always), listening(lambda: told.append(None)):
        for launch in launches:
            launch()
            counts.append(len(told))
    return counts[0], counts[-1] - counts[0]


CODED_LAUNCHES = [
    partial(launch_coded_linear, CODED_CASES[1], packed_of(CODED_CASES[1]), num_rows)
    for num_rows in NUM_CODED_ROWS.values()
]
EXPERTS_LAUNCHES = [
    partial(launch_grouped_linear, EXPERTS_CASES[1], experts_of(EXPERTS_CASES[1]), num_rows)
    for num_rows in NUM_EXPERTS_ROWS.values()
]


WAYS_TO_SAMPLE = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=5, frequency_penalty=0.5),
    SamplingParams(min_p=0.1, top_n_sigma=2.0),
)


_empty = torch.empty


def zeros(*size: Any, **options: Any) -> torch.Tensor:
    """Allocate as torch.empty, and clear."""
    return _empty(*size, **options).zero_()


def count_warm_up(target: str) -> dict[str, Any]:
    """Count the kernels that an engine's warm-up compiles, and list those that batches need beyond them."""
    config = EngineConfig(model="demo", device="cpu", dtype="bfloat16", num_blocks=200)
    directory = resolve("demo")
    load.resolve_backend = lambda *_: "triton"
    # What kernels would write is 0, and not any token.
    with compiling(target, always) as launches, mock.patch("torch.empty", zeros):
        runner = ModelRunner(config, read_config(directory), directory)
        num_compiled = warm_up(runner)
        ready = {launch.key for launch in launches}
        manager = runner.sizes.new_block_manager(200)
        scheduler = runner.sizes.new_scheduler(manager)
        for i, prompt_len in enumerate([1, 2, 3, 700, 17, 640]):
            params = dataclasses.replace(WAYS_TO_SAMPLE[i % len(WAYS_TO_SAMPLE)], max_tokens=3)
            inputs = RequestInputs(
                prompt_token_ids=[i] * prompt_len, params=params, max_total_tokens=prompt_len + 3
            )
            scheduler.add(Request(inputs))
            for _ in range(2):
                schedule = scheduler.schedule()
                schedule.copies.append((0, 1))
                tokens = runner.execute(schedule).tokens
                scheduler.update(schedule, [0] * len(tokens))  # what is not launched computes nothing
    later = [launch.kernel for launch in launches if launch.key not in ready]
    return {"num_compiled": num_compiled, "ready": len(ready), "later": later}


def main() -> None:
    """Print what is found for every target."""
    found = {
        target: {
            "compiled": count_compiled(target),
            "variants": {model: count_variants(target, model) for model in MODELS},
            "coded": count_products(target, CODED_LAUNCHES),
            "experts": count_products(target, EXPERTS_LAUNCHES),
            "warm_up": count_warm_up(target),
        }
        for target in DATA_CENTER_TARGETS
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    with TrustedContents():  # the tensors hold nothing
        main()
