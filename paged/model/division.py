"""Into how many shards a model can be divided."""

from __future__ import annotations

from ..architectures.config import ModelConfig
from ..architectures.spec import ExpertsSpec
from ..base.errors import DivisionError


def check_shards(config: ModelConfig, count: int) -> None:
    """Check that `count` shards can divide a model. Raises DivisionError, which lists the valid counts."""
    if count == 1:
        return
    if any(isinstance(part, ExpertsSpec) for layer in config.layers for part in layer.feed_forwards):
        raise DivisionError(
            f"tensor_parallel_size {count} is for dense models, and {config.architecture} has experts; "
            "pipeline_parallel_size divides its layers"
        )
    obstacle = _obstacle(config, count)
    if obstacle is not None:
        fitting = [n for n in range(2, config.num_heads + 1) if _obstacle(config, n) is None]
        listed = "no number of shards does"
        if fitting:
            listed = f"these numbers do: {', '.join(map(str, fitting))}"
        raise DivisionError(f"tensor_parallel_size {count} does not divide {obstacle}; {listed}")


def _obstacle(config: ModelConfig, count: int) -> str | None:
    """Return what of a model so many shards do not divide, if anything.

    They need not divide the vocabulary: see `Shard.tokens`.
    """
    for attention in config.attentions.values():
        num_heads = attention.num_heads
        num_kv_heads = attention.kv.num_kv_heads
        if num_heads % count:
            return f"the {num_heads} query heads"
        if max(count, num_kv_heads) % min(count, num_kv_heads):
            return f"the {num_kv_heads} KV heads"
    for state in config.states.values():
        if state.num_heads % count:
            return f"the {state.num_heads} value heads of states"
        if state.num_heads and max(count, state.num_key_heads) % min(count, state.num_key_heads):
            return f"the {state.num_key_heads} key heads of states"
    for layer in config.layers:
        for part in layer.feed_forwards:
            if part.size % count:
                return f"inner size {part.size}"
    if config.hidden_size % count:
        return f"hidden_size {config.hidden_size}"
    if config.layer_inputs is not None and config.layer_inputs.size % count:
        return f"the {config.layer_inputs.size} inputs of a layer"
    if config.vocab_size < count**2:
        return f"vocab_size {config.vocab_size}"  # the last shard might have no token
    return None
