"""`paged run-batch`: OpenAI's bodies, one result per line whatever is wrong with others, and kills."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from paged import LLMEngine, SamplingParams
from paged.commands import cli, common
from paged.commands.batch_run import BatchRun
from paged.protocol.batch_file import IdentitySet
from paged.protocol.calls.completions import CompletionCall
from paged.protocol.result_file import ResultFile
from tests.support import unhurried_engine_process
from tests.support.command_line import write
from tests.support.own_processes import processes_of
from tests.support.served import eventually

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO = [{"role": "user", "content": "def f(x):"}]
MODEL = ("--num-blocks", "128", "--max-num-seqs", "4", "--device", "cpu")


@pytest.fixture(scope="module")
def engine():
    return LLMEngine("demo", num_blocks=128, max_num_seqs=4, device="cpu")


@pytest.fixture
def loaded(engine, monkeypatch):
    monkeypatch.setattr(common, "start", lambda _: engine)
    yield engine
    engine.scheduler.check()
    assert not engine.has_unfinished_requests()


def line(custom_id, url=COMPLETIONS, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def text_line(i: int) -> dict:
    """Return a line whose number of tokens depends on i, so that lines do not finish in order."""
    return line(f"t{i}", prompt=f"def f{i}(x):", max_tokens=1 + 5 * i % 6, n=1 + i % 2, ignore_eos=True)


def results(file: Path) -> dict[str, dict]:
    """Return the results by identity; check that each occurs once."""
    found = [json.loads(text) for text in file.read_text().splitlines()]
    for result in found:
        assert set(result) == {"id", "custom_id", "response", "error"}
        result["response"]["body"].pop("created", None)
        for usage in [result["response"]["body"].get("usage", {})]:
            usage.pop("prompt_tokens_details", None)  # cached tokens depend on what ran before
    assert len({result["id"] for result in found}) == len(found)
    return {result["id"]: result for result in found}


def by_custom_id(file: Path) -> dict[str | None, dict]:
    return {result["custom_id"]: result for result in results(file).values()}


def test_bodies_are_those_of_openai(run, loaded, tmp_path):
    source = write(
        tmp_path / "in.jsonl",
        line("text", model="demo", prompt="def f(x):", max_tokens=5, temperature=0),
        line("many", prompt=["a", "b"], n=2, echo=True, seed=3, max_tokens=4),
        line("ids", prompt=[5, 6], logprobs=2, temperature=0, max_tokens=2, request_id="r", metadata={}),
        line(
            "chat",
            CHAT,
            metadata={},
            messages=HELLO,
            logprobs=True,
            top_logprobs=2,
            max_completion_tokens=3,
            user="u",
        ),
    )
    before, output = int(time.time()), tmp_path / "out.jsonl"
    code, out, err = run("run-batch", source, output, "--chat-template", "plain")
    assert (code, out) == (0, "")
    assert "4/4" in err
    assert "these fields of bodies had no effect: metadata (2 lines), request_id (1 lines)" in err
    created = json.loads(output.read_text().splitlines()[0])["response"]["body"]["created"]
    assert before <= created <= time.time()
    found = by_custom_id(output)
    for result in found.values():
        assert result["error"] is None
        assert result["response"]["status_code"] == 200
        assert result["response"]["body"]["model"] == "demo"
    body = found["text"]["response"]["body"]
    params = SamplingParams(temperature=0, max_tokens=5)
    (expected,) = loaded.generate("def f(x):", params, use_tqdm=False)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "text": expected.outputs[0].text,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    num_prompt = len(expected.prompt_token_ids)
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 5,
        "total_tokens": num_prompt + 5,
    }
    choices = found["many"]["response"]["body"]["choices"]
    params = SamplingParams(n=2, seed=3, max_tokens=4)
    expected = loaded.generate(["a", "b"], params, use_tqdm=False)
    assert [choice["text"] for choice in choices] == [
        output.prompt + completion.text for output in expected for completion in output.outputs
    ]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    places = found["ids"]["response"]["body"]["choices"][0]["logprobs"]
    assert [len(top) for top in places["top_logprobs"]] == [2, 2]
    assert places["text_offset"] == [0, len(places["tokens"][0])]
    assert places["token_logprobs"] == [max(top.values()) for top in places["top_logprobs"]]
    body = found["chat"]["response"]["body"]
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    places = choice["logprobs"]["content"]
    assert "".join(place["token"] for place in places) == choice["message"]["content"]
    for place in places:
        assert bytes(place["bytes"]).decode() == place["token"]
        assert len(place["top_logprobs"]) == 2
        assert place["logprob"] <= place["top_logprobs"][0]["logprob"]
    prompt = "User: def f(x):\nAssistant:"
    assert body["usage"]["prompt_tokens"] == len(loaded.tokenizer.encode(prompt))


@pytest.mark.usefixtures("loaded")
def test_a_bad_line_is_that_lines_error(run, tmp_path):
    bad = {
        "unknown": (line("unknown", prompt="x", max_tokns=1), "did you mean 'max_tokens'?"),
        "score": (
            line("score", "/v1/score", prompt="x", continuations=["y"]),
            "url '/v1/score' is not supported; it is one of /v1/chat/completions, /v1/completions",
        ),
        "vector": (line("vector", "/v1/embeddings", input=["x", [1]]), "input[1] must be a string, got [1]"),
        "size": (line("size", "/v1/embeddings", input="x", dimensions=999), "dimensions must be at most 256"),
        "prompt": (
            line("prompt", "/v1/embeddings", input="x", prompt_name="q"),
            "prompt_name must be one of",
        ),
        "get": ({**line("get", prompt="x"), "method": "GET"}, "method must be 'POST', got 'GET'"),
        "extra": ({**line("extra", prompt="x"), "priority": 1}, "a line got an unknown argument 'priority'"),
        "nobody": ({"custom_id": "nobody", "url": CHAT}, "body is missing"),
        "body": ({"custom_id": "body", "url": CHAT, "body": []}, "body must be an object, got []"),
        "range": (line("range", prompt="x", temperature=-1), "temperature must be at least 0, got -1"),
        "tokens": (line("tokens", prompt=[10**6]), "the vocabulary is 0 to 4095"),
        # The line's first prompt is in the engine already.
        "second": (line("second", prompt=[[1, 2], [10**6]]), "the vocabulary is 0 to 4095"),
        "template": (line("template", CHAT, messages=HELLO, chat_template="odd"), "'odd' is neither a Jinja"),
        "role": (line("role", CHAT, messages=[{}], chat_template="plain"), "messages[0].role is missing"),
        "refused": (
            line("refused", CHAT, messages=HELLO, chat_template="{{ raise_exception('no') }}"),
            "the chat template refuses this: no",
        ),
        "streamed": (line("streamed", prompt="x", stream=True), "stream must be false"),
        "surrogate": (line("surrogate", prompt="\ud800"), "not valid Unicode"),
        "url": ({**line("url"), "url": [CHAT]}, "url ['/v1/chat/completions'] is not supported"),
    }
    others = [
        ('{"custom_id": ', "Expecting value"),
        ("[1]", "a line must be an object such as"),
        ({"custom_id": ""}, "custom_id must be a non-empty string, got ''"),
        ("\udcff", "line 25: 'utf-8' codec can't decode"),
        ("[" * 100_000, "nested more than 64 deep"),
        ('{"custom_id": "a", "body": {"n": 1, "n": 2}}', "'n' is given twice in one object; give it once"),
    ]
    good = [line("good", prompt="x", max_tokens=2), line("also", prompt="y", max_tokens=2)]
    twice = line("good", prompt="z")
    lines = [good[0], *(text for text, _ in bad.values()), "", twice, *(text for text, _ in others), good[1]]
    source = tmp_path / "in.jsonl"
    text = "\n".join(item if isinstance(item, str) else json.dumps(item) for item in lines)
    source.write_bytes(text.encode(errors="surrogateescape"))
    output = tmp_path / "out.jsonl"
    code, _, err = run("run-batch", source, output)
    num_bad = len(bad) + len(others) + 1
    assert code == 1
    assert err.splitlines()[-1] == (
        f"paged: {num_bad} of {num_bad + 2} lines failed; the error in their results says why, "
        "--retry-failed runs them again"
    )
    found = [*results(output).values()]
    assert len(found) == num_bad + 2
    for custom_id, (_, message) in bad.items():
        (result,) = (result for result in found if result["custom_id"] == custom_id)
        response = result["response"]
        assert response["status_code"] == 400
        assert message in response["body"]["error"]["message"]
        assert response["body"]["error"]["type"] == "invalid_request_error"
        assert result["error"]["message"] == response["body"]["error"]["message"]
    nameless = [result["error"]["message"] for result in found if result["custom_id"] is None]
    for (_, message), given in zip(others, nameless, strict=True):
        assert message in given
    first, second = sorted(
        (result for result in found if result["custom_id"] == "good"), key=lambda r: r["error"] is not None
    )
    assert first["response"]["status_code"] == 200
    assert "custom_id 'good' is that of an earlier line" in second["error"]["message"]
    # A second run has nothing to do and loads no model.
    content = output.read_bytes()
    run.monkeypatch.setattr(common, "start", lambda _: pytest.fail("the model was loaded"))
    code, _, err = run("run-batch", source, output)
    assert code == 1
    assert err.splitlines()[0] == f"paged: nothing to do: all {num_bad + 2} lines have results"
    assert output.read_bytes() == content


@pytest.mark.usefixtures("loaded")
def test_models_go_by_their_name(run, tmp_path):
    source = write(tmp_path / "in.jsonl", line("a", model="gpt-4o", prompt="x", max_tokens=1))
    assert run("run-batch", source, tmp_path / "1.jsonl")[0] == 1
    (result,) = results(tmp_path / "1.jsonl").values()
    assert result["response"]["status_code"] == 404
    assert result["response"]["body"]["error"]["code"] == "model_not_found"
    assert "'gpt-4o' is not here, this is 'demo'; see --served-model-name" in result["error"]["message"]
    assert run("run-batch", source, tmp_path / "2.jsonl", "--served-model-name", "gpt-4o")[0] == 0
    (result,) = results(tmp_path / "2.jsonl").values()
    assert result["response"]["body"]["model"] == "gpt-4o"


@pytest.mark.usefixtures("loaded")
def test_requests_that_do_not_end_are_errors(run, tmp_path):
    late = line("late", prompt="x", timeout_s=1e-9, max_tokens=50)
    source = write(tmp_path / "in.jsonl", late, line("fine", prompt="x", max_tokens=1))
    assert run("run-batch", source, tmp_path / "out.jsonl")[0] == 1
    found = by_custom_id(tmp_path / "out.jsonl")
    assert found["late"]["response"]["status_code"] == 504
    assert "timeout_s" in found["late"]["error"]["message"]
    assert found["fine"]["response"]["status_code"] == 200


def test_embeddings_are_lines_among_others(run, loaded, tmp_path):
    texts = ["def f(x):", "import os", "x"]
    source = write(
        tmp_path / "in.jsonl",
        line("one", EMBEDDINGS, input=texts[0]),
        line("text", prompt="x", max_tokens=3, temperature=0),
        line("many", EMBEDDINGS, input=texts, pooling="mean", normalize=False, encoding_format="base64"),
        line("bad", EMBEDDINGS, input=[[1, 2], [10**6]]),
    )
    assert run("run-batch", source, tmp_path / "out.jsonl")[0] == 1
    found = by_custom_id(tmp_path / "out.jsonl")
    (vector,) = found["one"]["response"]["body"]["data"]
    (expected,) = loaded.encode([texts[0]], use_tqdm=False)
    assert vector == {"object": "embedding", "index": 0, "embedding": expected.outputs.embedding}
    body = found["many"]["response"]["body"]
    expected = loaded.encode(texts, pooling="mean", normalize=False, use_tqdm=False)
    for item, output in zip(body["data"], expected, strict=True):
        numbers = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
        np.testing.assert_allclose(numbers, output.outputs.embedding, rtol=1e-6)
    num_tokens = sum(len(output.prompt_token_ids) for output in expected)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert found["text"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert found["bad"]["response"]["status_code"] == 400
    assert "the vocabulary is 0 to 4095" in found["bad"]["error"]["message"]


def test_lines_are_read_as_they_are_needed(run, loaded, tmp_path, monkeypatch):
    source, output = write(tmp_path / "in.jsonl", *map(text_line, range(40))), tmp_path / "out.jsonl"
    ahead, answer = [], BatchRun.answer

    def counting(lines):
        for number, item in enumerate(lines, start=1):
            ahead.append(number - output.read_bytes().count(b"\n"))
            yield item

    monkeypatch.setattr(BatchRun, "answer", lambda self, lines: answer(self, counting(lines)))
    assert run("run-batch", source, output)[0] == 0
    assert len(ahead) == 40
    # Lines that run, lines that wait, and the next one.
    assert max(ahead) <= 2 * loaded.config.max_num_seqs + 1


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """Return 27 lines, valid and invalid."""
    lines = [*map(text_line, range(24)), line("bad", prompt="x", n=0), text_line(3), '{"custom_id"']
    return write(tmp_path_factory.mktemp("batch") / "in.jsonl", *lines)


@pytest.mark.usefixtures("loaded")
def test_a_run_that_was_cut_anywhere_is_completed(run, tmp_path):
    lines = [line(str(i), prompt="x", max_tokens=2 + 2 * (i == 0)) for i in range(4)]
    batch, output = write(tmp_path / "in.jsonl", *lines, "{", lines[0]), tmp_path / "out.jsonl"
    run("run-batch", batch, output)
    whole, expected = output.read_bytes(), results(output)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (
        0,
        1,
        9,
        ends[0] - 1,
        ends[0],
        ends[0] + 17,
        ends[0] + 18,
        ends[0] + 30,
        ends[-2] - 2,
        ends[-2],
    ):
        output.write_bytes(whole[:cut])
        run("run-batch", batch, output)
        assert results(output) == expected
        kept = max((end for end in ends if end <= cut), default=0)
        assert output.read_bytes()[:kept] == whole[:kept]


@pytest.mark.usefixtures("loaded")
def test_a_run_goes_on_with_the_options_that_it_was_begun_with(run, tmp_path):
    batch, output = write(tmp_path / "in.jsonl", *map(text_line, range(2))), tmp_path / "out.jsonl"
    run("run-batch", batch, output)
    whole = output.read_bytes()
    half = whole[: whole.index(b"\n") + 5]
    for cut in (half, whole):
        output.write_bytes(cut)
        message = run.refused("run-batch", batch, output, "--seed", "1", "--chat-template", "plain", code=1)
        assert (
            f"{output} was begun with other options: chat_template was not given and is 'plain'; seed was"
            in message
        )
        assert output.read_bytes() == cut


@pytest.mark.usefixtures("loaded")
def test_results_without_options_are_gone_on_with(run, tmp_path):
    batch, output = write(tmp_path / "in.jsonl", *map(text_line, range(2))), tmp_path / "out.jsonl"
    run("run-batch", batch, output)
    whole = results(output)
    output.write_bytes(output.read_bytes()[:-5])
    (tmp_path / "out.jsonl.options.json").unlink()
    said = f"paged: the options of the earlier results in {output} are not known; going on with those of this"
    assert said in run("run-batch", batch, output, "--max-num-seqs", "1")[2]
    assert results(output) == whole
    assert said not in run("run-batch", batch, output)[2]


ENGINE = unhurried_engine_process.__name__
# A run whose engine processes are slow while there is a file.
PROGRAM = f"""
from paged.__main__ import main
from paged.server import launcher
launcher.ENGINE_PROCESS = {ENGINE!r}
raise SystemExit(main())
"""


def started(batch: Path, output: Path, *options: str) -> subprocess.Popen[str]:
    """Start a run in a process of its own. Wait until five lines have results."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    environment[unhurried_engine_process.WHILE] = str(output.with_suffix(".slow"))
    argv = [sys.executable, "-c", PROGRAM, "run-batch", str(batch), str(output), *MODEL, *options]
    process = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)
    eventually(
        lambda: (output.exists() and output.read_bytes().count(b"\n") >= 5) or process.poll() is not None
    )
    return process


