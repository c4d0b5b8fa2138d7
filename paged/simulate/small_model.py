"""The cost of steps of a small model, by computing some: products alone say little about them.

In a step of a few megabytes, scheduling, launches, and attention that is in the caches count as much.
"""

from __future__ import annotations

import time
from dataclasses import fields
from typing import TYPE_CHECKING

from ..options.config import EngineConfig
from ..options.sampling_params import SamplingParams
from ..runner.sizes import Sizes
from .cost import Coefficients

if TYPE_CHECKING:
    from ..engine.engine import LLMEngine

MOST_BYTES = 64 * 2**20  # of the weights of a small model: it loads within a second
_NUM_SEQS = 8
_NUM_STEPS = 24
_NUM_ROUNDS = 3  # others that use the machine make some slower
_SHORT = 8  # a fraction of the length: contexts and prompts of two lengths are compared


def measure_steps(config: EngineConfig, sizes: Sizes, length: int) -> Coefficients:
    """Measure decodes of 1 and 8 sequences, both short and of `length` tokens, and prompts of two lengths."""
    from ..engine.engine import LLMEngine

    num_seqs = min(_NUM_SEQS, config.num_seats)
    length = max(2, length - _NUM_STEPS)
    short = max(1, length // _SHORT)
    num_groups = len(sizes.model.layer_groups)
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    options |= {
        "num_blocks": (num_seqs + 1) * num_groups * (1 + (length + _NUM_STEPS) // sizes.block_size),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "weights_cache": False,
    }
    with LLMEngine(**options) as engine:
        one_short, one = (_decode_s(engine, 1, each) for each in (short, length))
        many_short, many = (_decode_s(engine, num_seqs, each) for each in (short, length))
        prompt, half = (_prompt_s(engine, each) for each in (length, length // 2))
    # A decode's token reads and sees its context. The mean stands for one sequence, whose context is divided
    # among the cores, and for many.
    of_key = max(0.0, (one - one_short) + (many - many_short) / num_seqs) / 2 / (length - short)
    of_seq = max(0.0, (many_short - one_short) / (num_seqs - 1) - of_key * short) if num_seqs > 1 else 0.0
    step_s = max(0.0, one_short - of_seq - of_key * short)
    # A prompt of n tokens has about n²/2 pairs: p = a n + b n²/2 for two lengths.
    rates = (prompt - step_s) / length, (half - step_s) / (length // 2)
    pair_s = max(0.0, 2 * (rates[0] - rates[1]) / (length - length // 2))
    token_s = max(0.0, rates[0] - pair_s * length / 2)
    return Coefficients(
        step_s=step_s,
        token_s=token_s,
        seq_s=max(0.0, of_seq - token_s),
        context_s=max(0.0, of_key - pair_s),
        pair_s=pair_s,
    )


def _decode_s(engine: LLMEngine, num_seqs: int, length: int) -> float:
    """Return the lower quartile of the seconds of steps in which all sequences decode, of the best round."""
    best = float("inf")
    for _ in range(_NUM_ROUNDS):
        _add(engine, num_seqs, length, _NUM_STEPS)
        times = []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - start
            if len(outputs) == num_seqs and all(len(output.outputs[0].token_ids) > 1 for output in outputs):
                times.append(seconds)
        best = min(best, sorted(times)[len(times) // 4])
    return best


def _prompt_s(engine: LLMEngine, length: int) -> float:
    """Return the shortest time of several prompts of this length."""
    best = float("inf")
    for _ in range(_NUM_ROUNDS):
        _add(engine, 1, length, 1)
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        best = min(best, time.perf_counter() - start)
    return best


def _add(engine: LLMEngine, num_seqs: int, length: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for i in range(num_seqs):
        tokens = [(7 * i + 31 * j) % engine.model_config.vocab_size for j in range(length)]
        engine.add_request(str(i), tokens, params)
