"""One start of an engine, with or without kept weights; prints seconds and memory as a line of JSON.

    python -P one_kept_start.py MODEL CACHE [NAME=VALUE]...

CACHE: the folder of kept weights; empty: none. The names are those of options of the engine, and

    wait     until the weights are kept
    hold     the engine until stdin ends
    compare  so many decodes with those of an engine whose weights were packed, in turns
"""

import json
import statistics
import sys
import time
from pathlib import Path

from benchmarks.common import peak_rss_mib

STARTED = (
    time.time()
    - time.clock_gettime(time.CLOCK_MONOTONIC)
    + float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / 100
)  # when this process was made


def main() -> None:
    """Start an engine, generate a token, and do what is asked."""
    model, cache, *rest = sys.argv[1:]
    options = dict(each.split("=", 1) for each in rest)
    wait, hold, compare = (int(options.pop(name, 0)) for name in ("wait", "hold", "compare"))
    import paged
    from paged.runner import load

    load.LEAST_KEPT_BYTES = 0  # for a rehearsal

    def start(kept: str) -> paged.LLMEngine:
        return paged.LLMEngine(
            model,
            device="cpu",
            num_blocks=64,
            max_model_len=256,
            skip_tokenizer_init=True,
            weights_cache=kept or False,
            **options,
        )

    engine = start(cache)
    ready = time.time() - STARTED
    generate(paged, engine, 1)
    found = {"ready s": ready, "first token s": time.time() - STARTED, "peak MiB": peak_rss_mib()}
    kept = engine.runner.model.kept_weights
    if wait:
        assert kept is not None
        assert kept.wait() is not None, "the weights were not kept"
    found["private MiB"] = memory("Private_Clean", "Private_Dirty") / 1024
    found["pages"] = "huge" if memory("FilePmdMapped") else "memory"
    if hold:
        print("ready", flush=True)
        sys.stdin.read()
    if compare:
        packed = start("")
        ratios = []
        tokens = generate(paged, engine, 4)[1], generate(paged, packed, 4)[1]
        assert tokens[0] == tokens[1], "kept weights give other tokens"
        for _ in range(compare):
            own, other = generate(paged, engine, 12)[0], generate(paged, packed, 12)[0]
            ratios.append(other / own)
        found["decode"] = statistics.median(ratios)
    print(json.dumps(found))


def generate(paged, engine, count: int) -> tuple[float, list[int]]:
    """Generate tokens. Return the seconds that it took, and the tokens."""
    params = paged.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    started = time.perf_counter()
    (output,) = engine.generate([[5, 6, 7]], params, use_tqdm=False)
    return time.perf_counter() - started, output.outputs[0].token_ids


def memory(*names: str) -> int:
    """Return what the system says of this process, in KiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.split(":")[0] in names)


if __name__ == "__main__":
    main()
