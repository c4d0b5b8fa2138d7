"""ModelRunner: the model and its KV cache, and the forward of one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from .batch import Batch
from .block_manager import BlockManager
from .config import EngineConfig
from .devices import kv_bytes_on_cpu, kv_bytes_on_gpu, resolve_backend, resolve_device, resolve_dtype
from .errors import ConfigError
from .kernels.backend import load_kernels
from .kv_cache import KVCache, block_bytes
from .layers import can_pack
from .models.config import ModelConfig
from .models.decoder import Decoder
from .request import Request
from .sampler import sample
from .sampling_params import SamplingParams
from .scheduler import Schedule
from .weights import check_weights, load_weights, torch_dtype

MAX_BATCHED_TOKENS = {"cuda": 8192, "cpu": 512}


class ModelRunner:
    """Holds all device memory: the weights, and the KV cache sized from what they leave.

    Raises ConfigError where the options do not fit this machine.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, directory: Path, *, use_tqdm: bool = False
    ) -> None:
        self.config, self.model_config = config, model_config
        self.device = resolve_device(config.device)
        self.dtype = torch_dtype(resolve_dtype(config.dtype, model_config.dtype, self.device))
        self.max_num_batched_tokens = config.max_num_batched_tokens or MAX_BATCHED_TOKENS[self.device.type]
        self.max_model_len = config.max_model_len or model_config.max_context
        if self.max_model_len > model_config.max_context:
            raise ConfigError(
                f"max_model_len {self.max_model_len} is more than the {model_config.max_context} of the model"
            )
        kernels = load_kernels(resolve_backend(config.attention_backend, self.device))
        with torch.device("meta"):
            # Before anything is allocated: a config that disagrees may ask for any amount.
            check_weights(Decoder(model_config, kernels).hf_tensors(), directory)
        with torch.device(self.device), _default_dtype(self.dtype):
            self.model = Decoder(model_config, kernels).to(self.device)
        load_weights(self.model.hf_tensors(), directory, use_tqdm=use_tqdm)
        if can_pack(self.device, self.dtype):
            self.model.pack_linears()
        self.kv_cache = self._new_kv_cache(config.num_blocks or self._num_blocks_that_fit())

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> list[int | None]:
        """Run one step. Returns what `Scheduler.update` takes: one token for each of schedule.sampled."""
        # Triton launches on the current GPU, which need not be ours.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            batch = Batch.from_schedule(schedule, self.config.block_size, self.device)
            logits = self.model(batch, self.kv_cache)
            return sample(logits, schedule.sampled_requests)

    def _new_kv_cache(self, num_blocks: int) -> KVCache:
        try:
            return KVCache(self.model_config, num_blocks, self.config.block_size, self.dtype, self.device)
        except RuntimeError as error:  # torch has no narrower one for a CPU
            size = num_blocks * block_bytes(self.model_config, self.config.block_size, self.dtype)
            raise ConfigError(
                f"no memory for num_blocks {num_blocks}: {size / 2**30:,.1f} GiB cannot be allocated on "
                f"{self.device}; lower it, or leave it out to use what is free"
            ) from error

    def _num_blocks_that_fit(self) -> int:
        if self.device.type == "cpu":
            free = kv_bytes_on_cpu(self.config)
        else:
            free = kv_bytes_on_gpu(self.config, self.device, self._profile())
        size = block_bytes(self.model_config, self.config.block_size, self.dtype)
        # More than every request at full length could fill is of no use.
        most = self.config.max_num_seqs * -(-self.max_model_len // self.config.block_size)
        if free < size:
            raise ConfigError(
                f"no memory for a KV cache: {free / 2**20:,.0f} MiB are left, one block takes "
                f"{size / 2**20:,.2f} MiB; raise {'cpu' if self.device.type == 'cpu' else 'gpu'}"
                "_memory_utilization or lower max_num_batched_tokens"
            )
        return min(free // size, most)

    @torch.inference_mode()
    def _profile(self) -> int:
        """Run a step of the largest size. Returns the bytes that torch held at its peak, KV not counted."""
        lengths = self._largest_step()
        params = SamplingParams(top_k=50, top_p=0.9, min_p=0.1)  # what takes most memory to sample
        requests = [
            Request(str(i), None, [0] * n, params, n + 1, frozenset(), 0) for i, n in enumerate(lengths)
        ]
        schedule = Schedule()
        blocks = BlockManager(sum(-(-n // self.config.block_size) for n in lengths), self.config.block_size)
        for request in requests:
            table = blocks.grow(request.request_id, request.num_tokens)
            assert table is not None
            schedule.add(request, request.num_tokens, table)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.kv_cache = self._new_kv_cache(blocks.pool.num_blocks)
        self.execute(schedule)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - self.kv_cache.num_bytes
        del self.kv_cache
        torch.cuda.empty_cache()
        return peak

    def _largest_step(self) -> list[int]:
        """The token budget as the most sequences there may be, so that the logits are largest too."""
        num_seqs = min(self.config.max_num_seqs, self.max_num_batched_tokens)
        share, rest = divmod(min(self.max_num_batched_tokens, num_seqs * self.max_model_len), num_seqs)
        return [share + (i < rest) for i in range(num_seqs)]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
