"""A job of Ray Data and an application of Ray Serve on a local cluster, whose processes are killed:

    python -m tests.ray_jobs data [--rows 600]
    python -m tests.ray_jobs serve

data: rows from JSONL, and again from Parquet. Engines and their actors are killed; one row is wrong, another
one ends each engine that computes it; the job itself is killed, and goes on from its checkpoints. Each row
must be there once, with the tokens of an engine that nothing disturbs, or with its error.

serve: two replicas answer streams and calls of tools while the application is updated and a replica is
killed. No request may fail but those of that replica.

Nothing may be left of either.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from paged import LLMEngine, SamplingParams
from paged.requests.request import derived_seed
from paged.server import launcher
from tests.support.failing_engine_process import STEPS, UNLUCKY
from tests.support.own_processes import processes_of

ROOT = str(Path(__file__).parents[1])
POISON = "tests.support.failing_engine_process"
OPTIONS: dict[str, Any] = {"num_blocks": 2048, "num_threads": 1, "max_num_seqs": 32, "device": "cpu"}
MAX_TOKENS = 60
# Steps that an engine process does before it is killed. In the first ones it may compute rows alone that
# others ended with, and a row that is alone in an engine that ends is an error.
LIFE = (120, 400)
NOTHING_S = 120.0  # without a step, after which a job counts as stuck
WRONG = 5  # rows of these numbers
FATAL = 77


def end_engines_by_poison() -> None:
    """Have the engine processes of this worker of Ray end for a prompt of so many tokens."""
    launcher.ENGINE_PROCESS = POISON


def rows(num: int) -> list[dict[str, Any]]:
    """Return the rows of a job."""
    found = [{"id": i, "prompt": [1 + i % 200] * (4 + i % 8)} for i in range(num)]
    found[WRONG]["prompt"] = [10**6]
    found[FATAL]["prompt"] = [7] * UNLUCKY
    return found


def start_ray(**variables: str) -> None:
    """Start a cluster whose processes find what this one finds, and have these variables."""
    import ray

    environment = {
        "env_vars": {"PYTHONPATH": ROOT, **variables},
        "worker_process_setup_hook": end_engines_by_poison,
    }
    terms = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
    ray.init(address="local", num_cpus=6, runtime_env=environment, **terms)


def run_job(kind: str, folder: Path) -> None:
    """Compute the rows of a file, from where the last run was killed."""
    import ray

    from paged.ray.data import generate

    start_ray(**{STEPS: str(folder / "steps")})
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.checkpoint_config = ray.data.checkpoint.CheckpointConfig(
        "id", str(folder / "checkpoints"), delete_checkpoint_on_success=False
    )
    read = ray.data.read_json if kind == "jsonl" else ray.data.read_parquet
    # The job that goes on sees the rows that are left alone.
    found = generate(
        read(str(folder / f"in.{kind}")),
        "demo",
        {"max_tokens": MAX_TOKENS, "ignore_eos": True},
        id_column="id",
        max_restarts=10**6,
        **OPTIONS,
    )
    write = found.write_json if kind == "jsonl" else found.write_parquet
    write(str(folder / "out"))


def wait_engine(job: subprocess.Popen[bytes], steps: Path, num: int) -> psutil.Process | None:
    """Wait for an engine process of a job that has done so many steps; None if the job ends before."""
    until = time.monotonic() + NOTHING_S
    most = 0
    while job.poll() is None:
        for engine in processes_of(POISON, job.pid):
            file = steps / str(engine.pid)
            found = file.stat().st_size if file.exists() else 0
            if found >= num:
                return engine
            if found != most:
                most = found
                until = time.monotonic() + NOTHING_S
        assert time.monotonic() < until, f"no step within {NOTHING_S:.0f} s"
        time.sleep(0.02)
    return None


def kill_one(choose: random.Random, engine: psutil.Process) -> str:
    """Kill an engine process of a job, or its actor. Return what."""
    with suppress(psutil.NoSuchProcess):  # it was a row that ended it
        actor = engine.parent()
        if choose.random() < 0.5 or actor is None:
            engine.kill()
            return "an engine"
        actor.kill()
        return "an actor"
    return "nothing"


def write_rows(kind: str, folder: Path, num: int) -> None:
    """Write the file of a job."""
    if kind == "jsonl":
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(num)))
        return
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(num)), folder / "in.parquet")


def read_rows(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Return the rows that a job has written."""
    files = sorted((folder / "out").glob(f"*.{'json' if kind == 'jsonl' else kind}*"))
    if kind == "jsonl":
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]
    import pyarrow.parquet

    return [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]


