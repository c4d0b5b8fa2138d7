"""EngineConfig: every option of the engine, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from .errors import ConfigError, reject_unknown
from .validation import check_int, check_number

DTYPES = ("auto", "float32", "float16", "bfloat16")
BACKENDS = ("auto", "triton", "torch")
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an `LLMEngine`.

    model: a local directory, a Hugging Face hub id, or "demo" for the checkpoint that ships with `paged`.
    tokenizer: where the tokenizer is, if not beside the model.
    dtype: of weights, activations and KV; "auto" takes the checkpoint's, on a CPU without fast bfloat16
        float32 in its place.
    device: "auto" takes a GPU where torch sees one, else the CPU.
    block_size: tokens per block, a power of two from 8 to 256.
    max_model_len: longest prompt plus output in tokens; None takes the model's.
    max_num_seqs: how many requests may run at once.
    max_num_batched_tokens: token budget of a step; None takes 8192 on a GPU and 512 on a CPU, where a
        step of that size already keeps the cores busy and a longer one only delays the decodes in it.
    num_blocks: blocks in the KV cache; None sizes it from memory, by the utilization of the device.
    gpu_memory_utilization: share of the GPU's memory for weights, activations and KV together.
    cpu_memory_utilization: share of the free RAM, once the weights are loaded, for KV.
    attention_backend: "triton" or "torch"; "auto" takes triton on a GPU and torch on a CPU.
    seed: from which requests without a seed of their own derive one.
    skip_tokenizer_init: load no tokenizer; prompts are then token ids and outputs carry no text.

    Raises ConfigError naming the value and what is allowed.
    """

    model: str
    tokenizer: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.92
    cpu_memory_utilization: float = 0.4
    attention_backend: Literal["auto", "triton", "torch"] = "auto"
    seed: int = 0
    skip_tokenizer_init: bool = False

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:
        """EngineConfig(**kwargs), with an UnknownArgumentError for a keyword that does not exist."""
        reject_unknown("LLMEngine", kwargs, {field.name for field in fields(cls)})
        return cls(**kwargs)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a directory, a hub id or 'demo', got {self.model!r}")
        if self.tokenizer is not None and not isinstance(self.tokenizer, str):
            raise ConfigError(f"tokenizer must be a directory or a hub id, got {self.tokenizer!r}")
        if not isinstance(self.device, str):
            raise ConfigError(f"device must be a string such as 'cpu' or 'cuda:0', got {self.device!r}")
        if not isinstance(self.skip_tokenizer_init, bool):
            raise ConfigError(f"skip_tokenizer_init must be True or False, got {self.skip_tokenizer_init!r}")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("attention_backend", self.attention_backend, BACKENDS)
        self._check_sizes()

    def _check_sizes(self) -> None:
        size = check_int(ConfigError, "block_size", self.block_size, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
        if size & (size - 1):
            raise ConfigError(f"block_size must be a power of two, got {size}")
        check_int(ConfigError, "max_num_seqs", self.max_num_seqs, 1)
        check_int(ConfigError, "seed", self.seed, 0, 2**63 - 1)
        for name in ("max_model_len", "max_num_batched_tokens", "num_blocks"):
            if (value := getattr(self, name)) is not None:
                check_int(ConfigError, name, value, 1)
        for name in ("gpu_memory_utilization", "cpu_memory_utilization"):
            check_number(ConfigError, name, getattr(self, name), 0.0, 1.0, above=True)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
