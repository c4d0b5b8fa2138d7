"""Models whose layers keep states: the same bits in any company, wherever a state was moved."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

from paged import BeamSearchParams, ConfigError, SamplingParams
from paged.model.cache.states import runs_of
from paged.runner.states import seats_in
from tests.support.checkpoints import (
    HYBRIDS,
    Reference,
    assert_all_free,
    checkpoint,
    edit_json,
    new_engine,
    ragged_prompts,
    reference,
)

PROMPTS = ragged_prompts([30, 1, 61, 8, 16, 44])
SWAP = {"preemption_mode": "swap", "swap_space": 0.01}


def run(engine, prompts, max_tokens=16, **sampling):
    """Return tokens and log-probabilities, which are equal only if the logits are bitwise equal."""
    sampling = {"temperature": 0.0, "logprobs": 1, "ignore_eos": True, **sampling}
    results = engine.generate(prompts, SamplingParams(max_tokens=max_tokens, **sampling), use_tqdm=False)
    assert_all_free(engine)
    return [bits(output) for result in results for output in result.outputs], results


def bits(output):
    """Return what of a completion is equal only if its logits are."""
    return output.token_ids, [{t: p.logprob for t, p in each.items()} for each in output.logprobs]


@pytest.fixture(scope="module")
def alone():
    """Return the bits of each prompt alone, computed whole."""
    found = {}
    for name in HYBRIDS:
        engine = new_engine(checkpoint(name))
        found[name] = [run(engine, [prompt])[0][0] for prompt in PROMPTS]
    return found


@pytest.mark.parametrize("name", HYBRIDS)
def test_bits_do_not_depend_on_company(name, alone):
    """All at once, in chunks of 24 tokens while requests are preempted by both ways."""
    for options in ({}, {"preemption_mode": "recompute"}, SWAP):
        few = {"num_blocks": 7, "max_num_batched_tokens": 24} if options else {}
        engine = new_engine(checkpoint(name), **few, **options)
        found, _ = run(engine, PROMPTS)
        assert found == alone[name], options
        stats = engine.stats()
        swapped, recomputed = stats.num_swap_preemptions, stats.num_recompute_preemptions
        assert bool(swapped) == (options == SWAP)
        assert bool(recomputed) == ("recompute" in options.values())


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "nemotron_h", "falcon_h1"])
def test_bits_do_not_depend_on_chunks_and_blocks(name, alone):
    """A prompt of 61 tokens in chunks of every size, with an engine of another size of blocks for some."""
    engine = new_engine(checkpoint(name), max_num_batched_tokens=64)
    for size in range(1, 62):
        engine.scheduler.max_chunk = size
        found, _ = run(engine, PROMPTS[2:3], 2)
        assert [each[:2] for each in found[0]] == [each[:2] for each in alone[name][2]], size
    for block_size in (8, 64):
        other = new_engine(checkpoint(name), block_size=block_size, max_num_seqs=2)
        assert run(other, PROMPTS)[0] == alone[name]


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "falcon_h1"])
def test_samples_forks_and_beams_take_states_along(name, alone):
    engine = new_engine(checkpoint(name), max_num_batched_tokens=24)
    crowded = new_engine(checkpoint(name), max_num_batched_tokens=24, num_blocks=9, **SWAP)
    for each in (engine, crowded):
        _, results = run(each, PROMPTS[:3], n=3, temperature=1.0, seed=0, logprobs=0)
        for prompt, result in zip(PROMPTS, results, strict=False):
            assert len({tuple(output.token_ids) for output in result.outputs}) == 3
            for output in result.outputs:
                _, (whole,) = run(engine, [prompt + output.token_ids], 1, prompt_logprobs=0)
                rows = whole.prompt_logprobs[len(prompt) :]
                for token, own, row in zip(output.token_ids, output.logprobs, rows, strict=True):
                    assert own[token].logprob == row[token].logprob
    assert crowded.stats().num_swap_preemptions
    # A fork goes on beside its parent, also of one that ends at once and whose seat another request takes.
    greedy = SamplingParams(temperature=0.0, max_tokens=16, logprobs=1, ignore_eos=True)
    engine.add_request("a", PROMPTS[0], greedy)
    for _ in range(6):
        engine.step()
    child = engine.fork("a")
    engine.abort_request("a")
    engine.add_request("b", PROMPTS[3], greedy)
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {o.request_id: bits(o.outputs[0]) for o in engine.step() if o.finished}
    assert finished["b"] == alone[name][3]
    assert finished[child][0] == alone[name][0][0]
    (beams,) = engine.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
    for sequence in beams.sequences:
        text = sequence.tokens[: len(PROMPTS[0]) + 6]
        _, (whole,) = run(engine, [text], 1, prompt_logprobs=0)
        rows = zip(text[30:], whole.prompt_logprobs[30:], strict=True)
        expected = sum(row[token].logprob for token, row in rows)
        assert sequence.cum_logprob == pytest.approx(expected, abs=1e-9)


def test_a_request_that_moves_to_another_engine_goes_on(alone):
    tokens = alone["qwen3_5"][0][0]
    engine = new_engine(checkpoint("qwen3_5"), max_num_batched_tokens=24)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    engine.add_request("a", PROMPTS[0], params, generated_token_ids=tokens[:7])
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs[0].token_ids == tokens


def test_a_token_that_is_sampled_again_finds_the_state_before_it():
    """A row whose mask comes too late gets no token, and its last one would be computed twice."""
    hybrid = new_engine(checkpoint("qwen3_5"))
    greedy = SamplingParams(temperature=0.0, max_tokens=16, logprobs=1, ignore_eos=True)
    expected = run(hybrid, PROMPTS[:1])[0][0]
    update, late = hybrid.scheduler.update, [5, 9]

    def without_a_token(schedule, sampled, errors=(), runs=()):
        request = schedule.sampled_requests[0] if schedule.sampled_requests else None
        if request is not None and request.num_output_tokens in late:
            late.remove(request.num_output_tokens)
            return update(schedule, [None], {}, {0: []})
        return update(schedule, sampled, errors or {}, runs or {})

    with mock.patch.object(hybrid.scheduler, "update", without_a_token):
        (result,) = hybrid.generate(PROMPTS[:1], greedy, use_tqdm=False)
    assert not late
    assert result.outputs[0].token_ids == expected[0]


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_steps_are_recorded_as_without_states(name, alone):
    engine = new_engine(checkpoint(name))
    assert engine.runner.graphs is not None
    assert run(engine, PROMPTS)[0] == alone[name]
    assert any(graph is not None for graph in engine.runner.graphs._graphs.values())
    eager = new_engine(checkpoint(name), enforce_eager=True)
    assert run(eager, PROMPTS)[0] == alone[name]


def test_moves_are_divided_where_they_meet():
    """Each run may be made at once: no slot is both read and written, or written twice."""
    rng = random.Random(0)
    for _ in range(300):
        moves = [(rng.randrange(6), rng.randrange(6)) for _ in range(rng.randrange(9))]
        slots = [*range(6)]
        for source, target in moves:
            slots[target] = slots[source]
        found = [*range(6)]
        end = 0
        for first, stop, from_host, to_host in runs_of(moves, 4):
            assert first == end
            end = stop
            before = found.copy()
            assert len({target for _, target in moves[first:stop]}) == stop - first
            for source, target in moves[first:stop]:
                assert (source >= 4, target >= 4) == (from_host, to_host)
                found[target] = before[source]
        assert (found, end) == (slots, len(moves))


def test_options_that_states_do_not_support_are_refused():
    directory = checkpoint("qwen3_5")
    llama, speculation = checkpoint("llama"), {"model": str(directory), "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="draft model is a Qwen3_5ForCausalLM, whose layers keep states"):
        new_engine(llama, speculative_config=speculation)


def test_seats_have_room_for_their_states(caplog):
    """By default fewer where states would take over a quarter of the memory; a number that fits none."""
    directory = checkpoint("qwen3_5")
    sizes = new_engine(directory).runner.sizes
    assert sizes.config.num_seats == 256
    assert sizes.state_bytes == 3 * (3 * 128 * 4 + 4 * 12 * 20 * 4)
    by_default = replace(sizes, config=replace(sizes.config, max_num_seqs=None))
    fewer = seats_in(by_default, 80 * sizes.state_bytes)
    assert fewer.config.num_seats == 10  # of two states each, as there is a prefix cache
    room = 600 * sizes.state_bytes
    with (
        mock.patch("paged.runner.fit.free_on_cpu", return_value=room / 0.4),
        mock.patch("paged.runner.memory.free_on_cpu", return_value=room / 0.4),
        mock.patch("paged.runner.part_runner._require_room"),
    ):
        engine = new_engine(directory, num_blocks=None)
        assert engine.runner.sizes.config.num_seats == engine.scheduler.max_num_seqs == 75
        assert "max_num_seqs is 75: the states of 256 sequences" in caplog.text
        message = (
            r"no memory for a KV cache beside states: .* max_num_seqs 400 sequences take .* lower max_num"
        )
        with pytest.raises(Exception, match=message):
            new_engine(directory, num_blocks=None, max_num_seqs=400)


def test_published_configs_and_tensors_of_other_forms(tmp_path):
    """A checkpoint with layers that predict further tokens, and the older keys of LFM2."""
    from safetensors.torch import load_file, save_file

    model = reference("qwen3_5").model
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.zeros(2, 2)}, file, {"format": "pt"})
    edit_json(tmp_path / "config.json", layer_types=None, full_attention_interval=2)
    with pytest.raises(Exception, match=r"missing from the checkpoint"):
        new_engine(tmp_path)
    edit_json(
        tmp_path / "config.json",
        layer_types=["linear_attention", "full_attention"] + 2 * ["linear_attention"],
    )
    assert run(new_engine(tmp_path), PROMPTS[:1])[0][0][0] == reference("qwen3_5").greedy(PROMPTS[0], 16)[0]
    lfm2 = tmp_path / "lfm2"
    reference("lfm2").model.save_pretrained(lfm2)
    older = {"layer_types": None, "full_attn_idxs": [1], "block_ff_dim": 80, "intermediate_size": None}
    edit_json(lfm2 / "config.json", **older, tie_word_embeddings=None, tie_embedding=True)
    expected = Reference(lfm2).greedy(PROMPTS[0], 16)[0]
    assert run(new_engine(lfm2), PROMPTS[:1])[0][0][0] == expected


@pytest.mark.parametrize(
    ("name", "options"), [("granitemoehybrid", {}), ("nemotron_h_moe", {"attention_bias": True})]
)
def test_names_of_transformers_5_and_biases_that_it_does_not_make(name, options, alone, tmp_path):
    reference(name).model.save_pretrained(tmp_path, save_original_format=False)
    edit_json(tmp_path / "config.json", **options)
    assert run(new_engine(tmp_path), PROMPTS[:1])[0][0] == alone[name][0]
