"""Models whose layers keep states as GGUF files, by the rules of llama.cpp's conversion scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

ARCHITECTURES = {
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
}
_DELTA = ("qwen35", "qwen35moe", "qwen3next")
_ALL = (*_DELTA, "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "granitehybrid", "falcon-h1")
# Of the name of a tensor within a layer of transformers, where the package `gguf` does not know it.
_PARTS = {
    "dt_bias": "ssm_dt.bias",
    "experts.down_proj": "ffn_down_exps.weight",
    "experts.up_proj": "ffn_up_exps.weight",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "pre_ff_layernorm.weight": "ffn_norm",
}


def architecture_of(config: Any) -> str:
    """Return what general.architecture is."""
    kind = config.model_type
    if kind == "nemotron_h" and "moe" in config.layers_block_type:
        return "nemotron_h_moe"
    return ARCHITECTURES.get(kind, kind)


def has_states(metadata: Mapping[str, Any]) -> bool:
    """Return whether this module converts such models."""
    return metadata["general.architecture"] in _ALL


def metadata_of(config: Any, name: str) -> dict[str, Any]:
    """Return the keys that these models have beside those of others, and those that they have in another
    form.
    """
    values = config.to_dict()
    if name in _DELTA:
        heads = values["linear_num_value_heads"]
        inner = heads * values["linear_value_head_dim"]
        sizes = (
            values["linear_conv_kernel_dim"],
            values["linear_key_head_dim"],
            values["linear_num_key_heads"],
        )
        found = _ssm(*sizes, heads, inner) | {"full_attention_interval": 4}
        if name != "qwen3next":
            found["rope.dimension_sections"] = [11, 11, 10, 0]
        if "num_experts" in values:
            found["feed_forward_length"] = values.get("intermediate_size", 1)
        return found
    if name in ("lfm2", "lfm2moe"):
        kv_heads = [
            values["num_key_value_heads"] if kind == "full_attention" else 0 for kind in values["layer_types"]
        ]
        found = {
            "shortconv.l_cache": values["conv_L_cache"],
            "attention.head_count_kv": kv_heads,
            "attention.layer_norm_rms_epsilon": values["norm_eps"],
        }
        if name == "lfm2":
            unit = values["block_multiple_of"]
            found["feed_forward_length"] = -(-int(2 * values["intermediate_size"] / 3) // unit) * unit
            return found
        return found | {
            "leading_dense_block_count": values["num_dense_layers"],
            "expert_gating_func": 2,
        }
    if name in ("nemotron_h", "nemotron_h_moe"):
        return _nemotron_h(values, is_moe=name == "nemotron_h_moe")
    heads = values["mamba_n_heads"]
    inner = values.get("mamba_d_ssm") or values["mamba_expand"] * values["hidden_size"]
    found = _ssm(values["mamba_d_conv"], values["mamba_d_state"], values["mamba_n_groups"], heads, inner)
    if name == "falcon-h1":
        return {**found, "embedding_scale": None}
    found["attention.head_count_kv"] = [
        values["num_key_value_heads"] if kind == "full_attention" else 0 for kind in values["layer_types"]
    ]
    found["expert_shared_feed_forward_length"] = values["shared_intermediate_size"]
    # llama.cpp rotates nothing where there are states.
    return found | {"rope.scaling.finetuned": False}


def _ssm(width: int, state_dim: int, num_groups: int, num_heads: int, inner: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": width,
        "ssm.state_size": state_dim,
        "ssm.group_count": num_groups,
        "ssm.time_step_rank": num_heads,
        "ssm.inner_size": inner,
    }


def _nemotron_h(values: Mapping[str, Any], *, is_moe: bool) -> dict[str, Any]:
    kinds = values["layers_block_type"]
    heads = values["mamba_num_heads"]
    sizes = values["conv_kernel"], values["ssm_state_size"], values["n_groups"]
    found = _ssm(*sizes, heads, heads * values["mamba_head_dim"])
    inner, mlp = (values["moe_intermediate_size"], "moe") if is_moe else (values["intermediate_size"], "mlp")
    found |= {
        "block_count": len(kinds),
        "attention.head_count_kv": [values["num_key_value_heads"] * (k == "full_attention") for k in kinds],
        "feed_forward_length": [inner * (kind == mlp) for kind in kinds],
        "attention.layer_norm_rms_epsilon": values["layer_norm_epsilon"],
        "rope.dimension_count": values["head_dim"],
    }
    if not is_moe:
        dropped = ("count", "used_count", "shared_count", "group_count", "group_used_count", "weights_scale")
        return found | {f"expert_{key}": None for key in (*dropped, "feed_forward_length")}
    return found | {
        "expert_shared_feed_forward_length": values["moe_shared_expert_intermediate_size"],
        "expert_weights_norm": values["norm_topk_prob"],
        "moe_latent_size": values["moe_latent_size"],
    }


def named(
    name: str, parameter: Tensor, config: Any, metadata: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file that a parameter of transformers is in, each a view of it or a new one."""
    from tests.support.gguf_models import name_of

    layer = name.split(".")[2] if ".layers." in name else ""
    part = name.split(".", 3)[-1]
    if "experts.gate_up_proj" in part:
        for own, half in zip(("gate", "up"), parameter.chunk(2, dim=1), strict=True):
            yield f"blk.{layer}.ffn_{own}_exps.weight", half
        return
    if part == "shared_mlp.input_linear.weight":
        end = "_shexp" if config.num_local_experts else ""
        for own, half in zip(("gate", "up"), parameter.chunk(2), strict=True):
            yield f"blk.{layer}.ffn_{own}{end}.weight", half
        return
    if part == "shared_mlp.output_linear.weight" and not config.num_local_experts:
        yield f"blk.{layer}.ffn_down.weight", parameter
        return
    if part == "linear_attn.in_proj_qkvz.weight":
        yield from _divided(layer, parameter, config)
        return
    known = next((ours for theirs, ours in _PARTS.items() if layer and part.endswith(theirs)), None)
    if known is not None:
        yield f"blk.{layer}.{known}", parameter[0] if known == "ffn_gate_inp_shexp.weight" else parameter
        return
    if config.model_type == "nemotron_h" and name.startswith("model."):
        name = f"backbone.{name.removeprefix('model.')}"
    yield name_of(name, metadata), parameter


