"""A changed value of each field of SamplingParams, with parameters beside which it changes the output."""

from __future__ import annotations

from typing import Any

import torch

from paged import RequestOutputKind, SamplingParams, StructuredOutputsParams

PROMPT = "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n"
EOS = 0
# Common to all requests, chosen so that a change of one token shows.
BASE: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 24, "ignore_eos": True}


def _never(_tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Allow only token 7."""
    return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([7], device=logits.device), 0.0)


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
    "repetition_penalty_last_n": (2, {"temperature": 0.0, "repetition_penalty": 3.0}),
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
    "no_stop_within": (("", "never"), {"stop": "e"}),
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
    "num_speculative_tokens": (0, {"temperature": 0.0, "max_tokens": 60}),
    "structured_outputs": (StructuredOutputsParams(choice=["yes", "no"]), {"ignore_eos": False}),
}


def changed_params() -> dict[str, SamplingParams]:
    """Return the parameters with each field changed."""
    return {
        name: SamplingParams(**{**BASE, **common, name: value}) for name, (value, common) in CHANGES.items()
    }
