"""The definition of every operation in plain torch: the oracle that all backends are tested against.

Operations stand in the order of `operations.Kernels`, each followed by the functions that it alone needs.
They loop over sequences, compute in float32 (float64 for float64 inputs) and cast to the dtype of the input.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import WORD_BITS
from .attention_options import AttentionOptions, AttentionPlan
from .checks import QUANTIZED_DTYPES
from .gumbel import gumbel_noise
from .routing import ExpertRows, RoutingOptions


def upcast(x: Tensor) -> Tensor:
    """Convert to float32. float64 stays float64."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def take_rows(table: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the rows i64[m] of a table [n, size]: [m, size], stored in `out` if given."""
    return torch.index_select(table, 0, indices, out=out)


def rms_norm(
    x: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
    *,
    unit_offset: bool = False,
) -> Tensor:  # [..., size]
    """Return weight * x / sqrt(mean(x²) + eps) of x, or of residual += x if given (Zhang & Sennrich 2019).

    The normalised value is rounded to x's dtype before the weight multiplies it, as in HF's LlamaRMSNorm.
    With unit_offset, 1 + weight multiplies, and only the product is rounded, as in HF's Gemma3RMSNorm.
    """
    if residual is not None:
        x = residual.add_(x)
    x32 = upcast(x)
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1 + upcast(weight))).to(x.dtype).contiguous()
    return (normed.to(x.dtype) * weight).contiguous()


def rms_norm_into(
    x: Tensor,  # [num_tokens, size] or [num_tokens, num_heads, size]
    weight: Tensor,  # [size]
    eps: float,
    out: Tensor,  # like x, or x itself; written in place
    *,
    unit_offset: bool = False,
    add: bool = False,
) -> None:
    """Write the RMS norm of x into `out`; with `add`, add it and round only the sum. See `rms_norm`."""
    if add:
        x32 = upcast(x)
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        out.copy_(upcast(out) + normed * (upcast(weight) + unit_offset))
    else:
        out.copy_(rms_norm(x, weight, eps, unit_offset=unit_offset))


def layer_norm(
    x: Tensor,  # [num_rows, size]
    weight: Tensor,  # [size]
    bias: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
) -> Tensor:  # [num_rows, size]
    """Return weight * (x - mean(x)) / sqrt(var(x) + eps) + bias of x, or of residual += x if given.

    The layer norm of Ba et al. 2016. The variance is the mean of the squared differences. Only the result is
    rounded to x's dtype.
    """
    if residual is not None:
        x = residual.add_(x)
    centred = upcast(x) - upcast(x).mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normed * upcast(weight) + upcast(bias)).to(x.dtype).contiguous()


