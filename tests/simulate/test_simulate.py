"""`paged simulate`: figures equal those computed by hand, and errors are one line."""

import itertools
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import huggingface_hub as hub
import pytest
import typer

from paged import EngineConfig, PagedError
from paged.architectures.config import DEMO
from paged.architectures.schemes import quantization_of
from paged.commands.simulate import simulate
from paged.requests.request import Request, RequestInputs
from paged.scheduler.schedule import Schedule
from paged.server.router import LeastLoaded, PrefixAware, RoundRobin
from paged.simulate.cost import (
    DATA_SHEETS,
    Coefficients,
    DataSheet,
    Portion,
    Roofline,
    StepCost,
    Work,
    blocks_that_fit,
    work_of,
)
from paged.simulate.fleet import Fleet, FleetConfig
from paged.simulate.model import read_model
from paged.simulate.timeline import Timeline
from paged.simulate.workload import Workload
from tests.support.checkpoints import checkpoint
from tests.support.quantised import Sizes, gptq, quantised_checkpoint
from tests.support.specs import windows

GPTQ = {"quant_method": "gptq", "bits": 4}
MODEL = read_model("demo")  # 4 layers, hidden 256, MLP 512, 8 heads of 64, 2 KV heads, 4096 tokens
LAYER_PARAMS = 4 * (256 * 8 * 64 + 2 * 256 * 2 * 64 + 8 * 64 * 256 + 3 * 256 * 512)
HEAD_PARAMS = 4096 * 256
KV_BYTES = 2 * 4 * 2 * 64 * 2
SMALL = {"requests": 200, "rate": 100.0, "input_len": "uniform:1-200", "output_len": "lognormal:10,0.8"}


def run(workload, fleet=None, **options):
    """Simulate and check that nothing is left over. Return the statistics."""
    options = {"num_blocks": 500, "swap_space": 0.0, **options}
    simulated = Fleet(FleetConfig(**(fleet or {})), EngineConfig(model="demo", **options))
    _, arrivals = workload.open()
    statistics = simulated.run(arrivals, workload.think_time)
    for replica in simulated.replicas:
        replica.scheduler.check()
        assert not replica.scheduler.has_unfinished()
        assert replica.manager.pool.num_used == 0
    assert not any(each.load for each in simulated.replicas)
    return statistics


def request(num_computed, num_tokens):
    made = Request(RequestInputs(prompt_token_ids=[0] * num_tokens, max_total_tokens=num_tokens + 9))
    made.num_computed_tokens = num_computed
    return made


def step(*decodes, prompts=(), **moved):
    """Make a schedule: decodes by their computed tokens, then prompts by their (computed, new) tokens."""
    pairs = [*((n, 1) for n in decodes), *prompts]
    return Schedule(
        [request(computed, computed + new) for computed, new in pairs],
        [new for _, new in pairs],
        [computed for computed, _ in pairs],
        sampled=[*range(len(pairs))],
        num_tokens=sum(new for _, new in pairs),
        num_decode_tokens=len(decodes),
        **moved,
    )


