"""The engine's public behaviour: prompts, stopping, streaming, aborts, and isolation of bad requests."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import (
    CompletionOutput,
    ConfigError,
    LLMEngine,
    PagedError,
    RequestOutput,
    SamplingParams,
    UnknownArgumentError,
)
from paged.model.layers.linear import Linear
from tests.support.checkpoints import (
    VOCAB_SIZE,
    assert_all_free,
    checkpoint,
    edit_json,
    new_engine,
    ragged_prompts,
    reference,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ragged_prompts([5, 40, 1, 17])


@pytest.fixture(scope="module")
def tiny_engine() -> LLMEngine:
    return new_engine(checkpoint("llama"))


@pytest.fixture(scope="module")
def demo_engine() -> LLMEngine:
    return new_engine("demo", skip_tokenizer_init=False, num_blocks=128)


def check_and_clear(engine: LLMEngine) -> None:
    """Check that a test leaves no request behind; clean up after one that failed."""
    try:
        assert_all_free(engine)
    finally:
        for request_id in list(engine.core.groups):
            engine.abort_request(request_id)
        engine.step()


@pytest.fixture
def tiny(tiny_engine) -> Iterator[LLMEngine]:
    """Yield an engine with random weights and without a tokenizer."""
    yield tiny_engine
    check_and_clear(tiny_engine)


@pytest.fixture
def demo(demo_engine) -> Iterator[LLMEngine]:
    """Make an engine of the demo checkpoint with its tokenizer."""
    yield demo_engine
    check_and_clear(demo_engine)


@pytest.fixture(scope="module")
def greedy_tokens() -> list[list[int]]:
    """Return the tokens of transformers for PROMPTS."""
    return [reference("llama").greedy(prompt, 12)[0] for prompt in PROMPTS]


def generate(engine: LLMEngine, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return engine.generate(prompts, params, use_tqdm=False)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def run_all(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Step until no request is left. Return the outputs of each request, in order."""
    seen: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen.setdefault(output.request_id, []).append(output)
    return seen


# --- prompts and outputs


def test_prompt_forms_are_the_same_prompt(demo):
    text = "def add(a, b):\n"
    ids = demo.tokenizer.encode(text)
    forms = [text, ids, tuple(ids), {"prompt": text}, {"prompt_token_ids": ids}]
    together = generate(demo, forms)
    alone = [generate(demo, form)[0] for form in forms]
    for output in (*together, *alone):
        assert output.outputs[0].text == together[0].outputs[0].text
        assert output.prompt_token_ids == ids
        assert output.finished
    assert [output.prompt for output in together] == [text, None, None, text, None]


def test_token_ids_may_be_arrays(tiny):
    expected = generate(tiny, [[1, 2, 3], [4, 5, 6]])
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for forms in (rows, rows.numpy(), [{"prompt_token_ids": row} for row in rows]):
        for output, same in zip(generate(tiny, forms), expected, strict=True):
            assert output.prompt_token_ids == same.prompt_token_ids
            assert output.outputs[0].token_ids == same.outputs[0].token_ids
    for one in (rows[0], rows[0].numpy()):
        assert tokens_of(generate(tiny, one)) == [expected[0].outputs[0].token_ids]
    for wrong in (torch.tensor(3), rows[None], rows / 2):
        with pytest.raises(PagedError):
            generate(tiny, [wrong])


def test_no_prompts_give_no_outputs(tiny):
    assert generate(tiny, []) == []
    assert tiny.step() == []


def test_outputs_are_in_prompt_order_whoever_finishes_first(tiny, greedy_tokens):
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (12, 1, 7, 3)]
    outputs = generate(tiny, PROMPTS, params)
    assert [o.prompt_token_ids for o in outputs] == PROMPTS
    assert tokens_of(outputs) == [t[: p.max_tokens] for t, p in zip(greedy_tokens, params, strict=True)]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
    assert len({o.request_id for o in outputs}) == 4
    for output in outputs:
        metrics = output.metrics
        assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
        assert (output.finished, output.outputs[0].index) == (True, 0)


