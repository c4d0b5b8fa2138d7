"""The plan of an engine: its memory on a device, the sequences that then fit, and its speed.

Memory comes from the config and the headers of the weights, speed from the cost model of the simulator: with
the figures of a data sheet, or with those that this machine is measured to reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from ..architectures.config import ModelConfig
from ..architectures.gguf_paths import HEADERS_ALONE
from ..architectures.hf_config import read_config
from ..base.errors import ConfigError
from ..checkpoints.model_directory import resolve_headers
from ..device.devices import resolve_device, resolve_dtype, target_of
from ..device.threads import set_threads
from ..options.config import EngineConfig
from ..runner.draft_model import naming_draft_model
from ..runner.draft_sizes import draft_sizes
from ..runner.footprint import GPU_OVERHEAD, Footprint, ways_to_fit
from ..runner.load import are_worth_keeping, new_kernels, open_model
from ..runner.memory import Memory
from ..runner.sizes import GIB, Sizes
from .cost import DATA_SHEETS, Coefficients, DataSheet, Roofline, decode_work, prompt_work, window_shares
from .fleet import FleetConfig
from .machine import Measured, measure
from .small_model import MOST_BYTES, measure_steps

# Lengths that are shown, of those up to max_model_len, and numbers of sequences.
LENGTHS = (512, 2048, 8192, 32768, 131072)
BATCHES = (1, 4, 16, 64, 256)
USUAL_LENGTH = 1024  # of the sequences and the prompt whose speed is predicted
SHORT_LENGTH = 128  # of others, where those are longer


@dataclass(frozen=True)
class PlannedDevice:
    """The device that a plan is made for.

    sheet: the data sheet of the device; None for a device of this machine, which is measured.
    """

    name: str
    device: torch.device
    target: str
    sheet: DataSheet | None = None

    @classmethod
    def of(cls, name: str) -> PlannedDevice:
        """Return the device of this name: a device of this machine, or one with a data sheet (in upper or
        lower case).

        Raises ConfigError, which lists the known devices.
        """
        known = {each.casefold(): each for each in DATA_SHEETS}
        if (own := known.get(name.casefold())) is not None:
            return cls(own, torch.device("cuda"), DATA_SHEETS[own].target, DATA_SHEETS[own])
        if name.partition(":")[0] not in ("auto", "cpu", "cuda"):
            raise ConfigError(
                f"device must be auto, cpu, cuda or cuda:N of this machine, or one of "
                f"{', '.join(DATA_SHEETS)}; got {name!r}"
            )
        device = resolve_device(name)
        return cls(str(device), device, target_of(device))

    @property
    def memory(self) -> Memory:
        """The memory of the device. On another machine's device, nothing else is assumed to run."""
        if self.sheet is None:
            return Memory.of(self.device)
        total = int(self.sheet.memory_gib * GIB)
        return Memory(total, total - GPU_OVERHEAD)


class PackedStart(NamedTuple):
    """Whether a start finds packed weights on disk, and the seconds that it saves if so.

    is_kept: whether an earlier start has stored packed weights for this model and these options. The
        checkpoint's weights are not compared.
    packing_s: the seconds that the earlier start took to pack the weights; None if no start has.
    """

    is_kept: bool
    packing_s: float | None

    @classmethod
    def of(cls, footprint: Footprint) -> Self | None:
        """Look for the packed weights of an engine on this machine. Return None if it never stores any."""
        sizes = footprint.sizes
        model = sizes.model.for_context(sizes.max_model_len)
        opened = open_model(sizes, model, footprint.device, footprint.directory, footprint.kernels)
        with opened as (_, loader):
            if not are_worth_keeping(sizes, loader):
                return None
            from ..runner.kept_weights import KeptWeights

            kept = KeptWeights.of(sizes, footprint.directory, loader, create=False)
            seconds = None if kept is None else kept.seconds_saved()
        return cls(seconds is not None, seconds)