class TestCost:
    # 1 TFLOP/s, 1 GB/s to memory, 1 GiB, 0.5 GB/s to the host
    SHEET = DataSheet(1, 1, 1, 0.5, "sm_90")

    def seconds(self, schedule, sheet=SHEET):
        roofline = Roofline(
            Portion.of(MODEL), sheet, KV_BYTES, overhead=0.25, flops_efficiency=0.5, bandwidth_efficiency=0.8
        )
        return StepCost(roofline, MODEL, sheet, 16 * KV_BYTES).seconds(schedule)

    def test_step_bound_by_memory(self):
        # Decodes after 99 and 49 tokens read 100 and 50, and write one each.
        moved = 2 * (LAYER_PARAMS + HEAD_PARAMS) + KV_BYTES * (100 + 50 + 2)
        assert self.seconds(step(99, 49)) == pytest.approx(0.25 + moved / 0.8e9)

    def test_step_bound_by_compute(self):
        # Tokens 11 to 14 of a prompt attend to 11 + 12 + 13 + 14 keys, the decode to 8.
        flops = 2 * LAYER_PARAMS * 5 + 2 * HEAD_PARAMS * 2 + 4 * 64 * 8 * 4 * (11 + 12 + 13 + 14 + 8)
        sheet = DataSheet(1, 1e9, 1, 0.5, "sm_90")
        assert self.seconds(step(7, prompts=[(10, 4)]), sheet) == pytest.approx(0.25 + flops / 0.5e12)

    def test_moved_blocks(self):
        block = 16 * KV_BYTES
        moved = step(9, swap_out=[(0, 0)], swap_in=[(1, 1), (2, 2)], copies=[(3, 4)])
        extra = 3 * block / 0.5e9 + 2 * block / 1e9
        assert self.seconds(moved) == pytest.approx(self.seconds(step(9)) + extra)

    def test_window(self):
        # Window of 4: tokens 3 to 6 attend to 3, 4, 4 and 4 keys and read 1 to 6; the decode reads 4.
        work = work_of(step(9, prompts=[(2, 4)]), [(4, 1.0)])
        assert (work.context, work.pairs) == (4 + 6, 4 + 3 + 4 + 4 + 4)
        # Tokens 6 and 7 attend to 4 keys each and read 3 to 7.
        work = work_of(step(prompts=[(5, 2)]), [(4, 1.0)])
        assert (work.context, work.pairs) == (5, 8)
        half = work_of(step(9, prompts=[(2, 4)]), [(4, 0.5), (None, 0.5)])
        assert (half.context, half.pairs) == ((10 + 16) / 2, (19 + 10 + 3 + 4 + 5 + 6) / 2)

    def test_memory(self):
        assert MODEL.num_params == LAYER_PARAMS + HEAD_PARAMS  # tied embeddings
        sheet = DATA_SHEETS["L4"]
        free = 24 * 2**30 * 0.5 - 2 * (LAYER_PARAMS + HEAD_PARAMS)
        assert blocks_that_fit(Portion.of(MODEL), sheet, 0.5, 16 * KV_BYTES) == free // (16 * KV_BYTES)
        # GPTQ: 4 bits, and for 128 of them a scale of 16 bits and a zero of 4; the embedding has 16.
        given = {"quant_method": "gptq", "bits": 4, "group_size": 128}
        quantization = quantization_of({"quantization_config": given})
        model = replace(MODEL, layer_bits=quantization.layer_bits(MODEL))
        free = 24 * 2**30 * 0.5 - (4 + 20 / 128) / 8 * LAYER_PARAMS - 2 * HEAD_PARAMS
        assert blocks_that_fit(Portion.of(model), sheet, 0.5, 16 * KV_BYTES) == free // (16 * KV_BYTES)

    def test_a_step_reads_the_experts_that_its_tokens_choose(self):
        """And computes with those of each token: 3 of 8 in two of three layers."""
        experts = read_model(str(checkpoint("qwen3_moe")))
        one = 3 * 48 * 20
        dense = experts.num_layer_params - 2 * 8 * one
        assert experts.num_active_layer_params == dense + 2 * 3 * one
        for num_tokens in (1, 2, 7):
            read = 8 * (1 - (5 / 8) ** num_tokens)
            assert experts.num_read_layer_params(num_tokens) == pytest.approx(dense + 2 * read * one)
        sheet = DATA_SHEETS["L4"]
        efficiencies = {"flops_efficiency": 1.0, "bandwidth_efficiency": 1.0}
        cost = Roofline(Portion.of(experts), sheet, 0, overhead=0.0, **efficiencies)
        moved = 4 * (experts.num_read_layer_params(7) + 211 * 48)
        assert cost.seconds(Work(7, 7, 7, 0, 0)) == pytest.approx(moved / (sheet.memory_gb_per_s * 1e9))

    def test_bits_are_those_of_all_layers(self):
        """Also where the first one, or its MLP, is stored otherwise."""
        group = {"weights": {"num_bits": 4, "type": "int", "strategy": "channel"}, "format": "pack-quantized"}
        given = {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {**group, "targets": ["re:.*mlp.*"]}},
            "ignore": ["re:.*layers\\.0\\..*"],
        }
        quantization = quantization_of({"quantization_config": given})
        in_codes = 3 * (3 * 256 * 512)  # MLPs of three layers
        expected = (4 * in_codes + 16 * (LAYER_PARAMS - in_codes)) / LAYER_PARAMS
        assert quantization.layer_bits(replace(MODEL, dtype="bfloat16")) == pytest.approx(expected)

    def test_bits_are_those_of_the_files_if_they_are_there(self, tmp_path):
        """Norms, the head and scales of activations are none of them."""
        config = {**GPTQ, "group_size": 32, "desc_act": True}
        writer = gptq(Sizes(scale=0.02), act_order=True)
        source = checkpoint("llama")
        directory, _ = quantised_checkpoint(
            source, tmp_path, config, lambda name: writer if "layers.1.mlp" in name else None
        )
        model = read_model(str(directory))
        mlp = 3 * 48 * 80
        floats = 16 if model.dtype in ("float16", "bfloat16") else 32
        in_file = mlp * (4 + 20 / 32) + (model.num_layer_params - mlp) * floats
        assert model.layer_bits == pytest.approx(in_file / model.num_layer_params, rel=0.02)
        (directory / "model.safetensors").unlink()
        assert read_model(str(directory)).layer_bits == 4 + 20 / 32

    def test_coefficients(self, tmp_path):
        file = tmp_path / "fit.json"
        file.write_text('{"step_s": 1, "token_s": 0.1, "seq_s": 0.01, "context_s": 0.001, "pair_s": 1e-4}')
        work = work_of(step(9, 19, prompts=[(0, 5)]), [(None, 1.0)])
        assert Coefficients.read(file).seconds(work) == pytest.approx(1 + 0.7 + 0.03 + 0.035 + 0.0045)


