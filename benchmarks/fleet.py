"""How many machines does a load need? The tables of docs/how-many-machines.md, by `paged simulate`.

    python -m benchmarks.fleet --write                    # all tables, into the page: about ten minutes
    python -m benchmarks.fleet --sections 8b slices       # some of them, printed
    python -m benchmarks.fleet --check                    # two real replicas against the simulator
    python -m benchmarks.fleet --fit llama-135m           # the coefficients of the CPU's rows, from here

The tables depend on data sheets, assumptions and the fit, and are the same wherever they are made.

--check: prompts with shared beginnings, over two engine processes of one thread each behind the prefix-aware
router. The simulator gets the same requests, and coefficients fitted to one engine with others. It fails
if the median hit rate or throughput is further than --tolerance from the simulated one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Workload as Requests
from benchmarks.common import checkpoint, parse_args, print_json, print_table
from benchmarks.simulate import FIT, Case, fit, serve
from paged import EngineConfig, RequestOutputKind, SamplingParams
from paged.server.engine_client import EngineClient
from paged.server.router import ROUTERS
from paged.simulate.fleet import Fleet, FleetConfig
from paged.simulate.model import read_model
from paged.simulate.workload import Arrival, Workload

PAGE = Path(__file__).parents[1] / "docs" / "how-many-machines.md"
FITTED = Path(__file__).parent / "fleet_cpu.json"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
MODELS: dict[str, dict[str, Any]] = {
    "8B": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70B": {
        **LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
# Questions of 256 tokens about one of 1,000 texts of 1,024, some asked more often; answers of 100.
LOAD: dict[str, Any] = {"prefixes": 1000, "prefix_len": 1024}
RAGGED: dict[str, Any] = {**LOAD, "input_len": "lognormal:256,0.8", "output_len": "lognormal:100,0.8"}
EVEN: dict[str, Any] = {**LOAD, "input_len": "fixed:256", "output_len": "fixed:100"}
RATES = (10, 100, 1000, 30_000)
USED = 0.7  # of the most requests that a replica serves
SLICE = 64
SECONDS = 5  # of arrivals, at least
LEAST_REQUESTS = 1500


@dataclass(frozen=True)
class Machine:
    """What a replica runs on. coefficients: a file that replaces the data sheet."""

    model: str
    gpu: str
    shards: int = 1
    stages: int = 1
    link: str | None = None
    coefficients: str | None = None

    @property
    def label(self) -> str:
        """What the tables call it."""
        return self.gpu if self.shards == 1 else f"{self.shards} x {self.gpu}"

    def fleet(self, workload: Workload, **options: Any) -> dict[str, Any]:
        """Simulate a fleet of it. Return the summary."""
        config = FleetConfig(gpu=self.gpu, link=self.link, coefficients=self.coefficients, **options)
        sizes: dict[str, Any] = {"num_blocks": 4096, "max_num_batched_tokens": 512}
        engine = EngineConfig(
            _directory(self.model),
            tensor_parallel_size=self.shards,
            pipeline_parallel_size=self.stages,
            **(sizes if self.coefficients else {}),
        )
        if config.slice is not None:
            workload = workload.sliced(config.slice / config.replicas)
        _, arrivals = workload.open()
        found = Fleet(config, engine, seed=workload.seed).run(arrivals).summary()
        assert found["finished"] == found["requests"], "some requests were refused"
        return found

    def most(self) -> float:
        """Return how many requests per second a replica serves if all come at once."""
        return _most(self)


@cache
def _most(machine: Machine) -> float:
    workload = Workload(requests=LEAST_REQUESTS, rate=math.inf, **EVEN)
    return float(machine.fleet(workload)["requests_per_s"])


@cache
def _directory(model: str) -> str:
    if model not in MODELS:
        return checkpoint(model)
    folder = Path(tempfile.gettempdir()) / f"paged-fleet-{model}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return str(folder)


# Tables


def fleets(machines: Sequence[Machine]) -> Iterator[dict[str, Any]]:
    """Yield a row for each machine and rate: how many are needed, and the first token by router."""
    for machine in machines:
        for rate in RATES:
            replicas = math.ceil(rate / (USED * machine.most()))
            row = {
                "a replica": machine.label,
                "requests/s": rate,
                "replicas": replicas,
                "devices": replicas * machine.shards,
            }
            found = {router: _summary(machine, rate, replicas, router) for router in ROUTERS}
            row |= {f"{router}, p99 ms": 1e3 * each["ttft_s"]["p99"] for router, each in found.items()}
            row |= {f"{router}, hits %": 100 * each["hit_rate"] for router, each in found.items()}
            yield row


def _summary(machine: Machine, rate: float, replicas: int, router: str) -> dict[str, Any]:
    if replicas == 1:
        router = ROUTERS[0]
    return _simulated(machine, rate, replicas, router, min(SLICE, replicas))


@cache
def _simulated(machine: Machine, rate: float, replicas: int, router: str, count: int) -> dict[str, Any]:
    """Simulate so many replicas of a fleet."""
    requests = max(LEAST_REQUESTS, int(rate * count / replicas * SECONDS))
    workload = Workload(requests=requests, rate=rate, **RAGGED)
    return machine.fleet(workload, replicas=replicas, router=router, slice=count)


def of_8b() -> Iterator[dict[str, Any]]:
    """Yield the fleets of a model of 8 billion parameters."""
    return fleets([Machine("8B", gpu) for gpu in ("L4", "H100", "MI300X")])


def of_70b() -> Iterator[dict[str, Any]]:
    """Yield the fleets of a model of 70 billion parameters, in shards."""
    return fleets([Machine("70B", "A100-80G", 4), Machine("70B", "H100", 4), Machine("70B", "MI300X", 2)])


def on_cpu() -> Iterator[dict[str, Any]]:
    """Yield the fleets of CPU cores, by coefficients that were fitted to measured steps."""
    fitted = json.loads(FITTED.read_text())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "coefficients.json"
        file.write_text(json.dumps(fitted["coefficients"]))
        for row in fleets([Machine(fitted["model"], "H100", coefficients=str(file))]):
            yield {**row, "a replica": f"{fitted['model']} on a core"}


def stages() -> Iterator[dict[str, Any]]:
    """Yield a row for each way to run 70B on two GPUs: shards, and stages over slower and slower links."""
    ways = {
        "2 shards, NVLink": Machine("70B", "H200", shards=2),
        "2 stages, NVLink": Machine("70B", "H200", stages=2),
        **{
            f"2 stages, 12.5 GB/s and {ms:g} ms": Machine("70B", "H200", stages=2, link=f"12.5,{1e3 * ms:g}")
            for ms in (0.2, 5, 50)
        },
    }
    for name, machine in ways.items():
        alone = machine.fleet(Workload(requests=50, rate=1e-3, **EVEN))
        yield {
            "two H200": name,
            "alone: first token, ms": 1e3 * alone["ttft_s"]["p50"],
            "alone: a token, ms": 1e3 * alone["tpot_s"]["p50"],
            "all at once: requests/s": machine.most(),
        }


def slices() -> Iterator[dict[str, Any]]:
    """Yield a row for 64 and 128 replicas of the same fleet, of which both stand for all.

    No throughput: that of a few seconds depends on the longest answer, which comes last.
    """
    machine = Machine("8B", "H100")
    rate = 128 * USED * machine.most()
    for router in ("least-loaded", "prefix-aware"):
        for count in (64, 128):
            found = _simulated(machine, rate, 128, router, count)
            yield {
                "router": router,
                "simulated of 128": count,
                "first token p50, ms": 1e3 * found["ttft_s"]["p50"],
                "p99": 1e3 * found["ttft_s"]["p99"],
                "hits %": 100 * found["hit_rate"],
            }


SECTIONS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "8b": of_8b,
    "70b": of_70b,
    "cpu": on_cpu,
    "stages": stages,
    "slices": slices,
}


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--fit", metavar="MODEL")
    parser.add_argument("--model", default="demo", help="of --check")
    parser.add_argument("--rounds", type=int, default=3, help="of --check")
    parser.add_argument("--tolerance", type=float, default=0.15, help="of --check")
    args = parse_args(parser, sections=["stages"])
    if args.check:
        check(args.model, args.rounds, args.tolerance)
    elif args.fit:
        FITTED.write_text(
            json.dumps({"model": args.fit, "cpu": _cpu(), "coefficients": fitted(checkpoint(args.fit))})
            + "\n"
        )
        print(FITTED.read_text())
    else:
        for name in args.sections:
            rows = [*SECTIONS[name]()]
            print_table(rows)
            print_json({"benchmark": "fleet", "section": name, "rows": rows})
            if args.write:
                PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), name, rows), encoding="utf-8")


def filled(page: str, name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the page with a section's table replaced."""
    begin = f"<!-- table: {name} -->\n"
    end = "\n<!-- end -->"
    before, rest = page.split(begin)
    _, after = rest.split(end, 1)
    names = [*rows[0]]
    is_text = [isinstance(value, str) for value in rows[0].values()]
    lines = [
        names,
        ["---" if text else "---:" for text in is_text],
        *([_cell(v) for v in row.values()] for row in rows),
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{before}{begin}\n{table}\n{end}{after}"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# Measured here


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )


