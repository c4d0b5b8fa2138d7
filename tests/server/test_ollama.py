"""Ollama's API: what its own client sends, what it reads, and what is refused."""

from __future__ import annotations

import json
import subprocess
import threading
from http.client import HTTPConnection
from pathlib import Path
from shutil import which

import pytest

from paged.architectures.config import DEMO
from paged.base.errors import PagedError, RequestError
from paged.chat.parts import ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from paged.checkpoints.library import pull
from paged.checkpoints.library.local import find_local, local_models
from paged.checkpoints.library.models_file import ModelEntry
from paged.protocol.answers.chats import ChatForm
from paged.protocol.answers.chunks import Head
from paged.protocol.endpoints import ROUTES, parse_call
from paged.protocol.limits import Limits
from paged.protocol.ollama.answers import Durations, OllamaLines
from paged.server.app import new_ollama_app
from paged.server.models import ollama
from paged.server.ollama_models import lmstudio_card, shown_model
from paged.server.options import ServeOptions
from tests.support.fake_hub import fake_hub
from tests.support.lobbies import lobby_here
from tests.support.served import PATIENCE_S, Served, eventually, serving

SUPPORT = Path(__file__).parents[1] / "support"
BODIES = json.loads(
    (SUPPORT / "ollama_bodies.json").read_text()
)  # of the client's calls, by ollama_client.py
CLIENT = Path(__file__).parents[2] / ".venv-clients" / "ollama" / "bin" / "python"
PACKAGES = CLIENT.parents[2] / "javascript" / "node_modules"
HELLO = [{"role": "user", "content": "def f(x):"}]
OPTIONS = {"num_predict": 6, "seed": 1}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "models.toml"
    path.write_text('[a]\ncheckpoint = "demo"\nsystem = "Code."\n')
    return path


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with fake_hub(monkeypatch, tmp_path / "hub") as hub:
        hub.repositories["owner/tiny"] = {
            each.name: each.read_bytes() for each in DEMO.iterdir() if each.is_file()
        }
        yield hub


@pytest.fixture
def server(engine, file):
    with lobby_here(engine, file) as (served, _):
        yield served


def lines(served: Served, path: str, **body: object) -> list[dict[str, object]]:
    status, headers, data = served.request("POST", path, body)
    assert (status, headers["content-type"]) == (200, "application/x-ndjson"), data
    return [json.loads(line) for line in data.splitlines()]


def test_every_call_of_the_client_is_answered(engine, tmp_path, hub):  # noqa: ARG001
    """Its bodies were recorded; a model is copied, deleted and pulled on the way."""
    own = tmp_path / "models.toml"
    own.write_text('[a]\ncheckpoint = "demo"\n')
    with lobby_here(engine, own, allow_model_changes=True) as (served, _):
        for sent in BODIES:
            status, _, data = served.request(sent["method"], sent["path"], sent["body"])
            body = sent["body"] or {}
            wanted = (
                404 if body.get("model") == "none" or sent["path"] in ("/api/create", "/api/push") else 200
            )
            assert status == wanted, (sent, data)
            if status != 200:
                assert [*json.loads(data)] == ["error"]
            elif data and body.get("stream"):
                assert all(isinstance(json.loads(line), dict) for line in data.splitlines())
    assert [each.name for each in local_models()] == ["owner/tiny"]


