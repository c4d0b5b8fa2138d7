"""What does sampling cost, compared with the model? 64 requests decoding, a vocabulary of 32,000.

    python -m benchmarks.sampler

Each parameter alone, and all together, in the steps of a running engine: microseconds, and the share of the
step. For comparison, the time of Hugging Face's logits processors and a multinomial on the same logits, and
of FlashInfer's sampling where it is installed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import checkpoint, parse_args, print_json, print_table
from paged import LLMEngine, SamplingParams
from paged.device.transfers import Upload
from paged.requests.request import Request
from paged.sampling.sampler import Draw
from paged.sampling.seats import Sampled

ALL_ON: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "logprobs": 5,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "min_p": {"min_p": 0.02},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "typical_p": {"typical_p": 0.9},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
    "logit_bias": {"temperature": 0.0, "logit_bias": dict.fromkeys(range(20), 1.0)},
    "allowed_token_ids": {"temperature": 0.0, "allowed_token_ids": [*range(1000)]},
    "DRY": {"temperature": 0.0, "dry_multiplier": 0.8},
    "typical_p 0.9, top_p 0.9": {"typical_p": 0.9, "top_p": 0.9},
    "top_k 5000": {"top_k": 5000},
    "all on": ALL_ON,
    "all on, top_n_sigma, typical_p": {**ALL_ON, "top_n_sigma": 1.0, "typical_p": 0.9},
}


def main() -> None:
    """Check the sampler, then time it in the steps of an engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="llama-15m")
    parser.add_argument("--num-running", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--peers-rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="time of this process, for shared machines")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=[*CONFIGURATIONS])
    args = parse_args(parser, model="demo", num_running=4, prompt_len=8, steps=2, peers_rounds=1)
    engine = LLMEngine(
        checkpoint(args.model),
        dtype="float32",
        max_num_seqs=args.num_running,
        # All prompts in one step: the others need rows of equal length.
        max_num_batched_tokens=args.num_running * (args.prompt_len + 1),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    clock = time.process_time if args.cpu_time else time.perf_counter
    flashinfer = find_flashinfer()
    rows: list[dict[str, Any]] = []
    for name in args.only:
        params = {"ignore_eos": True, "max_tokens": args.steps + 8, "dry_sequence_breakers": ()}
        timed = TimedSampler(engine, clock)
        others = run_steps(engine, SamplingParams(**{**params, **CONFIGURATIONS[name]}), args, timed)
        shares = [spent / (spent + other) for spent, other in zip(timed.times, others, strict=True)]
        check(timed, CONFIGURATIONS[name])
        peers = {"transformers us": hf_sampling(timed, CONFIGURATIONS[name])}
        if flashinfer is not None and torch.cuda.is_available():
            peers["FlashInfer us"] = flashinfer_sampling(flashinfer, timed)
        row = {
            "parameters": name,
            "us": statistics.median(timed.times) * 1e6,
            "of the step": statistics.median(shares),
        }
        rows.append(row | {n: 1e6 * median_of(clock, args.peers_rounds, run) for n, run in peers.items()})
    print_table(rows)
    if flashinfer is None:
        print("FlashInfer is not installed: skipped")
    print_json({"benchmark": "sampler", "rows": rows, "torch_threads": torch.get_num_threads(), **vars(args)})


class TimedSampler:
    """The engine's sampler with a clock; keeps the last logits, requests and result."""

    def __init__(self, engine: LLMEngine, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.times: list[float] = []
        self.logits = torch.empty(0)
        self.requests: list[Request] = []
        self.token_ids: list[list[int]] = []
        self.step: Any = None
        self.keep = False
        self._scheduler = engine.scheduler
        self._prepare = type(engine.runner.sampler).prepare.__get__(engine.runner.sampler)
        engine.runner.sampler.prepare = self.prepare  # type: ignore[assignment,method-assign]

    def prepare(
        self, sampled: Sequence[Sampled], positions: Any, upload: Upload, seats: Sequence[int] = ()
    ) -> TimedSampler:
        """Time what comes before the model runs. The sampler then stands in for the step's `Draw`."""
        if self.keep:
            self.requests = self._scheduler.running.copy()
            self.token_ids = [request.token_ids.copy() for request in self.requests]
        started = self.clock()
        self._draw: Draw = self._prepare(sampled, positions, upload, seats)
        self.times.append(self.clock() - started)
        return self

    def start_masks(self) -> Any:
        """Have masks made beside the model, as the draw does."""
        return self._draw.start_masks()

    def run(self, logits: Tensor, *others: Any) -> Tensor | None:
        """Time the draw."""
        if self.keep:
            self.logits = logits.clone()
        started = self.clock()
        tokens = self._draw.run(logits, *others)
        self.times[-1] += self.clock() - started
        return tokens

    def result(self) -> Any:
        """Time what comes after the download."""
        started = self.clock()
        self.step = self._draw.result()
        self.times[-1] += self.clock() - started
        return self.step


def run_steps(
    engine: LLMEngine, params: SamplingParams, args: argparse.Namespace, timed: TimedSampler
) -> list[float]:
    """Decode with all requests running. Return the seconds of each step without sampling."""
    for i in range(args.num_running):
        prompt = [(7 * i + 13 * j) % 30_000 for j in range(args.prompt_len)]
        engine.add_request(str(i), prompt, params)
    for _ in range(3):
        engine.core.step()
    timed.times.clear()
    others = []
    for step in range(args.steps):
        timed.keep = step == args.steps - 1
        started = timed.clock()
        engine.core.step()
        others.append(timed.clock() - started - timed.times[-1])
    for i in range(args.num_running):
        engine.abort_request(str(i))
    return others


def check(timed: TimedSampler, chosen: dict[str, Any]) -> None:
    """Check that Hugging Face's processors allow every token, and log-probabilities against log_softmax."""
    assert not timed.step.errors
    scores = hf_scores(timed, chosen)
    tokens = torch.tensor(timed.step.tokens)[:, None]
    # A token at the threshold of a filter may round either way in float32.
    slack = 1e-4 * scores.amax(-1, keepdim=True).abs()
    kept_least = scores.where(scores > -torch.inf, torch.inf).amin(-1, keepdim=True)
    own = hf_scores(timed, {k: v for k, v in chosen.items() if k not in FILTERS}).gather(1, tokens)
    if "top_n_sigma" not in chosen and "typical_p" not in chosen and "dry_multiplier" not in chosen:
        assert (own >= kept_least - slack).all(), f"a token that {chosen} exclude"
    if chosen.get("temperature") == 0.0 and "dry_multiplier" not in chosen:
        assert (own >= scores.amax(-1, keepdim=True) - slack).all()
    expected = timed.logits.log_softmax(-1)
    for row, report in timed.step.logprobs.items():
        torch.testing.assert_close(torch.tensor(report.logprobs), expected[row, report.token_ids])


FILTERS = ("min_p", "typical_p", "top_k", "top_p", "top_n_sigma")


def hf_processors(chosen: dict[str, Any]) -> list[Any]:
    """Make Hugging Face's processors of the same meaning, in our order. They lack top_n_sigma and DRY."""
    import transformers as hf

    made: list[Any] = []
    if "allowed_token_ids" in chosen:
        allowed = torch.tensor(chosen["allowed_token_ids"])
        made.append(
            lambda _, scores: torch.full_like(scores, -torch.inf).index_copy_(1, allowed, scores[:, allowed])
        )
    if "logit_bias" in chosen:
        made.append(hf.SequenceBiasLogitsProcessor([[[i], bias] for i, bias in chosen["logit_bias"].items()]))
    if "repetition_penalty" in chosen:
        made.append(hf.RepetitionPenaltyLogitsProcessor(chosen["repetition_penalty"]))
    made.append(CountPenalties(chosen.get("frequency_penalty", 0.0), chosen.get("presence_penalty", 0.0)))
    if chosen.get("temperature", 1.0) > 0:
        made.append(hf.TemperatureLogitsWarper(float(chosen.get("temperature", 1.0))))
    for name, warper in (
        ("min_p", hf.MinPLogitsWarper),
        ("typical_p", hf.TypicalLogitsWarper),
        ("top_k", hf.TopKLogitsWarper),
        ("top_p", hf.TopPLogitsWarper),
    ):
        if name in chosen:
            made.append(warper(chosen[name]))
    return made


class CountPenalties:
    """Frequency and presence penalties, which transformers lacks, in the style of its processors."""

    def __init__(self, frequency: float, presence: float) -> None:
        self.frequency, self.presence = frequency, presence
        self.num_prompt_tokens = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.frequency and not self.presence:
            return scores
        output = input_ids[:, self.num_prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, output, torch.ones_like(output, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


def hf_scores(timed: TimedSampler, chosen: dict[str, Any]) -> Tensor:
    """Apply the processors to the last logits."""
    input_ids, scores = torch.tensor(timed.token_ids), timed.logits
    for processor in hf_processors(chosen):
        if isinstance(processor, CountPenalties):
            processor.num_prompt_tokens = timed.requests[0].num_prompt_tokens
        scores = processor(input_ids, scores)
    return scores


def hf_sampling(timed: TimedSampler, chosen: dict[str, Any]) -> Callable[[], Any]:
    """Return a call that does one step of transformers' sampling."""

    def run() -> Any:
        scores = hf_scores(timed, chosen)
        if chosen.get("temperature", 1.0) > 0:
            tokens = torch.multinomial(scores.softmax(-1), num_samples=1)
        else:
            tokens = scores.argmax(-1)
        if "logprobs" in chosen:
            timed.logits.log_softmax(-1).topk(chosen["logprobs"])
        return tokens

    return run


def find_flashinfer() -> Any:
    """Return FlashInfer's sampling module, or None."""
    try:
        import flashinfer.sampling
    except ImportError:
        return None
    return flashinfer.sampling


def flashinfer_sampling(sampling: Any, timed: TimedSampler) -> Callable[[], Any]:
    """Return a call of its kernel for top_k and top_p, on probabilities computed in the same call."""
    logits = timed.logits.cuda()

    def run() -> Any:
        tokens = sampling.top_k_top_p_sampling_from_probs(logits.softmax(-1), 50, 0.9)
        torch.cuda.synchronize()
        return tokens

    return run


def median_of(clock: Callable[[], float], rounds: int, run: Callable[[], Any]) -> float:
    """Return the median seconds of a call, after one call to warm up."""
    run()
    times = []
    for _ in range(rounds):
        started = clock()
        run()
        times.append(clock() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()
