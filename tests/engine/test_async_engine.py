"""AsyncLLMEngine: each reader gets its own outputs, even if others leave, are slow, or break the engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from paged import (
    AsyncLLMEngine,
    ConfigError,
    EngineDeadError,
    LLMEngine,
    QueueFullError,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    UnknownArgumentError,
    UsageError,
)
from paged.requests.stop_strings import stop_strings
from paged.scheduler.schedule import Schedule, StepOutput
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine, ragged_prompts

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(temperature=0.0, max_tokens=400)
PROMPTS = ragged_prompts([5, 40, 1, 17])


@pytest.fixture(scope="module")
def shared_engine() -> LLMEngine:
    return new_engine(checkpoint("llama"))


@pytest.fixture
def sync(shared_engine) -> Iterator[LLMEngine]:
    """Yield the synchronous engine; no request may be left after a test."""
    yield shared_engine
    assert_all_free(shared_engine)
    assert not shared_engine.core.groups


@pytest.fixture
def engine(sync) -> Iterator[AsyncLLMEngine]:
    engine = AsyncLLMEngine.from_engine(sync)
    yield engine
    engine.shutdown()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in an event loop of its own, with a generous timeout."""
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def read(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def said(outputs: list[RequestOutput], kind: RequestOutputKind = CUMULATIVE) -> list[int]:
    """Collect the tokens of all outputs of a request."""
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    outputs = outputs if kind is DELTA else outputs[-1:]
    return [token for output in outputs for token in output.outputs[0].token_ids]


def expected(engine: LLMEngine, prompts: Any, params: Any) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in engine.generate(prompts, params, use_tqdm=False)]


@contextlib.contextmanager
def patched_execute(engine: LLMEngine, before: Callable[[], object]) -> Iterator[None]:
    """Call a function on the engine's thread before every forward pass."""
    execute = engine.runner.execute

    def patched(schedule):
        before()
        return execute(schedule)

    engine.runner.execute = patched  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.runner.execute = execute  # type: ignore[method-assign]


@contextlib.contextmanager
def unhurried(engine: LLMEngine) -> Iterator[None]:
    """Make every step take at least 0.1 s, so that no request ends before the test is done with it."""
    is_over = threading.Event()
    with patched_execute(engine, lambda: is_over.wait(0.1)):
        try:
            yield
        finally:
            is_over.set()


@pytest.mark.parametrize("kind", RequestOutputKind, ids=str)
def test_64_streams_get_what_each_gets_alone_and_sync(sync, kind):
    prompts = ragged_prompts([1 + i % 20 for i in range(64)])
    params = [
        SamplingParams(seed=i, max_tokens=4 + i % 7, temperature=float(i % 3), output_kind=kind)
        for i in range(64)
    ]
    together = expected(sync, prompts, params)

    async def main() -> list[list[RequestOutput]]:
        loop = asyncio.get_running_loop()

        def readers_turn() -> None:
            # A fast engine could be done before the first read, which would get everything at once.
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.001), loop).result(60)

        async with AsyncLLMEngine.from_engine(sync, stream_interval_s=0.0) as engine:
            streams = [read(engine.generate(p, s)) for p, s in zip(prompts, params, strict=True)]
            with patched_execute(sync, readers_turn):
                return await asyncio.gather(*streams)

    outputs = run(main())
    assert [said(o, kind) for o in outputs] == together
    assert said(outputs[7], kind) == expected(sync, prompts[7], params[7])[0]
    assert [o[0].prompt_token_ids for o in outputs] == prompts
    assert [len(o) > 2 for o in outputs] == [kind is not FINAL_ONLY] * 64


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA], ids=str)
def test_tokens_kept_back_are_shown_before_prompts_are_computed(sync, kind, monkeypatch):
    monkeypatch.setattr(
        "paged.engine.async_base.PUBLISH_SHARE", 1e-12
    )  # otherwise tokens may be shown at any time
    params = replace(LONG, output_kind=kind)
    is_joined, is_shown = threading.Event(), threading.Event()
    execute = sync.runner.execute

    def held(schedule: Schedule) -> StepOutput:
        # Slow steps until the second request joins, so that the first does not end before.
        if is_joined.wait(0.1) and not schedule.is_decode:
            assert is_shown.wait(60)
        return execute(schedule)

    async def main() -> list[list[RequestOutput]]:
        async with AsyncLLMEngine.from_engine(sync, stream_interval_s=1e6) as engine:
            alone = await read(engine.generate(PROMPTS[0], params))
            monkeypatch.setattr(sync.runner, "execute", held)
            stream = engine.generate(PROMPTS[1], params)
            seen = [await anext(stream)]
            while sync.scheduler.running[0].num_output_tokens < 3:
                await asyncio.sleep(0)  # otherwise there is nothing to show yet
            async with asyncio.TaskGroup() as others:
                others.create_task(read(engine.generate(PROMPTS[2], GREEDY)))
                is_joined.set()
                seen.append(await anext(stream))
                is_shown.set()
            return [alone, [*seen, *(await read(stream))]]

    alone, joined = run(main())
    assert [said(outputs, kind) for outputs in (alone, joined)] == expected(sync, PROMPTS[:2], params)
    assert [len(o.outputs[0].token_ids) for o in alone] == [1, LONG.max_tokens - (kind is DELTA)]


