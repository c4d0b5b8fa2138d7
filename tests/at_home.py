"""Many requests for more models than the memory holds, with what goes wrong at home.

python -m tests.at_home [--short] [--requests 500] [--seed 0] [--busy]

Three models have memory for one. Requests come by turns and in floods; some clients leave, engines are killed
while they load and while they compute, and the files of a model go and come again. Every request ends, every
answer is that of the model alone, and the engines keep within the memory. Two servers pull one file from a
hub that cuts it, after other bytes than its digest. Prints what switches took beside what Ollama documents,
and a last line of JSON. --short: 40 requests, with each kind of trouble once or more. --busy: how long two
busy engines take beside the same in turns, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from paged import LLMEngine, SamplingParams
from paged.architectures.config import DEMO
from paged.server.models.residency import LifeStage
from tests.support.fake_hub import digest, fake_hub
from tests.support.lobbies import lobby_of_processes
from tests.support.served import Served

COMPLETIONS = "/v1/completions"
PROMPTS = ("def f(", "class A:", "import os\n", "x = [")
FLOOD = 12  # requests at once
SHORT = 40  # requests of --short
CALM_TURNS = 9  # between two with trouble
MOST_KILL_WAIT_S = 10.0  # for a process to kill
TELL_S = 10.0  # between two lines about how far it is
MOST_WAIT_S = 900.0  # for an answer, behind other models
PARAMS = {"max_tokens": 6, "temperature": 0}
# docs.ollama.com/faq: models stay for 5 minutes, requests queue while others unload, at most 512 of them.
OLLAMA = {"keep_alive_s": 300, "queue": 512, "load": "waits until models that are idle have gone"}


@dataclass
class Tally:
    """What became of the requests.

    statuses: of the answers; 0 of clients that left. wrong: answers that are not those of the model alone.
    most_bytes: the most that the engines took together, as the policy counts.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    most_bytes: int = 0

    def count(self, status: int) -> None:
        """Count an answer; its first one is not read and written at once."""
        with self.lock:
            self.statuses[status] += 1


def ask(served: Served, name: str, prompt: str, wanted: Mapping[tuple[str, str], str], tally: Tally) -> None:
    """Send a request, and compare its answer."""
    body = {"model": name, "prompt": prompt, **PARAMS}
    status, _, data = served.request("POST", COMPLETIONS, body, patience_s=MOST_WAIT_S)
    tally.count(status)
    if status == 200:
        text = json.loads(data)["choices"][0]["text"]
        if text != wanted[name, prompt]:
            tally.wrong.append((name, prompt, text))


