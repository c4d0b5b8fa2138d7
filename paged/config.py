"""EngineConfig: every option of the engine, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from .errors import ConfigError, reject_unknown
from .validation import check_bool, check_int, check_number, shown

DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATIONS = ("int8", "int4")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3")
ATTENTION_BACKENDS = ("auto", "triton", "numba", "torch")
POLICIES = ("fcfs", "priority", "longest-prefix-match", "fair")
PREEMPTION_MODES = ("auto", "recompute", "swap")
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 256
_OPTIONAL_COUNTS = (
    "max_model_len",
    "max_num_batched_tokens",
    "num_blocks",
    "long_prefill_token_threshold",
    "max_num_partial_prefills",
    "max_waiting",
    "num_threads",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an `LLMEngine`.

    model: a local directory, a Hugging Face hub id, or "demo" for the checkpoint that ships with `paged`.
    tokenizer: where the tokenizer is, if not beside the model.
    dtype: of activations, and of weights but where a narrower one holds the same numbers; "auto" takes the
        checkpoint's, on a CPU float32 in the place of float16, and of bfloat16 where the CPU has no
        instructions for it.
    quantization: of weights, as a plain checkpoint loads, on a CPU: "int8", with a scale for each output, or
        "int4", with a scale and a zero for every 32 inputs, and the output head in int8.
    kv_cache_dtype: of K and V in the cache; "auto" takes dtype, and where that is float32 there are also
        "float16" and "bfloat16". "int8" and "fp8", which is "fp8_e4m3", have a scale for each token and head;
        of GPUs, fp8 needs NVIDIA's from sm_89 on.
    device: "auto" takes a GPU where torch sees one, else the CPU.
    block_size: tokens per block, a power of two from 8 to 256.
    max_model_len: longest prompt plus output in tokens; None takes the model's.
    max_num_seqs: how many requests may run at once.
    max_num_batched_tokens: token budget of a step; None takes 8192 on a GPU and 512 on a CPU, where a
        step of that size already keeps the cores busy and a longer one only delays the decodes in it.
    num_blocks: blocks in the KV cache; None sizes it from memory, by the utilization of the device.
    gpu_memory_utilization: share of the GPU's memory for weights, activations and KV together.
    cpu_memory_utilization: share of the free RAM, once the weights are loaded, for KV.
    enable_prefix_caching: keep the KV of full blocks for prompts that begin alike.
    scheduling_policy: who runs next: "fcfs"; "priority", the lowest number first, preempting higher ones;
        "longest-prefix-match", most of the prompt cached first; "fair", the tenant that got least first.
    tenant_weights: for "fair", what a tenant is entitled to relative to others; 1 where nothing is said.
    long_prefill_token_threshold: most prompt tokens of one request in a step; None sets no limit.
    max_num_partial_prefills: how many requests may be in the middle of their prompts; None sets no limit.
    max_waiting: how many requests may wait before others are refused; None sets no limit.
    watermark: share of the blocks left free when a request is admitted, for those running to grow into.
    preemption_mode: what happens to the KV of a request that gives its blocks to others: "recompute" it,
        "swap" it to host memory, which needs swap_space, or "auto", whichever is estimated to take less time.
    max_preemptions: how often that may happen to a request before it is protected from it.
    swap_space: host memory for swapping in GiB; None takes 4 beside a GPU and 0 on a CPU.
    attention_backend: "triton", "numba" or "torch"; "auto" takes triton on a GPU and numba on a CPU, torch
        where numba is not installed.
    num_threads: of a CPU's operations, in the whole process: engines that live at once have as many. None
        takes OMP_NUM_THREADS or torch.set_num_threads where they were used, else the cores there are within
        the process's affinity and its container's limit.
    deterministic: the bits of a request do not depend on what it is batched with. On a CPU with numba, else
        an error; there it is so without it too, but in bfloat16 on an ARM.
    enforce_eager: compute every step anew; else small steps on a CPU with numba are recorded and repeated.
    seed: from which requests without a seed of their own derive one.
    skip_tokenizer_init: load no tokenizer; prompts are then token ids and outputs carry no text.

    Raises ConfigError naming the value and what is allowed.
    """

    model: str
    tokenizer: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    quantization: Literal["int8", "int4"] | None = None
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3"] = "auto"
    device: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.92
    cpu_memory_utilization: float = 0.4
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    tenant_weights: Mapping[str, float] | None = None
    long_prefill_token_threshold: int | None = None
    max_num_partial_prefills: int | None = None
    max_waiting: int | None = None
    watermark: float = 0.01
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    max_preemptions: int = 8
    swap_space: float | None = None
    attention_backend: Literal["auto", "triton", "numba", "torch"] = "auto"
    num_threads: int | None = None
    deterministic: bool = False
    enforce_eager: bool = False
    seed: int = 0
    skip_tokenizer_init: bool = False

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:
        """EngineConfig(**kwargs), with an UnknownArgumentError for a keyword that does not exist."""
        reject_unknown("LLMEngine", kwargs, {field.name for field in fields(cls)})
        return cls(**kwargs)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a directory, a hub id or 'demo', got {shown(self.model)}")
        if self.tokenizer is not None and not isinstance(self.tokenizer, str):
            raise ConfigError(f"tokenizer must be a directory or a hub id, got {shown(self.tokenizer)}")
        if not isinstance(self.device, str):
            raise ConfigError(f"device must be a string such as 'cpu' or 'cuda:0', got {shown(self.device)}")
        for name in ("deterministic", "enforce_eager", "enable_prefix_caching", "skip_tokenizer_init"):
            check_bool(ConfigError, name, getattr(self, name))
        _check_choice("dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            _check_choice("quantization", self.quantization, QUANTIZATIONS)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        check_policy(self.scheduling_policy, self.tenant_weights)
        _check_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        self._check_sizes()

    def _check_sizes(self) -> None:
        size = check_int(ConfigError, "block_size", self.block_size, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
        if size & (size - 1):
            raise ConfigError(f"block_size must be a power of two, got {size}")
        check_int(ConfigError, "max_num_seqs", self.max_num_seqs, 1)
        check_int(ConfigError, "seed", self.seed, 0, 2**63 - 1)
        check_int(ConfigError, "max_preemptions", self.max_preemptions, 1)
        for name in _OPTIONAL_COUNTS:
            if (value := getattr(self, name)) is not None:
                check_int(ConfigError, name, value, 1)
        for name in ("gpu_memory_utilization", "cpu_memory_utilization"):
            check_number(ConfigError, name, getattr(self, name), 0.0, 1.0, above=True)
        check_number(ConfigError, "watermark", self.watermark, 0.0, 0.5)
        if self.swap_space is not None:
            check_number(ConfigError, "swap_space", self.swap_space, 0.0)
            if self.swap_space and self.preemption_mode == "recompute":
                raise ConfigError(
                    f"swap_space {self.swap_space:g} is no use to preemption_mode 'recompute'; leave one out"
                )


def check_policy(name: str, weights: object) -> None:
    """Raise ConfigError for a policy that does not exist, or tenants' weights that are wrong."""
    _check_choice("scheduling_policy", name, POLICIES)
    if weights is None:
        return
    if not isinstance(weights, Mapping):
        raise ConfigError(f"tenant_weights must be a dict of tenants and numbers, got {shown(weights)}")
    if weights and name != "fair":
        raise ConfigError(f"tenant_weights go with scheduling_policy 'fair', got {shown(name)}")
    for tenant, weight in weights.items():
        check_number(ConfigError, f"the weight of tenant {tenant!r}", weight, 0.0, above=True)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {shown(value)}")
