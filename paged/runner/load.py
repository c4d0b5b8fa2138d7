"""Load a checkpoint onto one device: choose the kernels and the weights' forms, then read the weights."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from ..architectures.config import ModelConfig, TensorNames
from ..architectures.gguf_paths import is_gguf
from ..architectures.hf_config import read_hf, read_quantization
from ..architectures.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec
from ..base.errors import ConfigError, ResourceError
from ..checkpoints.stored import Recognizer, Sources
from ..device.devices import is_shortage, resolve_backend, weights_in_panels
from ..device.host_memory import freed_at_once
from ..kernels.backend import load_kernels
from ..kernels.checks import in_debug_mode
from ..kernels.steps import Needs
from ..model.decoder import Decoder
from ..model.weights.choice import choose_forms
from ..model.weights.loading import (
    KVScales,
    Loader,
    StoredWeights,
    check_sizes,
    check_weights,
    has_own_head,
    open_tensors,
)
from .sizes import Sizes

if TYPE_CHECKING:
    from ..architectures.schemes import Quantization
    from ..architectures.towers import VisionSpec
    from ..kernels.operations import Kernels
    from ..model.model import Model
    from ..model.part import ModelPart

logger = logging.getLogger(__name__)

LEAST_KEPT_BYTES = 64 * 10**6  # of a checkpoint: packing less takes no longer than to find it packed
# Of every model, and of any request's sampling parameters.
_EVERYWHERE = (
    *("paged_attention", "rotary_store_kv", "step_recorder", "take_rows"),
    *("apply_penalties", "greedy", "greedy_of_allowed", "mask_logits", "sample_tokens", "token_logprobs"),
)


def load_model(sizes: Sizes, model_config: ModelConfig, device: torch.device, directory: Path) -> Model:
    """Load the checkpoint in this directory.

    model_config: the sizes' config after `for_context`.

    Raises ConfigError if the options do not suit this machine, and CheckpointError if the checkpoint is
    damaged or contradicts its config.json.
    """
    # Steps give them what the scheduler and the batch have proven.
    kernels = new_kernels(sizes, device, checked=in_debug_mode())
    with _explaining_shortage(sizes.model, device):
        model = _load(sizes, model_config, device, directory, kernels)
    logger.info("read the weights: %s", model.stored_weights)
    return model


def _load(
    sizes: Sizes,
    model_config: ModelConfig,
    device: torch.device,
    directory: Path,
    kernels: Kernels,
    *,
    may_be_kept: bool = True,
) -> Decoder:
    """Load the weights, packed by an earlier start or from the checkpoint."""
    with (
        open_model(sizes, model_config, device, directory, kernels) as (model, loader),
        freed_at_once(),
        _compiling(kernels, needs_of(sizes, model_config, loader)),
    ):
        model.stored_weights = StoredWeights(loader.num_bytes)
        if may_be_kept and are_worth_keeping(sizes, loader):
            from .kept_weights import KeptWeights

            model.kept_weights = KeptWeights.of(sizes, directory, loader)
        if model.kept_weights is None:
            model.load(loader)
        elif not model.kept_weights.load(model, loader):
            return _load(sizes, model_config, device, directory, kernels, may_be_kept=False)
    return model


def are_worth_keeping(sizes: Sizes, loader: Loader) -> bool:
    """Return whether the packed weights of this model are cached for later starts."""
    num_bytes = sum(each.num_bytes for each in loader.sources.values())
    return (
        sizes.config.weights_cache is not False and loader.forms.in_panels and num_bytes >= LEAST_KEPT_BYTES
    )


def needs_of(sizes: Sizes, config: ModelConfig, loader: Loader) -> Needs:
    """Return what the kernels must support, and compile, for a model of these sizes and this loader."""
    return Needs(
        operations=frozenset((*operations_of(config), *(("add_lora",) if sizes.config.enable_lora else ()))),
        dtype=getattr(torch, sizes.dtype),
        cache_dtype=getattr(torch, sizes.kv_dtype),
        head_dims=frozenset((shape.key_dim, shape.value_dim) for shape in config.kv_shapes.values()),
        tower_head_dim=None if config.vision is None else config.vision.tower.attended_head_dim,
        quantization=sizes.config.quantization,
        has_codes=bool(loader.recognizers),
    )


def operations_of(config: ModelConfig) -> Iterator[str]:
    """Yield the operations that steps may launch: those of the layers, and all operations of sampling."""
    yield from _EVERYWHERE
    yield "layer_norm" if config.norm.subtracts_mean else "rms_norm"
    factors = config.embedding_multiplier, config.logits_divisor
    if factors != (1.0, 1.0) or config.logits_softcap is not None:
        yield "scale_and_cap"
    if config.layer_inputs is not None:
        yield from ("gelu_and_mul", "rms_norm", "scale_and_cap")
    for layer in config.layers:
        yield from _of_layer(layer)
    if config.vision is not None:
        yield from _of_vision(config.vision)


def _of_vision(vision: VisionSpec) -> Iterator[str]:
    tower = vision.tower
    for norm in (tower.norm, vision.projector.norm):
        yield "layer_norm" if norm.subtracts_mean else "rms_norm"
    yield from ("add", "gelu")
    if tower.gated and tower.activation != "gelu":
        yield {"silu": "silu_and_mul", "gelu_tanh": "gelu_and_mul"}[tower.activation]


def _of_layer(layer: LayerSpec) -> Iterator[str]:
    if layer.parallel or (layer.state is not None and layer.attention is not None):
        yield "add"
    if layer.scaled:
        yield "scale_and_cap"
    if layer.norms.after_attention:
        yield "rms_norm"
    if layer.state is not None:
        yield "short_conv"
        if layer.state.kind != "conv":
            yield from ("gated_delta" if layer.state.kind == "delta" else "mamba2_scan", "gated_norm")
    if layer.attention is not None:
        yield from _of_attention(layer.attention)
    for part in layer.feed_forwards:
        yield from _of_experts(part) if isinstance(part, ExpertsSpec) else _of_mlp(part)


def _of_attention(spec: AttentionSpec) -> Iterator[str]:
    if spec.qk_norm is not None or spec.value_norm:
        yield "rms_norm"
    if spec.gate:
        yield "scale_by_sigmoid"
    if spec.rope.query_scaling_beta:
        yield "scale_rows"


def _of_mlp(spec: FeedForwardSpec) -> Iterator[str]:
    if not spec.gated:
        yield spec.activation if spec.activation == "relu_squared" else "gelu"
    else:
        yield "silu_and_mul" if spec.activation == "silu" else "gelu_and_mul"


def _of_experts(spec: ExpertsSpec) -> Iterator[str]:
    yield from ("route", "sort_by_expert", "sum_experts")
    if spec.router_scale is not None:
        yield from ("rms_norm", "scale_and_cap")
    activations = {"silu": "silu_and_mul", "gelu_tanh": "gelu_and_mul"}
    yield activations.get(spec.activation, spec.activation)
    if spec.latent_size is not None:
        yield "add"
    if spec.shared is not None:
        yield from _of_mlp(spec.shared)


@contextmanager
def _compiling(kernels: Kernels, needs: Needs) -> Iterator[None]:
    """Compile what an engine needs while the block runs; wait for it at the end.

    Raises ResourceError where compiled kernels cannot be kept.
    """
    with _importing():
        finish = kernels.compile_for(needs, _progress())
    yield
    with _importing():
        finish()


@contextmanager
def _importing() -> Iterator[None]:
    """Turn an ImportError, of Triton, of numba or of its cache, into a ResourceError."""
    try:
        yield
    except ImportError as error:
        raise ResourceError(str(error)) from error


@contextmanager
def _explaining_shortage(model: ModelConfig, device: torch.device) -> Iterator[None]:
    """Turn what an allocation raises into a ResourceError that names the sizes."""
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ResourceError(
            f"no memory for the weights of {model.architecture} on {device}: {model.num_params:,} weights "
            f"({model.num_layers:,} layers of hidden_size {model.hidden_size:,}, vocab_size "
            f"{model.vocab_size:,}); take a smaller model or a narrower dtype, or end other processes there; "
            f"{reason}"
        ) from error


def new_kernels(sizes: Sizes, device: torch.device, *, checked: bool) -> Kernels:
    """Return the kernels of the requested backend; for "auto", of one that supports the model.

    No kernel is compiled yet. Raises ConfigError if the backend is not installed, or does not support the
    model's attention on this device.
    """
    with _importing():
        backend = resolve_backend(sizes.config.attention_backend, device)
        kernels = load_kernels(backend, checked=checked, ahead=False)
    head_dims = {dim for shape in sizes.model.kv_shapes.values() for dim in (shape.key_dim, shape.value_dim)}
    vision = sizes.model.vision
    if vision is not None and vision.tower.attended_head_dim is not None:
        head_dims.add(vision.tower.attended_head_dim)
    own = map(sizes.shard.attention, sizes.model.attentions.values())
    group = max(spec.num_heads // spec.kv.num_kv_heads for spec in own)
    if not _fits(kernels, head_dims, group, sizes.target):
        from .torch_instead import require_torch

        require_torch(kernels, head_dims, group, sizes, device)
        kernels = load_kernels("torch", checked=checked)
    try:
        kernels.check_cache_dtype(getattr(torch, sizes.kv_dtype), sizes.target)
    except ValueError as error:
        asked = f"kv_cache_dtype {sizes.config.kv_cache_dtype!r}"
        raise ResourceError(f"{asked} is not available here, but 'int8' is: {error}") from error
    return kernels


def _fits(kernels: Kernels, head_dims: set[int], group: int, target: str) -> bool:
    with suppress(ValueError):  # of a GPU without kernels
        return group <= kernels.max_group and all(dim in kernels.head_dims(target) for dim in head_dims)
    return False


def _progress() -> Any:
    """Return what shows the compilation of kernels on a terminal; None if it is logged instead."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from .compile_bar import compile_bar

    return compile_bar


