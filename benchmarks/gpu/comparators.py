"""The attention kernels of other projects on our batches, each behind a small adapter.

An adapter takes a case and returns a call that returns [..., num_heads, head_dim], all tokens in order. It
converts layouts beforehand, not in the call. It raises Skip if its kernel does not support the batch.

    python -m benchmarks.gpu.comparators    # try each on small batches, in a process that may crash
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cases import Case, attention_case
from benchmarks.gpu.comparator_names import NAMES, SLOW, readiness_key
from benchmarks.shapes import AttentionShape, decode, prefill

Call = Callable[[], Tensor]


class Skip(Exception):  # noqa: N818  (not an error)
    """A comparator does not support this batch here; the message is the reason."""


class Batch:
    """The arguments of a case by name, and values that adapters derive from them."""

    def __init__(self, case: Case) -> None:
        self.query, self.key_cache, self.value_cache, self.tables, self.seq_lens, self.bounds = case.args
        if self.key_cache.dtype != self.query.dtype:
            raise Skip("its quantised caches have other scales")
        self.scale: float = case.options["scale"]
        self.contexts: list[int] = self.seq_lens.tolist()
        self.query_len: int = case.options["max_seqlen_q"]
        self.block_size = self.key_cache.shape[1]
        self.num_heads, self.head_dim = self.query.shape[1:]
        self.num_kv_heads = self.key_cache.shape[2]
        self.on_gpu = self.query.is_cuda

    def dense(self, cache: Tensor) -> Tensor:
        """Gather a cache of equal contexts as [num_seqs, num_kv_heads, context, head_dim]."""
        gathered = cache[self.tables.long()].flatten(1, 2)[:, : self.contexts[0]]
        return gathered.transpose(1, 2).contiguous()


def sdpa(backend: str) -> Callable[[Case], Call]:
    """Adapt torch's SDPA on dense K and V: without blocks, so a ceiling rather than a competitor."""

    def adapt(case: Case) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        batch = Batch(case)
        if len(set(batch.contexts)) > 1:
            raise Skip("dense: the contexts differ in length")
        chosen = getattr(SDPBackend, backend)
        num_seqs = len(batch.contexts)
        query = batch.query.view(num_seqs, batch.query_len, batch.num_heads, -1).transpose(1, 2).contiguous()
        key, value = batch.dense(batch.key_cache), batch.dense(batch.value_cache)
        if batch.query_len not in (1, batch.contexts[0]):
            raise Skip("dense: its causal mask begins at the first key")

        def call() -> Tensor:
            with sdpa_kernel(chosen):
                out = scaled_dot_product_attention(
                    query, key, value, is_causal=batch.query_len > 1, scale=batch.scale, enable_gqa=True
                )
            return out.transpose(1, 2)  # a view: to copy it would cost them time

        return call

    return adapt


