"""`paged serve`: where its options come from, what it says, and how it ends."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from paged.base.errors import ConfigError, PagedError
from paged.commands import serve, serve_models
from paged.commands.settings import from_environment, from_file
from paged.server.http.listener import bind_all
from paged.server.options import ServeOptions
from tests.support.command_line import running
from tests.support.fake_hub import fake_hub
from tests.support.served import PATIENCE_S

TYPES = {"port": int, "api_key": list[str], "seed": int, "enforce_eager": bool, "dtype": str}


@pytest.fixture
def run(monkeypatch, capsys):
    for variable in os.environ:
        if variable.startswith("PAGED_"):
            monkeypatch.delenv(variable)
    with running(monkeypatch, capsys) as run:
        yield run


@pytest.fixture
def started(monkeypatch) -> list:
    """Collect the options of servers, which are not started."""
    found: list = []

    async def record(entry, engine_options, options, listeners) -> int:  # noqa: ARG001
        found.append((engine_options, options))
        return 0

    monkeypatch.setattr(serve, "_serve", record)
    return found


def test_flags_override_the_environment_and_this_the_file(run, started, tmp_path, monkeypatch):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: from-file\nport: 0\nseed: 1\nmax-model-len: 64\nserved-model-name: [a, b]\n"
        "tenant-weights: {x: 2}\nscheduling-policy: fair\ndefault-chat-template-kwargs: {thinking: false}\n"
        "limit-mm-per-prompt: {image: {count: 2}}\n"
    )
    monkeypatch.setenv("PAGED_CONFIG", str(file))
    monkeypatch.setenv("PAGED_SEED", "2")
    monkeypatch.setenv("PAGED_MAX_MODEL_LEN", "128")
    monkeypatch.setenv("PAGED_ENFORCE_EAGER", "yes")
    monkeypatch.setenv("PAGED_API_KEY", "one,two")
    monkeypatch.setenv("PAGED_MM_PROCESSOR_KWARGS", '{"max_pixels": 9, "size": null}')
    assert run("serve", "--seed", "3")[0] == 0
    ((engine, options),) = started
    assert engine == {
        "model": "from-file",
        "seed": 3,
        "max_waiting": 4096,  # by default
        "max_model_len": 128,
        "enforce_eager": True,
        "tenant_weights": {"x": 2},
        "scheduling_policy": "fair",
        "limit_mm_per_prompt": {"image": {"count": 2}},
        "mm_processor_kwargs": {"max_pixels": 9, "size": None},
    }
    assert (options.port, options.served_model_name, options.api_key) == (0, ("a", "b"), ("one", "two"))
    assert options.chat_template_kwargs == {"thinking": False}


def test_the_model_is_positional_or_a_flag(run, started, monkeypatch):
    monkeypatch.setenv("PAGED_MODEL", "from-environment")
    for argv in (["some"], ["--model", "some"], ["some", "--model", "some"], []):
        assert run("serve", *argv, "--port", "0")[0] == 0
    assert [engine["model"] for engine, _ in started] == ["some", "some", "some", "from-environment"]
    assert "the model is given twice, as a and as --model b" in run.refused("serve", "a", "--model", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "did you mean 'port'"),
        ("port: 1\nport: 2", "'port' is given twice"),
        ("max-model-len: 1\nmax_model_len: 2", "is given twice"),
        ("- a", "must be a mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_wrong_files(text, message, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(PagedError, match=re.escape(message)):
        from_file(file, {"port": int, "max_model_len": int})


def test_the_environment():
    given = {"PAGED_PORT": "1", "PAGED_API_KEY": '["a,b"]', "PAGED_ENFORCE_EAGER": "off", "PAGED_DTYPE": ""}
    # Kubernetes sets these for services named paged and paged-a.
    links = {"PAGED_SERVICE_HOST": "10.0.0.1", "PAGED_PORT_8000_TCP": "tcp://10.0.0.1:8000"}
    links |= {"PAGED_A_SERVICE_PORT_HTTP": "80", "PAGED_A_PORT": "tcp://10.0.0.1:80"}
    found = from_environment(TYPES, {**given, **links, "PAGED_DEBUG": "1", "OTHER": "x"})
    assert found == {"port": 1, "api_key": ["a,b"], "enforce_eager": False}
    assert from_environment(TYPES, {"PAGED_PORT": "tcp://10.0.0.1:8000"}) == {}
    module = '{"name": "a", "path": "b"}'
    assert from_environment({"lora_modules": list[str]}, {"PAGED_LORA_MODULES": module}) == {
        "lora_modules": [module]
    }
    wrong = [("PORT", "a"), ("ENFORCE_EAGER", "2"), ("PROT", "1"), ("API_KEY", "["), ("API_KEY", "")]
    for name, value in wrong:
        with pytest.raises(PagedError, match=f"PAGED_{name}"):
            from_environment(TYPES, {f"PAGED_{name}": value})


@pytest.mark.parametrize(
    "options",
    [
        {"port": 70_000},
        {"replicas": 0},
        {"router": "random"},
        {"root_path": "llm"},
        {"allowed_origins": "[1]"},
        {"default_chat_template_kwargs": "[]"},
        {"tool_call_parser": "x"},
        {"ssl_keyfile": "a"},
        {"ssl_certfile": "/nowhere"},
        {"metrics_prefix": "a b"},
        {"api_key": [""]},
        {"api_key": ["good", " a"]},
        {"api_key": "a\n"},
        {"api_key": "a\xa0"},
        {"api_key": "a\x00b"},
        {"api_key": "a€"},
        {"max_connections": 0},
        {"allowed_hosts": "http://a"},
        {"allowed_hosts": ["a:80"]},
        {"enable_prompt_tokens_details": 1},
        {"chat_template": 5},
        {"log_format": "xml"},
        {"stream_interval_s": -1},
        {"drain_delay": -1},
        {"drain_timeout": "x"},
    ],
    ids=str,
)
def test_wrong_options(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServeOptions(**options)


def test_the_engine_gets_the_interval_of_streams(run, monkeypatch):
    given = {}

    def refuse(**options):
        given.update(options)
        raise ConfigError("enough")

    monkeypatch.setattr("paged.server.engine_client.EngineClient", refuse)
    assert run("serve", "demo", "--port", "0", "--stream-interval-s", "0.5")[0] == 2
    assert given["stream_interval_s"] == 0.5


def test_keys_are_in_no_message(run, monkeypatch, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("api-key: [topsecret, 5]\n")
    monkeypatch.setenv("PAGED_API_KEY", "topsecret,")
    assert "topsecret" not in run.fails("serve", "demo")
    monkeypatch.setenv("PAGED_API_KEY", "[topsecret")
    assert "topsecret" not in run.fails("serve", "demo")
    monkeypatch.delenv("PAGED_API_KEY")
    assert "topsecret" not in run.fails("serve", "demo", "--config", file)
    options = ServeOptions(api_key=["[topsecret"])
    assert options.api_key == ("[topsecret",)
    assert "topsecret" not in repr(options)


def test_a_certificate_and_its_key_are_read_before_the_model(run, started, tmp_path):
    for name in ("key.pem", "certificate.pem"):
        (tmp_path / name).write_text("no PEM")
    files = ["--ssl-keyfile", tmp_path / "key.pem", "--ssl-certfile", tmp_path / "certificate.pem"]
    line = run.fails("serve", "demo", *files)
    assert re.search(
        r"certificate\.pem' with --ssl-keyfile '.*key\.pem' must be a certificate and its key", line
    )
    assert not started


def test_a_template_in_a_file_must_be_text(run, started, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("chat-template: 5\n")
    message = run.fails("serve", "demo", "--config", file)
    assert "serve.yaml, line 1: chat-template must be a string, got 5" in message
    assert not started


def test_the_socket_of_another_server_stays(tmp_path):
    """It may have taken the place of this one's meanwhile."""
    path = tmp_path / "a"
    with socket.socket(socket.AF_UNIX) as other:
        with bind_all(ServeOptions(uds=str(path))):
            path.unlink()
            other.bind(str(path))
        assert path.exists()


