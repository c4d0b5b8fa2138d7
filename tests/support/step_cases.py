"""What is run on fake CUDA devices: each setting changed alone from a base case, and random combinations."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from paged import BeamSearchParams, LLMEngine, SamplingParams, StructuredOutputsParams
from paged.grammars import grammar_jobs
from paged.model.weights import loading
from paged.runner.draft_model import DraftModel
from paged.runner.model_runner import ModelRunner
from paged.scheduler.schedule import Schedule
from tests.support.checkpoints import CONFIGS, SHAPE, checkpoint
from tests.support.fake_cuda import Event, FakeCuda, fake_cuda
from tests.support.quantised import Sizes, Writer, fp8, gptq, quantised_checkpoint

# Rows of whole groups of int4, and a shape that only a GPU's kernels treat in a way of their own.
_WHOLE_GROUPS = {"hidden_size": 64, "intermediate_size": 96}
CONFIGS["qwen3, 3 layers"] = lambda: Qwen3Config(
    **{**SHAPE, **_WHOLE_GROUPS, "tie_word_embeddings": True, "num_hidden_layers": 3}
)
CONFIGS["llama, head_dim 128"] = lambda: LlamaConfig(**{**SHAPE, "head_dim": 128})

QUANTISED: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq(Sizes(scale=0.02), act_order=True)),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        fp8((32, 32), name="weight_scale_inv", scale=0.001),
    ),
}

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100")
PROMPTS = [[5, 6, 7], [*range(10, 30)]]
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "num_blocks": 64,
    "max_model_len": 256,
    "preemption_mode": "recompute",
    "cudagraph_capture_sizes": [4],
    "async_scheduling": False,  # so that each step is counted alone
}
PARAMS: dict[str, Any] = {"temperature": 0.7, "max_tokens": 5, "ignore_eos": True}


@dataclass(frozen=True)
class Case:
    """A run of an engine, and the kinds of its steps that are counted, the last of each: see `run_case`."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    model: str = "demo"
    target: str = "sm_90"
    counted: tuple[str, ...] = ("decode",)
    use: Callable[[LLMEngine, SamplingParams], None] | None = None  # instead of `generate`


Step = tuple[str, list[Event]]  # the kind and the events of a step, or of the time before one


@functools.cache
def checkpoint_of(model: str) -> str:
    """Return the directory of a model, made if need be."""
    if model not in QUANTISED:
        return model if model == "demo" else str(checkpoint(model))
    config, writer = QUANTISED[model]
    folder = Path(tempfile.mkdtemp(prefix="paged-quantised-"))
    return str(
        quantised_checkpoint(
            checkpoint("llama"), folder, config, lambda name: writer if ".layers." in name else None
        )[0]
    )


def run_case(case: Case) -> list[Step]:
    """Run a case. Return its steps, and what was asked of the device between them, as "between".

    The step by which memory is measured is "profile", the passes of a draft model before one are "guesses";
    `kind_of` has the others.
    """
    steps: list[Step] = []
    model = checkpoint_of(case.model)
    with (
        fake_cuda(case.target) as cuda,
        mock.patch.object(ModelRunner, "execute", _recorded(cuda, steps)),
        mock.patch.object(DraftModel, "propose", _recorded_guesses(cuda, steps)),
        # Whatever a fake device is asked, it answers yes: also whether values are wrong.
        mock.patch.object(loading, "check_values"),
        # On a busy machine a mask may be late, and its row in another step.
        mock.patch.object(grammar_jobs, "SLOW_S", 60.0),
    ):
        has_tokenizer = case.model == "demo"
        engine = LLMEngine(model, **{**OPTIONS, "skip_tokenizer_init": not has_tokenizer, **case.options})
        if has_tokenizer:
            cuda.token = engine.get_tokenizer().encode("a")[0]
        params = SamplingParams(**{**PARAMS, **case.params})
        (case.use or generate)(engine, params)
        engine.scheduler.check()
        assert cuda.current == 0, "the engine has changed the current device"
        steps.append(("between", cuda.take()))
    return steps


