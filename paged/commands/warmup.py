"""`paged warmup`: compile the kernels that a model needs ahead of time."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..config import EngineConfig
from . import common
from .options import with_options

# The options that decide what is compiled.
KERNELS = ["dtype", "kv_cache_dtype", "device", "block_size", "max_model_len", "attention_backend"]


@with_options((EngineConfig, KERNELS))
def warmup(
    model: Annotated[str, typer.Argument(help="As in generate.")] = "demo",
    **options: Any,
) -> int:
    """Compile the kernels a model needs, so that engines start at once; Triton keeps them on disk."""
    engine = common.start(common.engine_options(model, options) | {"skip_tokenizer_init": True})
    num_kernels = engine.num_kernels
    print(f"{num_kernels} kernels ready" if num_kernels else "nothing to compile: no Triton kernels run here")
    return 0
