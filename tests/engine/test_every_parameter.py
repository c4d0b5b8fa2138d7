"""No parameter is ignored: changing any field of SamplingParams alone changes the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from paged import LLMEngine, RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputsParams
from tests.support.checkpoints import new_engine

PROMPT = "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n"
EOS = 0
# Common to all requests, chosen so that a change of one token shows.
BASE: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 24, "ignore_eos": True}


def _never(_tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Allow only token 7."""
    return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([7]), 0.0)


# For each field: its changed value, and the other parameters of both requests.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "n": (2, {}),
    "best_of": (4, {"logprobs": 0, "output_kind": RequestOutputKind.FINAL_ONLY}),
    "temperature": (0.0, {}),
    "top_p": (0.05, {}),
    "top_k": (1, {}),
    "min_p": (0.9, {}),
    "typical_p": (0.05, {}),
    "top_n_sigma": (0.1, {}),
    "seed": (4, {}),
    "presence_penalty": (2.0, {"temperature": 0.0}),
    "frequency_penalty": (2.0, {"temperature": 0.0}),
    "repetition_penalty": (3.0, {"temperature": 0.0}),
    "dry_multiplier": (9.0, {"temperature": 0.0, "max_tokens": 60}),
    "dry_base": (4.0, {"temperature": 0.0, "max_tokens": 60, "dry_multiplier": 0.5}),
    "dry_allowed_length": (9, {"temperature": 0.0, "max_tokens": 60, "dry_multiplier": 9.0}),
    "dry_sequence_breakers": (
        ("self", "path", "def"),
        {"temperature": 0.0, "max_tokens": 60, "dry_multiplier": 9.0},
    ),
    "dry_penalty_last_n": (0, {"temperature": 0.0, "max_tokens": 60, "dry_multiplier": 9.0}),
    "logit_bias": ({7: 100.0}, {}),
    "allowed_token_ids": ([7, 8], {}),
    "bad_words": (["install", "command"], {"temperature": 0.0}),
    "min_tokens": (9, {"stop": ["e"]}),
    "max_tokens": (5, {}),
    "stop": ("e", {}),
    "stop_token_ids": ([7], {"logit_bias": {7: 100.0}}),
    "include_stop_str_in_output": (True, {"stop": "e"}),
    "ignore_eos": (False, {"logit_bias": {EOS: 100.0}}),
    "logprobs": (2, {}),
    "prompt_logprobs": (2, {}),
    "detokenize": (False, {}),
    "skip_special_tokens": (False, {"allowed_token_ids": [EOS]}),
    "spaces_between_special_tokens": (False, {"allowed_token_ids": [EOS], "skip_special_tokens": False}),
    "output_kind": (RequestOutputKind.DELTA, {}),
    "priority": (-1, {}),
    "timeout_s": (1e-9, {}),
    "cache_salt": ("salt", {}),
    "logits_processors": ([_never], {}),
    "structured_outputs": (StructuredOutputsParams(choice=["yes", "no"]), {"ignore_eos": False}),
}


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    options = {"scheduling_policy": "priority", "max_num_seqs": 4}
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
