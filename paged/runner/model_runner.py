"""ModelRunner: a model, its KV cache and its sampler on one device, which run one step at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import EngineConfig
from ..device.devices import resolve_device, resolve_dtype, sum_in_float32, target_of
from ..device.threads import set_threads
from ..device.transfers import Download, Sent, Transfers
from ..errors import ConfigError
from ..kernels.checks import TrustedContents, in_debug_mode
from ..model.batch import Batch
from ..model.cache.kv_cache import KVCache
from ..model.config import ModelConfig
from ..sampling.reporter import Reporter, StepReports
from ..sampling.sampler import Draw, Sampler
from ..sampling.seats import SamplingSeats
from ..sampling.structured_outputs import GrammarMasks
from ..scheduler.schedule import Schedule, StepOutput
from .batches.batches import Batches
from .batches.host import HostBatches
from .footprint import Footprint, Memory, model_sizes, require_room, shortage
from .load import load_model
from .memory import new_kv_cache, num_blocks_that_fit
from .plan import Planner, StepPlan
from .sizes import Sizes

if TYPE_CHECKING:
    from .step_graphs import StepGraphs  # needs numba


logger = logging.getLogger(__name__)


class ModelRunner:
    """Owner of all device memory: the weights, and the KV cache, which takes what they leave.

    Raises ConfigError where the options do not fit this machine.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, directory: Path) -> None:
        self.config = config
        self.device = resolve_device(config.device)
        on_gpu = self.device.type == "cuda"
        self._on_device = torch.cuda.device(self.device) if on_gpu else nullcontext()
        self.num_threads: int | None = None  # on a GPU: torch's own default
        if on_gpu:
            sum_in_float32()
        if not on_gpu or config.num_threads is not None:
            self.num_threads = set_threads(self, config.num_threads)
        dtype = resolve_dtype(config.dtype, model_config.dtype, self.device)
        self.sizes = Sizes(config, model_config, self.device.type, dtype, target_of(self.device))
        model_config = self.model_config = model_config.for_context(self.sizes.max_model_len)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.kv_dtype: torch.dtype = getattr(torch, self.sizes.kv_dtype)
        require_room(self.sizes, self.device, directory)
        self.model = load_model(self.sizes, model_config, self.device, directory)
        kernels = self.model.kernels
        self.graphs: StepGraphs | None = None
        self.transfers = Transfers(self.device)
        self.planner = Planner(
            self.sizes.block_size,
            len(model_config.layer_groups),
            with_prompt_lens=model_config.rope.type == "dynamic",
            with_lens=model_config.long_context is not None,
        )
        self.batches = self._new_batches()
        self.sampling_seats = SamplingSeats()
        self.sampler = self._new_sampler()
        self.reporter = Reporter(self.model.logits, model_config.vocab_size, kernels)
        if on_gpu:
            # No more logits at once than in the step by which memory was measured.
            self.reporter.max_rows = min(self.reporter.max_rows, config.max_num_seqs)
        with self._explaining_shortage(directory):
            num_blocks = config.num_blocks or num_blocks_that_fit(
                self.sizes, self.device, kernels, self.run_in_other_cache
            )
            self.model.prepare(self.sizes.num_tabulated_positions(num_blocks))
            self.graphs = self._new_graphs()
            self.kv_cache = new_kv_cache(self.sizes, self.device, num_blocks, self.sizes.num_host_blocks)

    @contextmanager
    def _explaining_shortage(self, directory: Path) -> Iterator[None]:
        """Add the figures of the engine, and what would fit, to the error of one that does not."""
        try:
            yield
        except ConfigError as error:
            held = model_sizes(self.sizes, self.device, directory, self.model.kernels)
            memory = Memory.of(self.device, held.num_bytes)
            footprint = Footprint(self.sizes, memory, self.device, directory, self.model.kernels, held)
            raise ConfigError(f"{error}; {shortage(footprint)}") from error

    def describe(self) -> str:
        """Return dtype, device, threads and attention backend as one phrase."""
        dtype = str(self.dtype).removeprefix("torch.")
        threads = ""
        if self.num_threads is not None:
            threads = f" with {self.num_threads} thread{'s' * (self.num_threads > 1)}"
        stored = self.model.stored_weights
        formats = self.config.quantization or (stored and stored.formats)
        parts = [f"weights in {formats}"] if formats else []
        if self.kv_dtype != self.dtype:
            parts.append(f"KV in {self.config.kv_cache_dtype}")
        narrower = f" with {' and '.join(parts)}" if parts else ""
        return f"{dtype}{narrower} on {self.device}{threads}; attention by {self.model.kernels.name}"

    @property
    def weight_bytes(self) -> dict[str, int]:
        """The bytes of the weights in their files, by what their format is called."""
        stored = self.model.stored_weights
        return {} if stored is None else {title or "floats": n for title, n in stored.num_bytes.items()}

    def execute(self, schedule: Schedule) -> StepOutput:
        """Run one step. Return a token for each of schedule.sampled_requests."""
        return self.launch(self.plan(schedule)).result()

    def plan(self, schedule: Schedule) -> StepPlan:
        """Make the plan of a step. Only here the runner reads requests.

        Plans are launched in the order in which they are made, each once: a plan holds only what
        has changed in the seats since the last one.
        """
        if schedule.newcomers or schedule.vacated:
            self.sampling_seats.change(schedule.vacated, schedule.newcomers)
        return self.planner.plan(schedule)

    def launch(self, plan: StepPlan) -> Pending:
        """Have the device compute a step, without waiting for it."""
        # Without inference_mode: no parameter requires a gradient, so it would only cost its 40 µs.
        # Triton launches on torch's current GPU, which may be another one.
        # The scheduler's blocks and slots are right, as its invariants say.
        with self._on_device, TrustedContents():
            try:
                return self._launch(plan)
            except BaseException:
                self.sampler.forget()
                raise

    def _launch(self, plan: StepPlan) -> Pending:
        computed = plan.computed
        upload = self.transfers.new_upload()
        download = self.transfers.new_download()
        out, back, copies = (
            upload.put(pairs, torch.int64) if pairs else None
            for pairs in (computed.swap_out, computed.swap_in, computed.copies)
        )
        if not computed.seats:
            upload.send()
            self._move_blocks(out, back, copies)
            return Pending(self)
        # Everything is put into the upload before it is sent.
        step = self.batches.put(computed, upload)
        for tokens_of_seat in plan.sampled.new_tokens:
            self.sampling_seats.add_tokens(*tokens_of_seat)
        seats = self.sampling_seats
        rows = (seats.with_drafts if computed.num_drafting else seats.at)(computed.sampled_seats)
        draw = self.sampler.prepare(rows, computed.positions, upload)
        reports = None
        if computed.asked:
            reports = self.reporter.prepare(computed.asked, plan.sampled.reports, upload)
        upload.send()
        self._move_blocks(out, back, copies)
        batch = self.batches.batch(step)
        masks = draw.start_masks()
        logits, best, hidden = self.compute(batch)
        tokens = draw.run(logits, download, masks, best)
        if tokens is not None:
            self.batches.record(step, tokens)
        if reports is not None and hidden is not None:
            reports.run(hidden, download)
        download.send()
        return Pending(self, download, draw, masks, reports)

    def compute(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None]:
        """Run the model on a batch.

        Returns the logits to sample from; each row's greedy token and its logit, if a recorded step has
        computed them; and the hidden states that reports ask for, if any.
        """
        if self.graphs is None:
            hidden = self.model.forward(batch, self.kv_cache)
        elif batch.is_decode and batch.num_tokens <= self.graphs.max_decodes:
            logits, tokens, highest = self.graphs.run(self._next_logits, batch, self.kv_cache)
            return logits, (tokens, highest), None
        else:  # record only the part whose shapes do not depend on the number of output rows
            state = self.graphs.run(self.model.compute_kv, batch, self.kv_cache)
            hidden = self.model.attend_last(state, batch, self.kv_cache)
        num_logits = batch.num_logits
        logits = self.model.logits(hidden[:num_logits]) if num_logits else hidden
        return logits, None, hidden[num_logits:] if batch.num_output_rows > num_logits else None

    def _new_batches(self) -> Batches[Any]:
        model = self.model_config
        options: dict[str, Any] = {
            "num_groups": len(model.layer_groups),
            "max_num_seqs": self.config.max_num_seqs,
            "with_rope_lens": model.rope.type == "dynamic",
            "long_context": model.long_context,
        }
        unpack_step = self.model.kernels.unpack_step
        if unpack_step is None:
            return HostBatches(self.sizes.block_size, self.device, **options)
        from .batches.seats import SeatedBatches

        return SeatedBatches(
            unpack_step,
            self.sizes.block_size,
            self.device,
            max_model_len=self.sizes.max_model_len,
            **options,
        )

    def _new_graphs(self) -> StepGraphs | None:
        """Return where steps are recorded; None if they are not, and say so where one would expect it."""
        # A recorded step skips the checks of debug mode.
        step_recorder = self.model.kernels.step_recorder
        if step_recorder is None or self.config.enforce_eager or in_debug_mode():
            return None
        if obstacle := self.model.obstacle_to_recording:
            logger.warning(
                "steps are not recorded, because %s: those of few tokens take up to five times as long",
                obstacle,
            )
            return None
        from .step_graphs import StepGraphs

        model = self.model_config
        shapes = [model.kv_shapes[group.layers[0]] for group in model.layer_groups]
        return StepGraphs(step_recorder(model.num_heads, [shape.num_kv_heads for shape in shapes]))

    def run_in_other_cache(self, schedule: Schedule, kv_cache: KVCache) -> None:
        """Run one step in this KV cache, and keep none of the memory that it took."""
        self.kv_cache = kv_cache
        self.execute(schedule)
        del self.kv_cache
        self.sampler = self._new_sampler()

    def _new_sampler(self) -> Sampler:
        return Sampler(
            self.model.kernels, self.model_config.vocab_size, self.device, self.config.max_num_seqs
        )

    def _next_logits(self, batch: Batch, kv_cache: KVCache) -> tuple[Tensor, ...]:
        """Return the logits of a decode batch, and each row's greedy token and its logit."""
        logits = self.model.logits(self.model.forward(batch, kv_cache))
        return logits, *self.model.kernels.greedy(logits)

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


class Pending:
    """A step that was launched, and whose results are on their way to the host."""

    def __init__(
        self,
        runner: ModelRunner,
        download: Download | None = None,
        draw: Draw | None = None,
        masks: GrammarMasks | None = None,
        reports: StepReports | None = None,
    ) -> None:
        self._runner = runner
        self._download = download
        self._draw = draw
        self._masks = masks
        self._reports = reports

    def result(self) -> StepOutput:
        """Wait for the step. Return a token for each of the plan's sampled rows."""
        if self._download is None or self._draw is None:
            return StepOutput()
        try:
            self._download.wait()
            step = self._draw.result()
        except BaseException:
            self._runner.sampler.forget()
            raise
        if self._masks is not None:
            self._masks.check(step)
        if self._reports is not None:
            step.reports = self._reports.results()
        return step
