"""ModelRunner: a model, its KV cache and its sampler on one device, which run one step at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..architectures.config import ModelConfig
from ..base.errors import EngineDeadError, dead_engine
from ..blocks.manager import widest_of
from ..device.devices import failure_of
from ..device.transfers import Download
from ..kernels.checks import TrustedContents
from ..model.batch import Batch
from ..model.cache.kv_cache import KVCache
from ..model.part import ModelPart
from ..options.config import EngineConfig
from ..sampling.sampler import Draw, Sampler
from ..sampling.seats import DraftRow, SamplingSeat, SamplingSeats
from ..scheduler.schedule import Schedule, StepOutput
from .part_runner import PartRunner, Peers
from .passes import compute
from .plan import Planner, StepPlan

if TYPE_CHECKING:
    from ..model.weights.kept import KeepsWeights
    from ..sampling.reporter import Reporter, StepReports
    from ..sampling.structured_outputs import GrammarMasks
    from .decode_graphs import DecodeGraphs
    from .draft_model import DraftCheckpoint, DraftModel
    from .executor import PendingStep
    from .graph_store import GraphStore
    from .stage_graphs import StageGraphs


class ModelRunner(PartRunner):
    """The `Executor` of one process: a whole model, its KV cache and its sampler.

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
        super().__init__(config, model_config, directory, draft, part, num_in_flight, peers)
        self._sample_here()
        self.decode_graphs = self._new_decode_graphs()
        self.allocate(directory, self.run_in_other_cache)
        if self.draft_model is not None:
            self.draft_model.prepare(self.kv_cache.num_blocks)
            self.draft_model.kv_cache = self.kv_cache.draft

    def _sample_here(self) -> None:
        """Make what plans steps and samples, for a part with the head."""
        model_config = self.model_config
        self.draft_model = self._new_draft_model()
        self.planner = Planner(
            self.sizes.block_size,
            len(model_config.layer_groups),
            with_prompt_lens=model_config.rope.type == "dynamic",
            with_lens=model_config.long_context is not None,
            with_last_tokens=self.sizes.part is not None,
            with_pending=self.sizes.part is None and self.num_in_flight > 1,
            vision=model_config.vision,
        )
        self.sampling_seats = SamplingSeats()
        self.sampler = self.new_sampler()

    @cached_property
    def reporter(self) -> Reporter:
        """Computes the reports that requests ask for on their prompts."""
        from ..sampling.reporter import Reporter

        reporter = Reporter(self.model.logits, self.model_config.vocab_size, self.model.kernels)
        if self.device.type == "cuda":
            # No more logits at once than in the step by which memory was measured.
            reporter.max_rows = min(reporter.max_rows, self.sizes.config.num_seats)
        return reporter

    def describe(self) -> str:
        """Describe dtype, device, threads and attention backend in one phrase."""
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
        graphs = ""
        num_graphs, num_bytes, seconds = self.graph_costs
        if num_graphs:
            graphs = (
                f"; {num_graphs} CUDA graphs in {num_bytes / 2**20:,.0f} MiB, captured in {seconds:.1f} s"
            )
        return f"{dtype}{narrower} on {self.device}{threads}; attention by {self.model.kernels.name}{graphs}"

    def _kept_weights(self) -> list[KeepsWeights]:
        own = super()._kept_weights()
        draft = None if self.draft_model is None else self.draft_model.model.kept_weights
        return own if draft is None else [*own, draft]

    @property
    def weight_bytes(self) -> dict[str, int]:
        """The bytes of the weights of all models in their files, by the name of their format."""
        models = [self.model] if self.draft_model is None else [self.model, self.draft_model.model]
        total = Counter[str]()
        for model in models:
            if model.stored_weights is not None:
                total += model.stored_weights.num_bytes
        return {title or "floats": n for title, n in total.items()}

    @property
    def graph_costs(self) -> tuple[int, int, float]:
        """The number of CUDA graphs, and the bytes and seconds of the graphs captured at the start."""
        of_draft = None if self.draft_model is None else self.draft_model.decode_graphs
        num_graphs = num_bytes = 0
        seconds = 0.0
        for graphs in (self.decode_graphs, of_draft):
            if graphs is not None:
                num_graphs += graphs.num_graphs
                num_bytes += graphs.cost.num_bytes
                seconds += graphs.cost.seconds
        return num_graphs, num_bytes, seconds

    def execute(self, schedule: Schedule) -> StepOutput:
        """Run one step. Return a token for each of schedule.sampled_requests."""
        return self.launch(self.plan(schedule)).result()

    def plan(self, schedule: Schedule) -> StepPlan:
        """Make the plan of a step. The runner reads requests only here.

        Plans must be launched once each, in the order in which they are made, because a plan contains only
        the changes in the seats since the last plan.
        """
        if schedule.newcomers or schedule.vacated:
            self.sampling_seats.change(schedule.vacated, schedule.newcomers)
        return self.planner.plan(schedule)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step on the device without waiting for it."""
        return self.run(plan, self.rows_of(plan))

    def rows_of(self, plan: StepPlan) -> Sequence[SamplingSeat | DraftRow]:
        """Pass the new tokens of a step to the sampler. Return the sampler's state of each sampled row."""
        computed = plan.computed
        seats = self.sampling_seats
        for tokens_of_seat in plan.sampled.new_tokens:
            seats.add_tokens(*tokens_of_seat)
        if computed.num_drafting:
            return seats.with_drafts(computed.sampled_seats)
        return seats.at(computed.sampled_seats)

    def run(self, plan: StepPlan, rows: Sequence[SamplingSeat | DraftRow]) -> Pending:
        """Launch the computation of a step and the draws of its rows, without waiting."""
        # Without inference_mode: no parameter requires a gradient, so it would only cost its 40 µs.
        # Triton launches on torch's current GPU, which may be another one.
        # The scheduler's blocks and slots are right, as its invariants say.
        with self._on_device, TrustedContents():
            try:
                return self._run(plan, rows)
            except BaseException:
                self.sampler.forget()
                raise

    def _run(self, plan: StepPlan, rows: Sequence[SamplingSeat | DraftRow]) -> Pending:
        computed = plan.computed
        if computed.towers is not None:
            self.images.work(computed.towers)
        upload = self.transfers.new_upload()
        download = self.transfers.new_download()
        moves = self.send_moves(computed, upload)
        state_moves = self.send_state_moves(computed, upload)
        if not computed.seats:
            upload.send()
            self._move_blocks(*moves)
            self._move_states(state_moves)
            return Pending(self)
        if computed.adapter_loads:
            self.load_adapters(computed)
        # Everything is put into the upload before it is sent.
        step = self.batches.put(computed, upload)
        has_images = bool(computed.images) or computed.grid_positions is not None
        images = self.images.put(computed, upload) if has_images else None
        draw = self.sampler.prepare(rows, computed.positions, upload, computed.sampled_seats)
        reports = None
        if computed.asked:
            reports = self.reporter.prepare(computed.asked, plan.sampled.reports, upload)
        upload.send()
        self._move_blocks(*moves)
        self._move_states(state_moves)
        self.sampler.write()
        masks = draw.start_masks()
        graphs = self.decode_graphs if images is None else None
        if graphs is not None and graphs.run(step, draw, masks, download):
            download.send()
            return Pending(self, download, draw, masks)
        batch = self.batches.batch(step)
        if images is not None:
            self.images.add_to(batch, images)
        logits, best, hidden = self.compute(batch)
        if images is not None:
            batch.forget_given()
        tokens = draw.run(logits, download, masks, best, self.batches.places(step))
        if tokens is not None and not self.planner.with_last_tokens:
            self.batches.record(step, tokens)
        if reports is not None and hidden is not None:
            reports.run(hidden, download)
        download.send()
        return Pending(self, download, draw, masks, reports)

    def compute(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None]:
        """Run the model on a batch.

        Returns the logits to sample from; each row's greedy token and its logit, if a recorded step computed
        them; and the hidden states for reports, if any.
        """
        return compute(self.model, self.graphs, batch, self.kv_cache)

    def discard(self) -> None:
        """Give up the steps in flight. Their results will not be taken."""
        self.sampler.forget()

    # What concerns other processes of the model, of which there are none

    def check(self) -> None:
        """Do nothing: there are no other processes."""

    def recover(self, error: BaseException) -> EngineDeadError | None:
        """Return an error if the GPU has failed, so that no step can run any more; None otherwise."""
        # Ctrl-C must not wait for a GPU that may never answer.
        if not isinstance(error, Exception) or (failure := failure_of(self.device)) is None:
            return None
        reason = str(failure).partition("\n")[0]
        return dead_engine(
            f"{self.device} has failed: {reason}; it can only be used again in a new process", error
        )

    def watch(self, on_loss: Callable[[], object]) -> None:
        """Do nothing: there are no other processes."""

    def close(self) -> None:
        """Do nothing: there are no other processes."""

    @property
    def exchange_s(self) -> float:
        """The seconds that steps have waited for other processes: always 0."""
        return 0.0

    def _new_decode_graphs(self) -> DecodeGraphs | StageGraphs | None:
        if self.device.type != "cuda":
            return None
        from .decode_graphs import new_decode_graphs

        sizes = self.sizes, self.model, self.batches, self.sampler, self.device
        return new_decode_graphs(*sizes, self.model_config.vocab_size)

    def graphs_over(self, kv_cache: KVCache) -> list[tuple[GraphStore[Any], KVCache]]:
        """Return the graphs of the model and of the draft model, each with the cache that they read."""
        found: list[tuple[GraphStore[Any], KVCache]] = []
        if self.decode_graphs is not None:
            found.append((self.decode_graphs, kv_cache))
        draft = self.draft_model
        if draft is not None and draft.decode_graphs is not None and kv_cache.draft is not None:
            found.append((draft.decode_graphs, kv_cache.draft))
        return found

    def run_in_other_cache(self, schedule: Schedule, kv_cache: KVCache) -> int:
        """Run one step of the model and of its draft model in a temporary KV cache, and capture CUDA graphs.

        The memory that this takes is freed. Returns the bytes that CUDA graphs will take.
        """
        self.kv_cache = kv_cache
        if self.model.tower is not None:
            self.images.rehearse()
        self.execute(schedule)
        if self.draft_model is not None:
            self.draft_model.rehearse(schedule, kv_cache.draft)
            self.draft_model.kv_cache = None
        num_bytes = sum(graphs.profile(cache) for graphs, cache in self.graphs_over(kv_cache))
        del self.kv_cache
        self.sampler.forget()
        return num_bytes

    def _new_draft_model(self) -> DraftModel | None:
        if self.sizes.draft is None:
            return None
        from .draft_model import DraftModel

        return DraftModel(
            self.sizes.draft,
            self.device,
            vocab_size=self.model_config.vocab_size,
            group=widest_of([group.window for group in self.sizes.layout.groups]),
        )

    def new_sampler(self) -> Sampler:
        """Make a sampler."""
        config = self.model_config
        of_seats = None
        # Each step of several processes has a sampler of its own, which does not know what others have sent.
        if self.model.kernels.take_parameters is not None and self.sizes.part is None:
            from ..sampling.seat_parameters import SeatParameters

            take = self.model.kernels.take_parameters
            of_seats = SeatParameters(take, self.sizes.config.num_seats, self.device)
        num_seqs = self.sizes.config.num_seats
        return Sampler(self.model.kernels, config.vocab_size, self.device, num_seqs, of_seats)


class Pending:
    """A launched step whose results are on their way to the host."""

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
        """Wait for the step. Return a token for each sampled row of its plan."""
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
