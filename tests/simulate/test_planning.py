"""Planning with `paged simulate`: ranks, links, deaths, slices, and real engines beside simulated ones."""

import itertools
import json
from dataclasses import replace

import pytest

from paged import EngineConfig, LLMEngine, PagedError, SamplingParams
from paged.model.part import ModelPart, Shard
from paged.server.router import PrefixAware
from paged.simulate.cost import Portion, Work
from paged.simulate.fleet import Fleet, FleetConfig
from paged.simulate.model import read_model
from paged.simulate.pipeline import Exchanges, RankLink
from paged.simulate.workload import Workload
from tests.support.checkpoints import checkpoint, new_engine
from tests.support.shards import computed_in_shards, shards_of

# The demo model: 4 layers, hidden 256, MLP 512, 8 heads of 64, 2 KV heads, 4096 tokens, tied, bfloat16.
LAYER_PARAMS = 256 * 8 * 64 + 2 * 256 * 2 * 64 + 8 * 64 * 256 + 3 * 256 * 512
HEAD_PARAMS = 4096 * 256
KV_BYTES = 2 * 4 * 2 * 64 * 2


def serve(workload, fleet=None, **options):
    """Simulate, and check that nothing is left over. Return the fleet."""
    options = {"num_blocks": 500, "swap_space": 0.0, **options}
    simulated = Fleet(FleetConfig(**(fleet or {})), EngineConfig(model="demo", **options), seed=workload.seed)
    _, arrivals = workload.open()
    simulated.run(arrivals, workload.think_time)
    for replica in simulated.replicas:
        replica.scheduler.check()
        assert not replica.scheduler.has_unfinished()
        assert replica.manager.pool.num_used == 0
    assert not any(each.load for each in simulated.replicas)
    return simulated


@pytest.fixture
def traced(tmp_path):
    """Return a workload of lines."""

    def write(*lines):
        file = tmp_path / "trace.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return Workload(trace=str(file))

    return write


@pytest.fixture
def one_second(tmp_path):
    """Return a file of coefficients by which every step takes a second."""
    file = tmp_path / "fit.json"
    file.write_text('{"step_s": 1}')
    return str(file)


