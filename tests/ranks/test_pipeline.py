"""A model in stages and shards: the logits are those of one process bit by bit, whatever the steps are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from paged import EngineDeadError, LLMEngine, SamplingParams
from paged.base.errors import ConfigError, PagedError
from paged.engine import prefixes
from paged.model.division import check_shards
from paged.ranks.driver import DriverRunner
from paged.ranks.layout import RankLayout
from paged.runner.model_runner import ModelRunner
from tests.runner.test_plan import KINDS, SUFFIXES
from tests.support.checkpoints import CONFIGS, assert_all_free, checkpoint
from tests.support.engine_uses import Case, generated, greedy, sampled
from tests.support.ranks import ranked_engines

CONFIGS["llama, 4 layers"] = lambda: _with_layers("llama", 4)
CONFIGS["qwen3, 4 layers"] = lambda: _with_layers("qwen3", 4)
LONG = [*range(40, 75)]
PROMPTS = [[*range(10, 29)], [5, 6], LONG, [7, 8, 9, 10]]

# Models with what a cut could lose, the number of stages, and options.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama, 4 layers": (3, {}),
    "qwen3, 4 layers": (3, {"kv_cache_dtype": "int8"}),  # a tied head
    "gemma4": (2, {}),  # inputs of layers, shared K and V, and groups that a stage has nothing of
    "gemma4-keys-as-values": (3, {"kv_cache_dtype": "fp8"}),  # K and V of two shapes
    "phi3": (2, {}),
    "gpt_neox": (2, {}),  # Pythia: parallel layers
    "gpt2": (2, {}),  # learned positions
    "qwen2-mixed": (2, {}),  # two layer groups, one in each stage
    "olmo2": (2, {}),  # nothing is left to add to the residual
    "granite-swa": (3, {}),
    "llama-dynamic": (2, {}),  # whose steps are not recorded
    "phi3-longrope": (2, {}),
    "qwen3_5": (2, {}),  # states, in a stage without attention, too
    "lfm2": (3, {}),
    "nemotron_h": (3, {}),  # layers of one part, the last with a state
    "nemotron_h_moe": (5, {}),  # experts alone in a stage, and behind the last layer with a state
    "falcon_h1": (2, {}),  # heads with K and V and with states in each layer
    "qwen3_moe": (2, {}),  # experts, of which each stage has its own
    "demo": (2, {"dtype": "bfloat16"}),
    "demo in int8": (3, {"dtype": "bfloat16", "quantization": "int8"}),
    "demo in int4": (2, {"dtype": "float32", "quantization": "int4"}),
}


def _with_layers(name: str, num_layers: int) -> Any:
    config = CONFIGS[name]()
    config.num_hidden_layers = num_layers
    return type(config)(**{**config.to_dict(), "num_hidden_layers": num_layers, "layer_types": None})


def new_engine(model: str, **options: Any) -> LLMEngine:
    name = "demo" if model.startswith("demo") else str(checkpoint(model))
    sizes = {"num_blocks": 64, "max_model_len": 120, "max_num_batched_tokens": 24, "device": "cpu"}
    return LLMEngine(name, **{"dtype": "float32", "skip_tokenizer_init": True, **sizes, **options})


@contextlib.contextmanager
def recorded_logits() -> Iterator[list[torch.Tensor]]:
    """Yield the logits of all steps of engines, and the hidden states that are asked for."""
    found: list[torch.Tensor] = []

    def recording(compute: Any) -> Any:
        def recorded(runner: Any, batch: Any) -> Any:
            logits, best, hidden = compute(runner, batch)
            found.extend(each.clone() for each in (logits, hidden) if each is not None)
            return logits, best, hidden

        return recorded

    with contextlib.ExitStack() as stack:
        for runner in (ModelRunner, DriverRunner):
            stack.enter_context(mock.patch.object(runner, "compute", recording(runner.compute)))
        yield found


def used(engine: LLMEngine) -> Any:
    """Decode prompts that are computed in chunks beside others, and report on one."""
    params = [greedy(7), greedy(9, prompt_logprobs=1), greedy(3, logprobs=1), greedy(5)]
    outputs = engine.generate(PROMPTS, params, use_tqdm=False)
    assert_all_free(engine)
    return [(o.outputs[0].token_ids, o.prompt_logprobs, o.outputs[0].logprobs) for o in outputs]


# Stages of two shards each.
SHARDED: dict[str, tuple[int, dict[str, Any]]] = {
    "llama, 4 layers": (2, {}),
    "gemma4": (2, {"kv_cache_dtype": "int8"}),
    "olmo2": (1, {}),
    "qwen3_5": (2, {}),
    "lfm2": (1, {}),
    "nemotron_h": (2, {}),
    "demo": (2, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_one_process(model):
    _compare(model, *MODELS[model])


@pytest.mark.parametrize("model", SHARDED)
def test_stages_of_shards_compute_the_same(model):
    _compare(model, *SHARDED[model], num_shards=2)


# The other families of experts, whose layers are like those above otherwise.
FAMILIES_OF_EXPERTS = (
    "gemma4-experts",  # beside the MLP, in layers of two groups
    "glm4_moe",  # behind a dense layer
    "gpt_oss",
    "granitemoe",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_next",
    "lfm2_moe",
    "nemotron_h_moe",
    "granitemoehybrid",
)


@pytest.mark.parametrize("model", FAMILIES_OF_EXPERTS)
def test_stages_have_experts_of_each_family(model):
    """The tokens are those of one process, and shards are refused by name."""
    plain = new_engine(model)
    expected = generated(plain, PROMPTS, [greedy(5)] * len(PROMPTS))
    with ranked_engines(2):
        ranked = new_engine(model)
        assert generated(ranked, PROMPTS, [greedy(5)] * len(PROMPTS)) == expected
        own = {layer.index for layer in ranked.runner.model.layers}
        assert 0 < len(own) < plain.runner.model_config.num_layers
    with pytest.raises(ConfigError, match=f"{plain.runner.model_config.architecture} has experts"):
        check_shards(plain.runner.model_config, 2)


def _compare(model: str, num_stages: int, options: dict[str, Any], num_shards: int = 1) -> None:
    """Compare logits, and tokens with steps in flight, with those of one process."""
    with recorded_logits() as expected:
        wanted = used(engine := new_engine(model, **options))
    with ranked_engines(num_stages, num_shards) as worlds, recorded_logits() as found:
        ranked = new_engine(model, **options)
        # One step at a time first, so that the batches are the same.
        ranked.runner.num_in_flight = ranked.scheduler.num_in_flight = 1
        assert used(ranked) == wanted
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
        ranked.reset_prefix_cache()
        ranked.runner.num_in_flight = ranked.scheduler.num_in_flight = num_stages
        assert used(ranked) == wanted
    assert worlds[0].num_ranks == num_stages * num_shards
    if len(engine.runner.model_config.layer_groups) == 1:  # else a block is as large as its largest group
        assert ranked.runner.kv_cache.num_bytes < engine.runner.kv_cache.num_bytes


def in_pairs(engine: LLMEngine) -> Any:
    """Run more requests than there are blocks, several at a time, to their ends."""
    prompts = [[i, i + 1] * 6 for i in range(6)]
    tokens = generated(engine, prompts, [greedy(3 + 3 * i) for i in range(6)])
    stats = engine.stats()
    assert stats.num_recompute_preemptions, "no request was preempted"
    return tokens


USES = {
    **KINDS,
    "preemption": Case("qwen3", {"block_size": 8, "num_blocks": 9, "max_model_len": 40}, in_pairs),
    "drafts of grammars": Case("demo", {"speculative_config": SUFFIXES}, KINDS["a grammar"].use),
}


@pytest.mark.parametrize("name", USES)
def test_uses_give_what_they_give_in_one_process(name):
    case = USES[name]
    expected = case.use(case.engine(attention_backend="auto"))
    for num_stages, num_shards in ((2, 1), (1, 2)):
        with ranked_engines(num_stages, num_shards) as worlds:
            engine = case.engine(attention_backend="auto")
            assert case.use(engine) == expected
            engine.scheduler.check()
        assert worlds[0].sent


def test_steps_are_in_flight_together():
    """While a step is at the first stage, the one before is at the last."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    with ranked_engines(2) as worlds:
        engine = new_engine("llama, 4 layers")
        for i in range(8):
            engine.add_request(str(i), [i, 3, 4], params)
        most, launched = 0, []
        launch = engine.runner.launch

        def watched(plan: Any) -> Any:
            nonlocal most
            launched.append(len(plan.computed.seats))
            most = max(most, 1 + len(engine.core._in_flight))
            return launch(plan)

        engine.runner.launch = watched
        while engine.has_unfinished_requests():
            engine.step()
        assert most == 2
        assert launched[1:-2].count(4) > 18
        assert engine.runner.exchange_s > 0
        messages = [len(data) for data in worlds[0].sent if data[0] == 2]
        assert len(messages) > 15  # most decodes are told as what has changed
        # The batches of both are advanced in place.
        assert len(engine.runner.batches._kept) == 2


