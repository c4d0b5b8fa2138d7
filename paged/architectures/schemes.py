"""What config.json says of quantised weights: which scheme each module is stored in.

quantization_config is read as data, for all methods into the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, NoReturn

import regex

from ..base.errors import CheckpointError, UnsupportedModelError
from ..base.validation import check_bool, check_int
from ..base.validation import shown as shown_whole
from .config import LAYERS, ModelConfig
from .spec import AttentionSpec, ExpertsSpec, FeedForwardSpec
from .states import StateSpec

Config = Mapping[str, Any]
Kind = Literal["gptq", "awq", "packed integers", "integers", "fp8", "mxfp4", "nvfp4"]
# What a file of weights may hold beside them: scales of activations, which are not quantised here, and of K
# and V, which only a cache in fp8 takes: see `weights.kv_scales`.
UNUSED = (
    *("input_scale", "input_global_scale", "input_zero_point", "activation_scale", "output_scale"),
    *("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "k_zero_point", "v_zero_point"),
)
SUPPORTED = (
    "gptq, awq, auto-round, compressed-tensors (pack-quantized, int-quantized, float-quantized, "
    "mxfp4-pack-quantized, nvfp4-pack-quantized), fp8, mxfp4 and modelopt (FP8, NVFP4, MIXED_PRECISION)"
)
LARGEST_GROUP = 2**20
SHOWN = 80  # characters of a value in a message
PATTERN_CEILING = 1000  # characters
MATCH_SECONDS = 1.0  # that a pattern may take for a name
MOST_REPEATS = 1000
_COUNT = regex.compile(r"(?<=\{\d*,?)\d+(?=\})|(?<=\{)\d+(?=,\})")
_OTHER_GROUP = regex.compile(r"\(\?(?!:|=|!|<=|<!|i\)|P<)")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a quantisation rule stores the weights that it matches."""

    kind: Kind
    title: str  # what people call it
    bits: int = 8
    # A scale is for so many outputs and inputs; None: for all of them.
    scale_rows: int | None = 1
    scale_inputs: int | None = None
    zeros: bool = False  # or all codes are around 0
    zeros_less_one: bool = False  # zeros are stored as one less
    symmetric: bool = False  # zeros are stored, but all are the middle of the codes
    in_any_order: bool = False  # the group of each input must be stored
    producer: str = ""  # where the names of tensors depend on it

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, including a weight's share of the factors of its group."""
        if self.scale_rows is None or self.scale_inputs is None:
            return self.bits  # one factor for a whole row, or for all rows
        factor_bits = 8 if self.kind in ("mxfp4", "nvfp4") else 16
        return self.bits + (factor_bits + self.zeros * self.bits) / (self.scale_rows * self.scale_inputs)


