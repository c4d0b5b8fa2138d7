"""`paged pull` and `paged models` against a hub on this machine."""

from __future__ import annotations

import os
import threading
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from paged.architectures.config import DEMO
from paged.base.errors import CheckpointError, MissingModelError
from paged.checkpoints.library import local, pull
from paged.checkpoints.library.local import find_local, local_models
from paged.checkpoints.library.pull import RemoteModel
from paged.server.models.ollama import preferred
from tests.support.checkpoints import random_model
from tests.support.fake_hub import FakeHub, digest, fake_hub
from tests.support.gguf_models import write_model

NARROW = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with fake_hub(monkeypatch, tmp_path / "hub") as hub:
        hub.repositories["owner/tiny"] = {
            file.name: file.read_bytes() for file in DEMO.iterdir() if file.is_file()
        }
        yield hub


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_model(path, random_model(LlamaConfig(**NARROW)))
    return path.read_bytes()


def weights_of(hub: FakeHub) -> str:
    return next(name for name in hub.repositories["owner/tiny"] if name.endswith(".safetensors"))


def test_what_is_pulled_is_listed_answers_and_is_removed(hub, run):
    code, out, err = run("pull", "owner/tiny")
    assert code == 0, err
    assert out.startswith("owner/tiny: ")
    assert "100%" in err
    (model,) = local_models()
    listed = run("models")[1]
    assert f"owner/tiny  safetensors  {model.num_bytes:,}" in listed
    assert "context         2,048 tokens" in run("models", "show", "tiny")[1]
    want = run("generate", "def f(", "--max-tokens", "5", "--seed", "1")[1]
    hub.requests.clear()
    assert run("generate", "def f(", "--max-tokens", "5", "--seed", "1", "--model", "TINY")[1] == want
    assert not hub.requests  # what is here needs no hub
    assert run("pull", "owner/tiny")[0] == 0
    assert hub.sent[weights_of(hub)] == model.num_bytes  # once
    assert "removed owner/tiny" in run("models", "rm", "owner/tiny")[1]
    assert run("models")[1].startswith("no models yet: `paged pull OWNER/NAME`")
    assert local_models() == []
    assert "no model is here as 'owner/tiny'" in run.fails("models", "rm", "owner/tiny")


def test_the_hubs_own_library_finds_what_is_pulled(hub):
    from huggingface_hub import snapshot_download

    remote = RemoteModel("owner/tiny")
    place = remote.pull(remote.files_of(None))
    sent = dict(hub.sent)
    assert Path(snapshot_download("owner/tiny", allow_patterns=["*.safetensors"])) == place
    assert hub.sent == sent


def test_a_cut_pull_goes_on_where_it_stopped(hub):
    name = weights_of(hub)
    size = len(hub.repositories["owner/tiny"][name])
    hub.cut[name] = [size // 2, 0]  # the next try brings nothing: the network is gone
    remote = RemoteModel("owner/tiny")
    with pytest.raises(MissingModelError, match="owner/tiny"):
        remote.pull(remote.files_of(None))
    assert local_models() == []  # no half model has a name
    remote.pull(remote.files_of(None))
    assert hub.sent[name] == size  # no byte came twice
    assert find_local("tiny").num_bytes == size


def test_a_wrong_digest_keeps_nothing(hub, run):
    hub.damaged.add(weights_of(hub))
    code, out, err = run("pull", "owner/tiny")
    assert (code, out) == (1, "")
    assert "came with the digest" in err.splitlines()[-1]
    assert local_models() == []
    assert not [*(local.hub_cache() / "models--owner--tiny" / "blobs").glob("*part")]
    hub.damaged.clear()
    assert run("pull", "owner/tiny")[0] == 0


def test_two_pulls_of_one_file_take_turns(hub):
    failures = []

    def pull_it() -> None:
        try:
            remote = RemoteModel("owner/tiny")
            remote.pull(remote.files_of(None))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=pull_it) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert hub.sent[weights_of(hub)] == len(hub.repositories["owner/tiny"][weights_of(hub)])


def test_of_several_gguf_files_the_largest_that_fits_is_taken(hub, run, gguf, monkeypatch):
    hub.repositories["owner/many"] = {
        "m-Q8_0.gguf": gguf + bytes(64 * 2**20),
        "sub/m-UD-Q4_K_M.gguf": gguf,
        "m-Q2_K.gguf": gguf[:-1],
        "mmproj-F16.gguf": gguf,
    }
    monkeypatch.setattr("paged.device.host_memory.free_on_cpu", lambda: 32 * 2**20)
    code, out, err = run("pull", "owner/many")
    assert code == 0, err
    assert "UD-Q4_K_M of 0.00 GiB is the largest that fits here" in err
    assert out.startswith("owner/many:UD-Q4_K_M: ")
    (model,) = local_models()
    assert (model.name, model.format) == ("owner/many:UD-Q4_K_M", "GGUF UD-Q4_K_M")
    assert find_local("many:ud-q4_k_m") == find_local("OWNER/many") == model
    assert run("pull", "owner/many:Q8_0")[0] == 0
    with pytest.raises(CheckpointError, match="many may be owner/many:Q8_0, owner/many:UD-Q4_K_M"):
        find_local("many")
    run("models", "rm", "many:Q8_0")
    assert [each.name for each in local_models()] == [model.name]
    assert model.path.exists()