def rotary_store_kv(
    qkv: Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: query, key and value heads
    cos: Tensor,  # f32[num_tokens, head_dim // 2]
    sin: Tensor,  # f32[num_tokens, head_dim // 2]
    key_cache: Tensor | None,  # [num_blocks, block_size, num_kv_heads, head_dim], written in place
    value_cache: Tensor | None,  # like key_cache, written in place
    slot_mapping: Tensor | None,  # i64[num_tokens]
    *,
    query_norm_weight: Tensor | None = None,  # [head_dim]; both or neither, where K is rotated
    key_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    key_scales: Tensor | None = None,  # f32[num_blocks, num_kv_heads, block_size], of a quantised cache
    value_scales: Tensor | None = None,
    fixed_key_scales: Tensor | None = None,  # f32[num_kv_heads]; None: the scale follows from each head
    fixed_value_scales: Tensor | None = None,
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Normalise query and key heads if weights are given, rotate them, and store K and V in their slots.

    The query is changed in place and returned as a view of qkv. The key heads of qkv are undefined
    afterwards. Without caches, qkv has query heads only, and key_norm_weight is None.
    """
    num_kv_heads = 0 if key_cache is None else key_cache.shape[2]
    query, key, value = qkv.tensor_split(
        [qkv.shape[1] - 2 * num_kv_heads, qkv.shape[1] - num_kv_heads], dim=1
    )
    if query_norm_weight is not None:
        query.copy_(rms_norm(query, query_norm_weight, eps, unit_offset=unit_offset))
    if key_norm_weight is not None:
        key.copy_(rms_norm(key, key_norm_weight, eps, unit_offset=unit_offset))
    rotary(query, key, cos, sin)
    if key_cache is not None and value_cache is not None and slot_mapping is not None:
        store_kv(
            *(key, value, key_cache, value_cache, slot_mapping),
            *(key_scales, value_scales, fixed_key_scales, fixed_value_scales),
        )
    return query


def rotary(
    query: Tensor,  # [num_tokens, num_heads, head_dim], in place
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim], in place
    cos: Tensor,  # f32[num_tokens, head_dim // 2]
    sin: Tensor,  # f32[num_tokens, head_dim // 2]
) -> None:
    """Rotate the halves of every head: (x1 cos - x2 sin, x2 cos + x1 sin) (Su et al. 2021)."""
    for x in (query, key):
        x1, x2 = upcast(x).chunk(2, dim=-1)
        c = cos[:, None].to(x1.dtype)
        s = sin[:, None].to(x1.dtype)
        x.copy_(torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1))


def store_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # like key
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written in place
    value_cache: Tensor,  # like key_cache, written in place
    slot_mapping: Tensor,  # i64[num_tokens]
    key_scales: Tensor | None = None,  # f32[num_blocks, num_kv_heads, block_size], of a quantised cache
    value_scales: Tensor | None = None,
    fixed_key_scales: Tensor | None = None,  # f32[num_kv_heads]; None: the scale follows from each head
    fixed_value_scales: Tensor | None = None,
) -> None:
    """Store K and V of each new token in its slot. Quantise them if the cache has scales."""
    block_size = key_cache.shape[1]
    for x, cache, scales, fixed in (
        (key, key_cache, key_scales, fixed_key_scales),
        (value, value_cache, value_scales, fixed_value_scales),
    ):
        for token, slot in enumerate(slot_mapping.tolist()):
            block = slot // block_size
            place = slot % block_size
            if scales is None:
                cache[block, place] = x[token]
            else:
                cache[block, place], scales[block, :, place] = quantize(x[token], cache.dtype, fixed)


def quantize(
    x: Tensor,  # [..., size]
    dtype: torch.dtype,
    fixed: Tensor | None = None,  # f32 of the last dimensions but size
) -> tuple[Tensor, Tensor]:  # like x, f32[...]
    """Return x / scale in `dtype`, clamped to its range, and the scale.

    The scale is `fixed`, or else the largest absolute value along the last dimension over the largest value
    of the dtype. The scale is NaN if a value is not finite.
    """
    x32 = x.float()
    largest = x32.abs().amax(-1)
    most = QUANTIZED_DTYPES[dtype]
    if fixed is not None:
        scale = torch.where(largest.isfinite(), fixed, torch.nan)
        divided = (x32 / fixed[..., None]).clamp(-most, most)
    else:
        scale = torch.where(largest.isfinite(), largest / most, torch.nan)
        # A quotient of tensors: torch computes number / tensor as reciprocal times number, rounded twice.
        inverse = torch.full_like(largest, most) / largest.where(largest > 0, 1.0)
        divided = x32 * inverse[..., None]
    if dtype == torch.int8:
        divided = (divided + 0.5).floor()
    return divided.to(dtype), scale


def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """Return silu(gate) * up, where x is gate and up side by side (Shazeer 2020)."""
    gate, up = upcast(x).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def gelu_and_mul(x: Tensor, up: Tensor | None = None) -> Tensor:  # -> [num_tokens, size]
    """Return gelu(gate) * up (Shazeer 2020). x is gate and up side by side, or the gate if `up` is given.

    gelu(g) is g / 2 (1 + tanh(sqrt(2 / pi) (g + 0.044715 g³))) (Hendrycks & Gimpel 2016).
    """
    gate, up = upcast(x).chunk(2, dim=-1) if up is None else (upcast(x), upcast(up))
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(x.dtype)


def gelu(x: Tensor, *, tanh: bool) -> None:  # [num_rows, size]
    """Turn x in place into x Φ(x), where Φ is the normal distribution function (Hendrycks & Gimpel 2016).

    tanh: whether to approximate Φ(x) by (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³))) / 2.
    """
    x.copy_(torch.nn.functional.gelu(upcast(x), approximate="tanh" if tanh else "none"))


def relu_squared(x: Tensor) -> None:  # [num_rows, size]
    """Replace x by max(x, 0)², in place (So et al., Primer, 2021)."""
    x.copy_(torch.relu(upcast(x)).square())


def add(x: Tensor, out: Tensor) -> None:  # [num_rows, size], both
    """Add x to `out` in place."""
    out.add_(x)


def scale_and_cap(x: Tensor, factor: float, softcap: float | None = None) -> None:  # [num_rows, size]
    """Multiply x by a factor in place. With a softcap, turn the product p into softcap tanh(p / softcap)."""
    product = upcast(x) * float(factor)
    x.copy_(product if softcap is None else softcap * (product / softcap).tanh())


def scale_rows(x: Tensor, factors: Tensor) -> None:  # [num_rows, size], f32[num_rows]
    """Multiply each row of x by its factor, in place."""
    x.copy_(upcast(x) * factors[:, None])


def clamped_swiglu(
    x: Tensor,  # [num_tokens, 2 * size]: gate and up side by side
    limit: float,
    alpha: float,
) -> Tensor:  # [num_tokens, size]
    """Return gate sigmoid(alpha gate) (up + 1), with gate at most `limit` and up within ± limit (gpt-oss)."""
    gate, up = upcast(x).chunk(2, dim=-1)
    most = float(limit)  # torch takes no int beyond 64 bits
    gate = gate.clamp(max=most)
    up = up.clamp(min=-most, max=most)
    return (gate * torch.sigmoid(gate * float(alpha)) * (up + 1)).to(x.dtype)


def route(
    logits: Tensor,  # f32[num_tokens, num_experts]
    options: RoutingOptions,
    correction_bias: Tensor | None = None,  # f32[num_experts], added to scores for choosing only
    expert_scales: Tensor | None = None,  # f32[num_experts], multiply the weights of each expert
    count: Tensor | None = None,  # i32[1], the tokens that have experts, which come first; None: all
) -> tuple[Tensor, Tensor]:  # i32 and f32 [num_tokens, num_chosen]
    """Choose the experts of each token, in ascending order, and their weights.

    The experts with the highest scores are chosen; at equal scores, the lower index. NaN counts as the
    highest score, so that a NaN logit gives a chosen expert a NaN weight. Tokens from `count` on get the
    number num_experts, with undefined weights.
    """
    num_tokens, num_experts = logits.shape
    scores = logits.sigmoid() if options.score == "sigmoid" else logits.softmax(-1)
    ranked = logits if options.orders_by_logits and correction_bias is None else scores
    if correction_bias is not None:
        ranked = ranked + correction_bias
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    if options.num_groups > 1:
        shape = num_tokens, options.num_groups, num_experts // options.num_groups
        best = ranked.view(shape).sort(-1, descending=True).values
        score = best[..., 0] if options.group_score == "best" else best[..., 0] + best[..., 1]
        kept = score.argsort(dim=-1, descending=True, stable=True)[:, : options.num_kept_groups]
        groups = order // (num_experts // options.num_groups)
        can_choose = (groups[..., None] == kept[:, None]).any(-1)
        order = order.gather(-1, can_choose.int().argsort(dim=-1, descending=True, stable=True))
    experts = order[:, : options.num_chosen].sort(-1).values
    if options.score == "softmax_of_chosen":
        weights = logits.gather(-1, experts).softmax(-1)
    else:
        weights = scores.gather(-1, experts)
    if options.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + options.epsilon)
    weights = weights * options.scale
    if expert_scales is not None:
        weights = weights * expert_scales[experts]
    if count is not None:
        experts[int(count) :] = num_experts
    return experts.int(), weights


def sort_by_expert(
    experts: Tensor,  # i32[num_tokens, num_chosen]
    num_experts: int,
    adapters: Tensor | None = None,  # i32[num_tokens]: the adapter slot of each token; -1: none
) -> ExpertRows:
    """Sort the pairs of a token and an expert by expert, and pairs with the same expert by token.

    With `adapters`, each row gets the slot of its adapter's matrices for its expert.
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    bounds = torch.arange(num_experts + 1, dtype=flat.dtype, device=flat.device)
    offsets = torch.searchsorted(flat[order], bounds, out_int32=True)
    sources = order // experts.shape[1]
    slots = None
    if adapters is not None:
        own, chosen = adapters[sources], flat[order]
        slots = (own * num_experts + chosen).masked_fill((own < 0) | (chosen >= num_experts), -1)
    return ExpertRows(sources, places.view(experts.shape), offsets, slots)


