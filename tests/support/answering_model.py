"""Tiny models of any family that give certain answers: random layers, and a head that is fitted to them.

All layers take part: the head finds the next token of an answer in the hidden state behind the last one. A
layer that computes something else, or a state that was lost, gives another answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AddedToken, PreTrainedConfig

from paged.architectures.config import DEMO
from tests.support.checkpoints import CONFIGS, random_model

SIZE = 256  # of hidden states: at least the tokens of all answers
_MARK = re.compile(r"<\|?/?[\w]+\|?>")


def answering_model(
    directory: Path, config: str, template: str, end: str, dialogues: Sequence[dict[str, Any]]
) -> None:
    """Write a checkpoint that gives the answer of each dialogue.

    config: the name of one of CONFIGS, whose hidden states become larger.
    end: the token that ends an answer.
    dialogues: arguments of `apply_chat_template`, and the "answer" to them.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    marks = {mark: None for mark in _MARK.findall(template) if not mark.startswith(("<tools", "</tools"))}
    # Marks with bars are special tokens; those of reasoning and calls are merely added, as in Qwen 3.5.
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special="|" in mark) for mark in marks])
    tokenizer.eos_token = end
    tokenizer.chat_template = template
    model = random_model(_config(config, len(tokenizer), tokenizer.eos_token_id))
    states = []
    tokens = []
    for dialogue in dialogues:
        given = {key: value for key, value in dialogue.items() if key != "answer"}
        prompt = tokenizer.apply_chat_template(
            **given, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        answer = tokenizer.encode(dialogue["answer"] + end, add_special_tokens=False)
        states.append(_last_states(model, [*prompt, *answer])[len(prompt) - 1 : -1])
        tokens += answer
    _fit(model, torch.cat(states), torch.tensor(tokens))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _config(name: str, vocab_size: int, end: int) -> PreTrainedConfig:
    config = CONFIGS[name]()
    more = {"hidden_size": SIZE, "vocab_size": vocab_size, "eos_token_id": end, "tie_word_embeddings": False}
    if config.model_type == "granitemoehybrid":
        more["mamba_d_head"] = 2 * SIZE // config.mamba_n_heads
    return type(config)(**{**config.to_dict(), **more})


def _last_states(model: Any, ids: list[int]) -> Tensor:
    """Return the inputs of the head, [len(ids), SIZE]."""
    found: list[Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0][0]))
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    hook.remove()
    return found[0]


def _fit(model: Any, states: Tensor, tokens: Tensor) -> None:
    """Let the head have logit 8 for the next token behind each state, and 0 for the others."""
    assert len(states) <= SIZE, f"{len(states)} tokens of answers are too many"
    known, columns = tokens.unique(return_inverse=True)
    wanted = torch.nn.functional.one_hot(columns).double() * 8
    weights = torch.linalg.lstsq(states.double(), wanted).solution
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[known] = weights.T.float()
