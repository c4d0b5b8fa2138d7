"""CUDA graphs against steps without them, on a device that works late: the same tokens, for drawn engines.

    python -m tests.graphs                 # every model, format of weights and of the KV cache, and stages
    python -m tests.graphs gemma int8      # those with one of these words in their names
    python -m tests.graphs --seeds 20      # drawn ones
    python -m tests.graphs --seed 7        # one of these

Each engine draws tokens with parameters that change several fields of SamplingParams at once, of requests
that come and go. A decode that runs without its graph is an error. Needs g++ and Triton's interpreter, which
takes most of the time: about a minute for weights in codes, as it goes through each word of them.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import pytest

from paged import LLMEngine, SamplingParams
from tests.support.checkpoints import CONFIGS
from tests.support.interpreter import remember_builtins
from tests.support.late_cuda import late_cuda
from tests.support.ranks import ranked_engines
from tests.support.step_cases import CHANGES, QUANTISED, checkpoint_of

# A tokenizer is needed for words; several samples begin with rows that share a prompt's last one.
EXCLUDED = {
    "structured_outputs",
    "bad_words of one token",
    "bad_words of several tokens",
    "stop",
    "best_of",
    "dry_sequence_breakers",
}
CACHES = ("auto", "int8", "fp8")
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "adaptive": False}
# The inputs of layers, nothing left to add, experts, states, and runs of drafts.
STAGED: dict[str, dict[str, Any]] = {
    "gemma4": {},
    "olmo2": {"speculative_config": DRAFTS},
    "qwen3_moe": {},
    "lfm2": {"speculative_config": DRAFTS},
}
DRAFTED = ("qwen3_5", "lfm2", "falcon_h1")  # whose states see a token once it is known
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "attention_backend": "triton",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "num_blocks": 96,
    "max_model_len": 96,
    "max_num_seqs": 3,
    "preemption_mode": "recompute",
    "cudagraph_capture_sizes": [3],
}


class Case(NamedTuple):
    """An engine, and what is asked of it."""

    name: str
    model: str
    options: dict[str, Any]
    requests: list[tuple[list[int], SamplingParams]]
    num_stages: int = 1


def drawn_requests(rng: random.Random, names: list[str]) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts, one beyond a split of 64 keys, and parameters that change these fields."""
    rng.shuffle(names)
    requests = []
    for i in range(4):
        changed = {name: value for change in names[i::4][:2] for name, value in CHANGES[change].items()}
        if changed.get("temperature") == 0.0:
            changed.pop("n", None)  # as they would be equal
        most = max(changed.get("min_tokens", 0), 2 + i)
        given = {"max_tokens": most, "seed": i, "ignore_eos": True, "dry_sequence_breakers": (), **changed}
        length = 62 if i == 1 else rng.randint(1, 12)
        start = rng.randint(5, 20)
        prompt = [start + j % 7 for j in range(length)]  # it repeats itself, so that drafts are found
        requests.append((prompt, SamplingParams(**given)))
    return requests


def fields() -> list[str]:
    """Return the names of the changes of SamplingParams."""
    return sorted(CHANGES.keys() - EXCLUDED)


def drawn_case(seed: int) -> Case:
    """Return an engine with a drawn model, format and parameters."""
    rng = random.Random(seed)
    model = rng.choice([*CONFIGS, *QUANTISED])
    options: dict[str, Any] = {
        "kv_cache_dtype": rng.choice(CACHES),
        "block_size": rng.choice([8, 16, 64]),
        "async_scheduling": rng.choice([None, False]),
    }
    if rng.random() < 0.3 and model not in QUANTISED:
        options["quantization"] = "int8"  # int4 needs rows of 32
    if rng.random() < 0.4:
        options["speculative_config"] = DRAFTS
    return Case(f"seed {seed}", model, options, drawn_requests(rng, fields()))


