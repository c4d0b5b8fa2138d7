"""DriverRunner: the executor of a model over several ranks, and the rank that samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ..architectures.config import ModelConfig
from ..base.errors import EngineDeadError, RankError, dead_engine
from ..blocks.pool import BlockId
from ..model.batch import Batch
from ..model.cache.kv_cache import KVCache
from ..model.cache.shares import cut_blocks, empty_blocks, join_blocks
from ..model.part import ModelPart
from ..options.config import EngineConfig
from ..runner.fit import RunStep
from ..runner.model_runner import ModelRunner
from ..runner.part_runner import Peers
from ..runner.passes import compute
from ..runner.plan import ComputedPart, StepPlan
from ..sampling.seats import DraftRow, SamplingSeat
from ..scheduler.schedule import StepOutput
from .layout import RankLayout
from .messages import MessageWriter
from .stage import Stage, new_graphs, part_of
from .transport import Transport

if TYPE_CHECKING:
    from ..runner.stage_graphs import StageGraphs
    from .pixels import PixelSender


class Supervision(Protocol):
    """Watches the processes of the other ranks, and ends them."""

    def on_step(self, number: int) -> None:
        """Record that a message is being sent to all ranks."""

    def check(self) -> None:
        """Raise RankError if a process has ended."""

    def end_after(self, error: BaseException) -> RankError:
        """End all ranks after a step has raised. Return an error with the reason."""

    def watch(self, on_loss: Callable[[], object]) -> None:
        """Call a function, from another thread, once a process has ended."""

    def describe(self) -> str:
        """Describe what each rank holds."""

    def close(self, end: Callable[[], None]) -> None:
        """End the processes.

        end: called to end processes that another process started.
        """


class DriverRunner(ModelRunner):
    """The `Executor` of a model over several ranks. It computes the last stage, or a shard of that stage, and
    samples.

    Launching a step sends a message to all ranks. This rank computes its own part only when the step's
    results are taken.

    supervision: watches and ends the other ranks; None if their end would end this rank too.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path,
        *,
        layout: RankLayout,
        transport: Transport,
        peers: Peers,
        supervision: Supervision | None = None,
    ) -> None:
        self._supervision = supervision
        self.layout = layout
        self._transport = transport
        self._launched: deque[RankedStep] = deque()  # those whose part here is not computed yet
        part = part_of(layout, 0, model_config.num_layers, transport)
        super().__init__(config, model_config, directory, None, part, layout.num_stages, peers)

    def allocate(self, directory: Path, run_step: RunStep) -> None:
        """Allocate the KV cache, as large as the smallest rank allows."""
        self._samplers = [self.new_sampler() for _ in range(self.num_in_flight)]
        self._writer = MessageWriter(self.sizes.block_size, self.num_in_flight)
        self._stage = Stage(self.layout, 0, self.model_config, self.dtype, self._transport)
        self._pixels: PixelSender | None = None
        if self.model_config.vision is not None:
            from .pixels import PixelSender

            self._pixels = PixelSender(self._transport, [r for r in self.layout.ranks_of_stage(0) if r])
        super().allocate(directory, run_step)

    def _new_decode_graphs(self) -> StageGraphs | None:
        return new_graphs(self, lambda: self._stage.receive(self._number, self.device))

    @property
    def exchange_s(self) -> float:
        """The seconds that steps have waited for other ranks so far."""
        return self._transport.waited_s

    def launch(self, plan: StepPlan) -> RankedStep:
        """Send a step to all ranks."""
        # The seats are those of now: the next plan may change them.
        rows = self.rows_of(plan)
        if plan.computed.adapter_loads:
            self._send_adapters(plan.computed)
        self._transport.send_message(self._writer.step(plan.computed))
        if self._pixels is not None:
            self._pixels.send(plan.computed)
        if self._supervision is not None:
            self._supervision.on_step(self._writer.number)
        step = RankedStep(self, plan, rows, self._writer.number)
        self._stage.expect(step.number, sum(plan.computed.counts))
        self._launched.append(step)
        return step

    def _send_adapters(self, plan: ComputedPart) -> None:
        """Copy adapters into slots of all ranks, behind the steps in flight."""
        from .adapters import names_in, packed

        self.compute_until()
        for adapter, slot in plan.adapter_loads:
            parts = self.adapters[adapter].parts
            ranks = {name: len(part.a) for name, part in parts.items()}
            self._transport.send_message(self._writer.load_adapter(slot, ranks))
            for rank in range(1, self.layout.num_ranks):
                if names := names_in(self._part_of(rank), ranks):
                    self._transport.send(packed(parts, names, self.dtype), rank)
        super().load_adapters(plan)

    def load_adapters(self, plan: ComputedPart) -> None:
        """Do nothing: `launch` has loaded them, before the step could outlive an adapter in memory."""

    def compute_until(self, last: RankedStep | None = None) -> None:
        """Compute this rank's part of all launched steps, or of the steps up to `last`."""
        while self._launched and (last is None or last.output is None):
            step = self._launched.popleft()
            self._number = step.number
            # What one knows of the requests of a step holds for those of the step after the others in flight.
            self.sampler = self._samplers[step.number % self.num_in_flight]
            # At once, as the next step overwrites it.
            step.output = self.run(step.plan, step.rows).result()

    def compute(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None]:
        """Run the last part of the model on a batch; see `ModelRunner.compute`."""
        stream = self._stage.receive(self._number, self.device)
        return compute(self.model, self.graphs, batch, self.kv_cache, stream)

    def discard(self) -> None:
        """Give up the steps in flight. Their results will not be taken."""
        for sampler in self._samplers:
            sampler.forget()
        self._launched.clear()

    # The processes of the other ranks

    def check(self) -> None:
        """Raise RankError if a rank has ended."""
        if self._supervision is not None:
            self._supervision.check()

    def recover(self, error: BaseException) -> EngineDeadError | None:
        """End the other ranks if a step has lost one. Return the error if no step can run any more; None if
        steps can.

        Without shards, any other error was raised by the last stage alone. The other stages go on, and the
        streams of abandoned steps are dropped when they arrive. With shards, all ranks are ended, because
        shards wait for each other within a step.
        """
        if (dead := super().recover(error)) is not None:
            return dead
        is_kept = isinstance(error, Exception) and not isinstance(error, RankError)
        if is_kept and self.layout.num_shards == 1:
            return None
        failure = error if self._supervision is None else self._supervision.end_after(error)
        return dead_engine(str(failure), failure)

    def watch(self, on_loss: Callable[[], object]) -> None:
        """Call a function, from another thread, as soon as `check` may raise."""
        if self._supervision is not None:
            self._supervision.watch(on_loss)

    def close(self) -> None:
        """End the other ranks."""
        if self._supervision is not None:
            self._supervision.close(self.end)

    def describe(self) -> str:
        """Describe dtype, device, threads and backend, and what each rank holds, the driver first."""
        held = "" if self._supervision is None else f"; {self._supervision.describe()}"
        return super().describe() + held

    def end(self) -> None:
        """Tell the other ranks to end."""
        self._transport.send_message(self._writer.end())

    # Blocks, as a cache of the whole model has them

    def read_blocks(self, blocks: Sequence[BlockId], groups: Sequence[int]) -> dict[str, Tensor]:
        """Return a copy of blocks on the host, gathered from all ranks."""
        if not blocks:
            return self._new_cache(None, 0).tensors
        self.compute_until()
        self._transport.send_message(self._writer.read_blocks(blocks))

        def parts() -> Iterator[tuple[ModelPart, dict[str, Tensor]]]:
            for rank in range(self.layout.num_ranks):
                part = self._part_of(rank)
                own = super(DriverRunner, self).read_blocks(blocks, groups) if not rank else {}
                for name, tensor in self._new_cache(part, len(blocks)).tensors.items() if rank else ():
                    own[name] = self._transport.receive(tensor.shape, tensor.dtype, rank)
                yield part, own

        return join_blocks(self.model_config, self.sizes.block_size, groups, parts())

    def write_block(self, block: BlockId, group: int, contents: Mapping[str, Tensor]) -> None:
        """Overwrite a block on all ranks with the contents of another one, as `read_blocks` returns them."""
        self.compute_until()
        whole = {name: tensor[:, None] for name, tensor in contents.items()}
        self._transport.send_message(self._writer.write_block(block))
        for rank in range(self.layout.num_ranks):
            part = self._part_of(rank)
            own = cut_blocks(self.model_config, self.sizes.block_size, [group], part, whole)
            if not rank:
                super().write_block(block, group, {name: tensor[:, 0] for name, tensor in own.items()})
            for tensor in own.values() if rank else ():
                self._transport.send(tensor, rank)

    def read_states(self, slots: Sequence[int]) -> dict[str, Tensor]:
        """Return a copy of snapshots on the host, gathered from all ranks."""
        from ..model.cache.state_shares import empty_states, join_states

        if slots:
            self.compute_until()
            self._transport.send_message(self._writer.read_states(slots))

        def parts() -> Iterator[tuple[ModelPart, dict[str, Tensor]]]:
            for rank in range(self.layout.num_ranks if slots else 0):
                part = self._part_of(rank)
                own = super(DriverRunner, self).read_states(slots) if not rank else {}
                like = empty_states(self.model_config, len(slots), self.dtype, part) if rank else None
                for name, tensor in like.tensors.items() if like is not None else ():
                    own[name] = self._transport.receive(tensor.shape, tensor.dtype, rank)
                yield part, own

        return join_states(self.model_config, len(slots), parts(), self.dtype)

    def write_state(self, slot: int, contents: Mapping[str, Tensor]) -> None:
        """Write what `read_states` returned of a snapshot into a slot, on all ranks."""
        from ..model.cache.state_shares import cut_states

        self.compute_until()
        whole = {name: tensor[:, None] for name, tensor in contents.items()}
        self._transport.send_message(self._writer.write_state(slot))
        for rank in range(self.layout.num_ranks):
            own = cut_states(self.model_config, self._part_of(rank), whole, self.dtype)
            if not rank:
                super().write_state(slot, {name: tensor[:, 0] for name, tensor in own.items()})
            for tensor in own.values() if rank else ():
                self._transport.send(tensor, rank)

    def _part_of(self, rank: int) -> ModelPart:
        return part_of(self.layout, rank, self.model_config.num_layers, self._transport)

    def _new_cache(self, part: ModelPart | None, num_blocks: int) -> KVCache:
        """Return a cache of so many blocks on the host, of a part or of the whole model."""
        return empty_blocks(self.model_config, self.sizes.block_size, num_blocks, self.kv_dtype, part)


class RankedStep:
    """A step that was sent to all ranks.

    rows: the sampler's state for each sampled row.
    """

    def __init__(
        self, runner: DriverRunner, plan: StepPlan, rows: Sequence[SamplingSeat | DraftRow], number: int
    ) -> None:
        self._runner = runner
        self.plan = plan
        self.rows = rows
        self.number = number
        self.output: StepOutput | None = None

    def result(self) -> StepOutput:
        """Compute the last part of this step and of all earlier steps. Return this step's tokens."""
        self._runner.compute_until(self)
        assert self.output is not None, "the step was given up"
        return self.output
