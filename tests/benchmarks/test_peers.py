"""The benchmarks of other engines, tried without these. No time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import nano_vllm_workload, ragged_workload
from benchmarks.peers import __main__ as peers
from benchmarks.peers.fleet import Fleet, Way, prove, ways_named
from benchmarks.peers.limit import workload_cost
from benchmarks.peers.report import summarise
from benchmarks.peers.worker import in_batches
from paged import SamplingParams
from paged.scheduler.schedule import Schedule, StepOutput
from paged.simulate.model import read_model
from tests.support.checkpoints import checkpoint, new_engine, ragged_prompts

ROOT = Path(__file__).parents[2]


def run(module, *args):
    """Run a benchmark. Return its output, and the JSON of its last line."""
    done = subprocess.run([sys.executable, "-m", module, *args], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


def test_the_workload_is_seeded_ragged_and_within_bounds():
    work = ragged_workload(300, 50)
    assert work == ragged_workload(300, 50)
    lengths = [len(prompt) for prompt in work.prompts]
    assert {min(lengths), max(lengths)} <= {*range(16, 24), *range(504, 513)}
    assert (min(work.max_tokens), max(work.max_tokens)) == (50, 128)
    assert {i for prompt in work.prompts for i in prompt} == {*range(50)}
    assert ragged_workload(4, 50).max_tokens == work.max_tokens[:4]
    # Another round: the same lengths, and nothing that a prefix cache could hit.
    other = ragged_workload(300, 50, seed=1)
    assert [len(prompt) for prompt in other.prompts] == lengths
    assert not any(a[:16] == b[:16] for a, b in zip(work.prompts, other.prompts, strict=True))
    nano, other = (nano_vllm_workload(20, 1.0, 50, seed) for seed in (0, 1))
    assert [*map(len, nano.prompts)] == [*map(len, other.prompts)]
    assert nano.max_tokens == other.max_tokens
    assert not any(a[:16] == b[:16] for a, b in zip(nano.prompts, other.prompts, strict=True))
    behind = ragged_workload(300, 50, scale=0.5, common_prefix=20).prompts
    assert len({tuple(prompt[:20]) for prompt in behind}) == 1
    assert max(map(len, behind)) <= 20 + 256


@pytest.mark.parametrize("prefix", [0, 2])
def test_the_limit_by_hand(prefix):
    """Prompts of 3 and 5 tokens with outputs of 2 and 4 on the demo model."""
    model = read_model("demo")
    layers = 4 * (256 * (8 + 2 + 2) * 64 + 8 * 64 * 256 + 3 * 256 * 512)
    head = 4096 * 256
    moved, flops = workload_cost(model, "int8", [3, 5], [2, 4], prefix)
    # 3 + 1 and 5 + 3 tokens are computed; every query sees itself and all tokens before it.
    tokens, pairs = 12 - prefix, 10 + 36 - prefix * (prefix + 1) // 2
    # In the last of 4 layers the tokens before the last one of a prompt need only K and V.
    unread, unread_pairs = tokens - 2 - 4, 3 + 10 - prefix * (prefix + 1) // 2
    last = layers // 4 - 256 * 2 * 2 * 64
    products = 2 * (layers * tokens - last * unread) + 2 * head * 6
    assert flops == products + 4 * 8 * 64 * (4 * pairs - unread_pairs)
    # KV is read with the prompt and with every decode; a common prefix once in each of the 4 steps.
    read = (3 + 4) + (5 + 6 + 7 + 8) - prefix * (2 + 4) + prefix * 4
    assert moved == 4 * (layers + head) + 2 * 4 * 2 * 64 * 2 * (read + tokens)
    # In float32 KV takes twice the bytes; the weights of the checkpoint do not.
    wider, narrower = (workload_cost(model, dtype, [3], [2])[0] for dtype in ("float32", "bfloat16"))
    assert wider - narrower == 2 * 4 * 2 * 64 * 2 * ((3 + 4) + 4)


def test_ways_have_names():
    assert ways_named(["vllm", "openvino-int8", "vllm-float32"]) == [
        Way("vllm", "bfloat16"),
        Way("vllm", "float32"),
        Way("openvino", "int8"),
    ]
    with pytest.raises(ValueError, match=r"no way is called 'vllm-int3'; there are paged, generate"):
        ways_named(["vllm-int3"])


def test_batches_are_of_similar_lengths():
    assert in_batches([[0] * 5, [0], [0] * 3], 2) == [[1, 2], [0]]
    assert in_batches([[0] * 5, [0], [0] * 3], None) == [[0, 1, 2]]


def test_a_missing_peer_is_reported_and_the_others_are_measured(tmp_path):
    """Our tokens are also compared with transformers: otherwise there would be no row of ours."""
    args = ["--batches", "1", "--scale", "0.02", "--rounds", "1"]
    printed, result = run(
        "benchmarks.throughput",
        *args,
        "--ways",
        "paged-float32",
        "vllm-float32",
        "--environments",
        str(tmp_path),
    )
    assert f'left out vllm-float32: no environment {tmp_path / "vllm"}: make peers PEERS="vllm"' in printed
    assert "paged-float32: 100% of the tokens are the best, 0.0000 away" in printed
    (row,) = result["rows"]
    assert (result["workload"], result["shapes"]) == ("nano-vllm", ["demo"])
    assert row["way"] == "paged-float32"
    assert 0 < row["of limit"] < 1
    assert row["TTFT s"] <= row["worst"]


class Scripted(Fleet):
    """Scripted answers in the place of processes."""

    def __init__(self, gaps):
        super().__init__(ways_named(gaps), {"num_requests": 1}, 0, ROOT)
        self.gaps = gaps

    def call(self, way, name, **arguments):
        return self.gaps[arguments["tokens"]] if name == "judge" else {"tokens": str(way)}


def test_way_with_other_tokens_is_left_out():
    fleet = Scripted({"paged-float32": [0.0, 1e-6], "vllm-float32": [0.0, 0.0], "paged-int4": [0.3, 0.0]})
    prove(fleet, ragged_workload(1, 100))
    assert [str(way) for way in fleet.ways] == ["vllm-float32", "paged-int4"]
    assert "its tokens are not the model's" in fleet.left_out["paged-float32"]


def test_rows_are_medians_and_ratios_of_rounds():
    def rounds(*seconds):
        return [{"seconds": s, "first_token_s": [0.1, 0.3], "peak_rss_mib": 10.0 * s} for s in seconds]

    runs = {Way("paged", "int8"): rounds(1, 2, 3), Way("vllm", "int8"): rounds(4, 2, 3)}
    ours, theirs = summarise(runs, dict.fromkeys(runs, 0.5), 40, 60)
    assert (ours["tokens/s"], ours["total/s"], ours["of limit"], ours["peak MiB"]) == (30, 50, 0.25, 30)
    assert (ours["TTFT s"], ours["worst"], ours["paged is faster by"]) == (0.2, 0.3, None)
    assert (theirs["paged is faster by"], theirs["range"]) == (1, "1.00-4.00")


def test_waste_that_is_printed_is_what_the_engine_wastes(monkeypatch):
    engine = new_engine(checkpoint("llama"), enable_prefix_caching=False)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 9, 40, 16)]
    prompts = ragged_prompts([5, 30, 16, 33])
    for i, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, wanted)
    taken: dict[str, int] = {}
    execute = engine.runner.execute

    def executed(schedule: Schedule) -> StepOutput:
        taken.update({request.request_id: request.blocks.capacity for request in schedule.requests})
        return execute(schedule)

    monkeypatch.setattr(engine.runner, "execute", executed)
    while engine.has_unfinished_requests():
        engine.step()
    stored = [len(prompt) + p.max_tokens - 1 for prompt, p in zip(prompts, params, strict=True)]
    assert peers.kv_waste(stored, engine.runner.sizes.block_size) == sum(taken.values()) / sum(stored) - 1