def grouped_linear(
    x: Tensor,  # [num_rows, in_features], sorted by expert; with sources [num_tokens, in_features]
    weight: Tensor,  # [num_experts, out_features, in_features], of the dtype of x
    offsets: Tensor,  # i32[num_experts + 1], see ExpertRows
    sources: Tensor | None = None,  # i64[num_rows]: the row of x that each row is
    bias: Tensor | None = None,  # [num_experts, out_features], of the dtype of x
) -> Tensor:  # [num_rows, out_features]
    """Return x[sources[r]] weight[e]ᵀ + bias[e] as row r, for the rows of each expert e.

    A row's bits depend neither on the other rows nor on their experts.
    """
    rows = x if sources is None else x[sources]
    out = x.new_empty(len(rows), weight.shape[1])
    bounds = offsets.tolist()
    for expert, own in enumerate(weight):
        mine = slice(bounds[expert], bounds[expert + 1])
        product = upcast(rows[mine]) @ upcast(own).T
        if bias is not None:
            product = product + upcast(bias[expert])
        out[mine] = product.to(x.dtype)
    return out


def sum_experts(
    x: Tensor,  # [num_rows, size], sorted by expert
    places: Tensor,  # i64[num_tokens, num_chosen], see ExpertRows
    weights: Tensor,  # f32[num_tokens, num_chosen]
    shared: Tensor | None = None,  # [num_tokens, size], like x: of the experts that every token has
    shared_gate: Tensor | None = None,  # f32[num_tokens, 1], logits: `shared` is multiplied by their sigmoid
) -> Tensor:  # [num_tokens, size]
    """Return for each token the weighted sum of its experts' outputs, in float32, in the order of `places`.

    `shared` is added last, and only the sum is rounded to x's dtype.
    """
    total = torch.zeros(len(places), x.shape[1], dtype=upcast(x).dtype, device=x.device)
    for place, weight in zip(places.T, weights.T, strict=True):
        total = total + upcast(x[place]) * weight[:, None]
    if shared is not None:
        own = upcast(shared)
        total = total + (own if shared_gate is None else own * shared_gate.sigmoid())
    return total.to(x.dtype)


