"""The interface that every backend implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .attention_options import AttentionOptions, AttentionPlan
from .steps import Needs, StepRecorder

if TYPE_CHECKING:
    from .routing import ExpertRows, RoutingOptions
    from .seats import TakeParameters, UnpackStep


class Kernels(Protocol):
    """A backend: one implementation of every operation, and its capabilities.

    The modules `gpu.backend`, `cpu.backend` and `plain.backend` implement this protocol. `reference` defines
    the operations and documents the shapes of their parameters.
    """

    name: str  # for messages; callers decide by the capabilities below
    has_linear: bool  # batch-invariant kernels for linear layers, with weights in panels
    has_coded_linear: bool  # batch-invariant kernels for weights in codes, see `codes`
    has_grouped_linear: bool  # `grouped_linear` is one launch, which reads the offsets on the device
    compiles_at_launch: bool  # a kernel is compiled when it is first launched: an engine should warm up
    max_group: int  # the most query heads that may share a KV head in attention
    split_keys: int  # the length from which attention may split the context of a decode

    @property
    def unpack_step(self) -> UnpackStep | None:
        """The function that makes a step's batch on the device; None if the host makes batches."""

    @property
    def take_parameters(self) -> TakeParameters | None:
        """Looks up rows' sampling parameters by seat on the device. None if the host sends them."""

    @property
    def step_recorder(self) -> Callable[[int, Sequence[int]], StepRecorder] | None:
        """The factory of step recorders; None if steps are not recorded.

        It takes num_heads, and num_kv_heads of each layer group.
        """

    @property
    def greedy_of_allowed(self) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] | None:
        """See `reference.greedy_of_allowed`. None if masking the logits first is as fast."""

    def partial_bytes(self, num_seqs: int, max_keys: int, num_heads: int, value_dim: int) -> int:
        """Return the maximum size in bytes of attention's partial results, which grow with the batch."""

    def compile_for(self, needs: Needs, progress: Any = None) -> Callable[[], None]:
        """Begin to compile the kernels that an engine needs. Return a function that waits until they are
        compiled.

        progress: shows what is being compiled, see `cpu.compiling.Progress`; None logs it instead.
        """

    def listening(self, compiled: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context that calls `compiled` for every kernel that a launch inside it compiles."""

    def most_decode_q(self, head_dim: int, group: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> int:
        """Return the maximum number of new tokens of a decode; see max_decode_q of
        `gpu.attention.paged_attention`.

        group: number of query heads that share a KV head.
        """

    def head_dims(self, target: str) -> range:
        """Return the head dimensions that attention supports. Raises ValueError for an unsupported GPU.

        target: what kernels are compiled for; "" on a CPU, where Triton's are interpreted.
        """

    def check_cache_dtype(self, dtype: torch.dtype, target: str) -> None:
        """Raise ValueError if a target (see `head_dims`) cannot read a cache of this dtype."""

    def take_rows(self, table: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor: ...

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None = None,
        *,
        unit_offset: bool = False,
    ) -> Tensor: ...

    def rms_norm_into(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        *,
        unit_offset: bool = False,
        add: bool = False,
    ) -> None: ...

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor: ...

    def rotary_store_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor | None,
        value_cache: Tensor | None,
        slot_mapping: Tensor | None,
        *,
        query_norm_weight: Tensor | None = None,
        key_norm_weight: Tensor | None = None,
        eps: float = 1e-6,
        unit_offset: bool = False,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
        fixed_key_scales: Tensor | None = None,
        fixed_value_scales: Tensor | None = None,
    ) -> Tensor: ...

    def silu_and_mul(self, x: Tensor) -> Tensor: ...

    def gelu_and_mul(self, x: Tensor, up: Tensor | None = None) -> Tensor: ...

    def gelu(self, x: Tensor, *, tanh: bool) -> None: ...

    def relu_squared(self, x: Tensor) -> None: ...

    def add(self, x: Tensor, out: Tensor) -> None: ...

    def scale_and_cap(self, x: Tensor, factor: float, softcap: float | None = None) -> None: ...

    def scale_rows(self, x: Tensor, factors: Tensor) -> None: ...

    def clamped_swiglu(self, x: Tensor, limit: float, alpha: float) -> Tensor: ...

    def route(
        self,
        logits: Tensor,
        options: RoutingOptions,
        correction_bias: Tensor | None = None,
        expert_scales: Tensor | None = None,
        count: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def sort_by_expert(
        self, experts: Tensor, num_experts: int, adapters: Tensor | None = None
    ) -> ExpertRows: ...

    def grouped_linear(
        self,
        x: Tensor,
        weight: Tensor,
        offsets: Tensor,
        sources: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Multiply the rows of each expert by the expert's weight, in its loaded dtype.

        For packed weights, see `panels` and `codes`. The offsets stay on the device; the launch does not
        depend on them.
        """

    def sum_experts(
        self,
        x: Tensor,
        places: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor: ...

    def scale_by_sigmoid(self, x: Tensor, gate: Tensor) -> None: ...

    def gated_norm(
        self, x: Tensor, weight: Tensor | None, gate: Tensor, eps: float, *, gate_first: bool = False
    ) -> Tensor: ...

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        run_inputs: Tensor | None = None,
        runs: Tensor | None = None,
        *,
        gated: bool,
    ) -> Tensor:
        """Convolve along time. As in `gated_delta`, the launch depends only on the number of tokens."""

    def gated_delta(
        self,
        qkv: Tensor,
        gates: Tensor,
        rates: Tensor,
        time_bias: Tensor,
        states: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        run_inputs: Tensor | None = None,
        runs: Tensor | None = None,
    ) -> Tensor: ...

    def mamba2_scan(
        self,
        x: Tensor,
        time_steps: Tensor,
        rates: Tensor,
        time_bias: Tensor,
        skip: Tensor,
        states: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        run_inputs: Tensor | None = None,
        runs: Tensor | None = None,
        *,
        limits: tuple[float, float],
    ) -> Tensor: ...

    def add_lora(
        self,
        x: Tensor,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        ranks: Tensor,
        columns: Tensor,
        slots: Tensor,
    ) -> None:
        """Add what adapters make of x. The launch depends on shapes alone, not on ranks or slots."""

    def copy_blocks(self, cache: Tensor, pairs: Tensor, target: Tensor | None = None) -> None: ...

    def plan_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        options: AttentionOptions,
    ) -> AttentionPlan:
        """Check the inputs of one layer. Return a plan for all layers with its layout in this step."""

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        options: AttentionOptions,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """Attend from each new token to the cached K and V of its sequence.

        plan: the plan from `plan_attention` for all layers of one layout; None makes a plan for this call
            only. Returns [num_tokens, num_heads, value_dim].
        """

    def apply_penalties(
        self,
        logits: Tensor,
        rows: Tensor,
        slots: Tensor,
        output_counts: Tensor,
        seen: Tensor,
        repetition_penalty: Tensor,
        frequency_penalty: Tensor,
        presence_penalty: Tensor,
    ) -> None: ...

    def sample_tokens(
        self,
        logits: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        temperature: Tensor,
        min_p: Tensor | None,
        top_n_sigma: Tensor | None,
        typical_p: Tensor | None,
        top_k: Tensor | None,
        top_p: Tensor | None,
        highest: Tensor | None = None,
    ) -> Tensor: ...

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...

    def mask_logits(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None: ...

    def token_logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...