@contextmanager
def open_model(
    sizes: Sizes, model_config: ModelConfig, device: torch.device, directory: Path, kernels: Kernels
) -> Iterator[tuple[Decoder, Loader]]:
    """Open the checkpoint in this directory. Yield the model on the meta device, and a loader for its
    weights.

    Only headers, and numbers that describe how weights are stored, have been read when it yields.

    Raises the errors of `load_model`.
    """
    config = sizes.config
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    if model_config.exceeds_float16 and dtype == torch.float16:
        raise ConfigError(
            f"dtype float16 is too narrow for {model_config.architecture}, whose activations exceed 65,504; "
            "take dtype='bfloat16' or 'float32'"
        )
    names = model_config.tensor_names
    quantization = read_quantization(read_hf(directory))
    if quantization is not None and config.quantization is not None:
        raise ConfigError(
            f"quantization {config.quantization!r} is for weights in floats, but those of {directory} are "
            f"quantised by {quantization.method} already; leave it out"
        )
    with open_tensors(directory, names) as sources:
        recognizers = _recognizers_of(quantization, names, sources)
        if config.quantization is not None:
            from .quantised import require_no_blocks

            require_no_blocks(sources, config.quantization)
        kv_scales: Mapping[int, KVScales] = {}
        if quantization is not None:
            from .quantised import take_scales

            sources, kv_scales = take_scales(sizes, model_config, device, quantization, sources)
        # Before anything is allocated: a config.json that contradicts the checkpoint may ask for any amount.
        check_sizes(model_config, sources, directory)
        if model_config.tie_word_embeddings and has_own_head(sources):
            model_config = replace(model_config, tie_word_embeddings=False)
        forms = choose_forms(
            device,
            dtype,
            config.quantization,
            tied=model_config.tie_word_embeddings,
            in_panels=weights_in_panels(config, kernels, device, dtype),
            has_coded_linear=kernels.has_coded_linear,
            num_shards=sizes.shard.count,
        )
        whole = model = on_meta(model_config, kernels, sizes)
        if sizes.part is not None:
            model = on_meta(model_config, kernels, sizes, sizes.part)
        if config.enable_lora:
            from ..model.lora import leave_gates_apart

            leave_gates_apart(model, config.lora_target_modules)
        if config.quantization == "int4":
            from .quantised import require_whole_groups

            require_whole_groups(whole)
        check_weights(whole.loadables(), sources, names, directory, recognizers)
        loader = Loader(sources, forms, device, recognizers, kv_scales)
        if model_config.vision is not None and config.quantization is not None:
            from .quantised import float_forms

            loader = replace(loader, float_forms=float_forms(sizes, kernels, device))
        yield model, loader


def on_meta(
    model_config: ModelConfig, kernels: Kernels, sizes: Sizes, part: ModelPart | None = None
) -> Decoder:
    """Return a model, by default the whole one, without memory for its parameters."""
    with torch.device("meta"), _ParametersOf(getattr(torch, sizes.dtype)):
        return Decoder(model_config, kernels, part)


def _recognizers_of(
    quantization: Quantization | None, names: TensorNames, sources: Sources
) -> tuple[Recognizer, ...]:
    """Return the recognizers of quantised weights: by config.json, or of a GGUF file."""
    if quantization is None and not any(is_gguf(each.path.name) for each in islice(sources.values(), 1)):
        return ()
    from ..checkpoints.formats.recognizers import recognizers_of

    return recognizers_of(quantization, names)


class _ParametersOf(TorchFunctionMode):
    """Context in which torch.empty makes tensors of this dtype, where it is given none, on this thread alone.

    The default of torch is one for all threads, which may make engines of several dtypes, or run others.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") == "empty":
            kwargs.setdefault("dtype", self.dtype)
        return function(*args, **kwargs)