def test_a_token_goes_through_shards_stages_and_links(traced):
    """Two stages of two shards, over links of 1 GB/s and 100 µs: the time of a decode, by hand."""
    workload = traced({"timestamp": 0, "input_tokens": 5, "output_tokens": 2})
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    found = serve(workload, {"link": "1,100"}, **ranks).statistics
    read = KV_BYTES / 4 * (6 + 1)  # the context, and the new token
    weights = 2 * 2 * LAYER_PARAMS / 2
    first, last = (1e-3 + (weights + more + read) / (3350e9 * 0.8) for more in (0, 2 * HEAD_PARAMS / 2))
    # A shard lacks half of: attention's heads, its output, the MLP's inner columns, its output.
    lacking = 2 * (8 * 64 + 256 + 512 + 256) // 2
    first += 9 * 100e-6 + (lacking + 256) * 2 / 1e9  # and the embedding of the other shard
    last += 9 * 100e-6 + (lacking + 4096 // 2) * 2 / 1e9  # and its logits
    message = 100e-6
    stream = 100e-6 + 2 * 256 * 2 / 1e9  # residual and hidden states
    assert found.latencies[""].tpot[0] == pytest.approx(message + first + stream + last, rel=1e-9)


@pytest.mark.parametrize("name", ["olmo2", "gemma4"])
def test_exchanges_are_those_of_the_real_shards(name):
    """Their number, and the numbers that a shard gets: of three requests of one token, all sampled."""
    engine = new_engine(checkpoint(name))
    shards = shards_of(2)
    with computed_in_shards(engine, shards):
        engine.generate([[5], [6], [7]], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    meeting = shards[0].group.meeting
    model = read_model(str(checkpoint(name)))
    part = ModelPart(range(model.num_layers), model.num_layers, Shard(0, 2))
    work = Work(3, 3, 3, 0, 0)
    assert Exchanges(model, part, RankLink(1e30, 1)).seconds(work) == pytest.approx(meeting.num_exchanges)
    assert Exchanges(model, part, RankLink(4, 0)).seconds(work) == pytest.approx(meeting.num_lacking)


@pytest.mark.parametrize("name", ["llama", "gemma4", "gpt2", "qwen3_moe"])
def test_portions_make_up_the_model(name):
    """Of two stages of shards: all weights are there once, but for tied heads and positions."""
    model = read_model(str(checkpoint(name)))
    count = 1 if name == "qwen3_moe" else 2
    cut = model.num_layers - 1
    parts = [range(cut), range(cut, model.num_layers)]
    shards = [Shard(index, count) for index in range(count)]
    portions = [
        Portion.of(model, ModelPart(part, model.num_layers, shard)) for part in parts for shard in shards
    ]
    assert sum(each.model.num_layer_params for each in portions) == model.num_layer_params
    assert sum(each.model.num_attention_dims for each in portions) == model.num_attention_dims
    tables = model.num_params - model.num_layer_params
    head = model.vocab_size * model.hidden_size
    positions = model.max_position_embeddings * model.hidden_size * model.learned_positions
    assert sum(each.num_head_params for each in portions) == head
    expected = tables + head * model.tie_word_embeddings + positions * (count - 1)
    assert sum(each.num_table_params for each in portions) == expected
    assert Portion.of(model).num_table_params == tables


def test_blocks_are_those_that_the_smallest_rank_holds():
    def blocks(**ranks):
        return Fleet(
            FleetConfig(gpu="L4"), EngineConfig("demo", gpu_memory_utilization=2e-3, **ranks)
        ).num_blocks

    assert blocks() < blocks(pipeline_parallel_size=2) < blocks(tensor_parallel_size=2)
    free = 24 * 2**30 * 2e-3 - (LAYER_PARAMS * 4 + HEAD_PARAMS) * 2 / 2
    assert blocks(tensor_parallel_size=2) == free // (16 * KV_BYTES / 2)


def test_stages_compute_steps_at_once(one_second):
    """Two requests: one is in each stage, once their prompts are computed together."""
    workload = Workload(requests=2, rate=float("inf"), input_len="fixed:9", output_len="fixed:50")
    fleet = {"coefficients": one_second, "link": "1e9,0"}
    found = serve(workload, fleet, pipeline_parallel_size=2)
    last = (2 * LAYER_PARAMS + HEAD_PARAMS) / (4 * LAYER_PARAMS + HEAD_PARAMS)
    # The last stage is the slower one, and is busy from its first decode on.
    assert found.statistics.duration == pytest.approx(1 + (1 - last) + 2 * 49 * last, rel=1e-6)
    assert found.statistics.summary()["busy_share"] == pytest.approx(1)
    # Over a link of 5 s all is waiting, for both at once: a message and a stream for each token.
    slow = serve(workload, {**fleet, "link": "1e9,5e6"}, pipeline_parallel_size=2)
    assert slow.statistics.duration == pytest.approx(50 * 11, rel=0.01)


@pytest.mark.parametrize("seed", range(6))
def test_replicas_die_and_every_request_ends(seed):
    """However often, in prompts, in decodes and in the queue, also while no replica lives."""
    workload = Workload(
        requests=150,
        rate=150.0,
        input_len="uniform:1-200",
        output_len="uniform:1-40",
        prefixes=4,
        prefix_len=40,
        turns=3,
        think_time=0.1,
        seed=seed,
    )
    fleet = {"replicas": 1 + seed % 3, "router": ("prefix-aware", "round-robin")[seed % 2]}
    ranks = {"pipeline_parallel_size": 1 + seed % 2}
    calm = serve(workload, fleet, num_blocks=60, **ranks).statistics
    found = serve(workload, {**fleet, "mtbf": 0.05, "restart_s": 0.08}, num_blocks=60, **ranks).statistics
    summary = found.summary()
    assert summary["deaths"] > 3
    assert summary["moved_requests"] > 3
    # Each once, with as many tokens as without deaths, though hits are fewer and all takes longer.
    for name in ("finished", "prompt_tokens", "output_tokens"):
        assert summary[name] == calm.summary()[name]
    assert summary["refused"] == 0
    assert found.duration > calm.duration
    assert 0 < summary["hit_rate"] <= 1


def test_a_dead_replica_gets_nothing_and_begins_anew(traced, one_second):
    lines = [{"timestamp": t, "input_tokens": 64, "output_tokens": 9, "prefix_id": 1} for t in range(9)]
    workload = traced(*lines)
    options = {"num_blocks": 500, "max_num_batched_tokens": 512}
    config = FleetConfig(replicas=2, router="prefix-aware", coefficients=one_second, mtbf=1e9, restart_s=3.0)
    fleet = Fleet(config, EngineConfig(model="demo", **options))
    heads = []  # who had the requests, and when: the first has all of them, and then dies
    die, admit = fleet._die, fleet._admit

    def admitted(arrival, now):
        if now == 4:
            die(0, now)
            assert all(0 not in holders for holders in fleet._router._holders.values())
        done = admit(arrival, now)
        heads.append([each.scheduler.num_waiting + len(each.scheduler.running) for each in fleet.replicas])
        return done

    fleet._admit = admitted
    _, arrivals = workload.open()
    statistics = fleet.run(arrivals)
    assert [first > 0 for first, _ in heads] == [True] * 4 + [False] * 5
    assert [second for _, second in heads][:5] == [0, 0, 0, 0, 5]
    assert (statistics.num_finished, statistics.num_moved, statistics.num_deaths) == (9, 4, 1)
    # Those that were moved had got their first token, and lack as many steps as before.
    assert max(statistics.latencies[""].ttft) <= 2
    assert max(statistics.latencies[""].e2e) == pytest.approx(10, abs=1)


def test_a_step_that_a_death_interrupts_is_lost(traced, one_second):
    """Its end is nothing to the replica that serves in its place at once."""
    lines = [{"timestamp": t, "input_tokens": 9, "output_tokens": 3} for t in (0, 0.5)]
    workload = traced(*lines)
    config = FleetConfig(coefficients=one_second, mtbf=1e9, restart_s=0.0)
    fleet = Fleet(config, EngineConfig(model="demo", num_blocks=500))
    admit = fleet._admit

    def admitted(arrival, now):
        if now == 0.5 and not fleet.statistics.num_deaths:
            fleet._die(0, now)
        return admit(arrival, now)

    fleet._admit = admitted
    _, arrivals = workload.open()
    assert [*fleet.run(arrivals).latencies[""].e2e] == [3.5, 3.0]


def test_slices_stand_for_large_fleets():
    """128 replicas, and 64 with half of their load: throughput and p99 differ by at most 5 %."""
    workload = Workload(requests=4000, rate=60_000.0, input_len="uniform:50-150", output_len="uniform:4-8")
    fleet = FleetConfig(replicas=128, router="least-loaded")
    whole = serve(workload, {"replicas": 128, "router": fleet.router}).statistics.summary()
    half = replace(workload.sliced(64 / 128), requests=2000)
    part = serve(half, {"replicas": 128, "slice": 64, "router": fleet.router}).statistics.summary()
    assert (part["replicas"], part["simulated_replicas"]) == (128, 64)
    assert part["requests_per_s"] == pytest.approx(whole["requests_per_s"], rel=0.05)
    assert part["busy_share"] == pytest.approx(whole["busy_share"], rel=0.05)
    for times in ("ttft_s", "e2e_s"):
        assert part[times]["p99"] == pytest.approx(whole[times]["p99"], rel=0.05)


def test_two_real_replicas_hit_as_often_as_simulated(traced, one_second):
    """Engines behind a prefix-aware router, whose steps take a second of a clock that is counted."""
    lines = [
        {"timestamp": number // 2, "input_tokens": 70, "output_tokens": 6, "prefix_id": number * 7 % 12}
        for number in range(80)
    ]
    workload = replace(traced(*lines), prefix_len=48)
    options = {"num_blocks": 48, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    fleet = {"coefficients": one_second, "replicas": 2, "router": "prefix-aware"}
    simulated = serve(workload, fleet, **options).statistics

    _, arrivals = workload.open()
    due = [(each.time, [token % 997 + 3 for token in each.token_ids]) for each in arrivals]
    engines = [LLMEngine("demo", device="cpu", skip_tokenizer_init=True, **options) for _ in range(2)]
    router = PrefixAware(16)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    ids = itertools.count()
    loads = [0, 0]
    now = num_hits = num_done = 0
    while num_done < len(lines):
        outputs = []
        for prompt in [prompt for time, prompt in due if time == now]:
            number = router.choose(prompt, loads)
            engines[number].add_request(str(next(ids)), prompt, params)
            loads[number] += len(prompt)
        for number, engine in enumerate(engines):
            outputs += [(number, output) for output in engine.step()]
        now += 1
        for number, output in outputs:  # known when the step has ended
            loads[number] += 1
            if output.finished:
                loads[number] -= 76
                num_hits += output.num_cached_tokens
                num_done += 1
    assert 0.2 < num_hits / (70 * len(lines)) < 0.65  # some are evicted
    assert simulated.num_cached_tokens == pytest.approx(num_hits, rel=0.15)
    assert simulated.duration == pytest.approx(now, rel=0.15)


@pytest.mark.parametrize(
    ("fleet", "engine", "message"),
    [
        (
            {"link": "wifi"},
            {"tensor_parallel_size": 2},
            "link must be one of nvlink, .*, or GB/s .*got 'wifi'",
        ),
        ({"link": "12,-1"}, {"tensor_parallel_size": 2}, "such as 12.5,200; got '12,-1'"),
        ({"link": "0,1"}, {"tensor_parallel_size": 2}, "got '0,1'"),
        ({"link": "nvlink", "gpu": "L4"}, {"tensor_parallel_size": 2}, "of pcie, .*; L4 has no nvlink"),
        ({"link": "pcie"}, {}, "link 'pcie' needs several ranks"),
        ({}, {"tensor_parallel_size": 3}, "3 does not divide the 8 query heads; these numbers do: 2, 4, 8"),
        ({}, {"pipeline_parallel_size": 5}, "pipeline_parallel_size 5 is more than the 4 layers"),
        ({"mtbf": 0}, {}, "mtbf must be above 0, got 0"),
        ({"restart_s": 9.0}, {}, "restart_s needs mtbf"),
        ({"mtbf": 9, "restart_s": -1}, {}, "restart_s must be at least 0, got -1"),
        ({"slice": 2}, {}, "slice must be from 1 to 1, got 2"),
        (
            {"replicas": 9_999_999},
            {},
            "9,999,999 x 500 blocks take 447.0 GiB to simulate, and .* free here; let a slice",
        ),
        ({"mtbf": 1e-9}, {}, "mtbf 1e-09: 1,000 replicas died, .*; give a longer one"),
    ],
    ids=str,
)
def test_bad_plans(fleet, engine, message):
    with pytest.raises(PagedError, match=message):
        serve(Workload(requests=2), fleet, **engine)


def test_slices_need_a_rate():
    with pytest.raises(PagedError, match="of which it takes its share; got rate inf"):
        Workload(rate=float("inf")).sliced(0.5)
