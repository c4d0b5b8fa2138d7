"""The drafter that a speculative_config names."""

from __future__ import annotations

from ..options.speculative_config import SpeculativeConfig
from .drafter import Drafter
from .grammar import GrammarDrafter
from .ngram import NgramDrafter
from .suffix import SuffixDrafter


def new_drafter(config: SpeculativeConfig, draft_model: Drafter | None = None) -> Drafter:
    """Make the drafter that the config names.

    draft_model: runs that of the config, if it has one.
    """
    if config.method == "draft_model":
        assert draft_model is not None, "a draft model was not loaded"
        return GrammarDrafter(draft_model)
    if config.method == "grammar":
        return GrammarDrafter()
    if config.method == "suffix":
        return GrammarDrafter(SuffixDrafter(config.prompt_lookup_min))
    return GrammarDrafter(NgramDrafter(config.prompt_lookup_min, config.longest_match))
