"""What do scheduling and block management cost the host? No model, no device.

    python -m benchmarks.scheduler

Microseconds of `schedule` + `update` with 64, 256 and 1,024 requests decoding, 10,000 waiting and a pool of a
million blocks, compared with the plain loop of a small engine (as nano-vllm's: pop, check, allocate, append;
a prefix cache on hashes; no policies, no limits, no swapping). Then the effect of the sizes of pool, queue
and context, the look-up of a prefix of 32,768 tokens, the bytes of a block, and the savings by sliding
windows.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable

from benchmarks.common import parse_args, print_json, print_table
from paged.blocks.manager import BlockManager
from paged.blocks.pool import BlockPool
from paged.blocks.prefix_chain import PrefixChain
from paged.requests.request import Request, RequestInputs
from paged.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
NEVER_STOPS = 20_000


def main() -> None:
    """Time steps, look-ups and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num-blocks", type=int, default=1_000_000)
    parser.add_argument("--num-waiting", type=int, default=10_000)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=300)
    args = parse_args(parser, num_blocks=50_000, num_waiting=10, prompt_len=32, steps=3)
    rows = []
    for num_running in (64, 256, 1024):
        ours, plain = Ours(num_running, args), Plain(num_running, args)
        rows.append({"running": num_running, **side_by_side(args.steps, paged=ours.step, plain=plain.step)})
    print_table(rows)
    growth = growth_of_64(args)
    print_table([growth])
    other = {
        **prefix_lookup(args.num_blocks),
        "bytes_per_cached_block": bytes_per_block(args.num_blocks),
        **window_memory(),
    }
    print_table([{"what": name, "value": value} for name, value in other.items()])
    print_json({"benchmark": "scheduler", "step_us": rows, "growth_us": growth, **other, **vars(args)})


def side_by_side(num_steps: int, **steps: Callable[[], None]) -> dict[str, float]:
    """Time each in turn. Return medians and 99th percentiles in microseconds, and first median / last."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(num_steps):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - started) * 1e6)
    row: dict[str, float] = {}
    for name, values in times.items():
        row[f"{name}_us"] = statistics.median(values)
        row[f"{name}_p99_us"] = statistics.quantiles(values, n=100)[-1]
    first, *_, last = (row[f"{name}_us"] for name in steps)
    return {**row, "ratio": first / last}


def growth_of_64(args: argparse.Namespace) -> dict[str, float]:
    """Time a step of 64 requests, also with 1/100 of the pool, no queue, and 8 times the context."""
    variants = {
        "as_above": {},
        "small_pool": {"num_blocks": max(args.num_blocks // 100, 5000)},
        "no_queue": {"num_waiting": 0},
        "long_context": {"prompt_len": 8 * args.prompt_len},
    }
    steps = {name: Ours(64, argparse.Namespace(**{**vars(args), **v})).step for name, v in variants.items()}
    row = side_by_side(args.steps, **steps)
    return {name: row[f"{name}_us"] for name in variants}


def prompt(rng: random.Random, length: int) -> list[int]:
    """Return random tokens."""
    return [rng.randrange(32_000) for _ in range(length)]


class Ours:
    """The real scheduler, with every running request decoding."""

    def __init__(self, num_running: int, args: argparse.Namespace) -> None:
        rng = random.Random(0)
        manager = BlockManager(args.num_blocks, BLOCK_SIZE, max_step_tokens=10**7)
        self.scheduler = Scheduler(manager, max_num_seqs=num_running, max_num_batched_tokens=10**7)
        for i in range(num_running + args.num_waiting):
            tokens = prompt(rng, args.prompt_len + i % BLOCK_SIZE if i < num_running else 32)
            self.scheduler.add(Request(RequestInputs(prompt_token_ids=tokens, max_total_tokens=NEVER_STOPS)))
        for _ in range(3):
            self.step()
        assert len(self.scheduler.running) == num_running
        assert self.scheduler.num_waiting == args.num_waiting

    def step(self) -> None:
        """Give every running request one token."""
        schedule = self.scheduler.schedule()
        self.scheduler.update(schedule, [7] * len(schedule.sampled_requests))


class Plain:
    """The plain loop."""

    def __init__(self, num_running: int, args: argparse.Namespace) -> None:
        rng = random.Random(0)
        self.free = deque(range(args.num_blocks))
        self.hashes = dict[int, int]()
        self.refcounts = [0] * args.num_blocks
        self.waiting: deque[PlainSequence] = deque()
        self.running: deque[PlainSequence] = deque()
        for i in range(num_running):
            sequence = PlainSequence(prompt(rng, args.prompt_len + i % BLOCK_SIZE))
            for _ in range(-(-len(sequence.tokens) // BLOCK_SIZE)):
                self.append_block(sequence)
            self.running.append(sequence)

    def append_block(self, sequence: PlainSequence) -> None:
        """Allocate a block for a sequence."""
        block = self.free.popleft()
        self.refcounts[block] = 1
        sequence.blocks.append(block)

    def step(self) -> None:
        """Schedule every sequence, then give each a token."""
        scheduled = []
        while self.running:
            sequence = self.running.popleft()
            if len(sequence.tokens) % BLOCK_SIZE == 1:
                self.append_block(sequence)
            elif len(sequence.tokens) % BLOCK_SIZE == 0:
                tokens = tuple(sequence.tokens[-BLOCK_SIZE:])
                sequence.hash = hash((sequence.hash, tokens))
                self.hashes[sequence.hash] = sequence.blocks[-1]
            scheduled.append(sequence)
        self.running.extend(scheduled)
        for sequence in scheduled:
            sequence.append(7)
            if sequence.num_tokens == NEVER_STOPS or sequence.last_token == -1:
                self.running.remove(sequence)


class PlainSequence:
    """A sequence of the plain loop: tokens and blocks."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.blocks = list[int]()
        self.hash = 0
        self.num_tokens = len(tokens)
        self.last_token = tokens[-1]

    def append(self, token: int) -> None:
        """Append one token."""
        self.tokens.append(token)
        self.last_token = token
        self.num_tokens += 1


