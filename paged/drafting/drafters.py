"""The drafter that a speculative_config names."""

from __future__ import annotations

from ..speculative_config import SpeculativeConfig
from .drafter import Drafter
from .ngram import NgramDrafter
from .suffix import SuffixDrafter


def new_drafter(config: SpeculativeConfig) -> Drafter:
    """Make the drafter that the config names."""
    if config.method == "suffix":
        return SuffixDrafter(config.prompt_lookup_min)
    return NgramDrafter(config.prompt_lookup_min, config.longest_match)