def test_tokens_kept_back_are_shown_before_a_call(sync, monkeypatch):
    monkeypatch.setattr("paged.engine.async_base.PUBLISH_SHARE", 1e-12)

    async def main() -> None:
        async with AsyncLLMEngine.from_engine(sync, stream_interval_s=1e6) as engine:
            stream = engine.generate(PROMPTS[0], LONG)
            await anext(stream)
            while sync.scheduler.running[0].num_output_tokens < 2:
                await asyncio.sleep(0)
            is_shown = threading.Event()
            call = asyncio.create_task(engine.call(lambda _: is_shown.wait(60)))
            await anext(stream)
            is_shown.set()
            assert await call
            await stream.aclose()

    with unhurried(sync):
        run(main())


def test_engine_rests_though_nobody_takes_what_a_fork_says(engine, sync):
    async def main() -> None:
        stream = engine.generate(PROMPTS[0], LONG)
        with unhurried(sync):
            await anext(stream)
            await engine.call(lambda e: e.fork(stream.request_id))
        await read(stream)
        while sync.core.has_work():
            await asyncio.sleep(0.01)
        await engine.call(lambda _: None)
        schedule, calls = sync.scheduler.schedule, list[None]()
        sync.scheduler.schedule = lambda: (calls.append(None), schedule())[1]
        await asyncio.sleep(0.1)
        del sync.scheduler.schedule
        assert not calls
        assert [o.finished for o in await engine.call(lambda e: e.core.outbox.take())][-1]

    run(main())


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), True, "1"])
def test_wrong_interval_is_refused(sync, wrong):
    for make in (partial(AsyncLLMEngine, "demo"), partial(AsyncLLMEngine.from_engine, sync)):
        with pytest.raises(ConfigError, match="stream_interval_s"):
            make(stream_interval_s=wrong)


def test_text_grows():
    sync = new_engine("demo", skip_tokenizer_init=False, num_blocks=32)
    params = SamplingParams(temperature=0.0, max_tokens=12, stop="never seen")
    (whole,) = sync.generate("# 日本 def", params, use_tqdm=False)

    async def main() -> None:
        async with AsyncLLMEngine.from_engine(sync) as engine:
            seen = await read(engine.generate("# 日本 def", params, "mine"))
            assert all(whole.outputs[0].text.startswith(o.outputs[0].text) for o in seen)
            assert seen[-1].outputs == whole.outputs
            assert (seen[-1].request_id, seen[-1].prompt) == ("mine", "# 日本 def")

    run(main())
    assert_all_free(sync)


