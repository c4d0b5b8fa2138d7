"""`paged models`: list the native architectures. `paged warmup`: compile the kernels that a model needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..architectures.families.multimodal import NATIVE
from ..options.config import EngineConfig
from . import common
from .options import with_options

if TYPE_CHECKING:
    from ..kernels.backend import Kernels

# The options that decide what is compiled.
KERNEL_OPTIONS = ["dtype", "kv_cache_dtype", "device", "block_size", "max_model_len", "attention_backend"]


def models() -> int:
    """List the native architectures, and the models of each."""
    width = max(map(len, NATIVE))
    for name, known in NATIVE.items():
        print(f"{name:{width}}  {known.models}")
    return 0


@with_options((EngineConfig, KERNEL_OPTIONS))
def warmup(
    model: common.ModelArgument = None,
    model_option: common.ModelOption = None,
    **options: Any,
) -> int:
    """Compile the kernels a model needs, so that engines start at once; they are kept on disk."""
    given = common.driver_options(common.one_model(model, model_option), options)
    engine = common.start(given | {"skip_tokenizer_init": True})
    print(_compiled(engine.runner.model.kernels, engine.num_kernels))
    return 0


def _compiled(kernels: Kernels, num_kernels: int) -> str:
    """Describe what was compiled. num_kernels: those that the warm-up compiled or found on disk."""
    if kernels.name == "numba":
        from ..kernels.cpu.compiling import report

        return report().describe()
    if kernels.compiles_at_launch:
        return f"{num_kernels} kernels ready"
    return f"nothing to compile: attention_backend {kernels.name!r} has no kernels of its own"
