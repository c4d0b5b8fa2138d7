"""Images in prompts: transformers' tokens and logits, and the same bits in whatever company and order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from torch import Tensor

from paged import LLMEngine, RequestError, SamplingParams, UsageError
from paged.runner.model_runner import ModelRunner
from paged.sampling.sampler import Draw
from paged.scheduler.scheduler import Scheduler
from tests.support.checkpoints import assert_all_free, new_engine
from tests.support.images import (
    FAMILIES,
    STRINGS_ALONE,
    data_url,
    picture,
    png,
    seeing,
    seeing_reference,
)

Prompt = tuple[list[int], list[Image.Image]] | tuple[list[int], list[Image.Image], dict[str, Any]]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def prompts_of(name: str) -> list[Prompt]:
    """Prompts with no image to four, at every place, twice the same, with text before, between and behind."""
    at = FAMILIES[name].ids
    red, wide, tall, grey = picture(1), picture(2, 61, 7), picture(3, 9, 40), picture(4, 33, 33, "L")
    return [
        ([5, 6, 7, 8], []),
        ([5, *at, 6, 7], [red]),
        ([*at, 9, 10, 11], [wide]),
        ([7] * 21 + at, [tall]),
        ([5, *at, *at, 6], [red, red]),
        ([20, *at, 21, 22, *at, 23, *at, 24, *at, 25], [grey, wide, tall, red]),
        ([30, *at, 31], [wide]),
    ]


def given(prompt: Prompt) -> dict[str, Any]:
    token_ids, images, *more = prompt
    data = {"multi_modal_data": {"image": images}} if images else {}
    return {"prompt_token_ids": token_ids, **data, **(more[0] if more else {})}


@contextmanager
def recorded_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, int], Tensor]]:
    """Record logits by request and by how many tokens they follow."""
    found: dict[tuple[str, int], Tensor] = {}
    sampled: list[tuple[str, int]] = []
    execute = ModelRunner.execute
    run = Draw.run

    def executing(runner: ModelRunner, schedule: Any) -> Any:
        sampled[:] = [(request.request_id, request.num_tokens) for request in schedule.sampled_requests]
        return execute(runner, schedule)

    def recording(draw: Draw, logits: Tensor, *others: Any) -> Any:
        found.update(zip(sampled, logits.clone(), strict=True))
        return run(draw, logits, *others)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "execute", executing)
        patch.setattr(Draw, "run", recording)
        yield found


class Result(NamedTuple):
    """The tokens of a prompt with its images', those that follow, and the logits of each of these."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logits: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Result) and self[:2] == other[:2] and torch.equal(self.logits, other.logits)

    __hash__ = None  # type: ignore[assignment]


def completed(
    engine: LLMEngine, prompts: Sequence[Prompt], monkeypatch: pytest.MonkeyPatch, max_tokens: int = 5
) -> list[Result]:
    """Complete all prompts at once."""
    with recorded_logits(monkeypatch) as logits:
        outputs = engine.generate([*map(given, prompts)], greedy(max_tokens), use_tqdm=False)
    assert_all_free(engine)
    results = []
    for output in outputs:
        prompt = output.prompt_token_ids
        own = [logits[output.request_id, len(prompt) + i] for i in range(max_tokens)]
        results.append(Result(prompt, output.outputs[0].token_ids, torch.stack(own)))
    return results


# Families whose towers or text models are those of others: fewer prompts are enough.
ALIKE = ("gemma4_unified", "ministral3", "qwen3_vl_moe")
BACKENDS = [*((name, "numba") for name in FAMILIES), *((name, "torch") for name in ("gemma3", "qwen3_vl"))]


@pytest.mark.parametrize(("name", "backend"), BACKENDS, ids=str)
def test_matches_transformers(name, backend, monkeypatch):
    prompts = prompts_of(name)[4:6] if name in ALIKE else prompts_of(name)
    results = completed(new_engine(seeing(name), attention_backend=backend), prompts, monkeypatch)
    for (_, images, *_), result in zip(prompts, results, strict=True):
        tokens, logits = seeing_reference(name).greedy(result.prompt_token_ids, images, 5)
        assert result.token_ids == tokens
        torch.testing.assert_close(result.logits, logits, atol=1e-4, rtol=0)
    assert len({tuple(result.token_ids) for result in results}) > len(prompts) // 2, "images do not matter"


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name not in ALIKE])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(name: str) -> list[Result]:
    """Compute each prompt by an engine of its own."""
    with pytest.MonkeyPatch.context() as patch:
        return [
            completed(new_engine(seeing(name), enable_prefix_caching=False), [prompt], patch)[0]
            for prompt in prompts_of(name)
        ]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 9},
    {"max_num_batched_tokens": 16, "block_size": 8},
    {"block_size": 8, "is_preempted": True},
    {"block_size": 8, "swap_space": 0.1, "preemption_mode": "swap", "is_preempted": True},
    {"mm_processor_cache_gb": 0, "max_num_seqs": 2, "enforce_eager": True},
    {"tower_layers": 1, "is_preempted": True},
]


