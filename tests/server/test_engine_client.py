"""Engines for coroutines, in this process and in others, are one: the same results, the same errors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from paged import (
    AsyncLLMEngine,
    ConfigError,
    EngineDeadError,
    LLMEngine,
    QueueFullError,
    RequestError,
    RequestKillsEngineError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    UsageError,
)
from paged.engine.async_base import AsyncEngine
from paged.scheduler.policy import FirstComeFirstServed
from paged.server import connection, frames, launcher
from paged.server.engine_client import EngineClient
from paged.server.engine_process import refusal_of, take_share
from paged.server.inbox import Inbox
from paged.text.prompt_parser import ParsedPrompt
from tests.support.failing_engine_process import SLOW, SLOW_UNTIL, UNLUCKY
from tests.support.mortal_engines import processes
from tests.support.served import PATIENCE_S, UnhurriedLauncher, eventually, unhurried

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
OPTIONS: dict[str, Any] = {"num_blocks": 512, "num_threads": 1, "max_num_seqs": 64, "max_waiting": 256}
LONG = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
PROMPTS = [
    "def f(",
    "import os\n",
    [5, 6, 7, 8] * 9,
    {"prompt": "class A:", "cache_salt": "s"},
    "x = [1, 2, 3]\n" * 20,
]
VARIANTS = [
    SamplingParams(temperature=0.0, max_tokens=9),
    SamplingParams(seed=1, n=3, max_tokens=11, logprobs=2),
    SamplingParams(seed=2, n=2, best_of=3, max_tokens=7),
    SamplingParams(seed=3, max_tokens=8, prompt_logprobs=1, stop=["e"], logit_bias={9: 2.0}),
    SamplingParams(seed=4, max_tokens=30, stop_token_ids=[10, 12], bad_words=["the"], detokenize=False),
]

RUNNER = asyncio.Runner()


@pytest.fixture(scope="module")
def sync() -> LLMEngine:
    return LLMEngine("demo", **OPTIONS)


@pytest.fixture(scope="module", autouse=True)
def runner() -> Iterator[None]:
    """Run all tests in one event loop, as a client serves one."""
    with RUNNER:
        yield


@pytest.fixture(scope="module", params=["in this process", "in two others"])
def shared(request, sync) -> Iterator[Any]:
    if request.param == "in this process":
        engine: Any = AsyncLLMEngine.from_engine(sync)
    else:
        engine = EngineClient("demo", replicas=2, launcher=UnhurriedLauncher(), **OPTIONS)
    yield engine
    run(engine.__aexit__())


@pytest.fixture
def engine(shared) -> Iterator[Any]:
    """Yield an engine, which has no request and holds no block after a test."""
    yield shared
    stats = run(shared.stats())
    if isinstance(shared, EngineClient):
        assert (shared._supervisor._requests, shared._supervisor._waiting) == ({}, {})
        for each in shared._supervisor.replicas:
            assert (each.connection.load, each.connection.requests) == (0, {})
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


@pytest.fixture(scope="module")
def client() -> Iterator[EngineClient]:
    client = EngineClient("demo", **OPTIONS)
    yield client
    run(client.__aexit__())


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return RUNNER.run(asyncio.wait_for(coroutine, PATIENCE_S))


async def read(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def joined(outputs: list[RequestOutput], kind: RequestOutputKind) -> list[tuple[Any, ...]]:
    """Return all of each sample that a stream of outputs of this kind tells."""
    last = outputs[-1]
    assert last.finished
    assert not any(output.finished for output in outputs[:-1])
    told = outputs if kind is DELTA else [last]
    wholes = []
    for i, sample in enumerate(last.outputs):
        parts = [output.outputs[i] for output in told if output.outputs]
        text, token_ids = "".join(p.text for p in parts), [t for p in parts for t in p.token_ids]
        places = None if sample.logprobs is None else [place for p in parts for place in p.logprobs or ()]
        reasons = sample.finish_reason, sample.stop_reason, sample.cumulative_logprob
        wholes.append((sample.index, text, token_ids, places, *reasons))
    return wholes


OF_SEVERAL_MODELS = {"keep_pinned", "share_threads"}


def test_a_method_of_all_engines_is_written_once():
    """The engines differ in how a request reaches them, and in nothing that a caller sees."""
    shared = public_names(AsyncEngine)
    for kind in (AsyncLLMEngine, EngineClient):
        own = public_names(kind)
        # The last ones are what a server of several models asks of each.
        assert own - shared <= {"call", "from_engine", "from_engine_args"} | OF_SEVERAL_MODELS
        assert not own & {"generate", "chat", "encode", "embed", "score", "fork", "begin"}
        for name in own & shared:
            made, declared = getattr(kind, name), getattr(AsyncEngine, name)
            if isinstance(declared, property):
                made, declared = made.fget, declared.fget
            assert inspect.signature(made) == inspect.signature(declared)


def public_names(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_all_give_what_generate_gives(sync, engine):
    """64 requests of all kinds at once: tokens, texts, log-probabilities and reasons."""
    asked = [
        (PROMPTS[i % 5], replace(VARIANTS[i % 4 if i % 3 else 4], output_kind=RequestOutputKind(kind)))
        for i in range(22)
        for kind in RequestOutputKind
    ][:64]
    prompts, params = zip(*asked, strict=True)
    expected = sync.generate(prompts, params, use_tqdm=False)

    async def main() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(read(engine.generate(*each)) for each in asked))

    for whole, outputs, (_, given) in zip(expected, run(main()), asked, strict=True):
        assert joined(outputs, given.output_kind) == joined([whole], FINAL_ONLY)
        last = outputs[-1]
        assert (last.prompt, last.prompt_token_ids) == (whole.prompt, whole.prompt_token_ids)
        # From the first output on, as a stream begins with the prompt.
        assert [output.prompt_logprobs for output in outputs] == [whole.prompt_logprobs] * len(outputs)
        assert last.metrics.first_token_time is not None


def test_reports_chats_forks_and_continuations(sync, engine):
    options = {"pooling": "mean", "normalize": False, "dimensions": 17}
    vectors = sync.encode(PROMPTS, **options, use_tqdm=False)
    scores = sync.score(PROMPTS[0], ["a, b", "self"], use_tqdm=False)
    messages = [{"role": "user", "content": "hello"}]
    greedy = VARIANTS[0]
    (chat,) = sync.chat(messages, greedy, chat_template="plain", use_tqdm=False)
    (whole,) = sync.generate(PROMPTS[0], greedy, use_tqdm=False)

    async def main() -> None:
        embeddings = [engine.encode(p, **options) for p in PROMPTS]
        for found, expected in zip(await asyncio.gather(*embeddings), vectors, strict=True):
            assert (found.prompt, found.outputs) == (expected.prompt, expected.outputs)
        assert await engine.score(PROMPTS[0], ["a, b", "self"]) == scores
        outputs = await read(engine.chat(messages, greedy, chat_template="plain"))
        # A stream leaves the message to its reader.
        assert outputs[-1].outputs == [replace(one, message=None) for one in chat.outputs]
        given = whole.outputs[0].token_ids[:4]
        resumed = engine.generate(PROMPTS[0], greedy, generated_token_ids=given)
        assert (await read(resumed))[-1].outputs == whole.outputs
        stream = engine.generate(PROMPTS[0], LONG, "parent")
        with unhurried(engine):
            await anext(stream)
            with pytest.raises(RequestError, match="must be SamplingParams, got"):
                await engine.fork("parent", "child", {"n": 2})  # type: ignore[arg-type]
            fork = await engine.fork("parent", "child", LONG)
            await engine.abort("parent")
            last = (await read(stream))[-1]
        assert last.outputs[0].finish_reason == "abort"
        output = await anext(fork)
        assert output.request_id == "child"
        await fork.aclose()

    run(main())


def test_readers_that_leave_free_their_blocks(engine):
    """Closed, cancelled and collected streams free theirs, while a slow reader misses no token."""

    async def main() -> None:
        slow = engine.generate(PROMPTS[0], replace(LONG, max_tokens=300, output_kind=DELTA))
        first = await anext(slow)
        leaving = [engine.generate(prompt, LONG) for prompt in PROMPTS]
        tasks = [asyncio.create_task(read(stream)) for stream in leaving[:2]]
        # Its grammar is compiled beside the steps, and it is cancelled meanwhile.
        regex = StructuredOutputsParams(regex="[a-z]{1,900}")
        compiled = replace(LONG, structured_outputs=regex)
        tasks.append(asyncio.create_task(read(engine.generate("x", compiled))))
        for stream in leaving[2:]:
            await anext(stream)
        await leaving[2].aclose()
        for task in tasks:
            task.cancel()
        del leaving, stream
        await asyncio.gather(*tasks, return_exceptions=True)
        while (await engine.stats()).num_running > 1:
            await asyncio.sleep(0.01)
        while (await engine.stats()).num_running:
            await asyncio.sleep(0.01)
        rest = await read(slow)
        assert len(rest) <= 2  # unread deltas were merged
        assert sum(len(output.outputs[0].token_ids) for output in (first, *rest)) == 300

    run(main())


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ("", {}, "the prompt is empty"),
    ([10**6], {}, "vocabulary"),
    ("x", {"stop_token_ids": [10**6]}, r"stop_token_ids\[0\]"),
    ("x", {"priority": 1}, "needs scheduling_policy='priority'"),
    ([5] * 9000, {}, "max_model_len"),
    ("x", {"n": 65}, "max_num_seqs"),
    ("x", {"structured_outputs": StructuredOutputsParams(regex="[")}, "is refused"),
]


def test_a_wrong_request_is_refused_alone(engine):
    async def main() -> None:
        other = engine.generate(PROMPTS[0], LONG)
        await anext(other)
        for prompt, params, message in WRONG:
            with pytest.raises(RequestError, match=message):
                await anext(engine.generate(prompt, SamplingParams(**params)))
        with pytest.raises(RequestError, match="sampling_params must be SamplingParams"):
            await anext(engine.generate("x", {"n": 1}))
        assert len((await read(other))[-1].outputs[0].token_ids) == 2000

    run(main())


def test_an_abort_at_any_moment_ends_the_stream(engine):
    """Also before the engine has the request, and while its grammar compiles."""
    regex = StructuredOutputsParams(regex="[a-z]{600,700}")

    async def main() -> None:
        for i in range(12):
            params = replace(LONG, structured_outputs=regex if i % 2 else None)
            stream = engine.generate("x", params, "aborted")
            task = asyncio.create_task(read(stream))
            for _ in range(i // 2):
                await asyncio.sleep(0)
            while not task.done():  # it may not have begun yet
                await engine.abort("aborted")
                await asyncio.sleep(0.005)
            assert (await task)[-1].outputs[0].finish_reason == "abort"

    with unhurried(engine):
        run(main())


def test_a_stream_that_another_task_closes_ends_its_reader(engine):
    """At any moment: while the request begins, while the engine takes it, while an output is awaited."""

    async def main() -> None:
        for i in range(10):
            stream = engine.generate("x", replace(LONG, output_kind=FINAL_ONLY), "closed")
            task = asyncio.create_task(anext(stream))
            for _ in range(i):
                await asyncio.sleep(0 if i < 7 else 0.02)
            await stream.aclose()
            with contextlib.suppress(UsageError, StopAsyncIteration):
                assert (await task).outputs[0].finish_reason == "abort"
            while (await engine.stats()).num_running:
                await asyncio.sleep(0.01)

    with unhurried(engine):
        run(main())


def test_several_requests_are_aborted_at_once(engine):
    async def main() -> None:
        tasks = [asyncio.create_task(read(engine.generate("x", LONG, name))) for name in "ab"]
        while (await engine.stats()).num_running < 2:
            await asyncio.sleep(0.01)
        await engine.abort(["a", "b"])
        assert [(await task)[-1].outputs[0].finish_reason for task in tasks] == ["abort"] * 2
        with pytest.raises(RequestError, match="must be a string, or several"):
            await engine.abort([1])

    with unhurried(engine):
        run(main())


def test_terms_of_all_calls_are_checked(engine):
    async def main() -> None:
        for call in (partial(engine.encode, "x"), partial(engine.score, "x", ["y"])):
            for wrong in ({"timeout_s": "x"}, {"timeout_s": 0}, {"priority": "x"}, {"tenant": 5}):
                with pytest.raises(RequestError, match=f"{next(iter(wrong))} must be"):
                    await call(**wrong)
        least = replace(VARIANTS[1], seed=-(2**63))
        assert len((await read(engine.generate("x", least)))[-1].outputs) == 3

    run(main())


def test_a_finished_request_is_neither_forked_nor_in_the_way(engine):
    async def main() -> None:
        stream = engine.generate("x", replace(LONG, max_tokens=2), "short")
        await anext(stream)
        while (await engine.stats()).num_running:
            await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="no unfinished request 'short' to fork"):
            await engine.fork("short", "child")
        assert len((await read(engine.generate("x", VARIANTS[0], "short")))[-1].outputs[0].token_ids) == 9
        assert all(output.finished for output in await read(stream))

    run(main())


def test_a_stream_collected_on_another_thread_is_aborted(engine):
    async def main() -> None:
        streams = [engine.generate("x", LONG)]
        await anext(streams[0])
        await asyncio.to_thread(streams.clear)
        while (await engine.stats()).num_running:
            await asyncio.sleep(0.01)

    run(main())


@pytest.mark.parametrize("token_ids", [[], [-5], [10**6], [5] * 9000], ids=["none", "-5", "10**6", "9000"])
def test_a_prompt_parsed_elsewhere_is_checked(engine, token_ids):
    with pytest.raises(RequestError, match=r"the prompt|prompt_token_ids"):
        run(anext(engine.generate(ParsedPrompt(None, token_ids, b""), LONG)))


def test_a_full_queue_and_an_id_in_use_are_refused():
    async def main() -> None:
        options = {"num_blocks": 256, "max_num_seqs": 1, "max_waiting": 1, "launcher": UnhurriedLauncher()}
        async with EngineClient("demo", **options) as engine:
            streams = [engine.generate("x", LONG, str(i)) for i in range(3)]
            with unhurried(engine):
                await anext(streams[0])
                waiting = asyncio.create_task(anext(streams[1]))
                await asyncio.sleep(0)
                with pytest.raises(QueueFullError):
                    await anext(streams[2])
                with pytest.raises(RequestError, match="'0' is in use"):
                    await anext(engine.generate("x", LONG, "0"))
                await streams[0].aclose()
                assert not (await waiting).finished
                await streams[1].aclose()
            (output,) = await read(engine.generate("x", replace(LONG, max_tokens=1), "0"))
            assert output.finished

    run(main())


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"tenant": 5}, "refuses the request: Expected `str`, got `int`"),
    ({"tenant": "\ud800"}, "cannot be sent .* surrogates not allowed"),
    ({"sampling_params": SamplingParams(stop=["\ud800"])}, "cannot be sent"),
    ({"generated_token_ids": [10**30]}, "cannot be sent"),
    ({"generated_token_ids": ["5"]}, "refuses the request: Expected `int`"),
    ({"request_id": 5}, "request_id must be a string"),
]


def test_what_cannot_cross_is_refused(client):
    """The engine's process refuses it, or it is not sent. Either way the process goes on."""

    async def main() -> None:
        for given, message in WRONG_TYPES:
            with pytest.raises(RequestError, match=message):
                await anext(client.generate("x", **given))
        params = SamplingParams(logits_processors=[print])
        with pytest.raises(RequestError, match=r"logits_processors .* Python functions"):
            await anext(client.generate("x", params))
        assert not hasattr(client, "call")

    run(main())
    with pytest.raises(ConfigError, match="must be a name"):
        EngineClient("demo", scheduling_policy=FirstComeFirstServed())
    with pytest.raises(ConfigError, match="replicas must be"):
        EngineClient("demo", replicas=0)
    with pytest.raises(ConfigError, match="router must be one of"):
        EngineClient("demo", router="random")
    with pytest.raises(ConfigError, match="give device 'cuda'"):
        EngineClient("demo", replicas=2, device="cuda:1")
    with pytest.raises(ConfigError, match="64 replicas need 64 CPU cores"):
        EngineClient("demo", replicas=64, device="cpu")
    with pytest.raises(ConfigError, match="max_model_len"):
        EngineClient("demo", max_model_len=10**6)  # only the engine finds this


