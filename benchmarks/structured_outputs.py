"""What do structured outputs cost a step, and how long does a grammar take to compile?

    python -m benchmarks.structured_outputs

For each language, in milliseconds: the first compilation, the worker's time for the masks of a step of
--num-running rows, the time that the scheduler waits for them, and the time to gather and apply them; then
whole steps with and without structured output, alternating. Every output is first checked against its
language.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import checkpoint, print_json, print_table
from paged import LLMEngine, SamplingParams, StructuredOutputsParams
from paged.engine.grammar_waits import GrammarWaits
from paged.sampling.grammar_jobs import MaskJob
from paged.sampling.structured_outputs import GrammarMasks, Grammars

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["Paris", "Berlin", "London"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
LANGUAGES = {
    "json": StructuredOutputsParams(json=PERSON),
    "regex": StructuredOutputsParams(regex=r"([a-z]{2,9} ){20,60}"),
    "choice": StructuredOutputsParams(
        choice=[f"number {i:04d} of many that begin alike" for i in range(1000)]
    ),
    "grammar": StructuredOutputsParams(
        grammar='start: sum\nsum: term ("+" term){30,60}\nterm: /[0-9]{1,3}/ | "(" sum ")"'
    ),
}


def main() -> None:
    """Check the outputs, then time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-running", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    engine = LLMEngine(checkpoint(args.model), max_num_seqs=args.num_running)
    prove(engine)
    rows = [measure(engine, name, args) for name in LANGUAGES]
    print_table(rows)
    print_json({"benchmark": "structured_outputs", "languages": rows, **vars(args)})


def prove(engine: LLMEngine) -> None:
    """Check that every output is in its language."""
    params = [params_of(name, max_tokens=400) for name in LANGUAGES]
    outputs = engine.generate([[1] * 8] * len(params), params, use_tqdm=False)
    texts = dict(zip(LANGUAGES, (output.outputs[0].text for output in outputs), strict=True))
    person = json.loads(texts["json"])
    assert set(person) == set(PERSON["properties"]), person
    assert re.fullmatch(str(LANGUAGES["regex"].regex), texts["regex"])
    assert texts["choice"] in (LANGUAGES["choice"].choice or ())
    assert not re.search(r"[^0-9()+]", texts["grammar"])


def params_of(name: str | None, max_tokens: int) -> SamplingParams:
    """Return parameters that differ in the language only."""
    language = LANGUAGES[name] if name else None
    return SamplingParams(max_tokens=max_tokens, ignore_eos=name is None, structured_outputs=language)


def measure(engine: LLMEngine, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one language."""
    assert engine.tokenizer is not None
    grammars = Grammars(engine.tokenizer, engine.model_config.vocab_size, engine.eos_token_ids)
    grammars.start(StructuredOutputsParams(choice=["a"]))  # reads the tokenizer
    compile_ms = milliseconds(lambda: grammars.start(LANGUAGES[name]))
    again_ms = milliseconds(lambda: grammars.start(LANGUAGES[name]))
    parts = [(MaskJob, "_run_fast"), (GrammarWaits, "settle"), (GrammarMasks, "apply")]
    times: list[list[float]] = [[] for _ in parts]
    with_grammar, without = list[float](), list[float]()
    originals = [getattr(owner, part) for owner, part in parts]
    for (owner, part), original, own in zip(parts, originals, times, strict=True):
        setattr(owner, part, timed(original, own))
    try:
        for _ in range(3):
            with_grammar += steps(engine, name, args)
            without += steps(engine, None, args)
    finally:
        for (owner, part), original in zip(parts, originals, strict=True):
            setattr(owner, part, original)
    return {
        "language": name,
        "compile ms": compile_ms,
        "again ms": again_ms,
        "masks ms": statistics.median(times[0]),
        "waits ms": statistics.median(times[1]),
        "apply ms": statistics.median(times[2]),
        "step ms": statistics.median(with_grammar),
        "free step ms": statistics.median(without),
    }


def steps(engine: LLMEngine, name: str | None, args: argparse.Namespace) -> list[float]:
    """Return the milliseconds of decoding steps in which every request runs."""
    for i in range(args.num_running):
        engine.add_request(str(i), [1 + i] * 16, params_of(name, args.steps + 10))
    while any(r.num_output_tokens < 2 for r in (*engine.scheduler.running, *engine.scheduler.waiting())):
        engine.step()
    times = []
    for _ in range(args.steps):
        if len(engine.scheduler.running) == args.num_running:
            times.append(milliseconds(engine.step))
    for i in range(args.num_running):
        engine.abort_request(str(i))
    return times


def milliseconds(function: Callable[[], Any]) -> float:
    """Time one call."""
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1e3


def timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """Wrap a function so that it appends its milliseconds."""

    def wrapper(*args: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            times.append((time.perf_counter() - started) * 1e3)

    return wrapper


if __name__ == "__main__":
    main()
