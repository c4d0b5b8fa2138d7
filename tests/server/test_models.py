"""One server of several models: which requests reach which, and what becomes of those that cannot."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from paged.architectures.config import DEMO
from paged.base.errors import CheckpointError, ConfigError
from paged.checkpoints.library.models_file import ModelsFile
from paged.server.http.streams import StreamedResponse
from paged.server.models import catalog, routes
from paged.server.models.catalog import Catalog
from tests import at_home
from tests.support.lobbies import SIZE, lobby_here, lobby_of_processes
from tests.support.served import PATIENCE_S, Served, eventually, held

FILE = """\
[a]
checkpoint = "demo"
[b]
checkpoint = "demo"
keep_alive = -1
[c]
checkpoint = "demo"
system = "You speak of snakes."
template = "plain"
[c.sampling]
max_tokens = 3
"""
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "models.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def lobby(engine, file):
    with lobby_here(engine, file, admin_key="admin") as (served, loading):
        yield served, loading


def completion(model: str, **more: object) -> dict[str, object]:
    return {"model": model, "prompt": "def f", "max_tokens": 4, "seed": 1, **more}


def states(served: Served) -> dict[str, str]:
    models = json.loads(served.request("GET", "/v1/models")[2])["data"]
    return {each["id"]: each["state"] for each in models}


def error_of(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    return answer[0], json.loads(answer[2])["error"]["message"]


ADMIN = {"authorization": "Bearer admin"}


def test_requests_reach_their_models_which_make_room_for_each_other(lobby, served, engine):
    server, loading = lobby
    alone = served.post(COMPLETIONS, prompt="def f", max_tokens=4, seed=1)["choices"]
    for name in "abab":
        body = server.post(COMPLETIONS, **completion(name))
        assert (body["model"], body["choices"]) == (name, alone)
    assert loading.log == ["load a", "unload a", "load b", "unload b", "load a", "unload a", "load b"]
    assert states(server) == {"a": "absent", "b": "loaded", "c": "absent"}
    assert json.loads(server.request("GET", "/ready")[2]) == {"status": "ready", "loaded": ["b"]}
    metrics = server.request("GET", "/metrics")[2].decode()
    for name in "ab":  # the counts stay when a model goes
        assert (
            f'request_success_total{{engine="0",finished_reason="length",model_name="{name}"}} 2.0' in metrics
        )
    assert f'http_responses_total{{code="200",route="{COMPLETIONS}"}} 4.0' in metrics
    assert "\npaged:kv_cache_blocks_pinned{" in metrics
    assert engine.config.model == "demo"


def test_system_prompt_template_and_defaults_are_the_models_own(lobby):
    server, _ = lobby
    message = [{"role": "user", "content": "hi"}]
    body = server.post(
        "/v1/chat/completions", model="c", messages=message, return_prompt_text=True, max_tokens=1
    )
    assert body["prompt_text"].startswith("System: You speak of snakes.")
    own = [{"role": "system", "content": "Mine."}, *message]
    body = server.post("/v1/chat/completions", model="c", messages=own, return_prompt_text=True, max_tokens=1)
    assert body["prompt_text"].startswith("System: Mine.")


def test_a_stream_waits_with_blank_lines_and_ends_with_an_error_if_loading_fails(lobby, monkeypatch):
    server, loading = lobby
    monkeypatch.setattr(routes, "WAIT_S", 0.02)
    write, kept_open = StreamedResponse.write, []

    async def noted(stream, body: bytes, *, more: bool = True) -> None:
        await write(stream, body, more=more)
        if body and not body.strip():
            kept_open.append(stream)

    def open_gate(num_streams: int) -> None:
        kept_open.clear()
        eventually(lambda: sum(kept_open.count(each) >= 2 for each in {*kept_open}) == num_streams)
        loading.gate.set()

    monkeypatch.setattr(StreamedResponse, "write", noted)
    loading.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        fine = pool.submit(server.request, "POST", COMPLETIONS, completion("a", stream=True))
        open_gate(1)
        status, headers, data = fine.result()
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    assert data.startswith(b"\n\n")
    assert data.endswith(b"data: [DONE]\n\n")
    loading.gate.clear()
    loading.errors["b"] = CheckpointError("b is damaged")
    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(server.request, "POST", COMPLETIONS, completion("b", stream=True))
        message = {
            "model": "b",
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 2,
            "stream": True,
        }
        other = pool.submit(server.request, "POST", "/v1/messages", message)
        open_gate(2)
        status, _, data = failing.result()
        assert status == 200
        (event,) = data.strip().split(b"\n\n")
        assert json.loads(event.removeprefix(b"data: "))["error"]["message"].endswith("loaded: b is damaged")
        assert other.result()[2].strip().startswith(b"event: error\ndata: ")
    # What a model refuses after its stream has begun is an event, too.
    loading.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        wrong = pool.submit(server.request, "POST", COMPLETIONS, completion("c", stream=True, top_p=7))
        open_gate(1)
        assert b"top_p must be" in wrong.result()[2]


def test_a_model_that_fails_is_an_error_of_its_requests_alone(lobby):
    server, loading = lobby
    loading.errors["a"] = CheckpointError("a is damaged")
    answer = server.request("POST", COMPLETIONS, completion("a"))
    assert error_of(answer) == (503, "the model a could not be loaded: a is damaged")
    assert answer[1]["retry-after"] == "5"
    server.front.host.residency.models["a"].pause_until += PATIENCE_S  # however long it takes to ask again
    again = server.request("POST", COMPLETIONS, completion("a"))
    assert error_of(again)[0] == 503
    assert loading.log == ["load a"]  # no second try within the pause
    assert server.post(COMPLETIONS, **completion("b"))["model"] == "b"


def test_keep_alive_of_requests_and_models(lobby):
    server, loading = lobby
    server.post(COMPLETIONS, **completion("a", keep_alive=0))
    eventually(lambda: loading.log == ["load a", "unload a"])
    for route, more in (("chat", {"messages": []}), ("generate", {})):  # it is not loaded to be unloaded
        body = {"model": "a", "keep_alive": 0, "stream": False, **more}
        assert server.post(f"/api/{route}", **body)["done_reason"] == "unload"
    assert loading.log == ["load a", "unload a"]
    server.post(COMPLETIONS, **completion("b"))
    resident = server.front.host.residency.models["b"]
    assert resident.keep_alive == float("inf")
    server.post(COMPLETIONS, **completion("b", keep_alive="10m"))
    assert resident.keep_alive == 600
    answer = server.request("POST", COMPLETIONS, completion("b", keep_alive="soon"))
    assert error_of(answer)[0] == 400
    assert "keep_alive must be a number of seconds or a duration" in error_of(answer)[1]


def test_a_changed_file_holds_from_the_next_request_on(engine, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(catalog, "SETTLED_S", 1e6)
    file = tmp_path / "models.toml"
    file.write_text(FILE)
    message = [{"role": "user", "content": "hi"}]
    body = {"model": "c", "messages": message, "return_prompt_text": True, "max_tokens": 1}
    with lobby_here(engine, file, memory=2 * SIZE) as (server, loading):
        server.post(COMPLETIONS, **completion("a"))
        assert "snakes" in server.post("/v1/chat/completions", **body)["prompt_text"]
        # The lines of the others move, which changes none of them.
        file.write_text("# new\n" + FILE.replace("snakes", "birds"))
        assert "birds" in server.post("/v1/chat/completions", **body)["prompt_text"]
        server.post(COMPLETIONS, **completion("a"))
        loads = [each for each in loading.log if "shares" not in each]
        assert loads == ["load a", "load c", "unload c", "load c"]
        file.write_text("[c]\nchekpoint = 'demo'\n")
        for _ in range(3):  # a wrong file changes nothing, and is logged once
            assert "birds" in server.post("/v1/chat/completions", **body)["prompt_text"]
        (told,) = [each.getMessage() for each in caplog.records if "not in force" in each.getMessage()]
        assert "line 2: [c] has no key 'chekpoint'" in told
        file.write_text('[d]\ncheckpoint = "demo"\n')
        assert [*states(server)] == ["a", "b", "c"]  # an editor may be writing the file
        os.utime(file, (1.0, 1.0))  # long ago
        assert [*states(server)] == ["d"]
        eventually(lambda: {*loading.log[-2:]} == {"unload a", "unload c"})


def test_what_clients_see_of_a_template_is_the_models_own(engine, tmp_path):
    file = tmp_path / "models.toml"
    own = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    file.write_text(f"[a]\ncheckpoint = 'demo'\ntemplate = '{own}'\n")
    pins: list[tuple[dict[str, str], str | None, bool]] = []
    with lobby_here(engine, file, admin_key="admin") as (server, _):
        shown = [server.post("/api/show", model="a")]
        server.request("POST", "/admin/models/a/load", headers=ADMIN)
        shown.append(server.post("/api/show", model="a"))
        assert [each["template"] for each in shown] == [own, own]
        assert json.loads(server.request("GET", "/props")[2])["chat_template"] == own
        (model,) = server.front.loaded.values()

        async def pin_prefix(prompt, salt, *, is_pinned, lora_request):
            assert lora_request is None
            pins.append((prompt, salt, is_pinned))
            return 16

        model.client.pin_prefix = pin_prefix  # of an engine of processes
        try:
            body = {"messages": [{"role": "system", "content": "Hi."}]}
            assert server.request("POST", "/admin/models/a/pin", body, ADMIN)[0] == 200
        finally:
            del model.client.pin_prefix
    ((prompt, salt, is_pinned),) = pins
    assert (prompt["prompt"], salt, is_pinned) == ("<system>Hi.", None, True)


def test_the_operator_loads_and_unloads(lobby):
    server, loading = lobby
    assert server.request("POST", "/admin/models/a/load")[0] == 401
    assert json.loads(server.request("POST", "/admin/models/a/load", headers=ADMIN)[2])["state"] == "loaded"
    assert server.request("POST", "/admin/models/none/load", headers=ADMIN)[0] == 404
    server.request("POST", "/admin/models/a/unload", headers=ADMIN)
    eventually(lambda: loading.log == ["load a", "unload a"])
    assert error_of(server.request("POST", "/admin/replicas/2", headers=ADMIN))[0] == 400
    assert server.request("POST", "/admin/reset-prefix-cache", headers=ADMIN)[0] == 200


def test_a_model_in_use_stays_and_others_wait_for_it(lobby, engine):
    server, loading = lobby
    server.post(COMPLETIONS, **completion("a"))
    with ThreadPoolExecutor(2) as pool:
        with held(engine):
            first = pool.submit(server.post, COMPLETIONS, **completion("a"))
            eventually(lambda: server.front.host.residency.models["a"].users == 1)
            second = pool.submit(server.post, COMPLETIONS, **completion("b"))
            eventually(lambda: len(server.front.host.residency.waiting) == 1)
            assert loading.log == ["load a"]
        assert first.result()["model"] == "a"
        assert second.result()["model"] == "b"
    assert loading.log == ["load a", "unload a", "load b"]


def test_busy_engines_share_the_threads(engine, file):
    """A model that is busy alone has them all again at its next request."""
    with lobby_here(engine, file, memory=2 * SIZE) as (server, loading), ThreadPoolExecutor(2) as pool:
        with held(engine):
            both = [pool.submit(server.post, COMPLETIONS, **completion(name)) for name in "ab"]
            models = server.front.host.residency.models
            eventually(lambda: len(models) == 2 and all(each.users for each in models.values()))
        for each in both:
            each.result()
        assert {"a shares with 2", "b shares with 2"} <= {*loading.log}
        server.post(COMPLETIONS, **completion("a"))
        assert "a shares with 1" in loading.log


def test_clients_that_leave_while_a_model_loads_leave_nothing(lobby):
    server, loading = lobby
    loading.gate.clear()
    body = json.dumps(completion("a")).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    sockets = [server.connect() for _ in range(5)]
    for each in sockets:
        each.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    residency = server.front.host.residency
    eventually(lambda: len(residency.waiting) == 5)
    for each in sockets:
        each.close()
    eventually(lambda: residency.waiting == [])
    loading.gate.set()
    assert server.post(COMPLETIONS, **completion("a"))["model"] == "a"
    eventually(lambda: residency.models["a"].users == 0)
    assert server.front.num_accepted == 0


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "x"}, 400, "model is missing: this server has 'a', 'b', 'c'"),
        ({"prompt": "x", "model": 5}, 400, "model must be a string, got 5"),
        ({"prompt": "x", "model": "d"}, 404, "the model 'd' is not here; this server has 'a', 'b', 'c'"),
        ({"prompt": "x", "model": "../a"}, 404, "the model '../a' is not here"),
        ({"prompt": "x", "model": "m" * 5000}, 400, "model has 5,002 bytes; 2,048 is the most"),
        (b"[]", 400, "the body is not an object of JSON"),
        (b"{", 400, "the body is not an object of JSON"),
        (b'{"model": ' + b"[" * 100_000, 400, "the body is not an object of JSON"),
    ],
    ids=["none", "number", "unknown", "path", "long", "list", "cut", "deep"],
)
def test_bodies_without_a_model_load_none(lobby, body, status, message):
    server, loading = lobby
    headers = {"content-type": "application/json"}
    found, text = error_of(server.request("POST", COMPLETIONS, body, headers))
    assert (found, text[: len(message)]) == (status, message)
    assert loading.log == []


def test_what_never_fits_is_refused_with_the_figures(engine, file):
    with lobby_here(engine, file, memory=SIZE // 2) as (server, loading):
        status, message = error_of(server.request("POST", COMPLETIONS, completion("a")))
    assert status == 400
    assert message.startswith(
        "the model a takes 1.00 GiB (a of the test), and --memory is 0.50 GiB: raise it"
    )
    assert loading.log == []


def test_requests_that_wait_too_long_are_told_when_to_try_again(engine, file):
    with lobby_here(engine, file, max_load_wait_s=0.05) as (server, loading):
        loading.gate.clear()
        answer = server.request("POST", COMPLETIONS, completion("a"))
        loading.gate.set()
    assert error_of(answer)[0] == 503
    assert "could not be loaded within 0.05 s" in error_of(answer)[1]
    assert int(answer[1]["retry-after"]) >= 1


def test_a_key_sees_and_loads_its_own_models_alone(engine, file, tmp_path):
    key = "secret"
    keys = tmp_path / "keys.jsonl"
    digest = hashlib.sha256(key.encode()).hexdigest()
    keys.write_text(json.dumps({"sha256": digest, "tenant": "t", "models": ["a"]}) + "\n")
    keys.chmod(0o600)
    with lobby_here(engine, file, api_keys=str(keys)) as (server, loading):
        headers = {"authorization": f"Bearer {key}"}
        assert server.request("POST", COMPLETIONS, completion("a"))[0] == 401
        assert server.request("POST", COMPLETIONS, completion("b"), headers)[0] == 404
        assert loading.log == []
        assert server.request("POST", COMPLETIONS, completion("a"), headers)[0] == 200
        listed = json.loads(server.request("GET", "/v1/models", headers=headers)[2])["data"]
        assert [each["id"] for each in listed] == ["a"]


def test_a_load_of_many_models_ends_with_every_answer_right(lobby, served):
    """A share of `python -m tests.at_home`, whose engines are processes that get killed."""
    server, loading = lobby
    loading.load_s = 0.01
    texts = {}
    for prompt in at_home.PROMPTS:
        text = served.post(COMPLETIONS, prompt=prompt, **at_home.PARAMS)["choices"][0]["text"]
        texts |= {(name, prompt): text for name in "abc"}
    tally = at_home.load(server, texts, 80, random.Random(1))
    at_home.check(tally, 80, SIZE, may_fail=False)
    assert loading.log.count("load a") > 3
    residency = server.front.host.residency
    eventually(lambda: not residency.waiting and not any(each.users for each in residency.models.values()))
    residency.check()


def test_names_that_are_given_twice_are_refused(file):
    with pytest.raises(ConfigError, match="A is given twice"):
        Catalog(["a", "A"], ModelsFile(file))
    catalog = Catalog(["a", "b"], ModelsFile(file))
    assert [entry.name for entry in catalog.entries()] == ["a", "b"]
    assert catalog.find("B:latest").name == "b"
    assert catalog.find("c") is None


@pytest.mark.usefixtures("no_other_engine")
def test_real_engines_within_the_memory(tmp_path, served):
    """Two models and room for one: a switch, the kill of an engine, and the file deleted under one."""
    alone = served.post(COMPLETIONS, prompt="def f", max_tokens=4, temperature=0)["choices"]
    own = tmp_path / "own"
    shutil.copytree(DEMO, own)
    models = tmp_path / "models.toml"
    models.write_text(f'[a]\ncheckpoint = "demo"\n[a.sampling]\ntop_k = 1\n[b]\ncheckpoint = "{own}"\n')
    options = {"device": "cpu", "num_threads": 1, "max_num_seqs": 8}
    kept = tmp_path / "kept"
    chosen = {"memory": "24MB", "prefix_dir": str(kept), "admin_key": "admin", "max_restarts": 1}
    with lobby_of_processes(models, engine=options, **chosen) as server:
        assert server.post(COMPLETIONS, **completion("a", temperature=0))["choices"] == alone
        pin = {"prompt": "def f(x):\n" * 20}
        pinned = json.loads(server.request("POST", "/admin/models/a/pin", pin, ADMIN)[2])
        assert pinned["pin"] >= 64
        host = server.front.host
        assert host.weights["a"].num_bytes <= host.residency.memory < 2 * host.weights["a"].num_bytes
        (first,) = host.loaded.values()
        assert first.client.text.default_params.top_k == 1
        assert server.post(COMPLETIONS, **completion("b", temperature=0))["choices"] == alone
        assert [*host.loaded] == ["b"]
        process = first.client._engines[0].connection._process
        assert process.wait(0)  # its memory is free
        assert len([*kept.glob("model-a/*.prefix")]) == 1
        shutil.rmtree(own)
        os.kill(host.loaded["b"].client._engines[0].connection._process.pid, signal.SIGKILL)
        status, _, data = server.request("POST", COMPLETIONS, completion("b", temperature=0))
        assert status in (200, 503), data  # it cannot come back without its files, and all others run on
        assert server.post(COMPLETIONS, **completion("a", temperature=0))["choices"] == alone
        (last,) = server.front.host.loaded.values()
        assert last.client._engines[0].connection.stats.num_pinned_blocks == pinned["pin"] // 16
        again = server.request("POST", "/admin/models/a/pin", pin, ADMIN)
        assert error_of(again) == (400, "this prompt is pinned already")
        assert server.request("POST", "/admin/models/a/unpin", pin, ADMIN)[0] == 200
