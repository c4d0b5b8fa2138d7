"""`paged plan`: figures equal those computed by hand, headers alone are fetched, errors are one line."""

import json
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub as hub
import pytest

from paged.architectures.config import DEMO
from paged.checkpoints.model_directory import resolve_config
from paged.simulate.cost import DATA_SHEETS, Coefficients
from paged.simulate.machine import Measured
from tests.support.checkpoints import checkpoint, edit_json
from tests.support.command_line import write

LAYER_PARAMS = 4 * (256 * 8 * 64 + 2 * 256 * 2 * 64 + 8 * 64 * 256 + 3 * 256 * 512)
HEAD_PARAMS = 4096 * 256
NORMS = 9 * 256


def test_figures_of_a_data_sheet(run):
    code, out, err = run("plan", "demo", "--device", "h200", "--max-num-seqs", "4", "--json")
    figures = json.loads(out)
    assert (code, err, figures["device"], figures["is_measured"]) == (0, "", "H200", False)
    assert figures["weights_bytes"] == {
        "embedding": 2 * HEAD_PARAMS,
        "norms and the rest": 2 * NORMS,
        "attention": 2 * 4 * (2 * 256 * 8 * 64 + 2 * 256 * 2 * 64),
        "feed-forward": 2 * 4 * 3 * 256 * 512,
    }
    assert figures["kv_bytes_per_token"] == 2 * 4 * 2 * 64 * 2
    assert figures["sequences"] == {"512": 4, "2048": 4}
    # A step reads all weights, and K and V of each sequence.
    bandwidth = 0.8 * DATA_SHEETS["H200"].memory_gb_per_s * 1e9
    read = 2 * (LAYER_PARAMS + HEAD_PARAMS + NORMS) + 2048 * (1024 + 1)
    assert figures["decode_tokens_per_s"]["1"] == pytest.approx(1 / (1e-3 + read / bandwidth))
    assert figures["prompt_tokens_per_s"] > 100 * figures["decode_tokens_per_s"]["1"]


def test_states_of_a_hybrid(run):
    """Beside what a GPU keeps of each request, with and without inputs of drafts."""
    model = str(checkpoint("qwen3_5"))
    drafts = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
    found = []
    for options in ((), drafts):
        code, out, _ = run("plan", model, "--device", "h200", "--max-num-seqs", "4", "--json", *options)
        assert code == 0
        found.append(json.loads(out)["states_bytes"])
    inputs, rows = 128, 128 + 2 * 4  # of the convolution, and of the delta rule
    assert found[1] - found[0] == 4 * 3 * 2 * (1 + 3) * 4 * (inputs + rows)
    assert found[0] > 4 * 3 * 4 * (3 * 128 + 4 * 12 * 20)


def test_this_machine_is_measured(run):
    figures = json.loads(run("plan", "--device", "cpu", "--json")[1])
    assert figures["is_measured"]
    assert 1e8 < figures["bytes_per_s"] < 1e13
    assert 1e8 < figures["flops_per_s"] < 1e15
    speeds = [*figures["decode_tokens_per_s"].values()]
    assert speeds == sorted(speeds)


def test_a_plan_as_text(run, monkeypatch):
    monkeypatch.setattr(
        "paged.simulate.plan.measure", lambda _: Measured(Coefficients(step_s=1.0), 1e10, 1e12)
    )
    # Of a model so small, steps are measured.
    monkeypatch.setattr("paged.simulate.plan.measure_steps", lambda *_: Coefficients(step_s=0.01))
    code, out, _ = run("plan", "demo", "--device", "cpu", "--num-blocks", "32", "--quantization", "int8")
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("LlamaForCausalLM in int8 of bfloat16 (0.00787 GB of files), activations in ")
    for start in ("weights: feed-forward ", "KV cache: 32 blocks of 16, 2", "2,048 tokens ", "decode of 1 "):
        assert any(line.startswith(start) for line in lines), start
    assert lines[-3] == "from 10 GB/s and 1 TFLOP/s as measured"
    assert lines[-2] == "does not fit: a sequence of 2,048 tokens; the longest has 512"
    assert lines[-1].endswith("or max_model_len=512")