def scale_by_sigmoid(x: Tensor, gate: Tensor) -> None:  # [num_rows, size], both
    """Multiply x by the sigmoid of the gate, in place."""
    x.copy_(upcast(x) * upcast(gate).sigmoid())


def gated_norm(
    x: Tensor,  # [num_tokens, num_heads, size]
    weight: Tensor | None,  # [size], or [num_heads * size]
    gate: Tensor,  # [num_tokens, num_heads * size]
    eps: float,
    *,
    gate_first: bool = False,
) -> Tensor:  # [num_tokens, num_heads * size]
    """Return weight * x / sqrt(mean(x²) + eps) * silu(gate), with the mean over each head.

    gate_first: whether x is multiplied by silu(gate) before the norm instead. weight: None: no norm, only the
        product x * silu(gate).
    """
    x32 = upcast(x)
    silu = torch.nn.functional.silu(upcast(gate)).view(x.shape)
    if gate_first or weight is None:
        x32 = x32 * silu
    if weight is not None:
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        x32 = x32 * upcast(weight).view(-1, x.shape[2])
        if not gate_first:
            x32 = x32 * silu
    return x32.flatten(1).to(x.dtype)


def short_conv(
    x: Tensor,  # [num_tokens, size]; gated: [num_tokens, 3 * size], B, C and x side by side
    weight: Tensor,  # f32[width, size]: the last row multiplies the newest input
    bias: Tensor | None,  # f32[size]
    states: Tensor,  # [num_slots, width - 1, size], like x: the last inputs of sequences, written in place
    slots: Tensor,  # i32[num_seqs], each another
    seq_lens: Tensor,  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    run_inputs: Tensor | None = None,  # [num_slots, num_places, size], like x, written in place
    runs: Tensor | None = None,  # i32[num_seqs, 2]: see below
    *,
    gated: bool,
) -> Tensor:  # [num_tokens, size]
    """Convolve the tokens of each sequence along time, each column separately.

    If `gated`, the inputs are B x, rounded to x's dtype, and the result is multiplied by C, as in LFM2.
    Otherwise the inputs are x, and silu is applied to the result. The inputs before a sequence's first token
    are 0, whatever its slot holds.

    runs: for each sequence, how many tokens of its last run are applied to its state first, and whether its
        new tokens are a run of drafts (1, otherwise 0), which its state must not see: their inputs are stored
        in run_inputs instead, those of the token at position p in place p % num_places. Hence num_places must
        be at least the number of tokens that are applied first and of a run together.
    """
    width, size = weight.shape
    gate, out_gate, inputs = x.split(size, dim=1) if gated else (None, None, x)
    if gate is not None:
        inputs = (upcast(gate) * upcast(inputs)).to(x.dtype)
    out = x.new_empty(len(x), size)
    bounds = cu_seqlens_q.tolist()
    for i, (slot, seq_len) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
        start, end = bounds[i], bounds[i + 1]
        if start == end:
            continue
        before = states[slot] if seq_len > end - start else torch.zeros_like(states[slot])
        own = _run_of(i, slot, start, end, seq_len, run_inputs, runs)
        before = torch.cat([before, own.unapplied.to(x.dtype)])[1 - width :] if own else before
        seen = torch.cat([before, inputs[start:end]])
        total = torch.einsum("tcw,wc->tc", upcast(seen).unfold(0, width, 1), weight.to(upcast(x).dtype))
        total = total if bias is None else total + bias
        if out_gate is not None:
            total = total * upcast(out_gate[start:end])
        else:
            total = torch.nn.functional.silu(total)
        out[start:end] = total.to(x.dtype)
        states[slot] = before if own and own.is_run else seen[end - start :]
        if own and own.is_run:
            own.places[own.new] = inputs[start:end]
    return out


class _Run(NamedTuple):
    """What a sequence has of `run_inputs`.

    places: its part. unapplied: the inputs that its state has not seen. new: the places of its new tokens.
    """

    places: Tensor
    unapplied: Tensor
    new: list[int]
    is_run: bool


def _run_of(
    sequence: int,
    slot: int,
    start: int,
    end: int,
    seq_len: int,
    run_inputs: Tensor | None,
    runs: Tensor | None,
) -> _Run | None:
    """Return what a sequence has of `run_inputs`; None: there are none."""
    if run_inputs is None or runs is None:
        return None
    places = run_inputs[slot]
    num_unapplied, is_run = runs[sequence].tolist()
    position = seq_len - (end - start)
    before, new = (
        [at % len(places) for at in range(first, last)]
        for first, last in ((position - num_unapplied, position), (position, seq_len))
    )
    return _Run(places, places[before], new, bool(is_run))