def flex_attention(case: Case) -> Call:
    """Adapt torch's flex_attention over its own pages of 128 tokens, compiled on a GPU."""
    from torch.nn.attention import flex_attention as flex
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    batch = Batch(case)
    page = 128
    num_seqs = len(batch.contexts)
    device = str(batch.query.device)
    if len(set(batch.contexts)) > 1 and batch.query_len > 1:
        raise Skip("one mask for queries of one length")
    longest = -(-max(batch.contexts) // page) * page
    num_pages = sum(-(-n // page) for n in batch.contexts)
    pages = PagedAttention(num_pages, page, num_seqs, device=device)
    cache_shape = (1, batch.num_kv_heads, num_pages * page, batch.head_dim)
    key, value = (torch.zeros(cache_shape, dtype=batch.query.dtype, device=device) for _ in range(2))
    for i, context in enumerate(batch.contexts):
        index = torch.tensor([i], device=device)
        pages.reserve(index[0], torch.tensor(context, device=device))
        rows = torch.arange(context, device=device)
        blocks = batch.tables[i, rows // batch.block_size].long()
        for mine, theirs in ((batch.key_cache, key), (batch.value_cache, value)):
            tokens = mine[blocks, rows % batch.block_size].transpose(0, 1)
            theirs[0, :, pages.page_table[i, rows // page] * page + rows % page] = tokens

    def mask(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k if batch.query_len > 1 else k >= 0

    logical = flex.create_block_mask(
        mask, num_seqs, None, batch.query_len, longest, device=device, BLOCK_SIZE=(128, page)
    )
    physical = pages.convert_logical_block_mask(logical, kv_len=batch.seq_lens.long())
    query = batch.query.view(num_seqs, batch.query_len, batch.num_heads, -1).transpose(1, 2).contiguous()
    attend = torch.compile(flex.flex_attention, dynamic=False) if batch.on_gpu else flex.flex_attention

    def call() -> Tensor:
        out = attend(query, key, value, block_mask=physical, scale=batch.scale, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)  # a view: to copy it would cost them time

    return call


def varlen(case: Case) -> Call:
    """Adapt torch.nn.attention.varlen: FlashAttention over our blocks."""
    from torch.nn.attention.varlen import varlen_attn

    batch = Batch(case)
    if not batch.on_gpu:
        raise Skip("needs a GPU")
    known = inspect.signature(varlen_attn).parameters
    if "block_table" not in known:
        raise Skip(f"torch {torch.__version__} has no block tables here")
    causal = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    longest = max(batch.contexts)

    def call() -> Tensor:
        out = varlen_attn(
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.bounds,
            None,
            batch.query_len,
            longest,
            scale=batch.scale,
            enable_gqa=True,
            seqused_k=batch.seq_lens,
            block_table=batch.tables,
            **causal,
        )
        assert isinstance(out, Tensor)
        return out

    return call


def flashinfer(case: Case) -> Call:
    """Adapt FlashInfer's wrappers over our blocks: tensor-core decode, and FA3 prefill on Hopper."""
    batch = Batch(case)
    if not batch.on_gpu:
        raise Skip("needs a GPU")
    if (nvcc := shutil.which("nvcc")) is not None:  # FlashInfer compiles its kernels
        os.environ.setdefault("CUDA_HOME", str(Path(nvcc).resolve().parent.parent))
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.gettempdir())
    import flashinfer as library

    device = batch.query.device
    needed = [-(-n // batch.block_size) for n in batch.contexts]
    indices = torch.cat([row[:n] for row, n in zip(batch.tables, needed, strict=True)])
    indptr = torch.tensor([0, *needed]).cumsum(0).int().to(device)
    last = ((batch.seq_lens - 1) % batch.block_size + 1).int()
    workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=device)
    heads = (batch.num_heads, batch.num_kv_heads, batch.head_dim, batch.block_size)
    dtypes = {"q_data_type": batch.query.dtype, "kv_data_type": batch.key_cache.dtype}
    if batch.query_len == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *heads, sm_scale=batch.scale, **dtypes)
    else:
        backend = "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "auto"
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        wrapper.plan(batch.bounds, indptr, indices, last, *heads, causal=True, sm_scale=batch.scale, **dtypes)
    return lambda: wrapper.run(batch.query, (batch.key_cache, batch.value_cache))


def vllm_unified(case: Case) -> Call:
    """Adapt vLLM's Triton kernel of mid 2025, from the package conch_triton_kernels."""
    from conch.third_party.vllm.unified_attention import unified_attention

    batch = Batch(case)
    if batch.num_heads // batch.num_kv_heads > 16:
        raise Skip("its groups have at most 16 heads")
    out = torch.empty_like(batch.query)

    def call() -> Tensor:
        unified_attention(
            q=batch.query,
            k=batch.key_cache,
            v=batch.value_cache,
            out=out,
            cu_seqlens_q=batch.bounds,
            max_seqlen_q=batch.query_len,
            seqused_k=batch.seq_lens,
            max_seqlen_k=max(batch.contexts),
            softmax_scale=batch.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=batch.tables,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        return out

    return call


COMPARATORS: dict[str, Callable[[Case], Call]] = {
    "sdpa_cudnn": sdpa("CUDNN_ATTENTION"),
    "sdpa_flash": sdpa("FLASH_ATTENTION"),
    "flex_attention": flex_attention,
    "varlen_attn": varlen,
    "flashinfer": flashinfer,
    "vllm_unified": vllm_unified,
}
assert tuple(COMPARATORS) == NAMES
PACKAGES = {"flashinfer": "flashinfer", "vllm_unified": "conch"}


def adapt(name: str, shape: AttentionShape, case: Case) -> Call:
    """Return a comparator's call on this case, checked. Raises Skip with the reason if there is none."""
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise Skip(f"{package} is not installed")
    if name in SLOW and name not in shape.against:
        raise Skip("measured on other batches")
    try:
        call = COMPARATORS[name](case)
        case.check_attention(call().reshape(case.args[0].shape))
    except Skip:
        raise
    except Exception as error:  # whatever another kernel raises, ours must still be measured
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        raise Skip(lines[0][:200]) from error
    return call


def main() -> None:
    """Try every comparator on small batches, which also fills its compilation cache."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for head_dim in (128, 64):
        # flashinfer compiles for minutes.
        for name in sorted(set(COMPARATORS) - set(SLOW), key=lambda name: (name == "flashinfer", name)):
            reasons = []
            for shape in small_shapes(head_dim):
                try:
                    adapt(name, shape, attention_case(shape, dtype, device))
                except Skip as skip:
                    reasons.append(str(skip))
            ready = len(reasons) < len(small_shapes(head_dim))
            told = {
                "comparator": readiness_key(name, head_dim),
                "ready": ready,
                "reasons": sorted(set(reasons)),
            }
            print(json.dumps(told), flush=True)


def small_shapes(head_dim: int) -> list[AttentionShape]:
    """Return one batch of each kind."""
    return [
        decode(2, 300, head_dim=head_dim),
        prefill(1, 200, head_dim=head_dim),
    ]


if __name__ == "__main__":
    main()
