"""A server with LoRA adapters: the name of the model chooses, and a process that ends loses no adapter."""

import json
import os
import shutil
import signal
import threading
from types import SimpleNamespace

import pytest

from paged import ConfigError, LoRARequest, RequestError
from paged.options.lora_request import lora_modules_of
from paged.server.engine_client import EngineClient
from paged.server.http.failures import HttpError
from tests.support.chat_checkpoints import chat_checkpoint
from tests.support.command_line import running
from tests.support.lora_adapters import ATTENTION, MLP, adapter_of, by_peft
from tests.support.mortal_engines import processes
from tests.support.served import UnhurriedLauncher, eventually, serving, unhurried
from tests.text.test_chat_template import CHATML

OPTIONS = {"device": "cpu", "num_threads": 1, "num_blocks": 512, "dtype": "float32", "enable_lora": True}
PROMPT = [5, 77, 9, 130, 8]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Return a model, and two adapters of it."""
    folder = tmp_path_factory.mktemp("lora")
    model = chat_checkpoint(folder / "model", CHATML, max_position_embeddings=256)
    config = {"r": 4, "target_modules": [*ATTENTION, *MLP]}
    return model, *(adapter_of(model, folder / f"a{i}", config, seed=i) for i in range(2))


@pytest.fixture(scope="module")
def third(paths):
    """Return an adapter that is loaded while the server runs."""
    model, first, _ = paths
    return adapter_of(model, first.parent / "third", {"r": 3, "target_modules": ["q_proj"]}, seed=9)


@pytest.fixture(scope="module")
def served(paths):
    model, *adapters = paths
    modules = [f"sql={adapters[0]}", f'{{"name": "chat", "path": "{adapters[1]}"}}']
    options = {**OPTIONS, "max_loras": 2, "lora_modules": lora_modules_of(modules)}
    engine = EngineClient(str(model), launcher=UnhurriedLauncher(), **options)
    options = {"lora_modules": modules, "admin_key": "root", "allow_runtime_lora_updating": True}
    options["enable_prompt_tokens_details"] = True
    with serving(engine, closes=True, served_model_name="base", **options) as served:
        yield served


def changed(served, verb, key="root", **body):
    """Load or unload an adapter. Return the status and the answer."""
    headers = {"authorization": f"Bearer {key}"}
    status, _, data = served.request("POST", f"/v1/{verb}_lora_adapter", body, headers)
    return status, data.decode()


def load(served, name, path, **more):
    return changed(served, "load", lora_name=name, lora_path=str(path), **more)


def tokens(served, model):
    body = served.post(
        "/v1/completions",
        model=model, prompt=PROMPT, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True,
    )  # fmt: skip
    assert body["model"] == model
    return body["choices"][0]["token_ids"]


def test_the_name_of_the_model_chooses_the_adapter(served, paths):
    model, *adapters = paths
    _, _, listed = served.request("GET", "/v1/models")
    assert b'"parent":"base"' in listed.replace(b" ", b"")
    for name, path in zip(("base", "sql", "chat"), (None, *adapters), strict=True):
        assert tokens(served, name) == by_peft(model, path, PROMPT, 8)
    status, _, body = served.request("POST", "/v1/completions", {"model": "other", "prompt": "a"})
    assert status == 404
    assert b"this server has 'base', 'sql', 'chat'" in body
    chat = served.post(
        "/v1/chat/completions",
        model="sql",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
    )
    assert chat["model"] == "sql"
    vectors = [
        served.post("/v1/embeddings", model=name, input=[PROMPT])["data"][0]["embedding"]
        for name in ("base", "sql")
    ]
    assert vectors[0] != vectors[1]


def test_a_name_may_end_as_ollama_writes_it(served, paths):
    model, first, _ = paths
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    found = served.post("/v1/completions", model="sql:latest", **body)
    assert found["model"] == "sql"
    assert found["choices"][0]["token_ids"] == by_peft(model, first, PROMPT, 8)
    _, _, card = served.request("GET", "/v1/models/sql:latest")
    assert json.loads(card)["parent"] == "base"


def test_the_operator_pins_prefixes_of_adapters(served, third):
    headers = {"authorization": "Bearer root"}

    def change(name, verb, prompt):
        answer = served.request("POST", f"/admin/models/{name}/{verb}", {"prompt": prompt}, headers)
        return answer[0], json.loads(answer[2])

    def cached(name):
        body = served.post("/v1/completions", model=name, prompt=prompt, max_tokens=1)
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    prompt = [7, *range(20, 59)]
    assert change("sql", "pin", prompt) == (200, {"model": "sql", "pin": 32})
    status, body = change("base", "unpin", prompt)
    assert (status, body["error"]["message"][:26]) == (400, "this prompt is not pinned;")
    assert [cached(name) for name in ("sql", "chat")] == [32, 0]
    assert change("sql", "unpin", prompt) == (200, {"model": "sql", "unpin": 32})
    assert change("base", "pin", prompt) == (200, {"model": "base", "pin": 32})
    assert change("base", "unpin", prompt)[0] == 200
    status, body = change("none/such", "pin", prompt)
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert change("sql", "pin", [5])[0] == 400
    num_pinned = served.stats().num_pinned_blocks
    assert load(served, "gone", third)[0] == 200
    assert change("gone", "pin", prompt)[0] == 200
    assert served.stats().num_pinned_blocks == num_pinned + 2
    assert changed(served, "unload", lora_name="gone")[0] == 200
    assert change("gone", "unpin", prompt)[0] == 404
    assert served.stats().num_pinned_blocks == num_pinned


def test_a_key_for_an_adapter_alone_does_not_have_the_model_itself(served):
    """A body without a name is for the model itself."""
    key = SimpleNamespace(entry=SimpleNamespace(models=["sql"]))
    served.front.check_model("sql", key)
    served.front.check_model(None, None)
    for name, message in ((None, "a model must be named: this key is for 'sql'"), ("base", "has 'sql'")):
        with pytest.raises(HttpError, match=message):
            served.front.check_model(name, key)


def test_an_adapter_that_is_unloaded_while_a_request_is_prepared_is_kept_by_it(served, paths, monkeypatch):
    model, first, _ = paths
    front = served.front
    begin, known = front.begin, front.adapters["sql"]

    def unload_and_begin(*args, **given):
        del front.adapters["sql"]
        return begin(*args, **given)

    monkeypatch.setattr(front, "begin", unload_and_begin)
    try:
        assert tokens(served, "sql") == by_peft(model, first, PROMPT, 8)
    finally:
        front.adapters = {"sql": known, **front.adapters}


def kill(served):
    """Kill the engine's process. Wait until another one serves."""
    client = served.front.engine
    pid = processes(client)[0].pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: served.request("GET", "/ready")[0] == 200 and processes(client)[0].pid != pid)