@pytest.mark.parametrize("end", ["cancel", "aclose", "break", "timeout"])
def test_who_leaves_frees_his_blocks_within_a_step_and_harms_nobody(engine, sync, end):
    async def leave(stream: AsyncIterator[RequestOutput], arrived: asyncio.Event) -> None:
        async for output in stream:
            arrived.set()
            if end == "break" and len(output.outputs[0].token_ids) > 3:
                break
            if end == "aclose":
                await stream.aclose()
                break
            if end == "timeout":
                with contextlib.suppress(TimeoutError):
                    while True:  # a step takes longer than this
                        await asyncio.wait_for(anext(stream), 1e-4)
                break

    async def main() -> None:
        with unhurried(sync):
            # This request goes on and shows that the engine still runs.
            neighbour = asyncio.create_task(read(engine.generate(PROMPTS[1], LONG, "stays")))
            arrived = asyncio.Event()
            task = asyncio.create_task(leave(engine.generate(PROMPTS[0], LONG, "leaves"), arrived))
            await arrived.wait()
            if end == "cancel":
                task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() == (end == "cancel")
            # The next call runs after the abort, between the same two steps.
            assert await engine.call(lambda e: [*e.core.groups]) == ["stays"]
            used, held = await engine.call(
                lambda e: (e.block_manager.pool.num_used, e.scheduler.running[0].blocks.num_blocks)
            )
            assert used == held
        neighbours.append(said(await neighbour))

    (alone,), neighbours = expected(sync, PROMPTS[1], LONG), list[list[int]]()
    run(main())
    assert neighbours == [alone]


def test_who_leaves_before_he_is_admitted_never_was(engine, sync):
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go_on.wait()

    async def main() -> None:
        with patched_execute(sync, hold):
            first = asyncio.create_task(read(engine.generate(PROMPTS[0], GREEDY)))
            await asyncio.to_thread(entered.wait)
            second = asyncio.create_task(read(engine.generate(PROMPTS[1], LONG)))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.wait([second])
            go_on.set()
            await first
        assert sync.scheduler._num_arrivals == arrivals + 1

    arrivals = sync.scheduler._num_arrivals
    run(main())


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA], ids=str)
def test_slow_reader_holds_up_nobody_and_misses_nothing(engine, sync, kind):
    params = SamplingParams(temperature=0.0, max_tokens=60, output_kind=kind)
    wanted = expected(sync, PROMPTS[:2], params)

    async def main() -> None:
        slow = engine.generate(PROMPTS[0], params)
        seen = [await anext(slow)]
        assert said(await read(engine.generate(PROMPTS[1], params)), kind) == wanted[1]
        await engine.call(LLMEngine.stats)
        seen += await read(slow)
        assert said(seen, kind) == wanted[0]
        assert len(seen) <= (2 if kind is CUMULATIVE else 4)

    run(main())


@pytest.mark.parametrize("num_steps", [0, 3])
def test_step_that_raises_reaches_everybody(sync, num_steps):
    num_left = num_steps

    def break_down() -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise RuntimeError("no more memory")

    async def main() -> None:
        engine = AsyncLLMEngine.from_engine(sync)
        with patched_execute(sync, break_down):
            streams = [read(engine.generate(prompt, LONG)) for prompt in PROMPTS]
            errors = await asyncio.gather(*streams, return_exceptions=True)
        errors += await asyncio.gather(
            read(engine.generate(PROMPTS[0])), engine.call(LLMEngine.stats), return_exceptions=True
        )
        assert len(set(map(id, errors))) == 6
        for error in errors:
            assert isinstance(error, EngineDeadError)
            assert isinstance(error.__cause__, RuntimeError)
            assert "RuntimeError: no more memory; make a new one" in str(error)
        assert (engine.is_running, engine.errored) == (False, True)
        await engine.abort("0")
        engine.shutdown()

    run(main())
    assert_all_free(sync)


def test_call_that_ends_the_thread_is_answered(sync):
    async def main() -> None:
        engine = AsyncLLMEngine.from_engine(sync)
        with pytest.raises(EngineDeadError, match="SystemExit: 3; make a new one"):
            await engine.call(lambda _: sys.exit(3))
        with pytest.raises(EngineDeadError, match="SystemExit"):
            await read(engine.generate(PROMPTS[0]))

    run(main())


def test_shutdown_ends_readers_and_gives_the_engine_back(engine, sync):
    async def main() -> None:
        stream = engine.generate(PROMPTS[0], LONG)
        await anext(stream)
        with pytest.raises(UsageError, match="unfinished"):
            AsyncLLMEngine.from_engine(sync)
        task = asyncio.create_task(read(stream))
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineDeadError, match="was shut down") as info:
            await task
        assert info.value.__cause__ is None
        with pytest.raises(EngineDeadError):
            await anext(engine.generate(PROMPTS[0]))
        assert (engine.is_running, engine.errored) == (False, False)

    with unhurried(sync):
        run(main())
    engine.shutdown()
    assert len(sync.generate(PROMPTS, GREEDY, use_tqdm=False)) == 4


