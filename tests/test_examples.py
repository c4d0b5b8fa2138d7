"""Every example runs, is short, and shows what it says."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import paged
from paged import AsyncLLMEngine, SamplingParams
from paged.blocks.manager import BlockManager
from paged.kernels.backend import load_kernels
from paged.scheduler.scheduler import Scheduler
from tests.support.checkpoints import new_engine
from tests.support.served import serving

EXAMPLES = Path(__file__).parents[1] / "examples"
MOST_LINES, LINES_OF_LLAMA = 60, 150
# What each prints, as a regular expression.
SHOWS = {
    "llama": r"--- 0 tokens.*\nclass Stack(.*\n)*--- 16 tokens.*\nclass Stack(.*\n)*--- 0.*\ndef fibonacci",
    "batch": r"def fibonacci\(n\):\n(.*\n)*--- length 48 tokens",
    "ragged": r"times as fast, and every token is the same",
    "streaming": r"---\n['\"].+['\"]\n['\"].+['\"]\n",
    "coroutines": r"first token: '.*\n0 requests run, 0 blocks are used",
    "prefixes": r"read 0 of .*\nwrite 80 of .*\nclose 80 of .*\n4 samples have 24 blocks, of which 6 differ\n"
    r"5 blocks saved\nanother engine: 80 ",
    "tenants": r"'urgent', 'batch-1'.*\nof the first 12: {'free': 3, 'paying': 9}",
    "structured": r"{'name': '.*', 'age': \d+}\n(posi|nega|neu).*\n20\d\d-[01]\d\n{'a': -?\d+.* = -?\d+",
    "embeddings": r"1\.000.*\n.*1\.000.*\n.*1\.000\n'sys\\n' +log-probability +-\d",
    "policy": r"of 5 has ended\n.*of 20 has ended\n.*of 100 has ended\n.*of 300 has ended",
    "kernel": r"1 of 40 tokens: the largest difference is \d",
    "capacity": r"1 H100: \d+ requests/s.*\n2 H100: \d+ requests/s",
    "server": r"CompletionUsage\(completion_tokens=32",
    "agent": r"temperature\({'city': '\w+'}\) = \d+\nconvert\({'celsius': -?\d+}\) = .*\nThe answer: ",
}


@pytest.fixture(autouse=True)
def _uninitialised_is_nan() -> None:
    """Leave the memory of engines as it is: they have caches of the default size, a gigabyte."""


def run(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capfd.readouterr().out
    assert re.search(SHOWS[name], printed), printed


@pytest.mark.parametrize("name", [name for name in SHOWS if name != "agent"])
def test_example_shows_what_it_says(name, capfd):
    run(name, capfd)


def test_agent_calls_its_tools(capfd, monkeypatch):
    engine = AsyncLLMEngine("demo", device="cpu", num_threads=1, num_blocks=64)
    with serving(engine) as served:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{served.url}/v1")
        run("agent", capfd)
    engine.shutdown()


# The number of blocks, and the most tokens of a step: with room for all, in chunks, and with preemption.
@pytest.mark.parametrize(("num_blocks", "budget"), [(64, 512), (64, 24), (9, 24)])
def test_llama_has_the_tokens_of_the_engine(num_blocks, budget):
    shared = list(range(100, 140))
    prompts = [[*shared, 7], [5], [*shared, *range(300, 330)], list(range(200, 217)), shared[:33]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine = new_engine("demo", dtype="float32", num_blocks=64)
    expected = [
        [*output.outputs[0].token_ids]
        for output in engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    ]
    example = runpy.run_path(str(EXAMPLES / "llama.py"))
    model = example["Llama"](Path(paged.__file__).parent / "demo", load_kernels("numba"), num_blocks, 16)
    scheduler = Scheduler(BlockManager(num_blocks, 16), max_num_seqs=8, max_num_batched_tokens=budget)
    requests = example["generate"](model, scheduler, prompts, max_tokens=20)
    assert [request.output_token_ids for request in requests] == expected
    assert sum(request.num_cached_tokens for request in requests) >= 32, "no prefix was shared"
    assert (scheduler.counters.num_recomputed > 0) is (num_blocks == 9)
    scheduler.check()
    assert scheduler.block_manager.pool.num_available == num_blocks


def test_llama_refuses_what_it_does_not_compute(tmp_path):
    """A checkpoint whose scaling or bias were left out would load and write garbage."""
    demo = Path(paged.__file__).parent / "demo"
    config = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    example = runpy.run_path(str(EXAMPLES / "llama.py"))

    def load(changes, extra):
        (tmp_path / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
        save_file(load_file(demo / "model.safetensors") | extra, tmp_path / "model.safetensors")
        example["Llama"](tmp_path, load_kernels("torch"), 4, 16)

    load({}, {})
    scaled = {"rope_type": "llama3", "rope_theta": 1e4}
    for changes in (
        {"rope_parameters": scaled},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"architectures": ["MistralForCausalLM"]},
        {"hidden_act": "gelu"},
    ):
        with pytest.raises(ValueError, match="LLMEngine may load it"):
            load(changes, {})
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_proj.bias'.*LLMEngine may load it"):
        load({}, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(512)})


def test_every_example_is_short_and_listed():
    files = {file.stem: file for file in EXAMPLES.glob("*.py")}
    assert files.keys() == SHOWS.keys()
    for file in files.values():
        most = LINES_OF_LLAMA if file.stem == "llama" else MOST_LINES
        assert file.read_text(encoding="utf-8").count("\n") <= most, file.name
    listed = re.findall(r"\[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert listed == [*SHOWS]
