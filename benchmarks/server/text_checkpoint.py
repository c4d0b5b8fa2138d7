"""A checkpoint of `benchmarks.common` with a tokenizer, so that text can be served."""

from __future__ import annotations

import json
import random
from pathlib import Path

from benchmarks.common import CHECKPOINTS, SHAPES, checkpoint

TEMPLATE = """{% for message in messages %}<|{{ message['role'] }}|>
{{ message['content'] }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


def text_checkpoint(name: str) -> str:
    """Return a directory with the weights of a shape, and a tokenizer that has as many tokens.

    The tokens are learned from random words. Other names are those of `checkpoint`.
    """
    weights = Path(checkpoint(name))
    if name not in SHAPES:
        return str(weights)
    directory = CHECKPOINTS / f"{name}-text"
    if (directory / "tokenizer_config.json").exists():
        return str(directory)
    directory.mkdir(exist_ok=True)
    for file in weights.iterdir():
        link = directory / file.name
        if not link.exists():
            link.symlink_to(file)
    _write_tokenizer(directory, SHAPES[name]["vocab_size"])
    return str(directory)


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(vocab_size)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((" ".join(words[i : i + 100]) for i in range(0, len(words), 100)), trainer)
    assert tokenizer.get_vocab_size() == vocab_size, tokenizer.get_vocab_size()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
