"""Damaged images and malformed parts of messages: each is one error, and nobody else notices.

    python -m tests.images_fuzz                          # 20,000 images and 2,000 bodies
    python -m tests.images_fuzz --images 100_000 --parts 0
    python -m tests.images_fuzz --seed 1234              # one image again, the one that failed
    python -m tests.images_fuzz --part 77                # one body again

A seed fixes which image is damaged and how (`tests/support/image_damage.py`): bytes, numbers in headers with
right sums behind them, spliced and cut files, sizes that files claim, and small data that unpacks to much.
Each is decoded as a server does, by its process with limits: the result is an image, or an error of one line
that begins with the image's name. The process may take no more memory than it has for the pixels that are
declared.

The bodies go to a server: those of all APIs, with a wrong URL, damaged files and base64, wrong parts, too
many images and placeholders that no image belongs to. Each has status 200, or 400 with a message that says
where. A client beside them asks about an image all the time, and always gets the same answer. At the end no
request is left.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from paged import RequestError
from paged.architectures.hf_config import read_config
from paged.images.decoding import MOST_PIXELS
from paged.images.reading import with_vision
from paged.images.sizes import MOST_SIDE
from paged.options.config import EngineConfig
from paged.server.engine_client import EngineClient
from paged.text.image_worker import BASE_BYTES, PIXEL_BYTES
from paged.text.images import ImagePrompts, NamedImage
from tests.support.image_damage import damaged_image, damaged_part, size_of
from tests.support.images import data_url, picture, seeing
from tests.support.mutations import RAW
from tests.support.served import Served, eventually, serving

NUM_IMAGES = 20_000
NUM_PARTS = 2_000
MOST_S = 30.0  # for an image, on a busy machine
MOST_MESSAGE = 2000  # characters: an unknown field is told all known ones
NAME = "messages[0].content[1]"


@dataclass
class Report:
    """What came of all cases so far.

    findings: by seed. largest: the most memory of the process that decodes. declared: the most pixels that an
    image which may be decoded declares. slowest: seconds, and their seed.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[int, str] = field(default_factory=dict)
    largest: int = 0
    declared: int = 0
    slowest: tuple[float, int] = (0.0, -1)

    @property
    def count(self) -> int:
        """The number of cases."""
        return self.outcomes.total()


def prompts_of_images() -> ImagePrompts:
    """Return what reads images, without a model."""
    directory = seeing("mistral3")
    model, why = with_vision(EngineConfig(str(directory)), read_config(directory), directory)
    assert model.vision is not None, why
    return ImagePrompts(model.vision, None, 4)


def run_images(seeds: range, on_case: Callable[[Report], None] = lambda _: None) -> Report:
    """Decode damaged images."""
    report = Report()
    prompts = prompts_of_images()
    try:
        for seed in seeds:
            _decode(prompts, seed, report)
            on_case(report)
    finally:
        prompts._workers.close()
    return report


def _decode(prompts: ImagePrompts, seed: int, report: Report) -> None:
    data = damaged_image(seed)
    started = time.monotonic()
    finding = ""
    try:
        pixels = prompts._read(NamedImage(NAME, data))
        if len(pixels.data) != 3 * pixels.size.height * pixels.size.width:
            finding = f"has {len(pixels.data)} bytes of {pixels.size}"
        report.outcomes["an image"] += 1
    except RequestError as error:
        finding = _wrong_message(str(error))
        report.outcomes[_kind_of(str(error))] += 1
    except Exception as error:  # which a server would answer with status 500
        finding = f"{type(error).__name__}: {error}"
        report.outcomes["another error"] += 1
    used = _most_memory(prompts)
    width, height = size_of(data) or (0, 0)
    if max(width, height) <= MOST_SIDE and width * height <= MOST_PIXELS:
        report.declared = max(
            report.declared, width * height
        )  # of a process, the most memory so far is known
    if used > BASE_BYTES + PIXEL_BYTES * report.declared:
        finding = f"takes {used:,} bytes of memory for {width} x {height} pixels"
    report.largest = max(report.largest, used)
    report.slowest = max(report.slowest, (time.monotonic() - started, seed))
    if time.monotonic() - started > MOST_S:
        finding = f"takes {time.monotonic() - started:.0f} s"
    if finding:
        report.findings[seed] = finding


def _most_memory(prompts: ImagePrompts) -> int:
    """Return the most memory that the process which decodes has had; 0 if it has ended."""
    process = prompts._workers.first._process
    if process is None:
        return 0
    try:
        with open(f"/proc/{process.pid}/status") as file:
            lines = dict(line.split(":", 1) for line in file)
    except OSError:
        return 0
    return int(lines["VmHWM"].split()[0]) * 1024 if "VmHWM" in lines else 0