def shown(value: object) -> str:
    """Return repr(value), truncated so that several values fit into a message."""
    text = shown_whole(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


_IN_EXPERTS = ".mlp.experts."  # in the names of routed experts' modules


class Module(NamedTuple):
    """A module of the model, as quantisation rules match it.

    kind: its class in rules. A projection of experts that are stacked as floats is no module of its own.
    """

    names: tuple[str, ...]  # by which rules may call it
    kind: Literal["Linear", "Embedding", "Stack"]


class Rule(NamedTuple):
    """What quantization_config says about one module."""

    scheme: Scheme | None  # None: floats
    source: str  # what says so
    is_certain: bool = True  # or the module may be stored as floats as well


@dataclass(frozen=True, slots=True)
class Quantization:
    """A parsed quantization_config."""

    method: str
    rule_of: Callable[[Module], Rule]
    quantizes_activations: bool = False
    kv_scales_are_fp8: bool = True  # if there are any; others are of K and V in another form

    def layer_bits(self, config: ModelConfig) -> float | None:
        """Return the mean bits per weight of the layers under these rules; None if all weights are floats.

        Experts that a family always stores as stacks count as floats where rules name "Linear" modules.
        """
        floats = 32 if config.dtype == "float32" else 16
        num_weights = 0
        num_bits = 0.0
        is_quantized = False
        for name, count in _linears(config):
            known = (each.removesuffix(".") for each in config.tensor_names.all_in_checkpoint(f"{name}."))
            module = Module((*known, name), "Linear")
            scheme = self.rule_of(module).scheme
            is_quantized |= scheme is not None
            if config.tensor_names.only_stacks and _IN_EXPERTS in name:
                scheme = self.rule_of(module._replace(kind="Stack")).scheme
            num_weights += count
            num_bits += count * (floats if scheme is None else scheme.bits_per_weight)
        return num_bits / num_weights if is_quantized else None


def _linears(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield the names of the linear modules of all layers, and how many weights each has."""
    for i, layer in enumerate(config.layers):
        modules = _of_attention(layer.attention) if layer.attention else {}
        if layer.state is not None:
            modules |= _of_state(layer.state)
        for part in layer.feed_forwards:
            modules |= _of_feed_forward(part)
        for name, size in modules.items():
            yield f"{LAYERS}{i}.{name}", size * config.hidden_size


def _of_attention(attention: AttentionSpec) -> dict[str, int]:
    """Return the outputs of each linear module, as if all had the hidden size as inputs."""
    sizes = {"q": attention.num_heads * attention.kv.key_dim * (1 + attention.gate)}
    if attention.has_kv:
        sizes["k"] = attention.kv.num_kv_heads * attention.kv.key_dim
        if not attention.keys_as_values:
            sizes["v"] = attention.kv.num_kv_heads * attention.kv.value_dim
    if attention.stored != "separate":
        sizes = {"qkv": sum(sizes.values())}
    sizes["o"] = attention.num_heads * attention.kv.value_dim
    return {f"self_attn.{part}_proj": size for part, size in sizes.items()}


def _of_state(state: StateSpec) -> dict[str, int]:
    """Return the outputs of each linear module, as if all had the hidden size as inputs."""
    values = state.num_heads * state.value_dim
    if state.kind == "conv":
        return {"conv.in_proj": 3 * state.columns, "conv.out_proj": state.columns}
    if state.kind == "mamba2":
        return {"mamba.in_proj": state.num_inputs, "mamba.out_proj": values}
    sizes = {"in_proj_qkv": state.columns, "in_proj_z": values}
    sizes |= {"in_proj_b": state.num_heads, "in_proj_a": state.num_heads}
    if state.stored != "by_part":
        del sizes["in_proj_b"], sizes["in_proj_a"]
        sizes["in_proj_ba"] = 2 * state.num_heads
    if state.stored == "by_key_head":
        sizes = {"in_proj_qkvz": state.columns + values, "in_proj_ba": 2 * state.num_heads}
    sizes["out_proj"] = values
    return {f"linear_attn.{part}": size for part, size in sizes.items()}


def _of_feed_forward(spec: FeedForwardSpec | ExpertsSpec) -> dict[str, int]:
    """Return the outputs of each linear module, as if all had the hidden size as inputs."""
    if isinstance(spec, FeedForwardSpec):
        up = {"gate_up": 2} if spec.fused else {"gate": 1, "up": 1} if spec.gated else {"up": 1}
        return {f"mlp.{part}_proj": n * spec.size for part, n in {**up, "down": 1}.items()}
    names = ["gate_up_proj"] if spec.interleaved else [*spec.parts[:-1]]
    modules = {f"mlp.{spec.router}": spec.num_experts}
    if spec.latent_size is not None:
        modules |= dict.fromkeys(("mlp.fc1_latent_proj", "mlp.fc2_latent_proj"), spec.latent_size)
    for expert in range(spec.num_experts):
        num_inner = (2 if spec.gated else 1) * spec.size
        own = {name: num_inner // len(names) for name in names} | {spec.parts[-1]: spec.size}
        modules |= {f"mlp.experts.{expert}.{name}": size for name, size in own.items()}
    if spec.shared is not None:
        shared = _of_feed_forward(spec.shared)
        modules |= {name.replace("mlp", f"mlp.{spec.shared_name}", 1): size for name, size in shared.items()}
    return modules


def quantization_of(hf: Config) -> Quantization | None:
    """Return the quantisation that config.json or its text_config describes; None if weights are not
    quantised.

    Raises UnsupportedModelError for a format that cannot be loaded, listing those that can, and
    CheckpointError for values that are out of range or of a wrong type.
    """
    text = hf.get("text_config")
    for config, where in ((hf, ""), (text if isinstance(text, dict) else {}, "text_config: ")):
        for key in ("quantization_config", "compression_config"):
            if not (given := config.get(key)):
                continue
            if not isinstance(given, dict):
                raise CheckpointError(f"{where}{key} must be an object, got {shown(given)}")
            try:
                return _read(given, base_model=config.get("_name_or_path"))
            except (UnsupportedModelError, CheckpointError) as error:
                raise type(error)(f"{where}{error}") from None
    return None


def with_sidecar(hf: dict[str, Any], sidecar: Config) -> dict[str, Any]:
    """Add ModelOpt's hf_quant_config.json to config.json. A field of config.json takes precedence."""
    own = hf.get("quantization_config") or {}
    if not isinstance(own, dict) or own.get("quant_method", "modelopt") not in list(_MODELOPT):
        return hf
    theirs = sidecar.get("quantization")
    if not isinstance(theirs, dict):
        raise CheckpointError(f"quantization must be an object, got {shown(theirs)}")
    return {**hf, "quantization_config": {**theirs, **own, "quant_method": "modelopt"}}


def _read(config: Config, base_model: object) -> Quantization:
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"
    if method is None:
        raise UnsupportedModelError(
            f"quantization_config has no quant_method: {shown(config)}; supported are {SUPPORTED}"
        )
    if not isinstance(method, str) or method not in _METHODS:
        of_base = f"; it was made of {shown(base_model)}, which may be loaded" if base_model else ""
        instead = of_base if method == "bitsandbytes" else ""
        raise UnsupportedModelError(
            f"quantization_config of quant_method {shown(method)} is not supported{instead}; supported are "
            f"{SUPPORTED}"
        )
    try:
        return replace(_METHODS[method](config), kv_scales_are_fp8=_has_fp8_scales(config))
    except (UnsupportedModelError, CheckpointError) as error:
        raise type(error)(f"quantization_config of quant_method {shown(method)}: {error}") from None


def _has_fp8_scales(config: Config) -> bool:
    """Return whether scales of K and V, if there are any, are for fp8."""
    config = {**config, **_object(config, "quantization")}
    if config.get("kv_cache_quant_algo") not in (None, "FP8"):
        return False
    scheme = config.get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        return scheme is None
    asked = (("num_bits", 8, 8), ("type", "int", "float"), ("symmetric", True, True))
    return all(scheme.get(key, default) == wanted for key, default, wanted in asked)


def _refuse(key: str, value: object, supported: str) -> NoReturn:
    raise UnsupportedModelError(f"{key} {shown(value)} is not supported; supported is {supported}")


def _object(config: Config, key: str) -> Config:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} must be an object, got {shown(value)}")
    return value


def _strings(config: Config, *keys: str) -> tuple[str, ...]:
    found: list[str] = []
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise CheckpointError(f"{key} must be a list of strings, got {shown(value)}")
        found += value
    return tuple(found)


def _bits(config: Config, key: str, supported: Sequence[int]) -> int:
    bits = check_int(CheckpointError, key, config.get(key), 1, 64)
    if bits not in supported:
        _refuse(key, bits, " and ".join(map(str, supported)))
    return bits


def _group(config: Config, key: str) -> int | None:
    """Return the inputs of a group; None for all, which is stored as -1."""
    size = config.get(key)
    if size is None or size == -1:
        return None
    return check_int(CheckpointError, key, size, 1, LARGEST_GROUP)


def _is_part(name: str, pattern: str) -> bool:
    """Return whether a pattern is a run of the parts of a dotted name."""
    return f".{pattern.strip('.')}." in f".{name}."


def _listed_or(scheme: Scheme, method: str, floats: Sequence[str], key: str) -> Callable[[Module], Rule]:
    """Return the rule that modules are stored in this scheme, unless their names are listed."""

    def rule_of(module: Module) -> Rule:
        for pattern in floats:
            if any(_is_part(name, pattern) for name in module.names):
                return Rule(None, f"{key} {shown(pattern)}")
        return Rule(scheme, f"quant_method {method!r}", is_certain=False)

    return rule_of


def _gptq(config: Config) -> Quantization:
    if config.get("is_marlin_format"):
        _refuse("is_marlin_format", config["is_marlin_format"], "false")
    stored = config.get("checkpoint_format", config.get("format")) or "gptq"
    if stored not in ("gptq", "gptq_v2"):
        _refuse("checkpoint_format", stored, "'gptq' and 'gptq_v2'")
    if (words := config.get("pack_dtype")) not in (None, "int32"):
        _refuse("pack_dtype", words, "'int32'")
    scheme = _gptq_scheme(config, stored)
    kept = _strings(config, "modules_to_not_convert")
    usual = _listed_or(scheme, "gptq", kept, "modules_to_not_convert")
    dynamic = [*_dynamic_rules(config, stored)]
    return Quantization("gptq", _first_of(dynamic, usual) if dynamic else usual)


def _gptq_scheme(config: Config, stored: str) -> Scheme:
    bits = _bits(config, "bits", (4, 8))
    return Scheme(
        *("gptq", f"GPTQ {bits} bits", bits),
        scale_inputs=_group(config, "group_size"),
        zeros=True,
        zeros_less_one=stored == "gptq",
        symmetric=config.get("sym") is True,
        in_any_order=_orders_inputs(config),
    )


def _dynamic_rules(config: Config, stored: str) -> Iterator[tuple[Callable[[Module], bool], Rule]]:
    """Yield what GPTQModel's `dynamic` says of modules: which are floats ("-:"), or have other sizes.

    The keys are regular expressions that match the beginning of names; the first that does counts.
    """
    listed = _object(config, "dynamic")
    for pattern in listed:
        source = f"dynamic {shown(pattern)}"
        if pattern.startswith("-:"):
            rule = Rule(None, source)
        else:
            try:
                own = _gptq_scheme({**config, **_object(listed, pattern)}, stored)
            except (UnsupportedModelError, CheckpointError) as error:
                raise type(error)(f"{source}: {error}") from None
            rule = Rule(own, source, is_certain=False)
        text = pattern.removeprefix("-:").removeprefix("+:")
        yield _finder(text, pattern, at_start=True), rule


def _first_of(
    rules: Sequence[tuple[Callable[[Module], bool], Rule]], usual: Callable[[Module], Rule]
) -> Callable[[Module], Rule]:
    """Return the first rule that finds a module, otherwise the usual one."""

    def rule_of(module: Module) -> Rule:
        return next((rule for finds, rule in rules if finds(module)), None) or usual(module)

    return rule_of


def _orders_inputs(config: Config) -> bool:
    """Return whether groups are of inputs that do not follow each other."""
    given = {key: config.get(key) for key in ("desc_act", "static_groups")}
    ordered, static = (check_bool(CheckpointError, key, value or False) for key, value in given.items())
    return ordered and not static and config.get("group_size") not in (None, -1)


def _awq(config: Config) -> Quantization:
    version = config.get("version", config.get("format")) or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        _refuse("version", version, "'gemm'")
    if not config.get("zero_point", True):
        _refuse("zero_point", config["zero_point"], "true")
    _bits(config, "w_bit" if "w_bit" in config else "bits", (4,))
    group = _group(config, "q_group_size" if "q_group_size" in config else "group_size")
    scheme = Scheme("awq", "AWQ 4 bits", 4, scale_inputs=group, zeros=True)
    kept = _strings(config, "modules_to_not_convert")
    return Quantization("awq", _listed_or(scheme, "awq", kept, "modules_to_not_convert"))


def _auto_round(config: Config) -> Quantization:
    packing = config.get("packing_format") or config.get("backend") or "auto"
    match = regex.fullmatch(
        r"auto|auto_round(?::(gptqmodel|(?:auto_)?gptq|(?:auto_)?awq)(?::\w+)*)?", str(packing)
    )
    if match is None:
        _refuse("packing_format", packing, ", ".join(f"'auto_round:{each}'" for each in _AUTO_ROUND))
    layout = "gptq" if packing == "auto" else (match[1] or "gptqmodel").removeprefix("auto_")
    for key in ("rotation_config", "spinquant_config", "dynamic"):
        if config.get(key):
            _refuse(key, config[key], "none")
    usual = _auto_round_scheme(config, layout)
    listed = _object(config, "extra_config")
    others: dict[str, Scheme | None] = {}
    for name in listed:
        try:
            others[name] = _auto_round_scheme({**config, **_object(listed, name)}, layout)
        except (UnsupportedModelError, CheckpointError) as error:
            raise type(error)(f"extra_config {shown(name)}: {error}") from None
    patterns = [(name, _finder(name)) for name in others]

    def rule_of(module: Module) -> Rule:
        for name in module.names:
            if name in others:
                return Rule(others[name], f"extra_config {shown(name)}")
        for name, finds in patterns:
            # AutoRound looks for a pattern in its blocks first, and elsewhere if none has it.
            if module.kind == "Linear" and finds(module):
                return Rule(others[name], f"extra_config {shown(name)}", is_certain=False)
        return Rule(usual, "quant_method 'auto-round'", is_certain=False)

    return Quantization("auto-round", rule_of)


# Of its layouts: those of GPTQ, of GPTQ without the one that is subtracted from zeros, and of AWQ.
_AUTO_ROUND = ("auto_gptq", "gptqmodel", "auto_awq")


def _auto_round_scheme(config: Config, layout: str) -> Scheme | None:
    """Return a scheme, or None for floats, which have 16 bits and more there."""
    bits = check_int(CheckpointError, "bits", config.get("bits"), 1, 64)
    if bits >= 16:
        return None
    if (data_type := config.get("data_type", "int")) != "int":
        _refuse("data_type", data_type, "'int'")
    if (of_activations := config.get("act_bits") or 16) != 16:
        _refuse("act_bits", of_activations, "16")
    bits = _bits(config, "bits", (4,) if layout == "awq" else (4, 8))
    title = f"AutoRound {bits} bits"
    group = _group(config, "group_size")
    if layout == "awq":
        return Scheme("awq", title, bits, scale_inputs=group, zeros=True)
    return Scheme("gptq", title, bits, scale_inputs=group, zeros=True, zeros_less_one=layout == "gptq")


def _fp8(config: Config) -> Quantization:
    if (kind := config.get("fmt")) not in (None, "e4m3"):
        _refuse("fmt", kind, "'e4m3'")
    block = config.get("weight_block_size", [128, 128])
    rows = inputs = None
    if block is not None:
        rows, inputs = _block(block, "weight_block_size")
    scheme = Scheme("fp8", "fp8", scale_rows=rows, scale_inputs=inputs, producer="fp8")
    kept = _strings(config, "modules_to_not_convert", "ignored_layers")
    rule_of = _listed_or(scheme, "fp8", kept, "modules_to_not_convert")
    return Quantization("fp8", rule_of, quantizes_activations=True)


def _mxfp4(config: Config) -> Quantization:
    """Read the scheme of gpt-oss: experts in MXFP4, in tensors of their own names."""
    scheme = Scheme("mxfp4", "MXFP4", 4, scale_inputs=32, producer="gpt-oss")
    kept = _strings(config, "modules_to_not_convert")

    def rule_of(module: Module) -> Rule:
        for pattern in kept:
            if any(fnmatchcase(name, f"{pattern}*") for name in module.names):
                return Rule(None, f"modules_to_not_convert {shown(pattern)}")
        return Rule(scheme, "quant_method 'mxfp4'", is_certain=False)

    return Quantization("mxfp4", rule_of)


def _block(block: object, key: str) -> tuple[int, int]:
    if not isinstance(block, list) or len(block) != 2:
        raise CheckpointError(f"{key} must be two numbers, got {shown(block)}")
    rows, inputs = (check_int(CheckpointError, key, each, 1, LARGEST_GROUP) for each in block)
    return rows, inputs


def _compressed_tensors(config: Config) -> Quantization:
    sparsity = _object(config, "sparsity_config")
    if (kind := sparsity.get("format", "dense")) != "dense":
        structure = sparsity.get("sparsity_structure")
        _refuse("sparsity_config", {"format": kind, "sparsity_structure": structure}, "'dense' weights")
    if transforms := config.get("transform_config"):
        _refuse("transform_config", transforms, "none")
    groups = _object(config, "config_groups")
    schemes: dict[str, tuple[Scheme | None, str]] = {}
    quantizes_activations = False
    for name in groups:
        group = _object(groups, name)
        try:
            scheme = _group_scheme(group, config.get("format"))
            targets = _strings(group, "targets")
        except (UnsupportedModelError, CheckpointError) as error:
            raise type(error)(f"config_groups {shown(name)}: {error}") from None
        quantizes_activations |= any(group.get(f"{which}_activations") for which in ("input", "output"))
        for target in targets:
            schemes[target] = scheme, name  # that of the last group, as for compressed-tensors
    ignored = [(pattern, _matcher(pattern)) for pattern in _strings(config, "ignore")]
    # The most specific first: names, patterns, classes; several patterns in the order of compressed-tensors.
    in_order = sorted(schemes, key=lambda each: (each in ("Linear", "Embedding"), "re:" in each, each))
    wanted = [(target, _matcher(target)) for target in in_order]

    def rule_of(module: Module) -> Rule:
        for pattern, matches in ignored:
            if matches(module):
                return Rule(None, f"ignore {shown(pattern)}")
        for target, matches in wanted:
            if matches(module):
                scheme, group = schemes[target]
                return Rule(scheme, f"target {shown(target)} of {shown(group)}")
        return Rule(None, "config_groups, which has no target for it,")

    return Quantization("compressed-tensors", rule_of, quantizes_activations)


def _matcher(pattern: str) -> Callable[[Module], bool]:
    """Return a function: whether a pattern of compressed-tensors is for a module."""
    if not pattern.startswith("re:"):
        return lambda module: pattern in module.names or pattern == module.kind
    return _finder(pattern.removeprefix("re:"), pattern, at_start=True)


def _finder(text: str, pattern: str | None = None, *, at_start: bool = False) -> Callable[[Module], bool]:
    """Return a function: whether a regular expression is found in a module's name, or at its start.

    pattern: the expression as the file has it, for messages.
    """
    pattern = text if pattern is None else pattern
    if len(text) > PATTERN_CEILING:
        raise CheckpointError(f"a pattern has {len(text):,} characters; at most {PATTERN_CEILING:,} are read")
    # What takes memory without end: groups that contain themselves, and repeats of repeats.
    if _OTHER_GROUP.search(text) or math.prod(map(int, _COUNT.findall(text))) > MOST_REPEATS:
        raise CheckpointError(f"{shown(pattern)} has groups or repeats of a kind that is not supported")
    try:
        compiled = regex.compile(text)
    except (regex.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{shown(pattern)} is no regular expression: {error}") from None
    find = compiled.match if at_start else compiled.search

    def finds(module: Module) -> bool:
        try:
            return any(find(name, timeout=MATCH_SECONDS) for name in module.names)
        except TimeoutError:
            raise CheckpointError(
                f"{shown(pattern)} takes more than {MATCH_SECONDS:g} s to match {module.names[0]}"
            ) from None

    return finds


def _group_scheme(group: Config, usual_format: object) -> Scheme | None:
    """Return the scheme of one of config_groups; None if its weights are floats."""
    weights = _object(group, "weights")
    if not weights:
        return None
    stored = group.get("format") or usual_format
    number = weights.get("type", "int")
    if stored == "naive-quantized":
        stored = "float-quantized" if number == "float" else "int-quantized"
    if stored not in list(_STORED):
        _refuse("format", stored, ", ".join(map(repr, _STORED)))
    kind, own_number, bits_of_it, title = _STORED[stored]
    if number != own_number:
        raise CheckpointError(f"format {stored!r} is of type {own_number!r}, got {shown(number)}")
    bits = _bits(weights, "num_bits", bits_of_it)
    symmetric = check_bool(CheckpointError, "symmetric", weights.get("symmetric", True))
    if not symmetric and number == "float":
        _refuse("symmetric", symmetric, f"true with format {shown(stored)}")
    rows, inputs = _span(weights)
    if kind in ("mxfp4", "nvfp4"):
        inputs = inputs or {"mxfp4": 32, "nvfp4": 16}[kind]
        if (rows, inputs) != (1, {"mxfp4": 32, "nvfp4": 16}[kind]):
            _refuse("group_size", weights.get("group_size"), "32 with MXFP4, 16 with NVFP4")
    scheme = Scheme(kind, title.format(bits), bits, rows, inputs, zeros=not symmetric)
    ordered = _is_ordered_by_group(weights) and inputs is not None
    if ordered and kind != "packed integers":
        _refuse("actorder", weights["actorder"], f"'weight' with format {shown(stored)}")
    return replace(scheme, producer="compressed-tensors", in_any_order=ordered)


def _is_ordered_by_group(weights: Config) -> bool:
    """Return whether groups are of inputs that do not follow each other. By "weight" they do."""
    order = weights.get("actorder")
    name = order.lower() if isinstance(order, str) else order
    if name in (None, False, "weight", "static"):
        return False
    if name in (True, "group", "dynamic"):
        return True
    _refuse("actorder", order, "'group' and 'weight'")


# Of compressed-tensors: kind, type and bits of what each format holds, and what people call it.
_STORED: Mapping[str, tuple[Kind, str, tuple[int, ...], str]] = {
    "pack-quantized": ("packed integers", "int", (4, 8), "compressed-tensors {} bits"),
    "int-quantized": ("integers", "int", (4, 8), "int8"),
    "float-quantized": ("fp8", "float", (8,), "fp8"),
    "mxfp4-pack-quantized": ("mxfp4", "float", (4,), "MXFP4"),
    "nvfp4-pack-quantized": ("nvfp4", "float", (4,), "NVFP4"),
}


def _span(weights: Config) -> tuple[int | None, int | None]:
    """Return how many outputs and inputs a scale is for; None: all."""
    size = _group(weights, "group_size")
    strategy = weights.get("strategy")
    if strategy is None:
        per_tensor = weights.get("group_size") is None
        strategy = "tensor" if per_tensor else "channel" if size is None else "group"
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy in ("group", "tensor_group"):
        return 1, check_int(CheckpointError, "group_size", size, 1, LARGEST_GROUP)
    if strategy == "block":
        return _block(weights.get("block_structure"), "block_structure")
    _refuse("strategy", strategy, "'tensor', 'channel', 'group' and 'block'")


_MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed")


def _modelopt(config: Config) -> Quantization:
    config = {**config, **_object(config, "quantization")}
    algorithm = config.get("quant_algo")
    excluded = _strings(config, "exclude_modules", "ignore")
    layers: dict[str, Scheme | None] = {}
    usual = None
    if algorithm == "MIXED_PRECISION":
        listed = _object(config, "quantized_layers")
        layers = {name: _algorithm(_object(listed, name)) for name in listed}
    elif algorithm is not None:
        usual = _algorithm(config)

    def rule_of(module: Module) -> Rule:
        for name in module.names:
            if name in layers:
                return Rule(layers[name], f"quantized_layers {shown(name)}")
        for pattern in excluded:
            if any(_is_inside(name, pattern) for name in module.names):
                return Rule(None, f"exclude_modules {shown(pattern)}")
        if algorithm == "MIXED_PRECISION":
            return Rule(None, "quantized_layers, which lacks it,")
        return Rule(usual, f"quant_algo {algorithm!r}", is_certain=module.kind == "Linear")

    return Quantization("modelopt", rule_of, quantizes_activations=True)


def _is_inside(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _algorithm(config: Config) -> Scheme | None:
    """Return the scheme of one of ModelOpt's algorithms; None for floats."""
    name = config.get("quant_algo")
    if name == "UNQUANTIZED":
        return None
    if name not in list(_ALGORITHMS):
        _refuse("quant_algo", name, ", ".join(map(repr, (*_ALGORITHMS, "MIXED_PRECISION"))))
    scheme = _ALGORITHMS[name]
    if scheme.kind == "nvfp4" and (size := config.get("group_size", 16)) not in (None, 16):
        _refuse("group_size", size, f"16 with {name}")
    for key in ("weight_scale_encoding", "has_pre_quant_scale", "pre_quant_scale"):
        if config.get(key):
            _refuse(key, config[key], "none")
    return scheme


_NVFP4 = Scheme("nvfp4", "NVFP4", 4, scale_inputs=16, producer="modelopt")
_ALGORITHMS: Mapping[str, Scheme] = {
    "FP8": Scheme("fp8", "fp8", scale_rows=None, producer="modelopt"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", "fp8", scale_rows=1, producer="modelopt"),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}
_METHODS: Mapping[str, Callable[[Config], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    **dict.fromkeys(_MODELOPT, _modelopt),
}