# The files of a repository, and what stands behind the colon of the names of their models.
PUBLISHED = {
    "qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf": "q4_k_m",
    "qwen2.5-7b-instruct-q4_k_m-00002-of-00002.gguf": None,
    "UD-Q4_K_XL/GLM-UD-Q4_K_XL-00001-of-00001.gguf": "UD-Q4_K_XL",
    "Q5_K_S/model.gguf": "Q5_K_S",
    "X.i1-IQ3_XXS.gguf": "IQ3_XXS",
    "gpt-oss-20b-mxfp4.gguf": "mxfp4",
    "a-7b-Q8_0.gguf": "a-7b-Q8_0",  # two of one quantisation
    "b-13b-Q8_0.gguf": "b-13b-Q8_0",
    "one/m-F16.gguf": "one-m-F16",  # and of one stem
    "two/m-F16.gguf": "two-m-F16",
    "part-Q2_K-00001-of-00002.gguf": None,  # a part is missing
    "mmproj-model-BF16.gguf": None,
    "model.imatrix.gguf": None,
    "model-imatrix-Q6_K.GGUF": "Q6_K",
}


def test_the_files_of_publishers_have_names_of_their_own(hub, run):
    hub.repositories["owner/many"] = {name: name.encode() for name in PUBLISHED}
    wanted = {name for name in PUBLISHED.values() if name is not None}
    remote = RemoteModel("owner/many")
    assert {*remote.quantisations} == wanted
    for tag in ("Q4_K_M", "a-7b-q8_0"):  # in capitals or not
        assert run("pull", f"https://huggingface.co/owner/many:{tag}")[0] == 0
    assert {each.name for each in local_models()} == {"owner/many:q4_k_m", "owner/many:Q8_0"}
    assert find_local("owner/many:a-7b-Q8_0").path.name == "a-7b-Q8_0.gguf"  # as it was called at its pull
    for tag in wanted:
        remote.pull(remote.files_of(tag))
    assert {each.name for each in local_models()} == {f"owner/many:{tag}" for tag in wanted}
    assert preferred(remote, 1) == "q4_k_m"
    remote.files = [each for each in remote.files if "q4_k_m" not in each.name]
    assert preferred(remote, 1) == "UD-Q4_K_XL"
    remote.files = [each for each in remote.files if "Q4_K_XL" not in each.name]
    assert preferred(remote, 15) == "b-13b-Q8_0"  # a file has the bytes of its name
    sizes = [sum(each.size for each in files) for files in remote.quantisations.values()]
    assert sum(each.size for each in remote.files_of(preferred(remote, 1))) == min(sizes)  # as none fits


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("name", "message", "code"),
    [
        ("owner/none", "the hub has no model 'owner/none'", 1),
        ("../../etc", "is no repository of the hub", 1),
        ("owner/a--b", "is no repository of the hub", 1),
        ("owner/tiny:Q4_0", "no GGUF file of this quantisation; it has no GGUF files", 2),
        ("owner/tiny:", "give a quantisation behind the colon", 2),
        ("owner/empty", "neither safetensors nor GGUF", 2),
        ("owner/evil", "whose name leaves the folder", 2),
        ("owner/own", "has no config.json on the hub. This one has params.json, which is Mistral's own", 2),
        ("owner/tiny", "GB of disk space, and", 1),
    ],
)
def test_a_pull_that_cannot_be_is_one_error(hub, run, monkeypatch, name, message, code):
    hub.repositories["owner/empty"] = {"README.md": b""}
    hub.repositories["owner/own"] = {"params.json": b"{}", "consolidated.safetensors": b"x"}
    hub.repositories["owner/evil"] = {
        "../../../evil.json": b"{}",
        "config.json": b"{}",
        "a.safetensors": b"x",
    }
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 5, 5))
    assert message in run.fails("pull", name, code=code)
    assert local_models() == []


@pytest.mark.usefixtures("hub")
def test_a_pull_without_network_is_one_error(run, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "owner/tiny cannot be fetched from the hub" in run.fails("pull", "owner/tiny", code=1)


def test_packed_weights_that_another_model_uses_stay(hub, run, monkeypatch, tmp_path):
    """The second repository has the same file: its packed weights are the same, too."""
    from paged.checkpoints.open_file import stamp_of
    from paged.checkpoints.weights_cache import file as packed_file
    from paged.checkpoints.weights_cache.content import known_digest
    from paged.checkpoints.weights_cache.folder import WeightsCache

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PAGED_NO_WEIGHTS_CACHE", raising=False)
    hub.repositories["other/tiny"] = hub.repositories["owner/tiny"]
    for name in ("owner/tiny", "other/tiny"):
        assert run("pull", name)[0] == 0
    cache = WeightsCache(tmp_path / "cache" / "paged" / "weights")
    models = local_models()
    for model in models:
        cache.note_digest(stamp_of(os.stat(model.files[0])), digest(model.files[0].read_bytes()))
    stamps = [stamp_of(os.stat(models[0].files[0]))]
    with cache.writing("w") as out:
        packed_file.write(out, {"title": "t", "content": known_digest(cache, stamps)}, [torch.zeros(1)])
    assert run("models")[1].count(" bytes\n") == 2
    assert "packed weights" not in run("models", "rm", "other/tiny")[1]
    assert len(cache.kept()) == 1
    assert "bytes of its packed weights" in run("models", "rm", "owner/tiny")[1]
    assert cache.kept() == []
