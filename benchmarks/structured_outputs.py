"""What does structured output cost? Tokens per second with and without it, side by side.

    python -m benchmarks.structured_outputs                       # a JSON schema, at 1, 8 and 64 streams
    python -m benchmarks.structured_outputs --language regex --temperature 1

The models have the sizes of SmolLM2-135M, random weights, and vocabularies of 49,152 and 151,936 tokens
(`--model` takes others). Steps with and without structured output alternate; "ratio" is the throughput with
it over the throughput without. In milliseconds, of a step: the workers' time for its masks, which they make
beside the forward; how long the step waits for them after it; and the whole time to apply them, this wait
included. Every output is first checked against its language.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from benchmarks.common import parse_args, print_json, print_table
from benchmarks.server.text_checkpoint import text_checkpoint
from paged import LLMEngine, SamplingParams, StructuredOutputsParams
from paged.grammars.grammar_jobs import MaskJob
from paged.sampling import structured_outputs
from paged.sampling.structured_outputs import GrammarMasks, Grammars

PARTS: dict[str, tuple[Any, str]] = {
    "masks ms": (MaskJob, "_run_fast"),
    "wait ms": (structured_outputs, "wait_for"),
    "choose ms": (GrammarMasks, "choose"),
    "apply ms": (GrammarMasks, "apply"),
}
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
    parser.add_argument("--model", nargs="+", default=["llama-135m", "llama-135m-152k"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--language", choices=LANGUAGES, default="json")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=24, help="of each run, in which all streams decode")
    parser.add_argument(
        "--rounds", type=int, default=5, help="runs with and without, of which the median counts"
    )
    args = parse_args(parser, model=["demo"], streams=[1, 2], steps=3)
    rows = []
    with tqdm(total=len(args.model) * len(args.streams) * args.rounds, unit="round") as bar:
        for model in args.model:
            bar.set_description(model)
            engine = LLMEngine(text_checkpoint(model), max_num_seqs=max(args.streams), num_blocks=1024)
            prove(engine, args)
            compile_ms = compilation(engine, args.language)
            rows += [
                {"model": model, "streams": streams, **measure(engine, streams, args, bar), **compile_ms}
                for streams in args.streams
            ]
    print_table(rows)
    print_json({"benchmark": "structured_outputs", "rows": rows, **vars(args)})


def prove(engine: LLMEngine, args: argparse.Namespace) -> None:
    """Check that an output is in its language."""
    (output,) = engine.generate([[5] * 8], params_of(args.language, 1000, args), use_tqdm=False)
    text = output.outputs[0].text
    language = LANGUAGES[args.language]
    assert output.outputs[0].finish_reason == "stop", text
    if args.language == "json":
        assert set(json.loads(text)) == set(PERSON["properties"]), text
    elif args.language == "regex":
        assert re.fullmatch(str(language.regex), text), text
    elif args.language == "choice":
        assert text in (language.choice or ()), text
    else:
        assert not re.search(r"[^0-9()+]", text), text


def params_of(language: str | None, max_tokens: int, args: argparse.Namespace) -> SamplingParams:
    """Return parameters that differ in the language only."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=args.temperature,
        seed=0,
        ignore_eos=language is None,
        structured_outputs=LANGUAGES[language] if language else None,
    )


def compilation(engine: LLMEngine, language: str) -> dict[str, float]:
    """Time the first compilation of a grammar."""
    assert engine.tokenizer is not None
    grammars = Grammars(engine.tokenizer, engine.model_config.vocab_size, engine.eos_token_ids)
    grammars.start(StructuredOutputsParams(choice=["a"]))  # reads the tokenizer
    started = time.perf_counter()
    grammars.start(LANGUAGES[language])
    return {"compile ms": (time.perf_counter() - started) * 1e3}


def measure(engine: LLMEngine, streams: int, args: argparse.Namespace, bar: Any) -> dict[str, Any]:
    """Measure steps with and without structured output, alternating."""
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    originals = {part: getattr(owner, name) for part, (owner, name) in PARTS.items()}
    step_ms: dict[str | None, list[float]] = {args.language: [], None: []}
    for language in step_ms:
        steps(engine, language, streams, args)  # records the steps
    try:
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, timed(originals[part], times[part]))
        for _ in range(args.rounds):
            for language, found in step_ms.items():
                found.append(steps(engine, language, streams, args))
            bar.update()
    finally:
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, originals[part])
    with_it, without = (statistics.median(found) for found in step_ms.values())
    applied = times["apply ms"] + times.pop("choose ms")  # one of them in each step
    times["apply ms"] = applied
    return {
        "tokens/s": streams / with_it * 1e3,
        "without": streams / without * 1e3,
        "ratio": without / with_it,
        "step ms": with_it,
        **{part: sum(own) / len(applied) for part, own in times.items()},
    }


def steps(engine: LLMEngine, language: str | None, streams: int, args: argparse.Namespace) -> float:
    """Return the mean milliseconds of decoding steps in which every stream runs."""
    for i in range(streams):
        engine.add_request(str(i), [5 + i] * 16, params_of(language, args.steps + 10, args))
    while any(r.num_output_tokens < 2 for r in (*engine.scheduler.running, *engine.scheduler.waiting())):
        engine.step()
    num_tokens = engine.scheduler.counters.num_generated_tokens
    num_steps = 0
    started = time.perf_counter()
    while num_steps < args.steps and len(engine.scheduler.running) == streams:
        engine.step()
        num_steps += 1
    seconds = time.perf_counter() - started
    # A step that waits for masks in vain gives fewer tokens.
    num_tokens = engine.scheduler.counters.num_generated_tokens - num_tokens
    for i in range(streams):
        engine.abort_request(str(i))
    return seconds * 1e3 * streams / num_tokens


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
