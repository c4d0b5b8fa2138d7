"""Make the executor of a model that is divided among ranks, which are started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..architectures.config import ModelConfig
from ..base.errors import DivisionError
from ..options.config import EngineConfig
from ..runner.draft_model import DraftCheckpoint
from ..runner.model_runner import ModelRunner


def new_executor(
    config: EngineConfig, model_config: ModelConfig, directory: Path, draft: DraftCheckpoint | None
) -> ModelRunner:
    """Load a model, divided among processes as the options demand. `close` ends these processes.

    Raises DivisionError if the options do not suit the model, ResourceError if they do not suit this machine,
    and RankError if a process ends, does not arrive, or does not match the others.
    """
    from .driver import DriverRunner
    from .facts import cpu_features, facts_of
    from .layout import RankLayout
    from .place import share_of
    from .supervision import Ranks

    if draft is not None:
        raise DivisionError(
            f"speculative_config with a draft model is for one process, and there are {config.num_ranks} of "
            "the model; method 'ngram', 'suffix' or 'grammar' goes with several"
        )
    layout = RankLayout.of(config, model_config)
    ranks = Ranks(config, layout, directory)
    with ranks.starting():
        membership = ranks.membership
        membership.agree(facts_of(config, directory))
        own = share_of(config, ranks.local_index, ranks.num_local)
        runner = DriverRunner(
            own,
            model_config,
            directory,
            layout=layout,
            transport=ranks.transport,
            peers=membership,
            supervision=ranks,
        )
        ranks.begin(membership.tell_figures(runner.kv_cache.num_bytes, cpu_features()))
    return runner


@contextmanager
def starting_together(config: EngineConfig) -> Iterator[None]:
    """If this process fails before it meets torchrun's other ranks, make them raise the same error."""
    try:
        yield
    except Exception:
        from .place import Torchrun

        if (torchrun := Torchrun.of(config)) is None:
            raise
        from .membership import failing_together, torchrun_store

        with failing_together(torchrun_store(torchrun), torchrun):
            raise