def gated_delta(
    qkv: Tensor,  # [num_tokens, 2 * num_key_heads * key_dim + num_heads * value_dim]
    gates: Tensor,  # [num_tokens, 2 * num_heads]: of what is written and of the decay, see below
    rates: Tensor,  # f32[num_heads], below 0
    time_bias: Tensor,  # f32[num_heads]
    states: Tensor,  # f32[num_slots, num_heads, key_dim, value_dim], written in place
    slots: Tensor,  # i32[num_seqs], each another
    seq_lens: Tensor,  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    run_inputs: Tensor | None = None,  # like qkv and gates side by side: [num_slots, num_places, columns]
    runs: Tensor | None = None,  # i32[num_seqs, 2], as `short_conv` has them
) -> Tensor:  # [num_tokens, num_heads, value_dim]
    """Apply the gated delta rule (Yang et al. 2024) to the tokens of each sequence, one after the other.

    Q and K are normalised to length 1, and Q is divided by sqrt(key_dim). For every token with gates b and a,
    the state S of a head becomes d S + k (sigmoid(b) (v - d Sᵀ k))ᵀ with d = exp(rate softplus(a + bias)),
    and the output is Sᵀ q. Consecutive heads share a head of Q and K. A sequence begins with a state of 0,
    whatever its slot holds.
    """
    num_heads, key_dim, value_dim = states.shape[1:]
    num_key_heads = (qkv.shape[1] - num_heads * value_dim) // (2 * key_dim)
    key_size = num_key_heads * key_dim
    shares = num_heads // num_key_heads
    sizes = [key_size, key_size, num_heads * value_dim, num_heads, num_heads]
    mixed = torch.cat([qkv, gates], dim=1)
    out = qkv.new_empty(len(qkv), num_heads, value_dim)
    bounds = cu_seqlens_q.tolist()
    for i, (slot, seq_len) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
        start, end = bounds[i], bounds[i + 1]
        if start == end:
            continue
        own = _run_of(i, slot, start, end, seq_len, run_inputs, runs)
        rows = torch.cat([own.unapplied.to(qkv.dtype), mixed[start:end]]) if own else mixed[start:end]
        query, key, value, b, a = upcast(rows).split(sizes, dim=1)
        query, key = (
            (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(shares, dim=1)
            for each in (part.unflatten(1, (num_key_heads, key_dim)) for part in (query, key))
        )
        query = query / key_dim**0.5
        value = value.unflatten(1, (num_heads, value_dim))
        decay = (rates * torch.nn.functional.softplus(a + time_bias)).exp()
        state = states[slot].to(query.dtype)
        if seq_len == end - start:
            state = torch.zeros_like(state)
        first = len(rows) - (end - start)
        before = state
        for t in range(len(rows)):
            if t == first:
                before = state
            state = state * decay[t, :, None, None]
            change = (value[t] - torch.einsum("hkv,hk->hv", state, key[t])) * b[t].sigmoid()[:, None]
            state = state + key[t, :, :, None] * change[:, None]
            if t >= first:
                out[start + t - first] = torch.einsum("hkv,hk->hv", state, query[t]).to(out.dtype)
        states[slot] = before if own and own.is_run else state
        if own and own.is_run:
            own.places[own.new] = mixed[start:end]
    return out


def mamba2_scan(
    x: Tensor,  # [num_tokens, num_heads * head_dim + 2 * num_groups * state_dim]: x, B and C
    time_steps: Tensor,  # [num_tokens, num_heads]
    rates: Tensor,  # f32[num_heads], below 0
    time_bias: Tensor,  # f32[num_heads]
    skip: Tensor,  # f32[num_heads]
    states: Tensor,  # f32[num_slots, num_heads, state_dim, head_dim], written in place
    slots: Tensor,  # i32[num_seqs], each another
    seq_lens: Tensor,  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    run_inputs: Tensor | None = None,  # like x and time_steps side by side: [num_slots, num_places, columns]
    runs: Tensor | None = None,  # i32[num_seqs, 2], as `short_conv` has them
    *,
    limits: tuple[float, float],
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Apply the state space of Mamba-2 (Dao & Gu 2024) to the tokens of each sequence, one after the other.

    For every token, the time step of a head is t = softplus(time_step + bias), clamped to `limits`. The state
    S becomes e^(rate t) S + B (t x)ᵀ, and the output is Sᵀ C + skip x. Consecutive heads form a group with
    one B and one C. The state of a new sequence is 0, whatever its slot holds.
    """
    num_heads, state_dim, head_dim = states.shape[1:]
    size = num_heads * head_dim
    group_size = (x.shape[1] - size) // 2
    shares = num_heads // (group_size // state_dim)
    sizes = [size, group_size, group_size, num_heads]
    mixed = torch.cat([x, time_steps], dim=1)
    out = x.new_empty(len(x), num_heads, head_dim)
    bounds = cu_seqlens_q.tolist()
    for i, (slot, seq_len) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
        start, end = bounds[i], bounds[i + 1]
        if start == end:
            continue
        own = _run_of(i, slot, start, end, seq_len, run_inputs, runs)
        rows = torch.cat([own.unapplied.to(x.dtype), mixed[start:end]]) if own else mixed[start:end]
        values, keys, queries, steps = upcast(rows).split(sizes, dim=1)
        values = values.unflatten(1, (num_heads, head_dim))
        keys, queries = (
            each.unflatten(1, (-1, state_dim)).repeat_interleave(shares, dim=1) for each in (keys, queries)
        )
        steps = torch.nn.functional.softplus(steps + time_bias).clamp(*limits)
        decay = (rates * steps).exp()
        state = states[slot].to(values.dtype)
        if seq_len == end - start:
            state = torch.zeros_like(state)
        first = len(rows) - (end - start)
        before = state
        for t in range(len(rows)):
            if t == first:
                before = state
            written = values[t] * steps[t, :, None]
            state = state * decay[t, :, None, None] + keys[t, :, :, None] * written[:, None]
            if t >= first:
                read = torch.einsum("hnp,hn->hp", state, queries[t])
                out[start + t - first] = (read + skip[:, None] * values[t]).to(out.dtype)
        states[slot] = before if own and own.is_run else state
        if own and own.is_run:
            own.places[own.new] = mixed[start:end]
    return out


def add_lora(
    x: Tensor,  # [num_tokens, in_features]
    out: Tensor,  # [num_tokens, size] like x or float32, changed in place
    a: Tensor,  # [num_slots, num_parts, max_rank, in_features], like x
    b: Tensor,  # [num_slots, max_rank, size], like x: transposed, and scaled
    ranks: Tensor,  # i32[num_slots, num_parts], at most max_rank; 0: the slot has no such part
    columns: Tensor,  # i32[num_ranges, 3]: first column of out, end, and the part that makes them
    slots: Tensor,  # i32[num_tokens]; -1: no adapter
) -> None:
    """Add x Aᵀ Bᵀ of each token's LoRA adapter to its row of `out` (Hu et al. 2021).

    x Aᵀ is in float32; the sum is rounded once. Rows without an adapter stay as they are.
    """
    for slot in range(len(a)):
        rows = (slots == slot).nonzero().flatten()
        if not len(rows):
            continue
        for first, end, part in columns.tolist():
            rank = int(ranks[slot, part])
            if rank:
                inner = upcast(x[rows]) @ upcast(a[slot, part, :rank]).T
                added = inner @ upcast(b[slot, :rank, first:end])
                out[rows, first:end] = (upcast(out[rows, first:end]) + added).to(out.dtype)


def copy_blocks(
    cache: Tensor,  # [num_planes, num_blocks, block_size, num_kv_heads, head_dim], written in place
    pairs: Tensor,  # i64[num_pairs, 2], (from, to)
    target: Tensor | None = None,  # another cache of such blocks, written in place of this one
) -> None:
    """Set target[:, to] = cache[:, from]. No block of a cache is source and target, or a target twice."""
    target = cache if target is None else target
    # A slice for each pair: 2 to 5 times faster on a CPU than index_copy_ of all, and pairs are few.
    for source, to in pairs.tolist():
        target[:, to] = cache[:, source]


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, value_dim]
    block_tables: Tensor,  # i32[num_seqs, max_blocks_per_seq]
    seq_lens: Tensor,  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    options: AttentionOptions,
    plan: AttentionPlan | None = None,  # noqa: ARG001
) -> Tensor:  # [num_tokens, num_heads, value_dim]
    """Return softmax(scale q kᵀ + causal mask) v for every sequence's new tokens over its paged K and V.

    `gpu.attention.paged_attention` explains the options.
    """
    window = options.sliding_window
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    bounds = cu_seqlens_q.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        start, end = bounds[i], bounds[i + 1]
        if start == end:
            continue
        q = upcast(query[start:end])  # [query_len, num_heads, head_dim]
        first = seq_len - (end - start)
        # Slots outside the window are not read: their blocks may already be another sequence's.
        low = 0 if window is None else max(0, first - window + 1)
        k = _gather(key_cache, options.key_scales, block_tables[i], low, seq_len, q)
        v = _gather(value_cache, options.value_scales, block_tables[i], low, seq_len, q)
        query_pos = torch.arange(first, seq_len, device=query.device)[:, None]
        key_pos = torch.arange(low, seq_len, device=query.device)[None, :]
        last_keys = query_pos if options.last_keys is None else options.last_keys[start:end, None]
        seen = key_pos <= last_keys
        if window is not None:
            seen = seen & (key_pos > query_pos - window)
        scores = torch.einsum("qhd,khd->hqk", q, k) * float(options.scale)
        if options.softcap is not None:
            softcap = float(options.softcap)
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(~seen, float("-inf"))
        if options.sinks is not None:
            sink = options.sinks[:, None, None].to(scores.dtype).expand(-1, end - start, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., : seq_len - low]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
    return out


def _gather(
    cache: Tensor, scales: Tensor | None, block_table: Tensor, low: int, high: int, like: Tensor
) -> Tensor:
    """Return tokens [low, high) of one sequence, a copy for each query head: [high - low, num_heads, dim]."""
    block_size, num_kv_heads = cache.shape[1], cache.shape[2]
    pos = torch.arange(low, high, device=cache.device)
    blocks = block_table[pos // block_size].long()
    slots = pos % block_size
    tokens = cache[blocks, slots].to(like.dtype)
    if scales is not None:
        tokens = tokens * scales[blocks, :, slots][..., None].to(like.dtype)
    return tokens.repeat_interleave(like.shape[1] // num_kv_heads, dim=1)


def apply_penalties(
    logits: Tensor,  # f32[num_rows, vocab_size], changed in place
    rows: Tensor,  # i64[n], the rows of logits to change
    slots: Tensor,  # i64[n], where the history of each is
    output_counts: Tensor,  # i32[num_slots, vocab_size], how often each token was generated
    seen: Tensor,  # bool[num_slots, vocab_size], the tokens of prompt and output
    repetition_penalty: Tensor,  # f32[n]
    frequency_penalty: Tensor,  # f32[n]
    presence_penalty: Tensor,  # f32[n]
) -> None:
    """Penalise tokens that were seen before.

    Divide a positive logit by repetition_penalty, and multiply any other logit by it (Keskar et al. 2019).
    Then subtract frequency_penalty for each time that the token was generated, and presence_penalty once.
    """
    for i, (row, slot) in enumerate(zip(rows.tolist(), slots.tolist(), strict=True)):
        x = logits[row]
        count = output_counts[slot]
        repeated = torch.where(x > 0, x / repetition_penalty[i], x * repetition_penalty[i])
        x = torch.where(seen[slot], repeated, x)
        penalised = x - count.to(x.dtype) * frequency_penalty[i] - presence_penalty[i]
        logits[row] = torch.where(count > 0, penalised, x)


def sample_tokens(
    logits: Tensor,  # f32[n, vocab_size], may be destroyed; -inf never drawn
    seeds: Tensor,  # i64[n]
    positions: Tensor,  # i64[n]
    *,
    temperature: Tensor,  # f32[n]; 0 takes the first of the highest logits, whatever the filters
    min_p: Tensor | None,  # f32[n], 0 keeps all; None: no row uses it
    top_n_sigma: Tensor | None,  # f32[n], 0 keeps all
    typical_p: Tensor | None,  # f32[n], 1 keeps all
    top_k: Tensor | None,  # i32[n], vocab_size keeps all
    top_p: Tensor | None,  # f32[n], 1 keeps all
    highest: Tensor | None = None,  # f32[n], receives each row's highest logit; NaN if the row has one
) -> Tensor:  # i64[n]
    """Return the first kept token with the highest (logit - highest) / temperature + Gumbel noise."""
    kept = kept_tokens(
        logits,
        temperature=temperature,
        min_p=min_p,
        top_n_sigma=top_n_sigma,
        typical_p=typical_p,
        top_k=top_k,
        top_p=top_p,
    )
    noise = gumbel_noise(seeds, positions, logits.shape[1])
    drawn = gumbel_scores(logits, temperature, noise).where(kept, -torch.inf).argmax(-1)
    if highest is not None:
        highest.copy_(greedy(logits)[1])
    return drawn.where(temperature > 0, _finite(logits).argmax(-1))


def gumbel_scores(logits: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """Return (logit - highest) / temperature + noise in float32, rounded as in the kernel."""
    x = _finite(logits)
    top = _highest(x)
    divisor = _divisor(temperature)
    x = torch.maximum(x, top.clamp(min=0) - torch.finfo(torch.float32).max)
    return torch.maximum(x - top, -300 * divisor) * (1 / divisor) + noise


def kept_tokens(
    logits: Tensor,  # [n, vocab_size]
    *,
    temperature: Tensor,  # f32[n], above 0
    min_p: Tensor | None = None,  # f32[n], 0 keeps all
    top_n_sigma: Tensor | None = None,  # f32[n], 0 keeps all
    typical_p: Tensor | None = None,  # f32[n], 1 keeps all
    top_k: Tensor | None = None,  # i32[n], vocab_size keeps all
    top_p: Tensor | None = None,  # f32[n], 1 keeps all
) -> Tensor:  # bool[n, vocab_size]
    """Return which tokens may be drawn, computed in float64. Each filter works on the tokens that the filters
    before it keep.

    min_p keeps tokens at least min_p times as likely as the most likely one. top_n_sigma keeps logits within
    this many standard deviations of the highest (population standard deviation of all logits above -inf).
    typical_p keeps a token if the tokens whose surprise is strictly nearer to the entropy have a probability
    of less than typical_p (Meister et al., 2022); this may exclude the most likely token. top_k keeps a token
    if fewer than k tokens are strictly more likely. top_p keeps a token if the strictly more likely tokens
    have a probability of less than top_p. Ties stay together, and each filter keeps at least one token. NaN
    counts as -inf, +inf as the largest float.
    """
    x = _finite(logits.double())
    kept = x > -torch.inf
    top = _highest(x)
    z = ((x - top) / _divisor(temperature.double())).clamp(min=-1e5)
    if min_p is not None:
        kept = kept & (z >= min_p.double().log()[:, None])
    if top_n_sigma is not None:
        numbers = [row[row > -torch.inf] for row in x]
        deviation = torch.stack([row.std(correction=0) if len(row) else row.sum() for row in numbers])
        near = x >= top - (top_n_sigma.double() * deviation)[:, None]
        kept = kept & (near | (top_n_sigma == 0)[:, None])
    mass = z.exp()
    if typical_p is not None:
        left = mass * kept
        mean = (left * z).sum(-1) / left.sum(-1).clamp(min=1)
        # Surprise is log(sum) - z: it is as far from its mean, the entropy, as z is from its own.
        nearer = _weight_above(-(z - mean[:, None]).abs(), left)
        near = nearer < (typical_p.double() * left.sum(-1))[:, None]
        kept = kept & (near | (nearer == 0) | (typical_p >= 1)[:, None])
    if top_k is not None:
        kept = kept & (_weight_above(x, kept.double()) < top_k[:, None])
    if top_p is not None:
        left = mass * kept
        likelier = _weight_above(x, left)
        within = likelier < (top_p.double() * left.sum(-1))[:, None]
        kept = kept & (within | (likelier == 0) | (top_p >= 1)[:, None])
    return kept


def _weight_above(order: Tensor, weight: Tensor) -> Tensor:
    """Return the weight of all values strictly above each value of `order`; all [n, size]."""
    values, places = order.sort(dim=-1, descending=True)
    sums = weight.gather(-1, places).cumsum(-1)
    before = torch.cat([torch.zeros_like(sums[:, :1]), sums], dim=-1)
    return before.gather(-1, torch.searchsorted(-values, -order))


def _highest(x: Tensor) -> Tensor:  # [n, vocab_size] -> [n, 1]
    return x.amax(-1, keepdim=True).clamp(min=-torch.finfo(torch.float32).max)


def _divisor(temperature: Tensor) -> Tensor:  # [n] -> [n, 1]
    return temperature.clamp(min=torch.finfo(torch.float32).tiny, max=1e35)[:, None]


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.finfo(torch.float32).max) + 0.0


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:  # f32[n, vocab_size] -> i64[n], f32[n]
    """Return the index of each row's first maximum, and the maximum, which is NaN if the row has a NaN."""
    highest = logits.amax(-1)
    same = (logits == highest[:, None]) | logits.isnan()
    return same.to(torch.int8).argmax(-1), highest


def mask_logits(
    logits: Tensor,  # f32[n, vocab_size], written in place
    rows: Tensor,  # i64[m]
    allowed: Tensor,  # i32[m, at least vocab_size / 32 words]: bit b of word w is token 32 w + b
) -> None:
    """In these rows, set the logits of tokens that are not allowed to -inf. NaN stays NaN."""
    bias = torch.zeros(len(rows), logits.shape[1], device=logits.device)
    logits[rows] += bias.masked_fill(~_flags(allowed, logits.shape[1]), -torch.inf)


def greedy_of_allowed(
    logits: Tensor,  # f32[n, vocab_size]
    rows: Tensor,  # i64[m]
    allowed: Tensor,  # i32[m, at least vocab_size / 32 words]
    tokens: Tensor,  # i64[n], of `greedy`; those of `rows` are written
    highest: Tensor,  # f32[n], of `greedy`; those of `rows` are written
) -> None:
    """For these rows, replace the greedy token and its logit by the argmax over allowed tokens.

    NaN counts as -inf. If all allowed logits are -inf, any token is written.
    """
    flags = _flags(allowed, logits.shape[1])
    kept = logits[rows].nan_to_num(-torch.inf, torch.inf, -torch.inf).where(flags, -torch.inf)
    tokens[rows] = kept.argmax(-1)
    highest[rows] = kept.amax(-1)


def _flags(allowed: Tensor, vocab_size: int) -> Tensor:  # i32[m, num_words] -> bool[m, vocab_size]
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=allowed.device)
    return (allowed[..., None] >> bits & 1).flatten(1)[:, :vocab_size].bool()


def token_logprobs(
    logits: Tensor,  # f32[n, vocab_size]
    tokens: Tensor,  # i64[n]
    num_top: int,  # 0 to vocab_size
) -> tuple[Tensor, Tensor, Tensor]:  # f32 and i64 [n, 1 + num_top], i64[n]
    """Return log_softmax of each row's token and of its num_top likeliest, their ids, and the token's rank.

    The rank is one more than the number of likelier tokens. The result is NaN for a row with NaN or inf, or
    with nothing but -inf.
    """
    logprobs = logits.double().log_softmax(-1)
    top = logprobs.argsort(dim=-1, descending=True, stable=True)[:, :num_top]
    ids = torch.cat([tokens[:, None], top], dim=1)
    ranks = 1 + (logits > logits.gather(-1, tokens[:, None])).sum(-1)
    return logprobs.gather(-1, ids).float(), ids, ranks