def test_bad_requests_are_their_callers_alone(engine, sync):
    wanted = expected(sync, PROMPTS[1], LONG)[0]

    async def main() -> None:
        good = engine.generate(PROMPTS[1], LONG, "good")
        with unhurried(sync):
            seen = [await anext(good)]
            for options, named in (({"request_id": "good"}, "in use"), ({"timeout_s": -1}, "timeout_s")):
                with pytest.raises(RequestError, match=named):
                    await anext(engine.generate(PROMPTS[0], GREEDY, **options))
        for prompt, params, named in (
            ([], GREEDY, "empty"),
            ([-1], GREEDY, "-1"),
            ("text", GREEDY, "tokenizer"),
            (None, GREEDY, "None"),
            (PROMPTS[0], {"temperature": 0}, "sampling_params"),
            ([1] * 5000, GREEDY, "5000 tokens"),
        ):
            with pytest.raises(RequestError, match=named):
                await anext(engine.generate(prompt, params))
        assert said(seen + await read(good)) == wanted

    run(main())


def test_queue_that_is_full_refuses_that_caller():
    sync = new_engine(checkpoint("llama"), max_num_seqs=1, max_waiting=1)

    async def main() -> None:
        async with AsyncLLMEngine.from_engine(sync) as engine:
            streams = [engine.generate(PROMPTS[0], LONG) for _ in range(3)]
            await anext(streams[0])
            waiting = asyncio.create_task(anext(streams[1]))
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await anext(streams[2])
            await streams[0].aclose()
            await waiting

    with unhurried(sync):
        run(main())


def test_abort_by_id_is_an_output(engine, sync):
    async def main() -> None:
        stream = engine.generate(PROMPTS[0], LONG, "a")
        await anext(stream)
        await engine.abort("never there")
        await engine.abort("a")
        last = (await read(stream))[-1]
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")

    with unhurried(sync):
        run(main())


def test_several_threads_with_loops_of_their_own(engine, sync):
    wanted = expected(sync, PROMPTS, GREEDY)
    found: dict[int, list[list[int]]] = {}

    async def main() -> list[list[int]]:
        return [said(o) for o in await asyncio.gather(*(read(engine.generate(p, GREEDY)) for p in PROMPTS))]

    threads = [threading.Thread(target=lambda i=i: found.update({i: run(main())})) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), wanted)


def test_loop_that_is_gone_harms_nobody(engine, sync):
    async def begin() -> AsyncIterator[RequestOutput]:
        stream = engine.generate(PROMPTS[0], LONG)
        await anext(stream)
        return stream

    wanted = expected(sync, PROMPTS[1], GREEDY)[0]
    left = run(begin())
    assert said(run(read(engine.generate(PROMPTS[1], GREEDY)))) == wanted
    del left


def test_long_prompt_is_encoded_beside_the_event_loop():
    sync = new_engine("demo", skip_tokenizer_init=False, num_blocks=32)
    encode, entered, go_on = sync.tokenizer.encode, threading.Event(), threading.Event()
    threads = []

    def held(text: str, **options: bool) -> list[int]:
        threads.append(threading.current_thread())
        if len(text) > 1000:
            entered.set()
            assert go_on.wait(60)
        return encode(text, **options)

    async def main() -> None:
        async with AsyncLLMEngine.from_engine(sync) as engine:
            sync.tokenizer.encode = held
            long = asyncio.create_task(read(engine.generate("x = 1\n" * 10_000, GREEDY)))
            while not entered.is_set():
                await asyncio.sleep(0)
            # Meanwhile other requests are served.
            await read(engine.generate("x", GREEDY))
            go_on.set()
            with pytest.raises(RequestError, match="tokens, more than max_model_len 2048"):
                await long
        assert threads[0] not in (threading.main_thread(), engine._thread.thread)

    run(main())


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        (
            "sampling.structured_outputs._compile",
            {"structured_outputs": StructuredOutputsParams(regex="compiled|once")},
        ),
        (
            "requests.tokenized_rules._breakers",
            {"dry_multiplier": 1.0, "dry_sequence_breakers": ["look", "for"]},
        ),
        ("requests.tokenized_rules._spellings", {"bad_words": [f"word {i}" for i in range(200)]}),
    ],
)
def test_what_takes_long_to_compile_holds_up_neither_loop_nor_engine(monkeypatch, function, fields):
    module, _, name = function.rpartition(".")
    module = importlib.import_module(f"paged.{module}")
    sync = new_engine("demo", skip_tokenizer_init=False, num_blocks=32)
    real, entered, go_on = getattr(module, name), threading.Event(), threading.Event()

    def held(*args):
        entered.set()
        assert go_on.wait(60)
        return real(*args)

    async def main() -> None:
        async with AsyncLLMEngine.from_engine(sync) as engine:
            monkeypatch.setattr(module, name, held)
            slow = asyncio.create_task(read(engine.generate("x", SamplingParams(max_tokens=2, **fields))))
            while not entered.is_set():
                await asyncio.sleep(0)
            await asyncio.wait_for(read(engine.generate("x", GREEDY)), 60)
            go_on.set()
            await slow

    run(main())


