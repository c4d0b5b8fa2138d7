"""Bugs in the parts of model families, for `tests.model_mutants`: each with the test that fails with it."""

from typing import NamedTuple

GEMMA = "model/families/gemma"
GLM4 = "model/families/glm4"
GRANITE = "model/families/granite"
LLAMA = "model/families/llama"
SMOLLM3 = "model/families/smollm3"
GPT = "model/families/gpt"
GEMMA4 = "model/families/gemma4"
MULTIMODAL = "model/families/multimodal"
ROPE = "model/families/rope"
CONFIG = "model/config"
DECODER = "model/decoder"
ATTENTION = "model/layers/attention"
ROTARY = "model/layers/rotary"
MLP = "model/layers/mlp"
EXPERTS = "model/layers/experts"
MOE = "model/families/moe"
FORMS = "model/weights/forms"
REFERENCE = "kernels/reference"
LINEAR = "model/layers/linear"
STORED = "model/weights/stored"
NORMS = "model/layers/norms"
INPUTS = "model/layers/layer_inputs"
ROWS = "model/layers/token_rows"


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
    matches("qwen3_moe"): [
        (
            "routing",
            "rows go to the expert after theirs",
            FORMS,
            "form = self.forms[expert]",
            "form = self.forms[expert - 1]",
        ),
        ("renormalise", "weights are not renormalised", REFERENCE, "if options.renormalise:", "if False:"),
        ("feed_forward", "all layers have experts", MOE, "layer in only or", "False or"),
    ],
    "tests/ops/test_experts.py::test_routing_is_that_of_the_reference[numba]": [
        (
            "routing",
            "the higher of two equal experts is chosen",
            REFERENCE,
            "    order = ranked.argsort(dim=-1, descending=True, stable=True)",
            "    order = ranked.shape[1] - 1 - ranked.flip(1).argsort(dim=-1, descending=True, stable=True)",
        ),
    ],
    matches("qwen2_moe"): [
        (
            "shared",
            "the shared expert is dropped",
            EXPERTS,
            "shared = None if self.shared is None else self.shared(hidden)",
            "shared = None if self.shared is None else self.shared(hidden) * 0",
        ),
        (
            "shared_gate",
            "the shared expert has no gate",
            EXPERTS,
            "gate = None if self.shared_gate is None else self.shared_gate(hidden)",
            "gate = None",
        ),
    ],
    matches("mixtral"): [
        (
            "parts",
            "gate and up are exchanged",
            EXPERTS,
            'StoredRows({f"{name}.{gate}": spec.size, f"{name}.{up}": spec.size})',
            'StoredRows({f"{name}.{up}": spec.size, f"{name}.{gate}": spec.size})',
        ),
    ],
    matches("granitemoe"): [
        (
            "score",
            "weights are the softmax over all experts",
            REFERENCE,
            'if options.score == "softmax_of_chosen":',
            "if False:",
        ),
        (
            "tensor_names",
            "halves of stacks are exchanged",
            MOE,
            '("gate_proj.weight", "up_proj.weight")),',
            '("up_proj.weight", "gate_proj.weight")),',
        ),
    ],
    matches("glm4_moe"): [
        (
            "correction_bias",
            "the bias is added to weights too",
            REFERENCE,
            "        ranked = ranked + correction_bias",
            "        ranked = scores = ranked + correction_bias",
        ),
        (
            "correction_bias",
            "the bias is not added",
            REFERENCE,
            "        ranked = ranked + correction_bias",
            "        pass",
        ),
        ("num_groups", "groups are ignored", REFERENCE, "if options.num_groups > 1:", "if False:"),
        (
            "num_kept_groups",
            "one group is kept",
            REFERENCE,
            "[:, : options.num_kept_groups]",
            "[:, :1]",
        ),
        (
            "group_score",
            "a group has the score of its best expert",
            REFERENCE,
            'if options.group_score == "best" else best[..., 0] + best[..., 1]',
            "",
        ),
        ("scale", "weights are not scaled", REFERENCE, "weights = weights * options.scale", "pass"),
        ("feed_forward", "the first layers have experts", MOE, "[i < first for i in", "[i < 0 for i in"),
    ],
    matches("gpt_oss"): [
        (
            "interleaved",
            "gates and ups lie side by side",
            EXPERTS,
            ".view(-1, 2).t().flatten()",
            "",
        ),
        ("router_bias", "the router has no bias", EXPERTS, "bias=spec.router_bias", "bias=False"),
        (
            "bias",
            "biases of experts are dropped",
            EXPERTS,
            "_together(self.down, self.kernels)",
            "_together(self.down, self.kernels); self.down_form.biases = None",
        ),
        ("limit", "nothing is clamped", EXPERTS, "self.spec.limit, self.spec.alpha", "99.0, self.spec.alpha"),
        (
            "alpha",
            "gates are those of silu",
            EXPERTS,
            "self.spec.limit, self.spec.alpha",
            "self.spec.limit, 1.0",
        ),
    ],
    matches("gemma4-experts"): [
        (
            "experts",
            "experts are dropped",
            DECODER,
            "            out = self.beside(out, residual)",
            "            self.beside(out, residual)\n            out = self.mlp(hidden)",
        ),
        (
            "experts",
            "experts read what the MLP reads",
            DECODER,
            "self.beside(out, residual)",
            "self.beside(out, hidden)",
        ),
        (
            "router_scale",
            "logits are not scaled",
            EXPERTS,
            "kernels.scale_and_cap(logits, spec.router_scale)",
            "pass",
        ),
        ("expert_scales", "experts have no factors", REFERENCE, "if expert_scales is not None:", "if False:"),
    ],
    matches("glm4"): [
        (
            "norms",
            "norms are swapped",
            GLM4,
            '"post_self_attn_layernorm", "post_attention_layernorm"',
            '"post_attention_layernorm", "post_self_attn_layernorm"',
        ),
        (
            "fused",
            "gate and up are read from a tensor each",
            MLP,
            "if spec.fused:",
            "if False:",
        ),
        (
            "rotary_dim",
            "what is not rotated is scaled",
            ROTARY,
            "(0, kept), value=1.0)",
            "(0, kept), value=0.9)",
        ),
        (
            "interleaved",
            "an interleaved rope is not un-permuted",
            ROTARY,
            "if rope.interleaved else",
            "if False else",
        ),
        (
            "interleaved",
            "biases are not un-permuted",
            LINEAR,
            'loader.parameter(self.stored, "bias", self.bias)',
            'loader.parameter(StoredRows(self.stored.parts), "bias", self.bias)',
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
        (
            "qk_norm",
            "K is not normalised",
            ATTENTION,
            "norms = [norm for norm in (self.query_norm, self.key_norm) if norm is not None]",
            "norms = [self.query_norm]",
        ),
    ],
    matches("gemma2"): [
        ("unit_offset", "1 is not added to norms", GEMMA, "read_norm(hf, unit_offset=True)", "read_norm(hf)"),
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
        ("softcap", "scores are not capped", ATTENTION, "softcap=self.spec.softcap,", ""),
        ("activation", "GELU is silu", MLP, "if is_silu else kernels.gelu_and_mul", ""),
    ],
    matches("gemma3"): [
        ("unit_offset", "1 is not added to norms of Q", ATTENTION, "self.query_norm.unit_offset", "False"),
        (
            "rope",
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
            ATTENTION,
            '"query_norm_weight": self.query_norm.weight',
            '"query_norm_weight": self.key_norm.weight',
        ),
        (
            "tie_word_embeddings",
            "tied embeddings are no head",
            DECODER,
            "if self.head is not None and self.embedding is not None and self.config.tie_word_embeddings:",
            "if False:",
        ),
    ],
    matches("qwen2"): [
        (
            "qkv_bias",
            "biases of Q, K and V are not added",
            ATTENTION,
            "self.qkv(hidden)",
            "self.qkv.form(hidden, None)",
        ),
    ],
    matches("llama-tied-bias"): [
        (
            "output_bias",
            "the bias of attention's output is not added",
            ATTENTION,
            "self.output(gather(attended.flatten(1), self.shard))",
            "self.output.form(gather(attended.flatten(1), self.shard), None)",
        ),
        (
            "bias",
            "biases of gate and up are not added",
            MLP,
            "self.gate_up(hidden)",
            "self.gate_up.form(hidden, None)",
        ),
    ],
    matches("phi3"): [
        (
            "stored",
            "Q, K and V are read from a tensor each",
            ATTENTION,
            'if spec.stored != "separate":',
            "if False:",
        ),
        (
            "rotary_dim",
            "a partial rope is not un-permuted",
            ATTENTION,
            "if order is not None:",
            "if False:",
        ),
    ],
    matches("smollm3"): [
        ("rope", "a layer without rope has one", SMOLLM3, "rope if rotated else NO_ROPE", "rope"),
    ],
    matches("olmo3"): [
        (
            "attention_factor",
            "cos and sin are not scaled",
            ROTARY,
            "if self.rope.attention_factor != 1.0:",
            "if False:",
        ),
        (
            "window",
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
            ROTARY,
            "return frequencies / rope.factor",
            "return frequencies",
        ),
    ],
    matches("llama-dynamic"): [
        (
            "dynamic",
            "dynamic rope does not know the length",
            ROTARY,
            "batch.rope_lens.clamp(min=trained)",
            "batch.rope_lens * 0 + trained",
        ),
    ],
    matches("llama-llama3"): [
        ("llama3", "Llama 3's rope is not scaled", ROTARY, 'if rope.type != "llama3":', "if True:"),
    ],
    matches("llama-yarn"): [
        ("yarn", "yarn keeps no frequency", ROTARY, "return 1 - ramp.clamp(0.0, 1.0)", "return 0 * ramp"),
    ],
    matches("phi3-longrope"): [
        ("longrope", "longrope is short", ROTARY, "if is_long else", "if False else"),
        (
            "long_context",
            "a request that grows long keeps its K and V",
            "requests/request",
            "return len(self.token_ids) == self.inputs.long_from and",
            "return False and",
        ),
    ],
    matches("granite-swa"): [
        ("sinks", "sinks are ignored", ATTENTION, "sinks=self.sinks,", ""),
        ("rope", "bases of layers are ignored", GRANITE, "replace(rope, theta=float(theta))", "rope"),
    ],
    matches("granite"): [
        ("residual_multiplier", "outputs are not multiplied", DECODER, "/ config.residual_multiplier", ""),
        (
            "residual_multiplier",
            "eps is not scaled",
            CONFIG,
            "self.norm.eps / self.residual_multiplier**2",
            "self.norm.eps",
        ),
        ("logits_divisor", "logits are not divided", DECODER, "1 / self.config.logits_divisor", "1.0"),
        (
            "scale",
            "scores are not multiplied",
            ATTENTION,
            "scale=self.spec.scale",
            "scale=self.head_dim**-0.5",
        ),
    ],
    "tests/architectures/test_hf_config.py::test_gemma3_s_context_includes_the_scaling": [
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
            "window",
            "layer_types are ignored",
            LLAMA,
            'layer_types_of(hf, ("sliding_attention",) * size(hf, "num_hidden_layers"))',
            '("sliding_attention",) * size(hf, "num_hidden_layers")',
        ),
    ],
    matches("ministral3"): [
        ("attention_factor", "mscale is ignored", ROPE, "if all(scales):", "if False:"),
        ("query_scaling_beta", "queries are not scaled", LLAMA, "if own.get(beta) is not None:", "if False:"),
        (
            "query_scaling_beta",
            "queries are scaled by their position",
            ROTARY,
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
        (
            "kv",
            "all layers have one head shape",
            CONFIG,
            "{i: attention.kv for i, attention in self.attentions.items()}",
            "dict.fromkeys(self.attentions, self.attentions[0].kv)",
        ),
    ],
    "tests/model/test_cache_layout.py::test_layers_that_read_another_layer_take_no_room": [
        (
            "source",
            "all layers have K and V of their own",
            CONFIG,
            "i if source is None else source for",
            "i for",
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
        (
            "transposed_weights",
            "weights are not transposed",
            STORED,
            "dim=int(part.transposed)",
            "0",
        ),
        (
            "gated",
            "every MLP has a gate",
            DECODER,
            "(MLP if spec.gated else PlainMLP)",
            "MLP",
        ),
        (
            "subtracts_mean",
            "biases of norms are not added",
            NORMS,
            "layer_norm(x, self.weight, self.bias,",
            "layer_norm(x, self.weight, self.bias * 0,",
        ),
    ],
    matches("gpt_neox"): [
        (
            "parallel",
            "the MLP follows attention",
            DECODER,
            "(ParallelLayer if config.layers[i].parallel else DecoderLayer)",
            "DecoderLayer",
        ),
        (
            "stored",
            "Q, K and V by head stay so",
            ATTENTION,
            ".transpose(0, 1).flatten()",
            ".flatten()",
        ),
        ("activation", "GELU is approximated", MLP, "tanh=self.tanh", "tanh=not self.tanh"),
    ],
    matches("gemma4"): [
        ("value_norm", "V is not normalised", ATTENTION, "self.value_norm.into(values, values)", "pass"),
        (
            "source",
            "layers read the first one of their type",
            GEMMA4,
            "{kind: layer for layer, kind in enumerate(layer_types[:num_own])}",
            "{kind: layer_types.index(kind) for kind in layer_types[:num_own]}",
        ),
        (
            "source",
            "rows that are left have the angles of others",
            ROWS,
            "[angles.take(indices, kernels) for angles in self.angles]",
            "self.angles",
        ),
        ("size", "MLPs are not wide", GEMMA4, "inner * (1 + (is_wide and source is not None))", "inner"),
        ("scaled", "scalars are ignored", DECODER, "if self.factor != 1.0:", "if False:"),
        ("proportional", "all is rotated", ROTARY, "int(rope.rotated_part * rotary_dim // 2)", "rotary_dim"),
        ("layer_inputs", "inputs are ignored", DECODER, "self.input(rows.inputs, residual)", "pass"),
        (
            "layer_inputs",
            "layers have the input of the first one",
            INPUTS,
            "start = (layer - part.layers.start) * size + own.start",
            "start = own.start",
        ),
        (
            "layer_inputs",
            "embeddings of inputs are not multiplied",
            INPUTS,
            "self.kernels.scale_and_cap(inputs, self.factor)",
            "pass",
        ),
        (
            "layer_inputs",
            "eps of inputs is not scaled",
            INPUTS,
            "config.norm.eps * config.hidden_size",
            "config.norm.eps",
        ),
        (
            "layer_inputs",
            "eps of what is made of inputs is not scaled",
            INPUTS,
            "2 * config.norm.eps",
            "config.norm.eps",
        ),
        (
            "layer_inputs",
            "the table has as many tokens as the model",
            INPUTS,
            "config.layer_inputs.vocab_size",
            "config.vocab_size",
        ),
    ],
    matches("gemma4-keys-as-values"): [
        (
            "keys_as_values",
            "V is not made of what W_k makes",
            ATTENTION,
            "index[-kv_size:] -= kv_size",
            "pass",
        ),
        (
            "kv",
            "all layers have one number of KV heads",
            GEMMA4,
            "_shape({**usual, **own},",
            '_shape({**usual, **own, "num_key_value_heads": 2},',
        ),
        (
            "proportional",
            "rope is not stretched",
            ROTARY,
            'in ("linear", "proportional")',
            'in ("linear",)',
        ),
    ],
    "tests/engine/test_gemma4.py::test_tensors_that_layers_do_not_use_are_skipped[gemma4-vision]": [
        (
            "tensor_names",
            "the text model's own names are forgotten",
            CONFIG,
            "skipped_prefixes=self.skipped_prefixes + skipped,",
            "skipped_prefixes=self.skipped_prefixes,",
        ),
    ],
}
MUTANTS = [Mutant(test, *bug) for test, bugs in BUGS.items() for bug in bugs]
