"""Uses of an engine whose results are compared between devices: tokens exactly, numbers nearly."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from paged import BeamSearchParams, LLMEngine, SamplingParams, StructuredOutputsParams
from paged.kernels import reference
from paged.kernels.plain import backend as torch_backend
from tests.support.checkpoints import checkpoint

PROMPTS = [[*range(20, 39), i] for i in range(3)]  # one block of 16 in common
Tokens = list[list[int]]


class Result(NamedTuple):
    """What a use has returned. numbers: log-probabilities, hidden states and the like."""

    tokens: Tokens
    numbers: list[float] = []  # noqa: RUF012  (never changed)

    def assert_like(self, other: Result, tolerance: float = 1e-3) -> None:
        """Assert that tokens are equal, and numbers differ by no more than rounding."""
        assert self.tokens == other.tokens
        torch.testing.assert_close(
            torch.tensor(self.numbers), torch.tensor(other.numbers), atol=tolerance, rtol=0
        )


Use = Callable[[LLMEngine], Result]


def draws_of_a_gpu() -> Any:
    """Return a context in which plain torch draws as GPUs do, whose random numbers are not those of CPUs."""
    return mock.patch.object(torch_backend, "sample_tokens", reference.sample_tokens)


def with_steps_ahead(engine: LLMEngine, depth: int) -> LLMEngine:
    """Have an engine on a CPU that records no steps keep so many of the same requests in flight."""
    assert engine.runner.graphs is None, "a recorded step overwrites the results of the one before"
    engine.runner.num_in_flight = depth
    engine.runner.planner.with_pending = True
    engine.scheduler.run_ahead()
    return engine


def greedy(max_tokens: int = 4, **params: Any) -> SamplingParams:
    """Return parameters of a greedy request that generates so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)


def generated(engine: LLMEngine, prompts: Sequence[list[int]], params: Any) -> Tokens:
    """Return the tokens of all samples of all prompts."""
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [sample.token_ids for output in outputs for sample in output.outputs]


def run_to_end(engine: LLMEngine) -> dict[str, list[int]]:
    """Return the tokens of the first sample of each unfinished request."""
    tokens = {}
    while engine.has_unfinished_requests():
        tokens |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    return tokens