def all_cases() -> list[Case]:
    """Return every model, every format of weights and every KV cache once, with drawn parameters; and stages
    that send each other all that stages may.
    """
    cases = []
    kinds: list[tuple[str, dict[str, Any]]] = [(model, {}) for model in (*CONFIGS, *QUANTISED)]
    kinds += [("llama", {"kv_cache_dtype": cache}) for cache in CACHES[1:]]
    kinds += [("qwen3", {"quantization": "int8"}), ("qwen3, 3 layers", {"quantization": "int4"})]
    kinds += [(model, {"speculative_config": DRAFTS}) for model in DRAFTED]
    for number, (model, options) in enumerate(kinds):
        name = " ".join([model, *("drafts" if value is DRAFTS else value for value in options.values())])
        cases.append(Case(name, model, options, drawn_requests(random.Random(number), fields())))
    for number, (model, options) in enumerate(STAGED.items()):
        requests = drawn_requests(random.Random(number), fields())
        cases.append(Case(f"{model} in stages", model, options, requests, 2))
    return cases


class Outcome(NamedTuple):
    """What a run has given.

    logprobs: the sums of the samples that have them. num_decodes: steps that sample after each token.
    """

    tokens: list[list[int]]
    logprobs: list[float]
    num_replays: int
    num_decodes: int


def run(case: Case, *, seed: int, enforce_eager: bool) -> Outcome:
    """Run a case on a late device. seed: of the order in which that works."""
    options = {**OPTIONS, **case.options, "enforce_eager": enforce_eager}
    prompts, params = zip(*case.requests, strict=True)
    with late_cuda(seed) as gpu, ExitStack() as ranks:
        if case.num_stages > 1:
            ranks.enter_context(ranked_engines(case.num_stages, inside=gpu.here))
        engine = LLMEngine(checkpoint_of(case.model), **options)
        decodes = watch_decodes(engine)
        outputs = engine.generate(list(prompts), list(params), use_tqdm=False)
        engine.scheduler.check()
    samples = [sample for output in outputs for sample in output.outputs]
    sums = [sample.cumulative_logprob for sample in samples if sample.cumulative_logprob is not None]
    num_replays = gpu.num_replays // case.num_stages
    return Outcome([sample.token_ids for sample in samples], sums, num_replays, len(decodes))


def watch_decodes(engine: LLMEngine) -> list[int]:
    """Return a list that grows with each decode and run of drafts, by how many tokens the step has."""
    decodes: list[int] = []
    launch = engine.runner.launch

    def watched(plan: Any) -> Any:
        computed = plan.computed
        if computed.seats and not computed.asked and len(computed.sampled) == sum(computed.counts):
            decodes.append(len(computed.sampled))
        return launch(plan)

    engine.runner.launch = watched  # type: ignore[method-assign]
    return decodes


def check(case: Case, seed: int = 0) -> int:
    """Assert that graphs give what steps without them do. Return the number of replays."""
    eager = run(case, seed=seed, enforce_eager=True)
    replayed = run(case, seed=seed + 1, enforce_eager=False)
    assert eager.num_replays == 0
    assert replayed.tokens == eager.tokens, "graphs have other tokens"
    # On a CPU products depend on the number of rows, as padding does.
    assert replayed.logprobs == pytest.approx(eager.logprobs, abs=1e-3), "graphs have other logits"
    num_replays, num_decodes = replayed.num_replays, replayed.num_decodes
    assert num_replays == num_decodes > 0, f"{num_replays} replays of {num_decodes} decodes"
    return num_replays


def main() -> None:
    """Run what the command line says."""
    remember_builtins()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, default=0)
    args = parser.parse_args()
    if args.seed is not None:
        cases = [drawn_case(args.seed)]
    elif args.seeds:
        cases = [*map(drawn_case, range(args.seeds))]
    else:
        cases = [each for each in all_cases() if not args.words or any(w in each.name for w in args.words)]
    failed = 0
    for case in cases:
        started = time.perf_counter()
        try:
            what = f"{check(case)} replays"
        except Exception as error:  # of a case, which the others do not end with
            failed += 1
            what = f"FAILED {type(error).__name__}: {str(error)[:400]}"
        print(f"{case.name} ({case.model}): {what}, {time.perf_counter() - started:.1f} s", flush=True)
    if failed:
        sys.exit(f"{failed} of {len(cases)} failed")


if __name__ == "__main__":
    main()
