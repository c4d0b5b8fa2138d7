"""The sampler behind drafts: it draws what it would draw if they were tokens, and only right ones count."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paged
from paged import StructuredOutputsParams
from paged.device.transfers import Transfers
from paged.grammars import grammar_jobs
from paged.kernels.backend import load_kernels
from paged.options.sampling_params import SamplingParams
from paged.requests.request import Request, RequestInputs, SamplingState
from paged.requests.token_rules import TokenRules
from paged.sampling.sampler import Sampler
from paged.sampling.seats import Sampled, SamplingSeats
from paged.sampling.structured_outputs import Grammars, begin_masks
from paged.scheduler.drafts import verified
from paged.scheduler.schedule import Schedule, StepOutput
from paged.text.tokenizer import Tokenizer

VOCAB_SIZE = 4096  # of the demo
LONGEST = 24  # tokens of an answer
NUM_LIKELY = 9  # tokens that the model prefers, so that texts repeat
EOS = 0
CPU = torch.device("cpu")


def _ban(tokens: list[int], logits: Tensor) -> Tensor:
    return logits.index_fill(0, torch.tensor(60 + sum(tokens) % NUM_LIKELY), -torch.inf)


RULES = TokenRules(
    bad_words=((61,), (62, 63), (64, 65, 66)), breakers={(): frozenset([67]), (64,): frozenset([63])}
)
EDITS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.7},
    {"presence_penalty": 0.9, "repetition_penalty": 0.8},
    {"presence_penalty": 0.9, "repetition_penalty": 1.4, "repetition_penalty_last_n": 3},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"temperature": 0.0, "dry_multiplier": 1.5, "dry_penalty_last_n": 6, "frequency_penalty": 0.3},
    {"temperature": 0.0, "dry_multiplier": 4.0, "dry_allowed_length": 1},
    {"dry_multiplier": 3.0, "dry_allowed_length": 1, "repetition_penalty": 1.1},
    {"bad_words": ["by the rules"]},
    {"logits_processors": [_ban], "logprobs": 2},
    {"min_tokens": 9, "logit_bias": {EOS: 9.0}},
    {"logit_bias": {60: 1.0}},
    {
        "structured_outputs": StructuredOutputsParams(regex="[a-z ]{3,40}"),
        "min_tokens": 4,
        "logit_bias": {EOS: 12.0},
    },
    {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{3,40}")},
    {"structured_outputs": StructuredOutputsParams(json={"enum": ["ab", "abc"]}), "min_tokens": 2},
    {},
]


@functools.cache
def grammars() -> Grammars:
    return Grammars(Tokenizer(Path(paged.__file__).parent / "demo"), VOCAB_SIZE, frozenset([EOS]))


def new_request(rng: random.Random, number: int) -> Request:
    changes = EDITS[number % len(EDITS)]
    params = SamplingParams(**{"max_tokens": 99, **changes})
    rules = RULES if "bad_words" in changes or "dry_multiplier" in changes else TokenRules()
    inputs = RequestInputs(
        request_id=str(number),
        prompt_token_ids=rng.choices(range(60, 60 + NUM_LIKELY), k=rng.randint(1, 9)),
        params=params,
        max_total_tokens=999,
        stop_ids=frozenset([EOS]),
        rules=rules,
    )
    sampling = SamplingState(number)
    if params.structured_outputs is not None:
        sampling.grammar = grammars().start(params.structured_outputs)
    return Request(inputs, sampling=sampling)


Prefix = tuple[Request, list[int]]  # a request, and the tokens behind which a row draws


def logits_behind(request: Request, tokens: list[int]) -> Tensor:
    """Return what a model would say behind these tokens."""
    generator = torch.Generator().manual_seed(hash((request.sampling.seed, *tokens)) % 2**60)
    logits = torch.randn(VOCAB_SIZE, generator=generator)
    logits[60 : 60 + NUM_LIKELY] += 6.0
    return logits


def drawn(sampler: Sampler, rows: Sequence[Sampled], prefixes: list[Prefix]) -> StepOutput:
    """Draw a token for each row."""
    transfers = Transfers(CPU)
    upload = transfers.new_upload()
    download = transfers.new_download()
    draw = sampler.prepare(rows, lambda: [len(tokens) for _, tokens in prefixes], upload)
    masks = draw.start_masks()
    draw.run(torch.stack([logits_behind(*prefix) for prefix in prefixes]), download, masks)
    output = draw.result()
    if masks is not None:
        masks.check(output)
    return output


def alone(request: Request, most: int) -> list[int | str]:
    """Draw tokens one after another. Return them, and the error that ended them."""
    answer: list[int | str] = []
    while len(answer) < most and EOS not in answer:
        sampler = Sampler(load_kernels("torch"), VOCAB_SIZE, CPU)
        output = drawn(sampler, [request], [(request, request.token_ids)])
        if output.tokens[0] is None:
            return [*answer, output.errors[0].message]
        request.token_ids.append(output.tokens[0])
        answer.append(output.tokens[0])
    return answer


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Wait for every mask: a row whose mask is late draws nothing."""
    monkeypatch.setattr(grammar_jobs, "SLOW_S", 60.0)


