"""llguidance or xgrammar: which of them keeps outputs to their schema, and at what cost?

    pip install xgrammar
    python -m benchmarks.grammar_libraries

Each text is drawn at random, token by token, among the tokens that the library allows, for the 200 schemas of
the tests and for some that are hard to enforce (`benchmarks/schemas.py`). jsonschema judges the texts.
"refused" counts schemas that the library rejects, "wrong" texts that break a schema it accepted, "cut" texts
without an end within --max-tokens. Times are of one thread: the median and the maximum for compiling a schema
and its first mask, and for one further mask. Both libraries have the same vocabulary: the demo's, or one of
--vocab-size that is trained on Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.common import checkpoint, parse_args, print_json, print_table
from benchmarks.schemas import HARD_SCHEMAS, SCHEMAS
from paged import RequestError, StructuredOutputsParams
from paged.sampling.structured_outputs import Grammars
from paged.text.tokenizer import Tokenizer

Schema = dict[str, Any]
VALIDATOR, FORMATS = jsonschema.Draft202012Validator, jsonschema.Draft202012Validator.FORMAT_CHECKER
KINDS = {"200 schemas": SCHEMAS, "hard": HARD_SCHEMAS}


class Walk(Protocol):
    """One text in the making."""

    def mask(self) -> NDArray[np.int32]:
        """Return which tokens may come next, as bits."""

    def take(self, token: int) -> None:
        """Append a token."""


class RefusedError(Exception):
    """The library rejects this schema."""


class LLGuidance:
    """llguidance, as the engine uses it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._grammars = Grammars(tokenizer, len(tokenizer.hf), frozenset({tokenizer.hf.eos_token_id}))
        self._grammars.start(StructuredOutputsParams(choice=["a"]))  # reads the vocabulary

    def start(self, schema: Schema) -> Walk:
        """Compile."""
        try:
            state = self._grammars.start(StructuredOutputsParams(json=schema))
        except RequestError as error:
            raise RefusedError(str(error)) from error
        matcher = state.matcher
        vocabulary = state.vocabulary

        class _Walk:
            def mask(self) -> NDArray[np.int32]:
                return np.asarray(vocabulary.allowed(matcher))

            def take(self, token: int) -> None:
                assert matcher.consume_token(token)

        return _Walk()


class XGrammar:
    """xgrammar, as its README uses it, with one thread and as little white space as the engine allows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self._library = xgrammar
        self._info = xgrammar.TokenizerInfo.from_huggingface(tokenizer.hf, vocab_size=len(tokenizer.hf))
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def start(self, schema: Schema) -> Walk:
        """Compile."""
        library = self._library
        try:
            grammar = self._compiler.compile_json_schema(json.dumps(schema), max_whitespace_cnt=2)
        except (RuntimeError, ValueError) as error:
            raise RefusedError(str(error)) from error
        matcher = library.GrammarMatcher(grammar)
        bits = library.allocate_token_bitmask(1, self._info.vocab_size)

        class _Walk:
            def mask(self) -> NDArray[np.int32]:
                bits.fill_(-1)
                matcher.fill_next_token_bitmask(bits)
                return np.asarray(bits.numpy()[0])

            def take(self, token: int) -> None:
                assert matcher.accept_token(token)

        return _Walk()


LIBRARIES: dict[str, Callable[[Tokenizer], Any]] = {"llguidance": LLGuidance, "xgrammar": XGrammar}


def main() -> None:
    """Compare the libraries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vocab-size", type=int, help="default: that of the demo")
    parser.add_argument("--texts", type=int, default=4, help="of each schema")
    parser.add_argument("--max-tokens", type=int, default=400)
    args = parse_args(parser, texts=1, max_tokens=20)
    tokenizer = Tokenizer(Path(checkpoint("demo")))
    if args.vocab_size:
        train(tokenizer, args.vocab_size)
    rows = []
    for name, library in LIBRARIES.items():
        try:
            made = library(tokenizer)
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        for kind, schemas in KINDS.items():
            rows.append({"library": name, "schemas": kind, **measure(made, schemas, tokenizer, args)})
    print_table(rows)
    print_json({"benchmark": "grammar_libraries", "libraries": rows, **vars(args)})


def train(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Replace the vocabulary by byte-level BPE of another size."""
    files = [str(file) for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    texts = (Path(file).read_text(encoding="utf-8", errors="replace") for file in files)
    tokenizer.hf = tokenizer.hf.train_new_from_iterator(texts, vocab_size)


def measure(library: Any, schemas: list[Schema], tokenizer: Tokenizer, args: Any) -> dict[str, Any]:
    """Judge random texts of each schema, and time the library."""
    found = dict.fromkeys(("valid", "refused", "wrong", "cut"), 0)
    compile_ms, mask_us = list[float](), list[float]()
    for i, schema in enumerate(tqdm(schemas)):
        for seed in range(args.texts):
            started = time.perf_counter()
            try:
                walk = library.start(schema)
                first = walk.mask()
            except RefusedError:
                found["refused"] += 1
                break
            if seed == 0:  # the engine keeps what it compiled
                compile_ms.append((time.perf_counter() - started) * 1e3)
            rng = np.random.default_rng([i, seed])
            text = random_text(walk, first, tokenizer, rng, args.max_tokens, mask_us)
            found["cut" if text is None else "valid" if is_valid(text, schema) else "wrong"] += 1
    return {
        **found,
        "compile ms": statistics.median(compile_ms),
        "at most ms": max(compile_ms),
        "mask us": statistics.median(mask_us),
        "at most us": max(mask_us),
    }


def random_text(
    walk: Walk,
    mask: NDArray[np.int32],
    tokenizer: Tokenizer,
    rng: np.random.Generator,
    max_tokens: int,
    times: list[float],  # the microseconds of each mask are appended
) -> str | None:
    """Draw allowed tokens with equal probability. Return the text, or None if it does not end."""
    token_ids = list[int]()
    for _ in range(max_tokens):
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            return None
        token = int(rng.choice(allowed))
        if token == tokenizer.hf.eos_token_id:
            return str(tokenizer.hf.decode(token_ids))
        token_ids.append(token)
        walk.take(token)
        started = time.perf_counter()
        mask = walk.mask()
        times.append((time.perf_counter() - started) * 1e6)
    return None


def is_valid(text: str, schema: Schema) -> bool:
    """Return whether jsonschema accepts the text."""
    try:
        VALIDATOR(schema, format_checker=FORMATS).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    main()