def test_a_second_reader_is_refused_and_the_first_goes_on(engine):
    async def main() -> None:
        gate = threading.Event()

        def wait(_output, logits):
            gate.wait(60)  # no output before the second reader has come
            return logits

        stream = engine.generate(PROMPTS[0], replace(GREEDY, logits_processors=[wait]))
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="has a reader already"):
            await anext(stream)
        gate.set()
        outputs = [await first, *[output async for output in stream]]
        assert outputs[-1].finished

    run(main())


def test_chat_answers_as_the_synchronous_engine_does():
    sync = new_engine("demo", skip_tokenizer_init=False, num_blocks=64)
    messages = [{"role": "user", "content": "def f(x):"}]
    (wanted,) = sync.chat(messages, GREEDY, chat_template="plain", use_tqdm=False)

    async def main() -> None:
        async with AsyncLLMEngine.from_engine(sync) as engine:
            async for output in engine.chat(messages, GREEDY, chat_template="plain"):
                last = output
            assert (last.prompt, last.outputs[0].text) == (wanted.prompt, wanted.outputs[0].text)
            assert (await engine.stats()).num_running == 0
            assert engine.get_tokenizer() is sync.get_tokenizer()
            with pytest.raises(RequestError, match="messages"):
                await anext(engine.chat("hello", GREEDY))
            with pytest.raises(UnknownArgumentError, match="'tool'; did you mean 'tools'"):
                engine.chat(messages, tool=[])

    run(main())


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_a_fork_is_a_stream_of_its_own(engine, kind):
    async def main() -> None:
        forked = threading.Event()

        def slow(_output, logits):
            forked.wait(0.1)  # so that the parent lives when it is forked
            return logits

        params = replace(LONG, output_kind=kind, logits_processors=[slow])
        parent = engine.generate(PROMPTS[0], params, "parent")
        await anext(parent)
        with pytest.raises(RequestError, match="must be SamplingParams, got"):
            await engine.fork("parent", "child", {"n": 2})
        child = await engine.fork("parent", "child")
        other = await engine.fork("parent", sampling_params=replace(GREEDY, max_tokens=390))
        forked.set()
        outputs = await asyncio.gather(*map(read, (parent, child, other)))
        tokens = [
            [t for o in out for t in o.outputs[0].token_ids] if kind is DELTA else None for out in outputs
        ]
        last = [out[-1] for out in outputs]
        assert [output.request_id for output in last] == ["parent", "child", other.request_id]
        assert all(output.finished for output in last)
        assert len(last[2].outputs[0].token_ids) == 390
        if kind is DELTA:
            # The first delta of a fork holds the tokens that it shares with its parent.
            assert tokens[0][-10:] == tokens[1][-10:]
        else:
            assert last[0].outputs[0].token_ids == last[1].outputs[0].token_ids
        with pytest.raises(RequestError, match="no unfinished request 'parent' to fork"):
            await engine.fork("parent")

    run(main())


COMPILED = {
    "sampling.structured_outputs._compile": {"structured_outputs": StructuredOutputsParams(regex="kept|by")},
    "requests.tokenized_rules._spellings": {"bad_words": [f"word {i}" for i in range(200)]},
    "requests.stop_strings.StopStrings": {"stop": [f"stop number {i}" for i in range(200)]},
}


