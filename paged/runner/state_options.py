"""The options that models with states do not support. Others do not import it."""

from __future__ import annotations

from ..base.errors import ConfigError
from ..options.config import EngineConfig


def check_options(config: EngineConfig, architecture: str, *, is_draft: bool) -> None:
    """Raise ConfigError for an option that a model with recurrent states does not support."""
    if config.enable_prefix_caching:
        raise ConfigError(
            f"enable_prefix_caching True is not supported for {architecture}, whose layers keep states: "
            "leave it out, or give False"
        )
    if config.speculation is not None:
        raise ConfigError(
            f"speculative_config is not supported for {architecture}, whose layers keep states, which cannot "
            "forget a wrong guess: leave it out"
        )
    if is_draft:
        raise ConfigError(
            f"the draft model is a {architecture}, whose layers keep states, which cannot forget a wrong "
            "guess; take a model without states, or {'method': 'ngram'}"
        )
