"""What does speculation gain? One engine, with drafts and without in turns, on the same requests.

    python -m benchmarks.speculation                                     # the demo: copying, JSON, editing
    python -m benchmarks.speculation --model tinyllama-1.1b --accepted 0.8 --requests 1 4
    python -m benchmarks.speculation --draft demo --quantization int4           # the demo drafts for itself
    python -m benchmarks.speculation --model tinyllama-1.1b --draft llama-15m --accepted 0.8
    python -m benchmarks.speculation --step-times --model tinyllama-1.1b-8k --context 4096 --requests 1

With --accepted the drafter knows the outputs, and each of its tokens is right with that probability: for
shapes with random weights, and for always wrong drafts with 0; a draft model is run, and its guesses are
replaced. All outputs are compared. What an engine learns of step times and acceptance is kept from round to
round, found outputs are not. `speed` is the median of the paired times without drafts over those with them,
of the decode alone: above 1 drafts pay. With --step-times, how much longer steps take that compute several
tokens of each request than those that compute one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common import checkpoint, parse_args, print_json, print_table
from paged import LLMEngine, SamplingParams, StructuredOutputsParams
from paged.drafting.drafter import Draft, Drafter
from paged.drafting.drafters import new_drafter
from paged.drafting.lengths import DraftLengths
from paged.options.speculative_config import SpeculativeConfig
from paged.requests.request import Request
from paged.scheduler.drafts import Drafts

CLASS = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        self.balance -= amount
        return self.balance
"""
RECORDS = "".join(
    f'{{"id": {i}, "name": "user{i}", "active": true, "roles": ["reader"]}},\n' for i in range(9)
)
# What is forced are the keys; where blanks may be, and the values, the model chooses.
SCHEMA = {
    "type": "array",
    "minItems": 9,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "name": {"type": "string", "maxLength": 9},
            "active": {"type": "boolean"},
            "roles": {"type": "array", "items": {"enum": ["reader", "writer"]}, "minItems": 1, "maxItems": 2},
        },
        "required": ["id", "name", "active", "roles"],
        "additionalProperties": False,
    },
}
PROMPTS = {
    "copying": f"{CLASS}\n\n{CLASS}\n\nclass Account:\n    def __init__(self,",
    "JSON": f"users = [\n{RECORDS}",
    "JSON of a schema": "# One user in JSON, with id, name, active and roles, then eight others.\nusers = ",
    "JSON of a schema, examples": f"users = [{RECORDS}]\n\nusers = ",
    "editing": f"{CLASS}\n\n{CLASS.replace('Account', 'Wallet')}\n\n{CLASS.replace('Account', 'Purse')[:60]}",
}
NUM_TOKENS = (1, 2, 4, 8)  # of each request in a step


