"""No parameter is ignored: changing any field of SamplingParams alone changes the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from paged import LLMEngine, RequestOutput, SamplingParams
from tests.support.checkpoints import new_engine
from tests.support.parameter_changes import BASE, CHANGES, PROMPT


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    speculation = {"method": "ngram", "adaptive": False}
    options = {"scheduling_policy": "priority", "max_num_seqs": 4, "speculative_config": speculation}
    return new_engine("demo", skip_tokenizer_init=False, **options)


def observed(engine: LLMEngine, params: SamplingParams) -> Any:
    """Return everything that is visible of a request that arrives after a neighbour."""
    engine.reset_prefix_cache()
    engine.generate(
        [PROMPT], SamplingParams(max_tokens=1), use_tqdm=False
    )  # so that the prefix cache has something
    # It fills the engine; only a lower priority number precedes it.
    neighbour = SamplingParams(max_tokens=9, ignore_eos=True, n=4, seed=0)
    engine.add_request("neighbour", "x", neighbour)
    engine.step()
    engine.add_request("own", PROMPT, params)
    steps: list[tuple[str, Any]] = []
    while engine.has_unfinished_requests():
        steps += [(output.request_id, _seen(output)) for output in engine.step()]
    order = [request_id for request_id, _ in steps]
    return [seen for request_id, seen in steps if request_id == "own"], order


def _seen(output: RequestOutput) -> Any:
    return output.outputs, output.finished, output.prompt_logprobs, output.num_cached_tokens


def test_every_field_has_a_case():
    assert CHANGES.keys() == {field.name for field in fields(SamplingParams)}


@pytest.fixture(scope="module")
def unchanged(engine) -> Callable[[dict[str, Any]], Any]:
    """Return the output before the change; many fields share one."""
    known: dict[str, Any] = {}

    def look(default: dict[str, Any]) -> Any:
        if repr(default) not in known:
            seen = known[repr(default)] = observed(engine, SamplingParams(**default))
            assert seen == observed(engine, SamplingParams(**default)), "not reproducible"
        return known[repr(default)]

    return look


@pytest.mark.parametrize("name", CHANGES)
def test_no_parameter_is_ignored(engine, unchanged, name):
    value, common = CHANGES[name]
    default = {**BASE, **common}
    before = unchanged(default)
    assert before != observed(engine, SamplingParams(**{**default, name: value}))
