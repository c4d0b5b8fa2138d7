"""Links between the ranks of a model, and what goes over them in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from ..architectures.config import ModelConfig
from ..architectures.spec import AttentionSpec, FeedForwardSpec
from ..architectures.states import mixer_numbers
from ..base.errors import ConfigError
from ..base.validation import shown
from ..model.part import ModelPart
from .cost import DATA_SHEETS, Work, element_bytes

# Assumed: microseconds from the call that sends to the return of the one that receives, beside the bytes.
_LATENCY_US = {"nvlink": 5.0, "pcie": 10.0, "100gbe": 30.0, "10gbe": 60.0}
_NETWORK_GB_PER_S = {"100gbe": 12.5, "10gbe": 1.25}


@dataclass(frozen=True, slots=True)
class RankLink:
    """What connects two ranks, in each direction."""

    bytes_per_s: float
    latency_s: float

    @classmethod
    def of(cls, text: str | None, gpu: str) -> Self:
        """Return the link of this name, or of a text such as "12.5,200": GB/s, and microseconds.

        gpu: whose data sheet has the bandwidth of NVLink and PCIe.

        None takes NVLink where the GPU has it, else PCIe. Raises ConfigError.
        """
        sheet = DATA_SHEETS[gpu]
        rates = {"pcie": sheet.link_gb_per_s, **_NETWORK_GB_PER_S}
        if sheet.peer_gb_per_s:
            rates = {"nvlink": sheet.peer_gb_per_s, **rates}
        name = next(iter(rates)) if text is None else text.casefold()
        if name in rates:
            return cls(rates[name] * 1e9, _LATENCY_US[name] / 1e6)
        without = f"; {gpu} has no nvlink" if name == "nvlink" else ""
        try:
            gb_per_s, latency_us = map(float, name.split(","))
            is_known = 0 < gb_per_s < math.inf and 0 <= latency_us < math.inf
        except ValueError:
            is_known = False
        if not is_known:
            raise ConfigError(
                f"link must be one of {', '.join(rates)}, or GB/s and microseconds such as 12.5,200; "
                f"got {shown(text)}{without}"
            )
        return cls(gb_per_s * 1e9, latency_us / 1e6)

    def seconds(self, num_bytes: float) -> float:
        """Return how long it takes until so many bytes have come."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Exchanges:
    """What the shards of a stage send each other within a step; see docs/parallel.md.

    Each shard sends its columns to all others, so it gets those that it lacks. All wait for each other.
    """

    def __init__(self, model: ModelConfig, part: ModelPart, link: RankLink) -> None:
        self._link = link
        self._num = 0
        self._columns = 0.0  # that a shard gets of each token
        self._sampled_columns = 0.0  # of each sampled one
        self._element_bytes = element_bytes(model)
        if part.shard.is_whole:
            return
        lacking = 1 - 1 / part.shard.count
        hidden = model.hidden_size
        for index in part.layers:
            layer = model.layers[index]
            assert isinstance(layer.feed_forward, FeedForwardSpec), "experts are not divided"
            _, attended = mixer_numbers(layer)
            self._add(*(lacking * each for each in (attended, hidden, layer.feed_forward.size, hidden)))
            if layer.attention is not None and layer.attention.qk_norm == "projection":
                self._add(lacking * _normed_columns(layer.attention, part))
            if model.layer_inputs is not None:
                self._add(lacking * model.layer_inputs.size, lacking * hidden)
        if part.is_first:  # each shard sends a row for all tokens, though one of them has the right one
            self._add((part.shard.count - 1) * hidden)
            if model.layer_inputs is not None:
                columns = model.layer_inputs.size * model.num_layers
                self._add((part.shard.count - 1) * columns, lacking * columns)
        if part.is_last:
            self._num += 1
            self._sampled_columns = (part.shard.count - 1) * len(part.shard.tokens(model.vocab_size))

    def _add(self, *columns: float) -> None:
        self._num += len(columns)
        self._columns += sum(columns)

    def seconds(self, work: Work) -> float:
        """Return how long the exchanges of a step take."""
        if not self._num:
            return 0.0
        numbers = self._columns * work.num_tokens + self._sampled_columns * work.num_sampled
        return self._num * self._link.latency_s + numbers * self._element_bytes / self._link.bytes_per_s


def _normed_columns(attention: AttentionSpec, part: ModelPart) -> int:
    """Return the columns of Q and K of all shards, several of which may have the same KV head."""
    own = part.shard.attention(attention)
    return part.shard.count * (own.num_heads + own.kv.num_kv_heads) * own.kv.key_dim
