"""A draft model changes no bit of any output, and guesses what it would generate alone."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged import (
    ConfigError,
    EngineConfig,
    LLMEngine,
    PagedError,
    SamplingParams,
    StructuredOutputsParams,
)
from paged.architectures.config import DEMO
from paged.drafting.drafter import Draft, Drafter
from paged.grammars import grammar_jobs
from paged.model.weights.loading import Loader
from paged.requests.request import Request
from paged.runner.memory import Memory
from paged.sampling import structured_outputs
from paged.simulate.plan import make_plan
from tests.engine.test_speculation import CODE, demo, outputs_of, text_requests, token_requests
from tests.support.checkpoints import checkpoint, edit_json, new_engine

MOST = 4


def itself(**config: Any) -> dict[str, Any]:
    fixed = {"num_speculative_tokens": MOST, "adaptive": False}
    return {"speculative_config": {"model": "demo", **fixed, **config}}


def random_model(name: str, draft: str | None = None, **options: Any) -> LLMEngine:
    return new_engine(checkpoint(name), **itself(model=str(checkpoint(draft or name))), **options)


SWAPPED: dict[str, Any] = {"preemption_mode": "swap", "swap_space": 0.01, "watermark": 0}
# A model that drafts for itself, and one that another model drafts for.
OWN: dict[str, Callable[[], LLMEngine]] = {
    "eager in chunks": lambda: demo(enforce_eager=True, max_num_batched_tokens=32, **itself()),
    "int8 KV, swapped": lambda: demo(
        kv_cache_dtype="int8", num_blocks=24, block_size=8, **SWAPPED, **itself()
    ),
    "bfloat16, preempted": lambda: demo(
        dtype="bfloat16", num_blocks=22, block_size=8, max_num_seqs=7, **itself()
    ),
    "windows": lambda: random_model("qwen2-mixed", num_blocks=26, block_size=8, watermark=0.0),
    "longrope": lambda: random_model("phi3-longrope"),
    "dynamic rope": lambda: random_model("llama-dynamic", max_num_batched_tokens=32),
}
OTHER: dict[str, Callable[[], LLMEngine]] = {
    "quantised": lambda: demo(num_blocks=24, block_size=8, **SWAPPED, **itself(quantization="int4")),
    "windows of a draft model": lambda: random_model("llama", "qwen2-mixed"),
    "longrope of a draft model": lambda: random_model("qwen2-mixed", "phi3-longrope", num_blocks=30),
    "windows in all layers": lambda: random_model("mistral", "llama", block_size=8),
}


def is_drawn_alike(params: SamplingParams) -> bool:
    """Return whether a draft model draws by all parameters: it knows none that depend on earlier tokens."""
    allowed = {"logit_bias": None, "allowed_token_ids": None}
    return not replace(params, **allowed).edits_logits


@pytest.mark.parametrize("name", [*OWN, *OTHER])
def test_no_bit_of_an_output_changes_and_an_equal_model_guesses_all(name):
    engine = (OWN | OTHER)[name]()
    drafts = engine.scheduler.drafts
    assert drafts is not None
    engine.scheduler.drafts = None
    requests = text_requests() if engine.tokenizer is not None else token_requests()
    requests = [each for each in requests if name in OTHER or is_drawn_alike(each[1])]
    expected = outputs_of(engine, requests)
    before = engine.stats()
    engine.scheduler.drafts = drafts
    assert outputs_of(engine, requests) == expected
    assert drafts._drafter is not None, "the drafter was switched off"
    stats = engine.stats()
    assert stats.num_draft_tokens > 50
    assert name in OTHER or stats.num_accepted_tokens == stats.num_draft_tokens
    if "preempted" in name or "swapped" in name or name == "windows":
        preemptions = stats.num_recompute_preemptions + stats.num_swap_preemptions
        assert preemptions > before.num_recompute_preemptions + before.num_swap_preemptions


GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, seed=7, top_p=0.95, max_tokens=40, ignore_eos=True)


class Sometimes:
    """Has the draft model guess, and then takes other tokens for some requests: those that will be drawn."""

    def __init__(self, model: Drafter, answers: dict[float, list[int]], share: float) -> None:
        self._model = model
        self.answers = answers
        self._share = share
        self._rng = random.Random(0)
        self.guesses: list[tuple[SamplingParams, list[int], list[int]]] = []

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        drafts = self._model.propose(requests, limits)
        for i, request in enumerate(requests):
            params = request.inputs.params
            self.guesses.append((params, request.token_ids.copy(), drafts[i].tokens))
            if self._rng.random() < self._share:
                answer = self.answers[params.temperature]
                drafts[i] = Draft(answer[request.num_tokens :][: limits[i]])
        return drafts


def watched(engine: LLMEngine, requests: tuple[list[Any], list[SamplingParams]], share: float) -> Sometimes:
    """Run requests without and with guesses, a share of which are those that will be drawn."""
    drafts = engine.scheduler.drafts
    engine.scheduler.drafts = None
    plain = engine.generate(*requests, use_tqdm=False)
    answers = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain]
    by_temperature = dict(zip([p.temperature for p in requests[1]], answers, strict=True))
    drafts._drafter = found = Sometimes(drafts._drafter, by_temperature, share)
    engine.scheduler.drafts = drafts
    outputs = engine.generate(*requests, use_tqdm=False)
    assert [o.outputs for o in outputs] == [o.outputs for o in plain]
    return found


def require_equal(found: Sometimes, alone: LLMEngine) -> int:
    """Compare guesses with what the draft model generates alone. Return how many would be accepted."""
    num_accepted = 0
    for params, tokens, guesses in found.guesses:
        (own,) = alone.generate([tokens], replace(params, max_tokens=len(guesses)), use_tqdm=False)
        assert [*own.outputs[0].token_ids] == guesses
        right = found.answers[params.temperature][len(tokens) :]
        num_accepted += next((i for i, guess in enumerate(guesses) if right[i] != guess), len(guesses))
    return num_accepted


def test_the_share_of_accepted_guesses_follows_from_both_models_logits():
    engine = demo(**itself(quantization="int4"))
    found = watched(engine, ([CODE, CODE + "x"], [GREEDY, DRAWN]), 0.0)
    num_accepted = require_equal(found, demo(quantization="int4"))
    stats = engine.stats()
    assert stats.num_draft_tokens == sum(len(guesses) for _, _, guesses in found.guesses)
    assert stats.num_accepted_tokens == num_accepted
    assert 0.3 < num_accepted / stats.num_draft_tokens < 1


def test_what_a_grammar_forces_comes_before_the_models_guesses(monkeypatch):
    # Else a busy machine has late masks, for which the model guesses.
    monkeypatch.setattr(grammar_jobs, "SLOW_S", 60.0)
    monkeypatch.setattr(structured_outputs, "ASKED_S", 60.0)
    engine = demo(**itself())
    text = "zebra-42: quokkas, 17 axolotls"
    params = replace(GREEDY, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex=text))
    (output,) = engine.generate([CODE], params, use_tqdm=False)
    assert output.outputs[0].text == text
    metrics = output.metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens
    assert metrics.num_accepted_tokens > 0.3 * len(output.outputs[0].token_ids)


def test_guesses_do_not_depend_on_those_that_others_made():
    engine = random_model("llama", "qwen2")
    found = watched(engine, ([[5, 6, 7] * 5, [*range(40)]], [GREEDY, DRAWN]), 0.5)
    require_equal(found, new_engine(checkpoint("qwen2")))


def computed_by(engine: LLMEngine) -> list[int]:
    """Return a list that gets how many tokens each pass of the draft model computes."""
    draft_model = engine.runner.draft_model
    counts: list[int] = []
    put = draft_model._batches.put

    def watched(part: Any, upload: Any) -> Any:
        counts.append(sum(part.counts))
        return put(part, upload)

    draft_model._batches.put = watched
    return counts


def test_cached_and_saved_prefixes_have_their_kv(tmp_path):
    """A prompt is computed once, in chunks, and not again where its blocks hold the draft model's K and V."""
    engine = demo(block_size=8, max_num_batched_tokens=32, **itself())
    prompt = engine.tokenizer.encode(CODE * 4)
    assert len(prompt) > 80
    counts = computed_by(engine)
    (first,) = engine.generate([prompt], GREEDY, use_tqdm=False)
    assert max(counts) == 32
    assert sum(counts) >= len(prompt)
    counts.clear()
    engine.generate([prompt], GREEDY, use_tqdm=False)
    assert max(counts) <= 8 + 1
    engine.save_prefix(tmp_path / "prefix")
    counts.clear()
    other = demo(block_size=8, max_num_batched_tokens=32, **itself())
    other.load_prefix(tmp_path / "prefix")
    counts = computed_by(other)
    (found,) = other.generate([prompt], GREEDY, use_tqdm=False)
    assert found.num_cached_tokens > 64
    assert max(counts) <= 8 + 1
    assert found.outputs == first.outputs
    stats = other.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
    # Other engines load what they need of the file.
    assert demo(block_size=8).load_prefix(tmp_path / "prefix") > 8
    quantised = demo(block_size=8, **itself(quantization="int8"))
    assert quantised.load_prefix(tmp_path / "prefix") > 8
    assert not quantised.block_manager.pool.drafted


