"""Prefix hits of models with states give the bits of prompts computed alone, in drawn cases.

    python -m tests.snapshots                     # 200 cases; CI runs a few
    python -m tests.snapshots --cases 2000 --first 500

A case is a seed. It draws a model, sizes of chunks and blocks, numbers of snapshots, how requests are
preempted, who guesses tokens, if anyone, and prompts that share beginnings with each other and with earlier
answers. They run in rounds: some together, some as several samples, some forked, some moved to another engine
by a saved prefix in the middle of their answers. Every state that was not written is NaN. Tokens and
log-probabilities of each are compared with those of an engine without a prefix cache and without drafts,
which computes it alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from paged import LLMEngine, SamplingParams
from paged.drafting.drafter import Draft
from paged.requests.request import CompletionOutput, Request, RequestOutput
from paged.scheduler.drafts import Drafts
from tests.support.checkpoints import HYBRIDS, VOCAB_SIZE, assert_all_free, checkpoint, new_engine

NUM_CASES = 200
# Which token may end an answer, so that each block of it may be the last one.
STOPS: dict[str, Any] = {"ignore_eos": True, "stop_token_ids": [7]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, **STOPS)
MOST_DRAFTS = 4
Bits = tuple[list[int], list[dict[int, float]]]


def bits(output: CompletionOutput) -> Bits:
    """Return what of a completion is equal only if its logits are."""
    assert output.logprobs is not None
    return [*output.token_ids], [{t: p.logprob for t, p in each.items()} for each in output.logprobs]


@cache
def without_cache(name: str) -> LLMEngine:
    """Return an engine that computes every prompt anew."""
    return new_engine(checkpoint(name), enable_prefix_caching=False, max_num_batched_tokens=64)


@cache
def alone(name: str, prompt: tuple[int, ...]) -> Bits:
    """Return the bits of a prompt's answer, computed alone."""
    (result,) = without_cache(name).generate([[*prompt]], GREEDY, use_tqdm=False)
    return bits(result.outputs[0])


class Guesses:
    """A drafter that knows the answers of prompts alone: any number of its first guesses are right."""

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._rng = random.Random(f"guesses {seed}")

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        return [Draft(self._guess(request, limit)) for request, limit in zip(requests, limits, strict=True)]

    def _guess(self, request: Request, limit: int) -> list[int]:
        number = min(limit, self._rng.randint(0, MOST_DRAFTS))
        answer = alone(self._name, tuple(request.inputs.prompt_token_ids))[0] if number else []
        tokens = answer[request.num_output_tokens :][:number]
        num_right = self._rng.randint(0, number)
        return [token if i < num_right else (token + 1 + i) % VOCAB_SIZE for i, token in enumerate(tokens)]


