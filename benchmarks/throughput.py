"""How fast is the engine on a ragged workload, beside transformers on the same checkpoint?

    python -m benchmarks.throughput --model tinyllama-1.1b --num-requests 16

Requests of nano-vllm's benchmark, greedy, EOS ignored, each to its own length. Three systems, each in a
process of its own that loads the model once; then they take turns, so that a machine whose speed drifts is
fair to all:

    paged               this engine
    generate            transformers generate(): padded static batches, of the size that does best here
    generate_batch      transformers' continuous batching

Counted are the tokens that were asked for, over the time from the first prompt to the last token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import (
    Workload,
    checkpoint,
    nano_vllm_workload,
    peak_rss_mib,
    print_json,
    print_table,
)

SYSTEMS = ("paged", "generate", "generate_batch")
Tokens = list[list[int]]


def main() -> None:
    """Run the rounds, or be one of the workers."""
    args = parse_args()
    if args.worker:
        serve(args)
        return
    model = checkpoint(args.model)
    workers = {name: Worker(name, model, args) for name in SYSTEMS if name in ("paged", *args.systems)}
    if "generate" in workers:
        choose_static_batch(workers["generate"], sorted({min(n, args.num_requests) for n in args.static}))
    for worker in workers.values():
        worker.run()  # warm-up, and the tokens to compare
    check_same_tokens(workers)
    times: dict[str, list[float]] = {name: [] for name in workers}
    for round_ in range(args.rounds):
        for name, worker in workers.items():
            times[name].append(worker.run()["seconds"])
            print(f"round {round_ + 1}/{args.rounds} {name}: {times[name][-1]:.2f} s", flush=True)
    report(args, workers, times)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, tinyllama-1.1b, llama-15m or a directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--scale", type=float, default=0.25, help="of nano-vllm's lengths, 100 to 1024")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--static", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64], help="batches to try")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser.parse_args()


class Worker:
    """One system in its own process, which runs the workload whenever it is told to."""

    def __init__(self, name: str, model: str, args: argparse.Namespace) -> None:
        self.name, self.dtype, self.batch_size, self.last = name, args.dtype, args.num_requests, {}
        command = [sys.executable, "-m", "benchmarks.throughput", "--worker", name, "--model", model]
        for option in ("dtype", "num_requests", "scale", "block_size"):
            command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self) -> dict[str, Any]:
        """Run the workload once."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(self.batch_size, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                self.last = json.loads(line)
                return self.last
        raise SystemExit(f"the worker for {self.name} died")


def serve(args: argparse.Namespace) -> None:
    """Be a worker: load once, then answer every line of input with one run."""
    workload = nano_vllm_workload(args.num_requests, args.scale, vocab_size(args.model))
    run = {"paged": paged_runner, "generate": static_runner, "generate_batch": continuous_runner}[args.worker]
    generate = run(args, workload)
    for line in sys.stdin:
        started = time.perf_counter()
        tokens = generate(int(line))
        seconds = time.perf_counter() - started
        assert [len(t) for t in tokens] == workload.max_tokens, "a system generated too little"
        print_json({"seconds": seconds, "peak_rss_mib": peak_rss_mib(), "tokens": tokens})


