"""What keys and limits cost for a request, in the front end's processor time."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.server.cores import Cores
from benchmarks.server.front_end import FrontEndProcess
from benchmarks.server.front_end_alone import cases
from benchmarks.server.load import LoadProcess
from paged.server.access.key_file import digest_of, line_of
from paged.server.access.keys import Keys, keys_of, priority_of, salt_of
from paged.server.gate import Gate

NUM_KEYS = 1000
KEY = "paged-the-key-of-the-benchmark"
LIMITS = {"requests_per_minute": 10**7, "tokens_per_minute": 10**10, "concurrent_requests": 1000}
HEADER = f"Bearer {KEY}"


@contextmanager
def key_file() -> Iterator[str]:
    """Yield the path of a file of NUM_KEYS keys with limits."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "keys")
        with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            for i in range(NUM_KEYS):
                print(line_of(KEY if i == NUM_KEYS // 2 else f"key {i}", tenant=f"t{i}", **LIMITS), file=file)
        yield path


def measure(model: str, cores: Cores, rounds: int, *, share: float = 1.0) -> dict[str, Any]:
    """Return the processor time of a completion without and with keys, in turns, and of keys alone.

    share: of the requests of a round.
    """
    case = cases(model)[0]
    num = max(case.num_connections, int(case.num_requests * share))
    case = replace(case, num_requests=num)
    with (
        key_file() as path,
        FrontEndProcess(model, cores.front_end) as plain,
        FrontEndProcess(model, cores.front_end, keys=path) as keyed,
        LoadProcess(cores.load) as client,
    ):
        cpu_us: dict[FrontEndProcess, list[float]] = {plain: [], keyed: []}
        for number in range(rounds + 1):
            for front, found in cpu_us.items():
                load = replace(case.load(front.port), authorization=HEADER)
                before = front.cpu_seconds()
                case.check(client.run(load))
                if number:  # the first warms up
                    found.append((front.cpu_seconds() - before) / num * 1e6)
        alone = statistics.median(alone_us(path) for _ in range(rounds))
    without, with_keys = (statistics.median(found) for found in cpu_us.values())
    return {
        "keys in the file": NUM_KEYS,
        "µs of a completion without": without,
        "µs with keys and limits": with_keys,
        "µs of keys and limits alone": alone,
        "wanted µs": 20,
    }


def alone_us(path: str, num: int = 20_000) -> float:
    """Return the processor time of all that keys and limits do for a request."""
    keys = keys_of(path, scheduling_policy="fcfs", default_reservation=None)
    assert isinstance(keys, Keys)
    gate = Gate((), keys, None)
    usage = keys.find(KEY.encode())
    assert usage is not None
    assert usage.entry.sha256 == digest_of(KEY.encode())
    started = time.process_time()
    for i in range(num):
        found = gate.check("keys", HEADER).usage
        assert found is not None
        priority_of(found.entry, None)
        salt_of(found.entry, None)
        admission = found.admit()
        name = str(i)
        admission.reserve(name, 100, 16)
        found.headers()
        admission.close({name: 16}, was_refused=False, is_counted=True)
    seconds = time.process_time() - started
    headers = {header.decode(): value.decode() for header, value in usage.headers()}
    used = LIMITS["tokens_per_minute"] - int(headers["x-ratelimit-remaining-tokens"])
    assert used == num * 116, json.dumps(headers)
    return seconds / num * 1e6