@pytest.mark.skipif(not CLIENT.exists(), reason="make clients installs it")
def test_the_client_itself(engine, tmp_path, hub):  # noqa: ARG001
    own = tmp_path / "models.toml"
    own.write_text('[a]\ncheckpoint = "demo"\n')
    with lobby_here(engine, own, allow_model_changes=True) as (served, _):
        arguments = [CLIENT, SUPPORT / "ollama_client.py", served.url, "a", tmp_path / "bodies.json"]
        run = subprocess.run(arguments, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    failed = {name for name, each in found.items() if isinstance(each, dict) and "error" in each}
    assert failed == {"unknown", "unknown stream", "create", "push"}
    assert json.loads((tmp_path / "bodies.json").read_text()) == BODIES
    assert found["chat schema"]["message"]["content"].startswith("{")
    assert found["async"]["whole"] == found["async"]["joined"] == found["chat"]["message"]["content"]


@pytest.mark.skipif(
    not (PACKAGES / "ollama").exists() or which("node") is None, reason="make clients installs it"
)
def test_the_javascript_client(engine, tmp_path, hub):  # noqa: ARG001
    own = tmp_path / "models.toml"
    own.write_text('[a]\ncheckpoint = "demo"\n')
    with lobby_here(engine, own, allow_model_changes=True) as (served, _):
        arguments = ["node", SUPPORT / "ollama_client.mjs", PACKAGES.parent, served.url, "a"]
        run = subprocess.run(arguments, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    failed = {name for name, each in found.items() if isinstance(each, dict) and "error" in each}
    assert failed == {"create", "push"}
    assert found["chat stream"] > 1
    assert found["format"]["message"]["content"].startswith("{")


def test_a_stream_is_the_whole_answer_in_lines(server, served):
    whole = server.post("/api/chat", model="a", messages=HELLO, options=OPTIONS, stream=False)
    *parts, last = lines(server, "/api/chat", model="a:latest", messages=HELLO, options=OPTIONS)
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"] != ""
    assert not any(part["done"] for part in parts)
    assert last["model"] == "a:latest"
    assert (last["done"], last["done_reason"]) == (True, "length")
    for end in (last, whole):
        assert (end["eval_count"], end["prompt_eval_count"]) == (6, whole["prompt_eval_count"])
        durations = [end[f"{name}_duration"] for name in ("total", "load", "prompt_eval", "eval")]
        assert all(isinstance(each, int) and each >= 0 for each in durations)
        assert durations[0] >= durations[1]
    # The same as by OpenAI's API, with the system prompt and the sampling of a chat.
    params = {"temperature": 0.8, "min_p": 0.05, "max_tokens": 6, "seed": 1}
    messages = [{"role": "system", "content": "Code."}, *HELLO]
    chat = served.post("/v1/chat/completions", messages=messages, **params)
    assert chat["choices"][0]["message"]["content"] == whole["message"]["content"]


def test_generate_and_raw(server, served):
    whole = server.post("/api/generate", model="a", prompt="def f(x):", options=OPTIONS, stream=False)
    chat = server.post("/api/chat", model="a", messages=HELLO, options=OPTIONS, stream=False)
    assert whole["response"] == chat["message"]["content"]
    raw = server.post("/api/generate", model="a", prompt="def f(x):", options=OPTIONS, stream=False, raw=True)
    params = {"temperature": 0.8, "min_p": 0.05, "max_tokens": 6, "seed": 1}
    assert (
        raw["response"] == served.post("/v1/completions", prompt="def f(x):", **params)["choices"][0]["text"]
    )
    for path, empty in (("/api/generate", {}), ("/api/chat", {"messages": []})):
        assert server.post(path, model="a", **empty)["done_reason"] == "load"
        assert server.post(path, model="a", keep_alive=0, **empty)["done_reason"] == "unload"


def test_a_schema_bounds_the_answer(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    options = {"num_predict": 80, "seed": 2}
    body = server.post("/api/chat", model="a", messages=HELLO, format=schema, options=options, stream=False)
    assert json.loads(body["message"]["content"])["a"] in (1, 2)
    assert body["done_reason"] == "stop"


def test_calls_are_objects_and_reasoning_is_apart():
    made = OllamaLines(Head("i", "o", 0, "m"), ChatForm(), len, Durations(0.0, 0.0), is_chat=True)
    parts = [
        ReasoningDelta("hm"),
        ToolCallStart(0, "c0", "f"),
        ToolArgumentsDelta(0, '{"a"'),
        ToolArgumentsDelta(0, ": 1}"),
        ToolCallStart(1, "c1", "g"),
        ToolArgumentsDelta(1, "{}"),
        ContentDelta("ok"),
    ]
    sent = [line["message"] for part in parts for line in made.take(part)]
    assert sent[0] == {"role": "assistant", "content": "", "thinking": "hm"}
    calls = [call for message in sent for call in message.get("tool_calls", [])]
    assert calls == [
        {"id": "c0", "function": {"name": "f", "arguments": {"a": 1}}},
        {"id": "c1", "function": {"name": "g", "arguments": {}}},
    ]
    assert sent[-1]["content"] == "ok"


def test_embeddings(server, served):
    vectors = [each["embedding"] for each in served.post("/v1/embeddings", input=["x", "y"])["data"]]
    body = server.post("/api/embed", model="a", input=["x", "y"])
    assert (body["embeddings"], body["prompt_eval_count"]) == (vectors, 2)
    assert server.post("/api/embeddings", model="a", prompt="y")["embedding"] == vectors[1]
    for empty in ("", []):  # as Ollama's client asks for a load
        assert server.post("/api/embed", model="a", input=empty)["embeddings"] == []
    long = "x " * 5000
    assert len(server.post("/api/embed", model="a", input=long)["embeddings"]) == 1
    assert server.request("POST", "/api/embed", {"model": "a", "input": long, "truncate": False})[0] == 400


def test_models_are_listed_and_shown(server):
    (tag,) = json.loads(server.request("GET", "/api/tags")[2])["models"]
    assert (tag["name"], tag["details"]["format"], len(tag["digest"])) == ("a", "safetensors", 64)
    assert tag["size"] == sum(each.stat().st_size for each in DEMO.glob("*.safetensors"))
    assert json.loads(server.request("GET", "/api/ps")[2])["models"] == []
    before = server.post("/api/show", model="a")
    assert "message" in before["template"]
    server.post("/api/generate", model="a", keep_alive=-1)
    (running,) = json.loads(server.request("GET", "/api/ps")[2])["models"]
    assert running["size_vram"] == 0 < running["size"]
    assert (running["name"], running["context_length"]) == ("a", 2048)
    assert running["expires_at"] > "2100"
    after = server.post("/api/show", name="a")
    assert after["template"] == before["template"]
    assert after["model_info"]["llama.context_length"] == 2048
    assert after["system"] == "Code."
    (card,) = json.loads(server.request("GET", "/api/v0/models")[2])["data"]
    assert (card["state"], card["loaded_context_length"]) == ("loaded", 2048)
    assert json.loads(server.request("GET", "/api/v0/models/a")[2]) == card
    assert "version" in json.loads(server.request("GET", "/api/version")[2])


def test_a_server_of_one_model_answers_too(engine):
    with serving(engine, served_model_name="one") as served:
        assert json.loads(served.request("GET", "/api/tags")[2])["models"][0]["name"] == "one"
        assert json.loads(served.request("GET", "/api/ps")[2])["models"][0]["name"] == "one"
        assert served.post("/api/show", model="one:latest")["capabilities"][0] == "completion"
        body = served.post("/api/chat", model="one:latest", messages=HELLO, options=OPTIONS, stream=False)
        assert body["message"]["content"]
        assert json.loads(served.request("GET", "/api/v0/models")[2])["data"][0]["id"] == "one"
        for method, path, sent in (
            ("POST", "/api/pull", {"model": "a/b"}),
            ("DELETE", "/api/delete", {"model": "one"}),
            ("POST", "/api/copy", {"source": "one", "destination": "two"}),
        ):
            assert served.request(method, path, sent)[0] == 403


def test_bodies_of_clients_in_go_have_every_field(server):
    """They send what they do not mean as "" or null."""
    asked = {"system": "", "template": "", "options": None}
    for names in ({"model": "a", "name": ""}, {"model": "", "name": "a"}, {"model": "A:latest", "name": "a"}):
        assert server.post("/api/show", **names, **asked, verbose=False)["details"]
    assert server.request("POST", "/api/show", {"model": "", "name": ""})[0] == 400
    asked = {**asked, "model": "a", "format": "", "keep_alive": "5m0s", "think": None, "stream": None}
    for path, more in (("generate", {"prompt": "", "suffix": ""}), ("chat", {"messages": None})):
        body = {**asked, **more} if path == "generate" else {"model": "a", "options": None, **more}
        assert server.post(f"/api/{path}", **body)["done_reason"] == "load"
    called = {"index": 0, "name": "f", "arguments": {}}
    result = {"role": "tool", "content": "1", "name": "f"}  # the older name of tool_name
    sent = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"function": called}]}, result]
    tools = [{"items": None, "function": {"name": "f", "parameters": {"type": "object", "required": None}}}]
    body = {
        "model": "a",
        "messages": sent,
        "tools": tools,
        "truncate": True,
        "shift": True,
        "_debug_render_only": False,
    }
    *_, last = lines(server, "/api/chat", **body, options=OPTIONS)
    assert last["done"]


