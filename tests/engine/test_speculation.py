"""Speculation changes no bit of any output, whatever is guessed; it only saves steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paged import (
    ConfigError,
    EngineConfig,
    LLMEngine,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from paged.drafting.drafter import Draft, Drafter
from paged.drafting.drafters import new_drafter
from paged.drafting.lengths import DraftLengths
from paged.grammars import grammar_jobs
from paged.options.speculative_config import SpeculativeConfig
from paged.requests.request import CompletionOutput, Request
from paged.scheduler.drafts import Drafts
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine, ragged_prompts

CODE = "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n"
PROMPTS = [CODE, CODE * 3, "x", CODE + "    def read(self", "def f(a):\n    return a\n\ndef f(a):\n"]
EOS = 0
KINDS = RequestOutputKind
Answers = dict[tuple[str, str, int], list[int]]  # by the prompt, the parameters and the number of the sample


class Known:
    """Guesses tokens from the answers without speculation: right, wrong, or each by chance."""

    def __init__(self, answers: Answers, share: float) -> None:
        self._answers = answers
        self._share = share
        self._rng = random.Random(0)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        return [Draft(self._guess(request, limit)) for request, limit in zip(requests, limits, strict=True)]

    def _guess(self, request: Request, limit: int) -> list[int]:
        inputs = request.inputs
        prompt = inputs.prompt or inputs.prompt_token_ids
        answer = self._answers[str(prompt), str(inputs.params), request.index]
        right = answer[request.num_output_tokens :][:limit]
        return [token if self._rng.random() < self._share else (token + 7) % 200 for token in right]


class Random:
    """Guesses any tokens, of any number."""

    def __init__(self) -> None:
        self._rng = random.Random(1)

    def propose(self, _: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        choose = self._rng.randrange
        return [
            Draft([choose(200) for _ in range(choose(limit + 1))], self._rng.random()) for limit in limits
        ]


DRAFTERS: dict[str, Callable[[Answers], Drafter]] = {
    "ngram": lambda _: new_drafter(SpeculativeConfig(method="ngram")),
    "grammar": lambda _: new_drafter(SpeculativeConfig(method="grammar")),
    "suffix": lambda _: new_drafter(SpeculativeConfig(method="suffix", prompt_lookup_min=1)),
    "right": lambda answers: Known(answers, 1.0),
    "partly": lambda answers: Known(answers, 0.7),
    "wrong": lambda answers: Known(answers, 0.0),
    "random": lambda _: Random(),
}


def text_requests() -> list[tuple[Any, SamplingParams]]:
    """Return requests of the demo model, which between them use every parameter that may be combined."""
    common: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.8, "seed": 1, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.6, "seed": 2, "n": 3, "logprobs": 0, "top_k": 20},
        {"temperature": 0.0, "stop": ["self.", "turn"], "logprobs": 1},
        {"temperature": 0.3, "seed": 3, "stop": ["e", "th\n"], "include_stop_str_in_output": True, "n": 2},
        # EOS behind a stop string, and before one.
        {"temperature": 0.9, "seed": 4, "logit_bias": {EOS: 6.0}, "stop": ["a", " "], "ignore_eos": False},
        {"temperature": 1.0, "seed": 5, "stop_token_ids": [13, 32, 200], "ignore_eos": False},
        {"temperature": 0.7, "seed": 6, "allowed_token_ids": [*range(30, 60)], "best_of": 2, "logprobs": 1},
        {"temperature": 0.0, "repetition_penalty": 1.3, "dry_multiplier": 0.8, "bad_words": ["self"]},
        {"temperature": 0.5, "seed": 7, "min_tokens": 9, "stop": ["e"]},
        {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="[a-z ]{5,30}")},
        {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="<answer>[0-9]+</answer>")},
        {"temperature": 0.0, "num_speculative_tokens": 0},
        {"temperature": 0.0, "num_speculative_tokens": 1, "cache_salt": "own"},
        {"temperature": 0.0, "max_tokens": 2},
    ]
    params = [SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | each) for each in common]
    return [(PROMPTS[i % len(PROMPTS)], each) for i, each in enumerate(params)]


def _ban_one(tokens: list[int], logits: Tensor) -> Tensor:
    """Ban a token that depends on all before, and sometimes the likeliest."""
    banned = torch.stack([torch.tensor(sum(tokens) % 200), logits.argmax()])[: 1 + sum(tokens) % 2]
    return logits.index_fill(0, banned, -torch.inf)


def _prefer_prompt(prompt: list[int], tokens: list[int], logits: Tensor) -> Tensor:
    """Prefer a token of the prompt. Fail at the eleventh token."""
    if len(tokens) == 10:
        raise ValueError("ten are enough")
    logits[prompt[len(tokens) % len(prompt)]] += 3.0
    return logits


RECORD = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "name": {"type": "string", "maxLength": 9}},
    "required": ["id", "name"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<t"],
        "tags": [{"begin": "<t>", "content": {"type": "json_schema", "json_schema": RECORD}, "end": "</t>"}],
        "at_least_one": True,
    },
}
LANGUAGES: list[dict[str, Any]] = [
    {"regex": "[a-z ]{5,30}"},
    {"regex": "(self|that)\\.(path|reader)(, [a-z]+)*"},
    {"regex": "<answer>[0-9]{1,3}</answer>"},
    {"json": RECORD},
    {"json_object": True},
    {"choice": ["import os", "import os.path", "class Reader"]},
    {"grammar": 'root ::= "[" item (", " item)* "]"\nitem ::= [0-9]+ | "None"'},
    {"structural_tag": TAG},
]
# How a random request may change each parameter of sampling.
CHANGES: dict[str, Callable[[random.Random], Any]] = {
    "n": lambda rng: rng.randint(1, 3),
    "best_of": lambda _: 3,
    "temperature": lambda rng: rng.choice([0.0, 0.3, 1.0, 1.5]),
    "top_p": lambda _: 0.9,
    "top_k": lambda _: 20,
    "min_p": lambda _: 0.02,
    "typical_p": lambda _: 0.8,
    "top_n_sigma": lambda _: 2.0,
    "seed": lambda rng: rng.randrange(99),
    "presence_penalty": lambda rng: rng.choice([-0.5, 0.7]),
    "frequency_penalty": lambda rng: rng.choice([-0.2, 0.5]),
    "repetition_penalty": lambda rng: rng.choice([0.9, 1.3]),
    "repetition_penalty_last_n": lambda rng: rng.choice([-1, 3, 16]),
    "dry_multiplier": lambda _: 0.8,
    "dry_base": lambda rng: rng.choice([1.2, 3.0]),
    "dry_allowed_length": lambda rng: rng.randint(1, 3),
    "dry_sequence_breakers": lambda rng: rng.choice([(), ("\n", "self"), (" ",)]),
    "dry_penalty_last_n": lambda rng: rng.choice([-1, 8, 30]),
    "logit_bias": lambda rng: {rng.randrange(200): 4.0, EOS: rng.choice([-9.0, 3.0])},
    "allowed_token_ids": lambda rng: [EOS, *range(rng.randrange(9), 3000)],
    "bad_words": lambda rng: rng.choice([["self"], ["    def", "path", "import os.path"]]),
    "min_tokens": lambda rng: rng.randint(1, 12),
    "max_tokens": lambda rng: rng.randint(12, 30),
    "stop": lambda rng: rng.choice([["self."], ["e", "th\n"], [" "]]),
    "stop_token_ids": lambda rng: rng.sample(range(300, 4096), 300),
    "no_stop_within": lambda rng: (rng.choice(["", "import"]), rng.choice(["self", "\n"])),
    "include_stop_str_in_output": lambda _: True,
    "ignore_eos": lambda _: True,
    "logprobs": lambda rng: rng.randint(0, 3),
    "prompt_logprobs": lambda _: 1,
    "logits_processors": lambda rng: rng.choice([[_ban_one], [_prefer_prompt], [_ban_one, _prefer_prompt]]),
    "structured_outputs": lambda rng: StructuredOutputsParams(**rng.choice(LANGUAGES)),
    "num_speculative_tokens": lambda rng: rng.randint(0, 3),
}
# Those that change no token.
OF_OUTPUTS = {
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "output_kind",
    "priority",
    "timeout_s",
    "cache_salt",
}


def random_requests(seed: int, num: int) -> list[tuple[Any, SamplingParams]]:
    """Return random requests, each of which changes a few parameters. Sixteen change each of them."""
    rng = random.Random(seed)
    names = rng.sample([*CHANGES], len(CHANGES))[: 2 * num] + rng.choices([*CHANGES], k=num)
    often = ["structured_outputs", "repetition_penalty", "dry_multiplier", "bad_words", "min_tokens"]
    made = []
    for i in range(num):
        own = {*names[i::num], *rng.sample(often, 2)}
        params: dict[str, Any] = {"max_tokens": 24, "temperature": 0.7, "seed": i}
        params |= {name: CHANGES[name](rng) for name in sorted(own)}
        if params["temperature"] == 0.0:
            params |= {"n": 1, "best_of": None}
        made.append((rng.choice(PROMPTS), SamplingParams(**params)))
    return made


def token_requests() -> list[tuple[Any, SamplingParams]]:
    prompts = ragged_prompts([30, 1, 61, 8, 16, 17, 48])
    each: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.2, "seed": 3, "logprobs": 2, "n": 2},
    ]
    params = [SamplingParams(**{"max_tokens": 28, "ignore_eos": True} | each[i % 2]) for i in range(7)]
    return list(zip(prompts, params, strict=True))


def demo(**options: Any) -> LLMEngine:
    return new_engine("demo", skip_tokenizer_init=False, **options)


def random_model(name: str, **options: Any) -> LLMEngine:
    return new_engine(checkpoint(name), **options)


ENGINES: dict[str, Callable[[], LLMEngine]] = {
    "recorded": lambda: demo(),
    "eager in chunks": lambda: demo(enforce_eager=True, max_num_batched_tokens=48),
    "int8 KV, swapped": lambda: demo(
        kv_cache_dtype="int8",
        num_blocks=24,
        block_size=8,
        preemption_mode="swap",
        swap_space=0.01,
        watermark=0,
    ),
    "bfloat16, preempted": lambda: demo(dtype="bfloat16", num_blocks=22, block_size=8, max_num_seqs=7),
    "windows": lambda: random_model("qwen2-mixed", num_blocks=26, block_size=8, watermark=0.0),
    "longrope": lambda: random_model("phi3-longrope"),
    "dynamic rope": lambda: random_model("llama-dynamic", max_num_batched_tokens=32),
    # torch's products have other bits for several rows: the same tokens are promised in float32, no more.
    "torch": lambda: random_model("llama", attention_backend="torch"),
}


def test_random_requests_change_every_parameter_of_sampling():
    names = {field.name for field in fields(SamplingParams)}
    assert {*CHANGES} | OF_OUTPUTS == names
    assert not {*CHANGES} & OF_OUTPUTS


def outputs_of(
    engine: LLMEngine, requests: list[tuple[Any, SamplingParams]]
) -> list[tuple[list[CompletionOutput], Any]]:
    """Return all outputs of two rounds, in the second of which prefixes are cached."""
    prompts, params = map(list, zip(*requests, strict=True))
    found = []
    for _ in range(2):
        outputs = engine.generate(prompts, params, use_tqdm=False)
        found += [(output.outputs, output.prompt_logprobs) for output in outputs]
        if engine.config.attention_backend == "torch":
            bits = {"logprobs": None, "cumulative_logprob": None}
            found = [([replace(one, **bits) for one in completions], None) for completions, _ in found]
        engine.scheduler.check()
    engine.reset_prefix_cache()
    assert_all_free(engine)
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_no_bit_of_an_output_changes(name, monkeypatch):
    # Else a busy machine ends runs where a mask is late, and right drafts are not all accepted.
    monkeypatch.setattr(grammar_jobs, "SLOW_S", 60.0)
    engine = ENGINES[name]()
    requests = token_requests()
    if engine.tokenizer is not None:
        num_random = 16 if name == "recorded" else 5
        requests = text_requests() + random_requests([*ENGINES].index(name), num_random)
    expected = outputs_of(engine, requests)
    plain = engine.stats()
    # best_of returns its samples in another order.
    answers = Answers()
    for (prompt, params), (completions, _) in zip(requests, expected, strict=False):
        for i in range(params.num_samples):
            answer = completions[i].token_ids if params.best_of is None else []
            answers[str(prompt), str(params), i] = answer
    for drafter, make in DRAFTERS.items():
        if drafter == "grammar" and engine.tokenizer is None:
            continue  # no request has one
        before = engine.stats()
        drafts = Drafts(make(answers), 4, engine.model_config.vocab_size, 64)
        engine.scheduler.drafts = drafts
        assert outputs_of(engine, requests) == expected, drafter
        assert drafts._drafter is not None, "the drafter was switched off"
        stats = engine.stats()
        num_draft, num_accepted = (
            getattr(stats, field) - getattr(before, field)
            for field in ("num_draft_tokens", "num_accepted_tokens")
        )
        assert stats.num_generated_tokens - before.num_generated_tokens == plain.num_generated_tokens
        assert num_draft > 0, drafter
        assert drafter != "right" or num_accepted == num_draft
        assert drafter != "wrong" or not num_accepted
    if "preempted" in name or "swapped" in name or name == "windows":
        assert stats.num_recompute_preemptions + stats.num_swap_preemptions > 0


def test_drafts_of_random_lengths_record_few_steps():
    class Cut(Known):
        def _guess(self, request: Request, limit: int) -> list[int]:
            return super()._guess(request, min(limit, self._rng.randint(1, 8)))

    engine = demo(max_num_seqs=8)
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    prompts = ragged_prompts([40, 300, 9, 120])
    answers = [output.outputs[0].token_ids for output in engine.generate(prompts, params, use_tqdm=False)]
    ticks = itertools.count()
    clock = engine.scheduler.clock = lambda: float(next(ticks))  # all steps take the same time
    lengths = DraftLengths(8, engine.runner.sizes.relative_step_time, clock)
    known = {(str(prompts[0]), str(params), 0): answers[0]}
    engine.scheduler.drafts = Drafts(Cut(known, 1.0), 8, 4096, 64, lengths)
    graphs = engine.runner.graphs
    assert graphs is not None
    before = len(graphs._graphs)
    found = engine.generate(prompts[:1] * 4, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in found] == [answers[0]] * 4
    assert engine.stats().num_accepted_tokens
    assert len(graphs._graphs) - before <= 32


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_forks_and_streams_of_runs(kind):
    """A request is forked between two runs of nearly a block each, and streams show whole runs."""
    engine = demo(block_size=8, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, output_kind=kind, logprobs=0)
    other = replace(params, temperature=0.7, seed=1)
    (plain,) = engine.generate([CODE], replace(params, output_kind=KINDS.CUMULATIVE), use_tqdm=False)
    answer = plain.outputs[0]
    engine.scheduler.drafts = Drafts(Known(_Always(answer.token_ids), 1.0), 7, 4096, 64)
    engine.add_request("a", CODE, params)
    shown: dict[str, list[CompletionOutput]] = {"a": [], "b": []}
    num_shared = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            shown[output.request_id] += output.outputs
        engine.scheduler.check()
        if not num_shared and len(running := engine.scheduler.running) and running[0].num_output_tokens > 8:
            num_shared = running[0].num_output_tokens
            engine.fork("a", "b", other)
    assert len(shown["a"]) == 6  # the first token, then runs of 8
    assert _whole(shown["a"], kind) == (answer.token_ids, answer.text, answer.logprobs)
    engine.scheduler.drafts = None
    tokens = [*plain.prompt_token_ids, *answer.token_ids[:num_shared]]
    rest = replace(other, output_kind=KINDS.CUMULATIVE, max_tokens=40 - num_shared)
    (alone,) = engine.generate([tokens], rest, use_tqdm=False)
    assert _whole(shown["b"], kind)[0] == answer.token_ids[:num_shared] + alone.outputs[0].token_ids


class _Always(dict[Any, list[int]]):
    """The same answer to every request."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = [*answer]

    def __missing__(self, _: Any) -> list[int]:
        return self._answer