def test_one_request_on_an_idle_replica(tmp_path):
    """A prompt of 5 takes chunks of 2, 2 and 1; 3 decodes follow."""
    file = tmp_path / "fit.json"
    file.write_text('{"step_s": 1, "token_s": 0.1, "context_s": 0.001}')
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 7, "input_tokens": 5, "output_tokens": 4}\n')
    fleet = {"coefficients": str(file), "replicas": 2}
    found = run(Workload(trace=str(trace)), fleet, max_num_batched_tokens=2)
    ttft = 3 + 0.5 + 0.001 * (2 + 4 + 5)
    decodes = 3 + 0.3 + 0.001 * (6 + 7 + 8)
    latencies = found.latencies[""]
    assert latencies.ttft[0] == pytest.approx(ttft)
    assert latencies.tpot[0] == pytest.approx(decodes / 3)
    assert latencies.e2e[0] == found.duration == pytest.approx(ttft + decodes)
    summary = found.summary()
    assert summary["output_tokens_per_s"] == pytest.approx(4 / found.duration)
    # One of two replicas is busy all the time, with one of its 500 blocks.
    assert summary["busy_share"] == pytest.approx(1 / 2)
    assert summary["block_share_mean"] == pytest.approx(1 / 1000)
    assert (summary["block_share_peak"], summary["steps"], summary["tokens_per_step"]) == (1 / 500, 6, 8 / 6)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest-prefix-match", "fair"])
def test_everybody_finishes(policy):
    """In a pool that is too small for all, requests are preempted and every token is counted once."""
    crowd = {**SMALL, "rate": 5000.0, "turns": 3, "think_time": 0.1}
    workload = Workload(**crowd, prefixes=4, prefix_len=40, tenants={"a": 3, "b": 1})
    fleet = {"replicas": 2, "router": "prefix-aware", "gpu": "L4"}
    found = run(workload, fleet, num_blocks=80, scheduling_policy=policy, swap_space=0.001)
    summary = found.summary()
    assert (summary["finished"], summary["refused"]) == (200, 0)
    assert sum(len(latencies.e2e) for latencies in found.latencies.values()) == 200
    assert summary["preemptions"] > 0
    assert 0 < summary["hit_rate"] < 1
    assert 0 < summary["block_share_mean"] < summary["block_share_peak"] <= 1
    # As many as the workload asks for, however much was recomputed.
    _, arrivals = workload.open()
    wanted = [turn for a in arrivals for turn in [(0, a.num_output_tokens), *a.following]]
    assert summary["output_tokens"] == sum(output for _, output in wanted)


def test_same_seed_same_figures():
    def figures(seed):
        workload = Workload(
            **SMALL, arrivals="bursty", prefixes=2, turns=2, tenants={"a": 1, "b": 1}, seed=seed
        )
        return run(workload, {"replicas": 3, "router": "prefix-aware"}).summary()

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_workload_is_what_was_asked_for():
    workload = Workload(
        requests=20_000,
        rate=50.0,
        input_len="lognormal:100,0.5",
        output_len="uniform:10-30",
        prefixes=3,
        prefix_len=64,
        tenants={"a": 3, "b": 1},
    )
    _, stream = workload.open()
    arrivals = [*stream]
    assert arrivals[-1].time == pytest.approx(20_000 / 50, rel=0.05)
    assert sum(len(a.token_ids) - 64 for a in arrivals) / 20_000 == pytest.approx(100, rel=0.05)
    assert {a.num_output_tokens for a in arrivals} == {*range(10, 31)}
    assert Counter(a.tenant for a in arrivals)["a"] == pytest.approx(15_000, rel=0.05)
    shares = Counter(a.token_ids[0] for a in arrivals)  # 1, 1/2 and 1/3 of the most popular one
    assert [shares[k] for k in (1, 2, 3)] == pytest.approx([20_000 * 6 / 11 / k for k in (1, 2, 3)], rel=0.1)
    assert len({tuple(a.token_ids[64:]) for a in arrivals}) == 20_000  # nothing else is shared


