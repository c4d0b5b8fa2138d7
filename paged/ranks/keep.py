"""Pack the parts of a model's ranks, one after the other, so that the ranks find them packed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..checkpoints.model_directory import resolve
from ..device.devices import resolve_device, resolve_dtype, target_of
from ..images.reading import read_seeing
from ..model.part import ModelPart, Shard
from ..options.config import EngineConfig
from ..runner.load import load_model
from ..runner.sizes import Sizes
from .layout import RankLayout


def keep_parts(config: EngineConfig) -> Iterator[Path | None]:
    """Store the packed weights of each rank. Yield their file; None if they are not stored.

    Raises what loading the weights raises.
    """
    directory = resolve(config.model, config.revision)
    model = read_seeing(config, directory)
    layout = RankLayout.of(config, model)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, model.dtype, device, model.exceeds_float16)
    for rank in range(layout.num_ranks):
        shard = Shard(layout.shard_of(rank), layout.num_shards)
        part = ModelPart(layout.layers[layout.stage_of(rank)], model.num_layers, shard)
        sizes = Sizes(config, model, device.type, dtype, target_of(device), part=part)
        loaded = load_model(sizes, model.for_context(sizes.max_model_len), device, directory)
        kept = loaded.kept_weights
        yield None if kept is None else kept.wait()