def _whole(outputs: list[CompletionOutput], kind: RequestOutputKind) -> tuple[list[int], str, Any]:
    """Return the tokens, text and log-probabilities that a stream has shown."""
    if kind is KINDS.CUMULATIVE:
        outputs = outputs[-1:]
    tokens = [token for output in outputs for token in output.token_ids]
    logprobs = [place for output in outputs for place in output.logprobs or []]
    return tokens, "".join(output.text for output in outputs), logprobs


def test_options_reach_the_drafter_and_statistics_count():
    config = '{"method": "suffix", "num_speculative_tokens": 3, "adaptive": false}'
    engine = demo(speculative_config=config)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    outputs = engine.generate([CODE, CODE], params, use_tqdm=False)
    stats = engine.stats()
    assert stats.num_drafts == sum(output.metrics.num_drafts for output in outputs) > 0
    assert stats.num_accepted_tokens == sum(output.metrics.num_accepted_tokens for output in outputs)
    assert stats.num_draft_tokens == sum(output.metrics.num_draft_tokens for output in outputs)
    assert len(stats.num_accepted_at) == 3
    assert sum(stats.num_accepted_at) == stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_generated_tokens == 60
    assert stats.mean_acceptance_length == 1 + stats.num_accepted_tokens / stats.num_drafts
    # What ended is guessed for the next request of the same kind.
    steps = stats.num_steps
    engine.generate([CODE], params, use_tqdm=False)
    assert engine.stats().num_steps - steps < 15
    total = type(stats).total([stats, replace(stats, num_accepted_at=(1,))])
    assert total.num_accepted_at == (stats.num_accepted_at[0] + 1, *stats.num_accepted_at[1:])
    assert stats.draft_seconds_won == 0.0
    adaptive = demo(speculative_config={"method": "suffix"})
    adaptive.generate([CODE * 3], replace(params, max_tokens=90), use_tqdm=False)
    assert adaptive.stats().draft_seconds_won != 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "eagle"},
            "speculative_config['method'] must be one of ngram, suffix, grammar, draft_model; got 'eagle'",
        ),
        (
            {},
            "speculative_config['method'] is missing; it must be one of ngram, suffix, grammar, draft_model",
        ),
        ({"method": "ngram", "adaptive": 1}, "speculative_config['adaptive'] must be"),
        (
            {"method": "ngram", "models": "x"},
            "speculative_config['models'] is unknown; known keys are method, num",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            "speculative_config['num_speculative_tokens'] must be from 1 to 64, got 0",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": True},
            "speculative_config['num_speculative_tokens'] must",
        ),
        (
            {"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 4},
            "is 9, more than prompt_lookup_max 4",
        ),
        ({"method": "suffix", "prompt_lookup_max": 4}, "goes with method 'ngram'"),
        ({"method": "grammar", "prompt_lookup_min": 3}, "goes with methods 'ngram' and 'suffix'"),
        ("{", "speculative_config must be JSON such as"),
        ("[" * 100_000, "speculative_config must be JSON such as"),
        ("[1]", "speculative_config must be a dict such as"),
        (4, "speculative_config must be a dict such as"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_weights_are_read(given, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig("nowhere", speculative_config=given)
    assert message in str(error.value)
