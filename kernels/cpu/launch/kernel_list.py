"""The kernels of the CPU, and which of them are not compiled yet."""

from ..target import HAS_TILES
from . import code_cache

# All kernels, and the seconds that each takes with all cores busy. Those of AMX are compiled where it is.
SECONDS = {
    "attention.kernel.attend": 20.0,
    "attention.kernel.merge": 0.5,
    "launch.graph.graph": 0.5,
    "launch.threads.help": 0.5,
    "launch.threads.launch": 0.5,
    "launch.threads.look": 0.5,
    "linear.amx_linear.tiles": 4.0,
    "linear.int4_search.best_fit": 0.5,
    "linear.linear.linear": 10.0,
    "linear.pack_bf12.pack_bf12": 0.5,
    "linear.pack_codes.pack_codes": 0.5,
    "rows.add.add": 0.5,
    "rows.clamped_swiglu.clamped_swiglu": 0.5,
    "rows.gelu_and_mul.gelu": 0.5,
    "rows.gelu_and_mul.gelu_and_mul": 0.5,
    "rows.greedy.greedy": 0.5,
    "rows.layer_norm.layer_norm": 0.5,
    "rows.rms_norm.rms_norm": 1.0,
    "rows.rotary_store_kv.rotary_store_kv": 4.0,
    "rows.route.route": 0.5,
    "rows.scale_and_cap.scale_and_cap": 0.5,
    "rows.scale_rows.scale_rows": 0.5,
    "rows.silu_and_mul.silu_and_mul": 0.5,
    "rows.sort_by_expert.sort_by_expert": 0.5,
    "rows.sum_experts.sum_experts": 0.5,
    "rows.take_rows.take_panel_rows": 0.5,
    "rows.take_rows.take_rows": 0.5,
    "sampling.masks.choose": 0.5,
    "sampling.masks.mask": 0.5,
    "sampling.penalties.penalties": 0.5,
    "sampling.sample_tokens.sample": 5.0,
    "sampling.token_logprobs.logprobs": 0.5,
}
if not HAS_TILES:
    del SECONDS["linear.amx_linear.tiles"]


def missing_kernels() -> list[str]:
    """Return the kernels that are not in the cache; those that take longest come first."""
    missing = [name for name in SECONDS if code_cache.directory_of(name) is None]
    return sorted(missing, key=SECONDS.__getitem__, reverse=True)
