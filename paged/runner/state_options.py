"""The options that models with states do not support. Others do not import it."""

from __future__ import annotations

from ..architectures.config import ModelConfig
from ..base.errors import ConfigError
from ..options.config import EngineConfig

# The kinds of states whose kernels apply a run of drafts once it is known which were right.
KINDS_WITH_RUNS = {"conv", "delta"}


def check_options(config: EngineConfig, model: ModelConfig, *, is_draft: bool) -> None:
    """Raise ConfigError for an option that a model with recurrent states does not support."""
    architecture = model.architecture
    kinds = {spec.kind for spec in model.states.values()}
    if config.enable_prefix_caching:
        raise ConfigError(
            f"enable_prefix_caching True is not supported for {architecture}, whose layers keep states: "
            "leave it out, or give False"
        )
    if config.speculation is not None and not kinds <= KINDS_WITH_RUNS:
        raise ConfigError(
            f"speculative_config is not supported for {architecture}, whose layers keep states of the kind "
            f"{', '.join(sorted(kinds - KINDS_WITH_RUNS))}; it is for those of "
            f"{' and '.join(sorted(KINDS_WITH_RUNS))}: leave it out"
        )
    if is_draft:
        raise ConfigError(
            f"the draft model is a {architecture}, whose layers keep states: its guesses cannot be taken "
            "back, as K and V in blocks can; take a model without states, or {'method': 'ngram'}"
        )
