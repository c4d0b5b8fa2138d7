"""Engines on a local Ray cluster: requests, Ray Data and Ray Serve, while processes are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paged import LLMEngine, SamplingParams
from paged.base.errors import ClusterError, ConfigError
from paged.commands import common
from paged.requests.request import derived_seed
from paged.scheduler.policy import FirstComeFirstServed
from paged.server.engine_client import EngineClient
from paged.server.launcher import ENGINE_PROCESS
from tests.support.own_processes import processes_of

ray = pytest.importorskip("ray", reason="engines on Ray need ray: pip install 'paged[ray]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

from paged.ray import data  # noqa: E402

ROOT = str(Path(__file__).parents[2])
OPTIONS = {"num_blocks": 1024, "num_threads": 1, "device": "cpu"}
PARAMS = SamplingParams(max_tokens=400, seed=5, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Start a cluster of four cores here."""
    environment = {"env_vars": {"PYTHONPATH": ROOT}}
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        logging_level="warning",
        log_to_driver=False,
        runtime_env=environment,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return LLMEngine("demo", **OPTIONS)


def wait_no_processes(module: str) -> None:
    """Wait until none of the processes that run a module is left: they end soon after their actors."""
    until = time.monotonic() + 60
    while processes_of(module):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_requests_go_on_when_processes_and_actors_are_killed(engine):
    prompts = [f"def f{i}(x):" for i in range(24)]
    expected = [o.outputs[0].token_ids for o in engine.generate(prompts, PARAMS, use_tqdm=False)]
    launcher = common.launcher_of("auto", OPTIONS, 2)

    async def main() -> list[list[int]]:
        async with EngineClient("demo", replicas=2, launcher=launcher, **OPTIONS) as client:

            async def read(prompt: str) -> list[int]:
                async for output in client.generate(prompt, PARAMS):
                    last = output
                return last.outputs[0].token_ids

            tasks = [asyncio.create_task(read(prompt)) for prompt in prompts]
            await asyncio.sleep(0.1)
            first, second = processes_of(ENGINE_PROCESS)
            first.kill()
            actor = second.parent()
            assert actor is not None
            os.kill(actor.pid, signal.SIGKILL)
            found = await asyncio.gather(*tasks)
            async with asyncio.timeout(60):
                while (await client.stats()).num_restarts < 2:
                    await asyncio.sleep(0.1)
            assert (await client.stats()).num_resumed > 0
            return found

    assert asyncio.run(main()) == expected
    wait_no_processes(ENGINE_PROCESS)


def test_replicas_of_several_ranks_come_and_leave_and_end(engine):
    prompts = [f"class A{i}:" for i in range(12)]
    expected = [o.outputs[0].token_ids for o in engine.generate(prompts, PARAMS, use_tqdm=False)]
    options = {**OPTIONS, "pipeline_parallel_size": 2}
    launcher = common.launcher_of("auto", options, 1)

    async def main() -> list[list[int]]:
        async with EngineClient("demo", launcher=launcher, **options) as client:

            async def read(prompt: str) -> list[int]:
                async for output in client.generate(prompt, PARAMS):
                    last = output
                return last.outputs[0].token_ids

            tasks = [asyncio.create_task(read(prompt)) for prompt in prompts]
            await client.resize(2)
            await asyncio.gather(*tasks)
            tasks = [asyncio.create_task(read(prompt)) for prompt in prompts]
            while (await client.stats()).num_running < len(prompts):
                await asyncio.sleep(0.01)
            with pytest.raises(ClusterError, match="1 more replicas of 2 ranks of 1 CPU cores need"):
                await client.resize(3)
            processes_of("paged.ranks")[0].kill()
            await client.resize(1)
            return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == expected
    wait_no_processes(ENGINE_PROCESS)
    wait_no_processes("paged.ranks")


FATAL = "a prompt that ends its actor"


class Mortal(data._Generator):
    """An actor's function that ends its actor for one prompt."""

    async def _output(self, row_id, given):
        if given == FATAL:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super()._output(row_id, given)


