"""Which kernels an engine reaches, and for which kinds of numbers the largest of them are compiled.

All kinds together take most of a first start; see `launch.code_cache` for the names of variants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ..steps import Needs
from .formats import (
    BF12,
    BFLOAT16,
    BFLOAT16_PAIRS,
    CODES4,
    CODES8,
    E4M3,
    FLOAT16,
    FLOAT32,
    FORMATS,
    INT8,
    KINDS,
    PAIRS,
    UNPACKED,
)
from .launch.code_cache import SECONDS, parts, variant
from .target import CPU_HAS_TILES, HAS_DOT, HAS_TILES, LANES

ATTENTION_KERNEL = "attention.kernel.attend"  # by kinds of products: see `attention_kinds`
LINEAR_KERNEL = "linear.linear.linear"  # by formats of weights: see `weight_kinds`
ROTARY_KERNEL = "rows.rotary_store_kv.rotary_store_kv"  # by the kinds of K and V, computed and cached

_compiled: dict[str, frozenset[int]] = {}  # of each kernel; others are compiled for all kinds


def compile_only(names: Iterable[str]) -> None:
    """Restrict this process to compiling these variants. Call this before `compiled` is imported."""
    _compiled.update((kernel, kinds) for kernel, kinds in map(parts, names) if kinds is not None)


def compiled_name(kernel: str) -> str:
    """Return the name of the kernel or variant that this process compiles for a kernel."""
    return variant(kernel, _compiled.get(kernel))


def among(kernel: str, functions: Mapping[int, Any]) -> dict[int, Any]:
    """Return the functions, given by kind, for the kinds with which a kernel is compiled here."""
    kinds = _compiled.get(kernel)
    return {kind: own for kind, own in functions.items() if kinds is None or kind in kinds}


def compiles(kernel: str, *kinds: int) -> bool:
    """Return whether a kernel is compiled here for any of these kinds."""
    return bool(among(kernel, dict.fromkeys(kinds)))


def attention_kinds(query_kind: int, cache_kind: int, dims: Iterable[tuple[int, int]]) -> frozenset[int]:
    """Return the kinds of number in attention's products, for heads with these dimensions of K and V.

    The kind is the cache's, or pairs of bfloat16. With AMX all kinds are returned, because its code serves
    several.
    """
    if CPU_HAS_TILES:
        return frozenset((*KINDS.values(), BFLOAT16_PAIRS))
    return frozenset(
        BFLOAT16_PAIRS if _in_pairs(query_kind, cache_kind, *own) else cache_kind for own in dims
    )


def _in_pairs(query_kind: int, cache_kind: int, key_dim: int, value_dim: int) -> bool:
    """Return what `compiled.attention.units` chooses without AMX."""
    is_whole = key_dim % LANES == 0 and key_dim >= 2 * LANES and value_dim >= LANES
    return HAS_DOT and is_whole and query_kind == cache_kind == BFLOAT16


def weight_kinds(kinds: Iterable[int]) -> frozenset[int]:
    """Return the formats among `kinds` that this CPU supports, and the formats that they are unpacked to."""
    found = [kind for kind in kinds if FORMATS[kind].is_supported]
    return frozenset((*found, *(UNPACKED[kind] for kind in found)))


# The kernels of each operation: most have one, of the operation's name.
_KERNELS = {
    **{name.rpartition(".")[2]: (name,) for name in SECONDS if name.startswith(("rows.", "states."))},
    "apply_penalties": ("sampling.penalties.penalties",),
    "greedy_of_allowed": ("sampling.masks.choose",),
    "mask_logits": ("sampling.masks.mask",),
    "paged_attention": (ATTENTION_KERNEL, "attention.kernel.merge"),
    "rms_norm_into": ("rows.rms_norm.rms_norm",),
    "sample_tokens": ("sampling.sample_tokens.sample",),
    "step_recorder": ("launch.graph.graph",),
    "token_logprobs": ("sampling.token_logprobs.logprobs",),
}
# Whatever the model: threads, products, and lookups in panels.
_ALWAYS = (
    "launch.threads.help",
    "launch.threads.launch",
    "launch.threads.look",
    "linear.amx_linear.tiles",
    LINEAR_KERNEL,
    "rows.take_rows.take_panel_rows",
)
_NUMBERS = {torch.bfloat16: (BFLOAT16, BF12), torch.float16: (FLOAT16,)}


def kernels_for(needs: Needs) -> tuple[set[str], dict[str, frozenset[int]]]:
    """Return the kernels that an engine may launch, and the kinds for each kernel with variants."""
    names = {name for operation in needs.operations for name in _KERNELS.get(operation, ())}
    names.update(_ALWAYS, _packers(needs))
    dtype, cache_dtype = KINDS[needs.dtype], KINDS[needs.cache_dtype]
    attention = attention_kinds(dtype, cache_dtype, needs.head_dims)
    if needs.tower_head_dim is not None:
        attention |= attention_kinds(dtype, dtype, [(needs.tower_head_dim, needs.tower_head_dim)])
    kinds = {
        ATTENTION_KERNEL: attention,
        LINEAR_KERNEL: weight_kinds(_formats(needs)),
        ROTARY_KERNEL: frozenset((dtype, cache_dtype)),
    }
    return names & SECONDS.keys(), {name: own for name, own in kinds.items() if name in names}


def _packers(needs: Needs) -> Iterator[str]:
    """Yield the kernels that weights are packed with."""
    yield "linear.pack_bf12.pack_bf12"
    if needs.has_codes or needs.quantization == "int4":
        yield "linear.pack_codes.pack_codes"
    if needs.quantization == "int4":
        yield "linear.int4_search.best_fit"


def _formats(needs: Needs) -> Iterator[int]:
    """Yield the formats that weights may be packed in; a few may turn out to be in none of them."""
    numbers = [*_NUMBERS.get(needs.dtype, (FLOAT32, FLOAT16, BFLOAT16, BF12))]
    if needs.quantization is not None:
        numbers.append(INT8)
    if needs.quantization == "int4":
        numbers.append(CODES4)
    if needs.has_codes:
        numbers += CODES4, CODES8, E4M3
    in_pairs = HAS_DOT and needs.dtype == torch.bfloat16
    for kind in numbers:
        if not in_pairs or kind not in PAIRS:
            yield kind
        if (in_pairs or (HAS_TILES and needs.dtype == torch.float32)) and kind in PAIRS:
            yield PAIRS[kind]