def test_what_is_shown_is_the_context_of_a_load(engine, file):
    """Clients send it as num_ctx, which may not be more."""
    with lobby_here(engine, file) as (served, _):
        shown = served.post("/api/show", model="a")["model_info"]
        assert shown["llama.context_length"] == 2048  # of the checkpoint
        served.front.lengths["a"] = 512  # as of an earlier load
        assert served.post("/api/show", model="a")["model_info"]["llama.context_length"] == 512


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({"num_predict": -1}, {}),
        ({"num_predict": 9}, {"max_tokens": 9}),
        ({"top_k": 0, "top_p": 1.0, "typical_p": 1.0}, {"top_k": -1, "top_p": 1.0, "typical_p": 1.0}),
        ({"top_k": -1}, {"top_k": -1}),
        ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2, "repetition_penalty_last_n": 64}),
        (
            {"repeat_penalty": 1.2, "repeat_last_n": -1},
            {"repetition_penalty": 1.2, "repetition_penalty_last_n": -1},
        ),
        (
            {"repeat_penalty": 1.2, "repeat_last_n": 512, "num_ctx": 512},
            {"repetition_penalty": 1.2, "repetition_penalty_last_n": -1},
        ),
        ({"repeat_penalty": 1.2, "repeat_last_n": 0}, {}),
        ({"repeat_penalty": 1.0, "repeat_last_n": 64}, {}),
        ({"seed": -1, "mirostat": 0, "tfs_z": 1.0}, {}),
        ({"stop": ["a"], "presence_penalty": 1, "num_gpu": 99}, {"stop": ["a"], "presence_penalty": 1}),
    ],
    ids=str,
)
def test_options_by_ollamas_names(options, params):
    call = parse_call("/api/chat", {"model": "m", "messages": HELLO, "options": options})
    assert call.sampling == params


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ({"options": {"num_predict": 0}}, "options.num_predict 0 generates nothing"),
        (
            {"options": {"num_ctx": 4096}},
            "options.num_ctx 4,096 is more than the 2,048 tokens of the loaded model",
        ),
        (
            {"options": {"num_pred": 1}},
            "options got an unknown argument 'num_pred'; did you mean 'num_predict'?",
        ),
        ({"options": {"temperature": -1}}, "options.temperature must be"),
        ({"keep_alive": "soon"}, "keep_alive must be a number of seconds or a duration"),
        ({"keep_alive": True}, "keep_alive must be a number of seconds or a duration"),
        ({"format": "yaml"}, 'format must be "json", a JSON schema'),
        ({"think": "very"}, "think must be one of"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"prompt": "x"}, "unknown argument 'prompt'"),
    ],
    ids=str,
)
def test_what_is_refused_names_the_field(body, message):
    with pytest.raises(PagedError) as error:
        parse_call("/api/chat", {"model": "m", "messages": HELLO, **body}, Limits(max_model_len=2048))
    assert message in str(error.value)