def test_bad_input(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    missing = tmp_path / "missing"
    assert run.refused("plan", missing, code=1) == f"paged: no such directory or GGUF file: {missing}"
    message = run.refused("plan", "demo", "--device", "H300")
    assert message.startswith(
        "paged: --device must be auto, cpu, cuda or cuda:N of this machine, or one of A100"
    )
    assert message.endswith(f"{', '.join(DATA_SHEETS)}; got 'H300'")
    assert "--kv-cache-dtype 'fp8' is not supported on A100-80G" in run.refused(
        *("plan", "demo", "--device", "a100-80g", "--kv-cache-dtype", "fp8")
    )
    shutil.copy(DEMO / "config.json", tmp_path)
    (tmp_path / "model.safetensors").symlink_to(DEMO / "model.safetensors")
    edit_json(tmp_path / "config.json", intermediate_size=96)
    assert "but config.json makes it" in run.refused("plan", tmp_path, "--device", "H200")
    edit_json(tmp_path / "config.json", num_key_value_heads=3)
    assert "num_key_value_heads" in run.refused("plan", tmp_path, "--device", "H200")
    ranks = ["[big.engine]", "tensor_parallel_size = 2"]
    divided = write(tmp_path / "m", "[big]", 'checkpoint = "demo"', *ranks)
    monkeypatch.setenv("PAGED_MODELS", str(divided))
    assert "tensor_parallel_size is 2 in models.toml" in run.refused("plan", "big", "--device", "H200")


class Repository:
    """The hub with one repository, the demo. It counts the bytes that are read of its weights."""

    num_read = 0

    def ls(self, repository, revision):
        assert (repository, revision) == ("org/name", "v1")
        return [{"name": f"org/name/{file.name}", "type": "file"} for file in DEMO.iterdir()]

    @contextmanager
    def open(self, path, revision, block_size):
        assert revision == "v1"
        assert block_size <= 2**20
        with (DEMO / Path(path).name).open("rb") as file:
            yield SimpleNamespace(read=file.read)
            Repository.num_read += file.tell()


def test_headers_of_a_hub_id(run, tmp_path, monkeypatch):
    """Of the weights only headers are fetched, and the plan is that of the whole checkpoint."""
    shutil.copy(DEMO / "config.json", tmp_path)
    fetched = []

    def fetch(model, *, revision, allow_patterns, **_):
        assert (model, revision) == ("org/name", "v1")
        fetched.extend(allow_patterns)
        return str(tmp_path)

    siblings = [SimpleNamespace(rfilename=file.name) for file in DEMO.iterdir()]
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=siblings))
    monkeypatch.setattr(hub, "snapshot_download", fetch)
    monkeypatch.setattr(hub, "HfFileSystem", Repository)
    options = ("--device", "H200", "--json")
    figures, whole = (
        json.loads(run("plan", *model, *options)[1])
        for model in (("org/name", "--revision", "v1"), ("demo",))
    )
    assert figures == {**whole, "model": "org/name"}
    assert set(fetched) == {"config.json"}
    assert 0 < Repository.num_read < 10_000


def test_hub_id_that_cannot_be_fetched(run, monkeypatch):
    def fail(*_, **__):
        raise OSError("404: no such model\nand more")

    monkeypatch.setattr(hub.HfApi, "model_info", fail)
    assert run.refused("plan", "nowhere", code=1).endswith(
        " could be fetched from the hub: 404: no such model"
    )


# As a model is given: a word, a repository, a commit of it, a GGUF file, a draft model.
UNREACHABLE = [
    ("nosuch",),
    ("no/such",),
    ("no/such", "--revision", "a" * 40),
    ("no/such:Q4_K_M",),
    ("demo", "--speculative-config", '{"model": "no/such"}'),
]


@pytest.mark.parametrize("model", UNREACHABLE, ids=" ".join)
@pytest.mark.parametrize("command", [("plan",), ("bench", "latency")], ids=" ".join)
def test_a_hub_that_is_not_reached_is_asked_once(run, tmp_path, monkeypatch, command, model):
    """Whatever the command reads of a model: its config and headers, or all of it."""
    requests = []

    def refuse(request):
        if "such" in request.url.path:  # not what the library asks for itself
            requests.append(request.url)
        raise http.ConnectError("Name or service not known")

    http = sys.modules[hub.errors.HfHubHTTPError.__bases__[0].__module__.partition(".")[0]]
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.set_client_factory(lambda: http.Client(transport=http.MockTransport(refuse)))
    try:
        message = run.fails(*command, *model, code=1)
    finally:
        hub.set_client_factory(hub.utils._http.default_client_factory)
    assert message.endswith(" could be fetched from the hub: Name or service not known")
    assert len(requests) == 1


def test_what_the_cache_has_needs_no_hub(run, tmp_path, monkeypatch):
    """The config of a model that was planned before, of which nothing else was fetched, and a whole one."""

    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(hub.HfApi, "model_info", fail)
    monkeypatch.setattr(hub.HfApi, "list_repo_tree", fail)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    root = tmp_path / "models--org--name"
    snapshot = root / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(snapshot.name)
    shutil.copy(DEMO / "config.json", snapshot)
    assert resolve_config("org/name") == snapshot
    assert run.refused("plan", "org/name", code=1).endswith(" from the hub: no network")
    shutil.copytree(DEMO, snapshot, dirs_exist_ok=True)
    figures, whole = (
        json.loads(run("plan", m, "--device", "H200", "--json")[1]) for m in ("org/name", "demo")
    )
    assert figures == {**whole, "model": "org/name"}
