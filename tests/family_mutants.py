"""Mutation tests of model families: seeded bugs that a comparison with transformers must show.

    python -m tests.family_mutants          # all of them: a table, and exit code 1 if one survives
    python -m tests.family_mutants rope     # only mutants with one of these words in their names

A mutant replaces one text, which must occur exactly once, by another. The model of one of `CONFIGS` runs in a
process that imports the changed module.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import Any, NamedTuple

# What is imported here, the processes of all mutants share.
from transformers import AutoModelForCausalLM  # noqa: F401

from tests.gpu_mutants import plant
from tests.mutants import planted

TABLE, LAYERS, DECODER, ROPE = "model/families/table", "model/layers", "model/decoder", "model/families/rope"
MULTIMODAL, GPT, MLP = "model/families/multimodal", "model/families/gpt", "model/parts/mlp"


class Mutant(NamedTuple):
    """A bug: in `file`, `old` becomes `new`. The entry of CONFIGS whose comparison must show it."""

    name: str
    model: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "norms are swapped",
        "glm4",
        TABLE,
        '"post_self_attn_layernorm", "post_attention_layernorm"',
        '"post_attention_layernorm", "post_self_attn_layernorm"',
    ),
    Mutant(
        "an output is not normalised",
        "olmo2",
        DECODER,
        "norm.into(hidden, residual, add=True)",
        "residual.add_(hidden)",
    ),
    Mutant("1 is not added to norms", "gemma2", TABLE, '"norm_unit_offset": True,', ""),
    Mutant("1 is not added to norms of Q", "gemma3", LAYERS, "self.query_norm.unit_offset", "False"),
    Mutant("K is not normalised", "olmo2", LAYERS, "self.key_norm.into(key, key)", "pass"),
    Mutant("a partial rope is not un-permuted", "phi3", LAYERS, "if self.dim_order is None:", "if True:"),
    Mutant(
        "an interleaved rope is not un-permuted", "glm4", LAYERS, "if rope.interleaved else", "if False else"
    ),
    Mutant(
        "biases are not un-permuted",
        "glm4",
        LAYERS,
        "for x in (self.qkv.weight, self.qkv.bias)",
        "for x in (self.qkv.weight,)",
    ),
    Mutant("what is not rotated is scaled", "glm4", LAYERS, "(0, kept), value=1.0)", "(0, kept), value=0.9)"),
    Mutant("a layer without rope has one", "smollm3", TABLE, "rope if rotated else NO_ROPE", "rope"),
    Mutant(
        "all layers have one rope",
        "gemma3",
        ROPE,
        "tuple(ropes[kind] for kind in layer_types)",
        '(ropes["full_attention"],) * len(layer_types)',
    ),
    Mutant(
        "yarn keeps no frequency", "llama-yarn", LAYERS, "return 1 - ramp.clamp(0.0, 1.0)", "return 0 * ramp"
    ),
    Mutant(
        "cos and sin are not scaled", "olmo3", LAYERS, "if self.rope.attention_factor != 1.0:", "if False:"
    ),
    Mutant("mscale is ignored", "ministral3", ROPE, "if all(scales):", "if False:"),
    Mutant("queries are not scaled", "ministral3", TABLE, "if own.get(beta) is not None:", "if False:"),
    Mutant(
        "queries are scaled by their position",
        "ministral3",
        LAYERS,
        'positions.div(trained, rounding_mode="floor")',
        "positions / trained",
    ),
    Mutant(
        "layer_types are ignored",
        "ministral",
        TABLE,
        'layer_types_of(hf, ("sliding_attention",) * size(hf, "num_hidden_layers"))',
        '("sliding_attention",) * size(hf, "num_hidden_layers")',
    ),
    Mutant("a vision tower is not skipped", "gemma3-vision", MULTIMODAL, '"vision_tower.",', ""),
    Mutant(
        "a head of its own is tied", "mistral-vision", "runner/load", "and has_own_head(sources)", "and False"
    ),
    Mutant(
        "a text part has other names",
        "ministral3-vision",
        MULTIMODAL,
        '("language_model.lm_head.", "lm_head."),',
        "",
    ),
    Mutant("longrope is short", "phi3-longrope", LAYERS, "if rope.is_long else", "if False else"),
    Mutant(
        "embeddings are not multiplied", "gemma2", DECODER, "if self.embedding_factor != 1.0:", "if False:"
    ),
    Mutant("outputs are not multiplied", "granite", DECODER, "/ config.residual_multiplier", ""),
    Mutant(
        "eps is not scaled",
        "granite",
        "model/config",
        "self.rms_norm_eps / self.residual_multiplier**2",
        "self.rms_norm_eps",
    ),
    Mutant("logits are not divided", "granite", DECODER, "1 / self.config.logits_divisor", "1.0"),
    Mutant(
        "logits are not capped",
        "gemma2",
        DECODER,
        "logits_divisor, self.config.logits_softcap)",
        "logits_divisor)",
    ),
    Mutant("scores are not multiplied", "granite", LAYERS, "config.attention_scale or", ""),
    Mutant("scores are not capped", "gemma2", LAYERS, "softcap=self.softcap,", ""),
    Mutant("GELU is silu", "gemma2", MLP, "if is_silu else kernels.gelu_and_mul", ""),
    Mutant("exact GELU is approximated", "gpt2-unscaled", MLP, "tanh=self.tanh", "tanh=True"),
    Mutant("approximated GELU is exact", "gpt2", MLP, "tanh=self.tanh", "tanh=False"),
    Mutant(
        "scores are multiplied all the same",
        "gpt2-unscaled",
        GPT,
        '"scale_attn_weights") else 1.0',
        '"scale_attn_weights") else None',
    ),
    Mutant(
        "positions are not added",
        "gpt2",
        DECODER,
        "is None else self.positions(batch.positions)",
        "is None else None",
    ),
    Mutant(
        "a norm has no bias",
        "gpt2",
        "kernels/plain/ops",
        "weight, bias, eps)\n\n\ndef _weighted",
        "weight, None, eps)\n\n\ndef _weighted",
    ),
    Mutant(
        "sublayers are not parallel",
        "gpt_neox",
        DECODER,
        "ParallelLayer if config.parallel_residual else",
        "",
    ),
    Mutant(
        "a parallel MLP sees the output of attention",
        "gpt_neox",
        DECODER,
        "self.mlp(normed)",
        "self.mlp(self.before_mlp(residual))",
    ),
    Mutant("Q, K and V are not parted", "gpt_neox", LAYERS, "if self.by_head:", "if False:"),
    Mutant(
        "biases of Q, K and V are not parted",
        "gpt_neox",
        LAYERS,
        "for stored in (self.qkv.weight, self.qkv.bias)",
        "for stored in (self.qkv.weight,)",
    ),
    Mutant(
        "a window is ignored",
        "olmo3",
        "model/families/reading",
        'window if kind == "sliding_attention" else None',
        "None",
    ),
]


def found_in(model: str, file: str | None = None, text: str = "") -> str:
    """Return how a model differs from transformers' if a file of the package has this text; "" if not."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_compare, args=(there, model, file, text))
    process.start()
    there.close()
    try:
        found: str = here.recv()
    except EOFError as error:
        raise RuntimeError(f"the process of {model!r} ended without a result") from error
    process.join()
    return found


