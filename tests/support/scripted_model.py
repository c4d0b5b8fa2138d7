"""A model that says given texts: its logits depend on the position alone.

The template pads the prompt to the position where a script begins; "#2" in the last message of the user is
the third script. Special tokens in a script are tokens; a text in braces, {<|end|>}, is spelled by others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FIRST = 64  # the length of the first prompt
HEAD = 64  # of an attention head; the size of the model is a multiple
_SPELLED = re.compile(r"\{(<[^{}]*>)\}")
TEMPLATE = (
    "{%- set ns = namespace(k=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set words = (m.content | string).split('#') %}"
    "{%- if words | length > 1 %}{%- set ns.k = words[1].split(' ')[0] | int %}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{{ '<tools>' if tools else '<pad>' }}{{ '<pad>' * (STARTS[ns.k] - 1) }}"
)


def scripted_model(
    directory: Path, scripts: Sequence[str], special: Sequence[str], comment: str = ""
) -> None:
    """Write a checkpoint that says the scripts, followed by <eos> unless they end with a special token.

    comment: for the template, which tells the chat format.
    """
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<eos>", "<pad>", "<tools>", *special]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = tokenizer.token_to_id("<eos>")
    tokens: dict[int, int] = {}  # by the position of the token before
    starts = []
    at = FIRST
    for script in scripts:
        starts.append(at)
        ids = _ids(tokenizer, script)
        ids += [] if ids[-1] in map(tokenizer.token_to_id, special) else [eos]
        tokens |= {at - 1 + i: token_id for i, token_id in enumerate(ids)}
        at += len(ids) + 8
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    template = TEMPLATE.replace("STARTS", json.dumps(starts)) + f"{{# {comment} #}}"
    (directory / "chat_template.jinja").write_text(template)
    _model(tokens, -(-at // HEAD) * HEAD, tokenizer.get_vocab_size(), eos).save_pretrained(directory)


def _alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _ids(tokenizer: Tokenizer, script: str) -> list[int]:
    """Return the tokens of a script."""
    ids: list[int] = []
    for i, piece in enumerate(_SPELLED.split(script)):
        parts = [piece] if i % 2 == 0 else [*piece]
        ids += [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False).ids]
    return ids


def _model(tokens: dict[int, int], size: int, vocab_size: int, eos: int) -> transformers.GPT2LMHeadModel:
    """Return a model whose hidden state is the position, one-hot, and whose head has the token of each."""
    config = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_positions=size,
        n_embd=size,
        n_layer=1,
        n_head=size // HEAD,
        n_inner=16,
        eos_token_id=eos,
        tie_word_embeddings=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(size))
        model.transformer.ln_f.weight.fill_(1)
        for layer in model.transformer.h:
            layer.ln_1.weight.fill_(1)
            layer.ln_2.weight.fill_(1)
        for position, token_id in tokens.items():
            model.lm_head.weight[token_id, position] = 1
    return model