class Replay:
    """A drafter that knows the outputs; each of its tokens is right with a given probability."""

    def __init__(
        self, answers: dict[str, list[int]], accepted: float, draft_model: Drafter | None = None
    ) -> None:
        self._draft_model = draft_model  # which is run for its time
        self._answers = answers
        self._accepted = accepted
        self._rng = random.Random(0)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """Return the next tokens of each request, or others."""
        if self._draft_model is not None:
            self._draft_model.propose(requests, limits)
        return [self._guess(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _guess(self, request: Request, limit: int) -> Draft:
        right = self._answers[request.request_id][request.num_output_tokens :][:limit]
        return Draft([token if self._rng.random() < self._accepted else 1 + token % 99 for token in right])


def main() -> None:
    """Time each kind of prompt for each number of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, tinyllama-1.1b, llama-15m or a directory")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--method", default="suffix", help="ngram, suffix or grammar")
    parser.add_argument("--draft", help="a draft model, instead of a method")
    parser.add_argument("--quantization", help="of the draft model: int8 or int4")
    parser.add_argument("--accepted", type=float, help="the share of right drafts of a replay")
    parser.add_argument("--drafts", type=int, default=8, help="num_speculative_tokens")
    parser.add_argument("--fixed", action="store_true", help="verify all drafts: adaptive=False")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=512, help="tokens of a random prompt, with --accepted")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", nargs="+", choices=PROMPTS, default=[*PROMPTS], help="of the demo")
    parser.add_argument("--step-times", action="store_true", help="of steps by their tokens of each request")
    args = parse_args(parser, requests=[1], max_tokens=8, rounds=1)
    has_tokenizer = args.accepted is None and args.model == "demo" and not args.step_times
    speculation = None
    if args.draft is not None:
        speculation = {
            "model": checkpoint(args.draft),
            "num_speculative_tokens": args.drafts,
            "quantization": args.quantization,
            "adaptive": not args.fixed,
        }
    engine = LLMEngine(
        checkpoint(args.model),
        dtype=args.dtype,
        num_blocks=1 + max(args.requests) * -(-(args.context + args.max_tokens) // 16),
        skip_tokenizer_init=not has_tokenizer,
        speculative_config=speculation,
    )
    of_model = engine.scheduler.drafts
    print(engine.describe())
    if args.step_times:
        rows = [step_times(engine, num, args) for num in args.requests]
        print_table(rows)
        print_json({"benchmark": "speculation", "rows": rows, **vars(args)})
        return
    rng = random.Random(0)
    prompts: dict[str, Any] = {kind: PROMPTS[kind] for kind in args.prompts}
    if not has_tokenizer:
        prompts = {"random": random_prompt(engine, args.context, rng)}
    cells = [(kind, num) for kind in prompts for num in args.requests]
    rows = [row(engine, kind, prompts[kind], num, args, of_model) for kind, num in cells]
    print(file=sys.stderr)
    print_table(rows)
    print_json({"benchmark": "speculation", "rows": rows, **vars(args)})


def row(
    engine: LLMEngine,
    kind: str,
    prompt: Any,
    num_requests: int,
    args: argparse.Namespace,
    of_model: Drafts | None,
) -> dict[str, Any]:
    """Compare runs with drafts and without. of_model: those of a draft model, if there is one."""
    grammar = StructuredOutputsParams(json=SCHEMA) if "schema" in kind else None
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=args.max_tokens, structured_outputs=grammar
    )
    prompts = [prompt] * num_requests
    expected, _ = run(engine, prompts, params, None)
    lengths = None
    if not args.fixed:  # what it learns is kept from round to round, as an engine keeps it
        lengths = DraftLengths(args.drafts, engine.runner.sizes.relative_step_time, time.perf_counter)
    pairs = []
    for i in range(args.rounds + 1):
        print(f"\r{kind}, {num_requests} requests: {i} of {args.rounds} rounds ", end="", file=sys.stderr)
        drafter: Drafter = new_drafter(SpeculativeConfig(method=args.method))
        if args.accepted is not None:
            drafter = Replay(expected, args.accepted, engine.runner.draft_model)
        before = engine.stats()
        in_blocks = of_model is not None
        drafts = Drafts(drafter, args.drafts, 2**31, 512, lengths, in_blocks=in_blocks)
        if of_model is not None and args.accepted is None:
            drafts = of_model
        found, with_drafts = run(engine, prompts, params, drafts)
        assert found == expected, "drafts changed an output"
        after = engine.stats()
        _, without = run(engine, prompts, params, None)
        pairs.append((sum(without), sum(with_drafts)))
    pairs = pairs[1:]  # the first records steps
    num_drafts = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    num_decoded = sum(map(len, expected.values())) - num_requests
    return {
        "prompt": kind,
        "requests": num_requests,
        "drafted": num_drafts / num_decoded,
        "accepted": num_accepted / max(1, num_drafts),
        "tokens/s without": num_decoded / statistics.median(without for without, _ in pairs),
        "tokens/s": num_decoded / statistics.median(with_drafts for _, with_drafts in pairs),
        "speed": statistics.median(without / with_drafts for without, with_drafts in pairs),
    }


def random_prompt(engine: LLMEngine, num_tokens: int, rng: random.Random) -> list[int]:
    """Make a prompt of random tokens."""
    return [rng.randrange(engine.model_config.vocab_size) for _ in range(num_tokens)]


def step_times(engine: LLMEngine, num_requests: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time steps of some tokens of each request over plain ones, whose time is given in milliseconds.

    In turns, on the same requests: their drafts are always wrong.
    """
    rng = random.Random(0)
    prompts = [random_prompt(engine, args.context, rng) for _ in range(num_requests)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=args.max_tokens)
    expected, _ = run(engine, prompts, params, None)
    seconds: dict[int, list[float]] = {num: [] for num in NUM_TOKENS}
    for _ in range(args.rounds):
        for num, found in seconds.items():
            drafts = Drafts(Replay(expected, 0.0), num - 1, 2**31, 512) if num > 1 else None
            outputs, times = run(engine, prompts, params, drafts)
            assert outputs == expected, "drafts changed an output"
            # The first steps may be recorded, and the last ones have room for fewer drafts.
            found += times[2 : -max(NUM_TOKENS)]
    medians = {num: statistics.median(found) for num, found in seconds.items()}
    factors = {f"{num} tokens": medians[num] / medians[1] for num in NUM_TOKENS[1:]}
    return {"requests": num_requests, "context": args.context, "ms": 1e3 * medians[1], **factors}


def run(
    engine: LLMEngine, prompts: list[Any], params: SamplingParams, drafts: Drafts | None
) -> tuple[dict[str, list[int]], list[float]]:
    """Run requests. Return their tokens, and the seconds of each step once all have their first token."""
    engine.scheduler.drafts = None
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    while engine.scheduler.num_waiting or any(r.num_output_tokens < 1 for r in engine.scheduler.running):
        engine.core.step()
    engine.scheduler.drafts = drafts
    seconds = []
    while engine.scheduler.has_unfinished():
        started = time.perf_counter()
        engine.core.step()
        seconds.append(time.perf_counter() - started)
    outputs = engine.step()
    return {output.request_id: [*output.outputs[0].token_ids] for output in outputs}, seconds


if __name__ == "__main__":
    main()
