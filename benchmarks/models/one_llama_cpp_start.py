"""One start of llama.cpp with a GGUF file; prints seconds and memory as a line of JSON.

    python one_llama_cpp_start.py MODEL TYPE THREADS NUM_TOKENS

Runs in the environment that `make peers PEERS=llama-cpp` makes. The seconds count from before its library is
loaded, as a program of its own has no Python to start. NUM_TOKENS: of its KV cache.
"""

import json
import sys
import time

from benchmarks.common import peak_rss_mib
from benchmarks.peers.llama_cpp_peer import LlamaCpp
from benchmarks.peers.worker import Options


def main() -> None:
    """Load the model, generate a token."""
    import numpy as np  # noqa: F401  (of this script, not of llama.cpp)

    model, dtype, threads, num_tokens = sys.argv[1:]
    harness_mib = peak_rss_mib()
    started = time.perf_counter()
    size = int(num_tokens)
    options = Options(
        model=model, dtype=dtype, threads=int(threads), num_requests=1, num_tokens=size, longest=size
    )
    engine = LlamaCpp(options)
    ready = time.perf_counter() - started
    _, (first,) = engine.run([[5, 6, 7]], [1], None)
    found = {"ready s": ready, "first token s": first - started, "peak MiB": peak_rss_mib() - harness_mib}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