def test_progress_bar_counts_requests(tiny, capsys):
    tiny.generate(PROMPTS, GREEDY)
    assert "4/4" in capsys.readouterr().err


@pytest.mark.parametrize("length", [19, 20])
def test_prompt_up_to_the_whole_context_gets_its_next_token(length):
    engine = new_engine(checkpoint("llama"), max_model_len=20, num_blocks=2)
    (prompt,) = ragged_prompts([length])
    (output,) = generate(engine, prompt, SamplingParams(temperature=0.0))
    assert output.outputs[0].token_ids == reference("llama").greedy(prompt, 1)[0]
    assert output.outputs[0].finish_reason == "length"
    assert_all_free(engine)


def test_without_max_tokens_a_request_goes_on_to_the_end_of_the_context_or_of_the_pool():
    engine = new_engine(checkpoint("llama"), max_model_len=100, num_blocks=4)
    params = SamplingParams(temperature=0.0, max_tokens=None)
    (output,) = generate(engine, PROMPTS[0], params)
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64
    roomy = new_engine(checkpoint("llama"), max_model_len=100)
    (longer,) = generate(roomy, PROMPTS[0], params)
    assert len(longer.prompt_token_ids) + len(longer.outputs[0].token_ids) == 100
    assert longer.outputs[0].token_ids[: 64 - 5] == output.outputs[0].token_ids


def test_text_is_right_for_characters_of_several_bytes(demo):
    prompt = "# naïve 日本語 🙂\n"
    params = [SamplingParams(temperature=t, seed=3, max_tokens=24) for t in (0.0, 1.0, 4.0)]
    for output in generate(demo, [prompt] * 3, params):
        ids = [i for i in output.outputs[0].token_ids if i not in demo.eos_token_ids]
        whole = demo.tokenizer.decode([*output.prompt_token_ids, *ids])
        assert output.outputs[0].text == whole[len(prompt) :]


@pytest.mark.parametrize("budget", [512, 7])
def test_nothing_is_padded(budget):
    engine = new_engine(checkpoint("llama"), max_num_batched_tokens=budget)
    engine.runner.graphs = None  # a recorded step calls no hooks
    rows: dict[Linear, int] = {}

    def count(module, inputs, _output):
        rows[module] = rows.get(module, 0) + inputs[0].shape[:-1].numel()

    model = engine.runner.model
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    for module in linears:
        module.register_forward_hook(count)
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (9, 2, 5, 1)]
    outputs = generate(engine, PROMPTS, params)
    num_sampled = sum(map(len, tokens_of(outputs)))
    # The last token of an output is sampled and never computed.
    num_computed = sum(map(len, PROMPTS)) + num_sampled - len(PROMPTS)
    assert len(linears) == 1 + 2 * 4
    # In the last layer all other tokens stop after q, k and v.
    last = model.layers[-1]
    of_sampled = {model.head, last.mixer.output, last.mlp.gate_up, last.mlp.down}
    assert rows == {module: num_sampled if module in of_sampled else num_computed for module in linears}


# --- sampling


def test_same_seed_gives_the_same_tokens_whatever_the_batch(tiny):
    params = [
        SamplingParams(seed=seed, max_tokens=10, **kind)
        for seed, kind in enumerate([{}, {"top_k": 20}, {"top_p": 0.7, "temperature": 2.0}, {"min_p": 0.1}])
    ]
    together = tokens_of(generate(tiny, PROMPTS, params))
    assert tokens_of(generate(tiny, PROMPTS[::-1], params[::-1])) == together[::-1]
    assert [tokens_of(generate(tiny, p, s))[0] for p, s in zip(PROMPTS, params, strict=True)] == together
    small = new_engine(checkpoint("llama"), num_blocks=6, max_num_batched_tokens=7, seed=5)
    outputs = generate(small, PROMPTS, params)
    assert tokens_of(outputs) == together
    assert any(output.metrics.num_preemptions for output in outputs)