def test_bursts_come_at_the_same_rate():
    def gaps(**options):
        _, stream = Workload(requests=20_000, rate=10.0, **options).open()
        times = [a.time for a in stream]
        return [b - a for a, b in itertools.pairwise(times)]

    for options, variation in ({}, 1.0), ({"arrivals": "bursty", "burstiness": 0.25}, 4.0):
        found = gaps(**options)
        mean = sum(found) / len(found)
        assert mean == pytest.approx(0.1, rel=0.1)
        assert sum((gap - mean) ** 2 for gap in found) / len(found) / mean**2 == pytest.approx(
            variation, rel=0.15
        )


def test_a_conversation_hits_what_was_said():
    workload = Workload(
        requests=4, turns=4, rate=1.0, input_len="fixed:32", output_len="fixed:17", think_time=5
    )
    found = run(workload)
    # Turn k begins with k - 1 times 49 tokens; those of full blocks are hits, except the last sampled token.
    assert found.num_prompt_tokens == sum(32 + 49 * k for k in range(4))
    assert found.num_cached_tokens == sum((49 * k - 1) // 16 * 16 for k in range(1, 4))
    assert found.duration > 15


class TestRouters:
    def test_in_turn_and_by_load(self):
        turns = RoundRobin()
        assert [turns.choose([], [9, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]
        assert LeastLoaded().choose([], [5, 3, 4, 3]) == 1

    def test_prefix_unless_it_has_too_much_to_do(self):
        router, shared = PrefixAware(4), [1, 2, 3, 4, 5, 6, 7, 8]
        assert router.choose([*shared, 9], [5, 0]) == 1
        assert router.choose([*shared, 10], [0, 5]) == 1
        assert router.choose([1, 2, 3, 4, 0], [0, 5]) == 1
        assert router.choose([0, *shared], [0, 5]) == 0
        busy = router.MAX_EXTRA + 1
        assert router.choose([*shared, 11], [0, busy]) == 0
        assert router.choose([*shared, 12], [6, 5]) == 1  # now both have it

    def test_prompts_that_wait_weigh_more_than_decodes(self, tmp_path):
        """Where first tokens wait for prompts, and most requests decode, turns are hard to beat."""
        file = tmp_path / "fit.json"
        file.write_text('{"step_s": 0.07, "token_s": 2e-4}')
        workload = Workload(
            requests=400, rate=20.0, input_len="uniform:256-768", output_len="lognormal:60,0.8"
        )
        fleet = {"replicas": 8, "coefficients": str(file)}
        p99 = {
            router: run(workload, {**fleet, "router": router}, num_blocks=2000).summary()["ttft_s"]["p99"]
            for router in ("round-robin", "least-loaded")
        }
        assert p99["least-loaded"] < 1.3 * p99["round-robin"]

    def test_prefix_aware_hits_more(self):
        workload = Workload(**SMALL, prefixes=16, prefix_len=128)
        rates = {
            router: run(workload, {"replicas": 8, "router": router}, num_blocks=200).summary()["hit_rate"]
            for router in ("round-robin", "least-loaded", "prefix-aware")
        }
        assert rates["prefix-aware"] > 1.5 * rates["round-robin"] > 0


def reasons(summary):
    return {name: number for name, number in summary["refused_because"].items() if number}


def test_requests_that_cannot_be_served_are_counted(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lengths = [(10, 5), (3000, 5), (100, 100), (64, 1)]  # context 2048, pool 64 tokens
    lines = [json.dumps({"timestamp": 0, "input_tokens": n, "output_tokens": m}) for n, m in lengths]
    trace.write_text("\n".join(lines) + "\n")
    summary = run(Workload(trace=str(trace)), num_blocks=4).summary()
    assert (summary["finished"], summary["refused"], summary["output_tokens"]) == (2, 2, 6)
    assert reasons(summary) == {"longer_than_max_model_len": 1, "larger_than_kv_cache": 1}
    crowd = Workload(requests=50, rate=float("inf"), output_len="fixed:5", input_len="fixed:9")
    summary = run(crowd, max_num_seqs=1, max_waiting=7).summary()
    assert (summary["finished"], summary["refused"]) == (7, 43)
    assert reasons(summary) == {"max_waiting": 43}
    turns = Workload(requests=6, turns=3, rate=1.0, input_len="fixed:3000")
    assert reasons(run(turns).summary()) == {"longer_than_max_model_len": 2, "earlier_turn_refused": 4}


def test_priorities_and_prefixes_of_a_trace(tmp_path):
    trace = tmp_path / "trace.jsonl"
    shared = {"input_tokens": 100, "output_tokens": 20, "prefix_id": 7}
    lines = [
        {**shared, "timestamp": 3, "priority": 1, "tenant": "late"},
        {**shared, "timestamp": 2, "priority": 2, "tenant": "low"},
        {**shared, "timestamp": 2, "priority": 1, "tenant": "high"},
        {"timestamp": 2, "prompt_token_ids": [5] * 100, "output_tokens": 20, "tenant": "first"},
    ]
    trace.write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    found = run(Workload(trace=str(trace), prefix_len=64), max_num_seqs=1, scheduling_policy="priority")
    ttft = {tenant: latencies.ttft[0] for tenant, latencies in found.latencies.items()}
    assert ttft["first"] < ttft["high"] < ttft["low"]
    assert ttft["late"] < ttft["high"]  # it arrives a second later
    assert found.num_cached_tokens == 2 * 64


# The command line


app = typer.Typer()
app.command()(simulate)


@pytest.fixture
def command(capsys):
    def run_command(options):
        code = app(options.split(), standalone_mode=False)
        assert code == 0
        return capsys.readouterr().out

    return run_command


SHORT = "--requests 40 --rate 50 --swap-space 0 --input-len fixed:100"
QUICK = f"{SHORT} --num-blocks 400 --output-len fixed:9"


def test_report_and_json(command):
    text = command(f"{QUICK} --tenants a=3,b=1")
    assert text.startswith("40 requests finished, 0 refused")
    for label in ("TTFT", "TPOT b", "E2E a", "throughput", "utilisation", "preemptions", "steps"):
        assert label in text
    figures = json.loads(command(f"{QUICK} --tenants a=3,b=1 --json"))
    assert figures["finished"] == sum(tenant["finished"] for tenant in figures["tenants"].values()) == 40
    assert 0 < figures["ttft_s"]["p50"] <= figures["ttft_s"]["p90"] <= figures["ttft_s"]["p99"]


def test_report_says_why_requests_are_refused(command):
    text = command(f"{SHORT} --num-blocks 400 --turns 2 --input-len fixed:3000 --think-time 1")
    _, long, later, _ = text.splitlines()[:4]
    assert long == "refused      20 have a prompt that is longer than max_model_len"
    assert later == "refused      20 follow a refused turn of their conversation"


def test_a_hybrid(command):
    """A step reads and writes the state of each of its sequences."""
    name = str(checkpoint("qwen3_5"))
    figures = json.loads(command(f"{QUICK} --model {name} --gpu L4 --json"))
    assert figures["finished"] == 40
    model, sheet = read_model(name), DATA_SHEETS["L4"]
    efficiencies = {"flops_efficiency": 1.0, "bandwidth_efficiency": 1.0}
    cost = Roofline(Portion.of(model), sheet, 0, overhead=0.0, **efficiencies)
    six, seven = (cost.seconds(Work(7, num_seqs, 7, 0, 0)) for num_seqs in (6, 7))
    element = 4 if model.dtype == "float32" else 2
    moved = 2 * 3 * (3 * 128 * element + 4 * 12 * 20 * 4)
    assert seven - six == pytest.approx(moved / (sheet.memory_gb_per_s * 1e9), rel=1e-3)


def test_gpu_in_any_case(command):
    def figures(gpu):
        return {**json.loads(command(f"{QUICK} --gpu {gpu} --json")), "wall_s": 0}

    assert figures("rtx4090") == figures("RTX4090") != figures("h100")


def test_config_of_a_hub_id(command, tmp_path, monkeypatch):
    """No weights are fetched."""
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text())
    asked = []

    def fetch(model, *, revision, allow_patterns, **_):
        asked.append((model, allow_patterns, revision))
        return str(tmp_path)

    siblings = [SimpleNamespace(rfilename="config.json")]
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=siblings))
    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert command(f"{QUICK} --model org/name --revision v1").splitlines()[2:] != []
    assert asked == [("org/name", ["config.json"], "v1")]
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: 1 / 0)
    refused(["--model", "demo", "--revision", "v1"], "model: revision 'v1' names a version on the hub")

    def fail(*_, **__):
        raise OSError("404: no such model\nand more")

    monkeypatch.setattr(hub.HfApi, "model_info", fail)
    monkeypatch.setattr(hub, "snapshot_download", fail)
    refused(
        ["--model", "nowhere"], "model: 'nowhere' is neither a directory nor .* the hub: 404: no such model$"
    )


