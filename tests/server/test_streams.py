"""Streamed responses: their tokens, their end, what keeps them open, and readers that leave or stop."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from paged import AsyncLLMEngine, SamplingParams
from paged.engine import answer_memory
from paged.engine.answer_memory import PAUSE_BYTES, RESUME_BYTES
from paged.server.http.streams import KeepAlive, StreamedResponse
from paged.server.telemetry.records import Observer, Observers
from tests.support.served import eventually, held, serving, unhurried

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = [f"def f{i}(a, b):" for i in range(64)]
GREEDY = {"temperature": 0, "max_tokens": 12}
LONG = {"temperature": 0, "max_tokens": 1500, "ignore_eos": True}


def generated(engine, prompts, **params) -> list[str]:
    """Return the texts that `generate` gives."""

    def generate(engine):
        return engine.generate(prompts, SamplingParams(**params), use_tqdm=False)

    return [output.outputs[0].text for output in engine._thread.call(generate).result()]


@pytest.fixture
def served(served_by_either):
    return served_by_either


def send(client: socket.socket, body: dict) -> None:
    """Send a request and read nothing."""
    data = json.dumps(body).encode()
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(data), data)
    )


@contextmanager
def slow_client(served) -> Iterator[socket.socket]:
    """Yield a connection that holds little of a response, in the system's buffers at either end."""
    listener = served.server.servers[0]._listener
    size = listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        try:
            client.connect(("127.0.0.1", served.port))
        finally:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size // 2)
        client.settimeout(60)
        yield client


def read_all(client: socket.socket) -> bytes:
    """Return the rest of a chunked response."""
    got = bytearray()
    while not got.endswith(b"0\r\n\r\n"):
        part = client.recv(2**20)
        if not part:
            raise ConnectionResetError
        got += part
    return bytes(got)


def events_of(response: bytes) -> list[str]:
    """Return the data of the events of a chunked response."""
    body, rest = b"", response.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return [line.removeprefix("data: ") for line in body.decode().split("\n") if line]


def num_held(served, engine) -> int:
    """Return how many requests of the server were held, in its process (if all still are) or in another."""
    if served.front.engine is engine:
        return engine._thread.call(
            lambda e: 0 if e.scheduler.has_runnable() else len(e.scheduler.running)
        ).result()
    return served.front.engine.budget.num_pauses


def text_of(events: list[str]) -> str:
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_tokens_equal_those_of_generate(is_streamed, served, engine):
    def complete(prompt: str) -> str:
        if is_streamed:
            return text_of(served.events(COMPLETION, prompt=prompt, **GREEDY))
        return served.post(COMPLETION, prompt=prompt, **GREEDY)["choices"][0]["text"]

    wanted = generated(engine, PROMPTS, **GREEDY)
    assert complete(PROMPTS[0]) == wanted[0]
    with ThreadPoolExecutor(64) as pool:
        assert [*pool.map(complete, PROMPTS)] == wanted


def test_several_prompts_in_one_stream(served, engine):
    events = served.events(COMPLETION, prompt=PROMPTS[:5], stream_options={"include_usage": True}, **GREEDY)
    *chunks, usage = [json.loads(event) for event in events[:-1]]
    texts = [""] * 5
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == generated(engine, PROMPTS[:5], **GREEDY)
    assert usage["usage"]["completion_tokens"] == 5 * 12


def test_seeds_differ_between_requests_and_repeat_with_their_id(served):
    def complete(**more) -> str:
        body = {"prompt": "def ", "max_tokens": 12, "temperature": 1.5, **more}
        return served.post(COMPLETION, **body)["choices"][0]["text"]

    assert complete() != complete()
    assert complete(request_id="a") == complete(request_id="a") != complete(request_id="b")


def test_an_error_after_the_first_output_is_the_last_event(served):
    with unhurried(served.front.engine):
        for timeout_s in (0.2, 1, 5, 25):  # a busy machine may have no output so early
            body = {"prompt": PROMPTS[0], **LONG, "timeout_s": timeout_s, "stream": True}
            status, _, data = served.request("POST", COMPLETION, body)
            if status == 200:
                break
    *outputs, last, _ = data.split(b"\n\n")
    assert outputs
    assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("more", [{"prompt": ["a", [4096]]}, {"prompt": "a", "timeout_s": 1e-9}], ids=str)
def test_an_error_before_the_first_output_has_its_status(more, served):
    status, headers, data = served.request("POST", COMPLETION, {**LONG, "stream": True, **more})
    assert status == (400 if "timeout_s" not in more else 504)
    assert headers["x-should-retry"] == "false"
    assert json.loads(data)["error"]["message"]


def test_lists_of_prompts(served, engine):
    prompts = [PROMPTS[0], "", [4096], PROMPTS[1]]
    texts = generated(engine, PROMPTS[:2], **GREEDY)
    body = served.post("/generate", prompts=prompts, **GREEDY)
    assert body["total_prompts"] == 4
    assert [r.get("generated_text") for r in body["results"]] == [texts[0], None, None, texts[1]]
    for mode, field in [(True, "generated_text"), ("deltas", "text")]:
        sent = {"prompts": prompts, "stream": mode, **GREEDY}
        status, headers, data = served.request("POST", "/generate/batch", sent)
        assert (status, headers["content-type"]) == (200, "application/x-ndjson")
        found = [""] * 4
        for line in data.splitlines():
            result = json.loads(line)
            found[result["index"]] += "error" if "error" in result else result[field]
        assert found == [texts[0], "error", "error", texts[1]]