def leave(served: Served, name: str, prompt: str, after_s: float, tally: Tally) -> None:
    """Send a request and leave before its answer."""
    body = json.dumps({"model": name, "prompt": prompt, "stream": True, **PARAMS}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with suppress(OSError), socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(after_s)
    tally.count(0)


def load(
    served: Served,
    wanted: Mapping[tuple[str, str], str],
    num_requests: int,
    rng: random.Random,
    trouble: Callable[[random.Random], None] = lambda _: None,
    calm_turns: int = CALM_TURNS,
) -> Tally:
    """Send requests by turns, in floods and with clients that leave. Return what became of them.

    wanted: the text of each model and prompt. trouble: called once in `calm_turns` + 1 turns.
    """
    tally = Tally()
    names = sorted({name for name, _ in wanted})
    is_over = threading.Event()
    residency = served.front.host.residency  # type: ignore[attr-defined]

    def watch() -> None:
        began = told = time.monotonic()
        while not is_over.wait(0.002):
            tally.most_bytes = max(tally.most_bytes, residency.used)
            if (now := time.monotonic()) - told > TELL_S:
                told = now
                done = f"{sum(tally.statuses.values())} of {num_requests} requests"
                print(f"{now - began:.0f} s: {done} have ended: {dict(tally.statuses)}", file=sys.stderr)

    watching = threading.Thread(target=watch)
    watching.start()
    left = num_requests
    turn = 0
    with ThreadPoolExecutor(FLOOD) as pool:
        while left:
            count = min(left, rng.choice([1, 1, 2, FLOOD]))
            left -= count
            turn += 1
            same = rng.choice(names) if rng.random() < 0.3 else None
            futures = []
            for i in range(count):
                name = same or names[(turn + i) % len(names)]
                prompt = rng.choice(PROMPTS)
                if rng.random() < 0.15:
                    futures.append(pool.submit(leave, served, name, prompt, rng.random() * 0.2, tally))
                else:
                    futures.append(pool.submit(ask, served, name, prompt, wanted, tally))
            if turn % (calm_turns + 1) == 0:
                trouble(rng)
            for future in futures:
                future.result()
    is_over.set()
    watching.join()
    return tally


def check(tally: Tally, num_requests: int, memory: int, *, may_fail: bool) -> None:
    """Every request has ended, every answer is right, and the memory was enough."""
    assert sum(tally.statuses.values()) == num_requests, tally.statuses
    assert {*tally.statuses} <= ({0, 200, 503} if may_fail else {0, 200}), tally.statuses
    assert tally.statuses[200] > num_requests / 2, tally.statuses
    assert tally.wrong == []
    assert 0 < tally.most_bytes <= memory


def new_models(folder: Path, count: int) -> list[Path]:
    """Make models that answer differently: the demo with its vocabulary turned."""
    models = []
    for i in range(count):
        own = folder / f"m{i}"
        shutil.copytree(DEMO, own)
        tensors = load_file(own / "model.safetensors")
        name = next(each for each in tensors if each.endswith("norm.weight") and "layers" not in each)
        tensors[name] = tensors[name].roll(i).contiguous()
        save_file(tensors, own / "model.safetensors", {"format": "pt"})
        models.append(own)
    return models


def texts_alone(models: list[Path]) -> dict[tuple[str, str], str]:
    """Return the text of each model for each prompt, from an engine that has the model alone."""
    texts = {}
    params = SamplingParams(**PARAMS)
    for model in models:
        engine = LLMEngine(str(model), num_blocks=64, device="cpu")
        for output in engine.generate([*PROMPTS], params, use_tqdm=False):
            texts[model.name, str(output.prompt)] = output.outputs[0].text
        engine.shutdown()
    return texts


class Trouble:
    """Kills engine processes, of models that load too, and takes the files of a model away for a while."""

    def __init__(self, served: Served, models: list[Path]) -> None:
        self._served = served
        self._models = models
        self.counts: Counter[str] = Counter()

    def __call__(self, rng: random.Random) -> None:
        names = ("kills while it loads", "kills", "files gone")
        # What came least so far comes first, so that each kind comes.
        name = min(names, key=lambda each: (self.counts[each], rng.random()))
        if name == "files gone":
            self._hide(rng.choice(self._models))
        else:
            self._kill(rng, is_loading=name != "kills")
        self.counts[name] += 1

    def _kill(self, rng: random.Random, *, is_loading: bool) -> None:
        """Kill an engine process once there is one, of a model that loads or of any that is loaded."""
        stage = LifeStage.LOADING if is_loading else LifeStage.LOADED
        models = self._served.front.host.residency.models  # type: ignore[attr-defined]
        until = time.monotonic() + MOST_KILL_WAIT_S
        while time.monotonic() < until:
            children = [pid for pid in _children_of(os.getpid()) if _runs_engine(pid)]
            if children and any(each.stage is stage for each in [*models.values()]):
                time.sleep(rng.random() * 0.5)  # somewhere in its load, or in its answers
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(children), signal.SIGKILL)
                return
            time.sleep(0.01)

    def _hide(self, model: Path) -> None:
        """Take the files of a model away for a while. It may be loaded, load, or be asked for."""
        away = model.with_suffix(".away")
        model.rename(away)
        time.sleep(0.5)
        away.rename(model)


def _children_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            found += [int(each) for each in (task / "children").read_text().split()]
    return found


def _runs_engine(pid: int) -> bool:
    with suppress(OSError):
        return b"paged.server.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@contextmanager
def three_models() -> Iterator[tuple[Served, list[Path], dict[tuple[str, str], str], int]]:
    """Yield a server of three models with memory for one, the models, their texts, and the memory."""
    with tempfile.TemporaryDirectory() as folder:
        models = new_models(Path(folder), 3)
        texts = texts_alone(models)
        file = Path(folder) / "models.toml"
        file.write_text("".join(f'[{each.name}]\ncheckpoint = "{each}"\n' for each in models))
        memory = 24 * 10**6
        options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8}
        with lobby_of_processes(file, engine=options, memory=memory, max_load_wait_s=600.0) as served:
            yield served, models, texts, memory


