"""Options of models with states, and those that such models do not support. Others do not import it."""

from __future__ import annotations

from ..architectures.config import ModelConfig
from ..base.errors import ConfigError
from ..options.config import EngineConfig

# A gap between snapshots that takes as long as this to compute is worth one more.
GAP_S = 0.2


def check_options(config: EngineConfig, model: ModelConfig, *, is_draft: bool) -> None:
    """Raise ConfigError for options that do not go with states, or that only go with states."""
    architecture = model.architecture
    if not model.states:
        name = "state_interval" if config.state_snapshots is None else "state_snapshots"
        raise ConfigError(
            f"{name} {getattr(config, name)} has no effect on {architecture}, whose layers keep no states: "
            "leave it out"
        )
    if config.enable_prefix_caching is False and config.state_snapshots:
        raise ConfigError(
            f"state_snapshots {config.state_snapshots} are kept for the prefix cache, and there is none with "
            "enable_prefix_caching False: omit one of both"
        )
    if config.enable_prefix_caching and config.state_snapshots == 0:
        raise ConfigError(
            f"enable_prefix_caching True needs snapshots of the states of {architecture}, and "
            "state_snapshots is 0: omit one of both"
        )
    if config.state_interval is not None and (
        config.enable_prefix_caching is False or config.state_snapshots == 0
    ):
        absent = "state_snapshots 0" if config.state_snapshots == 0 else "enable_prefix_caching False"
        raise ConfigError(
            f"state_interval {config.state_interval} says where snapshots are left for the prefix cache, and "
            f"there is none with {absent}: omit one of both"
        )
    if is_draft:
        raise ConfigError(
            f"the draft model is a {architecture}, whose layers keep states: its guesses cannot be taken "
            "back, as K and V in blocks can; take a model without states, or {'method': 'ngram'}"
        )


def interval_of(given: int | None, block_size: int, step: int, tokens_per_s: float, size: float) -> int:
    """Return the number of tokens between two snapshots of a prompt, in whole blocks.

    By default the interval is so long that computing its tokens takes GAP_S. It is at least a step of the
    largest size, and so long that K and V of its tokens take as much memory as one state.

    step: maximum number of tokens of a request in a step.
    tokens_per_s: a rough estimate, as in `swap_pays`.
    size: the number of tokens whose K and V take as much memory as a state.
    """
    # In whole steps, so that prompts are not computed in more of them for this.
    found = given or -(-int(max(GAP_S * tokens_per_s, size, 1)) // step) * step
    return -(-found // block_size) * block_size
