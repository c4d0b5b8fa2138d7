"""How many numbers a token has within a layer: for plans, before any memory is allocated."""

from __future__ import annotations

from .spec import LayerSpec


def mixer_numbers(layer: LayerSpec) -> tuple[int, int]:
    """Return the numbers per token inside a layer's attention or state, and the numbers per token of its
    output.
    """
    state = layer.state
    if state is not None:
        out = state.columns if state.kind == "conv" else state.num_heads * state.value_dim
        return 2 * (state.columns + 2 * out + 2 * state.num_heads), out
    attention = layer.attention
    assert attention is not None, "a layer has attention or a state"
    query = attention.num_heads * attention.kv.key_dim
    numbers = 2 * (query + sum(attention.kv.part_sizes)) + query * attention.gate
    return numbers, attention.num_heads * attention.kv.value_dim