class Case:
    """An engine, and the prompts that it gets; everything depends on the seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.folder = folder
        self.name = HYBRIDS[seed % len(HYBRIDS)] if seed >= 2 else ("qwen3_5", "lfm2")[seed]
        self.block_size = rng.choice((8, 8, 16, 32))
        self.counts = Counter[str]()
        self.options: dict[str, Any] = {
            "block_size": self.block_size,
            "num_blocks": rng.choice((9, 9, 14, 512)) * 16 // self.block_size,
            "max_num_batched_tokens": rng.choice((16, 23, 40, 64, 512)),
            "max_num_seqs": rng.choice((2, 5, 16)),
            "state_snapshots": rng.choice((None, 1, 3, 40)),
            "state_interval": rng.choice((None, None, 8, 40)),
            **rng.choice(
                ({}, {"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_space": 0.02})
            ),
        }
        self.guesser = random.Random(f"drafts {seed}").choice(("none", "known", "known", "ngram", "llama"))
        if self.guesser != "none":
            method = {"model": str(checkpoint("llama"))} if self.guesser == "llama" else {"method": "ngram"}
            fixed = {"num_speculative_tokens": MOST_DRAFTS, "adaptive": False}
            self.options["speculative_config"] = method | fixed
        self.engine = self.new_engine()
        self.trunks = [self.tokens(rng.randint(20, 60)) for _ in range(3)]

    def new_engine(self) -> LLMEngine:
        """Make an engine whose states are NaN, as are the inputs of runs."""
        engine = new_engine(checkpoint(self.name), **self.options)
        if self.guesser == "known":
            engine.scheduler.drafts = Drafts(Guesses(self.name, self.seed), MOST_DRAFTS, VOCAB_SIZE, 64)
        return engine

    def tokens(self, n: int) -> list[int]:
        """Draw tokens."""
        return [self.rng.randrange(1, 90) for _ in range(n)]

    def prompt(self) -> list[int]:
        """Draw a prompt that begins like others; later ones may continue its answer."""
        trunk = self.rng.choice(self.trunks)
        prompt = trunk[: self.rng.randint(1, len(trunk))] if self.rng.random() < 0.4 else trunk
        prompt = (prompt + self.tokens(self.rng.choice((0, 1, 7, 20))))[-100:] or self.tokens(1)
        if self.rng.random() < 0.5:
            answer = alone(self.name, tuple(prompt))[0] if self.rng.random() < 0.6 else self.tokens(5)
            self.trunks[self.rng.randrange(3)] = (prompt + answer)[:110]
        return prompt

    def run(self, num_rounds: int = 5) -> Counter[str]:
        """Run rounds of prompts. Return how often what happened."""
        for _ in range(num_rounds):
            self.rng.choice((self.together, self.together, self.samples, self.fork, self.move))()
            assert_all_free(self.engine)
            if self.rng.random() < 0.1:
                self.engine.reset_prefix_cache()
        self.count()
        return self.counts

    def count(self) -> None:
        """Count what the engine has done."""
        stats = self.engine.stats()
        self.counts["swapped"] += stats.num_swap_preemptions
        self.counts["recomputed"] += stats.num_recompute_preemptions
        self.counts["cut"] += stats.num_cut_tokens > 0
        self.counts["accepted"] += stats.num_accepted_tokens
        self.counts["wrong"] += stats.num_draft_tokens - stats.num_accepted_tokens

    def check(self, result: RequestOutput, prompt: list[int]) -> None:
        """Compare an answer with that of the prompt alone."""
        self.counts["answers"] += 1
        self.counts["hits"] += bool(result.num_cached_tokens)
        found = bits(result.outputs[0])
        assert found == alone(self.name, tuple(prompt)), (
            f"{len(prompt)} tokens, {result.num_cached_tokens} cached"
        )

    def together(self) -> None:
        """Answer several prompts at once, or one after the other."""
        prompts = [self.prompt() for _ in range(self.rng.randint(1, 6))]
        groups = [prompts] if self.rng.random() < 0.6 else [[prompt] for prompt in prompts]
        for group in groups:
            for result, prompt in zip(
                self.engine.generate(group, GREEDY, use_tqdm=False), group, strict=True
            ):
                self.check(result, prompt)

    def samples(self) -> None:
        """Draw two samples of a prompt; each is what the prompt with it gives."""
        prompt = self.prompt()
        params = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=6, logprobs=0, ignore_eos=True)
        (result,) = self.engine.generate([prompt], params, use_tqdm=False)
        (expected,) = without_cache(self.name).generate([prompt], params, use_tqdm=False)
        assert [*map(bits, result.outputs)] == [*map(bits, expected.outputs)]

    def fork(self) -> None:
        """Fork a request in its answer: both go on alike, the parent's end aside."""
        prompt = self.prompt()
        self.engine.add_request("parent", prompt, GREEDY)
        for _ in range(self.rng.randint(1, 8)):
            self.engine.step()
        if not self.engine.unfinished():
            self.engine.step()
            return
        child = self.engine.fork("parent")
        if self.rng.random() < 0.5:
            self.engine.abort_request("parent")
        for output in self.finished():
            found = output.outputs[0].token_ids
            assert [*found] == alone(self.name, tuple(prompt))[0], output.request_id
            self.counts["forks"] += output.request_id == child

    def move(self) -> None:
        """Move a request to another engine in its answer, with its blocks and states in a file."""
        prompt = self.prompt()
        self.engine.add_request("moved", prompt, GREEDY)
        for _ in range(self.rng.randint(1, 24)):
            self.engine.step()
        (so_far,) = self.engine.unfinished() or [None]
        self.engine.abort_request("moved")
        while self.engine.has_unfinished_requests():
            self.engine.step()
        if so_far is None or not self.engine.stats().num_cached_blocks:
            return
        path = self.folder / "saved"
        self.engine.save_prefix(path)
        self.count()
        self.engine = self.new_engine()
        self.engine.load_prefix(path)
        tokens = [*so_far.outputs[0].token_ids]
        params = SamplingParams(temperature=0.0, max_tokens=20, **STOPS)
        self.engine.add_request("moved", prompt, params, generated_token_ids=tokens)
        (output,) = self.finished()
        assert [*output.outputs[0].token_ids] == alone(self.name, tuple(prompt))[0]
        self.counts["moved"] += 1
        self.counts["moved with hits"] += bool(output.num_cached_tokens)

    def finished(self) -> list[RequestOutput]:
        """Run steps until nothing is left. Return the finished outputs."""
        found = list[RequestOutput]()
        while self.engine.has_unfinished_requests():
            found += [output for output in self.engine.step() if output.finished]
        return found


def run_case(seed: int, num_rounds: int = 5) -> Counter[str]:
    """Run one case; an error names its seed. Return how often what happened."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return Case(seed, Path(folder)).run(num_rounds)
        except Exception as error:
            raise AssertionError(f"case {seed} (tests.snapshots.run_case({seed})): {error!r}") from error


def main() -> None:
    """Run many cases."""
    parser = argparse.ArgumentParser("python -m tests.snapshots", description=__doc__)
    parser.formatter_class = argparse.RawTextHelpFormatter
    parser.add_argument("--cases", type=int, default=NUM_CASES)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    started = time.perf_counter()
    total = Counter[str]()
    for seed in range(args.first, args.first + args.cases):
        total += run_case(seed)
        if sys.stderr.isatty():
            print(f"\r{seed}: {time.perf_counter() - started:,.0f} s\r", end="", file=sys.stderr)
    print(f"{args.cases} cases, the same bits in all; {dict(total)}, {time.perf_counter() - started:,.0f} s")


if __name__ == "__main__":
    main()