def test_sweep(command):
    lines = command(f"{SHORT} --output-len fixed:9 --sweep num-blocks=20,100,400").splitlines()
    assert len(lines) == 5
    assert [line.split()[0] for line in lines[2:]] == ["20", "100", "400"]
    result = json.loads(command(f"{QUICK} --rate inf --sweep max_num_seqs=1,16 --json"))
    one, many = result["rows"]
    lengths = json.loads(command(f"{SHORT} --num-blocks 400 --sweep output_len=fixed:3;uniform:2-4 --json"))
    assert [row["output_len"] for row in lengths["rows"]] == ["fixed:3", "uniform:2-4"]
    assert (result["sweep"], one["max_num_seqs"], many["max_num_seqs"]) == ("max_num_seqs", 1, 16)
    assert many["output_tokens_per_s"] > 5 * one["output_tokens_per_s"]


def test_sweep_over_files(command, tmp_path, monkeypatch):
    """A value has the type of its option: here a name that looks like a number."""
    monkeypatch.chdir(tmp_path)
    for name, num_tokens in (("1", 10), ("2", 20)):
        line = {"timestamp": 0, "input_tokens": num_tokens, "output_tokens": num_tokens}
        (tmp_path / name).write_text(json.dumps(line))
    rows = json.loads(command("--num-blocks 99 --sweep trace=1,2 --json"))["rows"]
    assert [(row["trace"], row["output_tokens"]) for row in rows] == [("1", 10), ("2", 20)]
    refused(["--trace", tmp_path / "1", "--prefix-len", 7], "lines of the trace with a prefix_id")