def test_adapters_come_and_go_while_requests_run(served, paths, third):
    """A stream keeps the adapter with which it began, although that is replaced, and its engine killed."""
    model, first, second = paths
    assert load(served, "late", third)[0] == 200
    long = {"model": "late", "prompt": PROMPT, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    long["return_token_ids"] = True
    expected = served.post("/v1/completions", **long)["choices"][0]["token_ids"]
    assert expected[:8] == by_peft(model, third, PROMPT, 8)
    found = []
    stream = threading.Thread(target=lambda: found.append(served.events("/v1/completions", **long)))
    with unhurried(served.front.engine):
        stream.start()
        eventually(lambda: served.num_requests > 0)
        assert load(served, "late", second)[0] == 400
        assert load(served, "late", second, load_inplace=True) == (
            200,
            "Success: LoRA adapter 'late' added successfully.",
        )
        kill(served)
    assert tokens(served, "late") == by_peft(model, second, PROMPT, 8)
    stream.join()
    events = [json.loads(event) for event in found[0] if event != "[DONE]"]
    assert [t for event in events for c in event["choices"] for t in c.get("token_ids", ())] == expected
    assert changed(served, "unload", lora_name="late") == (
        200,
        "Success: LoRA adapter 'late' removed successfully.",
    )
    assert served.request("POST", "/v1/completions", long)[0] == 404
    assert changed(served, "unload", lora_name="late")[0] == 404
    assert tokens(served, "sql") == by_peft(model, first, PROMPT, 8)


def test_a_wrong_load_changes_nothing(served, paths, third, tmp_path):
    model, first, second = paths
    damaged = shutil.copytree(third, tmp_path / "damaged")
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    before = served.request("GET", "/v1/models")[2]
    for status, message, body in (
        (400, "adapter 'x' cannot be used", {"lora_name": "x", "lora_path": str(damaged)}),
        (400, "adapter_config.json", {"lora_name": "x", "lora_path": str(tmp_path)}),
        (400, "cannot be read", {"lora_name": "x", "lora_path": "x" * 4000}),
        (400, "cannot be read", {"lora_name": "x", "lora_path": "~nobody-of-this-name/x"}),
        (400, "'sql' is loaded already, from", {"lora_name": "sql", "lora_path": str(second)}),
        (400, "model's own name", {"lora_name": "base", "lora_path": str(second)}),
        (400, "cannot be used", {"lora_name": "sql", "lora_path": str(damaged), "load_inplace": True}),
        (400, "lora_path is missing", {"lora_name": "sql"}),
        (400, "unknown argument 'lora_nam'", {"lora_nam": "sql", "lora_path": "x"}),
    ):
        found = changed(served, "load", **body)
        assert found[0] == status
        assert message in json.loads(found[1])["error"]["message"]
    assert changed(served, "load", "wrong", lora_name="y", lora_path=str(third))[0] == 401
    assert changed(served, "unload", lora_name="sql", lora_int_id=2)[0] == 404
    assert served.request("GET", "/v1/models")[2] == before
    assert tokens(served, "sql") == by_peft(model, first, PROMPT, 8)


def test_another_content_on_disk_is_an_error_of_its_requests(served, paths, third, tmp_path):
    """The files of an adapter go once its process was replaced; then there are others."""
    model, first, second = paths
    own = shutil.copytree(third, tmp_path / "own")
    assert load(served, "own", own)[0] == 200
    kill(served)
    shutil.rmtree(own)
    assert tokens(served, "own") == by_peft(model, third, PROMPT, 8)
    shutil.copytree(second, own)
    kill(served)
    body = {"model": "own", "prompt": PROMPT, "max_tokens": 2}
    status, _, data = served.request("POST", "/v1/completions", body)
    assert status == 400
    assert b"has other weights than when it was loaded" in data
    assert tokens(served, "sql") == by_peft(model, first, PROMPT, 8)
    assert load(served, "own", own, load_inplace=True)[0] == 200
    assert tokens(served, "own") == by_peft(model, second, PROMPT, 8)
    assert changed(served, "unload", lora_name="own")[0] == 200


def test_lines_of_a_batch_name_their_adapter(paths, tmp_path, monkeypatch, capsys):
    model, first, _ = paths
    names = (None, "sql", "other")
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    lines = [
        {"custom_id": f"{name}", "url": "/v1/completions", "body": {**body, "model": name}} for name in names
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ("run-batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--model", model)
    flags = (
        "--enable-lora",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--num-blocks",
        "64",
        "--num-threads",
        "1",
    )
    with running(monkeypatch, capsys) as run:
        assert run(*command, *flags, "--lora-modules", f"sql={first}")[0] == 1
        assert "--lora-modules needs enable_lora" in run.refused(*command, "--lora-modules", f"sql={first}")
    found = {}
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        result = json.loads(line)
        found[result["custom_id"]] = result["response"]["body"]
    assert "this is" in found["other"]["error"]["message"]
    for name, path in (("None", None), ("sql", first)):
        assert found[name]["choices"][0]["token_ids"] == by_peft(model, path, PROMPT, 6)
    assert found["sql"]["model"] == "sql"


def test_wrong_modules_are_refused_at_the_start(paths, tmp_path):
    model, first, _ = paths
    with pytest.raises(RequestError, match=r"adapter 'no' cannot be used: .*adapter_config.json"):
        EngineClient(str(model), **OPTIONS, lora_modules=[LoRARequest("no", 1, str(tmp_path))])
    for wrong, message in (
        (["sql"], "must be NAME=PATH, got 'sql'"),
        (["=x"], "must be NAME=PATH"),
        (["a=1", "a=2"], "two adapters of the name 'a'"),
        (['{"name": "a"}'], "NAME=PATH or"),
        (['{"name": "a", "path": "b", "more": 1}'], "no other keys"),
    ):
        with pytest.raises(ConfigError, match=message):
            lora_modules_of(wrong)
    assert [each.lora_int_id for each in lora_modules_of([f"x={first}", "y=b=c"])] == [1, 2]