@pytest.mark.usefixtures("loaded")
def test_a_killed_run_is_completed_by_the_next(run, batch, tmp_path):
    """Also one whose engines are killed: they are replaced, and their lines go on in others."""
    # These are long and come last, so that they are not done at the kills.
    long = [line(f"long{i}", prompt=f"x{i}", max_tokens=400, ignore_eos=True) for i in range(8)]
    batch = write(tmp_path / "in.jsonl", *batch.read_text().splitlines(), *long)
    expected = tmp_path / "whole.jsonl"
    run("run-batch", batch, expected)
    output = tmp_path / "killed.jsonl"
    num_done = 35
    while num_done == 35:  # on a busy machine it may have ended before it is killed
        output.unlink(missing_ok=True)
        with started(batch, output) as process:
            process.send_signal(signal.SIGKILL)
        num_done = output.read_bytes().count(b"\n")
    assert 5 <= num_done < 35
    _, _, err = run("run-batch", batch, output, *MODEL)
    assert "35/35" in err
    assert results(output) == results(expected)
    assert len(results(output)) == 35
    output, slow = tmp_path / "replicas.jsonl", tmp_path / "replicas.slow"
    slow.write_text("0.05")
    with started(batch, output, "--replicas", "2") as process:
        engines = processes_of(ENGINE, process.pid)
        for engine in engines:
            engine.kill()
        slow.unlink()
        _, err = process.communicate(timeout=120)
    assert (process.returncode, results(output)) == (1, results(expected)), err
    assert not any(each.is_running() for each in engines)
    assert err.count("has ended (by signal SIGKILL)") == 2, err