def test_seeds_and_only_seeds_make_a_difference(tiny):
    a, b, c = tokens_of(
        generate(tiny, [PROMPTS[0]] * 3, [SamplingParams(seed=s, max_tokens=10) for s in (1, 1, 2)])
    )
    assert a == b != c


def test_requests_without_a_seed_differ_and_the_engine_seed_repeats_them():
    def run(seed: int) -> list[list[int]]:
        engine = new_engine(checkpoint("llama"), seed=seed)
        return tokens_of(generate(engine, [PROMPTS[0]] * 2, SamplingParams(max_tokens=10)))

    assert run(0) == run(0)
    assert run(0) != run(1)
    assert run(0)[0] != run(0)[1]


def test_top_k_of_one_is_greedy_and_defaults_sample(tiny, greedy_tokens):
    assert tokens_of(generate(tiny, PROMPTS, SamplingParams(top_k=1, max_tokens=12))) == greedy_tokens
    (output,) = generate(tiny, PROMPTS[0], SamplingParams(max_tokens=12))
    assert output.outputs[0].token_ids != greedy_tokens[0]
    assert [len(o.outputs[0].token_ids) for o in generate(tiny, PROMPTS[:2], [SamplingParams(), None])] == [
        16,
        16,
    ]


# --- stopping


@pytest.fixture
def with_eos(tmp_path):
    """Return a copy of the tiny model with these EOS ids in generation_config.json."""

    def make(*eos: int, config_eos: int | None = None) -> Path:
        shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
        edit_json(tmp_path / "generation_config.json", eos_token_id=list(eos) or None)
        edit_json(tmp_path / "config.json", eos_token_id=config_eos)
        return tmp_path

    return make


def first_seen(tokens: list[int], after: int) -> int:
    """Return the first index from `after` on whose token does not occur earlier."""
    return next(i for i in range(after, len(tokens)) if tokens[i] not in tokens[:i])


def test_every_eos_of_generation_config_ends_a_request(with_eos, greedy_tokens):
    cuts = [first_seen(tokens, after=3) for tokens in greedy_tokens[:2]]
    eos = [tokens[cut] for tokens, cut in zip(greedy_tokens, cuts, strict=False)]
    engine = new_engine(with_eos(*eos, config_eos=greedy_tokens[0][0]))
    for output, tokens in zip(generate(engine, PROMPTS[:2]), greedy_tokens, strict=False):
        cut = next(i for i, token in enumerate(tokens) if token in eos)
        assert output.outputs[0].token_ids == tokens[: cut + 1]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    ignoring = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert tokens_of(generate(engine, PROMPTS, ignoring)) == greedy_tokens
    assert_all_free(engine)


def test_eos_of_config_counts_where_generation_config_has_none(with_eos, greedy_tokens):
    tokens = greedy_tokens[0]
    engine = new_engine(with_eos(config_eos=tokens[0]))
    assert tokens_of(generate(engine, PROMPTS[0])) == [tokens[:1]]


def test_min_tokens_holds_eos_off(with_eos, greedy_tokens):
    tokens = greedy_tokens[0]
    engine = new_engine(with_eos(tokens[0]))
    params = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=4)
    (output,) = generate(engine, PROMPTS[0], params)
    assert len(output.outputs[0].token_ids) >= 4
    assert tokens[0] not in output.outputs[0].token_ids[:4]
    # Other requests of the batch may end earlier.
    assert tokens_of(generate(engine, [PROMPTS[0]] * 2, [params, GREEDY]))[1] == tokens[:1]


@pytest.mark.parametrize("eos", [VOCAB_SIZE, -1])
def test_eos_outside_the_vocabulary_never_matters(eos, with_eos, greedy_tokens):
    engine = new_engine(with_eos(eos))
    params = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12)
    assert tokens_of(generate(engine, PROMPTS, params)) == greedy_tokens