@dataclass(frozen=True)
class EnginePlan:
    """The memory that an engine takes of a device, what fits, and the predicted speed.

    measured: the speeds that this machine reaches; None for a device with a data sheet.
    would_fit: if a request of max_model_len does not fit, options with which it does.
    start: what a start does with packed weights; None if nothing is packed, or packing takes no time.
    """

    config: EngineConfig
    place: PlannedDevice
    footprint: Footprint
    measured: Measured | None
    would_fit: tuple[str, ...]
    start: PackedStart | None = None

    @property
    def model(self) -> ModelConfig:
        """The model's config."""
        return self.footprint.sizes.model

    @property
    def cost(self) -> Roofline | Coefficients:
        """The cost model of a step."""
        return self._roofline if self.measured is None else self.measured.coefficients

    @property
    def reached(self) -> Roofline | Measured:
        """The source of the bandwidth and arithmetic speed that matrix products reach."""
        return self._roofline if self.measured is None else self.measured

    @cached_property
    def _roofline(self) -> Roofline:
        return FleetConfig(gpu=self.place.name).roofline(self.footprint.sizes, self.footprint.model.per_step)

    @property
    def format(self) -> str:
        """The common name of the weights' format."""
        in_files = self.footprint.model.in_files.formats or self.model.dtype
        return f"{self.config.quantization} of {in_files}" if self.config.quantization else in_files

    @property
    def usual_length(self) -> int:
        """The usual length of sequences and prompts whose speed is predicted."""
        return min(USUAL_LENGTH, self.footprint.longest or self.footprint.sizes.max_model_len)

    @property
    def sequences(self) -> dict[int, int]:
        """The number of requests that run at once, for each of several lengths."""
        most = self.footprint.sizes.max_model_len
        lengths = [*(length for length in LENGTHS if length < most), most]
        return {length: self.footprint.num_sequences(length) for length in lengths}

    @property
    def short_length(self) -> int:
        """The length of short sequences and prompts whose speed is predicted."""
        return min(SHORT_LENGTH, self.usual_length)

    def decode_speeds(self, length: int) -> dict[int, float]:
        """Return tokens per second, for several numbers of sequences of this length that decode together."""
        most = max(1, self.footprint.num_sequences(self.usual_length))
        batches = [*(count for count in BATCHES if count < most), most]
        windows = window_shares(self.model)
        return {count: count / self.cost.seconds(decode_work(count, length, windows)) for count in batches}

    def prompt_speed(self, length: int) -> float:
        """Return tokens per second of a prompt of this length that is computed alone."""
        steps = prompt_work(length, self.footprint.sizes.max_step_tokens, window_shares(self.model))
        return length / sum(map(self.cost.seconds, steps))

    def _speeds(self, length: int) -> dict[str, Any]:
        decodes = self.decode_speeds(length)
        return {
            "speed_of_length": length,
            "decode_tokens_per_s": {str(count): speed for count, speed in decodes.items()},
            "prompt_tokens_per_s": self.prompt_speed(length),
        }

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON, in bytes and seconds."""
        footprint = self.footprint
        sizes = footprint.sizes
        return {
            "model": self.config.model,
            "architecture": self.model.architecture,
            "device": self.place.name,
            "dtype": sizes.dtype,
            "format": self.format,
            "weights_bytes": dict(footprint.model.by_part),
            "weights_total_bytes": footprint.model.num_bytes,
            "draft_model_bytes": 0 if footprint.draft is None else footprint.draft.num_bytes,
            "file_bytes": footprint.model.in_files.num_bytes.total(),
            "activations_bytes": footprint.activation_bytes,
            "graphs_bytes": footprint.graph_bytes,
            "states_bytes": footprint.state_bytes,
            "rope_bytes": footprint.rope_bytes,
            "kv_dtype": sizes.kv_dtype,
            "kv_bytes_per_token": sizes.kv_bytes_per_token,
            "block_size": sizes.block_size,
            "num_blocks": footprint.num_blocks,
            "kv_bytes": footprint.kv_bytes,
            "total_bytes": footprint.num_bytes,
            "free_bytes": int(footprint.memory.free),
            "memory_bytes": int(footprint.memory.total),
            "max_model_len": sizes.max_model_len,
            "longest": footprint.longest,
            "sequences": {str(length): count for length, count in self.sequences.items()},
            "start": self.start and self.start._asdict(),
            "fits": footprint.fits,
            "would_fit": list(self.would_fit),
            "is_measured": self.measured is not None,
            "bytes_per_s": self.reached.bytes_per_s,
            "flops_per_s": self.reached.flops_per_s,
            **self._speeds(self.usual_length),
            "short": self._speeds(self.short_length),
        }


def make_plan(config: EngineConfig) -> EnginePlan:
    """Plan an engine with these options. `device` may also be the name of a data sheet.

    For a hub id, only the config and the headers of the weights are fetched.

    Raises ConfigError, CheckpointError or UnsupportedModelError as `LLMEngine` does, and ConfigError for an
    unknown device.
    """
    place = PlannedDevice.of(config.device)
    directory = resolve_headers(config.model, config.revision)
    footprint = _footprint(config, place, directory)
    measured = None
    if place.sheet is None:
        if place.device.type == "cpu":
            set_threads(footprint, config.num_threads)
        measured = measure(footprint)
    would_fit = () if footprint.fits else tuple(ways_to_fit(footprint))
    start = PackedStart.of(footprint) if place.sheet is None else None
    made = EnginePlan(config, place, footprint, measured, would_fit, start)
    if measured is None or not footprint.fits or not _is_small(footprint, directory):
        return made
    steps = measure_steps(config, footprint.sizes, made.usual_length)
    return replace(made, measured=measured._replace(coefficients=steps))


def _is_small(footprint: Footprint, directory: Path) -> bool:
    """Return whether a model is so small that its steps are measured, and its weights are here."""
    is_here = not (directory / HEADERS_ALONE).exists()
    return is_here and footprint.draft is None and footprint.model.num_bytes <= MOST_BYTES


def _footprint(config: EngineConfig, place: PlannedDevice, directory: Path) -> Footprint:
    device = place.device
    model = read_config(directory)
    dtype = resolve_dtype(config.dtype, model.dtype, device, model.exceeds_float16)
    sizes = Sizes(config, model, device.type, dtype, place.target)
    if place.sheet is not None and sizes.kv_dtype == "float8_e4m3fn" and not place.sheet.has_e4m3:
        asked = f"kv_cache_dtype {config.kv_cache_dtype!r}"
        raise ConfigError(f"{asked} is not supported on {place.name}; take 'int8'")
    speculation = config.speculation
    if speculation is not None and speculation.model is not None:
        with naming_draft_model():
            of_draft = resolve_headers(speculation.model, speculation.revision)
            sizes = replace(sizes, draft=draft_sizes(sizes, read_config(of_draft), of_draft))
    kernels = new_kernels(sizes, device, checked=False)
    return Footprint.of(sizes, place.memory, device, directory, kernels)
