"""Random conversations with images: answers have the same bits, whatever an engine keeps and interrupts.

    python -m tests.conversations                  # 2,000 conversations
    python -m tests.conversations --worlds 100     # 100 engines
    python -m tests.conversations --seed 12        # one engine again, the one that failed

A seed fixes a model, an engine's options, and what its users do: they ask about few images with few words, so
that nearly everything has been seen before, go on after answers, fork requests and abort them wherever they
are. Some images differ in one pixel, or have the same pixels in another file. Some requests have an adapter,
several samples, a grammar or drafts. Requests are preempted by chance, the tower has little room in a step,
and embeddings are soon forgotten. Each answer must have the tokens and log-probabilities of the same prompt
alone, in an engine that keeps nothing. At the end, nothing is held.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from paged import LLMEngine, LoRARequest, RequestError, RequestOutput, SamplingParams
from paged.scheduler.scheduler import Scheduler
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine
from tests.support.engine_uses import with_steps_ahead
from tests.support.images import FAMILIES, picture, png, seeing

NUM_CONVERSATIONS = 2000
IN_A_WORLD = 20
MODELS = ("gemma3", "gemma4", "gemma4_large", "gemma4_unified", "mistral3", "qwen3_vl", "qwen3_vl_moe")
SEEN_TOGETHER = {"gemma3": 9, "gemma4_large": 70, "gemma4_unified": 70}  # tokens of an image, at most
NUM_ADAPTERS = 2
WITH_ADAPTERS = {"enable_lora": True, "max_lora_rank": 2}


def _near(seed: int) -> Image.Image:
    """Return a picture that differs from that of the seed in one pixel."""
    image = picture(seed)
    image.putpixel((0, 0), (255, 255, 255))
    return image


@functools.cache
def images() -> list[Any]:
    """Return the images of all users: of one size but for two, and the first one in three forms."""
    first = picture(1)
    return [
        first,
        png(first),
        png(first, compress_level=0),
        _near(1),
        picture(2),
        picture(3, 90, 7),
        picture(4, 8, 8),
    ]


class Question(NamedTuple):
    """A prompt: words, and images by their numbers. kind: of PARAMS. adapter: 0 for none."""

    parts: tuple[int | tuple[str, int], ...]
    kind: str
    adapter: int = 0

    def prompt(self, name: str) -> dict[str, Any]:
        """Return it for an engine."""
        ids = list[int]()
        seen = list[Any]()
        for part in self.parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += FAMILIES[name].ids
                seen.append(images()[part[1]])
        return {"prompt_token_ids": ids, **({"multi_modal_data": {"image": seen}} if seen else {})}


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 1},
    "several": {"n": 2, "seed": 5, "logprobs": 1},
    "drawn": {"seed": 7, "top_k": 20, "repetition_penalty": 1.2},
    "allowed": {"temperature": 0.0, "allowed_token_ids": [*range(5, 30)], "logprobs": 0},
}


def params_of(kind: str) -> SamplingParams:
    """Return the parameters of a kind of question."""
    return SamplingParams(max_tokens=4, ignore_eos=True, **PARAMS[kind])


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="paged-conversations-")


@functools.cache
def adapter_of(name: str, number: int) -> LoRARequest:
    """Write an adapter of a model's queries and values with strong random weights."""
    generator = torch.Generator().manual_seed(number)
    tensors = dict[str, torch.Tensor]()
    with safe_open(seeing(name) / "model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118
            if key.endswith("self_attn.q_proj.weight") and "vision" not in key:
                out, size = file.get_slice(key).get_shape()
                prefix = f"base_model.model.{key.removesuffix('.weight')}"
                for part, shape in (("lora_A", (2, size)), ("lora_B", (out, 2))):
                    tensors[f"{prefix}.{part}.weight"] = torch.randn(shape, generator=generator) * 0.3
    path = Path(_folder().name) / f"{name}-{number}"
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(f"adapter {number}", number, str(path))


Answer = list[tuple[list[int], Any]]


def answer_of(output: RequestOutput) -> Answer:
    """Return the tokens of all samples, with log-probabilities."""
    return [
        (
            [*sample.token_ids],
            sample.logprobs and [{t: v.logprob for t, v in place.items()} for place in sample.logprobs],
        )
        for sample in output.outputs
    ]


@functools.cache
def _alone(name: str) -> LLMEngine:
    return new_engine(seeing(name), enable_prefix_caching=False, mm_processor_cache_gb=0, **WITH_ADAPTERS)


@functools.cache
def expected(name: str, question: Question) -> Answer:
    """Return the answer of an engine that keeps nothing, to this question alone."""
    adapter = adapter_of(name, question.adapter) if question.adapter else None
    (output,) = _alone(name).generate(
        [question.prompt(name)], params_of(question.kind), lora_request=adapter, use_tqdm=False
    )
    return answer_of(output)


@dataclass
class Report:
    """What came of worlds so far: findings by seed, and how often something happened."""

    findings: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


class World:
    """An engine and its users, all of a seed."""

    def __init__(self, seed: int, report: Report) -> None:
        self.rng = rng = random.Random(seed)
        self.report = report
        self.name = rng.choice(MODELS)
        self.has_adapters = rng.random() < 0.4
        depth = rng.choice((1, 1, 2, 3))  # steps in flight
        self.engine = new_engine(seeing(self.name), enforce_eager=depth > 1, **self._options())
        self._set_tower()
        if depth > 1:
            with_steps_ahead(self.engine, depth)
        self.asked = list[tuple[int | tuple[str, int], ...]]()
        self.live = dict[str, Question]()
        self.num_asked = 0

    def _options(self) -> dict[str, Any]:
        rng = self.rng
        least = SEEN_TOGETHER.get(self.name, 1)
        options: dict[str, Any] = {
            "block_size": rng.choice((8, 16)),
            "num_blocks": rng.choice((40, 60, 200)),
            "max_num_batched_tokens": rng.choice((least, least + 1, least + 20, 512)),
            "max_num_seqs": rng.choice((1, 3, 8)),
            "mm_processor_cache_gb": rng.choice((0, 2e-5, 4)),
            "scheduling_policy": rng.choice(("fcfs", "priority")),
        }
        options["max_num_seqs"] = max(2, options["max_num_seqs"])  # a question has two samples
        if rng.random() < 0.3:
            options |= {"swap_space": 0.01, "preemption_mode": "swap"}
        if self.has_adapters:
            options |= {**WITH_ADAPTERS, "max_loras": rng.choice((1, 2))}
        self.drafter = rng.choice((None, None, "ngram", "suffix", "model"))
        if self.drafter is not None:
            model = self.drafter if self.drafter != "model" else str(checkpoint("llama"))
            options["speculative_config"] = (
                {"model": model, "num_speculative_tokens": 3}
                if self.drafter == "model"
                else {"method": model, "num_speculative_tokens": 3}
            )
        return options

    def _set_tower(self) -> None:
        """Let a layer of the tower cost as much as a step, or a part of one, or what it does."""
        towers = self.engine.scheduler.towers
        linear = self.rng.choice((None, 1e9, 0.2))
        if linear is not None:
            towers.costs = towers.costs._replace(linear=linear)

    def run(self, num_conversations: int) -> None:
        """Ask, disturb and step until so many questions are answered, and then the rest."""
        while self.num_asked < num_conversations or self.engine.has_unfinished_requests():
            if self.num_asked < num_conversations and self.rng.random() < 0.5 and len(self.live) < 6:
                self.ask()
            if self.rng.random() < 0.1:
                self.disturb()
            for output in self.engine.step():
                if output.finished:
                    self.check(output)
        assert not self.live, "a question has no answer"
        assert_all_free(self.engine)
        counters = self.engine.scheduler.counters
        self.report.counts["cached tokens"] += counters.num_cached_tokens
        self.report.counts["recomputed tokens"] += counters.num_recomputed
        self.report.counts["swapped"] += counters.num_swapped
        self.report.counts["images computed"] += self.engine.runner.images.num_computed
        self.report.counts["parts of images"] += self.engine.runner.images.num_parts
        self.report.counts[f"worlds of {self.name}"] += 1

    def ask(self) -> None:
        """Ask about few words and images, or go on after an earlier question."""
        rng = self.rng
        begin = rng.choice(self.asked) if self.asked and rng.random() < 0.6 else ()
        if begin and rng.random() < 0.3:
            begin = begin[: rng.randint(1, len(begin))]
        parts = [*begin]
        for _ in range(rng.randint(0, 3)):
            if rng.random() < 0.4 and sum(isinstance(part, tuple) for part in parts) < 4:
                parts.append(("image", rng.randrange(len(images()))))
            else:
                parts += [rng.choice((6, 7))] * rng.choice((1, 3, 9))
        parts.append(8)
        self.asked.append(tuple(parts[:60]))
        question = Question(
            self.asked[-1],
            rng.choice([*PARAMS]),
            rng.randint(0, NUM_ADAPTERS) if self.has_adapters else 0,
        )
        self.num_asked += 1
        name = str(self.num_asked)
        priority = rng.randint(0, 2) if self.engine.config.scheduling_policy == "priority" else None
        adapter = adapter_of(self.name, question.adapter) if question.adapter else None
        params = params_of(question.kind)
        try:
            self.engine.add_request(
                name, question.prompt(self.name), params, priority=priority, lora_request=adapter
            )
        except RequestError as error:
            if "can never fit the KV cache" not in str(error):
                raise
            return
        self.live[name] = question
        self.report.counts["questions"] += 1

    def disturb(self) -> None:
        """Abort a question, fork one, or forget all prefixes."""
        if not self.live:
            return
        name = self.rng.choice([*self.live])
        chance = self.rng.random()
        if chance < 0.6:
            self.engine.abort_request(name)
            del self.live[name]
            self.report.counts["aborts"] += 1
        elif chance < 0.9 and PARAMS[self.live[name].kind].get("n", 1) == 1:
            other = f"{name} again"
            if other in self.live or name not in self.engine.core.groups:
                return
            self.engine.fork(name, other, params_of(self.live[name].kind))
            self.live[other] = self.live[name]
            self.report.counts["forks"] += 1

    def check(self, output: RequestOutput) -> None:
        """Compare an answer with that of the question alone."""
        question = self.live.pop(output.request_id)
        found = answer_of(output)
        if found != expected(self.name, question):
            raise AssertionError(
                f"{output.request_id} {question}: {found}, not {expected(self.name, question)}"
            )


@contextmanager
def preempting(rng: random.Random) -> Iterator[None]:
    """Preempt a running request now and then, wherever it is."""
    make_room = Scheduler._make_room_for_others

    def with_victims(scheduler: Scheduler, schedule: Any) -> None:
        make_room(scheduler, schedule)
        victims = [request for request in scheduler.running if request.is_settled]
        if victims and rng.random() < 0.05:
            scheduler.preemption.preempt(rng.choice(victims), schedule, counts=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_make_room_for_others", with_victims)
        yield


def run_worlds(seeds: Sequence[int], num_conversations: int = IN_A_WORLD) -> Report:
    """Run worlds."""
    report = Report()
    for seed in seeds:
        try:
            world = World(seed, report)
            with preempting(random.Random(seed)):
                world.run(num_conversations)
        except Exception as error:  # of any kind is a finding
            report.findings[seed] = f"{type(error).__name__}: {error}"
    return report


def main() -> None:
    """Run many worlds, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--worlds", type=int, default=NUM_CONVERSATIONS // IN_A_WORLD)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this world only")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.worlds)
    if args.seed is not None:
        seeds = range(args.seed, args.seed + 1)
    report = run_worlds(seeds)
    for seed, finding in report.findings.items():
        print(f"--seed {seed}: {finding}")
    for name, count in sorted(report.counts.items()):
        print(f"{count:9,}  {name}")
    print(f"{len(seeds)} worlds, {len(report.findings)} findings")
    sys.exit(1 if report.findings else 0)


if __name__ == "__main__":
    main()