def test_stop_token_ids_end_a_request_and_are_named(tiny, greedy_tokens):
    tokens = greedy_tokens[1]
    cut = first_seen(tokens, after=4)
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[tokens[cut]], ignore_eos=True)
    (output,) = generate(tiny, PROMPTS[1], params)
    assert output.outputs[0].token_ids == tokens[: cut + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", tokens[cut])


DEMO_PROMPT = "def add(a, b):\n    return"
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def demo_output(demo_engine) -> CompletionOutput:
    return generate(demo_engine, DEMO_PROMPT, LONG)[0].outputs[0]


@pytest.fixture
def pieces(demo_engine, demo_output) -> list[str]:
    """Return the text of the demo's output after each token."""
    ids = demo_output.token_ids
    ends = [len(demo_engine.tokenizer.decode(ids[:n])) for n in range(len(ids) + 1)]
    return [demo_output.text[start:end] for start, end in itertools.pairwise(ends)]


@pytest.fixture
def stop(demo_output, pieces) -> str:
    """Return six characters of which the last one begins a token and the others end the one before."""
    text = demo_output.text
    borders = [end for end in itertools.accumulate(map(len, pieces)) if 12 < end < len(text)]
    return next(text[b - 5 : b + 1] for b in borders if text.find(text[b - 5 : b + 1]) == b - 5)


def with_stop(*stop: str, max_tokens: int = 40) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, stop=stop)


def test_stop_string_ends_the_text_before_itself(demo, demo_output, stop):
    (output,) = generate(demo, DEMO_PROMPT, with_stop("never seen", stop))
    completion = output.outputs[0]
    assert completion.text == demo_output.text[: demo_output.text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == demo_output.token_ids[: len(completion.token_ids)]
    assert stop in demo.tokenizer.decode(completion.token_ids)
    # At the last allowed token the finish reason is still "stop", not "length".
    last_token = with_stop(stop, max_tokens=len(completion.token_ids))
    assert generate(demo, DEMO_PROMPT, last_token)[0].outputs[0] == completion


def test_requests_that_stop_in_the_same_step_all_stop(demo, stop):
    num_finished = demo.scheduler.counters.num_finished
    (alone,) = generate(demo, DEMO_PROMPT, with_stop(stop))
    length = len(alone.outputs[0].token_ids)
    for params in (with_stop(stop), with_stop(stop, max_tokens=length)):
        together = generate(demo, [DEMO_PROMPT] * 3, params)
        assert [output.outputs[0] for output in together] == [alone.outputs[0]] * 3
    assert demo.scheduler.counters.num_finished == num_finished + 7  # each request is counted once


def test_min_tokens_holds_off_stop_strings_too(demo, demo_output, stop):
    (output,) = generate(demo, DEMO_PROMPT, with_stop(stop))
    length = len(output.outputs[0].token_ids)
    params = SamplingParams(temperature=0.0, max_tokens=40, min_tokens=length, ignore_eos=True, stop=stop)
    completion = generate(demo, DEMO_PROMPT, params)[0].outputs[0]
    assert len(completion.token_ids) > length
    assert demo_output.text.startswith(completion.text)
    assert stop in completion.text


@pytest.mark.parametrize("others", [[], ["never, seen"]], ids=str)
def test_stop_string_counts_if_it_ends_behind_min_tokens(demo, pieces, others):
    """A stop string that the last of min_tokens tokens begins counts; one that it completes does not."""
    text = "".join(pieces)
    ends = list(itertools.accumulate(map(len, pieces)))
    n = next(i for i, end in enumerate(ends) if i > 4 and text.find(text[end - 2 : end + 1]) == end - 2)
    whole, spanning = text[ends[n] - 2 : ends[n]], text[ends[n] - 2 : ends[n] + 1]
    params = SamplingParams(
        temperature=0.0, max_tokens=n + 2, min_tokens=n + 1, ignore_eos=True, stop=[spanning, *others]
    )
    (output,) = generate(demo, DEMO_PROMPT, params)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == (text[: ends[n] - 2], spanning)
    held_off = dataclasses.replace(params, stop=[whole, *others])
    (output,) = generate(demo, DEMO_PROMPT, held_off)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text[: ends[n + 1]], "length")