def test_a_client_serves_one_event_loop(client):
    async def main() -> None:
        await client.stats()
        with pytest.raises(UsageError, match="one event loop"):
            await asyncio.to_thread(asyncio.run, client.stats())

    run(main())


def test_heartbeats_keep_coming_while_a_step_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "ENGINE_PROCESS", "tests.support.failing_engine_process")
    monkeypatch.setenv(SLOW_UNTIL, str(tmp_path / "go on"))

    async def main() -> None:
        async with EngineClient("demo", **OPTIONS) as client:
            process = client._supervisor.replicas[0].connection
            task = asyncio.create_task(anext(client.generate([5] * SLOW, replace(LONG, max_tokens=1))))
            heard = set()
            while len(heard) < 5:
                heard.add(process.heard_at)
                await asyncio.sleep(0.01)
            assert not task.done()
            (tmp_path / "go on").touch()
            await task
            while (stats := (await client.stats_by_engine())[0]).num_steps == 0:
                await asyncio.sleep(0.05)
            assert stats.num_steps == 1

    run(main())


def test_without_resumption_a_killed_process_fails_its_requests_alone():
    """And without restarts no other request is served from then on."""

    async def main() -> None:
        options = {**OPTIONS, "replicas": 2, "router": "round-robin", "launcher": UnhurriedLauncher()}
        async with EngineClient("demo", resume=False, max_restarts=0, **options) as client:
            streams = [client.generate("x", LONG) for _ in range(4)]
            with unhurried(client):
                await asyncio.gather(*map(anext, streams))
                assert [stream.replica for stream in streams] == [0, 1, 0, 1]
                os.kill(processes(client)[0].pid, signal.SIGKILL)
            results = await asyncio.gather(*map(read, streams), return_exceptions=True)
            dead = [result for result in results if isinstance(result, EngineDeadError)]
            assert ["SIGKILL" in str(error) for error in dead] == [True, True]
            first, _ = await client.stats_by_engine()
            assert (first.num_running, first.num_used_blocks, first.num_free_blocks) == (0, 0, 512)
            while client.is_running:
                await asyncio.sleep(0.01)
            assert client.errored
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await anext(client.generate("x", LONG))
            with pytest.raises(EngineDeadError):
                await client.stats()

    run(main())