@pytest.mark.usefixtures("loaded")
def test_failed_lines_are_answered_again(run, tmp_path, monkeypatch):
    """Each line has one result at the end, also if the retry is killed; a link and a mode are kept."""
    names = [f"m{i % 2}" for i in range(6)]
    lines = [line(str(i), model=name, prompt="x", max_tokens=3) for i, name in enumerate(names)]
    source, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    link = tmp_path / "link.jsonl"
    link.symlink_to(output)
    argv = ("run-batch", source, link, "--served-model-name")
    assert run(*argv, "m0")[0] == 1
    output.chmod(0o640)
    good = [result for result in by_custom_id(output).values() if result["error"] is None]
    assert len(good) == 3
    before = output.read_bytes()
    # It fails before the new content is in place, and after that, at the first new result.
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        assert run(*argv, "m1", "--retry-failed")[0] == 1
    assert output.read_bytes() == before
    names = ["in.jsonl", "link.jsonl", "out.jsonl", "out.jsonl.options.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    with monkeypatch.context() as patched:
        patched.setattr(ResultFile, "write", fails)
        assert run(*argv, "m1", "--retry-failed")[0] == 1
    assert [*by_custom_id(output).values()] == good
    with output.open("ab") as file:
        file.write(before[:30])
    assert run(*argv, "m1")[0] == 0  # the lines whose errors are gone
    found = by_custom_id(output)
    assert len(found) == 6
    assert [*found.values()][:3] == good
    assert all(result["error"] is None for result in found.values())
    assert (link.is_symlink(), output.stat().st_mode & 0o777) == (True, 0o640)
    code, _, err = run(*argv, "m1", "--retry-failed")
    assert (code, err) == (0, "paged: nothing to do: all 6 lines have results\n")


def fails(*_):
    raise OSError("the disk is full")


def test_nothing_else_is_written_over(run, tmp_path):
    source = write(tmp_path / "in.jsonl", line("a", prompt="x"))
    other = write(tmp_path / "notes.txt", "a note")
    for text in ("a note\n", "a note", '{"id": "x"}\n'):
        other.write_text(text)
        assert f"{other}:1: not a result of `paged run-batch`" in run.refused(
            "run-batch", source, other, code=1
        )
        assert other.read_text() == text
    assert "would overwrite the input" in run.refused("run-batch", source, source, code=1)
    assert "No such file" in run.refused("run-batch", tmp_path / "missing", tmp_path / "out", code=1)
    missing = tmp_path / "missing" / "out"
    assert f"{missing}: no such directory" in run.refused("run-batch", source, missing, code=1)
    assert "missing.jinja: No such" in run.refused(
        "run-batch", source, tmp_path / "out", "--chat-template", "missing.jinja", code=1
    )
    assert "--block-size must be" in run.refused("run-batch", source, tmp_path / "out", "--block-size", "3")
    refused = run.refused("run-batch", source, tmp_path / "out", "--router", "round-robin")
    assert "router goes with replicas, the number of engine processes; give both" in refused
    assert "replicas must be from 1 to 1024, got 0" in run.refused(
        "run-batch", source, tmp_path / "out", "--replicas", "0"
    )
    assert "/dev/null: not a regular file" in run.refused("run-batch", source, "/dev/null", code=1)
    assert "/dev/null: not a file that can be read twice" in run.refused(
        "run-batch", "/dev/null", tmp_path / "out", code=1
    )
    with (tmp_path / "out").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another process is writing this file" in run.refused(
            "run-batch", source, tmp_path / "out", code=1
        )