def _wrong_message(message: str) -> str:
    if not message.startswith(NAME):
        return f"does not begin with its name: {message}"
    if len(message) > 500 or not message.isprintable():
        return f"is no short line: {message!r}"
    return ""


def _kind_of(message: str) -> str:
    kinds = ("is a damaged", "is no image", "more than", "takes more than", "nothing is left")
    return next((kind for kind in kinds if kind in message), "another message")


# Bodies


@contextmanager
def fuzzed_server() -> Iterator[Served]:
    """Yield a server of a model that sees images."""
    client = EngineClient(
        str(seeing("mistral3")), device="cpu", num_threads=1, num_blocks=256, dtype="float32"
    )
    with serving(client, closes=True) as served:
        yield served


class _Bystander:
    """A client that asks about its own image all the time."""

    def __init__(self, served: Served) -> None:
        parts = [
            {"type": "text", "text": "x"},
            {"type": "image_url", "image_url": {"url": data_url(picture(9))}},
        ]
        self._body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 3, "temperature": 0}
        self._served = served
        self._expected = self._ask()
        self.findings: list[str] = []
        self.count = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _ask(self) -> Any:
        status, _, data = self._served.request("POST", "/v1/chat/completions", self._body)
        answer = json.loads(data)
        return status, answer.get("choices", answer)

    def _run(self) -> None:
        while not self._is_over.wait(0.02):
            found = self._ask()
            self.count += 1
            if found != self._expected:
                self.findings.append(f"the client beside got {found}, not {self._expected}")

    def __enter__(self) -> _Bystander:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def run_parts(served: Served, seeds: range, on_case: Callable[[Report], None] = lambda _: None) -> Report:
    """Send malformed bodies to a server."""
    report = Report()
    with _Bystander(served) as beside:
        for seed in seeds:
            _send(served, seed, report)
            on_case(report)
    for finding in beside.findings:
        report.findings[-1] = finding
    if not beside.count:
        report.findings[-2] = "nothing ran beside the cases"
    eventually(lambda: not served.num_requests and not served.front.body_budget.num_bytes)
    return report


def _send(served: Served, seed: int, report: Report) -> None:
    path, body = damaged_part(seed)
    if path.startswith("/api/") or path == "/v1/messages":
        body = {"model": served.front.names[0], **body}
    if path.startswith("/api/"):
        body.setdefault("stream", False)
    text = json.dumps(body)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    headers = {"content-type": "application/json"}
    started = time.monotonic()
    status, _, data = served.request("POST", path, text.encode(), headers)
    report.slowest = max(report.slowest, (time.monotonic() - started, seed))
    report.outcomes[f"{status} of {path}"] += 1
    if status == 200:
        return
    error = json.loads(data)["error"]
    message = error if isinstance(error, str) else error["message"]
    if status not in (400, 404):  # 404: another model
        report.findings[seed] = f"{path}: status {status}: {message}"
    elif not message or len(message) > MOST_MESSAGE or not message.isprintable():
        report.findings[seed] = f"{path}: is no short line: {message!r}"


def main() -> None:
    """Decode many images and send many bodies, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=int, default=NUM_IMAGES)
    parser.add_argument("--parts", type=int, default=NUM_PARTS)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="decode this image only")
    parser.add_argument("--part", type=int, help="send this body only")
    args = parser.parse_args()
    images = range(args.first, args.first + args.images)
    parts = range(args.first, args.first + args.parts)
    if args.seed is not None or args.part is not None:
        images = range(0) if args.seed is None else range(args.seed, args.seed + 1)
        parts = range(0) if args.part is None else range(args.part, args.part + 1)
    reports = {"seed": run_images(images, _shown)}
    if parts:
        with fuzzed_server() as served:
            reports["part"] = run_parts(served, parts, _shown)
    for name, report in reports.items():
        for seed, finding in sorted(report.findings.items()):
            print(f"--{name} {seed}: {finding}")
        for outcome, count in sorted(report.outcomes.items()):
            print(f"{count:9,}  {outcome}")
        slowest, seed = report.slowest
        memory = f", at most {report.largest / 2**20:,.0f} MiB" if report.largest else ""
        print(
            f"{report.count:,} cases, {len(report.findings)} findings, "
            f"the slowest {slowest:.1f} s (--{name} {seed}){memory}"
        )
    sys.exit(1 if any(report.findings for report in reports.values()) else 0)


def _shown(report: Report) -> None:
    if report.count % 1000 == 0:
        print(f"{report.count:,} cases, {len(report.findings)} findings", file=sys.stderr)


if __name__ == "__main__":
    main()
