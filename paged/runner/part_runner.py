"""PartRunner: a part of a model and its KV cache on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..architectures.config import ModelConfig
from ..base.errors import ResourceError
from ..blocks.pool import BlockId
from ..checkpoints.weight_files import find_weight_files
from ..device.devices import resolve_device, resolve_dtype, sum_in_float32, target_of
from ..device.threads import set_threads
from ..device.transfers import NUM_BUFFERS, Sent, Transfers, Upload
from ..model.part import ModelPart
from ..options.config import EngineConfig
from .load import load_model, new_kernels
from .memory import Memory, new_kv_cache
from .passes import new_batches, new_graphs
from .plan import ComputedPart
from .sizes import Sizes

if TYPE_CHECKING:
    from ..checkpoints.lora_adapter import LoraAdapter
    from ..model.lora import LoraSlots
    from ..model.weights.kept import KeepsWeights
    from .draft_model import DraftCheckpoint
    from .fit import RunStep
    from .images import ImagePlaces
    from .states import StateChanges
    from .step_graphs import StepGraphs  # needs numba


class Peers(Protocol):
    """The other processes of a model, during their common start."""

    def loaded(self, weight_bytes: int) -> None:
        """Wait until all processes have loaded their weights.

        weight_bytes: the bytes of weights in this process's memory.
        """

    def least(self, num_blocks: int, num_host_blocks: int) -> tuple[int, int]:
        """Exchange the numbers of blocks of each process. Return the smallest numbers of all processes."""

    def least_seats(self, num_seats: int) -> int:
        """Exchange the number of sequences that fit in each process. Return the smallest of all processes."""

    def least_snapshots(self, num_snapshots: int) -> int:
        """Exchange the number of snapshots that fit in each process. Return the smallest of all processes."""


class PartRunner:
    """Owns all device memory of a process: the weights, and the KV cache in the rest of the memory.

    part: the part of the model that this process computes; None computes the whole model.
    num_in_flight: maximum number of steps in flight.
    peers: the processes that compute the other parts; None if there are none.

    Raises ConfigError if the options do not suit this machine.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path,
        draft: DraftCheckpoint | None = None,
        part: ModelPart | None = None,
        num_in_flight: int = 1,
        peers: Peers | None = None,
    ) -> None:
        self.config = config
        self.device = resolve_device(config.device)
        on_gpu = self.device.type == "cuda"
        self._on_device = torch.cuda.device(self.device) if on_gpu else nullcontext()
        self.num_threads: int | None = None  # on a GPU: torch's own default
        if on_gpu:
            sum_in_float32()
        if not on_gpu or config.num_threads is not None:
            self.num_threads = set_threads(self, config.num_threads)
        exceeds = model_config.exceeds_float16
        dtype = resolve_dtype(config.dtype, model_config.dtype, self.device, exceeds)
        sizes = Sizes(config, model_config, self.device.type, dtype, target_of(self.device), part=part)
        if draft is not None:
            from .draft_model import with_draft

            sizes = with_draft(sizes, self.device, draft)
        self.sizes = sizes
        model_config = self.model_config = model_config.for_context(self.sizes.max_model_len)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.kv_dtype: torch.dtype = getattr(torch, self.sizes.kv_dtype)
        _require_room(self.sizes, self.device, directory)
        self.model = load_model(self.sizes, model_config, self.device, directory)
        if model_config.states:
            from .states import with_seats

            memory = Memory.of(self.device)
            room = int(memory.free * config.cpu_memory_utilization)
            if on_gpu:
                room = memory.free - memory.total + int(memory.total * config.gpu_memory_utilization)
            self.sizes = with_seats(sizes, room, None if peers is None else peers.least_seats)
        self.lora: LoraSlots | None = None
        self.adapters: dict[int, LoraAdapter] = {}  # in host memory, by number
        if config.enable_lora:
            from .lora_slots import new_lora_slots

            self.lora = new_lora_slots(self.sizes, self.model, self.device)
        self.graphs: StepGraphs | None = None
        if part is None and self.model.kernels.unpack_step is None:
            num_in_flight = 1  # the host, which makes such batches, waits for the tokens of a step
        self.num_in_flight = num_in_flight
        self.transfers = Transfers(self.device, num_buffers=max(NUM_BUFFERS, num_in_flight))
        self.batches = new_batches(self.sizes, model_config, self.model, self.device, num_in_flight)
        self._peers = peers
        if peers is not None:
            peers.loaded(self.weight_bytes_here)

    @cached_property
    def images(self) -> ImagePlaces:
        """Computes and caches the embeddings of images, if the tower is here."""
        from .images import new_images

        return new_images(self.model.tower, self.device, self.dtype, self.sizes.image_cache_bytes)

    @property
    def weight_bytes_here(self) -> int:
        """The size of the weights in this process's memory, in bytes."""
        return self.model.stored_weights.num_bytes.total() if self.model.stored_weights else 0

    def keep_weights(self) -> None:
        """Begin to cache packed weights on disk for the next start. Call this when the start is finished."""
        for each in self._kept_weights():
            each.start_keeping()

    def wait_for_kept_weights(self) -> Iterator[Path | None]:
        """Wait until all packed weights are cached.

        Yields the file of each model's weights; None if they cannot be cached.
        """
        return (each.wait() for each in self._kept_weights())

    def _kept_weights(self) -> list[KeepsWeights]:
        """Return what keeps the weights of each model whose weights are to be kept."""
        return [self.model.kept_weights] if self.model.kept_weights is not None else []

    def allocate(self, directory: Path, run_step: RunStep) -> None:
        """Allocate the KV cache, and prepare for requests that fit in it.

        run_step: see `num_blocks_that_fit`.
        """
        kernels = self.model.kernels
        with self._explaining_shortage(directory):
            with_snapshots = self._with_snapshots if self.model_config.states else None
            num_blocks = self.config.num_blocks
            if num_blocks is None:
                from .fit import num_blocks_that_fit

                num_blocks = num_blocks_that_fit(self.sizes, self.device, kernels, run_step, with_snapshots)
            elif with_snapshots is not None:
                with_snapshots(None)
            num_host_blocks = self.sizes.num_host_blocks
            if self._peers is not None:
                num_blocks, num_host_blocks = self._peers.least(num_blocks, num_host_blocks)
            self.model.prepare(self.sizes.num_tabulated_positions(num_blocks))
            self.graphs = new_graphs(self.sizes, self.model)
            self.kv_cache = new_kv_cache(self.sizes, self.device, num_blocks, num_host_blocks)

    def _with_snapshots(self, room: int | None) -> Sizes:
        """Decide how many snapshots of states there are; see `snapshots_in`. Return the sizes with them."""
        from .states import with_snapshots

        least = None if self._peers is None else self._peers.least_snapshots
        self.sizes = with_snapshots(self.sizes, room, least)
        return self.sizes

    @contextmanager
    def _explaining_shortage(self, directory: Path) -> Iterator[None]:
        """Add figures, and options that would fit, to the error of an engine that does not fit."""
        try:
            yield
        except ResourceError as error:
            from .footprint import Footprint, shortage

            kernels = self.model.kernels
            footprint = Footprint.of(self.sizes, Memory.of(self.device), self.device, directory, kernels)
            memory = Memory.of(self.device, footprint.weight_bytes)
            footprint = replace(footprint, memory=memory)
            raise ResourceError(f"{error}; {shortage(footprint)}") from error

    def send_moves(self, plan: ComputedPart, upload: Upload) -> tuple[Sent | None, Sent | None, Sent | None]:
        """Add the pairs of blocks that a step moves to the upload. Return them for `_move_blocks`."""
        moves = (plan.swap_out, plan.swap_in, plan.copies)
        out, back, copies = (upload.put(pairs, torch.int64) if pairs else None for pairs in moves)
        return out, back, copies

    def _move_blocks(self, out: Sent | None, back: Sent | None, copies: Sent | None) -> None:
        """Swap blocks out, swap others in, and copy blocks, by pairs that were sent."""
        kernels = self.model.kernels
        cache = self.kv_cache
        if out is not None:
            cache.swap_out(out.tensor, kernels)
        if back is not None:
            cache.swap_in(back.tensor, kernels)
        if copies is not None:
            cache.copy_blocks(copies.tensor, kernels)

    def load_adapters(self, plan: ComputedPart) -> None:
        """Copy the adapters that a step needs into their slots."""
        for adapter, slot in plan.adapter_loads:
            assert self.lora is not None, "only an engine with slots has adapters"
            self.lora.set(slot, self.adapters[adapter].parts)

    def send_state_moves(self, plan: ComputedPart, upload: Upload) -> StateChanges | None:
        """Add the moves of recurrent states to the upload. Return them, or None without any."""
        states = self.kv_cache.states
        # A stage may have no layer with a state.
        if states is None or not (plan.state_moves or plan.settled):
            return None
        from .states import StateChanges

        return StateChanges.put(plan, states, upload)

    def _move_states(self, changes: StateChanges | None) -> None:
        """Apply the rest of runs of drafts to states, and move states, by numbers that were sent."""
        if changes is not None:
            changes.make(self.model, self.kv_cache)

    def read_blocks(self, blocks: Sequence[BlockId], groups: Sequence[int]) -> dict[str, Tensor]:  # noqa: ARG002
        """Copy blocks to the host. Return tensors by their names in the cache."""
        tensors = self.kv_cache.all_tensors.items()
        if not blocks:  # the device need not be asked
            return {
                name: torch.empty((len(each), 0, each.shape[2]), dtype=each.dtype) for name, each in tensors
            }
        return {name: tensor[:, blocks].cpu() for name, tensor in tensors}

    def write_block(self, block: BlockId, group: int, contents: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        """Overwrite a block with the contents of another one, in the form that `read_blocks` returns.

        Tensors of the cache that are missing in `contents` are not changed.
        """
        for name, content in contents.items():
            self.kv_cache.all_tensors[name][:, block] = content

    def read_states(self, slots: Sequence[int]) -> dict[str, Tensor]:
        """Copy snapshots to the host; see `states.read_states`. Return {} if no layer here has states."""
        from .states import read_states

        states = self.kv_cache.states
        return {} if states is None else read_states(states, self.sizes, slots)

    def write_state(self, slot: int, contents: Mapping[str, Tensor]) -> None:
        """Overwrite the slot of a snapshot with the state of one snapshot from `read_states`."""
        from .states import write_state

        if self.kv_cache.states is not None:
            write_state(self.kv_cache.states, self.sizes, slot, contents)


def _require_room(sizes: Sizes, device: torch.device, directory: Path) -> None:
    """Raise ResourceError if the weights will not fit: before they are read.

    Files that take less than half of what is free are not looked into.
    """
    memory = Memory.of(device)
    files = find_weight_files(directory)
    of_draft = ""
    if sizes.draft is not None:
        files = [*files, *find_weight_files(Path(sizes.draft.config.model))]
        of_draft = f", those of the draft model {sizes.draft.config.model} included"
    if 2 * sum(file.stat().st_size for file in files) < memory.free:
        return
    from .footprint import Footprint, shortage

    kernels = new_kernels(sizes, device, checked=False)
    footprint = Footprint.of(sizes, memory, device, directory, kernels)
    if footprint.weight_bytes > memory.free:
        raise ResourceError(f"no memory for the weights on {device}{of_draft}: {shortage(footprint)}")