def padded(folder: Path, num_more: int) -> Path:
    """Copy the demo with more rows in its table of tokens than there are tokens."""
    shutil.copytree(DEMO, folder)
    weights = load_file(folder / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([table, table[:num_more]])
    save_file(weights, folder / "model.safetensors")
    edit_json(folder / "config.json", vocab_size=len(table) + num_more)
    return folder


def test_tables_of_tokens_may_be_padded_to_other_sizes(tmp_path):
    larger = padded(tmp_path / "larger", 8)
    engine = demo(**itself(model=str(larger)))
    engine.generate([CODE], DRAWN, use_tqdm=False)
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
    engine = new_engine(str(larger), skip_tokenizer_init=False, **itself())
    engine.generate([CODE], GREEDY, use_tqdm=False)
    assert engine.scheduler.drafts._drafter is not None


def refused(tmp_path: Path, what: str) -> dict[str, Any]:
    """Return a speculative_config that is refused."""
    copy = tmp_path / "copy"
    if what in ("tokens", "special", "embeddings", "damaged"):
        shutil.copytree(DEMO, copy)
    if what in ("tokens", "special"):
        file = copy / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        vocab = tokenizer["model"]["vocab"]
        if what == "tokens":
            first, second = [token for token in vocab if vocab[token] in (1000, 1001)]
            vocab[first], vocab[second] = vocab[second], vocab[first]
        else:
            name = next(token for token in vocab if vocab[token] == 1000)
            tokenizer["added_tokens"] += [{**tokenizer["added_tokens"][0], "id": 1000, "content": name}]
        file.write_text(json.dumps(tokenizer))
    if what == "embeddings":
        (copy / "modules.json").write_text("[]")
    if what == "damaged":
        edit_json(copy / "config.json", num_hidden_layers=99)
    if what == "nowhere":
        copy = tmp_path / "nowhere" / "x" / "y"
    return {"model": str(checkpoint("llama") if what == "sizes" else copy)}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nowhere", "no such directory or GGUF file"),
        ("tokens", "has another tokenizer than demo: token "),
        ("special", "is special in one of them only"),
        ("embeddings", "is a model for embeddings, as its modules.json says"),
        ("damaged", "layers"),
        ("sizes", "has 211 tokens, and demo 4096; give a model with the same tokenizer"),
    ],
)
def test_a_model_that_cannot_draft_is_refused_before_weights_are_read(tmp_path, monkeypatch, what, message):
    monkeypatch.setattr(Loader, "__getattribute__", None)  # no weight can be read
    with pytest.raises(PagedError) as error:
        LLMEngine("demo", speculative_config=refused(tmp_path, what), skip_tokenizer_init=what == "sizes")
    assert str(error.value).startswith("speculative_config['model']: ")
    assert message in str(error.value)


