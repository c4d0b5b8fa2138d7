"""Find the draft model that a speculative_config names, and check that it has the tokens of the engine."""

from __future__ import annotations

from ..architectures.config import ModelConfig
from ..architectures.hf_config import read_config
from ..base.errors import ConfigError
from ..checkpoints.model_directory import resolve
from ..options.config import EngineConfig
from ..runner.draft_model import DraftCheckpoint, naming_draft_model
from ..text.tokenizer import Tokenizer


def find_draft_model(
    config: EngineConfig, target: ModelConfig, tokenizer: Tokenizer | None
) -> DraftCheckpoint | None:
    """Return the checkpoint of the draft model; None if there is none.

    target, tokenizer: config and tokenizer of the model to draft for. Without a tokenizer, only the sizes of
        the vocabularies are compared.

    Raises ConfigError for a draft model that has other tokens or makes embeddings, and CheckpointError or
    UnsupportedModelError for a model that cannot be read. No weights are read.
    """
    speculation = config.speculation
    if speculation is None or speculation.model is None:
        return None
    with naming_draft_model():
        directory = resolve(speculation.model, speculation.revision)
        draft = read_config(directory)
        if (directory / "modules.json").exists():
            raise ConfigError(
                f"{speculation.model} is a model for embeddings, as its modules.json says; give one that "
                "generates text"
            )
        if tokenizer is None:
            if draft.vocab_size != target.vocab_size:
                raise ConfigError(
                    f"{speculation.model} has {draft.vocab_size} tokens, and {config.model} "
                    f"{target.vocab_size}; give a model with the same tokenizer"
                )
        elif difference := _difference(tokenizer, Tokenizer(directory)):
            raise ConfigError(
                f"{speculation.model} has another tokenizer than {config.model}: {difference}; give a model "
                "with the same one"
            )
    return DraftCheckpoint(directory, draft)


def _difference(tokenizer: Tokenizer, other: Tokenizer) -> str:
    """Describe how the tokens of another tokenizer differ from a tokenizer's; "" if they are equal."""
    if len(tokenizer) != len(other):
        return f"it has {len(other):,} tokens, not {len(tokenizer):,}"
    ours = tokenizer.vocabulary
    theirs = other.vocabulary
    if ours != theirs:
        token = min(ours.items() ^ theirs.items(), key=lambda entry: (entry[1], entry[0]))[0]
        return f"token {token!r} is {theirs.get(token, 'missing')}, not {ours.get(token, 'missing')}"
    if tokenizer.special_token_ids != other.special_token_ids:
        token_id = min(tokenizer.special_token_ids ^ other.special_token_ids)
        return f"token {token_id} is special in one of them only"
    return ""