@pytest.mark.parametrize("body", [{"stream": True}, {}, {"prompt": PROMPTS[:3], "stream": True}], ids=str)
def test_a_client_that_leaves_frees_its_blocks(body, served):
    with unhurried(served.front.engine):
        with served.connect() as client:
            send(client, {"prompt": PROMPTS[0], **LONG, **body})
            if body:
                client.recv(100)
            eventually(lambda: served.num_requests > 0)
        eventually(lambda: served.num_requests == 0)


def test_a_client_that_leaves_the_queue(shared, engine):
    """The engine computes nothing meanwhile, so that the request only waits."""
    served = shared
    with held(engine):
        with served.connect() as client:
            send(client, {"prompt": PROMPTS[0], **LONG})
            eventually(lambda: len(served.front.open_records) == 1)
        eventually(lambda: not served.front.open_records)
    eventually(lambda: served.num_requests == 0)


def test_idle_streams_are_kept_open(engine, monkeypatch):
    """Blank lines come before the first output, when they begin the response, and between two.

    They are nothing to a client that strips each part it reads, and to one that parses events.
    """
    write, kept_alive = StreamedResponse.write, []

    def shorten(front) -> None:
        front.keep_alive = KeepAlive(0.02)

    async def noted(stream, body: bytes, *, more: bool = True) -> None:
        if not body.strip():
            kept_alive.append(stream)
        await write(stream, body, more=more)

    monkeypatch.setattr(StreamedResponse, "write", noted)
    with serving(engine, shorten) as served, ThreadPoolExecutor(3) as pool:
        with held(engine):
            streams = [pool.submit(served.events, COMPLETION, prompt=p, **GREEDY) for p in PROMPTS[:3]]
            eventually(lambda: len(served.front.keep_alive._streams) == 3)
            # Two at once look like the end of an empty event.
            eventually(lambda: all(kept_alive.count(s) >= 2 for s in served.front.keep_alive._streams))
        for stream, text in zip(streams, generated(engine, PROMPTS[:3], **GREEDY), strict=True):
            assert text_of(stream.result()) == text
        assert len(set(kept_alive)) == 3
        assert not served.front.keep_alive._streams


def test_a_reader_that_stops_pauses_its_request_alone_and_gets_all_when_it_goes_on(
    served, engine, monkeypatch
):
    monkeypatch.setattr(answer_memory, "PAUSE_BYTES", PAUSE_BYTES // 16)
    monkeypatch.setattr(answer_memory, "RESUME_BYTES", RESUME_BYTES // 16)
    more = {"n": 4, "temperature": 1, "max_tokens": 200, "logprobs": 20, "seed": 7, "ignore_eos": True}
    body = {"prompt": PROMPTS[0], **more}
    wanted = generated(engine, PROMPTS[:1], **GREEDY)[0]
    before = num_held(served, engine)
    with slow_client(served) as client:
        with unhurried(served.front.engine):  # else it might end before the engine is told to hold it
            send(client, {**body, "stream": True})
            eventually(lambda: num_held(served, engine) > before)
        assert text_of(served.events(COMPLETION, prompt=PROMPTS[0], **GREEDY)) == wanted
        assert served.num_requests == 4
        got = read_all(client)
    texts = [""] * 4
    for event in events_of(got)[:-1]:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in served.post(COMPLETION, **body)["choices"]]


def test_a_reader_that_does_not_go_on_is_cut_off(engine):
    more = {"n": 4, "temperature": 1, "logprobs": 20}
    ends = []

    class Noted(Observer):
        def end(self, record, ending) -> None:  # noqa: ARG002
            ends.append((ending.status, ending.reason))

    def observe(front) -> None:
        front.observers = Observers(Noted())

    with serving(engine, observe, slow_client_timeout_s=0.2) as served, slow_client(served) as client:
        send(client, {"prompt": PROMPTS[0], **LONG, **more, "stream": True})
        eventually(lambda: ends)
        assert ends == [(499, "slow_client")]
        eventually(lambda: served.num_requests == 0)
        with pytest.raises(ConnectionResetError):
            read_all(client)


def test_a_reader_that_stops_costs_at_most_a_mebibyte(served):
    """What it gets when it goes on is what the kernel and the server kept for it: later text is merged."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", served.port))
        client.settimeout(60)
        options = {"include_usage": True, "continuous_usage_stats": True}  # so that events are long
        more = {"n": 4, "temperature": 1, "max_tokens": 1000, "stream_options": options}
        send(client, {"prompt": PROMPTS[0], **LONG, **more, "stream": True})
        client.recv(1)
        eventually(lambda: served.num_requests == 0)
        kept = b""
        while not kept.endswith(b"0\r\n\r\n"):
            kept += client.recv(2**16)
    assert len(kept) < 2**20
    assert b'"completion_tokens":4000' in kept
    assert b"[DONE]" in kept


def test_an_engine_that_stops_ends_its_streams():
    own = AsyncLLMEngine("demo", device="cpu", num_threads=1, num_blocks=128)
    with serving(own) as served, ThreadPoolExecutor(1) as pool:
        with unhurried(own):
            stream = pool.submit(served.events, COMPLETION, prompt=PROMPTS[0], **LONG)
            eventually(lambda: len(served.front.open_records) == 1)
            eventually(lambda: served.num_requests == 1)
            own.shutdown()
        assert json.loads(stream.result()[-1])["error"]["type"] == "server_error"
        for method, path, body in [("GET", "/health", None), ("POST", COMPLETION, {"prompt": "a"})]:
            status, headers, _ = served.request(method, path, body)
            assert status == 503
            assert headers["retry-after"]
        assert served.request("GET", "/metrics")[0] == 200