def test_rows_have_the_same_tokens_whatever_ends_their_actor(engine, monkeypatch):
    from ray.data import from_items

    monkeypatch.setattr(data, "_Generator", Mortal)
    rows = [{"id": i, "prompt": f"def f{i}(x):"} for i in range(100)]
    rows[7]["prompt"] = "x " * 9000
    rows[9]["id"] = None
    rows[11]["prompt"] = FATAL
    dataset = data.generate(
        from_items(rows),
        "demo",
        {"max_tokens": 30},
        id_column="id",
        check_ids=False,
        max_num_seqs=16,
        **OPTIONS,
    )
    found = {row["prompt"]: row for row in dataset.take_all()}
    assert len(found) == 100
    assert "the prompt has" in found[rows[7]["prompt"]]["error"]
    assert "the row has no id" in found[rows[9]["prompt"]]["error"]
    assert found[FATAL]["error"] == "2 actors ended while they computed this row and nothing else"
    for row in (rows[0], rows[99]):
        params = SamplingParams(max_tokens=30, seed=derived_seed(0, str(row["id"])) >> 1)
        (expected,) = engine.generate(row["prompt"], params, use_tqdm=False)
        assert found[row["prompt"]]["token_ids"] == expected.outputs[0].token_ids
        assert found[row["prompt"]]["error"] is None


def test_a_job_ends_whose_actors_end_with_nothing_done(monkeypatch):
    from ray.data import from_items
    from ray.exceptions import RayError

    monkeypatch.setattr(data, "_Generator", Mortal)
    rows = from_items([{"id": 1, "prompt": FATAL}])
    dataset = data.generate(rows, "demo", id_column="id", max_restarts=0, **OPTIONS)
    with pytest.raises(RayError, match="ended 1 times in a row with no row done, and max_restarts is 0"):
        dataset.take_all()


def test_serve_has_the_routes_of_the_server(engine):
    from openai import BadRequestError, OpenAI
    from ray import serve

    from paged.ray.serve import app

    serve.start(http_options={"port": 8123})
    try:
        serve.run(app("demo", deployment={"num_replicas": 2}, **OPTIONS))
        client = OpenAI(base_url="http://127.0.0.1:8123/v1", api_key="none", max_retries=0)
        body = {"model": "demo", "prompt": "def f(x):", "max_tokens": 20, "temperature": 0}
        (expected,) = engine.generate(
            body["prompt"], SamplingParams(max_tokens=20, temperature=0), use_tqdm=False
        )
        text = expected.outputs[0].text
        assert (
            "".join(part.choices[0].text for part in client.completions.create(**body, stream=True)) == text
        )
        processes_of(ENGINE_PROCESS)[0].kill()
        assert [client.completions.create(**body).choices[0].text for _ in range(6)] == [text] * 6
        with pytest.raises(BadRequestError, match="max_tokens must be"):
            client.completions.create(**{**body, "max_tokens": -1})
    finally:
        serve.shutdown()


def test_what_cannot_be():
    from ray.data import from_items

    from paged.ray import app, generate
    from paged.ray.cluster import _require_answer, join, share_of

    with pytest.raises(ClusterError, match="9 replicas of 1 CPU cores need more than the cluster has free"):
        share_of(OPTIONS, 9)
    with pytest.raises(ConfigError, match="the dataset has no column 'id'; it has prompt"):
        data.generate(from_items([{"prompt": "x"}]), "demo", id_column="id")
    for ids, message in (
        ([1, None, 2], "1 of 3 rows have no id"),
        ([1, 2, 1], "id must differ from row to row, and 2 rows have 1"),
    ):
        rows = [{"prompt": "x", "id": each} for each in ids]
        with pytest.raises(ConfigError, match=message):
            data.generate(from_items(rows), "demo", id_column="id", **OPTIONS)
    with pytest.raises(ConfigError, match="a row has one text, and n is 2"):
        generate(from_items([{"prompt": "x", "id": 1}]), "demo", {"n": 2}, id_column="id")
    for wrong, message in (
        ({"server": {"port": 1}}, "port of server"),
        ({"server": 3}, "server must be options by name, got 3"),
        ({"deployment": {"num_replica": 2}}, "deployment: .*'num_replica'"),
        ({"deployment": {"num_replicas": -1}}, "deployment: 1 validation error"),
        ({"replicas": 2}, "num_replicas"),
        ({"scheduling_policy": FirstComeFirstServed()}, "must be a name"),
    ):
        with pytest.raises(ConfigError, match=message):
            app("demo", **wrong)
    for address in ("nonsense", "host:99999", ":6379", "host:²"):
        with pytest.raises(ConfigError, match=f"must be HOST:PORT, auto or local; got '{address}'"):
            _require_answer(address)
    assert join(None) is False  # there is one
