"""Bugs in the parts of model families, for `tests.family_mutants`: each with the test that fails with it."""

from typing import NamedTuple

TABLE, LAYERS, DECODER, ROPE = "model/families/table", "model/layers", "model/decoder", "model/families/rope"
CONFIG, MULTIMODAL = "model/config", "model/families/multimodal"
MLP, NORMS = "model/parts/mlp", "model/parts/norms"
GEMMA4, INPUTS = "model/families/gemma4", "model/parts/layer_inputs"


class Mutant(NamedTuple):
    """A bug in a part: in `file`, `old` becomes `new`, and `test` fails."""

    test: str  # its node id in pytest
    part: str  # a field of ModelConfig or RopeConfig, or a type of rope
    name: str
    file: str
    old: str
    new: str


def matches(model: str) -> str:
    """Return the test that compares an entry of CONFIGS with transformers."""
    test = "test_matches_transformers.py::test_ragged_batch_matches_transformers"
    return f"tests/engine/{test}[{model}-torch]"


def matches_text_part(model: str) -> str:
    """Return the test that compares an entry of MULTIMODAL_CONFIGS with transformers."""
    return f"tests/engine/test_multimodal.py::test_text_part_matches_transformers[{model}]"


# Test: (part, name, file, old, new).
BUGS = {
    matches("glm4"): [
        (
            "norms",
            "norms are swapped",
            TABLE,
            '"post_self_attn_layernorm", "post_attention_layernorm"',
            '"post_attention_layernorm", "post_self_attn_layernorm"',
        ),
        (
            "fused_gate_up",
            "gate and up are read from a tensor each",
            MLP,
            "config.fused_gate_up,",
            "False,",
        ),
        (
            "rotary_dim",
            "what is not rotated is scaled",
            LAYERS,
            "(0, kept), value=1.0)",
            "(0, kept), value=0.9)",
        ),
        (
            "interleaved",
            "an interleaved rope is not un-permuted",
            LAYERS,
            "if rope.interleaved else",
            "if False else",
        ),
        (
            "interleaved",
            "biases are not un-permuted",
            LAYERS,
            "(self.qkv.weight, self.qkv.bias) if",
            "(self.qkv.weight,) if",
        ),
    ],
    matches("olmo2"): [
        (
            "norms",
            "an output is not normalised",
            DECODER,
            "norm.into(hidden, residual, add=True)",
            "residual.add_(hidden)",
        ),
        ("qk_norm", "K is not normalised", LAYERS, "self.key_norm.into(key, key)", "pass"),
    ],
    matches("gemma2"): [
        ("norm_unit_offset", "1 is not added to norms", TABLE, '"norm_unit_offset": True,', ""),
        (
            "embedding_multiplier",
            "embeddings are not multiplied",
            DECODER,
            "if self.embedding_factor != 1.0:",
            "if False:",
        ),
        (
            "logits_softcap",
            "logits are not capped",
            DECODER,
            "logits_divisor, self.config.logits_softcap)",
            "logits_divisor)",
        ),
        ("attention_softcap", "scores are not capped", LAYERS, "softcap=self.softcap,", ""),
        ("activation", "GELU is silu", MLP, "if is_silu else kernels.gelu_and_mul", ""),
    ],
    matches("gemma3"): [
        ("norm_unit_offset", "1 is not added to norms of Q", LAYERS, "self.query_norm.unit_offset", "False"),
        (
            "layer_ropes",
            "all layers have one rope",
            ROPE,
            "tuple(ropes[kind] for kind in layer_types)",
            '(ropes["full_attention"],) * len(layer_types)',
        ),
    ],
    matches("qwen3"): [
        (
            "qk_norm",
            "Q has the norm of K",
            LAYERS,
            '"query_norm_weight": self.query_norm.weight',
            '"query_norm_weight": self.key_norm.weight',
        ),
        (
            "tie_word_embeddings",
            "tied embeddings are no head",
            DECODER,
            "if self.config.tie_word_embeddings:",
            "if False:",
        ),
    ],
    matches("qwen2"): [
        (
            "qkv_bias",
            "biases of Q, K and V are not added",
            LAYERS,
            "self.qkv(hidden)",
            "self.qkv.form(hidden, None)",
        ),
    ],
    matches("llama-tied-bias"): [
        (
            "output_bias",
            "the bias of attention's output is not added",
            LAYERS,
            "self.output(attended.flatten(1))",
            "self.output.form(attended.flatten(1), None)",
        ),
        (
            "mlp_bias",
            "biases of gate and up are not added",
            MLP,
            "self.gate_up(hidden)",
            "self.gate_up.form(hidden, None)",
        ),
    ],
    matches("phi3"): [
        ("fused_qkv", "Q, K and V are read from a tensor each", LAYERS, "config.fused_qkv", "False"),
        ("rotary_dim", "a partial rope is not un-permuted", LAYERS, "if self.dim_order is None:", "if True:"),
    ],
    matches("smollm3"): [
        ("layer_ropes", "a layer without rope has one", TABLE, "rope if rotated else NO_ROPE", "rope"),
    ],
    matches("olmo3"): [
        (
            "attention_factor",
            "cos and sin are not scaled",
            LAYERS,
            "if self.rope.attention_factor != 1.0:",
            "if False:",
        ),
        (
            "layer_windows",
            "a window is ignored",
            "model/families/reading",
            'window if kind == "sliding_attention" else None',
            "None",
        ),
    ],
    matches("llama-linear"): [
        (
            "linear",
            "linear rope is not scaled",
            LAYERS,
            "return frequencies / rope.factor",
            "return frequencies",
        ),
    ],
    matches("llama-dynamic"): [
        (
            "dynamic",
            "dynamic rope does not know the length",
            LAYERS,
            "batch.rope_lens.clamp(min=trained)",
            "batch.rope_lens * 0 + trained",
        ),
    ],
    matches("llama-llama3"): [
        ("llama3", "Llama 3's rope is not scaled", LAYERS, 'if rope.type != "llama3":', "if True:"),
    ],
    matches("llama-yarn"): [
        ("yarn", "yarn keeps no frequency", LAYERS, "return 1 - ramp.clamp(0.0, 1.0)", "return 0 * ramp"),
    ],
    matches("phi3-longrope"): [
        ("longrope", "longrope is short", LAYERS, "if is_long else", "if False else"),
        (
            "long_context",
            "a request that grows long keeps its K and V",
            "requests/request",
            "return len(self.token_ids) == self.inputs.long_from and",
            "return False and",
        ),
    ],
    matches("granite-swa"): [
        ("attention_sinks", "sinks are ignored", LAYERS, "sinks=self.sinks,", ""),
        ("layer_ropes", "bases of layers are ignored", TABLE, "replace(rope, theta=float(theta))", "rope"),
    ],
    matches("granite"): [
        ("residual_multiplier", "outputs are not multiplied", DECODER, "/ config.residual_multiplier", ""),
        (
            "residual_multiplier",
            "eps is not scaled",
            CONFIG,
            "self.rms_norm_eps / self.residual_multiplier**2",
            "self.rms_norm_eps",
        ),
        ("logits_divisor", "logits are not divided", DECODER, "1 / self.config.logits_divisor", "1.0"),
        ("attention_scale", "scores are not multiplied", LAYERS, "config.attention_scale or", ""),
    ],
    "tests/model/test_hf_config.py::test_gemma3_s_context_includes_the_scaling": [
        (
            "context_is_scaled",
            "a context is scaled twice",
            CONFIG,
            " and not self.context_is_scaled",
            "",
        ),
    ],
    "tests/engine/test_families.py::test_float16_is_refused_where_it_is_too_narrow[granite]": [
        (
            "exceeds_float16",
            "float16 overflows",
            "runner/load",
            "model_config.exceeds_float16 and dtype == torch.float16",
            "False",
        ),
    ],
    matches("ministral"): [
        (
            "layer_windows",
            "layer_types are ignored",
            TABLE,
            'layer_types_of(hf, ("sliding_attention",) * size(hf, "num_hidden_layers"))',
            '("sliding_attention",) * size(hf, "num_hidden_layers")',
        ),
    ],
    matches("ministral3"): [
        ("attention_factor", "mscale is ignored", ROPE, "if all(scales):", "if False:"),
        ("query_scaling_beta", "queries are not scaled", TABLE, "if own.get(beta) is not None:", "if False:"),
        (
            "query_scaling_beta",
            "queries are scaled by their position",
            LAYERS,
            'positions.div(trained, rounding_mode="floor")',
            "positions / trained",
        ),
    ],
    matches_text_part("gemma3-vision"): [
        ("tensor_names", "a vision tower is not skipped", MULTIMODAL, '"vision_tower.",', ""),
    ],
    matches_text_part("mistral-vision"): [
        (
            "tie_word_embeddings",
            "a head of its own is tied",
            "runner/load",
            "and has_own_head(sources)",
            "and False",
        ),
    ],
    matches_text_part("ministral3-vision"): [
        (
            "tensor_names",
            "a text part has other names",
            MULTIMODAL,
            '("language_model.lm_head.", "lm_head."),',
            "",
        ),
    ],
    "tests/engine/test_multimodal.py::test_a_prompt_with_an_image_is_refused_alone": [
        (
            "placeholders",
            "an image is a token",
            "model/hf_config",
            "placeholders=placeholders",
            "placeholders=()",
        ),
    ],
    "tests/model/test_cache_layout.py::test_groups_take_about_equal_bytes": [
        ("layer_kv", "all layers have one head shape", CONFIG, "return self.layer_kv or (", "return ("),
    ],
    "tests/model/test_cache_layout.py::test_layers_that_read_another_layer_take_no_room": [
        (
            "layer_sources",
            "all layers have K and V of their own",
            CONFIG,
            "return self.layer_sources or tuple(",
            "return tuple(",
        ),
    ],
    matches("gpt2"): [
        (
            "learned_positions",
            "all tokens have the first position",
            DECODER,
            "self.positions(batch.positions)",
            "self.positions(batch.positions * 0)",
        ),
        ("transposed_weights", "weights are not transposed", DECODER, "if self.transposed:", "if False:"),
        ("gated_mlp", "every MLP has a gate", DECODER, "(MLP if config.gated_mlp else PlainMLP)", "MLP"),
        (
            "layer_norm",
            "biases of norms are not added",
            NORMS,
            "layer_norm(x, self.weight, self.bias,",
            "layer_norm(x, self.weight, self.bias * 0,",
        ),
    ],
    matches("gpt_neox"): [
        (
            "parallel_residual",
            "the MLP follows attention",
            DECODER,
            "ParallelLayer if config.parallel_residual else",
            "",
        ),
        (
            "qkv_by_head",
            "Q, K and V by head stay so",
            LAYERS,
            "by_head.transpose(0, 1).reshape",
            "by_head.reshape",
        ),
        ("activation", "GELU is approximated", MLP, "tanh=self.tanh", "tanh=not self.tanh"),
    ],
    matches("gemma4"): [
        ("value_norm", "V is not normalised", LAYERS, "self.value_norm.into(values, values)", "pass"),
        (
            "layer_sources",
            "layers read the first one of their type",
            GEMMA4,
            "{kind: layer for layer, kind in enumerate(layer_types[:num_own])}",
            "{kind: layer_types.index(kind) for kind in layer_types[:num_own]}",
        ),
        (
            "layer_sources",
            "rows that are left have the angles of others",
            DECODER,
            "angles.of_rows(take) for angles in by_rope",
            "angles for angles in by_rope",
        ),
        ("layer_mlps", "MLPs are not wide", GEMMA4, "inner * (1 + (is_wide and layer in shared))", "inner"),
        ("layer_scalars", "scalars are ignored", DECODER, "if self.factor != 1.0:", "if False:"),
        ("proportional", "all is rotated", LAYERS, "int(rope.rotated_part * rotary_dim // 2)", "rotary_dim"),
        ("layer_input_size", "inputs are ignored", DECODER, "self.input(inputs, residual)", "pass"),
        (
            "layer_input_size",
            "layers have the input of the first one",
            INPUTS,
            "slice(layer * size, (layer + 1) * size)",
            "slice(size)",
        ),
        (
            "layer_input_size",
            "embeddings of inputs are not multiplied",
            INPUTS,
            "self.kernels.scale_and_cap(inputs, self.factor)",
            "pass",
        ),
        (
            "layer_input_size",
            "eps of inputs is not scaled",
            INPUTS,
            "config.rms_norm_eps * config.hidden_size",
            "config.rms_norm_eps",
        ),
        (
            "layer_input_size",
            "eps of what is made of inputs is not scaled",
            INPUTS,
            "2 * config.rms_norm_eps",
            "config.rms_norm_eps",
        ),
        (
            "layer_input_vocab_size",
            "the table has as many tokens as the model",
            INPUTS,
            "config.layer_input_vocab_size",
            "config.vocab_size",
        ),
    ],
    matches("gemma4-keys-as-values"): [
        ("keys_as_values", "V is not made of what W_k makes", LAYERS, "value.copy_(key)", "pass"),
        (
            "layer_kv",
            "all layers have one number of KV heads",
            GEMMA4,
            "_shape({**usual, **own},",
            '_shape({**usual, **own, "num_key_value_heads": 2},',
        ),
        (
            "proportional",
            "rope is not stretched",
            LAYERS,
            'in ("linear", "proportional")',
            'in ("linear",)',
        ),
    ],
    "tests/engine/test_gemma4.py::test_tensors_that_layers_do_not_use_are_skipped[gemma4-vision]": [
        (
            "tensor_names",
            "the text model's own names are forgotten",
            CONFIG,
            "skipped_prefixes=self.skipped_prefixes + skipped)",
            "skipped_prefixes=self.skipped_prefixes)",
        ),
    ],
}
MUTANTS = [Mutant(test, *bug) for test, bugs in BUGS.items() for bug in bugs]
