"""Bugs in weights in codes, for `tests.model_mutants`: each with the test that fails with it."""

from tests.support.family_bugs import Mutant

FORMATS = "model/weights/formats"
GGUF = f"{FORMATS}/gguf"
SCHEMES = "model/schemes"
KERNEL = "kernels/gpu/linear/kernel"
PACKING = "kernels/cpu/linear/pack_codes"


def defined(case: str) -> str:
    """Return the test that compares a case of `test_formats` with its format's definition."""
    return f"tests/checkpoints/test_formats.py::test_weight_is_what_its_format_defines[{case}]"


def block_type(name: str) -> str:
    """Return the test that compares a type of GGUF with llama.cpp's own reader."""
    return f"tests/checkpoints/test_gguf_file.py::test_numbers_are_those_of_llama_cpp[{name}]"


def gguf_family(name: str) -> str:
    """Return the test that compares the GGUF file of a family with transformers."""
    return f"tests/engine/test_gguf.py::test_family[{name}]"


def damage(name: str) -> str:
    """Return the test that a damaged checkpoint is refused."""
    return f"tests/checkpoints/test_quantised_checkpoints.py::test_damage_is_named[{name}]"


def triton_product(kind: str) -> str:
    """Return the test that compares Triton's product with float64."""
    return f"tests/ops/gpu/test_coded_linear.py::test_products_match_float64[{kind} float32]"