def _compare(results: Any, model: str, file: str | None, text: str) -> None:
    if file is not None:
        plant(f"paged.{file.replace('/', '.')}", text)
    import pytest

    from paged import CheckpointError
    from tests.engine.test_matches_transformers import assert_matches
    from tests.support.checkpoints import (
        MULTIMODAL_CONFIGS,
        VOCAB_SIZE,
        checkpoint,
        new_engine,
        ragged_prompts,
        reference,
    )

    # The last three tokens may stand for images.
    prompts = ragged_prompts([70, 90], VOCAB_SIZE - 3 * (model in MULTIMODAL_CONFIGS))
    try:
        engine = new_engine(checkpoint(model), attention_backend="torch")
        assert_matches(engine, reference(model), prompts, 3, pytest.MonkeyPatch())
    except (AssertionError, CheckpointError) as error:
        results.send(str(error).strip().partition("\n")[0] or "other tokens")
    else:
        results.send("")


def main() -> None:
    """Try every mutant."""
    words = sys.argv[1:]
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    texts = [planted(m.file, m.name, m.old, m.new) for m in chosen]
    for model in dict.fromkeys(mutant.model for mutant in chosen):
        if wrong := found_in(model):
            sys.exit(f"no bug is planted, and {model!r} differs: {wrong}")
    survivors = []
    for mutant, text in zip(chosen, texts, strict=True):
        before = time.perf_counter()
        found = found_in(mutant.model, mutant.file, text)
        survivors += [] if found else [mutant.name]
        print(f"{mutant.name:40} {time.perf_counter() - before:4.1f} s  {found or 'SURVIVES'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    sys.exit(f"not caught: {', '.join(survivors)}" if survivors else 0)


if __name__ == "__main__":
    main()
