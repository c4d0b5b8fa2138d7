"""Mutation tests of model families: a bug in each part, and the test that fails with it.

    python -m tests.family_mutants             # all of them: a table, and exit code 1 if one survives
    python -m tests.family_mutants rope        # only mutants with one of these words in their parts or names
    python -m tests.family_mutants --share 3   # one of SHARES shares, as the tests do each day

A mutant replaces one text, which must occur exactly once, by another. Its test runs in a process that imports
the changed module.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from typing import Any, NamedTuple

# What is imported here, the processes of all mutants share.
import psutil  # noqa: F401
import pytest
import safetensors.torch  # noqa: F401
import torch
import triton  # noqa: F401
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

from tests.gpu_mutants import plant
from tests.mutants import planted

SHARES = 6
TABLE, LAYERS, DECODER, ROPE = "model/families/table", "model/layers", "model/decoder", "model/families/rope"


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
            LAYERS,
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
            "(self.qkv.weight, self.qkv.bias)",
            "(self.qkv.weight,)",
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
        ("activation", "GELU is silu", LAYERS, "if is_silu else kernels.gelu_and_mul", ""),
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
            LAYERS,
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
            "batch.rope_lens.clamp(min=self.max_position_embeddings)",
            "batch.rope_lens * 0 + self.max_position_embeddings",
        ),
    ],
    matches("llama-llama3"): [
        ("llama3", "Llama 3's rope is not scaled", LAYERS, 'if rope.type != "llama3":', "if True:"),
    ],
    matches("llama-yarn"): [
        ("yarn", "yarn keeps no frequency", LAYERS, "return 1 - ramp.clamp(0.0, 1.0)", "return 0 * ramp"),
    ],
    matches("phi3-longrope"): [
        ("longrope", "longrope is short", LAYERS, "if rope.is_long else", "if False else"),
    ],
    matches("granite"): [
        ("residual_multiplier", "outputs are not multiplied", DECODER, "/ config.residual_multiplier", ""),
        (
            "residual_multiplier",
            "eps is not scaled",
            "model/config",
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
            "model/config",
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
}
MUTANTS = [Mutant(test, *bug) for test, bugs in BUGS.items() for bug in bugs]


class Failures:
    """A plugin of pytest that notes why tests fail."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.messages.append(str(crash.message if crash else report.longrepr))


def failure(test: str, file: str | None = None, text: str = "") -> str:
    """Return how a test fails if a file of the package has this text; "" if it passes."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_run, args=(there, test, file, text))
    process.start()
    there.close()
    try:
        found: str = here.recv()
    except EOFError as error:
        raise RuntimeError(f"{test} did not run: see above") from error
    process.join()
    return found


def _run(results: Any, test: str, file: str | None, text: str) -> None:
    if file is not None:
        plant(f"paged.{file.replace('/', '.')}", text)
    failures = Failures()
    # Nothing but the test: conftest.py would take as long as most of them.
    options = ["--quiet", "--no-header", "--noconftest", "-p", "no:cacheprovider"]
    with open(os.devnull, "w") as nowhere:
        printed, sys.stdout = sys.stdout, nowhere
        code = pytest.main([*options, test], plugins=[failures])
        sys.stdout = printed
    if code not in (0, 1):  # no such test, or one that cannot be imported, which says nothing about the bug
        sys.exit(f"pytest ends with exit code {code!r} for {test}")
    if code == 1:
        lines = [line.strip() for message in failures.messages for line in message.splitlines()]
        results.send(next(filter(None, lines), "fails"))
    else:
        results.send("")


def main() -> None:
    """Try every mutant."""
    parser = argparse.ArgumentParser(prog="python -m tests.family_mutants", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--share", type=int, choices=range(SHARES))
    given = parser.parse_args()
    chosen = [
        m for m in MUTANTS if not given.words or any(word in f"{m.part} {m.name}" for word in given.words)
    ]
    texts = [planted(m.file, m.name, m.old, m.new) for m in chosen]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    torch.set_num_threads(1)  # the models are so small that more would wait for each other

    if given.share is not None:
        chosen, texts = chosen[given.share :: SHARES], texts[given.share :: SHARES]
    else:
        for test in dict.fromkeys(mutant.test for mutant in chosen):
            if wrong := failure(test):
                sys.exit(f"no bug is planted, and {test} fails: {wrong}")
    survivors = []
    for mutant, text in zip(chosen, texts, strict=True):
        before = time.perf_counter()
        found = failure(mutant.test, mutant.file, text)
        survivors += [] if found else [f"{mutant.name} by {mutant.test}"]
        seconds = f"{time.perf_counter() - before:4.1f} s"
        name, test = f"{mutant.part}: {mutant.name}", mutant.test.rpartition("::")[2]
        print(f"{name:64} {seconds}  {test}: {found or 'SURVIVES'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    sys.exit(f"not caught: {', '.join(survivors)}" if survivors else 0)


if __name__ == "__main__":
    main()