CHECKPOINTS = "tests/checkpoints/test_quantised_checkpoints.py"
RULES = "tests/architectures/test_schemes.py"
FOLDED = "tests/ops/cpu/test_codes.py::test_what_one_rounding_does_not_give_is_folded_or_widened"
# Test: (part, name, file, old, new).
BUGS = {
    defined("gptq-32-ragged"): [
        ("gptq", "zeros are not stored less 1", f"{FORMATS}/gptq", "+ self.zeros_less_one", "+ 0"),
        (
            "gptq",
            "zeros are packed along groups",
            f"{FORMATS}/groups",
            "codes.movedim(-1, 1).flatten(0, 1)",
            "codes.movedim(-1, 0).flatten(0, 1)",
        ),
    ],
    defined("gptq-v2-ragged"): [
        ("gptq", "version 2 is version 1", SCHEMES, 'zeros_less_one=stored == "gptq"', "zeros_less_one=True"),
    ],
    defined("gptq-act-order-even"): [
        (
            "gptq",
            "g_idx is ignored",
            f"{FORMATS}/gptq",
            "groups = groups or InputGroups",
            "groups = InputGroups",
        ),
        (
            "gptq",
            "columns keep the order of groups",
            "model/weights/coded",
            "out[:, self.order] = weight",
            "out[:] = weight",
        ),
    ],
    defined("gptq-8-bits-even"): [
        (
            "gptq",
            "8 bits are not around the middle",
            f"{FORMATS}/integers",
            "(codes ^ middle).view(torch.int8)",
            "codes.view(torch.int8)",
        ),
    ],
    defined("awq-32-ragged"): [
        (
            "awq",
            "outputs are in their order",
            f"{FORMATS}/awq",
            "ORDER = (0, 2, 4, 6, 1, 3, 5, 7)",
            "ORDER = (0, 1, 2, 3, 4, 5, 6, 7)",
        ),
    ],
    defined("packed-act-order-even"): [
        (
            "packed integers",
            "weight_g_idx is ignored",
            f"{FORMATS}/packed",
            "groups = groups or InputGroups",
            "groups = InputGroups",
        ),
    ],
    defined("packed-plain-zeros-even"): [
        (
            "packed integers",
            "plain zeros are unsigned",
            f"{FORMATS}/packed",
            "zeros.to(torch.int16) + (1 << bits - 1)",
            "zeros.to(torch.int16)",
        ),
    ],
    defined("int8-zeros-even"): [
        (
            "integers",
            "zeros are not read",
            f"{FORMATS}/whole_bytes",
            'self.scale.by_row(tensors["weight_zero_point"]) if self.zeros else None',
            "None",
        ),
    ],
    defined("fp8-block-ragged"): [
        (
            "fp8",
            "the last block of inputs must be whole",
            f"{FORMATS}/scales",
            "-(-num_inputs // self.inputs)",
            "num_inputs // self.inputs",
        ),
    ],
    defined("fp8-block-even"): [
        (
            "fp8",
            "the last block of outputs must be whole",
            "model/weights/stored",
            "-(-num_rows // self.rows_per_entry)",
            "num_rows // self.rows_per_entry",
        ),
        (
            "fp8",
            "each output has the scale of the first block",
            "model/weights/stored",
            "entries[_as_slice(rows // layout.rows_per_entry)].to",
            "entries[rows * 0].to",
        ),
    ],
    defined("mxfp4-ragged"): [
        (
            "mxfp4",
            "e8m0 is twice as large",
            f"{FORMATS}/fp4",
            "scale.view(torch.float8_e8m0fnu).to(torch.bfloat16)",
            "scale.view(torch.float8_e8m0fnu).to(torch.bfloat16) * 2",
        ),
        (
            "mxfp4",
            "the high nibble is first",
            f"{FORMATS}/groups",
            "torch.stack([packed & 15, packed >> 4], dim=-1)",
            "torch.stack([packed >> 4, packed & 15], dim=-1)",
        ),
        ("mxfp4", "a number of e2m1 is wrong", f"{FORMATS}/fp4", "-3.0, -4.0, -6.0)", "-3.0, -4.0, -5.0)"),
    ],
    defined("nvfp4-ragged"): [
        (
            "nvfp4",
            "weight_global_scale multiplies",
            f"{FORMATS}/fp4",
            "Factors(scale, scale_divisor=unit) if self.divides else Factors",
            "Factors",
        ),
        (
            "nvfp4",
            "a quotient is a product with 1 / x",
            "model/weights/coded",
            "self.scale.float() / _by_group(self.scale_divisor, self.scale)",
            "self.scale.float() * (1 / _by_group(self.scale_divisor, self.scale))",
        ),
    ],
    defined("modelopt-nvfp4-ragged"): [
        (
            "nvfp4",
            "weight_scale_2 divides",
            f"{FORMATS}/fp4",
            "shape, not is_theirs)",
            "shape, True)",
        ),
    ],
    block_type("Q4_K"): [
        (
            "gguf",
            "minima are added",
            GGUF,
            "offset_unit=-_float16(blocks, 2)",
            "offset_unit=_float16(blocks, 2)",
        ),
        ("gguf", "6 bits of scales are 4", GGUF, " | own >> 2 & 0x30303030", ""),
    ],
    block_type("Q5_K"): [
        (
            "gguf",
            "bit g is that of group 7 - g",
            GGUF,
            ">> _counted(8, blocks)[:, None] & 1",
            ">> _counted(8, blocks).flip(0)[:, None] & 1",
        ),
    ],
    block_type("Q6_K"): [
        (
            "gguf",
            "high bits are a place too low",
            GGUF,
            "pairs[group] & 0x3030303030303030",
            "pairs[group] >> 1 & 0x3030303030303030",
        ),
    ],
    block_type("MXFP4"): [
        (
            "gguf",
            "a scale is half of itself",
            GGUF,
            "_half_bytes(blocks, 1), Factors(scales)",
            "_half_bytes(blocks, 1), Factors(scales / 2)",
        ),
        ("gguf", "zero has a sign", GGUF, "tuple(number or 0.0 for number in E2M1)", "E2M1"),
    ],
    block_type("IQ4_NL"): [
        ("gguf", "an entry of the table is wrong", GGUF, "-83, -65, -49", "-83, -64, -49"),
    ],
    gguf_family("llama-tied-bias"): [
        (
            "gguf",
            "rows of Q and K stay interleaved",
            "model/gguf/tensors",
            "if layout.interleaved:",
            "if False:",
        ),
    ],
    gguf_family("qwen3_moe"): [
        (
            "gguf",
            "gates and ups of stacked experts are exchanged",
            "model/gguf_names",
            '("ffn_gate_exps.", f"mlp.experts.{gate}."),',
            '("ffn_up_exps.", f"mlp.experts.{gate}."), ("ffn_gate_exps.", f"mlp.experts.{up}."),',
        ),
        (
            "gguf",
            "weights of stacked experts are not divided by their sum",
            "model/gguf/config",
            "_qwen3(source) | _experts(source, renormalised=True)",
            "_qwen3(source) | _experts(source, renormalised=False)",
        ),
        (
            "gguf",
            "each of the stacked experts is the first",
            "model/weights/stacks",
            "            start += size\n",
            "",
        ),
    ],
    gguf_family("qwen2_moe"): [
        (
            "gguf",
            "weights of stacked experts are divided by their sum",
            "model/gguf/config",
            "_qwen2(source) | _experts(source, renormalised=False)",
            "_qwen2(source) | _experts(source, renormalised=True)",
        ),
    ],
    gguf_family("gpt_oss"): [
        (
            "gguf",
            "YaRN rounds its bounds",
            "model/gguf/config",
            'hf["rope_parameters"]["truncate"] = False',
            "pass",
        ),
        (
            "gguf",
            "gates and ups are read as if they alternated",
            "model/gguf_names",
            "interleaved=False)",
            "interleaved=True)",
        ),
    ],
    gguf_family("glm4_moe"): [
        (
            "gguf",
            "layers that predict further tokens are computed",
            "model/gguf/config",
            'hf["num_hidden_layers"] - num_extra',
            'hf["num_hidden_layers"]',
        ),
        (
            "gguf",
            "all layers have experts",
            "model/gguf/config",
            'metadata.integer("leading_dense_block_count", 0)',
            'metadata.integer("leading_dense_block_count", 0) * 0',
        ),
        (
            "gguf",
            "weights are not scaled",
            "model/gguf/config",
            'metadata.number("expert_weights_scale", 1.0)',
            'metadata.number("expert_weights_scale", 1.0) * 0 + 1.0',
        ),
    ],
    gguf_family("granitemoe"): [
        (
            "gguf",
            "rows of Q and K stay interleaved",
            "model/gguf_names",
            '"granitemoe": Converted(_QWEN_MOE, interleaved=True)',
            '"granitemoe": Converted(_QWEN_MOE)',
        ),
    ],
    gguf_family("gemma4-experts"): [
        (
            "gguf",
            "all dimensions rotate",
            "model/gguf/config",
            "num_rotated / (width // 2)",
            "1.0",
        ),
    ],
    gguf_family("gemma2"): [
        (
            "gguf",
            "norms keep the 1",
            "model/gguf/tensors",
            "added = int(layout.norms_plus_one and",
            "added = 0 * int(layout.norms_plus_one and",
        ),
        (
            "gguf",
            "1 is subtracted twice",
            "model/gguf/tensors",
            "added = int(layout.norms_plus_one and",
            "added = 2 * int(layout.norms_plus_one and",
        ),
    ],
    damage("a scale is NaN"): [
        (
            "checks",
            "NaN is a scale",
            f"{FORMATS}/groups",
            "return ~x.float().isfinite()",
            "return x.float().isinf()",
        ),
    ],
    damage("a scale in e4m3 is NaN"): [
        (
            "checks",
            "NaN is a scale in e4m3",
            f"{FORMATS}/fp4",
            "stored_dtypes=(e4m3,), check=NO_NAN)",
            "stored_dtypes=(e4m3,))",
        ),
    ],
    damage("an exponent is NaN"): [
        (
            "checks",
            "NaN is a scale in e8m0",
            f"{FORMATS}/fp4",
            "check=EXPONENTS if is_byte else FINITE",
            "check=None",
        ),
    ],
    "tests/checkpoints/test_gguf_file.py::test_factors_are_numbers": [
        (
            "checks",
            "an infinite factor is accepted",
            "model/weights/gguf_file",
            "for place in self.type.factors:",
            "for place in ():",
        ),
    ],
    f"{RULES}::test_the_most_specific_target_is_taken": [
        (
            "rules",
            "ignore is not looked at",
            SCHEMES,
            "for pattern, matches in ignored:",
            "for pattern, matches in ignored[:0]:",
        ),
        (
            "rules",
            "the first target is taken",
            SCHEMES,
            "for target in in_order]",
            "for target in schemes]",
        ),
    ],
    f"{RULES}::test_parts_of_a_name_are_whole": [
        (
            "rules",
            "modules_to_not_convert is not looked at",
            SCHEMES,
            "for pattern in floats:",
            "for pattern in floats[:0]:",
        ),
        (
            "rules",
            "gate is gate_proj",
            SCHEMES,
            """f".{pattern.strip('.')}." in f".{name}.\"""",
            "pattern in name",
        ),
    ],
    f"{RULES}::test_a_file_beside_config_json_says_it": [
        (
            "rules",
            "exclude_modules is not looked at",
            SCHEMES,
            "for pattern in excluded:",
            "for pattern in excluded[:0]:",
        ),
    ],
    f"{CHECKPOINTS}::test_the_head_and_the_embedding_may_be_in_codes": [
        (
            "tied",
            "the first token is looked up",
            "model/weights/panels",
            "take_panel_rows(self.panels, indices, self.dtype)",
            "take_panel_rows(self.panels, indices * 0, self.dtype)",
        ),
    ],
    "tests/ops/cpu/test_codes.py::test_when_one_rounding_is_enough": [
        (
            "panels",
            "any offset is exact",
            PACKING,
            "if offset is not None and not _are_short(scales, most):",
            "if False:",
        ),
    ],
    "tests/ops/cpu/test_codes.py::test_factors_become_as_narrow_as_they_may": [
        (
            "panels",
            "factors are rounded",
            PACKING,
            "if all(_are_equal(rows, rows.to(dtype)) for rows in torch.split(x, _ROWS_AT_A_TIME)):",
            "if True:",
        ),
    ],
    f"{FOLDED}[torch.bfloat16-zeros with a negative scale]": [
        ("panels", "negative scales are exact", PACKING, "and not bool(scales.signbit().any())", ""),
    ],
    "tests/model/test_gpu_codes.py::test_engine_gives_the_tokens_of_the_floats": [
        (
            "tied",
            "the first token is looked up on a GPU",
            "model/weights/gpu_codes",
            "take_coded_rows(self.packed, indices, self.dtype)",
            "take_coded_rows(self.packed, indices * 0, self.dtype)",
        ),
    ],
    "tests/model/test_gpu_codes.py::test_an_order_of_inputs[PackedCodesWeight]": [
        (
            "tied",
            "rows keep the order of groups on a GPU",
            "model/weights/gpu_codes",
            "found if self._places is None else",
            "found if True else",
        ),
    ],
    triton_product("('gptq', (40, 256, 32), 3)"): [
        ("triton", "zeros are not subtracted", KERNEL, "numbers -= zeros[", "numbers -= 0.0 * zeros["),
        (
            "triton",
            "inputs have the factors of the next group",
            KERNEL,
            "* kind.SUB // shape.GROUP,",
            "* kind.SUB // shape.GROUP + 1,",
        ),
    ],
    triton_product("('q4_k units', (24, 512, 32), 5)"): [
        (
            "triton",
            "all inputs have the first unit",
            KERNEL,
            "if shape.UNIT_TILES < shape.NUM_TILES:",
            "if False:",
        ),
    ],
    triton_product("('mxfp4', (40, 96, 32), 17)"): [
        (
            "triton",
            "inputs that pad the last tile are read",
            KERNEL,
            "if shape.NUM_INPUTS % (PER_WORD * SUB) != 0:",
            "if False:",
        ),
    ],
    "tests/ops/gpu/test_coded_linear.py::test_a_row_has_the_same_bits_in_any_batch[torch.float32]": [
        (
            "triton",
            "few rows add their splits backwards",
            KERNEL,
            "partial_ptr + split * stride",
            "partial_ptr + (NUM_SPLITS - 1 - split) * stride",
        ),
        (
            "triton",
            "splits follow from the number of rows",
            "kernels/gpu/linear/coded_linear",
            "shape = shape_of(layout, target)\n        num_splits",
            "shape = shape_of(layout, target)\n"
            "        shape = shape if num_rows < 99 else shape._replace(SPLIT_TILES=shape.NUM_TILES)\n"
            "        num_splits",
        ),
    ],
}
MUTANTS = [Mutant(test, *bug) for test, bugs in BUGS.items() for bug in bugs]
