"""The prefix cache of models with states: hits from each kind of snapshot, files, pins, and sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged import CheckpointError, ConfigError, RequestError, SamplingParams, UsageError
from paged.engine import prefixes
from paged.runner.states import LEAST_SNAPSHOTS, with_snapshots
from tests.snapshots import GREEDY, alone, bits, run_case
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine, ragged_prompts

BLOCK = 16
SHARED, OWN, OTHER = ragged_prompts([60, 45, 38], seed=3)


def answers(engine, *prompts):
    """Return the bits of answers, one after the other, and how many tokens of each prompt were cached."""
    results = [engine.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert_all_free(engine)
    return [bits(result.outputs[0]) for result in results], [result.num_cached_tokens for result in results]


def test_drawn_cases_give_the_bits_of_prompts_alone():
    """The first of `python -m tests.snapshots`; what they reach is counted."""
    total = Counter()
    for seed in range(14):
        total += run_case(seed, 4)
    assert min(total[what] for what in ("hits", "forks", "moved with hits", "cut")) > 2, total
    assert total["swapped"] + total["recomputed"], total
    assert min(total["accepted"], total["wrong"]) > 100, total


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_each_kind_of_snapshot_is_hit_with_the_same_bits(name):
    """At the end of a prompt and of its answer, where prompts part, and at the interval."""
    engine = new_engine(checkpoint(name), max_num_batched_tokens=64, state_interval=30)
    first = SHARED + OWN
    turn = first + alone(name, tuple(first))[0] + OTHER[:9]
    prompts = [first, first, turn, SHARED[:55] + OTHER, SHARED[:55] + OWN[::-1], SHARED[:40]]
    found, cached = answers(engine, *prompts)
    assert found == [alone(name, tuple(prompt)) for prompt in prompts]
    # 105 tokens; with its answer but for the last token 124; at 32 by the interval; where the fourth parted.
    assert cached == [0, 96, 112, 32, 48, 32]
    stats = engine.stats()
    assert (stats.num_cached_tokens, stats.num_cut_tokens) == (sum(cached), 16)
    assert stats.num_snapshots == len(engine.block_manager.snapshots) > 5
    assert stats.max_snapshots == engine.runner.sizes.num_snapshots


def test_an_answer_that_only_its_length_ends_leaves_its_last_state():
    """It is the one that the next turn of a conversation begins with."""
    first = SHARED[:57]
    asked = SamplingParams(temperature=0.0, max_tokens=38, ignore_eos=True)
    engine = new_engine(checkpoint("qwen3_5"))
    (answer,) = engine.generate([first], asked, use_tqdm=False)
    turn = first + answer.outputs[0].token_ids + OTHER[:9]
    assert answers(engine, turn) == ([alone("qwen3_5", tuple(turn))], [80])


def test_prompts_of_other_salts_have_snapshots_of_their_own():
    engine = new_engine(checkpoint("qwen3_5"))
    salted = [{"prompt_token_ids": SHARED, "cache_salt": salt} for salt in ("a", "b", "a")]
    found, cached = answers(engine, *salted, SHARED)
    assert cached == [0, 0, 48, 0]
    assert found == [alone("qwen3_5", tuple(SHARED))] * 4


def test_a_step_that_fails_leaves_no_snapshot(monkeypatch):
    engine = new_engine(checkpoint("qwen3_5"))
    answers(engine, SHARED)
    engine.add_request("a", SHARED + OWN, GREEDY)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert not engine.stats().num_snapshots
    for tensor in engine.runner.kv_cache.states.tensors.values():
        tensor.fill_(float("nan"))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert bits(outputs[0].outputs[0]) == alone("qwen3_5", tuple(SHARED + OWN))
    engine.scheduler.check()


@pytest.mark.parametrize("use", ["save_prefix", "load_prefix"])
def test_moves_that_fail_before_a_file_leave_no_snapshot(use, tmp_path, monkeypatch):
    engine = new_engine(checkpoint("qwen3_5"))
    answers(engine, SHARED)
    engine.save_prefix(tmp_path / "saved")
    engine.add_request("a", SHARED + OWN, GREEDY)
    engine.step()  # the next one begins with the move of its state
    engine.abort_request("a")
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            getattr(engine, use)(tmp_path / "saved")
    assert answers(engine, SHARED + OWN)[0] == [alone("qwen3_5", tuple(SHARED + OWN))]
    engine.scheduler.check()


def test_pinned_prefixes_keep_their_states():
    engine = new_engine(checkpoint("qwen3_5"), state_snapshots=2)
    for num_tokens in (48, 60):  # at the end of a block, and behind one
        prompt = SHARED[:num_tokens]
        assert engine.pin_prefix(prompt) == 48
        for seed in range(3):
            answers(engine, *ragged_prompts([40], seed=seed))
        found, cached = answers(engine, SHARED[:48] + OWN)
        assert (found, cached) == ([alone("qwen3_5", tuple(SHARED[:48] + OWN))], [48])
        engine.unpin_prefix(prompt)
    for prompt in (SHARED[:20], OWN[:20]):
        engine.pin_prefix(prompt)
    with pytest.raises(RequestError, match="only 0 stay cached; raise num_blocks or state_snapshots"):
        engine.pin_prefix(OTHER)
    engine.reset_prefix_cache()
    assert not engine.stats().num_snapshots
    engine.scheduler.check()


def test_saved_prefixes_have_states(tmp_path):
    engine = new_engine(checkpoint("qwen3_5"))
    first = SHARED + OWN
    answers(engine, first, OTHER)
    path = tmp_path / "all"
    num_blocks = engine.save_prefix(path)
    small = new_engine(checkpoint("qwen3_5"), state_snapshots=2)
    assert small.load_prefix(path) == num_blocks
    assert small.stats().num_snapshots == 2  # the most recently used
    assert answers(small, OTHER)[1] == [32]
    other = new_engine(checkpoint("qwen3_5"))
    for tensor in other.runner.kv_cache.states.tensors.values():
        tensor.fill_(float("nan"))
    assert other.load_prefix(path) == num_blocks
    assert other.stats().num_snapshots == 4
    found, cached = answers(other, [*first, 1], OTHER)
    assert cached == [96, 32]
    assert found == [alone("qwen3_5", tuple(prompt)) for prompt in ([*first, 1], OTHER)]
    again = new_engine(checkpoint("qwen3_5"))
    engine.save_prefix(tmp_path / "one", OTHER)
    again.load_prefix(tmp_path / "one")
    assert answers(again, OTHER, first)[1] == [32, 0]
    assert again.load_prefix(path) == 0  # all blocks are cached by now
    # Damaged, or without states.
    tensors, metadata = prefixes._read(path)
    for wrong in (
        {"snapshots": tensors["snapshots"] + 1000},
        {"snapshots": tensors["snapshots"].float()},
        {"states_matrices": tensors["states_matrices"][:, :1]},
        {"states_matrices": tensors["states_matrices"].half()},
        {"states_last_inputs": tensors["states_last_inputs"][:, :, :3].contiguous()},
        {"snapshots": None},
    ):
        kept = {name: each for name, each in {**tensors, **wrong}.items() if each is not None}
        save_file({name: each.contiguous() for name, each in kept.items()}, tmp_path / "wrong", metadata)
        with pytest.raises(CheckpointError, match="wrong is damaged: its tensors of states do not agree"):
            engine.load_prefix(tmp_path / "wrong")
    assert load_file(path)["states_last_inputs"].dtype == torch.float32
    engine.scheduler.check()


def test_a_copy_that_fails_loads_no_snapshot(tmp_path, monkeypatch):
    engine = new_engine(checkpoint("lfm2"))
    answers(engine, SHARED)
    engine.save_prefix(tmp_path / "saved")
    other = new_engine(checkpoint("lfm2"))
    with monkeypatch.context() as patch:
        patch.setattr(other.runner, "write_state", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            other.load_prefix(tmp_path / "saved")
    other.scheduler.check()
    assert not other.stats().num_snapshots
    assert other.load_prefix(tmp_path / "saved") == 0  # the blocks are cached already
    assert other.stats().num_snapshots
    assert answers(other, SHARED)[1] == [48]


def test_options_that_contradict_each_other():
    hybrid, llama = checkpoint("qwen3_5"), checkpoint("llama")
    for options, message in (
        (
            {"state_snapshots": 3, "enable_prefix_caching": False},
            "state_snapshots 3 are kept for the prefix cache",
        ),
        ({"state_snapshots": 0, "enable_prefix_caching": True}, "enable_prefix_caching True needs snapshots"),
        (
            {"state_interval": 64, "enable_prefix_caching": False},
            "with enable_prefix_caching False: omit one",
        ),
        ({"state_interval": 64, "state_snapshots": 0}, "there is none with state_snapshots 0: omit one"),
        ({"state_snapshots": -1}, "state_snapshots must be"),
        ({"state_snapshots": True}, "state_snapshots must be"),
        ({"state_interval": 0}, "state_interval must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            new_engine(hybrid, **options)
    for name in ("state_snapshots", "state_interval"):
        with pytest.raises(
            ConfigError, match=f"{name} 8 has no effect on LlamaForCausalLM, whose layers keep no"
        ):
            new_engine(llama, **{name: 8})
    for options, option in (
        ({"state_snapshots": 0}, "state_snapshots=0"),
        ({"enable_prefix_caching": False},) * 2,
    ):
        engine = new_engine(hybrid, **options)
        name = option if isinstance(option, str) else "enable_prefix_caching=False"
        assert answers(engine, SHARED, SHARED)[1] == [0, 0]
        assert engine.runner.sizes.num_states == 256
        with pytest.raises(UsageError, match=f"there is no prefix cache: the engine was made with {name}"):
            engine.pin_prefix(SHARED)


def test_snapshots_have_an_eighth_of_the_memory_for_blocks():
    sizes = new_engine(checkpoint("qwen3_5"), max_num_seqs=4).runner.sizes
    assert sizes.num_snapshots == 512 * sizes.block_bytes // 8 // sizes.state_bytes > LEAST_SNAPSHOTS
    assert sizes.num_states == 2 * 4 + sizes.num_snapshots
    by_default = replace(sizes, config=replace(sizes.config, num_blocks=None, state_snapshots=None))
    assert with_snapshots(by_default, 800 * sizes.state_bytes).num_snapshots == min(
        100, by_default.max_useful_blocks * sizes.block_bytes // 8 // sizes.state_bytes
    )
    assert with_snapshots(by_default, 0).num_snapshots == LEAST_SNAPSHOTS
    given = new_engine(checkpoint("qwen3_5"), max_num_seqs=4, state_snapshots=7, state_interval=33)
    assert given.runner.kv_cache.states.num_slots == 15
    assert given.block_manager.snapshots.interval == 48
    message = r"max_num_seqs 256 sequences take .*, 100000 snapshots .* lower max_num_seqs or state_snapshots"
    with pytest.raises(Exception, match=message):
        new_engine(
            checkpoint("qwen3_5"), num_blocks=None, state_snapshots=100_000, cpu_memory_utilization=0.01
        )


def test_the_interval_is_where_a_gap_costs_more_than_a_snapshot():
    sizes = new_engine(checkpoint("qwen3_5")).runner.sizes
    interval = sizes.new_block_manager(9).snapshots.interval
    assert interval % sizes.max_step_tokens == 0
    flops = 2 * sizes.model.num_active_layer_params * interval
    assert flops / 100e9 >= 0.2
    assert interval * sizes.kv_bytes_per_token >= sizes.state_bytes
    assert replace(sizes, device="cuda").new_block_manager(9).snapshots.interval > interval