def _penultimate(_tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Ban the likeliest token."""
    return logits.index_fill(0, logits.argmax(), -torch.inf)


WAYS_TO_SAMPLE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1, "logprobs": 2, "prompt_logprobs": 1},
    {"seed": 2, "top_p": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"seed": 3, "logit_bias": {7: 3.0}, "min_tokens": 3, "stop_token_ids": [9]},
    {"temperature": 0.0, "logits_processors": [_penultimate]},
    {"temperature": 0.0, "dry_multiplier": 4.0, "dry_sequence_breakers": ()},
]


def sampled(engine: LLMEngine) -> Result:
    """Sample in every way at once, with a shared prefix and a copy of a prompt's block for two samples."""
    params = [SamplingParams(max_tokens=3, ignore_eos=True, **way) for way in WAYS_TO_SAMPLE]
    params.append(SamplingParams(max_tokens=3, ignore_eos=True, n=2, seed=5))
    return Result(generated(engine, [[*range(10, 29), i] for i in range(len(params))], params))


def swapped(engine: LLMEngine) -> Result:
    """Run more requests than fit in the cache; some of them are swapped out and in again."""
    tokens = generated(engine, [[i] * 14 for i in range(3)], greedy(6))
    assert engine.stats().num_swap_preemptions, "no request was swapped out"
    return Result(tokens)


def fork(engine: LLMEngine) -> Result:
    """Fork a request that has generated a token; the child goes on in a way of its own."""
    engine.add_request("parent", PROMPTS[0], greedy())
    engine.step()
    engine.fork("parent", "child", greedy(logit_bias={7: 50.0}))
    engine.fork("parent", "twin")
    tokens = run_to_end(engine)
    assert tokens["twin"] == tokens["parent"]
    assert tokens["child"][1:] == [7, 7, 7]
    return Result([tokens[name] for name in ("parent", "child")])


def beams(engine: LLMEngine) -> Result:
    """Search with two beams."""
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    (output,) = engine.beam_search(PROMPTS[:1], params, use_tqdm=False)
    return Result([s.tokens for s in output.sequences], [s.cum_logprob for s in output.sequences])


def encode(engine: LLMEngine) -> Result:
    """Embed prompts, by the last token and by the mean of all."""
    last = engine.encode(PROMPTS[:2], use_tqdm=False)
    mean = engine.encode(PROMPTS[:1], pooling="mean", normalize=False, use_tqdm=False)
    return Result([], [number for output in [*last, *mean] for number in output.outputs.embedding])


def score(engine: LLMEngine) -> Result:
    """Score two continuations of a prompt."""
    outputs = engine.score(PROMPTS[0], [[3, 4, 5], [6]], use_tqdm=False)
    return Result([], [logprob for output in outputs for logprob in output.token_logprobs])


def logprobs(engine: LLMEngine) -> Result:
    """Ask for log-probabilities of prompts and of what is generated."""
    outputs = engine.generate(PROMPTS[:2], greedy(logprobs=2, prompt_logprobs=1), use_tqdm=False)
    rows = [row for o in outputs for row in [*o.prompt_logprobs[1:], *o.outputs[0].logprobs]]
    return Result([[*row] for row in rows], [entry.logprob for row in rows for entry in row.values()])


def saved_prefix(engine: LLMEngine) -> Result:
    """Save a cached prefix, forget it, load it, and generate from it."""
    first = generated(engine, PROMPTS[:1], greedy())
    with tempfile.TemporaryDirectory() as folder:
        assert engine.save_prefix(file := Path(folder) / "prefix.safetensors")
        engine.reset_prefix_cache()
        assert engine.load_prefix(file)
    (output,) = engine.generate(PROMPTS[:1], greedy(), use_tqdm=False)
    assert output.num_cached_tokens >= 16
    assert [output.outputs[0].token_ids] == first
    return Result(first)


def structured(engine: LLMEngine) -> Result:
    """Follow a grammar beside a request without one. Needs a tokenizer."""
    grammar = StructuredOutputsParams(regex="[0-9]+,[a-z]+")
    params = [greedy(structured_outputs=grammar), greedy()]
    return Result(generated(engine, [[9, 8, 7], [5, 6]], params))


def all_of(*uses: Use) -> Use:
    """Return a use that is these, one after another."""

    def use(engine: LLMEngine) -> Result:
        results = [one(engine) for one in uses]
        return Result([t for r in results for t in r.tokens], [n for r in results for n in r.numbers])

    return use


class Case(NamedTuple):
    """A use, and the engine for it. model: "demo" has a tokenizer, others are of `checkpoints.CONFIGS`."""

    model: str
    options: dict[str, Any]
    use: Use

    def engine(self, **options: Any) -> LLMEngine:
        """Make an engine of float32, by default on a CPU and with torch's attention."""
        defaults = {"dtype": "float32", "device": "cpu", "attention_backend": "torch"}
        sizes = {"num_blocks": 64, "max_model_len": 40, "preemption_mode": "recompute"}
        model, no_tokenizer = self.model, self.model != "demo"
        if options.get("device") == "cuda":  # graphs take as long to capture as so many steps do
            sizes["cudagraph_capture_sizes"] = [4]
        return LLMEngine(
            str(checkpoint(model)) if no_tokenizer else model,
            **{**defaults, **sizes, "skip_tokenizer_init": no_tokenizer, **self.options, **options},
        )


_SWAPPING = {"block_size": 8, "num_blocks": 7, "preemption_mode": "swap", "swap_space": 0.01}
CASES = {
    "sampling": Case("qwen3", {}, sampled),
    "swapping in int8": Case("llama", {**_SWAPPING, "kv_cache_dtype": "int8"}, swapped),
    "swapping with windows": Case("qwen2-mixed", {**_SWAPPING, "num_blocks": 14}, swapped),
    "forks and beams": Case("qwen3", {}, all_of(fork, beams)),
    "reports on prompts": Case("qwen3", {}, all_of(encode, score, logprobs)),
    "a saved prefix": Case("qwen3", {}, saved_prefix),
    "a grammar": Case("demo", {}, structured),
}