def test_tenants_in_one_text_or_in_several(command):
    one, several = (
        json.loads(command(f"{QUICK} {tenants} --json"))["tenants"]
        for tenants in ("--tenants a=3,b=1", "--tenants a=3 --tenants b=1")
    )
    assert one == several


def test_picture_does_not_replace_what_is_read(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra 'plots', is not installed")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    refused(["--trace", trace, "--plot", trace], "would overwrite the input")
    refused(["--plot", tmp_path / "missing" / "x.png"], "no such directory")


def test_timeline():
    """However long the simulation gets, no sum is lost, and a step counts in its intervals."""
    timeline = Timeline(interval=1.0)
    timeline.add(0.5, 1.5, used=4, running=2, waiting=1, num_tokens=10)
    assert (timeline.used_blocks[:3], timeline.tokens[:3]) == ([2, 2, 0], [5, 5, 0])
    timeline.add(1000, 1001, used=8, running=1, waiting=0, num_tokens=1)
    assert timeline.interval == 2
    assert (timeline.used_blocks[0], timeline.used_blocks[500]) == (4, 8)
    assert (sum(timeline.running), sum(timeline.waiting), sum(timeline.tokens)) == (3, 1, 11)


def test_plot(command, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra 'plots', is not installed")
    from matplotlib.image import imread

    pictures = []
    for num_blocks in (100, 1000):
        file = tmp_path / f"{num_blocks}.png"
        command(f"{QUICK} --num-blocks {num_blocks} --plot {file}")
        pictures.append(imread(file))
    third = len(pictures[0]) // 3
    one, other = (picture[:third] for picture in pictures)
    assert (one == other).all()  # equally many requests at any time
    assert one.min() < one.max()
    one, other = (picture[-third:] for picture in pictures)
    assert (one != other).any()  # which hold another share of the blocks


def test_plot_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused(["--plot", tmp_path / "x.png"], r"pip install 'paged\[plots\]'")


def refused(argv, message):
    with pytest.raises(PagedError, match=message):
        app(list(map(str, argv)), standalone_mode=False)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--requests", 0], "requests must be at least 1, got 0"),
        (["--rate", 0], "rate must be above 0, got 0"),
        (["--rate", "nan"], "rate must be finite"),
        (["--policy", "lifo"], "scheduling_policy must be one of fcfs, .*, fair; got 'lifo'"),
        (["--router", "random"], "router must be one of round-robin, .*; got 'random'"),
        (["--gpu", "H900"], "gpu must be one of A100-80G, .*; got 'H900'"),
        (["--arrivals", "tidal"], "arrivals must be one of poisson, bursty"),
        (["--burstiness", 2], "burstiness needs arrivals 'bursty'"),
        (["--tenants", "a=-1"], "share of tenant 'a' must be above 0"),
        (["--tenants", "a"], "such as a=3,b=1; got 'a'"),
        (["--policy", "fair", "--tenant-weights", "a=-1"], r"tenant_weights\['a'\] must be above 0"),
        (["--input-len", "fixed:0"], "input_len must be at least 1"),
        (["--output-len", "normal:3"], "output_len must be one of fixed:N, .*; got 'normal:3'"),
        (["--output-len", "uniform:9-3"], "upper end must be at least 9"),
        (["--model", "./nowhere"], "model: no such directory or GGUF file: ./nowhere"),
        (
            ["--model", "docs"],
            "docs/config.json: no such file; model must be 'demo', a hub id or a directory",
        ),
        (["--sweep", "speed=1,2"], "--sweep knows no option 'speed'; it takes gpu, "),
        (["--sweep", "num_blocks=1000,x"], "num_blocks must be an int, at least 1, got 'x'"),
        (["--sweep", "num_blocks="], "such as rate=1,2,4; got 'num_blocks='"),
        (["--sweep", "num_blocks=1e3"], "num_blocks must be an int, at least 1, got '1e3'"),
        (["--sweep", "rate=fast"], "rate must be a number, above 0, got 'fast'"),
        (["--sweep", "input_len=100,200"], "input_len must be one of fixed:N, .*; got '100'"),
        (["--sweep", "input_len=fixed:1;"], "such as rate=1,2,4; got 'input_len=fixed:1;'"),
        (["--sweep", "enable_prefix_caching=yes"], "enable_prefix_caching must be True or False, got 'yes'"),
        (["--sweep", "tenants=a,b"], "--sweep knows no option 'tenants'"),
        (["--sweep", "rate=1,2", "--rate", 3], "--sweep goes over rate, which is also given as 3.0"),
        (["--sweep", "rate=1", "--plot", "x.png"], "leave it out of a --sweep"),
        (["--policy", "fair", "--tenant-weights", "a=1,a=2"], "a number for each tenant .* got 'a=1,a=2'"),
        (["--policy", "fair", "--tenant-weights", "a=1", "--tenant-weights", "a=2"], "got 'a=1,a=2'"),
        (["--prefix-len", 64], "prefix_len needs prefixes, or a trace; leave it out"),
        (["--think-time", 1], "think_time needs turns above 1; leave it out"),
        (["--arrivals", "bursty", "--rate", "inf"], "arrivals needs a finite rate"),
        (
            ["--coefficients", "fit.json", "--flops-efficiency", 0.5],
            "flops_efficiency must be left out with them",
        ),
        (["--coefficients", "fit.json", "--step-overhead", 2], "step_overhead must be left out with them"),
        (["--max-model-len", 4096], "max_model_len 4096 is more than the 2048 of the model"),
    ],
    ids=str,
)
def test_bad_options(argv, message):
    refused(argv, message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "a line must be an object"),
        ('{"timestamp": 0, "input_tokens": 5}', "output_tokens is missing"),
        ('{"timestamp": 0, "output_tokens": 5}', "a line must have either input_tokens or prompt_token_ids"),
        ('{"timestamp": "0", "input_tokens": 5, "output_tokens": 5}', "timestamp must be a number, got '0'"),
        ('{"timestamp": 0, "input_tokens": 5, "output_tokens": 0}', "output_tokens must be from 1 to"),
        ('{"timestamp": 0, "input_tokens": 5, "output_tokens": 5, "user": 1}', "unknown 'user'"),
        ('{"timestamp": 0, "prompt_token_ids": [-1], "output_tokens": 5}', "prompt_token_ids must be from 0"),
    ],
)
def test_bad_line_of_a_trace(tmp_path, line, message):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f'{{"timestamp": 0, "input_tokens": 5, "output_tokens": 5}}\n\n{line}\n')
    refused(["--trace", trace], rf"trace\.jsonl:3: {message}")
    refused(
        ["--trace", trace, "--rate", 5], "the trace determines the requests; rate must be left out with it"
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"token_s": 1}', '{"step_s": -1}', '{"step_s": 1, "x": 1}'])
def test_bad_coefficients(tmp_path, text):
    file = tmp_path / "fit.json"
    file.write_text(text)
    refused(["--coefficients", file], r"fit\.json: ")