def prefix_lookup(num_blocks: int, length: int = 32_768) -> dict[str, float]:
    """Return the milliseconds to hash a prompt, done once, and to find it in the cache."""
    rng = random.Random(0)
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    tokens = prompt(rng, length + 1)
    first = manager.open(tokens)
    manager.start(first, manager.match(first, tokens))
    assert manager.grow(first, 0, length, [])
    manager.register(first, tokens, length)
    hashing, finding = [], []
    for _ in range(50):
        started = time.perf_counter()
        seq = manager.open(tokens)
        hashed = time.perf_counter()
        hits = manager.match(seq, tokens)
        finding.append((time.perf_counter() - hashed) * 1e3)
        hashing.append((hashed - started) * 1e3)
        assert len(hits[0]) == length // BLOCK_SIZE
    return {
        f"hash_{length}_tokens_ms": statistics.median(hashing),
        f"look_up_{length}_tokens_ms": statistics.median(finding),
    }


def window_memory(num_tokens: int = 131_072, window: int = 1024, chunk: int = 2048) -> dict[str, float]:
    """Count the blocks of one long sequence in the layout of Gemma 3 27B: 10 full layers, 52 sliding ones.

    In groups of 10 layers: one full and six sliding, the last of which has two layers.
    """
    share = {}
    for name, windows in (("all_full", [None] * 7), ("windows", [None, *[window] * 6])):
        manager = BlockManager(10**5, BLOCK_SIZE, windows=windows, max_step_tokens=chunk)
        tokens = [1] * num_tokens
        seq = manager.open(tokens)
        manager.start(seq, [[] for _ in windows])
        for start in range(0, num_tokens, chunk):
            assert manager.grow(seq, start, start + chunk, [])
        share[name] = seq.num_blocks
    # Without groups, 62 layers would take 6.2 blocks for every 7 blocks of 7 groups.
    return {"blocks_of_131072_tokens_all_full": share["all_full"] * 6.2 / 7, "with_windows": share["windows"]}


def bytes_per_block(num_blocks: int) -> float:
    """Return the bytes per block of a pool in which every block is cached."""
    tracemalloc.start()
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    for start in range(0, num_blocks, 1000):
        chain = PrefixChain()
        blocks = pool.allocate(min(1000, num_blocks - start))
        assert blocks is not None
        chain.extend([start, *range(len(blocks) * BLOCK_SIZE)], len(blocks), BLOCK_SIZE)
        parent = 0
        for index, block in enumerate(blocks):
            parent = pool.serial(pool.cache(block, chain, index, parent))
        pool.free(blocks)
        del chain, blocks
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pool.num_cached == num_blocks
    return size / num_blocks


if __name__ == "__main__":
    main()