def pull_at_two_servers() -> dict[str, int]:
    """Have two servers pull one model at the same time. Return what it took.

    At first the hub sends other bytes than its digest says, then it cuts each file.
    """
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        with fake_hub(patch, folder / "hub") as hub, _two_servers(folder) as servers:
            hub.repositories["owner/tiny"] = {
                file.name: file.read_bytes() for file in DEMO.iterdir() if file.is_file()
            }
            weights = next(each for each in hub.repositories["owner/tiny"] if each.endswith(".safetensors"))
            data = hub.repositories["owner/tiny"][weights]
            hub.damaged.add(weights)
            assert "came with the digest" in _pulled(servers[0])[-1]["error"]
            hub.damaged.clear()
            hub.cut[weights] = [len(data) // 3, len(data) // 3]
            sent = hub.sent[weights]
            with ThreadPoolExecutor(2) as pool:
                ends = [lines[-1] for lines in pool.map(_pulled, servers)]
            assert ends == [{"status": "success"}] * 2, ends
            # Whatever was cut is not sent again, and the second server finds what the first one has pulled.
            assert hub.sent[weights] - sent == len(data)
            (blob,) = (folder / "hub").glob(f"**/blobs/{digest(data)}")
            assert blob.read_bytes() == data
            return {"bytes": len(data), "sent": hub.sent[weights] - sent}


@contextmanager
def _two_servers(folder: Path) -> Iterator[list[Served]]:
    file = folder / "models.toml"
    file.write_text("")
    with (
        lobby_of_processes(file, engine={}, memory="1GiB", allow_model_changes=True) as one,
        lobby_of_processes(file, engine={}, memory="1GiB", allow_model_changes=True) as other,
    ):
        yield [one, other]


def _pulled(served: Served) -> list[dict[str, Any]]:
    """Return the lines of an answer to /api/pull."""
    _, _, data = served.request("POST", "/api/pull", {"model": "owner/tiny"})
    return [json.loads(line) for line in data.splitlines()]


def busy_ratio() -> float:
    """Return the time that two engines take at once, as a share of what they take in turns."""
    with tempfile.TemporaryDirectory() as folder:
        models = new_models(Path(folder), 2)
        file = Path(folder) / "models.toml"
        file.write_text("".join(f'[{each.name}]\ncheckpoint = "{each}"\n' for each in models))
        with lobby_of_processes(file, engine={"device": "cpu", "max_num_seqs": 8}, memory="1GiB") as served:

            def answer(model: Path) -> None:
                body = {"model": model.name, "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "n": 4}
                status, _, data = served.request("POST", COMPLETIONS, body, patience_s=MOST_WAIT_S)
                assert status == 200, data

            ratios = []
            for i in range(4):
                began = time.monotonic()
                for model in models:
                    answer(model)
                in_turns = time.monotonic() - began
                began = time.monotonic()
                with ThreadPoolExecutor(2) as pool:
                    list(pool.map(answer, models))
                if i:  # the first round warms both up
                    ratios.append((time.monotonic() - began) / in_turns)
            return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--busy", action="store_true", help="only measure two busy engines")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.busy:
        ratio = busy_ratio()
        print(f"two busy engines take {ratio:.2f} of the time that they take in turns")
        print(json.dumps({"busy_ratio": ratio}))
        return
    num_requests = args.requests or (SHORT if args.short else 500)
    pulls = pull_at_two_servers()
    rng = random.Random(args.seed)
    with three_models() as (served, models, texts, memory):
        switches = []
        for each in models if args.short else [*models, *models]:
            began = time.monotonic()
            tally = Tally()
            ask(served, each.name, PROMPTS[0], texts, tally)
            assert (tally.statuses, tally.wrong) == ({200: 1}, []), tally
            switches.append(time.monotonic() - began)
        trouble = Trouble(served, models)
        began = time.monotonic()
        tally = load(served, texts, num_requests, rng, trouble, 1 if args.short else CALM_TURNS)
        seconds = time.monotonic() - began
        check(tally, num_requests, memory, may_fail=True)
    first, later = switches[:1], switches[1:]
    print("| what | here | Ollama, as documented |\n|---|---:|---|")
    print(f"| first load and answer | {statistics.median(first):.2f} s | |")
    print(f"| switch and answer, median | {statistics.median(later):.2f} s | {OLLAMA['load']} |")
    print(f"| idle models leave after | 300 s | {OLLAMA['keep_alive_s']} s |")
    print(f"| {num_requests} requests | {seconds:.0f} s | a queue of {OLLAMA['queue']} |")
    result = {
        "statuses": dict(tally.statuses),
        "trouble": dict(trouble.counts),
        "switch_s": statistics.median(later),
        "pulled": pulls,
    }
    print(json.dumps({"requests": num_requests, **result, "most_bytes": tally.most_bytes, "memory": memory}))


if __name__ == "__main__":
    main()
