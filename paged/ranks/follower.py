"""FollowerRunner: a rank that computes what the driver tells it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..architectures.config import ModelConfig
from ..blocks.pool import BlockId
from ..kernels.checks import TrustedContents
from ..model.batch import Batch
from ..model.cache.kv_cache import KVCache
from ..options.config import EngineConfig
from ..runner.part_runner import PartRunner, Peers
from ..runner.passes import compute, compute_part
from ..runner.plan import ComputedPart
from ..sampling.reporter import Reporter
from ..scheduler.schedule import Schedule
from .layout import RankLayout
from .messages import Message, MessageKind, MessageReader
from .stage import Stage, new_graphs, part_of
from .transport import Transport

if TYPE_CHECKING:
    from ..runner.stage_graphs import StageGraphs
    from .pixels import PixelReceiver

DRIVER = 0


class FollowerRunner(PartRunner):
    """Computes a part of a model in the steps of a driver. It knows only plans, not requests."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path,
        *,
        layout: RankLayout,
        rank: int,
        transport: Transport,
        peers: Peers,
    ) -> None:
        part = part_of(layout, rank, model_config.num_layers, transport)
        super().__init__(config, model_config, directory, None, part, layout.num_stages, peers)
        self._part = part
        self._transport = transport
        num_groups = len(self.model_config.layer_groups)
        self._reader = MessageReader(self.sizes.block_size, self.num_in_flight, num_groups)
        self._stage = Stage(layout, rank, self.model_config, self.dtype, transport)
        self._pixels: PixelReceiver | None = None
        if self.model.tower is not None:
            from .pixels import PixelReceiver

            self._pixels = PixelReceiver(transport, DRIVER)
        self._reporter = Reporter(self.model.logits, self.model_config.vocab_size, self.model.kernels)
        if self.device.type == "cuda":
            self._reporter.max_rows = min(self._reporter.max_rows, self.sizes.config.num_seats)
        self._number = 0  # of the step that is computed
        self._graphs_of_decodes: StageGraphs | None = None
        if not part.is_last:
            self._graphs_of_decodes = new_graphs(self, lambda: self._stage.receive(self._number, self.device))
        self.allocate(directory, self._run_in_other_cache)

    def run(self, on_message: Callable[[int | None], None] = lambda _: None) -> None:
        """Carry out the driver's messages until a message ends the loop.

        on_message: called with the number of each message before it is carried out, and with None while the
            driver is idle.
        """
        if self._graphs_of_decodes is not None:
            self._graphs_of_decodes.capture_for_good(self.kv_cache)
        self.keep_weights()
        for _ in count():
            message = self._next_message(on_message)
            on_message(message.number)
            if message.kind is MessageKind.END:
                return
            self._do(message)

    def _next_message(self, on_message: Callable[[int | None], None] = lambda _: None) -> Message:
        while not (data := self._transport.receive_message()):
            on_message(None)
        return self._reader.read(data)

    def _do(self, message: Message) -> None:
        with self._on_device, TrustedContents():
            if message.step is not None:
                self._compute(message.step, message.number)
            elif message.kind is MessageKind.READ_BLOCKS:
                for tensor in self.read_blocks(message.blocks, ()).values():
                    self._transport.send(tensor, DRIVER)
            elif message.kind is MessageKind.READ_STATES:
                for tensor in self.read_states(message.blocks).values():
                    self._transport.send(tensor, DRIVER)
            elif message.adapter is not None:
                self._receive_adapter(*message.adapter)
            elif message.kind is MessageKind.WRITE_STATE:
                self._receive_state(*message.blocks)
            else:
                self._receive_block(*message.blocks)

    def _compute(self, plan: ComputedPart, number: int) -> None:
        """Compute this part of a step, and send on what comes out."""
        if self._pixels is not None:
            plan = self._pixels.receive(plan)
        if plan.towers is not None:
            self.images.work(plan.towers)
        upload = self.transfers.new_upload()
        moves = self.send_moves(plan, upload)
        state_moves = self.send_state_moves(plan, upload)
        if not plan.seats:
            upload.send()
            self._move_blocks(*moves)
            self._move_states(state_moves)
            return
        step = self.batches.put(plan, upload)
        has_images = bool(plan.images) or plan.grid_positions is not None
        images = self.images.put(plan, upload) if has_images else None
        upload.send()
        self._move_blocks(*moves)
        self._move_states(state_moves)
        self._number = number
        self._stage.expect(number, sum(plan.counts))
        if self._graphs_of_decodes is not None and images is None:
            sent = self._graphs_of_decodes.compute(step)
            if sent is not None:
                self._stage.send(number, sent)
                return
        batch = self.batches.batch(step)
        if images is not None:
            self.images.add_to(batch, images)
        self._compute_batch(batch, plan, number)
        if images is not None:
            batch.forget_given()

    def _compute_batch(self, batch: Batch, plan: ComputedPart, number: int) -> None:
        stream = self._stage.receive(number, self.device)
        if not self._part.is_last:
            tensors = compute_part(self.model, self.graphs, batch, self.kv_cache, stream)
            self._stage.send(number, tensors)
            return
        # Another shard of the driver's stage: it calls the head as often as that.
        _, _, hidden = compute(self.model, self.graphs, batch, self.kv_cache, stream)
        if hidden is not None:
            self._reporter.call_head(plan.asked, hidden)

    def _receive_block(self, block: BlockId) -> None:
        contents = dict[str, Tensor]()
        for name, tensor in self.read_blocks([block], ()).items():
            contents[name] = self._transport.receive(tensor.shape, tensor.dtype, DRIVER)[:, 0]
        self.write_block(block, 0, contents)  # of any group

    def _receive_state(self, slot: int) -> None:
        contents = dict[str, Tensor]()
        for name, tensor in self.read_states([slot]).items():
            contents[name] = self._transport.receive(tensor.shape, tensor.dtype, DRIVER)[:, 0]
        self.write_state(slot, contents)

    def _receive_adapter(self, slot: int, ranks: Mapping[str, int]) -> None:
        from .adapters import names_in, num_numbers, unpacked

        assert self.lora is not None, "only an engine with slots has adapters"
        names = names_in(self._part, ranks)
        shapes = {name: (ranks[name], *self.lora.shapes[name]) for name in names}
        sent = torch.empty(0, dtype=self.dtype)
        if names:
            sent = self._transport.receive((num_numbers(shapes),), self.dtype, DRIVER)
        self.lora.set(slot, unpacked(sent, shapes))

    def _run_in_other_cache(self, _: Schedule, kv_cache: KVCache) -> int:
        """Run the step by which the driver, too, measures memory, and capture CUDA graphs, which are dropped.

        Returns the bytes that CUDA graphs will take.
        """
        self.kv_cache = kv_cache
        if self.model.tower is not None:
            self.images.rehearse()
        self._do(self._next_message())
        num_bytes = 0 if self._graphs_of_decodes is None else self._graphs_of_decodes.profile(kv_cache)
        del self.kv_cache
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return num_bytes