def check_data(kind: str, engine: LLMEngine, num: int, seed: int) -> None:
    """Run a job that is disturbed, and compare its rows."""
    choose = random.Random(seed)
    killed: Counter[str] = Counter()
    left: list[psutil.Process] = []  # that must end with the job that is killed
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "steps").mkdir()
        write_rows(kind, folder, num)
        command = [sys.executable, "-m", "tests.ray_jobs", "job", "--kind", kind, "--folder", name]
        started = time.monotonic()
        job = subprocess.Popen(command)
        while job.poll() is None:
            disturbed = wait_engine(job, folder / "steps", choose.randint(*LIFE))
            if disturbed is None:
                break
            if not killed["the job"] and any((folder / "out").glob("*")):
                left += processes_of(POISON, job.pid)
                job.kill()
                job.wait()
                killed["the job"] += 1
                job = subprocess.Popen(command)
            else:
                killed[kill_one(choose, disturbed)] += 1
        assert job.returncode == 0, f"exit code {job.returncode}"
        assert not psutil.wait_procs(left, 60)[1], "engine processes are left"
        found = read_rows(kind, folder)
    seconds = time.monotonic() - started
    assert sorted(row["id"] for row in found) == [*range(num)], "a row is missing, or there twice"
    by_id = {row["id"]: row for row in found}
    assert "vocabulary" in by_id[WRONG]["error"], by_id[WRONG]["error"]
    assert "engine processes ended" in by_id[FATAL]["error"], by_id[FATAL]["error"]
    asked = [row for row in rows(num) if row["id"] not in (WRONG, FATAL)]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=derived_seed(0, str(row["id"])) >> 1)
        for row in asked
    ]
    outputs = engine.generate([row["prompt"] for row in asked], params, use_tqdm=False)
    for row, output in zip(asked, outputs, strict=True):
        assert by_id[row["id"]]["error"] is None
        assert [*by_id[row["id"]]["token_ids"]] == output.outputs[0].token_ids, row["id"]
    print(f"{kind}: {num} rows in {seconds:.0f} s, killed: {dict(killed)}", flush=True)


def check_serve() -> None:
    """Ask two replicas while they are updated and killed."""
    import openai
    import ray
    from ray import serve

    from paged.ray.serve import app
    from tests.server.test_tool_calls import MESSAGES, TEMPLATE, TOOLS
    from tests.support.chat_checkpoints import chat_checkpoint

    with tempfile.TemporaryDirectory() as name:
        model = str(chat_checkpoint(Path(name), TEMPLATE))
        parsers = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
        start_ray()
        serve.start(http_options={"port": 8124})

        def deploy(version: int) -> None:
            # With another option all replicas are replaced.
            server = {**parsers, "served_model_name": ["m", f"version {version}"]}
            serve.run(app(model, deployment={"num_replicas": 2}, server=server, dtype="float32", **OPTIONS))
            assert f"version {version}" in [each.id for each in client.models.list()]

        client = openai.OpenAI(base_url="http://127.0.0.1:8124/v1", api_key="none", max_retries=0)
        deploy(1)
        plain: dict[str, Any] = {"model": "m", "prompt": "a b", "max_tokens": 30, "temperature": 0}
        text = client.completions.create(**plain).choices[0].text
        calling: dict[str, Any] = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "seed": 3}
        calling |= {"tool_choice": "required", "max_completion_tokens": 300}

        def ask(_: int = 0) -> None:
            stream = client.completions.create(**plain, stream=True)
            assert "".join(part.choices[0].text for part in stream) == text
            (choice,) = client.chat.completions.create(**calling).choices
            assert choice.message.tool_calls

        ask()
        is_over = threading.Event()

        def ask_on() -> int:
            num = 0
            while not is_over.is_set():
                ask()
                num += 1
            return num

        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(ask_on) for _ in range(4)]
            time.sleep(1)
            deploy(2)
            time.sleep(1)
            is_over.set()
            print(f"{sum(each.result() for each in clients)} rounds of requests, none failed by the update")
        import httpx

        metrics = httpx.get("http://127.0.0.1:8124/metrics").text
        assert "paged:request_success_total" in metrics
        engines = processes_of(POISON, os.getpid())
        killed = engines[0].parent()
        assert killed is not None
        killed.kill()
        psutil.wait_procs([killed], 10)
        started = time.monotonic()
        for _ in range(20):
            ask()
        print(f"a replica was killed: 20 new rounds took {time.monotonic() - started:.1f} s, none failed")
        engines += processes_of(POISON, os.getpid())
        serve.shutdown()
        ray.shutdown()
        assert not psutil.wait_procs(engines, 60)[1], "engine processes are left"


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["data", "serve", "job"])
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=["jsonl", "parquet"], help="of a job, which `data` starts")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", ROOT)
    if args.what == "job":
        run_job(args.kind, args.folder)
        return
    if args.what == "data":
        engine = LLMEngine("demo", **OPTIONS)
        for kind in ("jsonl", "parquet") if args.kind is None else (args.kind,):
            check_data(kind, engine, args.rows, args.seed)
    else:
        check_serve()


if __name__ == "__main__":
    main()
