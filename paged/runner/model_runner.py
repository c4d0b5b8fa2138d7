"""ModelRunner: the model and its KV cache, and the forward of one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from ..config import EngineConfig
from ..errors import ConfigError
from ..kernels.backend import load_kernels
from ..kernels.checks import in_debug_mode
from ..kernels.gpu.attention.config import SPLIT
from ..kernels.gpu.target import listening
from ..model.batch import Batch, BatchBuilder
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.kv_cache import KVCache
from ..model.weight_forms import choose_forms, require_whole_groups
from ..model.weights import check_weights, load_weights
from ..requests.request import Request
from ..sampling.reporter import Reporter
from ..sampling.sampler import Sampler
from ..sampling.structured_outputs import GrammarMasks
from ..sampling_params import SamplingParams
from ..scheduler.schedule import Schedule, StepOutput
from ..scheduler.scheduler import Scheduler
from .devices import (
    check_attention,
    kv_bytes_on_cpu,
    kv_bytes_on_gpu,
    resolve_backend,
    resolve_device,
    resolve_dtype,
    weights_in_panels,
)
from .sizes import Sizes
from .threads import set_threads

if TYPE_CHECKING:
    from .step_graphs import StepGraphs  # needs numba

# With these, every kernel that sampling may need is launched.
EVERY_WAY_TO_SAMPLE = (
    SamplingParams(temperature=0.0),
    SamplingParams(repetition_penalty=1.1),
    SamplingParams(top_p=0.9),
    SamplingParams(top_n_sigma=1.0),
)


class ModelRunner:
    """Holds all device memory: the weights, and the KV cache sized from what they leave.

    Raises ConfigError where the options do not fit this machine.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, directory: Path, *, use_tqdm: bool = False
    ) -> None:
        self.config, self.model_config = config, model_config
        self.device = resolve_device(config.device)
        on_gpu = self.device.type == "cuda"
        self._on_device = torch.cuda.device(self.device) if on_gpu else nullcontext()
        self.num_threads: int | None = None  # of a GPU's host: as torch has them
        if self.device.type == "cpu" or config.num_threads is not None:
            self.num_threads = set_threads(self, config.num_threads)
        dtype = resolve_dtype(config.dtype, model_config.dtype, self.device)
        self.sizes = Sizes(config, model_config, self.device.type, dtype)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.kv_dtype: torch.dtype = getattr(torch, self.sizes.kv_dtype)
        try:
            kernels = load_kernels(resolve_backend(config.attention_backend, self.device))
        except ImportError as error:  # Triton or numba is not installed
            raise ConfigError(str(error)) from error
        check_attention(kernels, model_config.head_dim, self.kv_dtype, config, self.device)
        forms = choose_forms(
            self.device,
            self.dtype,
            config.quantization,
            tied=model_config.tie_word_embeddings,
            in_panels=weights_in_panels(config, kernels, self.device, self.dtype),
        )
        with torch.device("meta"), _default_dtype(self.dtype):
            self.model = Decoder(model_config, kernels)
        require_whole_groups(self.model, forms)
        destinations = self.model.hf_tensors()
        # Before anything is allocated: a config that disagrees may ask for any amount.
        sources = check_weights(destinations, directory)
        with tqdm(
            total=len(destinations), desc="Loading weights", unit="tensor", disable=not use_tqdm
        ) as bar:
            self.model.load(self.device, forms, lambda tensors: bar.update(load_weights(tensors, sources)))
        self.model.rotary.tabulate(self.sizes.max_model_len)
        self.graphs: StepGraphs | None = None
        is_eager = config.enforce_eager or in_debug_mode()  # what is repeated is not checked
        if kernels.records_steps and not is_eager:
            from .step_graphs import StepGraphs

            self.graphs = StepGraphs(model_config.num_heads, model_config.num_kv_heads)
        self.batch_builder = BatchBuilder(
            config.block_size, self.device, with_rope_lens=model_config.rope.type == "dynamic"
        )
        self.sampler = Sampler(kernels, model_config.vocab_size, self.device)
        self.reporter = Reporter(self.model.logits, model_config.vocab_size, kernels)
        if self.device.type != "cpu":
            # No larger than the logits of the step that memory is measured by.
            self.reporter.max_rows = min(self.reporter.max_rows, config.max_num_seqs)
        num_blocks = config.num_blocks or self._num_blocks_that_fit()
        self.kv_cache = self._new_kv_cache(num_blocks, self.sizes.num_host_blocks)

    def describe(self) -> str:
        """What it computes in, on and by."""
        dtype, threads = str(self.dtype).removeprefix("torch."), ""
        if self.num_threads is not None:
            threads = f" with {self.num_threads} thread{'s' * (self.num_threads > 1)}"
        parts = [f"weights in {self.config.quantization}"] if self.config.quantization else []
        if self.kv_dtype != self.dtype:
            parts.append(f"KV in {self.config.kv_cache_dtype}")
        narrower = f" with {' and '.join(parts)}" if parts else ""
        return f"{dtype}{narrower} on {self.device}{threads}; attention by {self.model.kernels.name}"

    def execute(self, schedule: Schedule) -> StepOutput:
        """Run one step. Returns a token for each of schedule.sampled_requests."""
        # No parameter requires a gradient, so no graph is made: inference_mode would only cost its 40 µs.
        # Triton launches on the current GPU, which need not be ours.
        with self._on_device:
            self._copy_blocks(schedule)
            if not schedule.requests:
                return StepOutput()
            batch = self.batch_builder.build(schedule)
            masks = GrammarMasks.start(schedule.sampled_requests)
            try:
                logits, best, asked = self.compute(batch)
                step = self.sampler.sample(logits, schedule.sampled_requests, masks, best)
            finally:
                if masks is not None:  # in the end their worker has left the requests alone
                    masks.wait()
            if masks is not None:
                masks.check(step)
            if asked is not None:
                step.reports = self.reporter.report(schedule.asked_rows(), asked)
            return step

    def compute(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None]:
        """The model's part of a step: logits to sample from, the best of each row where that comes with
        them, and the hidden states that reports ask for.
        """
        if self.graphs is None:
            hidden = self.model(batch, self.kv_cache)
        elif batch.is_decode and batch.num_tokens <= self.graphs.most_decodes:
            logits, tokens, highest = self.graphs.run(self._next_logits, batch, self.kv_cache)
            return logits, (tokens, highest), None
        else:  # apart, as any number of rows may be wanted
            query, residual = self.graphs.run(self.model.fill, batch, self.kv_cache)
            hidden = self.model.finish(query, residual, batch, self.kv_cache)
        num_logits = batch.num_logits
        logits = self.model.logits(hidden[:num_logits]) if num_logits else hidden
        return logits, None, hidden[num_logits:] if batch.num_rows > num_logits else None

    def _next_logits(self, batch: Batch, kv_cache: KVCache) -> tuple[Tensor, ...]:
        """Of a batch that is sampled from behind every token, with the best of them: nearly for nothing."""
        logits = self.model.logits(self.model(batch, kv_cache))
        return logits, *self.model.kernels.greedy(logits)

    def _copy_blocks(self, schedule: Schedule) -> None:
        if schedule.swap_out:
            self.kv_cache.swap_out(schedule.swap_out)
        if schedule.swap_in:
            self.kv_cache.swap_in(schedule.swap_in)
        if schedule.copies:
            self.kv_cache.copy_blocks(schedule.copies, self.model.kernels)

    def _new_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> KVCache:
        block_size = self.config.block_size
        try:
            return KVCache(
                self.model_config, num_blocks, block_size, self.kv_dtype, self.device, num_host_blocks
            )
        except RuntimeError as error:  # torch has no narrower one for a CPU
            size = self.sizes.block_bytes / 2**30
            host = f" with {num_host_blocks * size:,.1f} GiB on the host" if num_host_blocks else ""
            raise ConfigError(
                f"no memory for num_blocks {num_blocks}: {num_blocks * size:,.1f} GiB{host} cannot be "
                f"allocated on {self.device}; lower it, or leave it out to use what is free"
            ) from error

    def _num_blocks_that_fit(self) -> int:
        if self.device.type == "cpu":
            free = kv_bytes_on_cpu(self.config)
        else:
            free = kv_bytes_on_gpu(self.config, self.device, self._profile()) - self._most_partial_bytes()
        size = self.sizes.block_bytes
        if free < size:
            raise ConfigError(
                f"no memory for a KV cache: {free / 2**20:,.0f} MiB are left, one block takes "
                f"{size / 2**20:,.2f} MiB; raise {'cpu' if self.device.type == 'cpu' else 'gpu'}"
                "_memory_utilization or lower max_num_batched_tokens"
            )
        return min(free // size, self.sizes.most_blocks)

    def _most_partial_bytes(self) -> int:
        """What split decodes take at most: the profiled step has hardly any. A row may be wanted twice."""
        if not self.model.kernels.needs_partials:
            return 0
        from ..kernels.gpu.attention.split_kv import most_partial_bytes

        sizes, model = self.sizes, self.model_config
        return most_partial_bytes(
            2 * self.config.max_num_seqs, sizes.max_model_len, model.num_heads, model.head_dim, SPLIT
        )

    def _profile(self) -> int:
        """Run a step of the largest size. Returns the bytes that torch held at its peak, KV not counted."""
        lengths = self._largest_step()
        # What takes most memory to sample.
        params = SamplingParams(top_p=0.9, min_p=0.1, typical_p=0.9, presence_penalty=1.0, logprobs=5)
        blocks = self.sizes.new_block_manager(
            len(self.model_config.layer_groups) * sum(-(-n // self.config.block_size) for n in lengths)
        )
        scheduler = Scheduler(
            blocks, max_num_seqs=len(lengths), max_num_batched_tokens=sum(lengths), watermark=0.0
        )
        for i, n in enumerate(lengths):
            # Each in a namespace of its own: what one finds of another's blocks is not computed.
            name = str(i)
            scheduler.add(
                Request(name, None, [0] * n, params, n + 1, frozenset(), 0, namespace=name.encode())
            )
        schedule = scheduler.schedule()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.kv_cache = self._new_kv_cache(blocks.pool.num_blocks)
        self.execute(schedule)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - self.kv_cache.num_bytes
        del self.kv_cache
        self.sampler = Sampler(self.model.kernels, self.model_config.vocab_size, self.device)
        torch.cuda.empty_cache()
        return peak

    def warm_up(self) -> int:
        """Compile what the model needs, so that no request waits for it. Returns how many kernels that are.

        None where the torch backend or the interpreter runs. It writes into the KV cache, which nobody may be
        using. Triton keeps what it compiled on disk: the next start takes a fraction of the time.
        """
        kernels, num_blocks = self.model.kernels, self.kv_cache.num_blocks
        if not kernels.compiles_at_launch:
            return 0
        with tqdm(desc="Compiling kernels", unit="kernel", delay=1.0) as bar, listening(bar.update):
            self.execute(self._end_of_a_prompt(self.sizes.max_step_tokens, EVERY_WAY_TO_SAMPLE[0]))
            for params in EVERY_WAY_TO_SAMPLE:
                self.execute(self._end_of_a_prompt(1, params))
            if num_blocks > 1:
                self.kv_cache.copy_blocks([(0, num_blocks - 1)], kernels)
            return int(bar.n)

    def _end_of_a_prompt(self, most_new: int, params: SamplingParams) -> Schedule:
        """So many tokens at the end of a prompt, which is so long that a decode there is split."""
        blocks = self.sizes.new_block_manager(self.kv_cache.num_blocks)
        length = blocks.longest_fit(min(2 * SPLIT, max(1, self.sizes.max_model_len - 1)))
        if not length:
            return Schedule()  # a pool that holds no request at all
        num_new = min(length, most_new)
        request = Request("", None, [0] * length, params, length + 1, frozenset(), 0)
        request.num_computed_tokens = length - num_new
        request.blocks = blocks.open(request.token_ids)
        blocks.start(request.blocks, [[] for _ in blocks.windows])
        for start, end in ((0, length - num_new), (length - num_new, length)):
            assert blocks.grow(request.blocks, start, end, []), "no room for what fits"
        return Schedule([request], [num_new], [request], [0], num_tokens=num_new)

    def _largest_step(self) -> list[int]:
        """The token budget as the most sequences there may be, so that the logits are largest too."""
        budget = self.sizes.max_num_batched_tokens
        num_seqs = min(self.config.max_num_seqs, budget)
        share, rest = divmod(min(budget, num_seqs * self.sizes.max_model_len), num_seqs)
        return [share + (i < rest) for i in range(num_seqs)]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