def test_earliest_of_several_stop_strings_counts(demo, demo_output, pieces):
    text = demo_output.text
    ends = list(itertools.accumulate(map(len, pieces)))
    # Two stop strings that the same token completes.
    first, second = next(
        (text[e - 4 : e - 2], text[e - 2 : e])
        for e, piece in zip(ends, pieces, strict=True)
        if len(piece) >= 4 and text.find(text[e - 4 : e - 2]) == e - 4 and text.find(text[e - 2 : e]) == e - 2
    )
    for params in (with_stop(first, second), with_stop(second, first)):
        completion = generate(demo, DEMO_PROMPT, params)[0].outputs[0]
        assert (completion.text, completion.stop_reason) == (text[: text.index(first)], first)


def test_stop_string_is_never_shown_in_part(demo, demo_output, stop):
    final = demo_output.text[: demo_output.text.index(stop)]
    demo.add_request("a", DEMO_PROMPT, with_stop(stop))
    demo.add_request("b", DEMO_PROMPT, with_stop("never seen"))
    seen = run_all(demo)
    texts = [output.outputs[0].text for output in seen["a"]]
    assert all(final.startswith(text) for text in texts)
    assert texts[-1] == final
    # A stop string that never comes: the text streams, and text that was held back is shown at the end.
    texts = [output.outputs[0].text for output in seen["b"]]
    assert len(set(texts)) > 10
    assert texts[-1] == demo_output.text


def test_stop_token_is_not_text(demo, demo_output, pieces):
    cut = first_seen(demo_output.token_ids, after=4)
    params = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[demo_output.token_ids[cut]])
    completion = generate(demo, DEMO_PROMPT, params)[0].outputs[0]
    assert completion.token_ids == demo_output.token_ids[: cut + 1]
    assert completion.text == "".join(pieces[:cut])


# --- streaming


@pytest.mark.parametrize("temperature", [0.0, 1.0, 4.0])
def test_streamed_text_grows_to_what_generate_gives(demo, temperature):
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=30, ignore_eos=True)
    prompts = [DEMO_PROMPT, "# 日本", "x"]
    expected = generate(demo, prompts, params)
    for i, prompt in enumerate(prompts):
        demo.add_request(str(i), prompt, params)
    seen = run_all(demo)
    for i, whole in enumerate(expected):
        shown = [output.outputs[0] for output in seen[str(i)]]
        assert [len(c.token_ids) for c in shown] == list(range(1, 31))
        assert all(b.text.startswith(a.text) for a, b in itertools.pairwise(shown))
        assert [o.finished for o in seen[str(i)]] == [False] * 29 + [True]
        assert (shown[-1].text, shown[-1].token_ids) == (whole.outputs[0].text, whole.outputs[0].token_ids)
        assert shown[0].finish_reason is None


def test_requests_of_others_are_served_and_kept_while_generate_runs(tiny, greedy_tokens):
    tiny.add_request("short", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=3))
    tiny.add_request("long", PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=12))
    (output,) = generate(tiny, PROMPTS[3], SamplingParams(temperature=0.0, max_tokens=6))
    assert output.outputs[0].token_ids == greedy_tokens[3][:6]
    assert tiny.has_unfinished_requests()
    last = {name: outputs[-1] for name, outputs in run_all(tiny).items()}
    assert set(last) == {"short", "long"}
    assert last["short"].outputs[0].token_ids == greedy_tokens[0][:3]
    assert last["long"].outputs[0].token_ids == greedy_tokens[1]
    assert all(output.finished for output in last.values())


def test_finished_id_may_be_used_again(tiny, greedy_tokens):
    for _ in range(2):
        tiny.add_request("a", PROMPTS[0], GREEDY)
        assert tokens_of([run_all(tiny)["a"][-1]]) == greedy_tokens[:1]


# --- aborting


