"""How many numbers a token has within a layer: for plans, before any memory is allocated."""

from __future__ import annotations

from .spec import LayerSpec


def mixer_numbers(layer: LayerSpec) -> tuple[int, int]:
    """Return the numbers per token inside a layer's attention or state, and the numbers per token of its
    output.

    For a layer with attention and a state, the maximum of both counts. For a layer with neither, the numbers
    are 0.
    """
    numbers = out = 0
    state = layer.state
    if state is not None:
        out = state.columns if state.kind == "conv" else state.num_values
        numbers = 2 * (state.columns + 2 * out + 2 * state.num_heads)
    attention = layer.attention
    if attention is not None:
        query = attention.num_heads * attention.kv.key_dim
        own = 2 * (query + sum(attention.kv.part_sizes)) + query * attention.gate
        numbers = max(numbers, own)
        out = max(out, attention.num_heads * attention.kv.value_dim)
    return numbers, out
