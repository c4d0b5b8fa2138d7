"""What goes wrong with models at home is one line that says what was given and what would do."""

from __future__ import annotations

import shutil

import pytest
from huggingface_hub import constants

from paged.base.errors import MissingModelError
from paged.checkpoints.model_directory import resolve, resolve_config, resolve_headers
from paged.commands import serve_models
from tests.support.fake_hub import fake_hub

FILES = {
    "typo.toml": "[x]\ncheckpoint = 'demo'\nkeepalive = 3\n",
    "soon.toml": "[x]\ncheckpoint = 'demo'\nkeep_alive = 'soon'\n",
    "self.toml": "[x]\ncheckpoint = 'X'\n",
    "loop.toml": "[x]\ncheckpoint = 'y'\n[y]\ncheckpoint = 'x'\n",
    "twice.toml": "[x]\ncheckpoint = 'demo'\n[X]\ncheckpoint = 'demo'\n",
    "path.toml": "['../x']\ncheckpoint = 'demo'\n",
    "file": "",
}
SERVE = ("serve", "--port", "0")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make a working folder with wrong files of models, and an own models.toml; the hub has one model."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAGED_MODELS", str(tmp_path / "own.toml"))
    (tmp_path / "own.toml").write_text("[a]\ncheckpoint = 'demo'\n[b]\ncheckpoint = 'demo'\n")
    with fake_hub(monkeypatch, tmp_path / "hub") as hub:
        hub.repositories["owner/tiny"] = {"config.json": b"{}", "model.safetensors": bytes(100)}
        yield


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("pull", "../x"), "'../x' is no repository of the hub: give owner/name"),
        (("pull", "owner/.."), "'owner/..' is no repository of the hub"),
        (("pull", "owner/none"), "the hub has no model 'owner/none'"),
        (("models", "alias", "c", "c"), "c cannot be an alias of itself"),
        (("models", "alias", "../c", "demo"), "'../c' cannot name a model"),
        (("models", "alias", "A", "demo"), "A is the name of a model in"),
        (("models", "alias", "c", "./none"), "no such directory or GGUF file: ./none"),
        (("models", "rm", "../x"), "no model is here as '../x'"),
        (("models", "show", "../x"), "no such directory or GGUF file: ../x"),
        ((*SERVE, "a", "owner/tiny"), "the model owner/tiny is not on this machine, and a server of several"),
        ((*SERVE, "a", "A"), "A is given twice, or is the same model as a"),
        ((*SERVE, "--models", "typo.toml"), "line 3: [x] has no key 'keepalive'; did you mean keep_alive?"),
        ((*SERVE, "--models", "soon.toml"), "line 3: keep_alive must be a number of seconds or a duration"),
        ((*SERVE, "--models", "self.toml"), "line 2: the checkpoint of x is 'X', its own name"),
        ((*SERVE, "--models", "loop.toml"), "line 2: the checkpoint of x is 'y', another model"),
        ((*SERVE, "--models", "twice.toml"), "line 3: X is the name of a model in line 1 already"),
        ((*SERVE, "--models", "path.toml"), "line 1: '../x' cannot name a model"),
        ((*SERVE, "--models", "none.toml"), "none.toml: no such file of models"),
        (
            (*SERVE, "a", "b", "--keep-alive", "soon"),
            "--keep-alive must be a number of seconds or a duration",
        ),
        ((*SERVE, "a", "b", "--memory", "lots"), "memory must be a number of bytes or a size such as 8GiB"),
        ((*SERVE, "a", "b", "--preload", "c"), "--preload c is not here; this server has a, b"),
        ((*SERVE, "a", "b", "--prefix-dir", "file"), "--prefix-dir file: File exists"),
        ((*SERVE, "a", "b", "--prefix-bytes", "1GiB"), "--prefix-bytes goes with prefix_dir"),
        ((*SERVE, "a", "--prefix-dir", "x"), "--prefix-dir goes with several models"),
        (
            (*SERVE, "a", "b", "--enable-lora"),
            "--enable-lora goes with one model, and this server has several",
        ),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, tuple) else "",
)
@pytest.mark.usefixtures("folder")
def test_one_line_each(run, argv, message):
    code, out, err = run(*argv)
    assert (code != 0, out) == (True, "")
    *before, line = err.splitlines()
    assert line.startswith("paged: ")
    assert message in line
    assert not before


def test_a_server_of_several_models_asks_the_hub_for_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    with fake_hub(monkeypatch, tmp_path / "hub") as hub:
        hub.repositories["owner/tiny"] = {"config.json": b"{}", "model.safetensors": bytes(100)}
        serve_models._fetch_nothing()
        for find in (resolve, resolve_config, resolve_headers):
            with pytest.raises(MissingModelError, match="the hub is not asked; paged pull owner/tiny"):
                find("owner/tiny")
        assert not hub.requests


@pytest.mark.usefixtures("folder")
def test_pulls_without_space_or_network(run, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    assert "owner/tiny takes 1.02e-07 GB of disk space" in run("pull", "owner/tiny")[2].splitlines()[-1]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    (line,) = run("pull", "owner/tiny")[2].splitlines()
    assert line.startswith("paged: owner/tiny cannot be fetched from the hub: ")
