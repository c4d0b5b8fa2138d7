"""What does the server cost?

    python -m benchmarks.server                     the front end alone, and with the engine
    python -m benchmarks.server --section vllm      beside vLLM's server (needs `make peers`)

front-end  the front end over an engine that answers at once: whole completions of 100 token ids, whole chats
           of 2.5 KB with template and tokenizer, server-sent events, and the memory of idle streams
engine     64 streams over HTTP and `generate`, in turns; the first token of one request over HTTP and of
           AsyncLLMEngine, in turns
vllm       `vllm bench serve` against `paged serve` and `vllm serve`, in turns, at several numbers of clients
aggressors a victim's completions of 8 tokens over HTTP, alone and beside clients that ask for much at once;
           for how long they held the front end's event loop, and the longest step. Nothing is pinned.
bodies     the front end's memory and time for bodies of every shape, and how long they held its event loop;
           five at once beside a victim's completions
service    how long streams pause when their engine process is killed or stopped, and how long going on takes
           beside the prefill of as many prompts; a tenant's first tokens beside another one's flood
page       steps of 64 and of 256 requests, in turns without and with the page open in two browsers

Front end, client and engine are processes of their own: the front end has the last core, the client another
one; beside an engine, which has all the others, front end and client share it. First it is checked that
responses are right. On a machine that does other things, only the ratios and the processor time count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks.common import checkpoint, print_json, print_table
from benchmarks.server import front_end_alone, with_engine
from benchmarks.server.cores import Cores

Options = argparse.Namespace  # of the command; with --quick, rounds is 1


def main() -> None:
    """Measure the sections and print their tables."""
    args = _parsed()
    result: dict[str, Any] = {"benchmark": "server", **vars(args)}
    cores = Cores.here()
    if args.quick:
        args.rounds = 1
    is_first = True
    for name, measure in SECTIONS.items():
        if name not in (args.section or (REHEARSED if args.quick else ["front-end", "engine"])):
            continue
        for title, found in measure(args, cores).items():
            if not is_first:
                print()
            is_first = False
            print_table(found if isinstance(found, list) else [found])
            result[title] = found
    print_json(result)


def _parsed() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--section",
        choices=SECTIONS,
        action="append",
        help="default: front-end and engine; with --quick all but vllm",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="tinyllama-1.1b", help="of the sections with an engine")
    parser.add_argument("--num-streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-first", type=int, default=20, help="requests whose first token is timed")
    parser.add_argument("--num-idle", type=int, default=2000, help="idle streams")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each aggressor")
    parser.add_argument("--rate", type=float, default=10.0, help="the victim's requests a second")
    parser.add_argument("--bodies", nargs="+", help="of the section bodies: some of them by name")
    parser.add_argument(
        "--quick", "--rehearse", action="store_true", help="few requests: checks them, and proves no speed"
    )
    return parser.parse_args()


# The sections. Each returns its tables, or single rows, by their names in the result.


def _front_end(args: Options, cores: Cores) -> dict[str, Any]:
    share, num_idle = (0.02, 50) if args.quick else (1.0, args.num_idle)
    return {
        "front_end": front_end_alone.measure("demo", cores, args.rounds, share=share),
        "idle": front_end_alone.measure_idle("demo", cores, num_idle),
    }


def _engine(args: Options, cores: Cores) -> dict[str, Any]:
    row = with_engine.measure(
        _text_model(args),
        cores,
        rounds=args.rounds,
        num_streams=8 if args.quick else args.num_streams,
        max_tokens=8 if args.quick else args.max_tokens,
        num_first=2 if args.quick else args.num_first,
    )
    return {"engine": row}


def _vllm(args: Options, _: Cores) -> dict[str, Any]:
    from benchmarks.server import beside_vllm

    return {"vllm": beside_vllm.measure(args.model, args.clients, rounds=min(args.rounds, 2))}


def _aggressors(args: Options, _: Cores) -> dict[str, Any]:
    from benchmarks.server import aggressors

    return {"aggressors": aggressors.measure("demo", seconds=_seconds(args), rate=args.rate)}


def _bodies(args: Options, _: Cores) -> dict[str, Any]:
    from benchmarks.server import bodies

    return {"bodies": bodies.measure("demo", rate=args.rate, names=args.bodies)}


def _page(args: Options, cores: Cores) -> dict[str, Any]:
    from benchmarks.server import page

    rows = [
        page.measure("demo", cores, args.rounds, num_requests=num, max_tokens=max_tokens)
        for num, max_tokens in ([(16, 200)] if args.quick else [(64, 300), (256, 100)])
    ]
    return {"page": rows}


def _service(args: Options, _: Cores) -> dict[str, Any]:
    from benchmarks.server import flood, service

    # Streams of the demo that last until the engine is killed, on a busy machine too.
    rows = service.measure("demo", max_tokens=1500, num_streams=4 if args.quick else 16)
    num_streams, num_tokens, max_tokens = (4, 100, 1500) if args.quick else (args.num_streams, 1000, 300)
    return {
        "service": rows,
        "catch_up": service.measure_catch_up("demo", num_streams, num_tokens, max_tokens),
        "flood": flood.measure("demo", seconds=_seconds(args), rate=args.rate),
    }


def _text_model(args: Options) -> str:
    """Return the directory of a model with a tokenizer."""
    from benchmarks.server.text_checkpoint import text_checkpoint

    return str(checkpoint("demo")) if args.quick else text_checkpoint(args.model)


def _seconds(args: Options) -> float:
    return 1.0 if args.quick else args.seconds


SECTIONS: dict[str, Callable[[Options, Cores], dict[str, Any]]] = {
    "front-end": _front_end,
    "engine": _engine,
    "vllm": _vllm,
    "aggressors": _aggressors,
    "bodies": _bodies,
    "page": _page,
    "service": _service,
}
REHEARSED = SECTIONS.keys() - {"vllm"}


if __name__ == "__main__":
    main()
