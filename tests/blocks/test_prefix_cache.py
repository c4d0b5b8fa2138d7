"""Cached prefixes in the engine: hits, salts, pins, files. Tokens equal those of transformers."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paged import CheckpointError, LLMEngine, RequestError, SamplingParams, UsageError
from paged.requests.request import RequestOutput
from tests.support.checkpoints import (
    assert_all_free,
    checkpoint,
    new_engine,
    ragged_prompts,
    reference,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SYSTEM, *TAILS = ragged_prompts([40, 3, 9, 17])
PROMPTS = [SYSTEM + tail for tail in TAILS]


@pytest.fixture
def engine() -> LLMEngine:
    return new_engine(checkpoint("llama"), block_size=8, num_blocks=64)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the outputs of transformers for PROMPTS."""
    return [reference("llama").greedy(prompt, 6)[0] for prompt in PROMPTS]


def generate(engine: LLMEngine, prompts: object, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    outputs = engine.generate(prompts, params, use_tqdm=False)
    engine.scheduler.check()
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def cached(outputs: list[RequestOutput]) -> list[int | None]:
    return [output.num_cached_tokens for output in outputs]


def count_rows(engine: LLMEngine) -> list[int]:
    """Record how many tokens each later step computes."""
    rows: list[int] = []
    engine.runner.graphs = None  # a replayed step calls no hooks
    engine.runner.model.embedding.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    return rows


def test_prefix_is_computed_once_for_requests_one_after_another(engine, expected):
    rows = count_rows(engine)
    outputs = [generate(engine, [prompt])[0] for prompt in PROMPTS]
    assert tokens_of(outputs) == expected
    assert cached(outputs) == [0, 40, 40]
    prompt_rows = [n for n in rows if n > 1]
    assert prompt_rows == [43, 9, 17]
    assert_all_free(engine)


def test_requests_of_the_same_step_share_their_prefix(engine, expected):
    rows = count_rows(engine)
    outputs = generate(engine, PROMPTS)
    assert tokens_of(outputs) == expected
    assert cached(outputs) == [0, 40, 40]
    assert rows[0] == 43 + 9 + 17
    assert engine.stats().prefix_hit_rate == 80 / (43 + 49 + 57)


def test_prompt_that_is_cached_in_full_computes_its_last_block_again(engine):
    prompt = SYSTEM  # five full blocks
    first, second = generate(engine, [prompt])[0], generate(engine, [prompt])[0]
    assert cached([first, second]) == [0, 32]
    assert tokens_of([first]) == tokens_of([second]) == [reference("llama").greedy(prompt, 6)[0]]


def test_generated_tokens_are_found_by_the_next_turn(engine):
    (first,) = generate(engine, [SYSTEM[:20]], SamplingParams(temperature=0.0, max_tokens=15))
    turn = SYSTEM[:20] + first.outputs[0].token_ids + [3, 1]
    (second,) = generate(engine, [turn])
    # 34 tokens were computed (the last one was only sampled): four full blocks.
    assert cached([second]) == [32]
    assert tokens_of([second]) == [reference("llama").greedy(turn, 6)[0]]


def test_salts_share_nothing_across_and_everything_within(engine, expected):
    salted = [{"prompt_token_ids": PROMPTS[0], "cache_salt": salt} for salt in ("a", "b", "a")]
    outputs = [generate(engine, [prompt])[0] for prompt in [PROMPTS[0], *salted]]
    assert cached(outputs) == [0, 0, 0, 40]
    assert tokens_of(outputs) == [expected[0]] * 4


def test_prefix_caching_can_be_turned_off():
    engine = new_engine(checkpoint("llama"), enable_prefix_caching=False, num_blocks=64)
    assert cached(generate(engine, [PROMPTS[0]]) + generate(engine, [PROMPTS[0]])) == [0, 0]
    assert engine.stats().num_cached_blocks == 0
    with pytest.raises(UsageError, match="enable_prefix_caching"):
        engine.pin_prefix(PROMPTS[0])


def test_stretched_prompts_share_only_what_is_rotated_alike():
    """Dynamic rope turns a prompt beyond the trained context by its own length."""
    name = "llama-dynamic"
    engine, trained = (
        new_engine(checkpoint(name), block_size=8),
        reference(name).model.config.max_position_embeddings,
    )
    (text,) = ragged_prompts([trained + 40])
    prompts = [text[: trained + 20], text[: trained + 28], text[: trained + 20], text[: trained - 8]]
    outputs = [generate(engine, [prompt])[0] for prompt in prompts]
    assert tokens_of(outputs) == [reference(name).greedy(prompt, 6)[0] for prompt in prompts]
    assert [bool(n) for n in cached(outputs)] == [False, False, True, False]


def test_reset_forgets_everything_and_running_requests_go_on(engine, expected):
    generate(engine, [PROMPTS[0]])
    engine.pin_prefix(SYSTEM)
    engine.add_request("running", PROMPTS[1], GREEDY)
    engine.step()
    engine.reset_prefix_cache()
    engine.scheduler.check()
    assert (engine.stats().num_cached_blocks, engine.stats().num_pinned_blocks) == (0, 0)
    outputs = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert tokens_of(outputs) == [expected[1]]
    assert cached(generate(engine, [PROMPTS[2]])) == [0]


def test_pinned_prefix_stays_when_others_need_blocks(expected):
    engine = new_engine(checkpoint("llama"), block_size=8, num_blocks=16)
    assert engine.pin_prefix(SYSTEM) == 40
    assert engine.stats().num_pinned_blocks == 5
    for prompt in ragged_prompts([60, 70], seed=1):
        generate(engine, [prompt])
    assert cached(generate(engine, [PROMPTS[0]])) == [40]
    engine.unpin_prefix(SYSTEM)
    for prompt in ragged_prompts([60, 110], seed=2):
        generate(engine, [prompt])
    outputs = generate(engine, [PROMPTS[0]])
    assert cached(outputs) == [0]
    assert tokens_of(outputs) == expected[:1]
    assert_all_free(engine)


def test_a_pin_leaves_room_for_prompts_that_are_read_ahead():
    """Those that max_waiting keeps from the queue are already validated."""
    engine = new_engine(checkpoint("llama"), block_size=8, num_blocks=6, max_num_seqs=1, max_waiting=1)
    long = SamplingParams(temperature=0.0, max_tokens=30)
    outputs = engine.generate_iter([SYSTEM[:10]] * 3, [GREEDY, GREEDY, long])
    next(outputs)
    with pytest.raises(RequestError, match="the unfinished requests would not fit beside them"):
        engine.pin_prefix(SYSTEM[:16])
    assert [len(output.outputs[0].token_ids) for output in outputs][-1] == 30
    assert engine.pin_prefix(SYSTEM[:16]) == 16


def test_wrong_pins_are_refused(engine):
    with pytest.raises(UsageError, match="not pinned"):
        engine.unpin_prefix(SYSTEM)
    with pytest.raises(RequestError, match="3 tokens and fills no block of 8"):
        engine.pin_prefix(SYSTEM[:3])
    engine.pin_prefix(SYSTEM)
    with pytest.raises(UsageError, match="pinned already"):
        engine.pin_prefix(SYSTEM)
    # 59 blocks are left.
    with pytest.raises(RequestError, match="472 tokens; raise num_blocks, lower max_tokens or unpin"):
        generate(engine, [SYSTEM], SamplingParams(max_tokens=450))
    engine.unpin_prefix(SYSTEM)
    engine.add_request("large", SYSTEM, SamplingParams(max_tokens=470))
    with pytest.raises(RequestError, match="would not fit beside them"):
        engine.pin_prefix(ragged_prompts([40], seed=5)[0])
    engine.abort_request("large")
    assert_all_free(engine)
    # With windows a prompt that runs alone needs fewer blocks than it fills.
    small = new_engine(checkpoint("qwen2-mixed"), block_size=8, num_blocks=40, max_num_batched_tokens=16)
    with pytest.raises(RequestError, match=r"of 200 tokens only \d+ stay cached; raise num_blocks"):
        small.pin_prefix(ragged_prompts([200])[0])
    assert_all_free(small)


# Files


@pytest.fixture
def saved(engine, tmp_path):
    generate(engine, PROMPTS)
    generate(engine, [{"prompt_token_ids": PROMPTS[0], "cache_salt": "a"}])
    path = tmp_path / "prefixes.safetensors"
    assert engine.save_prefix(path) == engine.stats().num_cached_blocks
    return path


@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
def test_saved_prefixes_are_hit_after_a_restart(name, tmp_path):
    path = tmp_path / "prefixes.safetensors"
    first = new_engine(checkpoint(name), block_size=8, num_blocks=96)
    expected = tokens_of(generate(first, PROMPTS))
    num_saved = first.save_prefix(path)
    second = new_engine(checkpoint(name), block_size=8, num_blocks=96)
    assert second.load_prefix(path) == num_saved
    assert second.load_prefix(path) == 0  # all are cached already
    outputs = generate(second, PROMPTS)
    assert tokens_of(outputs) == expected
    assert cached(outputs) == [len(prompt) // 8 * 8 - 8 * (len(prompt) % 8 == 0) for prompt in PROMPTS]
    second.scheduler.check()


def test_salts_survive_and_a_single_prompt_can_be_saved(engine, saved, tmp_path):
    again = new_engine(checkpoint("llama"), block_size=8, num_blocks=64)
    again.load_prefix(saved)
    salted = [{"prompt_token_ids": PROMPTS[0], "cache_salt": salt} for salt in ("a", "b")]
    assert cached(generate(again, salted)) == [40, 0]
    assert engine.save_prefix(tmp_path / "one", SYSTEM) == 5
    with pytest.raises(RequestError, match="no full block of this prompt"):
        engine.save_prefix(tmp_path / "none", ragged_prompts([30], seed=9)[0])


@pytest.mark.usefixtures("saved")
def test_paths_that_are_none_are_refused(engine, tmp_path):
    for path in (None, 3, b"x", "\ud800"):
        for call in (engine.save_prefix, engine.load_prefix):
            with pytest.raises(RequestError, match="path"):
                call(path)
    for path in ("", "a" * 5000, tmp_path, tmp_path / "nowhere" / "x"):
        with pytest.raises(RequestError, match="cannot be written"):
            engine.save_prefix(path)


def test_only_free_blocks_are_filled(saved):
    small = new_engine(checkpoint("llama"), block_size=8, num_blocks=6)
    assert small.load_prefix(saved) == 6
    assert small.stats().num_cached_blocks == 6
    assert cached(generate(small, [PROMPTS[0]])) == [40]


def test_file_of_another_model_is_refused(saved):
    for other in (new_engine(checkpoint("mistral"), block_size=8), new_engine("demo", block_size=8)):
        with pytest.raises(CheckpointError, match="another model, other weights or another dtype"):
            other.load_prefix(saved)
        assert other.stats().num_cached_blocks == 0
    with pytest.raises(CheckpointError, match="block_size"):
        new_engine(checkpoint("llama"), block_size=16).load_prefix(saved)


def test_damaged_file_is_refused_before_anything_is_loaded(engine, saved, tmp_path):
    engine.reset_prefix_cache()
    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(saved)
    damaged = tmp_path / "damaged"
    changes = [
        {"predecessors": torch.arange(len(tensors["groups"]))},
        {"kv": tensors["kv"][:, :-1]},
        {"token_ids": tensors["token_ids"].long()},
        {"groups": torch.full_like(tensors["groups"], 7)},
        {"predecessors": tensors["predecessors"].double()},
        {"predecessors": tensors["predecessors"][:, None]},
        {"groups": tensors["groups"].bool()},
        {"token_ids": torch.tensor(5, dtype=torch.int32)},
        {"namespaces": '{"0": 5}'},
        {"namespaces": "[1]"},
        {"namespaces": "[" * 100_000},
    ]
    for change in changes:
        texts = {name: value for name, value in change.items() if isinstance(value, str)}
        changed = {name: change.get(name, tensor).contiguous() for name, tensor in tensors.items()}
        save_file(changed, damaged, metadata | texts)
        with pytest.raises(CheckpointError, match="damaged"):
            engine.load_prefix(damaged)
    damaged.write_bytes(saved.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged cannot be read"):
        engine.load_prefix(damaged)
    with pytest.raises(CheckpointError, match="absent"):
        engine.load_prefix(tmp_path / "absent")
    assert engine.stats().num_free_blocks == 64


@pytest.mark.parametrize("num_written", [0, 3])
def test_load_that_breaks_off_leaves_nothing_that_was_not_written(
    engine, saved, monkeypatch, num_written, expected
):
    engine.reset_prefix_cache()
    engine.runner.kv_cache.tensors["kv"].fill_(float("nan"))
    writes, write_block = 0, engine.runner.write_block

    def breaking(*args: object) -> None:
        nonlocal writes
        writes += 1
        if writes > num_written:
            raise KeyboardInterrupt
        write_block(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "write_block", breaking)
        with pytest.raises(KeyboardInterrupt):
            engine.load_prefix(saved)
    engine.scheduler.check()
    assert engine.stats().num_cached_blocks == num_written
    assert engine.stats().num_used_blocks == 0
    assert tokens_of(generate(engine, PROMPTS)) == expected
