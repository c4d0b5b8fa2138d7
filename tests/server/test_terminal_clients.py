"""`paged chat --url` and `paged bench serve`, against this server and against those that answer wrongly."""

from __future__ import annotations

import contextlib
import http.server
import json
import random
import signal
import sys
import threading
import time

import pytest

from tests.support.command_line import running, write
from tests.support.served import eventually

EVENTS = "text/event-stream"
GREEDY = ("--temperature", "0", "--max-tokens", "5")


@pytest.fixture
def run(monkeypatch, capsys):
    for name in ("PAGED_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with running(monkeypatch, capsys) as run:
        yield run


@contextlib.contextmanager
def answering(answer):
    """Serve `answer`, which is given each request's handler. Yield the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self)

        def do_POST(self):
            self.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer(self)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def send(handler, status, kind, *parts):
    handler.send_response(status)
    handler.send_header("content-type", kind)
    handler.end_headers()
    for part in parts:
        handler.wfile.write(part if isinstance(part, bytes) else f"data: {json.dumps(part)}\n\n".encode())


def delta(text, finish_reason=None):
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}


def test_a_chat_is_that_of_the_server(run, served, tmp_path):
    """Every turn is sent with the whole conversation and the options, to the first model of the list."""
    messages = []

    def say(text, **fields):
        messages.append({"role": "user", "content": text})
        body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 5, **fields}
        answer = served.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": answer})
        return answer + "\n"

    file = tmp_path / "talk.json"
    messages.append({"role": "system", "content": "be kind"})
    answers = [say("a\nb"), say("c")]
    lines = ["x", "/reset", "/system be kind", "a\\", "b", "c", "/retry", f"/save {file}", "/exit"]
    argv = ("chat", "--url", served.url, *GREEDY)
    code, out, err = run(*argv, typed="".join(f"{line}\n" for line in lines))
    shown = out.split(">>> ")
    assert (code, shown[4], shown[5:7]) == (0, "... " + answers[0], [answers[1]] * 2)
    assert json.loads(file.read_text()) == messages
    assert err.splitlines()[0] == f"demo at {served.url}/v1"
    del messages[:]
    fields = {"stop": ["q"], "logit_bias": {"42": 5}, "structured_outputs": {"regex": "[a-z]{9,}"}}
    argv += ("--stop", "q", "--logit-bias", "42=5", "--regex", "[a-z]{9,}", "--model", "demo")
    assert run(*argv, stdin="a")[:2] == (0, say("a", **fields))
    code, out, err = run(*argv, "--temperature", "1", "--seed", "4", stdin="a\n/retry\n")
    del messages[:]
    first = say("a", **fields, temperature=1, seed=4)
    del messages[:]
    assert out == first + say("a", **fields, temperature=1, seed=5)
    assert run(*argv[:7], "--json-schema", '{"enum": ["x"]}', stdin="a")[1].strip() == '"x"'


def test_a_chat_takes_the_defaults_that_the_server_names(run):
    bodies = []
    defaults = {"temperature": 0.7, "min_p": 0.1, "other": "x"}

    def answer(handler):
        if handler.command == "GET":
            models = {"data": [{"id": "a"}, {"id": "b", "chat_defaults": defaults}]}
            send(handler, 200, "application/json", json.dumps(models).encode())
        else:
            bodies.append(handler.body)
            send(handler, 200, EVENTS, delta("hi", "stop"), b"data: [DONE]\n\n")

    with answering(answer) as url:
        run("chat", "--url", url, stdin="a")
        run("chat", "--url", url, "--model", "b", stdin="a\n/params top_p=0.5\na")
        run("chat", "--url", url, "--model", "b", "--temperature", "2", stdin="a")
    sent = [{name: b[name] for name in ("temperature", "min_p", "top_p") if name in b} for b in bodies]
    own = {"temperature": 0.7, "min_p": 0.1}
    assert sent == [{}, own, {**own, "top_p": 0.5}, {"temperature": 2}]


def test_the_key_is_of_the_environment_or_given(run, monkeypatch):
    keys = []

    def answer(handler):
        keys.append(handler.headers["authorization"])
        if handler.command == "GET":
            send(handler, 200, "application/json", b'{"data": [{"id": "m"}]}')
        else:
            assert handler.body["model"] == "m"
            send(handler, 200, EVENTS, delta("hi", "stop"), b"data: [DONE]\n\n")

    with answering(answer) as url:
        for variables, given, key in (
            ({}, (), None),
            ({"OPENAI_API_KEY": "o"}, (), "Bearer o"),
            ({"PAGED_API_KEY": "p"}, (), "Bearer p"),
            ({}, ("--api-key", "k"), "Bearer k"),
        ):
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            assert run("chat", "--url", url, *given, stdin="a")[:2] == (0, "hi\n")
            assert keys == [key, key]
            keys.clear()


@pytest.mark.parametrize(
    ("status", "kind", "parts", "out", "message"),
    [
        (
            401,
            "application/json",
            [b'{"error": {"message": "no key"}}'],
            "",
            "answers 401: no key; give a key",
        ),
        (503, "text/html", [b"<html>"], "", "answers 503: Service Unavailable"),
        (200, "text/html", [b"<html>"], "", "answers text/html, not with a stream of events"),
        (200, EVENTS, [delta("hi"), delta("o")], "hio\n", "ended in the middle of the answer"),
        (200, EVENTS, [delta("hi"), b"data: {\n\n"], "hi\n", "sent an event that is no JSON object"),
        (200, EVENTS, [delta("hi"), {"choices": [3]}], "hi\n", "an event that is no part of an answer"),
        (200, EVENTS, [{"error": {"message": "too hot"}}], "", "the server ended the answer: too hot"),
    ],
)
def test_answers_that_are_none(run, tmp_path, status, kind, parts, out, message):
    """Each is one line of an error, for a chat and for a load."""
    with answering(lambda handler: send(handler, status, kind, *parts)) as url:
        code, shown, err = run("chat", "--url", url, "--model", "m", stdin="a\nb")
        assert (code, shown) == (1, out)
        assert message in err.splitlines()[-1]
        file = tmp_path / "talk.json"
        code, _, err = run("chat", "--url", url, "--model", "m", typed=f"a\n/save {file}\n")
        assert (code, json.loads(file.read_text())) == (0, [])
        assert message in err
        load = ("bench", "serve", "--url", url, "--model", "m", "--num-prompts", "2")
        line = run.fails(*load, "--endpoint", "/v1/chat/completions", code=1)
        assert line.startswith("paged: all 2 requests failed, the first with: ")
        assert message in line


def test_addresses_and_options_that_are_wrong(run):
    with answering(lambda handler: send(handler, 200, "text/html", b"<html>")) as url:
        assert "/v1/models is no list of models in JSON" in run.fails("chat", "--url", url, code=1)
    assert "no server of HTTP answers at" in run.fails("chat", "--url", url, code=1)  # it has ended
    assert "--url is an address such as" in run.refused("chat", "--url", "ftp://a")
    assert "these options: --dtype, --num-blocks" in run.refused(
        "chat", "--url", url, "--num-blocks", "3", "--dtype", "float32"
    )
    assert "--api-key is for a server" in run.refused("chat", "--api-key", "k")
    assert "--n and --best-of have no place" in run.refused("chat", "--url", url, "--n", "2")


def test_an_interrupt_ends_the_answer_of_a_server(run):
    """Even while nothing comes; the server sees that, and the conversation goes on."""
    cut = threading.Event()

    def answer(handler):
        if len(handler.body["messages"]) == 1:
            send(handler, 200, EVENTS, delta("hi"))
            eventually(lambda: "hi" in sys.stdout.getvalue())  # the chat has shown it
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            handler.connection.settimeout(60)
            assert handler.rfile.read() == b""
            cut.set()
        else:
            assert handler.body["messages"][1] == {"role": "assistant", "content": "hi"}
            send(handler, 200, EVENTS, delta("yes", "stop"), b"data: [DONE]\n\n")

    with answering(answer) as url:
        code, out, err = run("chat", "--url", url, "--model", "m", typed="a\nb\n")
        assert cut.wait(60)
    assert (code, out.split(">>> ")[1:3]) == (0, ["hi\n", "yes\n"])
    assert "paged:" not in err


def figures_in(out):
    return dict(map(str.strip, line.rsplit(":", 1)) for line in out.splitlines() if ":" in line)


def test_a_load_on_the_server(run, served, tmp_path):
    """Lengths are those asked for, and figures follow from those of the requests."""
    file = tmp_path / "result.json"
    argv = ("bench", "serve", "--url", served.url, "--num-prompts", 9, "--ignore-eos", "--save-result", file)
    sizes = ("--random-input-len", 7, "--random-output-len", 5, "--max-concurrency", 3, "--request-rate", 300)
    code, out, err = run(*argv, *sizes, "--seed", 3)
    figures = figures_in(out)
    result = json.loads(file.read_text())
    assert (code, err) == (0, "")
    assert figures["Successful requests"] == "9"
    assert figures["Total input tokens"] == str(9 * 7)
    assert figures["Total generated tokens"] == str(9 * 5)
    assert figures["Maximum request concurrency"] == "3"
    assert figures["Peak concurrent requests"] == f"{result['max_concurrent_requests']:.2f}"
    assert 1 <= result["max_concurrent_requests"] <= 3
    assert result["input_lens"] == [7] * 9
    ttfts = sorted(result["ttfts"])
    assert figures["Median TTFT (ms)"] == f"{1000 * ttfts[4]:.2f}"
    gaps = [sum(itl) / 4 for itl in result["itls"]]
    assert figures["Mean TPOT (ms)"] == f"{1000 * sum(gaps) / 9:.2f}"
    assert figures["Request throughput (req/s)"] == f"{9 / result['duration']:.2f}"
    prompts = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "def f(x):"})
    chat = ("--endpoint", "/v1/chat/completions", "--prompts", prompts)
    assert run(*argv, *sizes[2:4], *chat)[0] == 0
    lengths = json.loads(file.read_text())["input_lens"]
    assert lengths == [lengths[0], lengths[1]] * 4 + [lengths[0]]
    assert lengths[0] < lengths[1]


def test_reasoning_is_text_of_a_load(run):
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    last = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}
    argv = ("--model", "m", "--num-prompts", "2", "--endpoint", "/v1/chat/completions")
    parts = (thought, thought, last, b"data: [DONE]\n\n")
    with answering(lambda handler: send(handler, 200, EVENTS, *parts)) as url:
        code, out, _ = run("bench", "serve", "--url", url, *argv)
    assert (code, figures_in(out)["Total generated tokens"]) == (0, "4")


def test_the_terms_of_a_load_are_kept(run):
    """Never more at a time than asked for, at the times of the seed; a request that fails is counted."""
    lock, now, most, bodies, times = threading.Lock(), [0], [0], [], []
    together = threading.Barrier(2, timeout=60)  # so that the first two are there at once
    usage = {"prompt_tokens": 4, "completion_tokens": 2}

    def answer(handler):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            bodies.append(handler.body["prompt"])
            times.append(time.perf_counter())
            is_first = len(bodies) == 1
            is_early = "--max-concurrency" in sys.argv and len(bodies) <= 2
        if is_early:
            together.wait()
        with lock:
            now[0] -= 1
        if is_first:
            send(handler, 500, "text/plain", b"no")
        else:
            last = {"choices": [], "usage": usage}
            send(handler, 200, EVENTS, {"choices": [{"text": "x"}]}, last, b"data: [DONE]\n\n")

    argv = ("--num-prompts", "8", "--random-input-len", "4", "--model", "m")
    with answering(answer) as url:
        code, out, err = run("bench", "serve", "--url", url, *argv, "--max-concurrency", "2")
        assert (code, most[0], figures_in(out)["Failed requests"]) == (1, 2, "1")
        assert "1 of 8 requests failed, the first with: " in err
        first = sorted(bodies)
        bodies.clear()
        times.clear()
        started = time.perf_counter()
        run("bench", "serve", "--url", url, *argv, "--request-rate", "20")
        rng = random.Random(0)
        prompts = [rng.choices(range(1000), k=4) for _ in range(8)]
        gaps = [rng.expovariate(20) for _ in range(8)]
        assert times[-1] - started > sum(gaps[1:])
        assert sorted(bodies) == first == sorted(prompts)
    assert "--request-rate is above 0" in run.fails("bench", "serve", "--request-rate", "0")
    assert "--endpoint is /v1/completions or" in run.fails("bench", "serve", "--endpoint", "/v1/x")