def _recorded(cuda: FakeCuda, steps: list[Step]) -> Callable[..., Any]:
    execute = ModelRunner.execute

    def recorded(self: ModelRunner, schedule: Schedule) -> Any:
        is_profile = not steps and self.config.num_blocks is None  # the first step
        steps.append(("between", cuda.take()))
        kind = kind_of(schedule) if not is_profile else "profile"
        try:
            output = execute(self, schedule)
        finally:
            steps.append((kind, cuda.take()))
        assert not output.errors, output.errors
        return output

    return recorded


def _recorded_guesses(cuda: FakeCuda, steps: list[Step]) -> Callable[..., Any]:
    propose = DraftModel.propose

    def recorded(self: DraftModel, *args: Any) -> Any:
        steps.append(("between", cuda.take()))
        drafts = propose(self, *args)
        steps.append(("guesses", cuda.take()))
        return drafts

    return recorded


def kind_of(schedule: Schedule) -> str:
    """Return what is special about a step: the first of these that it does."""
    kinds = {
        "swap out": schedule.swap_out,
        "swap in": schedule.swap_in,
        "copy": schedule.copies,
        "drafts": schedule.drafts and not schedule.has_prompts,
        "decode": schedule.is_decode,
    }
    return next((kind for kind, does in kinds.items() if does), "prompt")


# Uses of an engine


def generate(engine: LLMEngine, params: SamplingParams) -> None:
    """Complete PROMPTS."""
    engine.generate(PROMPTS, params, use_tqdm=False)


def _long_prompt(engine: LLMEngine, params: SamplingParams) -> None:
    engine.generate([[5] * 1200, [6, 7]], params, use_tqdm=False)


def _under_pressure(engine: LLMEngine, params: SamplingParams) -> None:
    """Run more requests than fit in the KV cache."""
    engine.generate([[i] * 16 for i in range(4)], params, use_tqdm=False)
    stats = engine.stats()
    assert stats.num_recompute_preemptions + stats.num_swap_preemptions, "no request was preempted"


def _fork(engine: LLMEngine, params: SamplingParams) -> None:
    engine.add_request("parent", PROMPTS[0], params)
    engine.step()
    engine.fork("parent", "child")
    while engine.has_unfinished_requests():
        engine.step()


def _fork_behind_drafts(engine: LLMEngine, params: SamplingParams) -> None:
    """Fork a request whose last run of drafts its state has not seen."""
    engine.add_request("parent", PROMPTS[0], params)
    while not engine.stats().num_draft_tokens:
        engine.step()
    engine.fork("parent", "child")
    while engine.has_unfinished_requests():
        engine.step()


def _beams(engine: LLMEngine, _: SamplingParams) -> None:
    engine.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True), use_tqdm=False)


def _encode(engine: LLMEngine, _: SamplingParams) -> None:
    engine.encode(PROMPTS, use_tqdm=False)


def _score(engine: LLMEngine, _: SamplingParams) -> None:
    engine.score("def f(", ["x):", "y):"], use_tqdm=False)


def _save_prefix(engine: LLMEngine, params: SamplingParams) -> None:
    with tempfile.TemporaryDirectory() as folder:
        generate(engine, params)
        assert engine.save_prefix(Path(folder) / "prefix.safetensors") == 1


def _load_prefix(engine: LLMEngine, params: SamplingParams) -> None:
    with tempfile.TemporaryDirectory() as folder:
        generate(engine, params)
        engine.save_prefix(file := Path(folder) / "prefix.safetensors")
        engine.reset_prefix_cache()
        engine.runner.execute(Schedule())  # ends the time that `save_prefix` is counted in
        assert engine.load_prefix(file) == 1


def _generate_again(engine: LLMEngine, params: SamplingParams) -> None:
    generate(engine, params)
    generate(engine, params)


def _prefix_hit(engine: LLMEngine, params: SamplingParams) -> None:
    generate(engine, params)
    outputs = engine.generate(PROMPTS, params, use_tqdm=False)
    assert outputs[1].num_cached_tokens == 16


def _nothing(engine: LLMEngine, _: SamplingParams) -> None: ...


def _unchanged(_tokens: list[int], logits: Tensor) -> Tensor:
    return logits


