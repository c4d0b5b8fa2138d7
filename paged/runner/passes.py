"""One model's passes over batches: what makes the batches, records the steps and runs them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..architectures.config import ModelConfig
from ..kernels.checks import in_debug_mode
from ..model.batch import Batch
from ..model.cache.kv_cache import KVCache
from ..model.stream import Stream, tensors_of
from .batches.batches import Batches
from .batches.host import HostBatches
from .sizes import Sizes

if TYPE_CHECKING:
    from ..model.model import Model
    from .step_graphs import StepGraphs  # needs numba

logger = logging.getLogger(__name__)


def new_batches(
    sizes: Sizes, config: ModelConfig, model: Model, device: torch.device, num_in_flight: int = 1
) -> Batches[Any]:
    """Return the maker of a model's batches.

    config: the sizes' config after `for_context`.
    num_in_flight: maximum number of steps in flight.
    """
    options: dict[str, Any] = {
        "num_groups": len(sizes.layout.groups),
        "max_num_seqs": sizes.config.num_seats,
        "with_rope_lens": config.rope.type == "dynamic",
        "long_context": config.long_context,
        "with_seats": bool(config.states),
    }
    if sizes.num_run_places:
        from .states import run_numbers

        options["run_numbers"] = run_numbers
    if (unpack_step := model.kernels.unpack_step) is None:
        return HostBatches(sizes.block_size, device, num_kept=num_in_flight, **options)
    from .batches.seats import SeatedBatches

    options |= {"max_model_len": sizes.max_model_len, "split_keys": model.kernels.split_keys}
    batches = SeatedBatches(unpack_step, sizes.block_size, device, max_run=sizes.max_run, **options)
    if sizes.config.enable_lora:
        batches.take_adapters()
    if config.vision is not None and config.vision.sections is not None:
        batches.take_rope_offsets()
    return batches


def new_graphs(sizes: Sizes, model: Model) -> StepGraphs | None:
    """Return the store of recorded steps; None if steps are not recorded. Log why, if that is unexpected."""
    # A recorded step skips the checks of debug mode.
    step_recorder = model.kernels.step_recorder
    if step_recorder is None or sizes.config.enforce_eager or in_debug_mode():
        return None
    layout = sizes.layout
    num_kv_heads = [{layout.shapes[layer].num_kv_heads for layer in group.layers} for group in layout.groups]
    obstacle = model.obstacle_to_recording
    if any(len(each) > 1 for each in num_kv_heads):
        obstacle = "layers of a draft model with other numbers of KV heads share a block table"
    if obstacle:
        logger.warning(
            "steps are not recorded, because %s: those of few tokens take up to five times as long",
            obstacle,
        )
        return None
    from .step_graphs import StepGraphs

    return StepGraphs(step_recorder(sizes.num_heads, [next(iter(each)) for each in num_kv_heads]))


def compute(
    model: Model, graphs: StepGraphs | None, batch: Batch, kv_cache: KVCache, stream: Stream | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None]:
    """Run a model, or its last part, on a batch.

    stream: the output of the previous part; None if there is none.

    Returns the logits to sample from; each row's greedy token and its logit, if a recorded step computed
    them; and the hidden states for reports, if any.
    """
    given = tensors_of(stream)
    if graphs is None or not batch.is_plain:
        hidden = model.forward(batch, kv_cache, stream)
    elif batch.is_decode and batch.num_tokens <= graphs.max_decodes:

        def next_logits(batch: Batch, kv_cache: KVCache) -> tuple[Tensor, ...]:
            logits = model.logits(model.forward(batch, kv_cache, stream))
            return logits, *model.kernels.greedy(logits)

        logits, tokens, highest = graphs.run(next_logits, batch, kv_cache, given)
        return logits, (tokens, highest), None
    else:  # record only the part whose shapes do not depend on the number of output rows

        def last_queries(batch: Batch, kv_cache: KVCache) -> tuple[Tensor, ...]:
            return model.compute_kv(batch, kv_cache, stream)

        state = graphs.run(last_queries, batch, kv_cache, given)
        hidden = model.attend_last(state, batch, kv_cache)
    num_logits = batch.num_logits
    logits = model.logits(hidden[:num_logits]) if num_logits else hidden
    return logits, None, hidden[num_logits:] if batch.num_output_rows > num_logits else None


def compute_part(
    model: Model, graphs: StepGraphs | None, batch: Batch, kv_cache: KVCache, stream: Stream | None
) -> tuple[Tensor, ...]:
    """Run a part of a model that is not the last. Return the tensors of its output stream.

    The next step may overwrite their memory.
    """

    def tensors(batch: Batch, kv_cache: KVCache) -> tuple[Tensor, ...]:
        return tensors_of(model.compute_part(batch, kv_cache, stream))

    if graphs is None or not batch.is_plain:
        return tensors(batch, kv_cache)
    return graphs.run(tensors, batch, kv_cache, tensors_of(stream))