@contextmanager
def preempting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Preempt a running request in every third step, wherever it is in its prompt or output; 12 in all."""
    make_room = Scheduler._make_room_for_others
    steps = iter(range(36))

    def with_victims(scheduler: Scheduler, schedule: Any) -> None:
        make_room(scheduler, schedule)
        victims = [request for request in scheduler.running if request.is_settled]
        if victims and next(steps, 0) % 3 == 2:
            scheduler.preemption.preempt(victims[-1], schedule, counts=False)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_make_room_for_others", with_victims)
        yield


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_company_chunks_and_preemption_change_no_bit(name, alone, options, monkeypatch):
    own = dict(options)
    is_preempted = own.pop("is_preempted", False)
    is_layered = own.pop("tower_layers", None) is not None
    if "max_num_batched_tokens" in own:  # at least the tokens that see each other
        own["max_num_batched_tokens"] = max(own["max_num_batched_tokens"], 70 * (name == "gemma4_large"))
    engine = new_engine(seeing(name), **own)
    if is_layered:  # as if a layer cost as much as a step
        queue = engine.scheduler.towers
        queue.costs = queue.costs._replace(linear=1e9)
    prompts = prompts_of(name)
    with preempting(monkeypatch) if is_preempted else nullcontext():
        assert completed(engine, prompts, monkeypatch) == alone
        num_computed = engine.runner.images.num_computed
        # With hits before, inside and behind images.
        assert completed(engine, prompts[::-1], monkeypatch) == alone[::-1]
    counters = engine.scheduler.counters
    assert counters.num_cached_tokens > 20
    assert (counters.num_recomputed + counters.num_swapped > 1) is is_preempted
    if is_layered:
        assert engine.runner.images.num_parts > 4
        return
    is_kept = options.get("mm_processor_cache_gb") != 0
    assert (engine.runner.images.num_computed == num_computed == 4) is is_kept


OWN_PROCESSING: dict[str, dict[str, Any]] = {
    "gemma3": {"image_mean": [0.4, 0.5, 0.6]},
    "gemma4": {"do_normalize": True, "image_std": 0.5, "resample": 0},
    "gemma4_large": {"do_rescale": False},
    "mistral3": {"size": {"longest_edge": 24}, "do_normalize": False},
    "qwen3_vl": {"size": {"shortest_edge": 1000, "longest_edge": 4000}},
}


def test_a_prompt_has_processing_of_its_own(name, alone, monkeypatch):
    """Its bits are those of an engine with these values, beside prompts without, in caches that have both."""
    own = OWN_PROCESSING[name]
    prompts = prompts_of(name)[1:5]
    expected = completed(
        new_engine(seeing(name), mm_processor_kwargs=own, enable_prefix_caching=False), prompts, monkeypatch
    )
    assert [result.token_ids for result in expected] != [result.token_ids for result in alone[1:5]]
    engine = new_engine(seeing(name), block_size=8)
    both = [each for prompt in prompts for each in (prompt, (*prompt, {"mm_processor_kwargs": own}))]
    for order in (slice(None), slice(None, None, -1)):
        results = completed(engine, both[order], monkeypatch)[order]
        assert results[::2] == alone[1:5]
        assert results[1::2] == expected
    assert engine.scheduler.counters.num_cached_tokens > 20
    assert engine.runner.images.num_computed == 6


@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_uuids_tell_images_apart(name, monkeypatch):
    """But never give a prompt the image of another: one uuid of two images is two images."""
    at = FAMILIES[name].ids
    prompts: list[Prompt] = [([5, 6, *at, *range(7, 40)], [picture(seed)]) for seed in (1, 2)]
    expected = completed(new_engine(seeing(name), enable_prefix_caching=False), prompts, monkeypatch)
    engine = new_engine(seeing(name), block_size=8)
    found = []
    for image, uuid in ((0, ["a"]), (0, "a"), (0, ["b"]), (0, [None]), (1, ["a"]), (0, ["a"])):
        before = engine.scheduler.counters.num_cached_tokens
        prompt = (*prompts[image][:2], {"multi_modal_uuids": {"image": uuid}})
        assert completed(engine, [prompt], monkeypatch) == [expected[image]]
        found.append(engine.scheduler.counters.num_cached_tokens - before)
    assert found == [0, 40, 0, 0, 0, 40]
    assert engine.runner.images.num_computed == 4


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"mm_processor_kwargs": {"unknown": 3}}, "mm_processor_kwargs: unknown 3 is not supported"),
    ({"mm_processor_kwargs": [3]}, "mm_processor_kwargs must be a dict of names and values"),
    ({"mm_processor_kwargs": {"image_std": 0}}, "mm_processor_kwargs: image_std must be at least"),
    ({"multi_modal_uuids": {"image": ["a", "b"]}}, "has 2 names, and multi_modal_data 1 images"),
    ({"multi_modal_uuids": {"image": []}}, "has 0 names, and multi_modal_data 1 images"),
    ({"multi_modal_uuids": {"image": [5]}}, r"multi_modal_uuids.image\[0\] must be a non-empty string"),
    ({"multi_modal_uuids": {"image": [""]}}, r"multi_modal_uuids.image\[0\] must be a non-empty string"),
    ({"multi_modal_uuids": {"audio": ["a"]}}, "multi_modal_uuids has audio, which is not supported"),
    ({"multi_modal_uuids": ["a"]}, "multi_modal_uuids must be a dict"),
    (
        {"multi_modal_data": {"image": [None]}, "multi_modal_uuids": {"image": ["a"]}},
        r"multi_modal_data.image\[0\] is None; each prompt brings its images",
    ),
]


@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_wrong_fields_of_prompts_are_named(name):
    reading = new_engine(seeing(name), skip_tokenizer_init=False)
    prompt = {"prompt": FAMILIES[name].written, "multi_modal_data": {"image": [picture(1)]}}
    for more, message in WRONG_FIELDS:
        with pytest.raises(RequestError, match=message):
            reading.generate({**prompt, **more}, greedy(1), use_tqdm=False)
    blind = new_engine(seeing(name), language_model_only=True, skip_tokenizer_init=False)
    for field in ({"mm_processor_kwargs": {"max_pixels": 600}}, {"multi_modal_uuids": {"image": ["a"]}}):
        with pytest.raises(
            RequestError, match=f"{next(iter(field))} is refused: language_model_only=True leaves"
        ):
            blind.generate({"prompt": "a", **field}, use_tqdm=False)
    kwargs = {"max_pixels": 320}
    (own,) = reading.generate([{**prompt, "mm_processor_kwargs": kwargs}], greedy(2), use_tqdm=False)
    for outputs in (
        reading.generate(prompt, greedy(2), use_tqdm=False, mm_processor_kwargs=kwargs),
        reading.generate([prompt], greedy(2), use_tqdm=False, mm_processor_kwargs=kwargs),
    ):
        assert outputs[0].prompt_token_ids == own.prompt_token_ids
        assert outputs[0].outputs == own.outputs
    conversation = [{"role": "user", "content": [{"type": "image_pil", "image_pil": picture(1)}]}]
    usual, small = (
        reading.chat(conversation, greedy(1), use_tqdm=False, mm_processor_kwargs=each)[0]
        for each in (None, kwargs)
    )
    assert len(usual.prompt_token_ids) > len(small.prompt_token_ids)


@pytest.mark.parametrize("name", ["gemma4_large"])
def test_an_image_that_no_step_has_room_for_is_refused(name):
    """Whose tokens see each other: it would wait for ever."""
    engine = new_engine(seeing(name), mm_processor_kwargs={"max_soft_tokens": 70})
    engine.core.factory.most_uncut = 30
    with pytest.raises(RequestError, match="tokens, which see each other and are computed in one step"):
        engine.generate(given(prompts_of(name)[1]), greedy(1), use_tqdm=False)


def test_a_fork_shares_an_image(name, alone):
    engine = new_engine(seeing(name))
    for i, prompt in enumerate(prompts_of(name)):
        engine.add_request(str(i), given(prompt), greedy(5))
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {
            output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished
        }
        for group in [*engine.core.groups.values()]:
            if group.samples[0].num_output_tokens == 2 and len(group.request_id) == 1:
                engine.fork(group.request_id, f"{group.request_id} again")
    for i, result in enumerate(alone):
        assert finished[str(i)] == finished[f"{i} again"] == result.token_ids
    assert_all_free(engine)
    assert engine.runner.images.num_computed == 4


# Texts


@pytest.fixture(scope="module")
def reading(name: str) -> LLMEngine:
    """Make an engine with a tokenizer."""
    return new_engine(seeing(name), skip_tokenizer_init=False)


def test_text_and_messages_have_the_tokens_of_ids(name, reading, tmp_path):
    """Placeholders in text are written as transformers' processor writes them; parts as the template does."""
    family = FAMILIES[name]
    wide = picture(2, 61, 7)
    text = f"Look:{family.written}and say."
    expected = reading.tokenizer.encode(seeing_reference(name).written(text, [wide]))
    whole = {"prompt": text, "multi_modal_data": {"image": wide}}
    ids = reading.tokenizer.encode(text)
    short = {"prompt_token_ids": ids, "multi_modal_data": {"image": [wide]}}
    repeated = {"prompt_token_ids": expected, "multi_modal_data": {"image": png(wide)}}
    outputs = reading.generate([whole, short, repeated], greedy(4), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [expected] * 3
    assert outputs[0].prompt == text
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    parts = [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": data_url(wide), "detail": "high"}},
        {"type": "text", "text": "and say."},
    ]
    conversation = [{"role": "user", "content": parts}]
    (output,) = reading.chat(conversation, greedy(4), use_tqdm=False)
    assert output.prompt_token_ids == reading.tokenizer.encode(
        seeing_reference(name).written(f"[user]{text}[assistant]", [wide])
    )
    assert output.prompt == f"[user]{text}[assistant]"
    (tmp_path / "x.png").write_bytes(png(wide))
    parts[1] = {"type": "image_url", "image_url": (tmp_path / "x.png").as_uri()}
    (same,) = reading.chat(conversation, greedy(4), use_tqdm=False)
    assert (same.prompt_token_ids, same.outputs) == (output.prompt_token_ids, output.outputs)


def test_a_placeholder_stands_for_a_small_image(name, reading):
    """Also where an image has one embedding, in tokens as in text; a conversation may name a file."""
    family = FAMILIES[name]
    small = picture(1, 5, 5)
    data = {"multi_modal_data": {"image": [small, small]}}
    text = f"a{family.written * 2}b"
    prompts = [{"prompt": text, **data}, {"prompt_token_ids": reading.tokenizer.encode(text), **data}]
    expected = reading.tokenizer.encode(seeing_reference(name).written(text, [small, small]))
    outputs = reading.generate(prompts, greedy(1), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [expected] * 2


def test_templates_of_strings_get_placeholders(name, reading):
    """Which users cannot write themselves."""
    written = FAMILIES[name].written
    parts = [{"type": "text", "text": f"a{written}"}, {"type": "image_pil", "image_pil": picture(1)}]
    prompt = reading.render_chat([{"role": "user", "content": parts}], chat_template=STRINGS_ALONE)
    placeholder = reading.text.images.written
    assert prompt["prompt"] == f"user: a{written}\n{placeholder}"
    assert reading.text.images.count_in(prompt["prompt"]) == 1
    (output,) = reading.generate([prompt], greedy(2), use_tqdm=False)
    assert output.prompt_token_ids.count(FAMILIES[name].marker) > 1
    ordinary = reading.tokenizer.encode("user: a<", add_special_tokens=False)
    assert output.prompt_token_ids[: len(ordinary)] == ordinary or written[0] != "<"


@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_saved_and_pinned_prefixes_know_their_images(name, tmp_path):
    """After a restart an image is found, and needs no tower; another one of its size is not."""
    at = FAMILIES[name].ids
    images = [picture(seed, 30, 20) for seed in (1, 2)]
    prompts = [([5, 6, *at, *range(7, 40)], [image]) for image in images]

    def tokens_of(engine: LLMEngine) -> tuple[list[list[int]], list[int]]:
        outputs = engine.generate([*map(given, prompts)], greedy(4), use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], [o.num_cached_tokens for o in outputs]

    expected, _ = tokens_of(new_engine(seeing(name), enable_prefix_caching=False))
    first = new_engine(seeing(name), block_size=8)
    assert first.pin_prefix(given(prompts[0])) > len(at) + 8
    with pytest.raises(UsageError, match="is pinned already"):
        first.pin_prefix(given(prompts[0]))
    with pytest.raises(UsageError, match="this prompt is not pinned; 1 others are"):
        first.unpin_prefix(given(prompts[1]))
    path = tmp_path / "saved"
    assert first.save_prefix(path, given(prompts[0])) > 4
    again = new_engine(seeing(name), block_size=8)
    assert again.load_prefix(path) > 4
    again.pin_prefix(given(prompts[0]))
    assert again.runner.images.num_computed == 0
    found, cached = tokens_of(again)
    assert found == expected
    assert cached[0] >= 40
    assert cached[1] == 0  # the image begins in the first block
    assert again.runner.images.num_computed == 1
    again.unpin_prefix(given(prompts[0]))
    assert_all_free(again)