TINY = {"num_blocks": 12, "block_size": 8, "enable_prefix_caching": False}
DRY = {"dry_multiplier": 0.8}
# What each field of SamplingParams is changed to; several where the way is not the same.
CHANGES: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.5},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "seed": {"seed": 3},
    "n": {"n": 2},
    "best_of": {"best_of": 3},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "repetition_penalty_last_n": {"repetition_penalty": 1.2, "repetition_penalty_last_n": 4},
    "dry_multiplier": DRY,
    "dry_base": {**DRY, "dry_base": 2.0},
    "dry_allowed_length": {**DRY, "dry_allowed_length": 1},
    "dry_sequence_breakers": {**DRY, "dry_sequence_breakers": ("self", "def")},
    "dry_penalty_last_n": {**DRY, "dry_penalty_last_n": 4},
    "logit_bias": {"logit_bias": {5: 2.0}},
    "allowed_token_ids": {"allowed_token_ids": [1, 2, 3]},
    "bad_words of one token": {"bad_words": ["def"]},
    "bad_words of several tokens": {"bad_words": ["import os.path"]},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [7]},
    "stop": {"stop": "never"},
    "logprobs": {"logprobs": 5},
    "logprobs of all tokens": {"logprobs": -1},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "logits_processors": {"logits_processors": [_unchanged]},
    "structured_outputs": {"structured_outputs": StructuredOutputsParams(regex="a+")},
    "cache_salt": {"cache_salt": "salt"},
}
# Whose other steps are not as usual either.
COUNTED = {
    "prompt_logprobs": ("prompt", "decode"),
    "n": ("copy", "decode"),
    "repetition_penalty": ("prompt", "decode"),
}
# Fields that only the host reads.
OF_THE_HOST = {
    "max_tokens",
    "num_speculative_tokens",
    "stop_token_ids",
    "no_stop_within",
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "output_kind",
    "priority",
    "timeout_s",
}

_SWAP = {**TINY, "preemption_mode": "swap", "swap_space": 0.01}
_LONG = {"max_tokens": 24}
_DRAFTS = {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}}
_STATES = ("qwen3_5", "lfm2")  # models with layers that keep some
_EDITS = {
    name: value
    for case in ("presence_penalty", "repetition_penalty", "bad_words of several tokens", "min_tokens")
    for name, value in CHANGES[case].items()
}
_OTHERS = [
    Case("base", counted=("prompt", "decode")),
    *(Case(f"model {name}", model=name) for name in CONFIGS),
    Case("dtype float32", {"dtype": "float32"}),
    Case("dtype float16", {"dtype": "float16"}),
    Case("KV int8", {"kv_cache_dtype": "int8"}),
    Case("KV fp8", {"kv_cache_dtype": "fp8"}),
    Case("KV bfloat16 of float32", {"dtype": "float32", "kv_cache_dtype": "bfloat16"}),
    Case("weights int8", {"quantization": "int8"}),
    Case("weights int4", {"quantization": "int4"}),
    *(Case(f"weights {name}", model=name) for name in QUANTISED),
    Case("weights of experts int8", {"quantization": "int8"}, model="mixtral"),
    *(Case(f"block_size {size}", {"block_size": size}) for size in (8, 64, 256)),
    Case("descriptors", {"block_size": 128}, model="llama, head_dim 128"),
    Case("chunked prompts", {"max_num_batched_tokens": 7}),
    Case(
        "long prompt: splits of decodes",
        {"max_model_len": 2048, "num_blocks": 128},
        use=_long_prompt,
        counted=("prompt", "decode"),
    ),
    Case("no prefix cache", {"enable_prefix_caching": False}),
    Case("prefix hit", use=_prefix_hit, counted=("prompt",)),
]
_USES = [
    Case("encode", use=_encode, counted=("prompt",)),
    Case("score", use=_score, counted=("prompt",)),
    Case("beams", use=_beams, counted=("copy",)),
    Case("fork", use=_fork, counted=("copy",)),
    Case("drafts", _DRAFTS, counted=("drafts",), use=_generate_again),
    *(
        Case(f"drafts, model {name}", _DRAFTS, _LONG, model=name, counted=("drafts",), use=_generate_again)
        for name in _STATES
    ),
    *(
        Case(
            f"fork behind drafts, model {name}",
            _DRAFTS,
            _LONG,
            model=name,
            use=_fork_behind_drafts,
            counted=("copy",),
        )
        for name in _STATES
    ),
    Case("drafts of edited logits", _DRAFTS, _EDITS, counted=("drafts",), use=_generate_again),
    Case("drafts with DRY", _DRAFTS, DRY, counted=("drafts",), use=_generate_again),
    Case(
        "drafts of a grammar",
        _DRAFTS,
        CHANGES["structured_outputs"],
        counted=("drafts",),
        use=_generate_again,
    ),
    Case(
        "drafts of a model, 4 each",
        {"speculative_config": {"model": "demo", "num_speculative_tokens": 4, "adaptive": False}},
        {"max_tokens": 11},
        counted=("guesses", "drafts"),
        use=_generate_again,
    ),
    Case("preemption by recompute", TINY, _LONG, use=_under_pressure),
    Case("preemption by swap", _SWAP, _LONG, use=_under_pressure, counted=("swap out", "swap in")),
    Case(
        "preemption by swap, KV int8",
        {**_SWAP, "kv_cache_dtype": "int8"},
        _LONG,
        use=_under_pressure,
        counted=("swap out", "swap in"),
    ),
    Case("save_prefix", use=_save_prefix, counted=("between",)),
    Case("load_prefix", use=_load_prefix, counted=("between",)),
    Case(
        "memory profiling",
        {"num_blocks": None, "max_num_batched_tokens": 512},
        use=_nothing,
        counted=("profile",),
    ),
]
_DEVICES = [
    Case("target gfx942, weights int4", {"quantization": "int4"}, target="gfx942"),
    Case("cuda:1 while cuda:0 is current", {"device": "cuda:1"}),
    *(Case(f"target {target}", target=target) for target in TARGETS if target != "sm_90"),
    *(
        Case(f"target {target}, KV int8", {"kv_cache_dtype": "int8"}, target=target)
        for target in TARGETS
        if target != "sm_90"
    ),
]
CASES = [
    *_OTHERS,
    *(Case(name, params=params, counted=COUNTED.get(name, ("decode",))) for name, params in CHANGES.items()),
    *_USES,
    *_DEVICES,
]