def test_a_model_that_does_not_fit_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("paged.runner.footprint.Memory.of", lambda *_: Memory(10 * 2**20, 10 * 2**20))
    monkeypatch.setattr("paged.runner.part_runner.load_model", None)
    with pytest.raises(ConfigError, match=r"those of the draft model .*demo included: .*draft model 0.01"):
        demo(**itself())


def test_memory_of_the_draft_model_is_accounted_for():
    engine = demo(**itself(), dtype="bfloat16")
    alone = demo(dtype="bfloat16")
    sizes = engine.runner.sizes
    assert sizes.block_bytes == 2 * alone.runner.sizes.block_bytes
    assert engine.runner.kv_cache.num_bytes == 512 * sizes.block_bytes
    assert "drafts by LlamaForCausalLM" in engine.describe()
    planned = make_plan(EngineConfig("demo", device="H100", **itself(quantization="int4"))).footprint
    assert planned.sizes.block_bytes == sizes.block_bytes
    assert 0 < planned.draft.num_bytes < planned.model.num_bytes
    assert planned.weight_bytes == planned.model.num_bytes + planned.draft.num_bytes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "draft_model"},
            "['model'] is missing: 'draft_model' needs a directory",
        ),
        ({"method": "ngram", "model": "demo"}, "['model'] goes with method 'draft_model', not 'ngram'"),
        ({"model": 3}, "['model'] must be a non-empty string, got 3"),
        ({"model": "demo", "quantization": "int3"}, "['quantization'] must be one of int8, int4; got 'int3'"),
        ({"model": "demo", "prompt_lookup_max": 4}, "['prompt_lookup_max'] goes with methods 'ngram' and"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(given, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig("nowhere", speculative_config=given)
    assert "speculative_config" + message in str(error.value)
