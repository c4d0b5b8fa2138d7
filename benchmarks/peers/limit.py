"""The least time of a workload on any engine: its bytes at the bandwidth, its FLOPs at the peak."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.timing import Limits, measure_limits
from paged.architectures.config import ModelConfig
from paged.device.devices import cpu_has_bfloat16

# Bytes of a weight, without the scales of quantised ones. Checkpoints are in bfloat16, and weights need not
# be wider for computing in float32. Weights in fewer bits without loss (as on our CPU backend) may exceed the
# limit.
WEIGHT_BYTES = {
    "float32": 2.0,
    "bfloat16": 2.0,
    "int8": 1.0,
    "Q8_0": 1.0,
    "int4": 0.5,
    "Q4_0": 0.5,
    "Q4_K_M": 0.5,
}


def workload_cost(
    model: ModelConfig,
    dtype: str,
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    common_prefix: int = 0,
) -> tuple[float, int]:
    """Return the least (bytes, FLOPs) of all requests at once, by any schedule.

    Tokens of one request are sequential, so the weights are read as often as the longest output has tokens.
    KV is read once for every step of a request, that of a common prefix once for all requests. FLOPs are 2
    for each weight and token, and 4 head_dim for each head and pair of query and key. In the last layer, all
    tokens of a prompt but the last need only K and V. A common prefix is computed once. The embedding table,
    norms and activations are left out.
    """
    own_lens = [n - common_prefix for n in prompt_lens]
    num_steps = max(output_lens)
    # The last token of an output is never computed.
    decode_lens = [n - 1 for n in output_lens]
    num_tokens = common_prefix + sum(own_lens) + sum(decode_lens)
    pairs = unread = _pairs(0, common_prefix)  # by the tokens before the last of a prompt
    kv_read = common_prefix * num_steps
    for own, decodes in zip(own_lens, decode_lens, strict=True):
        pairs += _pairs(common_prefix, own + decodes)
        unread += _pairs(common_prefix, own - 1)
        kv_read += own + _pairs(own, decodes)  # its own part: once with the prompt, once for each decode
    head = model.vocab_size * model.hidden_size
    last = next(reversed(model.attentions.values()))
    last_kv = sum(last.kv.part_sizes)
    kv_bytes_per_token = sum(sum(shape.part_sizes) for shape in model.kv_shapes.values())
    kv_bytes_per_token *= 4 if dtype == "float32" else 2
    read = model.num_read_layer_params(num_tokens / num_steps)
    moved = num_steps * (read + head) * WEIGHT_BYTES[dtype]
    moved += (kv_read + num_tokens) * kv_bytes_per_token
    flops = 2 * model.num_active_layer_params * num_tokens + 2 * head * sum(output_lens)
    flops += 2 * model.num_attention_dims * pairs
    num_unread = num_tokens - sum(output_lens)
    last_layer = model.num_active_layer_params // model.num_layers
    last_layer -= model.hidden_size * last_kv
    flops -= 2 * last_layer * num_unread + 4 * last.num_heads * last.kv.key_dim * unread
    return moved, flops


def _pairs(context: int, num_new: int) -> int:
    """Count the (query, visible key) pairs of new tokens after a context: also the keys that decodes read."""
    return num_new * context + num_new * (num_new + 1) // 2


def machine_limits(*, tiny: bool = False) -> dict[str, Limits]:
    """Measure this CPU, by precision. Narrower precisions may compute in whichever is fastest."""
    cpu = torch.device("cpu")
    wide = narrow = measure_limits(cpu, torch.float32, tiny=tiny)
    if cpu_has_bfloat16():  # elsewhere it is emulated, and measuring it would take minutes
        narrow = measure_limits(cpu, torch.bfloat16, tiny=tiny)
    bandwidth = max(wide.bytes_per_s, narrow.bytes_per_s)
    half = Limits(bandwidth, max(wide.flops, narrow.flops))
    # A float32 input is the sum of three bfloat16 numbers; a weight of the checkpoint is one.
    whole = Limits(bandwidth, max(wide.flops, narrow.flops / 3))
    return {dtype: whole if dtype == "float32" else half for dtype in WEIGHT_BYTES}