class World:
    """Requests that draw behind drafts, of which some are right. They come, go, and miss steps."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.sampler = Sampler(load_kernels("torch"), VOCAB_SIZE, CPU)
        self.seats = SamplingSeats()
        self.requests: list[Request] = []
        self.answers: dict[Request, list[int | str]] = {}
        self.num_right = 0

    def join(self, number: int) -> None:
        request = new_request(self.rng, number)
        twin = Request(request.inputs, sampling=SamplingState(number))
        if request.sampling.grammar is not None:
            twin.sampling.grammar = request.sampling.grammar.copy()
        self.answers[request] = alone(twin, LONGEST)
        request.seat = number
        self.requests.append(request)
        self.seats.change([], [request])

    def leave(self, request: Request) -> None:
        self.requests.remove(request)
        self.seats.change([request.seat], [])

    def drafts_of(self, request: Request) -> list[int]:
        """Guess, each token right by chance."""
        right = [token for token in self.answers[request][request.num_output_tokens :] if token != EOS]
        guess = [
            token if self.rng.random() < 0.8 else self.rng.randrange(60, 69)
            for token in right[: self.rng.randint(0, 4)]
            if isinstance(token, int)
        ]
        grammar = request.sampling.grammar
        return guess if grammar is None else guess[: grammar.num_allowed(request, guess)]

    def step(self) -> None:
        """Draw for some of the requests."""
        present = [request for request in self.requests if self.rng.random() < 0.9]
        drafts = {request: drafts for request in present if (drafts := self.drafts_of(request))}
        plain = [request for request in present if request not in drafts]
        order = [*plain, *drafts]
        if not order:
            return
        for request in order:
            if request.inputs.params.edits_logits:
                start = request.num_tokens - 1
                self.seats.add_tokens(request.seat, start, request.token_ids[start:], drafts.get(request, []))
        prefixes = [
            (request, request.token_ids + own[:num])
            for request in order
            for own in [drafts.get(request, [])]
            for num in range(1 + len(own))
        ]
        rows = self.seats.with_drafts([request.seat for request, _ in prefixes])
        output = drawn(self.sampler, rows, prefixes)
        self.sampler.history.check()
        self.sampler.dry.check()
        for i in range(len(prefixes)):
            if self.rng.random() < 0.03:  # as if its mask were late
                output.tokens[i] = None
                output.runs[i] = []
        schedule = Schedule(sampled_requests=order, num_decode_tokens=len(plain), drafts=[*drafts.values()])
        self.update(order, verified(schedule, output))
        begin_masks(self.requests)

    def update(self, order: list[Request], output: StepOutput) -> None:
        """Append what was drawn, and compare it."""
        for row, request in enumerate(order):
            token = output.tokens[row]
            run = output.runs.get(row, [] if token is None else [token])
            self.num_right += max(0, len(run) - 1)
            request.token_ids += run
            found: list[int | str] = [*request.output_token_ids[:LONGEST]]
            if row in output.errors:
                found.append(output.errors[row].message)
            assert found == self.answers[request][: len(found)], request.inputs.params
            if row in output.errors or len(found) == LONGEST or EOS in run:
                self.leave(request)


@pytest.mark.parametrize("seed", range(3))
def test_draws_behind_drafts_are_those_without(seed):
    world = World(seed)
    for number in range(2 * len(EDITS)):
        world.join(number)
        world.step()
    while world.requests:
        world.step()
    assert world.num_right > 50