def fitted(directory: str, cases: Sequence[Case] = FIT) -> dict[str, float]:
    """Return coefficients of this machine, with one thread."""
    torch.set_num_threads(1)
    return fit([step for served in serve(directory, cases) for step in served.steps])


NUM_TEXTS = 24
OPTIONS = {"num_blocks": 640, "max_num_batched_tokens": 512, "max_num_seqs": 16}


class Questions(Case):
    """Requests that all come at once, about texts of which caches hold a part. The name is the seed."""

    def workload(self, vocab_size: int) -> Requests:
        """Make the requests, the same in every call."""
        chosen = random.Random(self.name)
        texts = [[chosen.randrange(3, vocab_size) for _ in range(512)] for _ in range(NUM_TEXTS)]
        order = [text for text in texts for _ in range(self.num_requests // NUM_TEXTS)]
        chosen.shuffle(order)
        lengths = [chosen.randint(*self.output_len) for _ in order]
        return Requests([[*text, 3 + i] for i, text in enumerate(order)], lengths)

    def arrivals(self, directory: str) -> list[Arrival]:
        """Return the requests as the simulator takes them."""
        made = self.workload(read_model(directory).vocab_size)
        return [Arrival(0.0, *each) for each in zip(made.prompts, made.max_tokens, strict=True)]


def questions(number: int, num_requests: int) -> Questions:
    """Return requests about texts of their own."""
    return Questions(f"questions {number}", num_requests, (513, 513), (48, 80), OPTIONS["max_num_seqs"])


def check(model: str, rounds: int, tolerance: float) -> None:
    """Compare two real replicas with the simulator."""
    directory = checkpoint(model)
    rows = []
    measured = asyncio.run(_served(directory, [questions(number, 192) for number in range(rounds)]))
    for number, (coefficients, seconds, num_hits) in enumerate(measured):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "coefficients.json"
            file.write_text(json.dumps(coefficients))
            config = FleetConfig(replicas=2, router="prefix-aware", coefficients=str(file))
            arrivals = iter(questions(number, 192).arrivals(directory))
            found = Fleet(config, EngineConfig(directory, **OPTIONS)).run(arrivals)
        rows.append(
            {
                "round": number,
                "simulated tokens/s": found.num_output_tokens / found.duration,
                "measured": found.num_output_tokens / seconds,
                "simulated hits": found.num_cached_tokens / found.num_prompt_tokens,
                "measured hits": num_hits / found.num_prompt_tokens,
            }
        )
    print_table(rows)
    speed = statistics.median(row["measured"] / row["simulated tokens/s"] for row in rows)
    hits = statistics.median(row["measured hits"] / row["simulated hits"] for row in rows)
    print_json({"benchmark": "fleet", "check": rows, "throughput": speed, "hit_rate": hits})
    assert abs(hits - 1) <= tolerance, f"the hit rate is {hits - 1:+.0%} off"
    assert abs(speed - 1) <= tolerance, f"the throughput is {speed - 1:+.0%} off"


async def _served(directory: str, cases: Sequence[Questions]) -> list[tuple[dict[str, float], float, int]]:
    """Return for each case coefficients that are fitted before it, its seconds, and its cached tokens."""

    async def answer(arrival: Arrival) -> int:
        kind = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(
            temperature=0, max_tokens=arrival.num_output_tokens, ignore_eos=True, output_kind=kind
        )
        async for output in engine.generate(arrival.token_ids, params):
            last = output
        return int(last.num_cached_tokens or 0)

    found = []
    ways = {"device": "cpu", "num_threads": 1, "skip_tokenizer_init": True}
    async with EngineClient(directory, replicas=2, router="prefix-aware", **ways, **OPTIONS) as engine:
        await asyncio.gather(*map(answer, questions(-1, 96).arrivals(directory)))  # warm up
        fitted(directory, [questions(-1, 96)])
        for number, case in enumerate(cases):
            # Half of the requests, as each replica gets; about other texts.
            coefficients = fitted(directory, [questions(100 + number, 96)])
            started = time.perf_counter()
            hits = await asyncio.gather(*map(answer, case.arrivals(directory)))
            found.append((coefficients, time.perf_counter() - started, sum(hits)))
    return found


if __name__ == "__main__":
    main()