def test_a_set_of_identities_is_a_set():
    # Some identities collide, and there are more than the initial table holds.
    identities = [f"{5:016x}{i:016x}" for i in range(1, 40)]
    identities += [hashlib.sha256(b"%d" % i).hexdigest()[:32] for i in range(900)]
    some, plain = IdentitySet(), set()
    for identity in identities * 2:
        assert (identity in some) == (identity in plain)
        assert some.add(identity) == (identity not in plain)
        plain.add(identity)
        assert len(some) == len(plain)
    assert all(identity in some for identity in identities)
    assert f"{5:016x}{0:016x}" not in some


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("name", ["prompts", "params"])
def test_an_unexpected_error_is_that_of_its_line(run, tmp_path, monkeypatch, caplog, name):
    original = getattr(CompletionCall, name)

    def fail(self, *args, **more):
        if self.values["prompt"] == "bad":
            raise RecursionError("too deep")
        return original(self, *args, **more)

    monkeypatch.setattr(CompletionCall, name, fail)
    lines = [line("a", prompt="bad", max_tokens=1), line("b", prompt="good", max_tokens=1)]
    source, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    assert run("run-batch", source, output)[0] == common.EXIT_FAILED
    found = {result["custom_id"]: result["response"] for result in results(output).values()}
    assert {name: response["status_code"] for name, response in found.items()} == {"a": 500, "b": 200}
    assert "RecursionError" in found["a"]["body"]["error"]["message"]
    assert "the line 'a' failed" in caplog.text