@pytest.mark.parametrize("function", COMPILED)
def test_what_was_compiled_is_not_compiled_again_between_steps(monkeypatch, function):
    """This holds even if so many requests came in between that the caches have evicted it."""
    module, _, name = function.rpartition(".")
    module = importlib.import_module(f"paged.{module}")
    sync = new_engine("demo", skip_tokenizer_init=False, num_blocks=32)
    factory, real, calls, num_prepared = sync.core.factory, getattr(module, name), [], []
    prepare = factory.prepare

    def counted(*args):
        calls.append(args)
        return real(*args)

    def prepare_and_forget(*args):
        prepared = prepare(*args)
        num_prepared.append(len(calls))
        factory.grammars._compiled.clear()
        factory._rules_of.cache_clear()
        stop_strings.cache_clear()
        return prepared

    async def main() -> None:
        async with AsyncLLMEngine.from_engine(sync) as engine:
            monkeypatch.setattr(factory, "prepare", prepare_and_forget)
            monkeypatch.setattr(module, name, counted)
            params = SamplingParams(max_tokens=2, n=2, **COMPILED[function])
            await read(engine.generate("x", params))
        assert len(calls) > 0
        assert num_prepared == [len(calls)]

    run(main())


def test_idle_engine_waits(engine, monkeypatch):
    async def main() -> None:
        await read(engine.generate(PROMPTS[0], GREEDY))
        await engine.call(LLMEngine.stats)
        rounds = 0
        make_calls = engine._thread._make_calls

        def counting() -> None:
            nonlocal rounds
            rounds += 1
            make_calls()

        monkeypatch.setattr(engine._thread, "_make_calls", counting)
        await engine.call(LLMEngine.stats)
        await asyncio.sleep(0.05)
        assert rounds <= 2

    run(main())


def test_engine_that_nobody_holds_ends_its_thread(sync):
    engine = AsyncLLMEngine.from_engine(sync)
    thread = engine._thread.thread
    assert thread.is_alive()
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_interpreter_exits_while_requests_run():
    script = """
import asyncio, time
from paged import AsyncLLMEngine, SamplingParams

engine = AsyncLLMEngine("demo", num_blocks=128, skip_tokenizer_init=True)

def slow(output, logits):
    time.sleep(0.05)  # else the request might end before its first output is read
    return logits

async def main():
    global stream
    params = SamplingParams(ignore_eos=True, max_tokens=1000, logits_processors=[slow])
    stream = engine.generate([1, 2, 3], params)
    print((await anext(stream)).finished)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_reports_run_in_the_same_steps_as_streams(sync):
    """Embeddings and scores equal those of `encode` and `score`, while other requests generate."""
    prompt, texts = PROMPTS[1], [[1, 2], [3], [4, 5, 6]]
    vectors = sync.encode(PROMPTS, pooling="mean", use_tqdm=False)
    scores = sync.score(prompt, texts, use_tqdm=False)
    tokens = expected(sync, PROMPTS, GREEDY)

    async def main() -> None:
        async with AsyncLLMEngine.from_engine(sync) as engine:
            streams = [read(engine.generate(p, GREEDY)) for p in PROMPTS]
            embeddings = [engine.encode(p, pooling="mean") for p in PROMPTS]
            found = await asyncio.gather(*streams, *embeddings, engine.score(prompt, texts))
            assert [said(outputs) for outputs in found[:4]] == tokens
            assert [o.outputs.embedding for o in found[4:8]] == [o.outputs.embedding for o in vectors]
            assert found[8] == scores

    run(main())


def test_a_cancelled_or_refused_report_leaves_nothing(sync):
    async def main() -> None:
        async with AsyncLLMEngine.from_engine(sync) as engine:
            started, is_over = threading.Event(), threading.Event()
            with patched_execute(sync, lambda: started.set() or is_over.wait(60)):
                task = asyncio.create_task(engine.score(PROMPTS[1], [[1]] * 5, "s"))
                await asyncio.to_thread(started.wait)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                is_over.set()
            assert not await engine.call(lambda engine: engine.has_unfinished_requests())
            waiting = engine.generate(PROMPTS[0], LONG, "same")
            with unhurried(sync):
                await anext(waiting)
                with pytest.raises(RequestError, match="in use"):
                    await engine.encode(PROMPTS[0], "same")
            with pytest.raises(RequestError, match="pooling must be"):
                await engine.encode(PROMPTS[0], pooling="max")
            await waiting.aclose()

    run(main())