def test_num_ctx_bounds_the_request(server):
    body = {"model": "a", "messages": HELLO, "stream": False}
    prompt = server.post("/api/chat", **body, options={"num_predict": 1})["prompt_eval_count"]
    whole = server.post("/api/chat", **body, options={"num_ctx": prompt + 3, "temperature": 0, "stop": "@@"})
    assert whole["eval_count"] <= 3
    status, _, data = server.request("POST", "/api/chat", {**body, "options": {"num_ctx": prompt}})
    assert status == 400
    assert f"the prompt has {prompt} tokens, and options.num_ctx is {prompt}" in json.loads(data)["error"]


def test_curls_type_is_taken_and_a_browsers_is_not(server):
    body = json.dumps({"model": "a", "prompt": "x", "options": {"num_predict": 1}, "stream": False}).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert server.request("POST", "/api/generate", body, form)[0] == 200
    status, _, data = server.request("POST", "/api/generate", body, {**form, "origin": "http://evil.example"})
    assert status == 415, data
    assert server.request("GET", "/api/tags", headers={"host": "evil.example"})[0] == 403


BROWSER = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}


def test_no_route_of_ollama_is_open_to_strangers_or_other_websites(engine, file):
    """Keys, hosts and origins are checked for each route as for all others."""
    routes = [(each.method, each.path) for each in ROUTES if each.path.startswith("/api/")]
    assert len(routes) >= 12
    with lobby_here(engine, file, api_key=["secret"], allowed_origins=["https://a.example"]) as (
        served,
        loading,
    ):
        for method, path in routes:
            body = {"model": "a", "prompt": "x"} if method == "POST" else None
            status = served.request(method, path, body)[0]
            assert (status == 401) == (path != "/api/version"), path
            headers = {"authorization": "Bearer secret"}
            assert served.request(method, path, body, {**headers, "host": "evil.example"})[0] == 403, path
            for origin, is_allowed in (("https://a.example", True), ("https://b.example", False)):
                asked = {"origin": origin, "access-control-request-method": method}
                _, found, _ = served.request("OPTIONS", path, headers=asked)
                assert (found.get("access-control-allow-origin") == origin) == is_allowed, path
        for name, value in BROWSER.items():  # what a browser sends of a page without asking first
            sent = {**headers, name: value, "content-type": "text/plain"}
            assert served.request("POST", "/api/generate", b'{"model": "a"}', sent)[0] == 415
        assert loading.log == []


