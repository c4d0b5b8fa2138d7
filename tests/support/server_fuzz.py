"""Malformed requests for a server: bodies and raw bytes, from many clients at once.

    python -m tests.support.server_fuzz                        # 100,000 cases
    python -m tests.support.server_fuzz --count 2000 --seed 7
    python -m tests.support.server_fuzz --seed 7 --case 1234   # one again, the one that failed

A seed and a number fix what one client sends (`tests/support/server_cases.py`): a body that is valid or
damaged, a wrong request line, wrong headers, lengths and chunks, several requests at once, a client that
is slow, resets or leaves. The server is that of `paged serve`: the front end in a thread of this process, the
engine in another process, a small random model.

Every response must have a status that /openapi.json declares for its route, or one of the protocol itself,
never 500 or 503. Errors have the form of OpenAI, other bodies match their schemas, no JSON has NaN, and no
error is logged. Other requests, which run all the time, get the tokens of an undisturbed run. At the end no
request is left, and all blocks are free or cached.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.support.fuzz_client import play
from tests.support.response_checks import SLOW_S, Bystander, ResponseChecks
from tests.support.served import Served
from tests.support.server_cases import new_case
from tests.support.small_server import small_server

COUNT = 100_000
COUNT_IN_CI = 1_000
AT_ONCE = 16
PATIENCE_S = 120.0  # for the answer to a case


@dataclass
class Report:
    """What came of all cases so far.

    statuses: how many responses had each.
    findings: by number of the case; -1 for those of no one case.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    findings: dict[int, list[str]] = field(default_factory=dict)
    count: int = 0

    def find(self, number: int, finding: str) -> None:
        """Record what is wrong."""
        self.findings.setdefault(number, []).append(finding)


@contextmanager
def fuzzed_server() -> Iterator[Served]:
    """Yield a server that does not wait long for requests."""
    with small_server(max_request_bytes=2**20, head_timeout_s=SLOW_S, body_timeout_s=SLOW_S) as served:
        yield served


class _LoggedErrors(logging.Handler):
    """Records as findings what is logged as an error, and of which request it is."""

    def __init__(self, report: Report, running: set[int]) -> None:
        super().__init__(logging.ERROR)
        self._report, self._running = report, running

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        numbers = [n for n in self._running if f"case-{n} " in text] or [-1]
        self._report.find(numbers[0], f"logged amid {sorted(self._running)}: {text}")


def run(
    served: Served,
    seed: int,
    numbers: range,
    on_case: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Play cases against a server. Return what came of them."""
    report, running = Report(), set[int]()
    handler = _LoggedErrors(report, running)
    logging.getLogger().addHandler(handler)
    try:
        asyncio.run(_play_all(served, seed, numbers, report, running, on_case))
    finally:
        logging.getLogger().removeHandler(handler)
    return report


async def _play_all(
    served: Served,
    seed: int,
    numbers: range,
    report: Report,
    running: set[int],
    on_case: Callable[[Report], None],
) -> None:
    checks = await ResponseChecks.of(served.port)
    bystander = await Bystander.of(served.port)
    left = iter(numbers)

    async def play_some() -> None:
        for number in left:
            running.add(number)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    responses, findings = await play(new_case(seed, number), served.port, checks)
            except TimeoutError:
                responses, findings = [], ["gets no answer"]
            running.discard(number)
            report.statuses.update(response.status for response in responses)
            report.count += 1
            for finding in findings:
                report.find(number, f"{new_case(seed, number).done}: {finding}")
            on_case(report)

    async def watch() -> None:
        while True:
            if finding := await bystander.ask():
                report.find(-1, f"amid the cases {sorted(running)}: {finding}")
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(play_some() for _ in range(AT_ONCE)))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    for finding in await bystander.state_at_the_end():
        report.find(-1, finding)


def main() -> None:
    """Play many cases, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="play this case only")
    args = parser.parse_args()
    numbers = range(args.count) if args.case is None else range(args.case, args.case + 1)
    started = last = time.monotonic()

    def show(report: Report) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > 5:
            last = now
            line = f"{report.count:,} cases, {len(report.findings)} findings, {now - started:,.0f} s"
            print(line, file=sys.stderr)

    with fuzzed_server() as served:
        report = run(served, args.seed, numbers, show)
    for number, findings in sorted(report.findings.items()):
        for finding in findings:
            print(f"seed {args.seed} case {number}: {finding}")
    for status, count in sorted(report.statuses.items()):
        print(f"{count:9,}  {status}")
    passed = time.monotonic() - started
    print(f"{report.count:,} cases, {len(report.findings)} findings, {passed:,.0f} s")
    sys.exit(1 if report.findings else 0)


if __name__ == "__main__":
    main()