def test_configs_from_hub_and_damaged(tmp_path):
    """Defaults of transformers are filled in; a required key that is missing is named."""
    hf = json.loads((DEMO / "config.json").read_text())
    file = tmp_path / "config.json"
    qwen = {**hf, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 128}
    file.write_text(json.dumps({**qwen, "use_sliding_window": True, "max_window_layers": 3}))
    assert windows(read_model(str(tmp_path))) == (None, None, None, 128)
    file.write_text(json.dumps(qwen))
    assert windows(read_model(str(tmp_path))) == (None,) * 4
    del hf["hidden_size"]
    file.write_text(json.dumps(hf))
    refused(["--model", tmp_path], r"config\.json: hidden_size is missing")


def test_no_torch():
    """Neither the start of the command line nor a simulation imports torch."""
    code = (
        "import sys, paged.commands.simulate as c; c.simulate(requests=3, as_json=True); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'matplotlib', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_accepted_drafts_save_steps_and_their_rows_take_time():
    workload = Workload(requests=20, rate=1e-3, input_len="fixed:50", output_len="fixed:61", seed=1)
    plain = run(workload).summary()
    certain = run(workload, {"speculative_acceptance": "1,1,1"}).summary()
    # After the first token, 15 runs of 4 tokens.
    assert (plain["steps"], certain["steps"]) == (20 * 61, 20 * 16)
    assert certain["tokens_per_step"] == (50 + 15 * 4) / 16
    wrong = run(workload, {"speculative_acceptance": "0,0,0"}).summary()
    assert wrong["steps"] == plain["steps"]
    assert wrong["tpot_s"]["mean"] > plain["tpot_s"]["mean"]
    some = run(workload, {"speculative_acceptance": "0.8,0.6,0.4"}).summary()
    assert some["output_tokens"] == plain["output_tokens"]
    assert some["steps"] == pytest.approx(20 * (1 + 60 / 2.8), rel=0.05)


@pytest.mark.parametrize("shares", ["", "0.5,0.6", "1.1", "-0.1", "nan", "high"])
def test_shares_of_acceptance_do_not_rise(shares):
    with pytest.raises(PagedError, match="speculative_acceptance must be shares from 1 to 0"):
        FleetConfig(speculative_acceptance=shares)


def test_of_two_steps_in_flight_each_takes_the_longer_of_host_and_device():
    workload = Workload(requests=4, rate=1e-3, input_len="fixed:50", output_len="fixed:61", seed=1)

    def tpot(step_overhead, **options):
        summary = run(workload, {"step_overhead": step_overhead}, **options).summary()
        assert summary["steps"] == 4 * 61
        return summary["tpot_s"]["mean"]

    device = tpot(0.0)
    assert tpot(1.0) == pytest.approx(0.001 + device)
    assert tpot(1.0, async_scheduling=True) == pytest.approx(0.001)  # the device waits for the host
    assert tpot(1e-4, async_scheduling=True) == pytest.approx(device)
    # Requests come and go in between, blocks run short, and tokens are guessed.
    busy = Workload(requests=60, rate=1e6, input_len="uniform:1-90", output_len="uniform:1-60", seed=2)
    for fleet in ({}, {"speculative_acceptance": "0.8,0.5"}):
        one, two = (
            run(busy, {"step_overhead": 0.005, **fleet}, num_blocks=40, async_scheduling=is_on).summary()
            for is_on in (False, True)
        )
        assert one["output_tokens"] == two["output_tokens"]
        # Those that wait for how many guesses are right gain nothing.
        assert fleet or two["output_tokens_per_s"] > 1.3 * one["output_tokens_per_s"]


def test_coefficients_do_not_tell_what_two_steps_in_flight_hide(tmp_path):
    file = tmp_path / "fit.json"
    file.write_text('{"step_s": 0.001}')
    config = EngineConfig(model="demo", num_blocks=50, swap_space=0.0, async_scheduling=True)
    with pytest.raises(PagedError, match="coefficients do not tell the host's part of a step"):
        Fleet(FleetConfig(coefficients=str(file)), config)