@pytest.mark.parametrize("num_steps", [0, 1, 3, 9], ids="after-{}-steps".format)
def test_abort_frees_blocks_and_leaves_the_others_alone(num_steps, greedy_tokens):
    engine = new_engine(checkpoint("llama"), num_blocks=8, block_size=8, max_num_batched_tokens=16)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, GREEDY)
    seen = [output for _ in range(num_steps) for output in engine.step()]
    engine.abort_request("1")
    engine.abort_request("1")
    engine.abort_request("never there")
    engine.scheduler.check()
    engine.add_request("1", PROMPTS[0], GREEDY)
    seen += [output for outputs in run_all(engine).values() for output in outputs]
    last = {output.request_id: output for output in seen if output.finished}
    expected = {"0": greedy_tokens[0], "1": greedy_tokens[0], "2": greedy_tokens[2], "3": greedy_tokens[3]}
    assert {name: output.outputs[0].token_ids for name, output in last.items()} == expected
    assert_all_free(engine)


def test_id_of_an_aborted_request_begins_anew(demo):
    (expected,) = generate(demo, DEMO_PROMPT)
    demo.add_request("a", "# something else", GREEDY)
    for _ in range(4):
        demo.step()
    demo.abort_request("a")
    demo.add_request("a", DEMO_PROMPT, GREEDY)
    assert run_all(demo)["a"][-1].outputs == expected.outputs


def test_interrupt_of_generate_leaves_nothing_behind(tiny, greedy_tokens, monkeypatch):
    execute, calls = tiny.runner.execute, 0

    def interrupted(*args):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return execute(*args)

    with monkeypatch.context() as patch:
        patch.setattr(tiny.runner, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(tiny, PROMPTS)
    assert_all_free(tiny)
    assert tokens_of(generate(tiny, PROMPTS)) == greedy_tokens


# --- bad input

BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ([], "empty"),
    "empty-text": ("", "empty"),
    "empty-ids": ({"prompt_token_ids": []}, "empty"),
    "empty-dict": ({}, "prompt"),
    "beyond-vocabulary": ([1, 4096], "4096"),
    "negative": ([-1], "-1"),
    "huge": ([10**30], "1000000000000000000000000000000"),
    "bool": ([1, True], "True"),
    "float": ([1.0], "1.0"),
    "none": (None, "None"),
    "number": (5, "5"),
    "nested": ([[1]], r"\[1\]"),
    "bytes": (b"abc", "abc"),
    "unknown-key": ({"promt": "a"}, "'promt'; did you mean 'prompt'"),
    "both-keys": ({"prompt": "a", "prompt_token_ids": [1]}, "either"),
    "ids-as-text": ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
    "text-as-ids": ({"prompt": [1, 2]}, "prompt"),
    "surrogate": ("a\ud800b", "not valid Unicode"),
    "megabytes": ("x = 1\n" * 2**20, r"the prompt has at least \d+ tokens, more than max_model_len 2048"),
    "longer-than-context": ([1] * 2049, "2049.*max_model_len 2048"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompt_is_refused_and_harms_nobody(case, demo):
    prompt, named = BAD_PROMPTS[case]
    expected = tokens_of(generate(demo, DEMO_PROMPT))
    demo.add_request("good", DEMO_PROMPT, GREEDY)
    demo.step()
    with pytest.raises(PagedError, match=named):
        demo.add_request("bad", prompt, GREEDY)
    if case != "none":
        with pytest.raises(PagedError, match=rf"prompts\[1\]: .*{named}"):
            generate(demo, [DEMO_PROMPT, prompt])
    assert tokens_of([run_all(demo)["good"][-1]]) == expected


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "named"),
    [
        (64, 2, "64 prompt tokens and 2 new ones"),
        (65, 1, "65 prompt"),
        (65, None, "65 prompt"),
        (5, 61, "61 new"),
    ],
    ids=str,
)
def test_request_that_can_never_fit_the_pool_is_refused(num_prompt, max_tokens, named):
    engine = new_engine(checkpoint("llama"), num_blocks=4)
    prompt = [1] * num_prompt
    with pytest.raises(PagedError, match=rf"{named}.*KV cache of 64 tokens; raise num_blocks"):
        engine.add_request("a", prompt, SamplingParams(max_tokens=max_tokens))
    assert_all_free(engine)
    # Not even if the context ends right before its next token.
    short = new_engine(checkpoint("llama"), num_blocks=3, block_size=8, max_model_len=25)
    with pytest.raises(PagedError, match="KV cache of 24 tokens"):
        short.add_request("a", [1] * 25)
    # One token less fits.
    params = SamplingParams(max_tokens=max_tokens and max(1, max_tokens - 1), temperature=0.0)
    assert generate(engine, prompt[:64], params)[0].finished


