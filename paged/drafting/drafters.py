"""The drafter that a speculative_config names."""

from __future__ import annotations

from ..speculative_config import SpeculativeConfig
from .drafter import Drafter
from .grammar import GrammarDrafter
from .ngram import NgramDrafter
from .suffix import SuffixDrafter


def new_drafter(config: SpeculativeConfig) -> Drafter:
    """Make the drafter that the config names."""
    if config.method == "grammar":
        return GrammarDrafter()
    if config.method == "suffix":
        return GrammarDrafter(SuffixDrafter(config.prompt_lookup_min))
    return GrammarDrafter(NgramDrafter(config.prompt_lookup_min, config.longest_match))
