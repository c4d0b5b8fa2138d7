"""Read what config.json says about a vision tower. The text model is read by itself: see `multimodal`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import check_bool, check_int, check_number, shown
from ..config import ModelConfig, TensorNames
from ..spec import NormSpec
from ..towers import (
    AxialRope,
    AxisTable,
    EmbedSpec,
    MergeSpec,
    PoolSpec,
    StackSpec,
    TowerNames,
    TowerSpec,
    VisionSpec,
)
from .reading import CEILINGS, Config, activation_of

VISION = "vision."  # how the names of a tower's tensors begin in the decoder's terms
PROJECTOR = "projector."
Seen = tuple[VisionSpec, TensorNames]
MAX_IMAGE_SIZE = 16384
_SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_SIGLIP_NAMES = TowerNames(
    patch="embeddings.patch_embedding",
    layers="encoder.layers.",
    before_attention="layer_norm1",
    query_key_value=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
    before_mlp="layer_norm2",
    gate=None,
    up="mlp.fc1",
    down="mlp.fc2",
    positions="embeddings.position_embedding",
    last_norm="post_layernorm",
)


_LLAVA_PROJECTORS = dict.fromkeys(("multi_modal_projector.", "model.multi_modal_projector."), PROJECTOR)


def _with_tower(
    text: TensorNames,
    towers: tuple[str, ...],
    skipped: tuple[str, ...] = (),
    projectors: Mapping[str, str] = _LLAVA_PROJECTORS,
) -> TensorNames:
    """Return the names of the tensors of text and tower together.

    towers: the prefixes of the tower's tensors in checkpoints, the longest first.
    skipped: names of a part of the tower that is not loaded.
    projectors: prefixes of the projector's tensors, and what these are in the decoder's terms.
    """
    read = {**projectors, **dict.fromkeys(towers, VISION)}
    left = tuple(each for each in text.skipped_prefixes if each not in read)
    more = tuple(tower + each for tower in towers for each in skipped)
    return replace(text, prefixes=(*read.items(), *text.prefixes), skipped_prefixes=left + more)


def _size(vision: Config, name: str, most: int | None = None) -> int:
    return check_int(CheckpointError, f"vision_config.{name}", vision.get(name), 1, most or CEILINGS[name])


def _tower_sizes(vision: Config) -> dict[str, Any]:
    """Read the sizes that all towers have. Raises CheckpointError for those that contradict each other."""
    hidden = _size(vision, "hidden_size")
    num_heads = _size(vision, "num_attention_heads")
    if hidden % (2 * num_heads) and vision.get("head_dim") is None:
        raise CheckpointError(
            f"vision_config.hidden_size {hidden} does not divide into {num_heads} heads of even size"
        )
    channels = _size(vision, "num_channels", 3)
    if channels != 3:
        raise UnsupportedModelError(f"vision_config.num_channels {channels} is not supported; 3 is")
    return {
        "hidden_size": hidden,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": hidden // num_heads,
        "inner_size": _size(vision, "intermediate_size"),
        "num_layers": _size(vision, "num_hidden_layers"),
        "patch_size": _size(vision, "patch_size", 64),
    }


def _require_type(vision: Config, wanted: str) -> None:
    kind = vision.get("model_type", wanted)
    if kind != wanted:
        raise UnsupportedModelError(f"vision_config.model_type {shown(kind)} is not supported; {wanted} is")


def _gemma3(hf: Config, vision: Config, text: ModelConfig, names: TensorNames) -> Seen:
    _require_type(vision, "siglip_vision_model")
    vision = {**_SIGLIP, **vision}
    sizes = _tower_sizes(vision)
    image_size = _size(vision, "image_size", MAX_IMAGE_SIZE)
    patch_size = sizes["patch_size"]
    grid = image_size // patch_size
    eps = check_number(CheckpointError, "vision_config.layer_norm_eps", vision["layer_norm_eps"], 0, 1)
    tokens = hf.get("mm_tokens_per_image", 256)
    num_tokens = check_int(CheckpointError, "mm_tokens_per_image", tokens, 1, grid**2)
    side = math.isqrt(num_tokens)
    if image_size % patch_size or side**2 != num_tokens or grid % side:
        raise CheckpointError(
            f"mm_tokens_per_image {num_tokens} must be squares that divide {grid} x {grid} patches, those of "
            f"{patch_size} pixels in images of {image_size}"
        )
    windows = [each.window for each in text.attentions.values() if each.window is not None]
    if windows and min(windows) < num_tokens:
        raise UnsupportedModelError(
            f"mm_tokens_per_image {num_tokens} is not supported with sliding_window {min(windows)}: the "
            "tokens of an image must see each other in every layer"
        )
    tower = TowerSpec(
        **sizes,
        names=_SIGLIP_NAMES,
        norm=NormSpec(eps, subtracts_mean=True),
        activation=activation_of(vision, "hidden_act", ("gelu_tanh", "gelu")),  # type: ignore[arg-type]
        grid=grid,
    )
    spec = VisionSpec(
        family="gemma3",
        tower=tower,
        projector=PoolSpec(side=grid // side, norm=NormSpec(eps, unit_offset=True)),
        token_id=_token_id(hf, "image_token_index", 262144, text),
        tokens_per_image=num_tokens,
        sees_itself=True,
        boundary_ids=(
            _token_id(hf, "boi_token_index", 255999, text),
            _token_id(hf, "eoi_token_index", 256000, text),
        ),
    )
    return spec, _with_tower(
        names,
        (
            "vision_tower.vision_model.",
            "model.vision_tower.vision_model.",
            "vision_tower.",
            "model.vision_tower.",
        ),
        skipped=("head.",),
    )


_GEMMA4 = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "num_channels": 3,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": False,
}
_GEMMA4_NAMES = TowerNames(
    patch="patch_embedder.input_proj",
    layers="encoder.layers.",
    before_attention="input_layernorm",
    query_key_value=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    before_mlp="pre_feedforward_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    positions="patch_embedder.position_embedding_table",
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    linear=".linear",
)


def _gemma4(hf: Config, vision: Config, text: ModelConfig, names: TensorNames) -> Seen:
    _require_type(vision, "gemma4_vision")
    vision = {**_GEMMA4, **vision}
    sizes = _tower_sizes(vision)
    head_dim = _size(vision, "head_dim")
    num_kv_heads = _size(vision, "num_key_value_heads")
    if head_dim % 4 or sizes["num_heads"] % num_kv_heads:
        raise CheckpointError(
            f"vision_config.head_dim {head_dim} must be a multiple of 4, and num_attention_heads "
            f"{sizes['num_heads']} one of num_key_value_heads {num_kv_heads}"
        )
    if _flag(vision, "attention_bias"):
        raise UnsupportedModelError("vision_config.attention_bias true is not supported")
    norm = NormSpec(_eps(vision))
    tower = TowerSpec(
        **{**sizes, "head_dim": head_dim, "num_kv_heads": num_kv_heads},
        names=_GEMMA4_NAMES,
        norm=norm,
        activation=activation_of(vision, "hidden_activation", ("gelu_tanh", "gelu")),  # type: ignore[arg-type]
        gated=True,
        bias=False,
        patch_bias=False,
        axes=AxisTable(_size(vision, "position_embedding_size", 2**20), by_axis=True),
        rope=AxialRope(_theta(vision, 100.0), by_halves=True),
        scale=1.0,
        value_norm=True,
        is_clipped=_flag(vision, "use_clipped_linears"),
        is_flat=True,
    )
    side = _size(vision, "pooling_kernel_size", 16)
    projector = EmbedSpec(side=side, norm=norm, is_standardised=_flag(vision, "standardize"))
    projectors = {"model.embed_vision.": PROJECTOR}
    return _seen_by_gemma4(hf, text, tower, projector), _with_tower(
        names, ("model.vision_tower.",), projectors=projectors
    )


def _seen_by_gemma4(hf: Config, text: ModelConfig, tower: TowerSpec, projector: EmbedSpec) -> VisionSpec:
    own = hf.get("text_config")
    own = own if isinstance(own, dict) else {}
    padding = own.get("pad_token_id")
    return VisionSpec(
        family="gemma4",
        tower=tower,
        projector=projector,
        token_id=_token_id(hf, "image_token_id", 258880, text),
        tokens_per_image=None,
        sees_itself=own.get("use_bidirectional_attention") == "vision",
        only_in_windows=True,
        padding_id=0 if padding is None else _token_id(own, "pad_token_id", 0, text),
        boundary_ids=(
            _token_id(hf, "boi_token_id", 255999, text),
            _token_id(hf, "eoi_token_id", 258882, text),
        ),
    )


_GEMMA4_UNIFIED = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 3840,
    "mm_posemb_size": 1120,
    "rms_norm_eps": 1e-6,
    "output_proj_dims": 3840,
}
_GEMMA4_UNIFIED_NAMES = TowerNames(
    patch="patch_dense",
    layers="",
    before_attention="",
    query_key_value=(),
    output="",
    before_mlp="",
    gate=None,
    up="",
    down="",
    positions="pos_embedding",
    first_norm="pos_norm",
    patch_norms=("patch_ln1", "patch_ln2"),
)


def _gemma4_unified(hf: Config, vision: Config, text: ModelConfig, names: TensorNames) -> Seen:
    """Read Gemma 4 without an encoder: patches of merged squares, which a layer projects."""
    _require_type(vision, "gemma4_unified_vision")
    vision = {**_GEMMA4_UNIFIED, **vision}
    hidden = _size(vision, "mm_embed_dim", CEILINGS["hidden_size"])
    if vision["output_proj_dims"] != hidden:
        raise CheckpointError(
            f"vision_config.output_proj_dims {shown(vision['output_proj_dims'])} contradicts mm_embed_dim "
            f"{hidden}"
        )
    tower = TowerSpec(
        names=_GEMMA4_UNIFIED_NAMES,
        num_layers=0,
        hidden_size=hidden,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        inner_size=0,
        patch_size=_size(vision, "patch_size", 64) * _size(vision, "pooling_kernel_size", 16),
        norm=NormSpec(1e-5, subtracts_mean=True),
        activation="gelu_tanh",
        axes=AxisTable(_size(vision, "mm_posemb_size", 2**20), by_axis=False),
        is_flat=True,
    )
    projector = EmbedSpec(side=1, norm=NormSpec(_eps(vision)), is_scaled=False)
    projectors = {
        "model.embed_vision.multimodal_embedder.": PROJECTOR,
        "model.embed_vision.embedding_projection.": f"{PROJECTOR}embedding_projection.",
    }
    return _seen_by_gemma4(hf, text, tower, projector), _with_tower(
        names, ("model.vision_embedder.", "model.embed_vision."), projectors=projectors
    )


_PIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
}
_PIXTRAL_NAMES = TowerNames(
    patch="patch_conv",
    layers="transformer.layers.",
    before_attention="attention_norm",
    query_key_value=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    output="attention.o_proj",
    before_mlp="ffn_norm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    first_norm="ln_pre",
)


def _mistral3(hf: Config, vision: Config, text: ModelConfig, names: TensorNames) -> Seen:
    _require_type(vision, "pixtral")
    vision = {**_PIXTRAL, **vision}
    sizes = _tower_sizes(vision)
    if hf.get("vision_feature_layer", -1) not in (-1, [-1]):
        raise UnsupportedModelError(
            f"vision_feature_layer {shown(hf['vision_feature_layer'])} is not supported; -1 is"
        )
    given_head_dim = vision.get("head_dim")
    if given_head_dim not in (None, sizes["hidden_size"] // sizes["num_heads"]):
        raise UnsupportedModelError(
            f"vision_config.head_dim {shown(given_head_dim)} is not supported; hidden_size divided by "
            "num_attention_heads is"
        )
    side = check_int(CheckpointError, "spatial_merge_size", hf.get("spatial_merge_size", 2), 1, 16)
    bias = check_bool(
        CheckpointError, "multimodal_projector_bias", hf.get("multimodal_projector_bias", False)
    )
    activation_of({"projector_hidden_act": "gelu", **hf}, "projector_hidden_act", ("gelu",))
    tower = TowerSpec(
        **sizes,
        names=_PIXTRAL_NAMES,
        norm=NormSpec(1e-5),
        activation=activation_of(vision, "hidden_act", ("silu", "gelu")),  # type: ignore[arg-type]
        gated=True,
        bias=False,
        patch_bias=False,
        rope=AxialRope(_theta(vision), is_interleaved=True),
    )
    spec = VisionSpec(
        family="mistral3",
        tower=tower,
        projector=MergeSpec(side=side, norm=NormSpec(text.norm.eps), bias=bias),
        token_id=_token_id(hf, "image_token_index", 10, text),
        tokens_per_image=None,
        sees_itself=False,
    )
    return spec, _with_tower(names, ("vision_tower.", "model.vision_tower."))


_QWEN3 = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
    "hidden_act": "gelu_pytorch_tanh",
}
_QWEN3_NAMES = TowerNames(
    patch="patch_embed.proj",
    layers="blocks.",
    before_attention="norm1",
    query_key_value=("attn.qkv",),
    output="attn.proj",
    before_mlp="norm2",
    gate=None,
    up="mlp.linear_fc1",
    down="mlp.linear_fc2",
    positions="pos_embed",
)


def _qwen3_vl(hf: Config, vision: Config, text: ModelConfig, names: TensorNames) -> Seen:
    vision = {**_QWEN3, **vision}
    for ours, theirs in {
        "num_hidden_layers": "depth",
        "num_attention_heads": "num_heads",
        "num_channels": "in_channels",
    }.items():
        vision[ours] = vision[theirs]
    sizes = _tower_sizes(vision)
    num_places = _size(vision, "num_position_embeddings", 2**20)
    grid = math.isqrt(num_places)
    if grid**2 != num_places:
        raise CheckpointError(f"vision_config.num_position_embeddings {num_places} must be a square")
    if _size(vision, "out_hidden_size", 2**17) != text.hidden_size:
        raise CheckpointError(
            f"vision_config.out_hidden_size {vision['out_hidden_size']} contradicts the hidden_size "
            f"{text.hidden_size} of text_config"
        )
    given = vision["deepstack_visual_indexes"]
    if not isinstance(given, list | tuple):
        raise CheckpointError(f"vision_config.deepstack_visual_indexes must be a list, got {shown(given)}")
    name = "vision_config.deepstack_visual_indexes"
    features = tuple(check_int(CheckpointError, name, each, 0, sizes["num_layers"] - 1) for each in given)
    if len({*features}) < len(features) or len(features) >= text.num_layers:
        raise CheckpointError(
            f"{name} must be fewer layers than the text model's, once each, got {shown(given)}"
        )
    tower = TowerSpec(
        **sizes,
        names=_QWEN3_NAMES,
        norm=NormSpec(1e-6, subtracts_mean=True),
        activation=activation_of(vision, "hidden_act", ("gelu_tanh", "gelu")),  # type: ignore[arg-type]
        grid=grid,
        is_interpolated=True,
        frames=_size(vision, "temporal_patch_size", 8),
        rope=AxialRope(_theta(vision), is_interleaved=False),
    )
    side = _size(vision, "spatial_merge_size", 16)
    spec = VisionSpec(
        family="qwen3_vl",
        tower=tower,
        projector=StackSpec(side=side, norm=NormSpec(1e-6, subtracts_mean=True), features=features),
        token_id=_token_id(hf, "image_token_id", 151655, text),
        tokens_per_image=None,
        sees_itself=False,
        boundary_ids=(
            _token_id(hf, "vision_start_token_id", 151652, text),
            _token_id(hf, "vision_end_token_id", 151653, text),
        ),
        sections=_sections(hf, text),
    )
    return spec, _with_tower(names, ("model.visual.", "visual."))


def _sections(hf: Config, text: ModelConfig) -> tuple[int, int, int]:
    """Return how many frequencies of a head rotate by time, row and column."""
    own = hf.get("text_config")
    own = own if isinstance(own, dict) else {}
    rope = own.get("rope_parameters") or own.get("rope_scaling") or {}
    given = rope.get("mrope_section", [24, 20, 20])
    half = next(iter(text.attentions.values())).kv.key_dim // 2
    is_list = isinstance(given, list | tuple) and len(given) == 3
    if not is_list or any(type(each) is not int or each < 0 for each in given) or sum(given) != half:
        raise CheckpointError(f"mrope_section must be three numbers of {half} in all, got {shown(given)}")
    if 3 * max(given[1:]) > half + 2:
        raise UnsupportedModelError(
            f"mrope_section {shown(given)} is not supported: rows and columns do not fit"
        )
    return given[0], given[1], given[2]


def _eps(vision: Config) -> float:
    return check_number(CheckpointError, "vision_config.rms_norm_eps", vision["rms_norm_eps"], 0, 1)


def _flag(vision: Config, name: str) -> bool:
    return check_bool(CheckpointError, f"vision_config.{name}", vision[name])


def _theta(vision: Config, usual: float = 1e4) -> float:
    """Return the base of a tower's rotary embedding."""
    rope = vision.get("rope_parameters")
    given = rope if isinstance(rope, dict) else vision
    if given.get("rope_type", "axial") not in ("axial", "default"):
        raise UnsupportedModelError(
            f"vision_config.rope_type {shown(given['rope_type'])} is not supported; axial is"
        )
    name = "vision_config.rope_theta"
    return check_number(CheckpointError, name, given.get("rope_theta", usual), 1, 1e9)