def paged_runner(args: argparse.Namespace, workload: Workload) -> Callable[[int], Tokens]:
    """This engine; it needs to be told no batch size."""
    from paged import LLMEngine, SamplingParams

    engine = LLMEngine(args.model, dtype=args.dtype, block_size=args.block_size, skip_tokenizer_init=True)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.max_tokens]

    def run(_: int) -> Tokens:
        engine.reset_prefix_cache()  # every round computes everything, as the others do
        outputs = engine.generate(workload.prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    return run


def hf_model(args: argparse.Namespace) -> Any:
    """The reference model, with its default attention (SDPA)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def static_runner(args: argparse.Namespace, workload: Workload) -> Callable[[int], Tokens]:
    """generate() on padded batches of prompts of similar length, each as long as its longest output."""
    model = hf_model(args)
    order = sorted(range(len(workload.prompts)), key=lambda i: len(workload.prompts[i]))

    def run(batch_size: int) -> Tokens:
        tokens: Tokens = [[] for _ in order]
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            prompts = [torch.tensor(workload.prompts[i]) for i in chosen]
            ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
            lengths = torch.tensor([len(p) for p in prompts])
            mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]).long()
            longest = max(workload.max_tokens[i] for i in chosen)
            out = model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)
            for i, row in zip(chosen, out[:, ids.shape[1] :].tolist(), strict=True):
                tokens[i] = row[: workload.max_tokens[i]]
        return tokens

    return run


def continuous_runner(args: argparse.Namespace, workload: Workload) -> Callable[[int], Tokens]:
    """transformers' continuous batching, each request with its own max_new_tokens."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = hf_model(args)
    # A pool that fits the workload: its own default, most of the free memory, is written to at the start.
    longest = [len(p) + n for p, n in zip(workload.prompts, workload.max_tokens, strict=True)]
    num_blocks = sum(-(-n // args.block_size) + 1 for n in longest)
    batching = ContinuousBatchingConfig(
        page_size=args.block_size, num_blocks=num_blocks, max_batch_tokens=512, allow_block_sharing=False
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)

    def run(_: int) -> Tokens:
        found: dict[str, list[int]] = {}
        with (
            torch.no_grad(),
            model.continuous_batching_context_manager(
                generation_config=greedy, continuous_batching_config=batching, block=True, timeout=60
            ) as manager,
        ):
            for i, (prompt, n) in enumerate(zip(workload.prompts, workload.max_tokens, strict=True)):
                manager.add_request(prompt, request_id=str(i), max_new_tokens=n, eos_token_id=-1)
            while len(found) < len(workload.prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    assert result.error is None, result.error
                    found[result.request_id] = result.generated_tokens
                assert result is not None or manager.is_running(), "continuous batching stopped"
        return [found[str(i)] for i in range(len(workload.prompts))]

    return run


def choose_static_batch(worker: Worker, sizes: list[int]) -> None:
    """Let generate() have the batch size that is best for it on this workload."""
    seconds = {}
    for worker.batch_size in sizes:
        seconds[worker.batch_size] = worker.run()["seconds"]
        print(f"generate with batches of {worker.batch_size}: {seconds[worker.batch_size]:.2f} s", flush=True)
    worker.batch_size = min(seconds, key=lambda size: seconds[size])


def check_same_tokens(workers: dict[str, Worker]) -> None:
    """In float32 all systems must agree; in bfloat16 sums in another order may turn a near tie."""
    reference = workers["paged"].last["tokens"]
    for name, worker in workers.items():
        same = sum(a == b for a, b in zip(reference, worker.last["tokens"], strict=True))
        print(f"{name}: {same} of {len(reference)} requests have the tokens of paged")
        assert same == len(reference) or worker.dtype != "float32", "float32 must give the same tokens"


def report(args: argparse.Namespace, workers: dict[str, Worker], times: dict[str, list[float]]) -> None:
    """Table and JSON."""
    workload = nano_vllm_workload(args.num_requests, args.scale, vocab_size(checkpoint(args.model)))
    rows = []
    for name, worker in workers.items():
        seconds = statistics.median(times[name])
        ratios = [theirs / ours for ours, theirs in zip(times["paged"], times[name], strict=True)]
        rows.append(
            {
                "system": name if name != "generate" else f"generate({worker.batch_size})",
                "tokens/s": workload.num_output_tokens / seconds,
                "seconds": seconds,
                "paged is faster by": f"{statistics.median(ratios):.2f}",
                "range": f"{min(ratios):.2f}-{max(ratios):.2f}",
                "peak MiB": worker.last["peak_rss_mib"],
            }
        )
    lengths = [len(p) + n - 1 for p, n in zip(workload.prompts, workload.max_tokens, strict=True)]
    allocated = sum(-(-n // args.block_size) * args.block_size for n in lengths)
    waste = allocated / sum(lengths) - 1
    print(
        f"\n{args.model}, {args.dtype}: {args.num_requests} requests, "
        f"{sum(map(len, workload.prompts)):,} prompt tokens, {workload.num_output_tokens:,} new tokens"
    )
    print_table(rows)
    print(f"KV slots allocated and never used, over slots used: {waste:.1%} at block size {args.block_size}")
    result = {"benchmark": "throughput", "threads": torch.get_num_threads(), "kv_waste": waste, "rows": rows}
    print_json({**result, **{k: v for k, v in vars(args).items() if k != "worker"}})


def vocab_size(model: str) -> int:
    """From the checkpoint's config."""
    with open(f"{model}/config.json") as file:
        return int(json.load(file)["vocab_size"])


if __name__ == "__main__":
    main()