def test_one_line_for_what_cannot_start(run, started, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        line = run.fails("serve", "demo", "--port", other.getsockname()[1], code=1)
        assert re.search(r"127\.0\.0\.1:\d+ is in use by another server; take another --port", line)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "a"))
        listener.listen()
        assert "in use" in run.fails("serve", "demo", "--uds", tmp_path / "a", code=1)
    assert run("serve", "demo", "--uds", tmp_path / "a")[0] == 0  # a server that ended left it behind
    assert not (tmp_path / "a").exists()  # this one does not
    assert "cannot listen on" in run.fails("serve", "demo", "--host", "192.0.2.1", code=1)
    assert "name a model" in run.fails("serve")
    assert "port must be" in run.fails("serve", "demo", "--port", "-1")
    assert len(started) == 1


def test_the_extra_that_is_not_installed(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'paged[server]'" in run.fails("serve", "demo", "--port", "0", code=1)


@pytest.mark.usefixtures("started")
def test_an_address_that_others_reach_needs_keys(run):
    _, _, err = run("serve", "demo", "--host", "0.0.0.0", "--port", "0")
    assert err.startswith("paged: warning: every machine that reaches 0.0.0.0 may use this server")
    _, _, err = run("serve", "demo", "--host", "0.0.0.0", "--port", "0", "--api-key", "a")
    assert err == ""


def test_a_server_and_its_end(tmp_path):
    """It says its address, also to systemd, serves with tokens of its engine, and ends with 0 on a signal.

    From then on nothing reads its log, which made it hang as soon as the pipe was full. No process that it
    starts has its key. Every line is JSON, also those of its engine process.
    """
    command = [sys.executable, "-m", "paged", "serve", "demo", "--device", "cpu", "--num-blocks", "64"]
    command += ["--log-format", "json", "--no-resume"]  # its engine must not end before its requests
    environment = {**os.environ, "PAGED_PORT": "0", "OMP_NUM_THREADS": "1", "PAGED_API_KEY": "topsecret"}
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.bind(str(tmp_path / "notify"))
    systemd.settimeout(PATIENCE_S)
    environment["NOTIFY_SOCKET"] = str(tmp_path / "notify")
    with (
        systemd,
        subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        ) as process,
    ):
        try:
            fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
            lines = []
            while "is served at" not in (line := process.stderr.readline()):
                assert line, lines
                lines.append(json.loads(line)["event"])
            assert any(line.startswith("LlamaForCausalLM") for line in lines), lines
            assert systemd.recv(100) == b"READY=1"
            url = json.loads(line)["event"].split()[-1]
            schema = {"type": "string", "maxLength": 9, "format": "strange"}  # of which the engine tells
            constraint = {"structured_outputs": {"json": schema}}
            body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 4, **constraint}).encode()
            headers = {"content-type": "application/json", "authorization": "Bearer topsecret"}
            request = urllib.request.Request(f"{url}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                assert json.load(response)["usage"]["completion_tokens"] in (2, 3, 4)  # the string may end
            for child in (children := psutil.Process(process.pid).children(recursive=True)):
                assert "topsecret" not in repr(child.environ()) + repr(child.cmdline())
            assert children
            for _ in range(60):
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE_S)
            (engine,) = [each for each in children if "paged.server.engine_process" in each.cmdline()]
            long = json.dumps({"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", long, headers)
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                assert response.readline()
                os.killpg(process.pid, signal.SIGTERM)  # as torchrun does
                assert response.read().endswith(b"data: [DONE]\n\n")
            assert process.wait(PATIENCE_S) == 0
            assert systemd.recv(100) == b"STOPPING=1"
            assert not engine.is_running()
            rest = process.stderr.read()
            events = [*map(json.loads, rest.splitlines())]
            assert not any("traceback" in event for event in events)
            assert [event for event in events if "strange" in event["event"]]
            assert next(event["status"] for event in events if event["event"] == "request") == 200
            assert 0 < sum(event.get("status") == 401 for event in events) < 60
        finally:
            process.kill()


def test_a_model_that_does_not_load(tmp_path):
    command = [sys.executable, "-m", "paged", "serve", str(tmp_path), "--port", "0"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=180, cwd=Path(__file__).parents[2], check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("paged: ")


def test_the_front_end_does_not_import_torch():
    code = "import sys, paged.commands.serve, paged.server.app, paged.server.engine_client, "
    code += "paged.server.http.listener, paged.server.telemetry.traces; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def key_line(key: str, **fields: Any) -> str:
    return json.dumps({"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": "a", **fields}) + "\n"


def test_a_keys_file_is_read_before_the_model_and_gives_the_weights(run, started, tmp_path):
    file = tmp_path / "keys"
    file.write_text(key_line("k", weight=3))
    file.chmod(0o644)
    serve = ["serve", "demo", "--port", "0", "--api-keys", file]
    assert "can be read or written by others (mode 644)" in run.fails(*serve, code=1)
    file.chmod(0o600)
    assert "line 1: weight goes with --scheduling-policy fair alone" in run.fails(*serve)
    fair = [*serve, "--scheduling-policy", "fair"]
    assert "--tenant-weights and --api-keys exclude each other" in run.fails(*fair, "--tenant-weights", "a=2")
    assert "--api-key and --api-keys exclude each other" in run.fails(*fair, "--api-key", "topsecret")
    assert not started
    assert run(*fair)[0] == 0
    ((engine, options),) = started
    assert engine["tenant_weights"] == {"a": 3}
    assert not ServeOptions(host="0.0.0.0", api_keys=str(file)).is_exposed
    assert options.api_keys == str(file)


def test_a_server_of_tenants_reads_its_keys_again_on_a_signal(tmp_path):
    file = tmp_path / "keys"
    file.write_text(key_line("one"))
    file.chmod(0o600)
    command = [sys.executable, "-m", "paged", "serve", "demo", "--device", "cpu", "--num-blocks", "64"]
    command += ["--port", "0", "--metrics-port", "0", "--api-keys", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PAGED_ADMIN_KEY": "topsecret"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[2]
    ) as process:

        def wait_for(text: str) -> str:
            while text not in (line := process.stderr.readline()):
                assert line, "the server has ended"
            return line

        def status(url: str, key: str) -> int:
            request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                    return response.status
            except urllib.error.HTTPError as error:
                return error.code

        try:
            line = wait_for("is served at")
            url = line.split()[-1]
            metrics = re.search(r"metrics are at (\S+);", line)[1]
            assert [status(metrics, ""), status(f"{url}/metrics", "one")] == [200, 403]
            assert status(f"{url}/admin/requests", "topsecret") == 200
            for child in psutil.Process(process.pid).children(recursive=True):
                assert "topsecret" not in repr(child.environ())
            file.write_text(key_line("two"))
            process.send_signal(signal.SIGHUP)
            wait_for("the keys file has been read again: 1 keys")
            assert [status(f"{url}/v1/models", key) for key in ("one", "two")] == [401, 200]
            file.write_text("{")
            process.send_signal(signal.SIGHUP)
            assert "line 1: it must be a JSON object" in wait_for("the keys file is not in force")
            assert status(f"{url}/v1/models", "two") == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_several_names_or_a_file_make_a_server_of_several_models(run, started, tmp_path, monkeypatch):
    found: list = []

    async def record(catalog, base, options, preloaded, listeners) -> int:  # noqa: ARG001
        found.append(([each.name for each in catalog.entries()], base, [each.name for each in preloaded]))
        return 0

    monkeypatch.setattr(serve_models, "_serve", record)
    file = tmp_path / "models.toml"
    file.write_text('[a]\ncheckpoint = "demo"\n[b]\ncheckpoint = "demo"\n[b.engine]\nmax_model_len = 64\n')
    monkeypatch.setenv("PAGED_MODELS", str(file))
    assert run("serve", "a", "--port", "0")[0] == 0  # the variable alone makes it no server of several
    assert (len(found), started[0][0]["model"], started[0][1].models) == (0, "demo", None)
    some = ["--num-threads", "1", "--scheduling-policy", "fair", "--tenant-weights", "x=2"]
    some += ["--limit-mm-per-prompt", '{"image": 2}']
    assert run("serve", "b", "a", "--port", "0", "--preload", "a", *some)[0] == 0
    names, base, preloaded = found[0]
    assert (names, base["num_threads"], preloaded) == (["b", "a"], 1, ["a"])
    assert (base["tenant_weights"], base["limit_mm_per_prompt"]) == ({"x": 2.0}, {"image": 2})
    with fake_hub(monkeypatch, tmp_path / "hub"):  # which is empty
        assert run("serve", "--models", "--port", "0")[0] == 0
        assert found[1][0] == ["a", "b"]
    assert "memory goes with several models" in run.fails("serve", "demo", "--memory", "1GiB")
    assert "replicas goes with one model" in run.fails("serve", "a", "b", "--replicas", "2")
    assert "memory must be a number of bytes" in run.fails("serve", "a", "b", "--memory", "much")
    assert "--keep-alive must be" in run.fails("serve", "a", "b", "--keep-alive", "soon")
    assert "is not here" in run.fails("serve", "a", "b", "--preload", "c")
    assert "no such file of models" in run.fails("serve", "--models", tmp_path / "none.toml")
    file.write_text('[a]\ncheckpint = "demo"\n')
    assert "line 2: [a] has no key 'checkpint'" in run.fails("serve", "--models", file)
