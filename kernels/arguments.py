"""What the arguments of each operation must be, on every backend; attention's are in attention_options.py.

A check raises ValueError, before anything is written. It reads what tensors hold where `must_read_contents`
says so. A backend whose kernels need more of a layout, as Triton's do, checks the rest itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .attention_options import SOFTCAP_EXPONENT
from .checks import (
    KERNEL_DTYPES,
    QUANTIZED_DTYPES,
    check_between,
    check_contiguous,
    check_device,
    check_dtype,
    check_flag,
    check_indices,
    check_multiple,
    check_positive,
    check_scales,
    check_shape,
    check_tensor,
    must_read_contents,
)
from .content_checks import check_alone, check_apart, check_eps, check_limits, check_once, check_range
from .routing import RoutingOptions

WORD_BITS = 32  # tokens of a word of a mask
MAX_CONV_WIDTH = 8
_LARGEST = torch.finfo(torch.float32).max


def check_call(name: str, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of an operation. Raises ValueError if one is wrong."""
    call = Rules(arguments)
    getattr(call, name)()
    if call.written and call.reads_contents:
        check_alone(call.written, call.read)


class KernelCall:
    """The arguments of a call, and the tensors that were checked as being written or read."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self.device: torch.device | None = None  # of all tensors, which the first one decides
        self.written: dict[str, Tensor] = {}
        self.read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Any:
        """Return an argument; None if the function has no such parameter."""
        return self._arguments.get(name)

    def has(self, name: str) -> bool:
        """Return whether an argument is not None."""
        return self[name] is not None

    @property
    def reads_contents(self) -> bool:
        """Whether the contents of tensors are checked too."""
        return self.device is not None and must_read_contents(self.device)

    def tensor(
        self,
        name: str,
        shape: Sequence[int | None] | None,  # None: any, and in it any size
        dtypes: torch.dtype | Sequence[torch.dtype],
        *,
        written: bool = False,
        contiguous: bool = False,
    ) -> Tensor:
        """Check an argument that is a tensor, and return it."""
        tensor: Tensor = self[name]
        if shape is None:
            check_tensor(name, tensor)
        elif isinstance(dtypes, torch.dtype):
            check_shape(name, tensor, shape, dtypes)
        else:
            check_shape(name, tensor, shape)
        check_dtype(name, tensor, [dtypes] if isinstance(dtypes, torch.dtype) else dtypes)
        if self.device is None:
            self.device = tensor.device
        check_device(name, tensor, self.device)
        if contiguous:
            check_contiguous(name, tensor)
        if written:
            check_apart(name, tensor)
        (self.written if written else self.read)[name] = tensor
        return tensor

    def rows(self, name: str, *, written: bool = False) -> Tensor:
        """Check an argument that is a tensor [num_rows, size] of numbers, and return it."""
        return self.tensor(name, (None, None), KERNEL_DTYPES, written=written)

    def like(self, name: str, other: Tensor, *, written: bool = False) -> Tensor:
        """Check an argument that has the shape and dtype of another tensor, and return it."""
        return self.tensor(name, other.shape, other.dtype, written=written)

    def indices(self, name: str, size: int | None, what: str, limit: int, *, once: bool = False) -> Tensor:
        """Check an argument i64[size] of indices from 0 to limit - 1, and return it.

        once: whether all numbers must be different.
        """
        indices = self.tensor(name, (size,), torch.int64)
        if self.reads_contents:
            check_indices(name, indices, what, limit)
            if once:
                check_once(name, indices)
        return indices


# The least and the largest number of each filter, and its dtype; None filters nothing.
_FILTERS = {
    "temperature": (0, _LARGEST, torch.float32),
    "min_p": (0, 1, torch.float32),
    "top_n_sigma": (0, _LARGEST, torch.float32),
    "typical_p": (0, 1, torch.float32),
    "top_k": (1, 2**31 - 1, torch.int32),
    "top_p": (0, 1, torch.float32),
}


class Rules(KernelCall):
    """The checks of operations' arguments, one method per operation. `reference` documents the shapes."""

    def take_rows(self) -> None:
        table = self.rows("table")
        indices = self.indices("indices", None, "the table's rows", len(table))
        if self.has("out"):
            shape = len(indices), table.shape[1]
            self.tensor("out", shape, table.dtype, written=True, contiguous=True)

    def _norm(self, x: Tensor) -> None:
        """Check what all norms have: x, a weight of its rows' size, eps, and perhaps a residual."""
        if x.dim() == 0:
            raise ValueError("x must have shape [..., size], got []")
        check_positive("x.shape[-1]", x.shape[-1])
        self.tensor("weight", x.shape[-1:], x.dtype)
        check_eps(self["eps"])
        if self.has("residual"):
            self.like("residual", x, written=True)

    def rms_norm(self) -> None:
        self._norm(self.tensor("x", None, KERNEL_DTYPES))
        check_flag("unit_offset", self["unit_offset"])

    def rms_norm_into(self) -> None:
        check_tensor("x", self["x"])
        num_dims = 3 if self["x"].dim() == 3 else 2
        x = self.tensor("x", (None,) * num_dims, KERNEL_DTYPES)
        self._norm(x)
        check_flag("unit_offset", self["unit_offset"])
        check_flag("add", self["add"])
        out = self.like("out", x, written=True)
        if self.reads_contents and x.data_ptr() == out.data_ptr() and x.stride() == out.stride():
            del self.read["x"]  # in place

    def layer_norm(self) -> None:
        x = self.rows("x")
        self._norm(x)
        self.tensor("bias", x.shape[1:], x.dtype)

    def silu_and_mul(self) -> None:
        x = self.rows("x")
        check_multiple("x.shape[1]", x.shape[1], "the two halves", 2)

    def gelu_and_mul(self) -> None:
        if self.has("up"):
            self.like("up", self.rows("x"))
        else:
            self.silu_and_mul()

    def gelu(self) -> None:
        self.rows("x", written=True)
        check_flag("tanh", self["tanh"])

    def relu_squared(self) -> None:
        self.rows("x", written=True)

    def clamped_swiglu(self) -> None:
        self.silu_and_mul()
        check_positive("limit", self["limit"])
        check_positive("alpha", self["alpha"])

    def route(self) -> None:
        logits = self.tensor("logits", (None, None), torch.float32)
        num_experts = logits.shape[1]
        check_positive("the number of experts", num_experts)
        options = self["options"]
        if not isinstance(options, RoutingOptions):
            raise ValueError(f"options must be RoutingOptions, got {type(options).__name__}")
        options.check(num_experts)
        for name in ("correction_bias", "expert_scales"):
            if self.has(name):
                self.tensor(name, (num_experts,), torch.float32, contiguous=True)
        if self.has("count"):
            self.tensor("count", (1,), torch.int32)

    def sort_by_expert(self) -> None:
        experts = self.tensor("experts", (None, None), torch.int32)
        check_positive("the number of chosen experts", experts.shape[1])
        check_between("num_experts", self["num_experts"], 1, 2**20)
        if self.reads_contents:
            check_indices("experts", experts, "the experts", self["num_experts"])
        if self.has("adapters"):
            adapters = self.tensor("adapters", (len(experts),), torch.int32, contiguous=True)
            if self.reads_contents:
                check_range("adapters", adapters, -1, 2**31 // self["num_experts"] - 1)

    def grouped_linear(self) -> None:
        x = self.rows("x")
        weight = self.tensor("weight", (None, None, x.shape[1]), x.dtype)
        num_experts, out_features, in_features = weight.shape
        check_positive("num_experts", num_experts)
        check_positive("out_features", out_features)
        check_positive("in_features", in_features)
        self.grouped_rows(x, num_experts)
        if self.has("bias"):
            self.tensor("bias", (num_experts, out_features), x.dtype)

    def grouped_rows(self, x: Tensor, num_experts: int) -> None:
        """Check the arguments that say which rows of x belong to which expert."""
        offsets = self.tensor("offsets", (num_experts + 1,), torch.int32, contiguous=True)
        num_rows = len(x)
        if self.has("sources"):
            num_rows = len(self.indices("sources", None, "the rows of x", num_rows))
        if self.reads_contents:
            bounds = offsets.tolist()
            if bounds[0] != 0 or bounds[-1] != num_rows or bounds != sorted(bounds):
                raise ValueError(f"offsets must ascend from 0 to the {num_rows} rows, got {bounds[:64]}")

    def sum_experts(self) -> None:
        x = self.rows("x")
        places = self.tensor("places", (None, None), torch.int64)
        check_positive("the number of chosen experts", places.shape[1])
        if self.reads_contents:
            check_indices("places", places, "the rows of x", len(x))
        self.tensor("weights", places.shape, torch.float32)
        if self.has("shared"):
            self.tensor("shared", (len(places), x.shape[1]), x.dtype)
        if self.has("shared_gate"):
            if not self.has("shared"):
                raise ValueError("shared_gate must be given with shared, got it alone")
            self.tensor("shared_gate", (len(places), 1), torch.float32)

    def add(self) -> None:
        self.like("out", self.rows("x"), written=True)

    def scale_and_cap(self) -> None:
        self.rows("x", written=True)
        check_positive("factor", self["factor"])
        if self.has("softcap"):
            check_positive("softcap", self["softcap"], SOFTCAP_EXPONENT)

    def scale_rows(self) -> None:
        x = self.rows("x", written=True)
        self.tensor("factors", (len(x),), torch.float32)

    def rotary_store_kv(self) -> None:
        qkv = self.tensor("qkv", (None, None, None), KERNEL_DTYPES, written=True)
        num_tokens, _, head_dim = qkv.shape
        check_positive("head_dim", head_dim)
        check_multiple("head_dim", head_dim, "the two halves", 2)
        check_eps(self["eps"])
        check_flag("unit_offset", self["unit_offset"])
        for name in ("cos", "sin"):
            self.tensor(name, (num_tokens, head_dim // 2), torch.float32)
        fixed = "fixed_key_scales", "fixed_value_scales"
        if self.has("key_cache"):
            self._stored_kv(qkv)
        elif any(
            self.has(name)
            for name in (
                "value_cache",
                "slot_mapping",
                "key_norm_weight",
                "key_scales",
                "value_scales",
                *fixed,
            )
        ):
            raise ValueError("without key_cache there must be no other tensor of keys or values")
        for name in ("query_norm_weight", "key_norm_weight"):
            if self.has(name):
                self.tensor(name, (head_dim,), qkv.dtype)

    def _stored_kv(self, qkv: Tensor) -> None:
        """Check the caches of `rotary_store_kv`."""
        if not (self.has("value_cache") and self.has("slot_mapping")):
            raise ValueError("with key_cache there must be value_cache and slot_mapping")
        num_tokens, num_all_heads, head_dim = qkv.shape
        key_cache = self["key_cache"]
        check_shape("key_cache", key_cache, (None, None, None, head_dim))
        check_scales(key_cache, self["key_scales"], self["value_scales"], qkv.dtype)
        num_blocks, block_size, num_kv_heads, _ = key_cache.shape
        check_positive("block_size", block_size)
        if num_kv_heads < 1 or num_all_heads <= 2 * num_kv_heads:
            raise ValueError(
                f"qkv must have more than twice key_cache's heads, got {num_all_heads} and {num_kv_heads}"
            )
        self.like("key_cache", key_cache, written=True)
        self.like("value_cache", key_cache, written=True)
        self.indices("slot_mapping", num_tokens, "the cache's slots", num_blocks * block_size, once=True)
        if self.has("query_norm_weight") != self.has("key_norm_weight"):
            raise ValueError("query_norm_weight and key_norm_weight must both be given or both be None")
        for name in ("key_scales", "value_scales"):
            if self.has(name):
                self.tensor(name, None, torch.float32, written=True)
            if self.has(fixed := f"fixed_{name}"):
                if not self.has(name):
                    raise ValueError(f"{fixed} belong to a quantised cache; this one is {key_cache.dtype}")
                self.tensor(fixed, (num_kv_heads,), torch.float32, contiguous=True)

    def scale_by_sigmoid(self) -> None:
        self.like("gate", self.rows("x", written=True))

    def gated_norm(self) -> None:
        x = self.tensor("x", (None, None, None), KERNEL_DTYPES)
        check_positive("x.shape[-1]", x.shape[-1])
        check_flag("gate_first", self["gate_first"])
        if self.has("weight"):
            num_heads, size = x.shape[1:]
            weight = self.tensor("weight", (None,), x.dtype)
            if len(weight) not in (size, num_heads * size):
                raise ValueError(
                    f"weight must have the {size} numbers of a head, or {num_heads * size} of all, got "
                    f"{len(weight)}"
                )
            check_eps(self["eps"])
        self.tensor("gate", (len(x), x.shape[1] * x.shape[2]), x.dtype)

    def add_lora(self) -> None:
        x = self.rows("x")
        num_tokens, in_features = x.shape
        out = self.tensor("out", (num_tokens, None), (x.dtype, torch.float32), written=True)
        size = out.shape[1]
        a = self.tensor("a", (None, None, None, in_features), x.dtype, contiguous=True)
        num_slots, num_parts, max_rank, _ = a.shape
        sizes = {"num_slots": num_slots, "num_parts": num_parts, "max_rank": max_rank, "size": size}
        for name, value in {**sizes, "in_features": in_features}.items():
            check_positive(name, value)
        self.tensor("b", (num_slots, max_rank, size), x.dtype, contiguous=True)
        ranks = self.tensor("ranks", (num_slots, num_parts), torch.int32, contiguous=True)
        columns = self.tensor("columns", (None, 3), torch.int32, contiguous=True)
        slots = self.tensor("slots", (num_tokens,), torch.int32, contiguous=True)
        if self.reads_contents:
            check_range("ranks", ranks, 0, max_rank)
            check_range("slots", slots, -1, num_slots - 1)
            for first, end, part in columns.tolist():
                if not (0 <= first < end <= size and 0 <= part < num_parts):
                    raise ValueError(
                        f"columns must be ranges of {size} columns and one of {num_parts} parts, got "
                        f"{[first, end, part]}"
                    )

    def short_conv(self) -> None:
        x = self.rows("x")
        check_flag("gated", self["gated"])
        if self["gated"]:
            check_multiple("x.shape[1]", x.shape[1], "the three parts", 3)
        size = x.shape[1] // (3 if self["gated"] else 1)
        check_positive("the number of columns", size)
        weight = self.tensor("weight", (None, size), torch.float32, contiguous=True)
        check_between("the width of the convolution", len(weight), 2, MAX_CONV_WIDTH)
        if self.has("bias"):
            self.tensor("bias", (size,), torch.float32, contiguous=True)
        states = self.tensor("states", (None, len(weight) - 1, size), x.dtype, written=True)
        self._sequences(len(x), len(states))
        self._runs(size, x.dtype)

    def gated_delta(self) -> None:
        qkv = self.rows("qkv")
        states = self.tensor("states", (None,) * 4, torch.float32, written=True)
        num_slots, num_heads, key_dim, value_dim = states.shape
        for name, value in {"num_heads": num_heads, "key_dim": key_dim, "value_dim": value_dim}.items():
            check_positive(name, value)
        of_keys = qkv.shape[1] - num_heads * value_dim
        num_key_heads = of_keys // (2 * key_dim)
        if of_keys <= 0 or of_keys % (2 * key_dim) or num_heads % num_key_heads:
            raise ValueError(
                f"qkv must have {num_heads} heads of {value_dim} values, and queries and keys of {key_dim} "
                f"in heads that divide these, got {qkv.shape[1]} columns"
            )
        self.tensor("gates", (len(qkv), 2 * num_heads), qkv.dtype)
        for name in ("rates", "time_bias"):
            self.tensor(name, (num_heads,), torch.float32, contiguous=True)
        self._sequences(len(qkv), num_slots)
        self._runs(qkv.shape[1] + 2 * num_heads, qkv.dtype)

    def mamba2_scan(self) -> None:
        x = self.rows("x")
        states = self.tensor("states", (None,) * 4, torch.float32, written=True)
        num_slots, num_heads, state_dim, head_dim = states.shape
        for name, value in {"num_heads": num_heads, "state_dim": state_dim, "head_dim": head_dim}.items():
            check_positive(name, value)
        of_groups = x.shape[1] - num_heads * head_dim
        num_groups = of_groups // (2 * state_dim)
        if of_groups <= 0 or of_groups % (2 * state_dim) or num_heads % num_groups:
            raise ValueError(
                f"x must have {num_heads} heads of {head_dim} numbers, and B and C of {state_dim} in groups "
                f"that divide these, got {x.shape[1]} columns"
            )
        self.tensor("time_steps", (len(x), num_heads), x.dtype)
        for name in ("rates", "time_bias", "skip"):
            self.tensor(name, (num_heads,), torch.float32, contiguous=True)
        check_limits("limits", self["limits"])
        self._sequences(len(x), num_slots)
        self._runs(x.shape[1] + num_heads, x.dtype)

    def _sequences(self, num_tokens: int, num_slots: int) -> None:
        """Check which tokens each sequence has, and the slot of its state."""
        slots = self.tensor("slots", (None,), torch.int32, contiguous=True)
        seq_lens = self.tensor("seq_lens", slots.shape, torch.int32, contiguous=True)
        starts = self.tensor("cu_seqlens_q", (len(slots) + 1,), torch.int32, contiguous=True)
        if not self.reads_contents:
            return
        check_indices("slots", slots, "those of states", num_slots)
        check_once("slots", slots)
        bounds = starts.tolist()
        if bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
            raise ValueError(f"cu_seqlens_q must ascend from 0 to the {num_tokens} tokens, got {bounds[:64]}")
        if bool((seq_lens < starts.diff()).any()):
            raise ValueError(
                f"seq_lens must be at least the number of new tokens, got {seq_lens.tolist()[:64]}"
            )

    def _runs(self, num_columns: int, dtype: torch.dtype) -> None:
        """Check the inputs of runs of drafts, and which of them each sequence applies and keeps."""
        if not (self.has("runs") or self.has("run_inputs")):
            return
        if not (self.has("runs") and self.has("run_inputs")):
            raise ValueError("runs and run_inputs must be given together")
        inputs = self.tensor("run_inputs", (None, None, num_columns), dtype, written=True)
        runs = self.tensor("runs", (len(self["slots"]), 2), torch.int32, contiguous=True)
        num_places = inputs.shape[1]
        check_positive("the number of places of run_inputs", num_places)
        if not self.reads_contents:
            return
        check_indices("slots", self["slots"], "those of run_inputs", len(inputs))
        counts = self["cu_seqlens_q"].diff().tolist()
        rows = zip(runs.tolist(), counts, self["seq_lens"].tolist(), strict=True)
        for row, ((num_unapplied, is_run), count, seq_len) in enumerate(rows):
            most = min(seq_len - count, num_places - count * is_run)
            if is_run not in (0, 1) or not 0 <= num_unapplied <= most:
                raise ValueError(
                    f"runs must have how many tokens are applied first, at most those computed before, and 1 "
                    f"for a run or 0; both have to fit in {num_places} places; got {[num_unapplied, is_run]} "
                    f"at sequence {row}, which computes {count} tokens of {seq_len}"
                )

    def copy_blocks(self) -> None:
        is_between_two = self.has("target")
        dtypes = *KERNEL_DTYPES, *QUANTIZED_DTYPES
        target = cache = self.tensor("cache", (None,) * 5, dtypes, written=not is_between_two)
        if is_between_two:
            self.device = None  # the target may be on another one; pairs are on a GPU, if either is
            shape = len(cache), None, *cache.shape[2:]
            target = self.tensor("target", shape, cache.dtype, written=True)
            if not cache.is_cpu:
                self.device = cache.device
        pairs = self.tensor("pairs", (None, 2), torch.int64)
        if not self.reads_contents:
            return
        sources, targets = pairs.unbind(1)
        if is_between_two:
            check_indices("the sources of pairs", sources, "the cache's blocks", cache.shape[1])
            check_indices("the targets of pairs", targets, "the target's blocks", target.shape[1])
        else:
            check_indices("pairs", pairs, "the cache's blocks", cache.shape[1])
        check_once("the targets of pairs", targets)
        if not is_between_two and (both := sorted({*sources.tolist()} & {*targets.tolist()})):
            raise ValueError(f"pairs must not have a block as source and as target, got {both}")

    def _logits(self, *, written: bool = False) -> Tensor:
        """Check and return the logits, f32[num_rows, vocab_size]."""
        logits = self.tensor("logits", (None, None), torch.float32, written=written)
        check_positive("the vocabulary", logits.shape[1])
        return logits

    def greedy(self) -> None:
        self._logits()

    def _allowed(self, num_rows: int, vocab_size: int) -> None:
        """Check the rows that have a mask, and the masks."""
        rows = self.indices("rows", None, "those of logits", num_rows, once=True)
        allowed = self.tensor("allowed", (len(rows), None), torch.int32)
        if allowed.shape[1] * WORD_BITS < vocab_size:
            raise ValueError(
                f"allowed must have a bit for each of {vocab_size} tokens, got {allowed.shape[1]} words of "
                f"{WORD_BITS} bits"
            )

    def mask_logits(self) -> None:
        self._allowed(*self._logits(written=True).shape)

    def greedy_of_allowed(self) -> None:
        num_rows, vocab_size = self._logits().shape
        self._allowed(num_rows, vocab_size)
        self.tensor("tokens", (num_rows,), torch.int64, written=True)
        self.tensor("highest", (num_rows,), torch.float32, written=True)

    def token_logprobs(self) -> None:
        num_rows, vocab_size = self._logits().shape
        self.indices("tokens", num_rows, "the vocabulary", vocab_size)
        check_between("num_top", self["num_top"], 0, vocab_size)

    def apply_penalties(self) -> None:
        num_rows, vocab_size = self._logits(written=True).shape
        rows = self.indices("rows", None, "those of logits", num_rows, once=True)
        counts = self.tensor("output_counts", (None, vocab_size), torch.int32)
        self.indices("slots", len(rows), "those of output_counts", len(counts))
        self.tensor("seen", counts.shape, torch.bool)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            self.tensor(name, (len(rows),), torch.float32)

    def sample_tokens(self) -> None:
        num_rows = len(self._logits(written=True))
        for name, (least, largest, dtype) in _FILTERS.items():
            if self.has(name) or name == "temperature":
                column = self.tensor(name, (num_rows,), dtype)
                if self.reads_contents:
                    check_range(name, column, least, largest)
        for name in ("seeds", "positions"):
            self.tensor(name, (num_rows,), torch.int64)
        if self.has("highest"):
            self.tensor("highest", (num_rows,), torch.float32, written=True, contiguous=True)