def test_streams_that_are_collected_while_their_engine_ends_hold_nobody(monkeypatch):
    fail = Inbox.fail

    def failing(inbox: Inbox, error: BaseException) -> None:
        gc.collect()
        fail(inbox, error)

    async def main() -> None:
        options = {**OPTIONS, "launcher": UnhurriedLauncher()}
        async with EngineClient("demo", resume=False, **options) as client:
            streams = [client.generate("x", LONG) for _ in range(4)]
            with unhurried(client):
                for stream in streams:
                    await anext(stream)
                for stream in streams[::2]:
                    stream.itself = stream
                readers = [asyncio.create_task(read(stream)) for stream in streams[1::2]]
                await asyncio.sleep(0)
                monkeypatch.setattr(Inbox, "fail", failing)
                del stream, streams
                os.kill(processes(client)[0].pid, signal.SIGKILL)
            ends = await asyncio.gather(*readers, return_exceptions=True)
            assert [type(end) for end in ends] == [EngineDeadError] * 2

    gc.collect()
    gc.freeze()  # what is there already is not looked through at each failure
    try:
        run(main())
    finally:
        gc.unfreeze()


def test_a_request_that_ends_each_process_is_refused_alone(sync, monkeypatch):
    """The other one goes on, through four deaths, with the tokens that it would have had."""
    monkeypatch.setattr(launcher, "ENGINE_PROCESS", "tests.support.failing_engine_process")
    (whole,) = sync.generate([[5]], LONG, use_tqdm=False)

    async def main() -> None:
        async with EngineClient("demo", **OPTIONS) as client:
            reader = asyncio.create_task(read(client.generate([5], LONG)))
            while not (client._supervisor.replicas[0].connection.load or reader.done()):
                await asyncio.sleep(0.01)
            with pytest.raises(RequestKillsEngineError, match="4 engine processes ended"):
                await anext(client.generate([5] * UNLUCKY, LONG))
            assert (await reader)[-1].outputs == whole.outputs
            while (stats := await client.stats()).num_restarts < 4:  # the fourth may begin after the answers
                await asyncio.sleep(0.01)
            assert (stats.num_restarts, stats.num_blocks) == (4, OPTIONS["num_blocks"])

    run(main())