@pytest.mark.parametrize(
    "params",
    [
        [GREEDY],
        [GREEDY] * 3,
        [],
        [GREEDY, {"temperature": 0}],
        {"temperature": 0.0},
        5,
        "greedy",
    ],
    ids=["one-for-two", "three-for-two", "none-for-two", "dict-in-list", "dict", "number", "text"],
)
def test_wrong_sampling_params_are_refused(tiny, params):
    with pytest.raises(PagedError, match="sampling_params"):
        generate(tiny, PROMPTS[:2], params)


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, 0, "greedy"], ids=str)
def test_add_request_takes_sampling_params_only(tiny, params):
    with pytest.raises(PagedError, match="sampling_params"):
        tiny.add_request("a", PROMPTS[0], params)


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 10**20])
def test_stop_token_ids_outside_the_vocabulary_are_refused(tiny, token_id):
    with pytest.raises(PagedError, match=f"stop_token_ids.*{token_id}"):
        generate(tiny, PROMPTS[0], SamplingParams(stop_token_ids=[3, token_id]))


def test_duplicate_and_wrong_request_ids_are_refused(tiny):
    tiny.add_request("a", PROMPTS[0], GREEDY)
    with pytest.raises(PagedError, match="'a' is in use"):
        tiny.add_request("a", PROMPTS[1], GREEDY)
    for request_id in (7, None, ["a"]):
        with pytest.raises(PagedError, match="request_id must be a string"):
            tiny.add_request(request_id, PROMPTS[1], GREEDY)
    assert list(run_all(tiny)) == ["a"]


def test_generate_avoids_the_ids_that_others_took(tiny, greedy_tokens):
    start = int(generate(tiny, PROMPTS[2], GREEDY)[0].request_id)
    tiny.add_request(str(start + 1), PROMPTS[0], GREEDY)
    assert tokens_of(generate(tiny, PROMPTS)) == greedy_tokens
    run_all(tiny)


def test_extreme_but_legal_sampling_values_do_not_stop_the_engine(tiny, greedy_tokens):
    extremes = [
        SamplingParams(temperature=1e300, max_tokens=12, top_p=0.5),
        SamplingParams(temperature=1e-300, max_tokens=12),
        SamplingParams(top_k=2**63 - 1, top_p=0.5, max_tokens=12),
        SamplingParams(top_p=5e-324, min_p=1.0, max_tokens=12),
    ]
    outputs = generate(tiny, [*PROMPTS, PROMPTS[0]], [*extremes, GREEDY])
    assert tokens_of(outputs)[1] == greedy_tokens[1]
    assert tokens_of(outputs)[3] == greedy_tokens[3]
    assert tokens_of(outputs)[4] == greedy_tokens[0]


def test_engine_without_a_tokenizer_says_what_needs_one(tiny):
    for prompt, params in [("text", GREEDY), (PROMPTS[0], SamplingParams(stop="a"))]:
        with pytest.raises(PagedError, match="skip_tokenizer_init"):
            generate(tiny, prompt, params)