def _token_id(hf: Config, key: str, default: int, text: ModelConfig) -> int:
    """Return the token that stands for embeddings of images."""
    other = key.replace("_index", "_id")
    name = other if hf.get(other) is not None else key
    return check_int(CheckpointError, name, hf.get(name, default), 0, text.vocab_size - 1)


Read = Callable[[Config, Config, ModelConfig, TensorNames], Seen]
VISION_READERS: Mapping[str, Read] = {
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Gemma4UnifiedForConditionalGeneration": _gemma4_unified,
    "Mistral3ForConditionalGeneration": _mistral3,
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_vl,
}
# What else a model could see with, and why it does not yet.
NOT_YET = (
    "its images are not supported yet, only its text is; those of "
    f"{', '.join(name.removesuffix('ForConditionalGeneration') for name in VISION_READERS)} are"
)


def require_reader(text: ModelConfig) -> Read:
    """Return the reader of a model's vision tower. Raises UnsupportedModelError if no reader is known."""
    read = VISION_READERS.get(text.architecture)
    if read is None:
        raise UnsupportedModelError(f"{text.architecture}: {NOT_YET}")
    return read


def vision_of(hf: Config, text: ModelConfig) -> Seen:
    """Return what a model sees images with, and the names of all tensors, the tower's included.

    hf: config.json. text: the model that `hf_config` has read from it.

    Raises UnsupportedModelError for a tower that is not implemented, and CheckpointError for wrong values.
    """
    read = require_reader(text)
    vision = hf.get("vision_config")
    if vision is None:
        raise UnsupportedModelError("config.json has no vision_config")
    if not isinstance(vision, dict):
        raise CheckpointError(f"vision_config must be an object, got {shown(vision)}")
    if "quantization_config" in vision:
        raise UnsupportedModelError("vision_config.quantization_config is not supported")
    return read(hf, vision, text, text.tensor_names)
