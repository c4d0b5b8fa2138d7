"""What does the server cost?

    python -m benchmarks.server                     the front end alone, and with the engine
    python -m benchmarks.server --section vllm      beside vLLM's server (needs `make peers`)

front-end  the front end over an engine that answers at once: whole completions of 100 token ids, whole chats
           of 2.5 KB with template and tokenizer, server-sent events, and the memory of idle streams
engine     64 streams over HTTP and `generate`, in turns; the first token of one request over HTTP and of
           AsyncLLMEngine, in turns
vllm       `vllm bench serve` against `paged serve` and `vllm serve`, in turns, at several numbers of clients
budgets    the same client against `paged serve` alone, with the most of --clients, for several numbers of
           tokens in a step (--max-num-batched-tokens)
aggressors a victim's completions of 8 tokens over HTTP, alone and beside clients that ask for much at once;
           for how long they held the front end's event loop, and the longest step. Nothing is pinned.
service    how long streams pause when their engine process is killed or stopped, and how long going on takes
           beside the prefill of as many prompts; a tenant's first tokens beside another one's flood; /health
           beside 1,000 connections that send a byte a second
windows    whether waiting for more requests before a step would help: arrivals that the sender groups into
           windows of some milliseconds, at several rates
keys       the front end alone, without and with a file of 1,000 keys and limits, in turns
page       steps of 64 and of 256 requests, in turns without and with the page open in two browsers

Front end, client and engine are processes of their own: the front end has the last core, the client another
one; beside an engine, which has all the others, front end and client share it. First it is checked that
responses are right. On a machine that does other things, only the ratios and the processor time count.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.common import checkpoint, print_json, print_table
from benchmarks.server import front_end_alone, with_engine
from benchmarks.server.cores import Cores

SECTIONS = ("front-end", "engine", "vllm", "budgets", "aggressors", "service", "windows", "keys", "page")


def main() -> None:
    """Measure the sections and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--section", choices=SECTIONS, action="append", help="default: front-end and engine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="tinyllama-1.1b", help="of the sections with an engine")
    parser.add_argument("--num-streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-first", type=int, default=20, help="requests whose first token is timed")
    parser.add_argument("--num-idle", type=int, default=2000, help="idle streams")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=[512, 1024, 2048],
        help="of the section budgets: tokens a step",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each aggressor")
    parser.add_argument("--rate", type=float, default=10.0, help="the victim's requests a second")
    parser.add_argument("--quick", action="store_true", help="few requests: checks them, and proves no speed")
    args = parser.parse_args()
    sections, cores = args.section or ["front-end", "engine"], Cores.here()
    result: dict[str, Any] = {"benchmark": "server", **vars(args)}
    if "front-end" in sections:
        share, num_idle = (0.02, 50) if args.quick else (1.0, args.num_idle)
        rows = front_end_alone.measure("demo", cores, 1 if args.quick else args.rounds, share=share)
        idle = front_end_alone.measure_idle("demo", cores, num_idle)
        print_table(rows)
        print()
        print_table([idle])
        result |= {"front_end": rows, "idle": idle}
    if "engine" in sections:
        from benchmarks.server.text_checkpoint import text_checkpoint

        row = with_engine.measure(
            checkpoint("demo") if args.quick else text_checkpoint(args.model),
            cores,
            rounds=1 if args.quick else args.rounds,
            num_streams=8 if args.quick else args.num_streams,
            max_tokens=8 if args.quick else args.max_tokens,
            num_first=2 if args.quick else args.num_first,
        )
        print()
        print_table([row])
        result["engine"] = row
    if "vllm" in sections:
        from benchmarks.server import beside_vllm

        rows = beside_vllm.measure(args.model, args.clients, rounds=min(args.rounds, 2))
        print()
        print_table(rows)
        result["vllm"] = rows
    if "budgets" in sections:
        from benchmarks.server import beside_vllm

        rows = beside_vllm.measure_budgets(args.model, max(args.clients), args.budgets)
        print()
        print_table(rows)
        result["budgets_alone"] = rows
    if "aggressors" in sections:
        from benchmarks.server import aggressors

        rows = aggressors.measure("demo", seconds=1.0 if args.quick else args.seconds, rate=args.rate)
        print()
        print_table(rows)
        result["aggressors"] = rows
    if "keys" in sections:
        from benchmarks.server import keys

        share = 0.02 if args.quick else 1.0
        row = keys.measure("demo", cores, 1 if args.quick else args.rounds, share=share)
        print()
        print_table([row])
        result["keys"] = row
    if "page" in sections:
        from benchmarks.server import page

        rounds = 1 if args.quick else args.rounds
        rows = [
            page.measure("demo", cores, rounds, num_requests=num, max_tokens=max_tokens)
            for num, max_tokens in ([(16, 200)] if args.quick else [(64, 300), (256, 100)])
        ]
        print()
        print_table(rows)
        result["page"] = rows
    if "service" in sections:
        from benchmarks.server import service

        few = {"num_streams": 4 if args.quick else 16}
        rows = service.measure("demo", max_tokens=300 if args.quick else 1500, **few)
        print()
        print_table(rows)
        num_streams, num_tokens = (4, 100) if args.quick else (args.num_streams, 1000)
        row = service.measure_catch_up("demo", num_streams=num_streams, num_tokens=num_tokens)
        print()
        print_table([row])
        result |= {"service": rows, "catch_up": row}
        from benchmarks.server import flood, slow_heads

        rows = flood.measure("demo", seconds=1.0 if args.quick else args.seconds, rate=args.rate)
        print()
        print_table(rows)
        head_timeout_s, num_slow = (2.0, 50) if args.quick else (30.0, 1000)
        slow = slow_heads.measure("demo", num_connections=num_slow, head_timeout_s=head_timeout_s)
        print()
        print_table(slow)
        result |= {"flood": rows, "slow_heads": slow}
    if "windows" in sections:
        from benchmarks.server import windows
        from benchmarks.server.text_checkpoint import text_checkpoint

        rows = windows.measure(
            checkpoint("demo") if args.quick else text_checkpoint(args.model),
            num_at_once=args.num_streams,
            seconds=0.2 if args.quick else args.seconds,
            rounds=1 if args.quick else args.rounds,
        )
        print()
        print_table(rows)
        result["windows"] = rows
    print_json(result)


if __name__ == "__main__":
    main()
