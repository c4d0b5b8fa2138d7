"""The adapter slots of a model, as the options of its engine say."""

from __future__ import annotations

import torch

from ..model.decoder import Decoder
from ..model.lora import LoraSlots
from ..model.model import Model
from .load import on_meta
from .sizes import Sizes


def new_lora_slots(sizes: Sizes, model: Model, device: torch.device) -> LoraSlots:
    """Make the adapter slots of a model. Raises ConfigError if the model can have none."""
    assert isinstance(model, Decoder), "adapters are for decoders"
    config = sizes.config
    whole = None if sizes.part is None else on_meta(model.config, model.kernels, sizes)
    return LoraSlots(
        model,
        num_slots=config.max_loras,
        max_rank=config.max_lora_rank,
        targets=config.lora_target_modules,
        device=device,
        whole=whole,
    )