def test_shutdown_ends_readers_and_processes(monkeypatch):
    monkeypatch.setattr(connection, "END_S", PATIENCE_S)  # else it would be killed on a busy machine
    client = EngineClient("demo", launcher=UnhurriedLauncher(), **OPTIONS)
    (process,) = processes(client)

    async def main() -> None:
        stream = client.generate("x", LONG)
        with unhurried(client):
            await anext(stream)
            reader = asyncio.create_task(read(stream))
            await asyncio.sleep(0)
            client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await reader
        assert not client.errored
        await client.__aexit__()

    run(main())
    assert process.how_ended(0) == "exit code 0"


@pytest.mark.parametrize("when", ["starting", "running"])
def test_the_engine_process_ends_with_its_parent(when):
    """However the parent ends: it is killed, while the engine starts or amid a step."""
    script = f"""
        import asyncio, os, socket
        from paged import SamplingParams
        from paged.server import connection, engine_client, launcher

        listener = socket.create_server(("127.0.0.1", 0))

        def tell(connection):
            print(connection._process.pid, listener.getsockname()[1], flush=True)

        async def main():
            client = engine_client.EngineClient("demo", num_blocks=512)
            stream = client.generate("x", SamplingParams(max_tokens=4000, ignore_eos=True))
            await anext(stream)
            tell(client._supervisor.replicas[0].connection)
            await asyncio.sleep(60)

        if {when == "starting"}:
            wait = connection.EngineConnection.wait_ready
            connection.EngineConnection.wait_ready = lambda self: tell(self) or wait(self)
            launcher.ENGINE_PROCESS = "tests.support.stuck_engine_process"
        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        pid, port = map(int, parent.stdout.readline().split())
        parent.kill()
    socket.create_server(("127.0.0.1", port)).close()  # the engine process holds no socket of the front end

    def has_ended() -> bool:
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "Z"  # of no parent that would collect it
        except FileNotFoundError:
            return True

    eventually(has_ended)


def start_of(replica: int, num_replicas: int, **options: Any) -> frames.Start:
    return frames.Start({"model": "demo", **options}, 0.2, "text", replica, num_replicas, "here")


def test_replicas_share_the_cores(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3, 5, 7, 11})
    taken: list[set[int]] = []
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: taken.append(set(cores)))
    for replica in range(2):
        take_share(start_of(replica, 2))
    assert taken == [{2, 3}, {5, 7}]
    take_share(start_of(0, 1))
    assert len(taken) == 2
    with pytest.raises(ConfigError, match="6 replicas need 6 CPU cores; there are 5"):
        take_share(start_of(0, 6))


def test_an_error_at_start_names_a_machine_that_is_not_the_front_ends():
    start = start_of(0, 1)
    own = socket.gethostname()
    for host, where in ((own, ""), ("front", f"on the machine {own}: ")):
        refused = refusal_of(msgspec.structs.replace(start, host=host), ConfigError("no weights"))
        assert (refused.message, refused.kind) == (f"{where}no weights", "ConfigError")


@pytest.mark.parametrize(("shown", "expected"), [("", ["0", "1"]), ("4,GPU-7a", ["4", "GPU-7a"])])
def test_replicas_have_a_gpu_each(shown, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    found = []
    for replica in range(2):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
        take_share(start_of(replica, 2))
        found.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert found == expected
    with pytest.raises(ConfigError, match="3 replicas need 3 GPUs; there are 2"):
        take_share(start_of(0, 3))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,5,7")
    take_share(start_of(1, 2, pipeline_parallel_size=2))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,7"
    with pytest.raises(ConfigError, match="3 replicas of 2 processes each need 6 GPUs; there are 4"):
        take_share(start_of(0, 3, pipeline_parallel_size=2))


def test_options_about_processes_of_a_model_are_checked_before_anything_starts(monkeypatch):
    ranked = {**OPTIONS, "pipeline_parallel_size": 2}
    with pytest.raises(ConfigError, match="rank_timeout_s 300 must be less than step_timeout 300"):
        EngineClient("demo", **ranked, rank_timeout_s=300.0)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="RANK is set and WORLD_SIZE is not"):
        EngineClient("demo", **ranked)
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun starts the processes of one engine, got replicas 2"):
        EngineClient("demo", **ranked, replicas=2)


@pytest.mark.parametrize("kind", [AsyncLLMEngine, EngineClient])
def test_weights_and_prefixes_change_while_engines_run(kind):
    async def main() -> None:
        options = {**OPTIONS, "max_num_seqs": 1, "scheduling_policy": "fair"}
        if kind is EngineClient:
            options["launcher"] = UnhurriedLauncher()
        async with kind("demo", **options) as engine:
            for num_hits in (0, 48, 0):
                before = (await engine.stats()).num_cached_tokens
                prompt = {"prompt_token_ids": [5] * 64}
                _ = [o async for o in engine.generate(prompt, SamplingParams(max_tokens=1))]
                assert (await engine.stats()).num_cached_tokens - before == num_hits
                if num_hits:
                    await engine.reset_prefix_cache()
            with pytest.raises(ConfigError, match=r"tenant_weights\['a'\] must be"):
                await engine.set_tenant_weights({"a": 0})
            await engine.set_tenant_weights({"a": 1000})
            ended = []

            async def ask(tenant: str) -> None:
                _ = [o async for o in engine.generate([5], SamplingParams(max_tokens=9), tenant=tenant)]
                ended.append(tenant)

            with unhurried(engine):  # until all wait
                first = engine.generate([5], LONG)
                await anext(first)
                asked = [asyncio.create_task(ask(tenant)) for tenant in "bbbbbbbbaaaaaaaa"]
                while (await engine.stats()).num_waiting < 16:
                    await asyncio.sleep(0.01)
                await first.aclose()
            await asyncio.gather(*asked)
            assert "".join(ended).strip("b") == "a" * 8  # one after the other, and b waits
            assert ended.index("a") < 4
        async with AsyncLLMEngine("demo", **OPTIONS) as engine:
            with pytest.raises(ConfigError, match="tenant_weights go with scheduling_policy 'fair'"):
                await engine.set_tenant_weights({"a": 3.0})

    asyncio.run(main())