BAD_OPTIONS: dict[str, list[Any]] = {
    "block_size": [0, 4, 12, 512, True, 16.0, "16"],
    "max_model_len": [0, -1, 513, True, 1.5],
    "max_num_seqs": [0, True],
    "max_num_batched_tokens": [0, -5, 1.5, True],
    "num_blocks": [0, -1, True, 1.5, 10**12],
    "seed": [-1, 1.5, True, 2**63],
    "dtype": ["int8", None, torch.int8],
    "kv_cache_dtype": ["int4", "fp8_e5m2", "float8_e4m3fn", "", True, None, torch.int8],
    "device": ["tpu", "cuda:99", "nonsense:x", "meta", 0],
    "attention_backend": ["flash"],
    "cpu_memory_utilization": [0.0, 1.5, math.nan, math.inf, True],
    "gpu_memory_utilization": [0, -1, math.nan, True],
    "skip_tokenizer_init": [1, None],
    "tokenizer": [5],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD_OPTIONS.items() for value in values],
    ids=lambda value: str(value),
)
def test_bad_engine_option_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        new_engine(checkpoint("llama"), **{name: value})


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_heads_that_a_backend_has_no_kernel_for_are_refused_at_once(tmp_path, backend):
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", head_dim=8)
    with pytest.raises(ConfigError, match=f"{backend!r} takes a head_dim from 16 to 576 .* use 'torch'"):
        new_engine(tmp_path, attention_backend=backend)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gfx1100", "'triton' takes a head_dim from 16 to 128 on .* model's is 256; use 'torch'"),
        ("sm_75", "'triton': .* made for sm_80, .*, this is sm_75; use the backend 'torch'"),
    ],
)
def test_gpu_without_kernels_for_a_model_is_refused_at_once(tmp_path, monkeypatch, target, message):
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", head_dim=256)
    monkeypatch.setattr("paged.kernels.gpu.backend.current_target", lambda: target)
    with pytest.raises(ConfigError, match=message):
        new_engine(tmp_path, attention_backend="triton")


def test_unknown_engine_option_is_refused_with_the_one_meant():
    with pytest.raises(UnknownArgumentError, match="'max_model_length'; did you mean 'max_model_len'"):
        LLMEngine(str(checkpoint("llama")), max_model_length=5)


@pytest.mark.parametrize("model", ["", None, 5])
def test_model_that_is_no_name_is_refused(model):
    with pytest.raises(ConfigError, match="model must be"):
        LLMEngine(model)


def test_kv_cache_is_sized_from_memory_and_no_larger_than_useful():
    engine = LLMEngine(str(checkpoint("llama")), device="cpu", max_num_seqs=3, skip_tokenizer_init=True)
    assert engine.block_manager.pool.num_blocks == 3 * 512 // 16
    with pytest.raises(ConfigError, match=r"no memory for a KV cache.*raise cpu_memory_utilization"):
        new_engine(checkpoint("llama"), num_blocks=None, cpu_memory_utilization=1e-9)


# --- a model that overflows


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(seed=1, max_tokens=12), SamplingParams(seed=1, top_k=5, max_tokens=12)],
    ids=["greedy", "random", "top_k"],
)
def test_logits_that_are_not_finite_end_a_request_with_an_error_and_no_text(value, params, greedy_tokens):
    engine = new_engine(checkpoint("llama"))
    poisoned = next(i for i in range(VOCAB_SIZE) if all(i not in ids for ids in PROMPTS + greedy_tokens))
    engine.runner.model.embedding.form.weight[poisoned] = value
    for _ in range(2):  # again, in the blocks that held the NaN
        bad, good = generate(engine, [[*PROMPTS[0], poisoned, 3], PROMPTS[1]], [params, GREEDY])
        assert bad.finished
        assert (bad.outputs[0].finish_reason, bad.outputs[0].text, bad.outputs[0].token_ids) == (
            "error",
            "",
            [],
        )
        assert "not finite" in bad.outputs[0].stop_reason
        assert good.outputs[0].token_ids == greedy_tokens[1]
        assert_all_free(engine)


def test_damaged_head_gives_errors_and_never_text():
    engine = new_engine("demo", skip_tokenizer_init=False, num_blocks=16)
    engine.runner.model.norm.weight.fill_(math.nan)
    engine.add_request("a", DEMO_PROMPT, with_stop("x"))
    (output,) = run_all(engine)["a"]
    assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("error", "")
    assert_all_free(engine)
