"""What does quantisation cost a model, in nats per token and perplexity?

    python -m benchmarks.perplexity                 # ten minutes; one with --share 0.1
    python -m benchmarks.perplexity --forms float32 int4-g64 int4-g128   # other groups, as an experiment
    python -m benchmarks.perplexity --forms float32 kv-bfloat16 kv-int8 kv-fp8   # only the KV cache
    python -m benchmarks.perplexity --model MODEL --forms bfloat16 int8-bfloat16 int4-bfloat16

The demo's text is the part of this Python's standard library that benchmarks/demo/train.py holds out. The
engine scores it in windows of its longest context; each window begins with the last token of the one before.

The text of another model is prose that every Python has, its language reference in pydoc_data.topics: windows
of 1,024 tokens, evenly spread, each after the token that begins a text. The weights of a GGUF file are read
as bfloat16, and quantised from there. What they lost before counts in no form, and 4 bits of what 4 bits made
lose little, so that the loss of a model that was never quantised may be larger: the demo is one.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.common import parse_args, print_json, print_table
from benchmarks.demo.train import encode, read_corpus
from paged import LLMEngine
from paged.architectures.config import DEMO
from paged.checkpoints.coded import CodedWeight, Weight
from paged.model.weights.choice import Forms
from paged.model.weights.forms import Role, WeightForm
from paged.model.weights.quantization import Int4Weight
from paged.runner import quantised

PROSE_WINDOW = 1024  # tokens
ROWS_AT_ONCE = 4096  # that become floats
# Options that differ from float32. int4-g64 and int4-g128 have groups that the engine has no option for.
FORMS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8-bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    "int4-bfloat16": {"dtype": "bfloat16", "quantization": "int4"},
    "int4-g64": {"quantization": "int4"},
    "int4-g128": {"quantization": "int4"},
    "kv-bfloat16": {"kv_cache_dtype": "bfloat16"},
    "kv-int8": {"kv_cache_dtype": "int8"},
    "kv-fp8": {"kv_cache_dtype": "fp8"},
}


def main() -> None:
    """Score the text in each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=["float32", "bfloat16", "int8", "int4"], choices=FORMS)
    parser.add_argument("--share", type=float, default=1.0, help="of the windows, evenly spread")
    parser.add_argument("--model", default="demo", help="a checkpoint or GGUF file (default: demo)")
    parser.add_argument("--tokens", type=int, default=20 * PROSE_WINDOW, help="of prose, for --model")
    args = parse_args(parser, forms=["float32", "int8"], share=0.01)
    is_demo = args.model == "demo"
    stream, num_bytes = held_out() if is_demo else ([], 0)
    results: list[dict[str, Any]] = []
    for name in args.forms:
        started = time.perf_counter()
        size = int(name.partition("-g")[2] or 0)
        with groups_of(size or Int4Weight.GROUP):
            # Panels have groups of one size only.
            options = {**FORMS[name], "attention_backend": "torch" if size else "auto"}
            if is_demo:
                nats = score(options, stream, args.share)
            else:
                nats = score_prose(args.model, options, args.tokens)
        over = nats - results[0]["nats per token"] if results else 0.0
        results.append({"form": name, "nats per token": round(nats, 4), "over the first": round(over, 4)})
        if is_demo:
            results[-1]["bits per byte"] = round(nats / math.log(2) * (len(stream) - 1) / num_bytes, 4)
        else:
            results[-1] |= {"perplexity": round(math.exp(nats), 3), "%": round(100 * math.expm1(over), 1)}
        results[-1]["seconds"] = round(time.perf_counter() - started)
        print(results[-1], flush=True)
    print_table([{key: str(value) for key, value in row.items()} for row in results])
    print_json({"benchmark": "perplexity", "results": results, **vars(args)})


def held_out() -> tuple[list[int], int]:
    """Return the held-out text as train.py encodes it, files separated by EOS, and its size in bytes."""
    texts = read_corpus(Path(sysconfig.get_path("stdlib")))[1]
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    return encode(tokenizer, texts).tolist(), sum(len(text.encode()) for text in texts)


@contextmanager
def groups_of(size: int) -> Iterator[None]:
    """Set the number of inputs that share a scale in int4, for which the engine has no option."""
    before = Int4Weight.GROUP
    Int4Weight.GROUP = size
    try:
        yield
    finally:
        Int4Weight.GROUP = before


def new_engine(model: str, options: dict[str, Any]) -> LLMEngine:
    """Make an engine, in float32 unless the options say otherwise."""
    options = {"dtype": "float32", **options}
    return LLMEngine(model, device="cpu", block_size=64, enable_prefix_caching=False, **options)


def score(form: dict[str, str], stream: list[int], share: float) -> float:
    """Return the demo's nats per token."""
    engine = new_engine("demo", {**form, "skip_tokenizer_init": True})
    length = engine.max_model_len - 1
    nats = 0.0
    num_tokens = 0
    for start in range(0, len(stream) - 1, length * max(1, round(1 / share))):
        rest = stream[start + 1 : start + 1 + length]
        (output,) = engine.score([stream[start]], [rest], use_tqdm=False)
        assert output.logprob is not None, output.error
        nats -= output.logprob
        num_tokens += len(rest)
    return nats / num_tokens


def score_prose(model: str, form: dict[str, str], num_tokens: int) -> float:
    """Return the nats per token of a model, on windows of prose."""
    dtype = getattr(torch, form.get("dtype", "float32"))
    with weights_as_floats(dtype) if model.endswith(".gguf") else nullcontext():
        engine = new_engine(model, {**form, "max_model_len": 2 * PROSE_WINDOW})
    tokenizer = engine.get_tokenizer()
    tokens = tokenizer("\n\n".join(topics.values()), add_special_tokens=False)["input_ids"]
    count = num_tokens // PROSE_WINDOW
    stride = len(tokens) // max(1, count)
    if count < 1 or stride < PROSE_WINDOW:
        raise SystemExit(
            f"--tokens must be from {PROSE_WINDOW} to {len(tokens)}, those of the text; got {num_tokens}"
        )
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    nats = 0.0
    for start in range(0, count * stride, stride):
        window = tokens[start : start + PROSE_WINDOW]
        (output,) = engine.score([first], [window], use_tqdm=False)
        assert output.logprob is not None, output.error
        nats -= output.logprob
    return nats / (count * PROSE_WINDOW)


@contextmanager
def weights_as_floats(dtype: torch.dtype) -> Iterator[None]:
    """Round weights in codes to bfloat16, in a model of any dtype: every form is made of the same floats."""
    make = Forms.make
    check = quantised.require_no_blocks

    def make_of_floats(self: Forms, weight: Weight, role: Role, num_precise: int = 0) -> WeightForm:
        if isinstance(weight, CodedWeight):
            floats = torch.empty(weight.shape, dtype=dtype)
            for start in range(0, len(floats), ROWS_AT_ONCE):
                rows = slice(start, start + ROWS_AT_ONCE)
                floats[rows] = weight.take(rows).floats().bfloat16()
            weight = floats
        return make(self, weight, role, num_precise)

    Forms.make = make_of_floats
    quantised.require_no_blocks = lambda *_: None  # type: ignore[assignment]
    try:
        yield
    finally:
        Forms.make = make
        quantised.require_no_blocks = check


if __name__ == "__main__":
    main()
