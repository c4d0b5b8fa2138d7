"""Models of transformers as GGUF files, converted as llama.cpp's script does. Names are those of `gguf`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support import gguf_states
from tests.support.gguf_files import Stored, in_type, write_gguf

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "gpt_neox": "gptneox",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_FLOATS = ("ffn_gate_inp", "conv", "ssm_a", "ssm_d", "ssm_norm")  # which llama.cpp never quantises
INTERLEAVED = ("llama", "granite", "granitemoe", "smollm3")
# From keys of config.json to those of the metadata; whichever there are.
KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "use_parallel_residual": "use_parallel_residual",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": "attention.shared_kv_layers",
}


def metadata_of(config: Any, name: str = "") -> dict[str, Any]:
    """Return the metadata of a model, without a tokenizer. name: what general.architecture is."""
    name = name or ARCHITECTURES.get(config.model_type) or gguf_states.architecture_of(config)
    found: dict[str, Any] = {}
    values = config.to_dict()
    for theirs, ours in KEYS.items():
        value = values.get(theirs, None if name == "gemma4" else getattr(config, theirs, None))
        if value is not None:
            found[ours] = value
    if name == "gpt2":
        found["feed_forward_length"] = config.n_inner
    head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    found["attention.key_length"] = found["attention.value_length"] = head_dim
    if name in ("gpt-oss", "minimax-m2"):
        found["expert_feed_forward_length"] = config.intermediate_size
    if name == "glm4moe":
        found["block_count"] += config.num_nextn_predict_layers
        found["expert_weights_norm"] = config.norm_topk_prob
    if name in ("glm4moe", "minimax-m2"):
        found["expert_gating_func"] = 2
    if name == "gemma4":
        found |= _gemma4(values, head_dim)
    window = getattr(config, "sliding_window", None)
    if window is not None and name != "smollm3":
        found["attention.sliding_window"] = window
    elif name == "phi3":
        found["attention.sliding_window"] = 0
    if name in ("olmo2", "gemma4") and config.model_type != "olmo2":
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        found["attention.sliding_window_pattern"] = kinds
    found |= _rope(config, name, found["attention.key_length"])
    if gguf_states.has_states({"general.architecture": name}):
        found |= gguf_states.metadata_of(config, name)
        found = {key: value for key, value in found.items() if value is not None}
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in found.items()}


def _gemma4(values: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return what layers have of their own. head_dim: with a window."""
    num_layers = values["num_hidden_layers"]
    num_wide = values["num_kv_shared_layers"] if values["use_double_wide_mlp"] else 0
    inner = values["intermediate_size"]
    own = [values["per_layer_config"].get(str(layer), {}) for layer in range(num_layers)]
    width = max(each.get("head_dim", head_dim) for each in own)
    heads = [each.get("num_key_value_heads", values["num_key_value_heads"]) for each in own]
    return {
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.key_length_swa": head_dim,
        "attention.value_length_swa": head_dim,
        "attention.head_count_kv": heads if len({*heads}) > 1 else heads[0],
        "feed_forward_length": [inner] * (num_layers - num_wide) + [2 * inner] * num_wide
        if num_wide
        else inner,
        "rope.dimension_count_swa": head_dim,
    }