def test_keys_and_changes(engine, file, hub):  # noqa: ARG001
    with lobby_here(engine, file, api_key=["secret"]) as (served, _):
        assert json.loads(served.request("GET", "/api/tags")[2])["error"].startswith(
            "this server needs a key"
        )
        headers = {"authorization": "Bearer secret"}
        assert served.request("GET", "/api/tags", headers=headers)[0] == 200
        for path, body in (("pull", {"model": "owner/tiny"}), ("copy", {"source": "a", "destination": "b"})):
            assert served.request("POST", f"/api/{path}", body, headers)[0] == 403
    with lobby_here(engine, file, allow_model_changes=True) as (served, _):
        for body, message in (
            ({"model": "llama3.2"}, "is a name of Ollama's registry"),
            ({"model": "owner/none", "stream": False}, "the hub has no model"),
            ({"model": "../x", "stream": False}, "is no repository of the hub"),
        ):
            status, _, data = served.request("POST", "/api/pull", body)
            assert status in (400, 404)
            assert message in json.loads(data)["error"]
        for destination in ("../b", "a", "demo"):
            status, _, data = served.request("POST", "/api/copy", {"source": "a", "destination": destination})
            assert (status, b"error" in data) == (400, True)
        told = lines(served, "/api/pull", model="hf.co/owner/tiny:latest")
        assert [told[0]["status"], told[-1]["status"]] == ["pulling manifest", "success"]
        assert served.post("/api/generate", model="tiny", prompt="x", stream=False, options=OPTIONS)[
            "response"
        ]
        assert served.request("DELETE", "/api/delete", {"model": "tiny"})[0] == 200
        assert served.request("POST", "/api/show", {"model": "tiny"})[0] == 404


