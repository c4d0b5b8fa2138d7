"""Decodes by CUDA graphs, on a device that works late and replays in memory that holds nothing.

The long form, for every model, format and parameter: `python -m tests.graphs`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paged import LLMEngine, SamplingParams
from paged.base.errors import ConfigError, ResourceError
from paged.device.cuda_graphs import MOST_DROPPED, GraphPool
from paged.kernels.gpu.target import in_interpreter
from paged.options.config import EngineConfig
from paged.runner import decode_graphs, graph_store
from paged.runner.fit import num_blocks_that_fit
from paged.runner.graph_memory import capture_sizes
from tests.graphs import watch_decodes
from tests.support.checkpoints import checkpoint
from tests.support.engine_uses import Case, Tokens, draws_of_a_gpu, generated, sampled
from tests.support.fake_cuda import lacks
from tests.support.late_cuda import LateCuda, late_cuda
from tests.support.lora_adapters import adapter, request
from tests.support.ranks import ranked_engines

needs_stand_in = pytest.mark.skipif(
    lacks() is not None or not in_interpreter(),
    reason=lacks() or "a GPU is here: kernels are not interpreted",
)
Ways = list[dict[str, Any]]
# Every way to draw a token that a graph holds or ends before.
WAYS: dict[str, Ways] = {
    "greedy": [{"temperature": 0.0}] * 3,
    "drawn": [{"seed": 1}, {"seed": 2, "temperature": 1.7}, {"temperature": 0.0}],
    "filtered": [
        {"seed": 1, "top_p": 0.8, "top_k": 9},
        {"seed": 2, "min_p": 0.1, "typical_p": 0.7},
        {"seed": 3, "top_n_sigma": 1.0},
    ],
    "penalized": [
        {"seed": 2, "top_p": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.0, "frequency_penalty": -2.0},  # what was drawn is drawn again
        {"seed": 3},
    ],
    "logits": [
        {"seed": 2, "top_p": 0.8, "repetition_penalty": 1.3, "logit_bias": {5: 1.0}},
        {"seed": 3, "logit_bias": {7: 3.0}, "min_tokens": 3, "stop_token_ids": [9], "logprobs": 2},
        {"temperature": 0.0, "dry_multiplier": 4.0, "dry_sequence_breakers": ()},
    ],
}


def params_of(ways: Ways, max_tokens: int, less: int = 2) -> list[SamplingParams]:
    """Return parameters of requests that end one after another, so that batches of every size occur.

    less: by how many tokens each of three is shorter than the one before.
    """
    lengths = (max_tokens - less * (i % 3) for i in range(len(ways)))
    return [
        SamplingParams(max_tokens=n, ignore_eos=True, **way) for n, way in zip(lengths, ways, strict=True)
    ]


def compared(
    case: Case,
    ways: Ways,
    max_tokens: int = 9,
    prompts: list[list[int]] | None = None,
    *,
    seed: int = 1,
    less: int = 2,
) -> tuple[LateCuda, LLMEngine]:
    """Assert that a late device gives the tokens of a plain CPU. Return it and its engine.

    less: see `params_of`.
    """
    prompts = prompts or [[*range(20 + i, 30 + 4 * i)] for i in range(len(ways))]
    params = params_of(ways, max_tokens, less)
    with draws_of_a_gpu():
        expected = generated(case.engine(), prompts, params)
    tokens, gpu, engine = on_late_device(case, prompts, params, seed)
    assert tokens == expected
    return gpu, engine


def on_late_device(
    case: Case, prompts: list[list[int]], params: list[SamplingParams], seed: int = 1
) -> tuple[Tokens, LateCuda, LLMEngine]:
    with late_cuda(seed) as gpu:
        engine = case.engine(device="cuda", attention_backend="triton")
        return generated(engine, prompts, params), gpu, engine


@needs_stand_in
def test_replays_give_the_tokens_of_a_plain_cpu(monkeypatch):
    """Batches of 3, 2 and 1 requests are padded to 3, and a context becomes longer than a split of 64 keys.

    Of graphs that are captured late, the least recently used go.
    """
    monkeypatch.setattr(graph_store, "MOST_LATE", 2)
    prompts = [[*range(20, 82)], [21, 22], [23]]
    case = Case("llama", {"cudagraph_capture_sizes": [3], "max_model_len": 80}, sampled)
    with draws_of_a_gpu():
        plain = case.engine()
        expected = {way: generated(plain, prompts, params_of(ways, 5, 1)) for way, ways in WAYS.items()}
    with late_cuda(seed=1) as gpu:
        engine = case.engine(device="cuda", attention_backend="triton")
        graphs = engine.runner.decode_graphs
        for way, ways in WAYS.items():
            before = gpu.num_replays
            assert generated(engine, prompts, params_of(ways, 5, 1)) == expected[way]
            assert gpu.num_replays - before == 4, "a decode ran without its graph"
            engine.runner.sampler.history.check()
            keys = [key for key in (*graphs._graphs, *graphs._late) if key.way == way]
            assert {key.is_short for key in keys} == {True, False}
        assert [key.way for key in graphs._late] == ["logits"] * 2


@needs_stand_in
@pytest.mark.parametrize("model", ["gpt_oss", "llama-dynamic"])
def test_what_models_do_in_a_step_is_captured(model):
    """Experts leave padded rows out, windows and sinks; angles of rope by lengths that change."""
    gpu, _ = compared(Case(model, {"num_blocks": 90}, sampled), [{"seed": 1}, {"temperature": 0.0}], 4)
    assert gpu.num_replays == 3


@needs_stand_in
def test_requests_that_come_and_go_get_their_own_parameters():
    """A seat changes hands while its neighbour goes on."""
    ways = [{"seed": i, "temperature": 0.4 + i / 3} for i in range(3)]
    case = Case("llama", {"max_num_seqs": 2, "cudagraph_capture_sizes": [2]}, sampled)
    gpu, _ = compared(case, ways, 6, [[20 + i, 21, 22] for i in range(3)], seed=4)
    assert gpu.num_replays > 3


@needs_stand_in
def test_slots_of_adapters_are_read_by_graphs(tmp_path):
    """Of three adapters in two slots, beside a request of none: batches of 3, 2 and 1, padded to 3."""
    paths = [adapter(tmp_path, "llama", seed) for seed in range(3)]
    requests = [request(paths[0], 1), None, request(paths[1], 2), request(paths[2], 3), None]
    prompts = [[*range(20 + i, 30 + 4 * i)] for i in range(5)]
    params = params_of([{"seed": 1}, {"temperature": 0.0}, {"seed": 3}, {"temperature": 0.0}, {"seed": 4}], 6)
    sizes = {"max_num_seqs": 3, "cudagraph_capture_sizes": [3], "max_model_len": 64}
    case = Case("llama", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, **sizes}, sampled)

    def tokens(engine: LLMEngine) -> Tokens:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(given, params, lora_request=requests, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with draws_of_a_gpu():
        expected = tokens(case.engine())
    with late_cuda(seed=1) as gpu:
        engine = case.engine(device="cuda", attention_backend="triton")
        assert tokens(engine) == expected
        assert tokens(engine) == expected  # slots hold other adapters now
        graphs = engine.runner.decode_graphs
        assert {key.has_adapters for key in graphs._graphs} == {True, False}
        assert not graphs._late
    assert gpu.num_replays > 10


@needs_stand_in
def test_runs_of_drafts_are_graphs_of_as_many_tokens_as_the_longest_run():
    """Of two prompts that repeat themselves, one beyond a split of 64 keys: their runs differ in length."""
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False}
    options = {"speculative_config": speculation, "max_model_len": 96, "cudagraph_capture_sizes": [3]}
    prompts = [[20, 21, 22] * 25, [7, 8] * 3]
    gpu, engine = compared(Case("llama", options, sampled), [{"temperature": 0.0}] * 2, 8, prompts)
    stats = engine.stats()
    assert stats.num_drafts > 0
    assert gpu.num_replays == stats.num_steps - 1  # all but that of the prompts
    assert {key.num_tokens for key in engine.runner.decode_graphs._late} <= {6, 9}
    assert engine.runner.decode_graphs._late


@needs_stand_in
def test_runs_of_drafts_are_graphs_where_layers_keep_states():
    """Runs of one and of two requests, of which some drafts are wrong, and the steps that apply them."""
    config = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "adaptive": False}
    options = {"cudagraph_capture_sizes": [3], "speculative_config": config}
    few = {"allowed_token_ids": [7, 8, 9, 10]}  # whose drafts are sometimes right
    ways: Ways = [{"temperature": 0.0, **few}, {"seed": 5, **few}]
    gpu, engine = compared(Case("lfm2", options, sampled), ways, 8, [[7, 8, 7, 8], [40, 7, 7, 7]], less=0)
    stats = engine.stats()
    assert gpu.num_replays == stats.num_steps - 1  # all but that of the prompts
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@needs_stand_in
def test_passes_of_a_draft_model_are_graphs_of_their_own():
    """One draws like its request. The guesses of the other are drawn from logits that are edited."""
    drafts = {"model": str(checkpoint("llama")), "num_speculative_tokens": 3, "adaptive": False}
    options = {"speculative_config": drafts, "max_model_len": 64, "cudagraph_capture_sizes": [2]}
    ways: Ways = [{"seed": 5, "temperature": 0.1}, {"seed": 2, "logit_bias": {7: 2.0}}]
    # The first is alone for three guesses, of which two are of the same graph.
    gpu, engine = compared(Case("llama", options, sampled), ways, 9, [[20, 21, 22] * 3, [7, 8]], less=4)
    of_draft = engine.runner.draft_model.decode_graphs
    # A pass over the last guess and the token behind it, and passes of a token each; with and without edits.
    assert {(key.num_tokens // key.num_rows, key.way) for key in of_draft._late} >= {
        (1, "logits"),
        (2, "drawn"),
    }
    assert engine.stats().num_accepted_tokens == engine.stats().num_draft_tokens > 6
    assert engine.stats().num_graphs == engine.runner.decode_graphs.num_graphs + of_draft.num_graphs
    assert len(gpu.streams) == 2  # cuBLAS keeps a workspace for each


@needs_stand_in
def test_stages_give_the_tokens_of_a_plain_cpu(tmp_path):
    """The first, a middle and the last stage, with a step of another request in flight in each.

    One request has an adapter, of which each stage has the matrices of its layers.
    """
    ways: Ways = [{"seed": 1}, {"temperature": 0.0, "repetition_penalty": 1.3}, {"seed": 3, "logprobs": 1}]
    prompts, params = [[20, 21], [22], [7, 8, 9]], params_of(ways, 4, 0)
    options = {"max_num_seqs": 3, "cudagraph_capture_sizes": [2], "enable_lora": True, "max_lora_rank": 8}
    case = Case("qwen3, 3 layers", options, sampled)
    requests = [None, request(adapter(tmp_path, "qwen3, 3 layers", 0), 1), None]

    def tokens(engine: LLMEngine) -> Tokens:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(given, params, lora_request=requests, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with draws_of_a_gpu():
        expected = tokens(case.engine())
    with late_cuda(seed=2) as gpu, ranked_engines(3, inside=gpu.here):
        engine = case.engine(device="cuda", attention_backend="triton")
        decodes = watch_decodes(engine)
        assert tokens(engine) == expected
    assert gpu.num_replays == 3 * len(decodes) > 9


@needs_stand_in
def test_shards_run_without_graphs_and_say_so_once(caplog):
    with caplog.at_level(logging.WARNING), late_cuda(0) as gpu, ranked_engines(1, 2, inside=gpu.here):
        engine = Case("llama", {}, sampled).engine(device="cuda", attention_backend="triton")
        assert (engine.runner.decode_graphs, engine.stats().num_graphs) == (None, 0)
    (message,) = (record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage())
    assert "shards of a model exchange tensors by calls of the host" in message


# What the stand-in shows


def a_graph(work: Callable[[], Any]) -> Any:
    """Capture work, and return the graph."""
    return GraphPool(torch.device("cuda", 0)).capture(work)


@needs_stand_in
def test_stand_in_computes_at_replays_alone():
    with late_cuda(0):
        numbers = torch.ones(3, device="cuda")
        graph, made = a_graph(lambda: numbers.add_(1) + 1)
        assert numbers.tolist() == [2.0] * 3  # by the run before the capture
        for _ in range(2):
            graph.replay()
        assert numbers.tolist() == [4.0] * 3
        assert made.tolist() == [5.0] * 3


@needs_stand_in
@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda numbers, _: numbers.tolist(), "waits|transfer"),
        (lambda numbers, _: numbers.nonzero(), "waits"),
        (lambda numbers, _: numbers + torch.ones(3).pin_memory().to("cuda", non_blocking=True), "transfer"),
        (lambda numbers, uploaded: numbers + uploaded, "upload"),
    ],
    ids=["download", "a size", "upload", "an upload of the step"],
)
def test_stand_in_refuses_what_no_graph_can_hold(work, message):
    with late_cuda(0):
        numbers = torch.ones(3, device="cuda")
        uploaded = torch.ones(3).pin_memory().to("cuda", non_blocking=True)
        with pytest.raises(RuntimeError, match=message):
            a_graph(lambda: work(numbers, uploaded))


@needs_stand_in
def test_captures_that_the_device_drops_spoil_no_other_and_are_not_tried_for_ever():
    with late_cuda(0) as gpu:
        numbers = torch.ones(3, device="cuda")
        pool = GraphPool(torch.device("cuda"))
        for _ in range(MOST_DROPPED):
            graph, made = pool.capture(lambda: numbers + 1)
            with pytest.raises(RuntimeError, match=r"waits|transfer"):
                pool.capture(numbers.tolist)
            assert not gpu.recording
        with pytest.raises(RuntimeError, match=f"{MOST_DROPPED} captures failed on cuda"):
            pool.capture(lambda: numbers + 1)
        graph.replay()
        assert made.tolist() == [2.0] * 3
        assert len(gpu.streams) == 2  # the default one, and the one that captures


@needs_stand_in
def test_stand_in_shows_memory_that_was_dropped_or_of_another_replay():
    with late_cuda(0):
        kept = [torch.ones(3, device="cuda")]
        graph, _ = a_graph(lambda: kept[0] * 2)
        kept.clear()
        with pytest.raises(RuntimeError, match="freed"):
            graph.replay()
        made = []

        def once() -> Any:
            if len(made) < 2:  # the run before the capture, and the capture
                made.append(torch.ones(3, device="cuda"))
            return made[-1] * 1

        graph, out = a_graph(once)
        other, _ = a_graph(lambda: made[-1] + 0)
        graph.replay()
        assert out.tolist() == [1.0] * 3
        other.replay()
        assert out.isnan().all() or out.tolist() == [1.0] * 3


# Sizes, failures and bad input


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_num_seqs": 20}, [1, 2, 4, 8, 16, 20]),
        ({"max_num_seqs": 256, "max_cudagraph_capture_size": 16}, [1, 2, 4, 8, 16]),
        ({"max_num_seqs": 3}, [1, 2, 3]),
        ({"max_num_seqs": 6, "cudagraph_capture_sizes": [8, 2, 2, 5]}, [2, 5]),
        ({"max_num_seqs": 1}, [1]),
    ],
    ids=str,
)
def test_sizes(options, expected):
    assert capture_sizes(EngineConfig("demo", **options)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cudagraph_capture_sizes": "1,2"}, "list of ints.*'1,2'"),
        ({"cudagraph_capture_sizes": []}, "enforce_eager=True"),
        ({"cudagraph_capture_sizes": [1, 0]}, "cudagraph_capture_sizes.*0"),
        ({"cudagraph_capture_sizes": [1, 2.0]}, "cudagraph_capture_sizes.*2.0"),
        ({"cudagraph_capture_sizes": [True]}, "cudagraph_capture_sizes.*True"),
        ({"max_cudagraph_capture_size": 0}, "max_cudagraph_capture_size.*0"),
        ({"max_cudagraph_capture_size": "8"}, "max_cudagraph_capture_size.*'8'"),
        ({"cudagraph_capture_sizes": [1, 8], "max_cudagraph_capture_size": 4}, "must be the largest.* 8"),
        ({"enforce_eager": 1}, "enforce_eager.*1"),
    ],
    ids=str,
)
def test_wrong_sizes_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig("demo", **options)


@needs_stand_in
def test_a_capture_that_fails_is_said_once_and_ends_no_request(monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(decode_graphs, "draw", fail)
    with caplog.at_level(logging.WARNING, graph_store.logger.name):
        gpu, engine = compared(Case("llama", {}, sampled), WAYS["drawn"][:2], 3, [[5, 6], [7, 8]])
    assert gpu.num_replays == 0
    assert engine.runner.decode_graphs.num_graphs == 1  # the greedy one
    (message,) = (record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage())
    assert "decodes of 4 rows (drawn)" in message
    assert "runner/decode_graphs.py" in message
    assert "operation not permitted" in message


@needs_stand_in
def test_there_are_no_graphs_where_they_are_turned_off_or_too_small(monkeypatch, caplog):
    options = {"cudagraph_capture_sizes": [1]}
    gpu, engine = compared(Case("llama", options, sampled), WAYS["greedy"][:2], 4, [[5, 6], [7, 8]])
    assert gpu.num_replays == engine.stats().num_graphs == 2
    assert "2 CUDA graphs in" in engine.runner.describe()
    with late_cuda(0):
        eager = Case("llama", {"enforce_eager": True}, sampled).engine(
            device="cuda", attention_backend="triton"
        )
    assert (eager.runner.decode_graphs, eager.stats().num_graphs) == (None, 0)
    assert "CUDA graphs" not in eager.runner.describe()
    assert "CUDA graphs" not in caplog.text
    # A captured allocation would be the driver's own.
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "0")
    with caplog.at_level(logging.WARNING), late_cuda(0):
        without = Case("llama", {}, sampled).engine(device="cuda", attention_backend="triton")
    assert without.runner.decode_graphs is None
    assert "there are no CUDA graphs, because PYTORCH_NO_CUDA_MEMORY_CACHING is set" in caplog.text


@needs_stand_in
def test_graphs_that_leave_no_memory_are_refused():
    case = Case("llama", {}, sampled)
    with late_cuda(0) as gpu:
        engine = case.engine(device="cuda", attention_backend="triton")
        runner, taken = engine.runner, 10 * gpu.free_bytes
        with pytest.raises(ResourceError, match=r"10,240 MiB are kept: lower max_cudagraph_"):
            num_blocks_that_fit(runner.sizes, runner.device, runner.model.kernels, lambda *_: taken)