def _rope(config: Any, name: str, head_dim: int) -> dict[str, Any]:
    ropes = getattr(config, "rope_parameters", None)
    if not ropes:
        return {}
    rope = ropes.get("full_attention", ropes)
    found: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    part = 1.0 if name == "gemma4" else rope.get("partial_rotary_factor", 1.0)
    found["rope.dimension_count"] = int(head_dim * part)
    if "sliding_attention" in ropes:
        found["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        found["rope.scaling.type"] = rope["rope_type"]
        found["rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        found["rope.scaling.yarn_beta_fast"] = float(rope["beta_fast"])
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if name == "phi3":
        trained = config.original_max_position_embeddings
        found["rope.scaling.original_context_length"] = trained
        if rope["rope_type"] == "longrope":
            found["rope.scaling.type"] = "longrope"
            scale = torch.tensor(config.max_position_embeddings / trained)
            found["rope.scaling.attn_factor"] = float((1 + scale.log() / torch.tensor(trained).log()).sqrt())
    return found


def write_model(
    path: Path,
    model: Any,
    type_of: Callable[[str], str] = lambda _: "F32",
    more: Mapping[str, Any] | None = None,
    seed: int = 0,
    architecture: str = "",
) -> Path:
    """Write a model, and give it the numbers that the file has.

    architecture: by default that of the model.

    type_of: the type of a weight, by its name in the file; vectors and routers are F32.
    more: metadata; None takes a key out.
    """
    generator = torch.Generator().manual_seed(seed)
    metadata = metadata_of(model.config, architecture)
    tensors: dict[str, Stored] = {}
    with torch.no_grad():
        for own, parameter in _named(model, metadata):
            weight = converted(own, parameter, model.config, metadata)
            kind = "F32" if weight.dim() == 1 or any(part in own for part in _FLOATS) else type_of(own)
            tensors[own], numbers = in_type(kind, weight, generator)
            if kind != "F32":
                parameter.copy_(_restored(own, numbers, model.config, metadata))
    if model.config.model_type == "glm4_moe":
        tensors |= _further_layers(model.config, tensors)
    for name, values in _extra(model.config, metadata).items():
        tensors[name], _ = in_type("F32", values, generator)
    changed = {**metadata, **(more or {})}
    return write_gguf(path, {key: value for key, value in changed.items() if value is not None}, tensors)


def _further_layers(config: Any, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return what layers beyond the last have, which predict further tokens."""
    last = config.num_hidden_layers - 1
    found = {
        name.replace(f"blk.{last}.", f"blk.{last + 1}."): stored
        for name, stored in tensors.items()
        if name.startswith(f"blk.{last}.")
    }
    return found | {f"blk.{last + 1}.nextn.enorm.weight": tensors["output_norm.weight"]}


def _named(model: Any, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters by their names in a file: gates and ups of experts apart, and one row as a vector."""
    parameters = [*model.named_parameters(), *_buffers(model)]
    for name, parameter in parameters:
        if gguf_states.has_states(metadata):
            yield from gguf_states.named(name, parameter, model.config, metadata)
        elif "experts.gate_up_proj" in name and metadata["general.architecture"] != "gemma4":
            is_bias = name.endswith("_bias")
            last = name.removesuffix("_bias").replace("gate_up", "{}") + (".bias" if is_bias else ".weight")
            last = last.replace("block_sparse_moe.", "mlp.")
            for part, own in zip(("gate", "up"), _halves(model.config, parameter, is_bias), strict=True):
                yield name_of(last.format(part), metadata), own
        elif name.endswith("per_expert_scale"):
            yield f"blk.{name.split('.')[2]}.ffn_down_exps.scale", parameter
        elif name.endswith("router.scale"):
            yield f"blk.{name.split('.')[2]}.ffn_gate_inp.scale", parameter
        elif "experts." in name and "shared_experts." not in name:
            is_transposed = model.config.model_type == "gpt_oss" and parameter.dim() == 3
            own = parameter.transpose(1, 2) if is_transposed else parameter
            kind = "bias" if name.endswith("_bias") else "weight"
            last = name.removesuffix("_bias").replace("block_sparse_moe.", "mlp.")
            yield name_of(f"{last}.{kind}", metadata), own
        elif name.endswith("sinks"):
            yield f"{name_of(name, metadata)}.weight", parameter
        else:
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
            name = name.replace("layer_scalar", "layer_scalar.weight").replace(
                "block_sparse_moe.router.", "block_sparse_moe.gate."
            )
            one_row = name.endswith("shared_expert_gate.weight")
            yield name_of(name, metadata), parameter[0] if one_row else parameter


def _buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that files have."""
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "layer_scalar", "expert_bias")):
            yield name, buffer


def _halves(config: Any, parameter: Tensor, is_bias: bool) -> Sequence[Tensor]:
    """Return views of gates and ups of experts. Those of gpt-oss alternate, and its weights are [in, out]."""
    if config.model_type != "gpt_oss":
        return parameter.chunk(2, dim=1)
    rows = parameter if is_bias else parameter.transpose(1, 2)
    return rows[:, ::2], rows[:, 1::2]


def name_of(name: str, metadata: Mapping[str, Any]) -> str:
    """Return what llama.cpp calls a tensor of transformers."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architectures = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    own = metadata["general.architecture"]
    names = get_tensor_name_map(architectures[own], metadata[f"{own}.block_count"])
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def converted(own: str, weight: Tensor, config: Any, metadata: Mapping[str, Any]) -> Tensor:
    architecture = metadata["general.architecture"]
    if gguf_states.has_states(metadata):
        return gguf_states.converted(own, weight, config, metadata)
    if architecture in ("gemma2", "gemma3") and own.endswith("norm.weight"):
        return weight + 1
    if architecture == "gpt2" and weight.dim() == 2 and own.startswith("blk."):
        return weight.T
    return weight[_order(own, weight, config, metadata)]


def _restored(own: str, weight: Tensor, config: Any, metadata: Mapping[str, Any]) -> Tensor:
    out = torch.empty_like(weight)
    if gguf_states.has_states(metadata):
        part = own.split(".", 2)[-1]
        if part == "ssm_out.weight":
            out[:, gguf_states.columns_of(weight.shape[1], config, metadata)] = weight
        else:
            out[gguf_states.order_of(part, len(weight), config, metadata)] = weight
        return out
    out[_order(own, weight, config, metadata)] = weight
    return out


def _order(own: str, weight: Tensor, config: Any, metadata: Mapping[str, Any]) -> Tensor:
    """Return the row of transformers that each row of the file is."""
    architecture = metadata["general.architecture"]
    rows = torch.arange(len(weight))
    if architecture in INTERLEAVED and "attn_q." in own:
        return rows.view(config.num_attention_heads, 2, -1).transpose(1, 2).flatten()
    if architecture in INTERLEAVED and "attn_k." in own:
        return rows.view(config.num_key_value_heads, 2, -1).transpose(1, 2).flatten()
    if architecture == "gptneox" and "attn_qkv." in own:
        return rows.view(config.num_attention_heads, 3, -1).transpose(0, 1).flatten()
    return rows


def _extra(config: Any, metadata: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of rotary embeddings."""
    ropes = getattr(config, "rope_parameters", None) or {}
    if config.model_type == "gemma4_text":
        count = metadata["gemma4.attention.key_length"] // 2
        rotated = int(ropes["full_attention"]["partial_rotary_factor"] * count)
        factors = torch.ones(count)
        factors[rotated:] = 1e30
        return {"rope_freqs.weight": factors}
    if ropes.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": torch.tensor(ropes[f"{kind}_factor"]) for kind in ("long", "short")
        }
    if ropes.get("rope_type") != "llama3":
        return {}
    # As in conversion/llama.py of llama.cpp.
    head_dim = metadata["llama.attention.key_length"]
    frequencies = 1.0 / (
        ropes["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    )
    trained, factor = ropes["original_max_position_embeddings"], ropes["factor"]
    low, high = ropes["low_freq_factor"], ropes["high_freq_factor"]
    found = []
    for wavelength in (2 * torch.pi / frequencies).tolist():
        smooth = (trained / wavelength - low) / (high - low)
        if wavelength < trained / high:
            found.append(1.0)
        else:
            found.append(factor if wavelength > trained / low else 1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": torch.tensor(found)}
