"""What does quantisation cost the demo model, in bits per byte of held-out text?

    python -m benchmarks.perplexity                 # ten minutes; one with --share 0.1
    python -m benchmarks.perplexity --forms float32 int4-g64 int4-g128   # other groups, as an experiment
    python -m benchmarks.perplexity --forms float32 kv-bfloat16 kv-int8 kv-fp8   # only the KV cache

The text is the part of this Python's standard library that benchmarks/demo/train.py holds out. The engine
scores it in windows of its longest context; each window begins with the last token of the one before.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.common import print_json, print_table
from benchmarks.demo.train import encode, read_corpus
from paged import LLMEngine
from paged.model.config import DEMO
from paged.model.weights.quantization import Int4Weight

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
    args = parser.parse_args()
    stream, num_bytes = held_out()
    results = []
    for name in args.forms:
        started = time.perf_counter()
        size = int(name.partition("-g")[2] or 0)
        with groups_of(size or Int4Weight.GROUP):
            # Panels have groups of one size only.
            nats = score(FORMS[name], stream, args.share, backend="torch" if size else "auto")
        results.append(
            {
                "form": name,
                "nats per token": round(nats, 4),
                "over the first": round(nats - results[0]["nats per token"] if results else 0.0, 4),
                "bits per byte": round(nats / math.log(2) * (len(stream) - 1) / num_bytes, 4),
                "seconds": round(time.perf_counter() - started),
            }
        )
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


def score(form: dict[str, str], stream: list[int], share: float, *, backend: str) -> float:
    """Return nats per token."""
    options: dict[str, Any] = {"dtype": "float32", **form, "attention_backend": backend}
    options["skip_tokenizer_init"] = True
    engine = LLMEngine("demo", device="cpu", block_size=64, enable_prefix_caching=False, **options)
    length = engine.max_model_len - 1
    nats, num_tokens = 0.0, 0
    for start in range(0, len(stream) - 1, length * max(1, round(1 / share))):
        rest = stream[start + 1 : start + 1 + length]
        (output,) = engine.score([stream[start]], [rest], use_tqdm=False)
        assert output.logprob is not None, output.error
        nats, num_tokens = nats - output.logprob, num_tokens + len(rest)
    return nats / num_tokens


if __name__ == "__main__":
    main()
