"""A server with LoRA adapters: the name of the model chooses, and a process that ends loses no adapter."""

import os
import signal

import pytest

from paged import ConfigError, LoRARequest, RequestError
from paged.options.lora_request import lora_modules_of
from paged.server.engine_client import EngineClient
from tests.support.chat_checkpoints import chat_checkpoint
from tests.support.lora_adapters import ATTENTION, MLP, adapter_of, by_peft
from tests.support.mortal_engines import processes
from tests.support.served import eventually, serving
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
def served(paths):
    model, *adapters = paths
    modules = [f"sql={adapters[0]}", f'{{"name": "chat", "path": "{adapters[1]}"}}']
    engine = EngineClient(str(model), **OPTIONS, max_loras=2, lora_modules=lora_modules_of(modules))
    with serving(engine, closes=True, served_model_name="base", lora_modules=modules) as served:
        yield served


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


def test_an_engine_that_is_replaced_has_the_adapters(served, paths):
    model, first, _ = paths
    client = served.front.engine
    pid = processes(client)[0].pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: served.request("GET", "/ready")[0] == 200 and processes(client)[0].pid != pid)
    assert tokens(served, "sql") == by_peft(model, first, PROMPT, 8)


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