def _divided(layer: str, parameter: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield Q, K and V of all heads, and their gates, of what Qwen3-Next has by key head."""
    values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim] * 2 + [values] * 2
    by_head = parameter.view(config.linear_num_key_heads, -1, parameter.shape[1])
    *mixed, gate = (each.flatten(0, 1) for each in by_head.split(sizes, dim=1))
    yield f"blk.{layer}.attn_qkv.weight", torch.cat(mixed)
    yield f"blk.{layer}.attn_gate.weight", gate


def converted(own: str, weight: Tensor, config: Any, metadata: Mapping[str, Any]) -> Tensor:
    """Return a tensor as a file has it."""
    name = metadata["general.architecture"]
    part = own.split(".", 2)[-1]
    if part == "ssm_a":
        weight = -weight.exp()
    if name in _DELTA and own.endswith("norm.weight") and part != "ssm_norm.weight":
        weight = weight + 1
    if name == "falcon-h1":
        weight = _multiplied(own, part, weight, config)
    if part in ("ssm_conv1d.weight", "shortconv.conv.weight"):
        weight = weight.squeeze(1)
    if name not in _DELTA and part in ("ssm_a", "ssm_d"):
        weight = weight[:, None]
    if name not in _DELTA and part == "ssm_norm.weight":
        weight = weight.view(metadata[f"{name}.ssm.group_count"], -1)
    if part == "ssm_out.weight":
        return weight[:, columns_of(weight.shape[1], config, metadata)]
    return weight[order_of(part, len(weight), config, metadata)]


def columns_of(count: int, config: Any, metadata: Mapping[str, Any]) -> Tensor:
    """Return the column of transformers that each column of ssm_out is."""
    return _tiled(count, config) if metadata["general.architecture"] in _DELTA[:2] else torch.arange(count)


def order_of(part: str, count: int, config: Any, metadata: Mapping[str, Any]) -> Tensor:
    """Return the row of transformers that each row of a file is."""
    rows = torch.arange(count)
    name = metadata["general.architecture"]
    if name in ("nemotron_h", "nemotron_h_moe", "granitehybrid") and part.startswith(("attn_q.", "attn_k.")):
        heads = config.num_attention_heads if part.startswith("attn_q.") else config.num_key_value_heads
        return rows.view(heads, 2, -1).transpose(1, 2).flatten()
    if name not in _DELTA[:2]:
        return rows
    if part in ("attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"):
        return _tiled(count, config)
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return torch.cat([rows[:keys], keys + _tiled(count - keys, config)])
    return rows


def _tiled(count: int, config: Any) -> Tensor:
    """Order value heads by their number within a key head."""
    rows = torch.arange(count)
    num_keys = config.linear_num_key_heads
    return rows.view(num_keys, config.linear_num_value_heads // num_keys, -1).transpose(0, 1).flatten()


def _multiplied(own: str, part: str, weight: Tensor, config: Any) -> Tensor:
    """Multiply the weights of Falcon-H1, as its conversion script does; it leaves biases as they are."""
    if own in ("token_embd.weight", "output.weight"):
        head = own == "output.weight"
        return weight * (config.lm_head_multiplier if head else config.embedding_multiplier)
    into = config.attention_in_multiplier
    factors = {
        "ffn_down.weight": config.mlp_multipliers[1],
        "ffn_gate.weight": config.mlp_multipliers[0],
        "attn_k.weight": config.key_multiplier * into,
        "attn_q.weight": into,
        "attn_v.weight": into,
        "attn_output.weight": config.attention_out_multiplier,
        "ssm_out.weight": config.ssm_out_multiplier,
    }
    if part != "ssm_in.weight":
        return weight * factors.get(part, 1.0)
    inner, groups = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    sizes = inner, inner, groups, groups, config.mamba_n_heads
    rows = torch.cat(
        [torch.full((size,), each) for size, each in zip(sizes, config.ssm_multipliers, strict=True)]
    )
    return weight * config.ssm_in_multiplier * rows[:, None]