def test_a_saved_prefix_loads_at_any_size(tmp_path):
    """K and V are gathered by layer; the file is that of one process."""
    options = {"kv_cache_dtype": "int8", "block_size": 8}
    model = "gemma4-keys-as-values"
    plain = new_engine(model, **options)
    tokens = generated(plain, [LONG], greedy(4))
    plain.save_prefix(tmp_path / "one")
    with ranked_engines(3):
        ranked = new_engine(model, **options)
        ranked.load_prefix(tmp_path / "one")
        (output,) = ranked.generate([LONG], greedy(4), use_tqdm=False)
        assert output.num_cached_tokens > 16
        assert [output.outputs[0].token_ids] == tokens
        ranked.save_prefix(tmp_path / "three")
    one, three = (prefixes._read(tmp_path / name)[0] for name in ("one", "three"))
    assert one.keys() == three.keys()
    plain.reset_prefix_cache()
    plain.load_prefix(tmp_path / "three")
    (output,) = plain.generate([LONG], greedy(4), use_tqdm=False)
    assert output.num_cached_tokens > 16
    assert [output.outputs[0].token_ids] == tokens


@pytest.mark.parametrize(
    ("model", "num_stages", "num_shards"), [("qwen3_5", 2, 2), ("lfm2", 3, 1), ("lfm2", 1, 2)], ids=str
)
def test_snapshots_of_states_are_those_of_one_process(model, num_stages, num_shards, tmp_path):
    """Ranks keep them alike, and files have the states of the whole model."""
    options = {"block_size": 8, "max_num_seqs": 4, "state_snapshots": 16}
    later = [[*LONG[:30], 5, i] for i in range(3)]
    plain = new_engine(model, enable_prefix_caching=False)
    expected = generated(plain, [LONG, *later], greedy(9))
    saving = new_engine(model, **options)
    generated(saving, [LONG], greedy(9))
    saving.save_prefix(tmp_path / "one")
    with ranked_engines(num_stages, num_shards):
        ranked = new_engine(model, **options)
        assert ranked.load_prefix(tmp_path / "one") == 5
        outputs = [ranked.generate([prompt], greedy(9), use_tqdm=False)[0] for prompt in (LONG, *later)]
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [32, 0, 24, 24]
        for i, prompt in enumerate(later):  # their last steps may be in flight
            ranked.add_request(str(i), prompt, greedy(9))
        while len(ranked.unfinished()) == len(later):
            ranked.step()
        ranked.save_prefix(tmp_path / "ranked")
        while ranked.has_unfinished_requests():
            ranked.step()
        assert_all_free(ranked)
    one, several = (prefixes._read(tmp_path / name)[0] for name in ("one", "ranked"))
    assert one.keys() == several.keys()
    other = new_engine(model, **options)
    other.load_prefix(tmp_path / "ranked")
    outputs = other.generate([LONG, *later], greedy(9), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [32, 24, 24, 24]


def test_a_prefix_is_saved_while_steps_are_in_flight(tmp_path):
    """Blocks are known before they are written: a step is computed first, and its results are kept."""
    model, options = "llama, 4 layers", {"block_size": 8}
    plain = new_engine(model, **options)
    prompts = [[i, *range(40, 62)] for i in range(4)]
    expected = generated(plain, prompts, greedy(9))
    with ranked_engines(2):
        engine = new_engine(model, **options)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, greedy(9))
        tokens, saved = {}, []
        while engine.has_unfinished_requests():
            tokens |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
            if engine.core._in_flight:
                saved.append(tmp_path / str(len(saved)))
                engine.save_prefix(saved[-1])
        assert [tokens[str(i)] for i in range(4)] == expected
        assert len(saved) > 8
    plain.reset_prefix_cache()
    plain.load_prefix(saved[0])
    outputs = plain.generate(prompts, greedy(9), use_tqdm=False)
    assert max(output.num_cached_tokens for output in outputs) >= 16
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_a_step_that_fails_is_computed_again(monkeypatch):
    """The steps in flight are given up, and all requests are computed anew to the same tokens."""
    with ranked_engines(2):
        engine = new_engine("llama, 4 layers")
        expected = generated(engine, PROMPTS, greedy(6))
        engine.reset_prefix_cache()
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, greedy(6))
        tokens, calls = {}, 0
        run = engine.runner._run

        def failing(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (2, 7, 8):
                raise ValueError("planted")
            return run(*args)

        monkeypatch.setattr(engine.runner, "_run", failing)
        while engine.has_unfinished_requests():
            with contextlib.suppress(ValueError):
                tokens |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
        assert calls > 8
        assert [tokens[str(i)] for i in range(len(PROMPTS))] == expected
        assert_all_free(engine)


def test_a_step_of_shards_that_fails_ends_the_engine(monkeypatch):
    """The other shards wait within it."""

    def fail(*_: Any) -> None:
        raise ValueError("planted")

    def run() -> None:
        engine = new_engine("llama, 4 layers")
        engine.add_request("a", PROMPTS[0], greedy(6))
        engine.step()
        monkeypatch.setattr(engine.runner, "compute", fail)
        engine.step()

    with pytest.raises(EngineDeadError, match=r"planted\. engine\.unfinished"), ranked_engines(1, 2):
        run()


def lost(_: Any) -> list[Any]:
    return []


def doubled(data: Any) -> list[Any]:
    return [data, data]


@pytest.mark.parametrize("fault", [lost, doubled], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("kind", [bytes, torch.Tensor], ids=["message", "tensor"])
def test_what_is_lost_or_doubled_ends_the_step(fault, kind):
    """No rank computes with what was not meant for the step."""
    count = 0

    def at_fifth(_sender: int, _receiver: int, sent: Any) -> list[Any]:
        nonlocal count
        count += isinstance(sent, kind)
        return fault(sent) if count == 5 and isinstance(sent, kind) else [sent]

    with pytest.raises((PagedError, AssertionError)) as raised, ranked_engines(2, fault=at_fifth):
        used(new_engine("llama, 4 layers"))
    errors = [raised.value]
    while (cause := errors[-1].__cause__ or errors[-1].__context__) is not None:
        errors.append(cause)
    told = ("was due", "were due", "another tensor came")
    assert any(text in str(error) for error in errors for text in told)


def test_stages_of_given_sizes():
    expected = sampled(new_engine("llama, 4 layers"))
    layout = RankLayout(2, 1, (range(3), range(3, 4)))
    with mock.patch.object(RankLayout, "of", return_value=layout), ranked_engines(2):
        engine = new_engine("llama, 4 layers")
        assert [layer.mixer.layer for layer in engine.runner.model.layers] == [3]
        assert sampled(engine) == expected