def test_a_pull_that_fails_is_one_error_in_both_forms(engine, file, hub, monkeypatch):
    """The stream has begun by then, as in Ollama, so that its error is a line."""
    tiny = hub.repositories["owner/tiny"]
    hub.repositories |= {"owner/gated": tiny, "owner/down": tiny, "owner/empty": {}}
    hub.refused = {"owner/gated": (403, "GatedRepo"), "owner/down": (503, "")}
    with lobby_here(engine, file, allow_model_changes=True) as (served, _):

        def check(name: str, wanted: int, message: str) -> None:
            status, _, data = served.request("POST", "/api/pull", {"model": name, "stream": False})
            assert (status, [*json.loads(data)]) == (wanted, ["error"]), data
            assert message in json.loads(data)["error"]
            first, *_, last = lines(served, "/api/pull", model=name)
            assert first == {"status": "pulling manifest"}
            assert [*last] == ["error"]
            assert message in last["error"]

        check("owner/none", 404, "the hub has no model")
        check("owner/tiny:Q4_0", 404, "no GGUF file of this quantisation")
        check("owner/empty", 404, "neither safetensors nor GGUF")
        check("owner/gated", 403, "owner/gated is gated")
        check("owner/down", 502, "cannot be fetched from the hub")
        with monkeypatch.context() as patched:
            free = pull.shutil.disk_usage
            patched.setattr(pull.shutil, "disk_usage", lambda path: free(path)._replace(free=5))
            check("owner/tiny", 507, "GB of disk space")
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        check("owner/tiny", 502, "cannot be fetched from the hub")
    assert local_models() == []


def test_a_pull_whose_client_goes_stops_and_another_goes_on(engine, file, hub, monkeypatch):
    name = next(each for each in hub.repositories["owner/tiny"] if each.endswith(".safetensors"))
    size = len(hub.repositories["owner/tiny"][name])
    hub.slow.add(name)
    stopped = threading.Event()
    stop = ollama._Pull.stop
    monkeypatch.setattr(ollama._Pull, "stop", lambda self: (stop(self), stopped.set()))
    with lobby_here(engine, file, allow_model_changes=True) as (served, _):
        body = {"model": "owner/tiny", "stream": False}
        gone = HTTPConnection("127.0.0.1", served.port)
        gone.request("POST", "/api/pull", json.dumps(body), {"content-type": "application/json"})
        eventually(lambda: hub.sent[name] == size // 2)
        waiting = HTTPConnection("127.0.0.1", served.port)
        waiting.request("POST", "/api/pull", json.dumps({"model": "owner/tiny"}))
        told = waiting.getresponse()
        while json.loads(told.readline()).get("completed") != size // 2:  # of the first
            pass
        gone.close()
        assert stopped.wait(PATIENCE_S)
        hub.go_on.set()
        assert json.loads(told.read().splitlines()[-1]) == {"status": "success"}
        waiting.close()
    assert size < hub.sent[name] <= size + (size + 1) // 2  # the second part came twice, but for a piece
    assert find_local("owner/tiny").num_bytes == size


def test_ollamas_port_says_what_ollamas_does():
    from starlette.testclient import TestClient

    async def app(scope, receive, send):  # noqa: ARG001
        raise RequestError("passed on")

    client = TestClient(new_ollama_app(app, ServeOptions(port=0)), base_url="http://localhost")
    assert client.get("/").text == "Ollama is running"
    assert client.head("/").status_code == 200
    for path, headers in (("/api/tags", {}), ("/", {"host": "evil.example"})):
        with pytest.raises(RequestError, match="passed on"):
            client.get(path, headers=headers)


def test_a_model_that_is_not_loaded_is_described_by_its_files(tmp_path):
    text = {"max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    (tmp_path / "model.safetensors").touch()
    entry = ModelEntry(name="./seeing", checkpoint=str(tmp_path))
    card = lmstudio_card(entry, None, None, ["completion"])
    assert (card["publisher"], card["max_context_length"]) == ("", 512)
    info = shown_model(entry, None, None, ["completion"], None)["model_info"]
    assert info["gemma3.context_length"] == 512