def random_case(seed: int) -> Case:
    """Return a case that changes many settings at once."""
    rng = random.Random(seed)
    model = rng.choice(["demo", *CONFIGS])
    target = rng.choice(TARGETS)
    dtype = rng.choice(["bfloat16", "float16", "float32"])
    if dtype == "float16" and model.startswith(("gemma", "glm", "granite")):  # too narrow for them
        dtype = "bfloat16"
    caches = ["auto", "int8", *(["fp8"] if target in ("sm_89", "sm_90", "sm_100", "sm_120") else [])]
    swaps = rng.random() < 0.5
    options = {
        "device": rng.choice(["cuda", "cuda:0", "cuda:1"]),
        "dtype": dtype,
        "kv_cache_dtype": rng.choice(caches),
        "block_size": rng.choice([8, 16, 64]),
        "max_num_batched_tokens": rng.choice([7, 64, None]),
        "num_blocks": rng.choice([64, 64, 64, None]),
        "enable_prefix_caching": rng.random() < 0.7,
        "preemption_mode": "swap" if swaps else "recompute",
        "swap_space": 0.01 if swaps else None,
        "scheduling_policy": rng.choice(["fcfs", "longest-prefix-match", "fair"]),
    }
    params: dict[str, Any] = {}
    excluded = {"structured_outputs", "best_of", "temperature 0"}  # an error, or the end of sampling
    if model != "demo":  # they need a tokenizer
        excluded |= {"bad_words of one token", "bad_words of several tokens", "stop", "dry_sequence_breakers"}
    names = [name for name in CHANGES if name not in excluded]
    for name in rng.sample(names, rng.randint(1, 5)):
        params |= CHANGES[name]
    if model != "demo" and "dry_multiplier" in params:
        params["dry_sequence_breakers"] = ()
    use = rng.choice([generate, _generate_again])
    return replace(
        Case(f"random {seed}"), model=model, target=target, options=options, params=params, use=use
    )
