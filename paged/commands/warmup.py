"""`paged warmup`: compile kernels and pack weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..options.config import EngineConfig
from . import common
from .options import with_options

if TYPE_CHECKING:
    from ..kernels.operations import Kernels

# The options that decide what is compiled, and how weights are packed.
WARMUP_OPTIONS = [
    *("dtype", "kv_cache_dtype", "device", "block_size", "max_model_len", "attention_backend"),
    *("revision", "quantization", "deterministic", "speculative_config", "num_threads"),
    *("pipeline_parallel_size", "tensor_parallel_size", "pipeline_layers"),
    *("weights_cache", "verify_weights_cache"),
]


@with_options((EngineConfig, WARMUP_OPTIONS))
def warmup(
    model: common.ModelArgument = None,
    model_option: common.ModelOption = None,
    **options: Any,
) -> int:
    """Compile the kernels and pack the weights of a model, so that later engines start at once.

    Both are stored on disk; `paged cache` lists the packed weights.
    """
    given = common.driver_options(common.one_model(model, model_option), options)
    engine = common.start(given | {"skip_tokenizer_init": True})
    print(_compiled(engine.runner.model.kernels, engine.num_kernels))
    paths = [*engine.runner.wait_for_kept_weights()]
    if paths and engine.config.num_ranks > 1:
        from ..ranks.keep import keep_parts

        engine.shutdown()  # its ranks would write the same
        paths = [*keep_parts(engine.config)]
    for path in paths:
        print(f"packed weights in {path}" if path is not None else "packed weights could not be kept")
    return 0 if all(path is not None for path in paths) else common.EXIT_FAILED


def _compiled(kernels: Kernels, num_kernels: int) -> str:
    """Describe what was compiled. num_kernels: those that the warm-up compiled or found on disk."""
    if kernels.name == "numba":
        from ..kernels.cpu.compiling import report

        return report().describe()
    if kernels.compiles_at_launch:
        return f"{num_kernels} kernels ready"
    return f"nothing to compile: attention_backend {kernels.name!r} has no kernels of its own"
