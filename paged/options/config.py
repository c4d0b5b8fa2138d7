"""EngineConfig: every option of the engine, validated once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from ..base.arguments import strict
from ..base.errors import ConfigError, DivisionError
from ..base.validation import check_bool, check_int, check_number, shown

if TYPE_CHECKING:
    from .speculative_config import SpeculativeConfig

DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATIONS = ("int8", "int4")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3")
ATTENTION_BACKENDS = ("auto", "triton", "numba", "torch")
POLICIES = ("fcfs", "priority", "longest-prefix-match", "fair")
PREEMPTION_MODES = ("auto", "recompute", "swap")
MIN_BLOCK_SIZE = 8
MAX_BLOCK_SIZE = 256
MAX_RANKS = 1024
DEFAULT_NUM_SEQS = 256
DEFAULT_IMAGES = 4  # of a prompt
_DTYPE_NAMES = {"half": "float16", "float": "float32"}
_POLICY_METHODS = ("preempts", "rank", "push", "peek", "pop", "remove", "generated", "__len__", "__iter__")
_OPTIONAL_TEXTS = {
    "tokenizer": "a directory or a hub id",
    "revision": "a branch, tag or commit",
    "tokenizer_revision": "a branch, tag or commit",
    "generation_config": "'auto', 'paged', 'vllm' or a directory",
}
_OPTIONAL_COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_blocks",
    "long_prefill_token_threshold",
    "max_num_partial_prefills",
    "max_waiting",
    "max_queued_tokens",
    "num_threads",
    "state_interval",
)


@partial(strict, vllm="EngineArgs", error=ConfigError, name="LLMEngine")
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of an `LLMEngine`.

    model: a local directory, a GGUF file, a Hugging Face hub id, "owner/name:Q4_K_M" for a quantisation in a
        repository of GGUF files, or "demo" for the checkpoint that ships with `paged`.
    tokenizer: a directory or hub id, for another tokenizer than the model's own; None takes the model's own.
    revision: branch, tag or commit of the model on the hub; None takes the hub's default branch.
    tokenizer_revision: branch, tag or commit of the tokenizer on the hub; None takes `revision` if the
        tokenizer is the model's own.
    generation_config: default sampling parameters: "auto" reads the checkpoint's generation_config.json;
        "paged" (or "vllm") takes `SamplingParams()`; a directory names another generation_config.json.
    dtype: of activations, and of weights unless a narrower type holds the same values; "auto" is the
        checkpoint's, "half" is float16, "float" is float32; a torch.dtype is accepted too. On a CPU, "auto"
        replaces float16 by float32, and bfloat16 too if the CPU has no bfloat16 instructions; on a GPU it
        replaces float16 by bfloat16 for models whose activations exceed float16.
    quantization: quantize the weights of an unquantized checkpoint while loading: "int8" has a scale per
        output; "int4" has a scale and a zero point per 32 inputs, but keeps the output head, attention's
        value projections and half of the layers' `down` in int8. None takes the weights as they are.
    kv_cache_dtype: of K and V in the cache; "auto" is dtype. With dtype float32, "float16" and "bfloat16" are
        allowed too. "int8" and "fp8" ("fp8_e4m3") have a scale per token and head; on a GPU fp8 needs sm_89
        or later from NVIDIA.
    device: "auto" takes a GPU if torch finds one, else the CPU.
    block_size: tokens per block, a power of two from 8 to 256; None takes 64 on a GPU that then loads whole
        tiles of K and V by tensor descriptors (sm_90 and sm_100 with heads of 128 or 256 in half precision),
        else 16.
    max_model_len: maximum number of tokens of prompt and output together; None takes the model's limit.
    max_num_seqs: how many requests may run at once; None is 256, or fewer if the recurrent states of 256
        requests would take more than a quarter of the memory.
    max_num_batched_tokens: token budget of a step; None takes 8192 on a GPU and 512 on a CPU. A longer step
        on a CPU would delay decodes and gain nothing.
    num_blocks: blocks in the KV cache; None takes as many as fit into the share of memory given by
        gpu_memory_utilization or cpu_memory_utilization.
    gpu_memory_utilization: share of the GPU's memory for weights, activations and KV together.
    cpu_memory_utilization: share of the RAM that is free once the weights are loaded, for KV.
    enable_prefix_caching: reuse the KV of full blocks for prompts with the same beginning; None does so.
    state_snapshots: for models with states: maximum number of states that are cached for prompts with the
        same beginning; 0 caches no prefix. None takes as many as fit into an eighth of the memory for blocks.
    state_interval: for models with states: a prompt caches a state at each multiple of this many tokens,
        rounded up to whole blocks. None takes the number of tokens that takes about 200 ms to compute, but at
        least a step, and at least as many as have K and V as large as a state.
    scheduling_policy: which request runs next: "fcfs", the earliest; "priority", the lowest number, which may
        preempt requests of higher numbers; "longest-prefix-match", the request with most of its prompt
        cached; "fair", a request of the tenant with the least service; or a `scheduler.policies.Policy`
        object, for this engine alone.
    tenant_weights: for "fair", the relative share of each tenant; None takes 1 for each.
    long_prefill_token_threshold: maximum prompt tokens of one request in a step; None sets no limit.
    max_num_partial_prefills: maximum number of requests with partly computed prompts; None sets no limit.
    max_waiting: maximum number of waiting requests; more are refused. None sets no limit.
    max_queued_tokens: maximum number of tokens of all waiting requests together; a request that exceeds it is
        refused, unless no other waits. None sets no limit.
    watermark: share of the blocks that stay free for running requests when a request is admitted.
    preemption_mode: what happens to the KV of a preempted request: "recompute" frees it and computes it
        again, "swap" moves it to host memory (needs swap_space), "auto" takes what is estimated to be faster.
    max_preemptions: number of preemptions after which a request is not preempted again.
    swap_space: host memory for swapping in GiB; None takes 4 with a GPU and 0 on a CPU.
    attention_backend: "triton", "numba" or "torch"; "auto" takes triton on a GPU, numba on a CPU, and torch
        where that is not installed or has no kernel for the model's heads.
    num_threads: CPU threads of operations, one setting for all engines of the process. None takes
        OMP_NUM_THREADS or the number given to torch.set_num_threads, if either is set, and else the number of
        cores that affinity and container allow.
    pipeline_parallel_size: how many stages the layers are divided into; each stage has its own processes, see
        docs/parallel.md.
    tensor_parallel_size: how many processes share the weights of each layer, in each stage.
    pipeline_layers: the number of layers of each stage, in the order of stages; None takes numbers that give
        each stage about equally many bytes.
    rank_timeout_s: seconds without an answer after which a process of the model counts as hung; must be
        longer than the longest step.
    weights_cache: on a CPU, a folder for packed weights: the first start writes them, later starts map them.
        Models under 64 MB are not written. False turns it off; None takes paged/weights in the user's cache
        ($XDG_CACHE_HOME). See docs/starts.md.
    verify_weights_cache: before mapping packed weights, hash the checkpoint's contents instead of trusting
        the size, inode and times of its files.
    deterministic: make results batch-invariant: a request's result is bitwise equal in any batch. Needs a CPU
        with numba; there, only bfloat16 on ARM needs this option.
    speculative_config: how to guess tokens. A step verifies the guesses, and no output changes. A dict or its
        JSON: {"method": "ngram", "num_speculative_tokens": 4}, {"method": "suffix"} or, for a draft model,
        {"model": "owner/name"}; see `SpeculativeConfig`. None guesses nothing.
    enforce_eager: neither record nor replay steps. By default, a CPU with numba records and replays small
        steps, and a GPU captures decodes as CUDA graphs.
    cudagraph_capture_sizes: numbers of requests for which decodes are captured as CUDA graphs on a GPU; a
        decode step is padded to the next of them. None takes 1, 2, 4 and the multiples of 8 up to
        max_cudagraph_capture_size.
    max_cudagraph_capture_size: maximum number of requests in a CUDA graph; larger steps run without a graph.
        None takes max_num_seqs, or the largest of cudagraph_capture_sizes.
    async_scheduling: whether the host schedules the next step while the device computes. None takes True on a
        GPU with Triton's kernels if one process holds the model; elsewhere True is an error.
    enable_lora: take requests with LoRA adapters; see docs/lora.md.
    max_loras: maximum number of adapters in a step. Memory for each is taken at the start.
    max_lora_rank: the largest rank of an adapter.
    max_cpu_loras: how many adapters stay in host memory, at least max_loras; None takes max_loras.
    lora_target_modules: the endings of the names of layers that adapters may change, as "q_proj", "experts"
        for those of experts; None takes all linear layers except experts, embedding and head.
    seed: derives the seeds of requests that give none.
    skip_tokenizer_init: load no tokenizer: prompts must be token ids, and outputs have no text.
    language_model_only: load only the text part of a model that sees images.
    limit_mm_per_prompt: maximum number of images in a prompt, {"image": 4} by default.
    mm_processor_kwargs: values that replace values of preprocessor_config.json, by its keys.
    mm_processor_cache_gb: maximum memory, in GiB, for embeddings of images that later prompts may reuse.
    allowed_media_domains: a host whose https: URLs of images are fetched, such as images.example, or
        several. By default nothing is fetched. See docs/images.md.

    Raises ConfigError naming the value and what is allowed.
    """

    model: str
    _: KW_ONLY
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    generation_config: str = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16", "float", "half"] | Any = "auto"
    quantization: Literal["int8", "int4"] | None = None
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3"] = "auto"
    device: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.92
    cpu_memory_utilization: float = 0.4
    enable_prefix_caching: bool | None = None
    state_snapshots: int | None = None
    state_interval: int | None = None
    scheduling_policy: str | Any = "fcfs"
    tenant_weights: Mapping[str, float] | None = None
    long_prefill_token_threshold: int | None = None
    max_num_partial_prefills: int | None = None
    max_waiting: int | None = None
    max_queued_tokens: int | None = None
    watermark: float = 0.01
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    max_preemptions: int = 8
    swap_space: float | None = None
    attention_backend: Literal["auto", "triton", "numba", "torch"] = "auto"
    num_threads: int | None = None
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_layers: Sequence[int] | None = None
    rank_timeout_s: float = 30.0
    weights_cache: str | Literal[False] | None = None
    verify_weights_cache: bool = False
    deterministic: bool = False
    speculative_config: str | Any = None
    enforce_eager: bool = False
    cudagraph_capture_sizes: Sequence[int] | None = None
    max_cudagraph_capture_size: int | None = None
    async_scheduling: bool | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_target_modules: Sequence[str] | None = None
    seed: int = 0
    skip_tokenizer_init: bool = False
    language_model_only: bool = False
    limit_mm_per_prompt: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    mm_processor_cache_gb: float = 4.0
    allowed_media_domains: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self._take_defaults()
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"model must be a directory, a GGUF file, a hub id or 'demo', got {shown(self.model)}"
            )
        for name, wanted in _OPTIONAL_TEXTS.items():
            if not isinstance(value := getattr(self, name), str | None) or value == "":
                raise ConfigError(f"{name} must be {wanted}, got {shown(value)}")
        if not isinstance(self.device, str):
            raise ConfigError(f"device must be a string such as 'cpu' or 'cuda:0', got {shown(self.device)}")
        cache = self.weights_cache
        if (not isinstance(cache, str | None) and cache is not False) or cache == "":
            raise ConfigError(f"weights_cache must be a folder, False or None, got {shown(cache)}")
        for name in (
            "verify_weights_cache",
            "deterministic",
            "enforce_eager",
            "enable_lora",
            "skip_tokenizer_init",
            "language_model_only",
        ):
            check_bool(ConfigError, name, getattr(self, name))
        if self.enable_prefix_caching is not None:
            check_bool(ConfigError, "enable_prefix_caching", self.enable_prefix_caching)
        if self.state_snapshots is not None:
            check_int(ConfigError, "state_snapshots", self.state_snapshots, 0)
        if self.async_scheduling is not None:
            check_bool(ConfigError, "async_scheduling", self.async_scheduling)
        _check_choice("dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            _check_choice("quantization", self.quantization, QUANTIZATIONS)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        check_policy(self.scheduling_policy, self.tenant_weights)
        if self.speculative_config is not None:
            from .speculative_config import SpeculativeConfig

            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        _check_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        self._check_sizes()
        if self.cudagraph_capture_sizes is not None or self.max_cudagraph_capture_size is not None:
            from .graph_sizes import check_sizes

            check_sizes(self.cudagraph_capture_sizes, self.max_cudagraph_capture_size)
        self._check_ranks()
        check_number(ConfigError, "mm_processor_cache_gb", self.mm_processor_cache_gb, 0.0)
        if self.limit_mm_per_prompt is not None or self.mm_processor_kwargs is not None:
            from .image_options import check_kwargs, image_limits_of

            check_kwargs(self.mm_processor_kwargs)
            object.__setattr__(self, "limit_mm_per_prompt", image_limits_of(self.limit_mm_per_prompt))
        if self.allowed_media_domains is not None:
            from .media_domains import media_domains_of

            object.__setattr__(self, "allowed_media_domains", media_domains_of(self.allowed_media_domains))
        check_int(ConfigError, "max_loras", self.max_loras, 1, 4096)
        check_int(ConfigError, "max_lora_rank", self.max_lora_rank, 1, 1024)
        lora = self.max_loras, self.max_lora_rank, self.max_cpu_loras, self.lora_target_modules
        if self.enable_lora or lora != (1, 16, None, None):
            from .lora_request import check_slots

            check_slots(self.enable_lora, *lora)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The parsed speculative_config; None if no tokens are guessed."""
        return cast("SpeculativeConfig | None", self.speculative_config)

    @property
    def num_ranks(self) -> int:
        """Number of processes that hold a part of the model."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def num_seats(self) -> int:
        """Maximum number of requests that run at once, unless recurrent states take too much memory."""
        return DEFAULT_NUM_SEQS if self.max_num_seqs is None else self.max_num_seqs

    def _take_defaults(self) -> None:
        """Replace vLLM's spellings of a default, and other names of dtypes, by the usual ones."""
        if self.attention_backend is None:  # vLLM's default
            object.__setattr__(self, "attention_backend", "auto")
        if self.long_prefill_token_threshold == 0:  # vLLM's default: no limit
            object.__setattr__(self, "long_prefill_token_threshold", None)
        if self.limit_mm_per_prompt == {}:  # vLLM's default
            object.__setattr__(self, "limit_mm_per_prompt", None)
        dtype = self.dtype
        if type(dtype).__name__ == "dtype":  # torch's, which need not be imported to be named
            dtype = str(dtype).removeprefix("torch.")
        if isinstance(dtype, str):
            object.__setattr__(self, "dtype", _DTYPE_NAMES.get(dtype, dtype))

    def _check_sizes(self) -> None:
        if self.block_size is not None:
            size = check_int(ConfigError, "block_size", self.block_size, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
            if size & (size - 1):
                raise ConfigError(f"block_size must be a power of two, got {size}")
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
                    f"swap_space {self.swap_space:g} has no effect with preemption_mode 'recompute'; omit one"
                )

    def _check_ranks(self) -> None:
        """Check what of the options about several processes can be checked without the model."""
        for name in ("pipeline_parallel_size", "tensor_parallel_size"):
            check_int(ConfigError, name, getattr(self, name), 1, MAX_RANKS)
        check_number(ConfigError, "rank_timeout_s", self.rank_timeout_s, 1.0)
        num_stages = self.pipeline_parallel_size
        sizes = self.pipeline_layers
        if sizes is not None:
            if not isinstance(sizes, Sequence) or isinstance(sizes, str):
                raise ConfigError(
                    f"pipeline_layers must be a list of ints such as [12, 10], got {shown(sizes)}"
                )
            for size in sizes:
                check_int(ConfigError, "pipeline_layers", size, 1)
            if len(sizes) != num_stages:
                raise DivisionError(
                    f"pipeline_layers must have a number for each of the {num_stages} stages of "
                    f"pipeline_parallel_size, got {shown(sizes)}"
                )
        if self.num_ranks > 1 and ":" in self.device:
            raise DivisionError(
                f"device {self.device!r} is one device, and each of the {self.num_ranks} processes of the "
                "model needs its own: give 'cuda'"
            )
        if self.num_ranks > 1 and self.async_scheduling:
            raise DivisionError(
                f"async_scheduling=True is for a model in one process, and this one has {self.num_ranks}, "
                "whose steps in flight are of different requests; leave it out"
            )


def options_of(config: Any) -> dict[str, Any]:
    """Return the options that `EngineConfig` needs to make this config again. Raises ConfigError."""
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"engine_args must be EngineArgs or EngineConfig, got {shown(config)}")
    return {field.name: getattr(config, field.name) for field in fields(EngineConfig)}


def check_policy(policy: object, weights: object) -> None:
    """Raise ConfigError for an unknown policy or wrong tenant weights."""
    if isinstance(policy, str):
        _check_choice("scheduling_policy", policy, POLICIES)
    elif absent := [name for name in _POLICY_METHODS if not hasattr(policy, name)]:
        raise ConfigError(
            f"scheduling_policy must be one of {', '.join(POLICIES)} or a Policy, got {shown(policy)}, "
            f"which has no {absent[0]!r}"
        )
    elif isinstance(policy, type) or any(True for _ in policy):  # type: ignore[attr-defined]
        raise ConfigError(f"scheduling_policy must be a new Policy without requests, got {shown(policy)}")
    if weights is None:
        return
    if not isinstance(weights, Mapping):
        raise ConfigError(f"tenant_weights must be a dict of tenants and numbers, got {shown(weights)}")
    if weights and policy != "fair":
        raise ConfigError(f"tenant_weights go with scheduling_policy 'fair', got {shown(policy)}")
    for tenant, weight in weights.items():
        check_number(ConfigError, f"tenant_weights[{tenant!r}]", weight, 0.0, above=True)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {shown(value)}")
