"""What the kernels compile to for GPUs that are not here.

A stand-in driver makes every launcher compile, on CPU tensors, exactly the specialisation it would launch
on a target; figures() reads registers, spills, shared memory and instruction counts out of the binaries.

    python -m tests.aot sm_90          # one table; needs TRITON_INTERPRET unset
    python -m tests.aot sm_90 --json
"""

import collections
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from paged.kernels.backend import Kernels, load_kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Shared memory one block may use, in bytes.
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
# An SM's registers, warps, shared memory in bytes and blocks.
SM_LIMITS = {
    "sm_80": (65536, 64, 164 * 1024, 32),
    "sm_90": (65536, 64, 228 * 1024, 32),
    "sm_100": (65536, 64, 228 * 1024, 32),
}
CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")


class AbsentGPU:
    """The part of a Triton driver that compiling needs; launching is impossible."""

    launcher_cls = None
    utils = None

    def __init__(self, name: str) -> None:
        self.name, self.target = name, TARGETS[name]

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return list(TARGETS).index(self.name)  # the JIT caches by device

    def get_current_stream(self, device: int | None = None) -> int:  # noqa: ARG002
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        return divmod(self.target.arch, 10) if isinstance(self.target.arch, int) else (9, 4)

    def map_python_to_cpp_type(self, _: str) -> str:
        return "int"


@contextmanager
def compiling(target: str) -> Iterator[list[tuple[str, Any]]]:
    """Inside, launching a kernel compiles it for `target` instead; yields (name, binary) as they come."""
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    @functools.wraps(run)
    def compile_only(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        kwargs["warmup"] = True
        binary = run(self, *args, **kwargs)
        compiled.append((self.fn.__name__, binary))
        return binary

    driver.set_active(AbsentGPU(target))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run


def figures(target: str, binary: Any) -> dict[str, float]:
    """Read one binary's figures; "stack" is in bytes, "local" counts the spilling instructions."""
    return _amd_figures(binary) if target.startswith("gfx") else _nvidia_figures(target, binary)


def _dump(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", "--dump-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _nvidia_figures(target: str, binary: Any) -> dict[str, float]:
    dump = _dump(binary.asm["cubin"])
    usage = re.search(r"REG:(\d+) STACK:(\d+)", dump)
    assert usage is not None
    registers, stack = map(int, usage.groups())
    sass = collections.Counter(
        match.group(1)
        for line in dump.splitlines()
        if (match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", line))
    )
    all_registers, max_warps, shared, max_blocks = SM_LIMITS[target]
    warps = binary.metadata.num_warps
    per_warp = -(-registers * 32 // 256) * 256  # allocated in units of 256
    ptx = binary.asm["ptx"]
    return {
        "registers": registers,
        "stack": stack,
        "local": sass["LDL"] + sass["STL"],
        "shared": binary.metadata.shared,
        "blocks_per_sm": min(
            all_registers // per_warp // warps,
            shared // (binary.metadata.shared + 1024),  # 1 KiB is reserved for each block
            max_warps // warps,
            max_blocks,
        ),
        "wgmma": sass["HGMMA"],
        "mma": sass["HMMA"],
        "tcgen05": ptx.count("tcgen05.mma"),
        "async_copies": len(
            re.findall(r"cp\.async\.c[ag]\.shared\.global[^,]*,[^,]*, (?:0x10|16)\b|bulk\.tensor", ptx)
        ),
        "loads_2B": len(re.findall(r"ld\.global(?:\.\w+)*\.b16 ", ptx)),
        **_widths(re.findall(r"\b(ld|st)\.global((?:\.\w+)*) ", ptx), _ptx_bytes),
        "loads_behind_barrier": ptx.partition("bar.sync")[2].count("ld.global"),
        "instructions": sum(sass.values()),
    }


def _amd_figures(binary: Any) -> dict[str, float]:
    isa = binary.asm["amdgcn"]

    def field(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", isa)
        assert match is not None
        return int(match.group(1))

    return {
        "registers": field("vgpr_count"),
        "stack": field("private_segment_fixed_size"),
        "local": field("vgpr_spill_count"),
        "shared": binary.metadata.shared,
        "mfma": len(re.findall(r"^\s+v_mfma", isa, re.M)),
        **_widths(re.findall(r"\b(?:global|buffer)_(load|store)_(\w+)", isa), _amd_bytes),
    }


def _widths(instructions: list[tuple[str, str]], width: Callable[[str], int]) -> dict[str, int]:
    """How many loads from and stores to global memory move 16 bytes a thread, and how many fewer."""
    counts = dict.fromkeys(["loads_16B", "loads_narrow", "stores_16B", "stores_narrow"], 0)
    for kind, suffix in instructions:
        counts[
            f"{'loads' if kind.startswith('l') else 'stores'}_{'16B' if width(suffix) == 16 else 'narrow'}"
        ] += 1
    return counts


def _ptx_bytes(suffix: str) -> int:
    """ld.global.L1::evict_last.v4.b32: 4 times 32 bits."""
    vector, bits = re.search(r"\.v(\d)", suffix), re.search(r"\.[bfsu](\d+)$", suffix)
    assert bits is not None, suffix
    return int(bits[1]) // 8 * (int(vector[1]) if vector else 1)


def _amd_bytes(suffix: str) -> int:
    """dwordx4: 4 times 32 bits; ushort, short_d16_hi and the like are not counted closely."""
    return 4 * int(suffix.removeprefix("dwordx") or 1) if re.fullmatch(r"dwordx[234]", suffix) else 4


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# head_dim, group, dtype, block_size, window: every row of choose_config's tables and each branch of the
# kernel, with head dims that are padded, and with the smallest and the largest blocks.
ATTENTION_CASES = [
    (64, 4, "bfloat16", 16, None),
    (128, 4, "bfloat16", 16, 4096),
    (128, 7, "float16", 64, None),
    (256, 4, "bfloat16", 16, None),
    (256, 4, "bfloat16", 16, 4096),
    (96, 3, "float16", 8, 1024),
    (32, 1, "bfloat16", 256, None),
    (64, 4, "float32", 16, None),
    (128, 7, "float32", 16, None),
    (256, 4, "float32", 16, 4096),
]


def compile_attention(
    kernels: Kernels,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    block_size: int,
    window: int | None,
    *,
    num_tokens: int = 8,
    num_seqs: int = 2,
    max_blocks: int = 128,
) -> None:
    """Launch attention once, as a batch with prefill does: it compiles prefill, decode and merge."""
    num_kv_heads = 2
    cache = torch.empty(4, block_size, num_kv_heads, head_dim, dtype=dtype)
    kernels.paged_attention(
        torch.empty(num_tokens, num_kv_heads * group, head_dim, dtype=dtype),
        cache,
        cache,
        torch.zeros(num_seqs, max_blocks, dtype=torch.int32),
        torch.zeros(num_seqs, dtype=torch.int32),
        torch.zeros(num_seqs + 1, dtype=torch.int32),
        scale=head_dim**-0.5,
        max_seqlen_q=num_tokens,
        sliding_window=window,
    )


def compile_others(kernels: Kernels, dtype: torch.dtype, num_tokens: int = 5) -> None:
    """Launch the kernels that know no heads as a layer of Llama-3-8B does."""
    size = 4096
    hidden = torch.empty(num_tokens, size, dtype=dtype)
    kernels.rms_norm(hidden, torch.empty(size, dtype=dtype), 1e-6, residual=torch.empty_like(hidden))
    kernels.rms_norm(hidden, torch.empty(size, dtype=dtype), 1e-6)
    kernels.silu_and_mul(torch.empty(num_tokens, 2 * 14336, dtype=dtype))
    planes = torch.empty(2, 4, 16, 8, 128, dtype=dtype)
    kernels.copy_blocks(planes, torch.zeros(num_tokens, 2, dtype=torch.int64))


# num_heads, num_kv_heads, head_dim, dtype, norm: every shape of tile, full and padded.
ROTARY_CASES = [
    (32, 8, 64, "bfloat16", False),
    (32, 4, 64, "bfloat16", True),
    (32, 8, 128, "bfloat16", False),
    (16, 8, 128, "bfloat16", True),
    (32, 8, 80, "float16", False),
    (8, 4, 256, "bfloat16", True),
    (7, 1, 16, "float16", True),
    (32, 8, 128, "float32", True),
    (8, 4, 256, "float32", True),
]


def compile_rotary_store_kv(
    kernels: Kernels,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    norm: bool,
    num_tokens: int = 5,
) -> None:
    """Launch it as a layer does, on the view of a fused projection's output."""
    qkv = torch.empty(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = torch.empty(num_tokens, head_dim // 2)
    cache = torch.empty(4, 16, num_kv_heads, head_dim, dtype=dtype)
    weight = torch.empty(head_dim, dtype=dtype) if norm else None
    kernels.rotary_store_kv(
        qkv.unflatten(-1, (-1, head_dim)),
        angles,
        angles,
        cache,
        cache,
        torch.zeros(num_tokens, dtype=torch.int64),
        query_norm_weight=weight,
        key_norm_weight=weight,
    )


def report(target: str) -> list[dict[str, Any]]:
    """Compile every kernel for `target` and return a row of figures for each binary."""
    kernels = load_kernels("triton")
    rows = []
    with compiling(target) as compiled:
        for head_dim, group, dtype, block_size, window in ATTENTION_CASES:
            compile_attention(kernels, head_dim, group, DTYPES[dtype], block_size, window)
            case = f"{head_dim}x{group} {dtype} block {block_size}" + (f" window {window}" if window else "")
            rows += [(_use(name, i), case, binary) for i, (name, binary) in enumerate(compiled)]
            compiled.clear()
        for num_heads, num_kv_heads, head_dim, dtype, norm in ROTARY_CASES:
            compile_rotary_store_kv(kernels, num_heads, num_kv_heads, head_dim, DTYPES[dtype], norm)
            case = f"{num_heads}/{num_kv_heads}x{head_dim} {dtype}" + (" norm" if norm else "")
            rows += [(name, case, binary) for name, binary in compiled]
            compiled.clear()
        compile_others(kernels, torch.bfloat16)
        rows += [(name, "bfloat16", binary) for name, binary in compiled]
    return [{"kernel": name, "case": case, **figures(target, binary)} for name, case, binary in rows]


def _use(name: str, launch: int) -> str:
    """A batch with prefill launches the attention kernel twice: for prefill, then for decodes."""
    return name if name != "_attention_kernel" else ("prefill", "decode")[launch]


def count_variants(target: str) -> dict[str, int]:
    """How many binaries each kernel has after batches of every awkward size of one model."""
    kernels = load_kernels("triton")
    binaries = collections.defaultdict(set)
    with compiling(target) as compiled:
        for num_tokens, num_seqs, max_blocks in [(1, 1, 33), (16, 2, 48), (17, 16, 1024), (3, 3, 1001)]:
            sizes = {"num_tokens": num_tokens, "num_seqs": num_seqs, "max_blocks": max_blocks}
            compile_attention(kernels, 128, 7, torch.float16, 64, None, **sizes)
            compile_rotary_store_kv(kernels, 28, 4, 128, torch.bfloat16, False, num_tokens)
            compile_others(kernels, torch.bfloat16, num_tokens)
        for name, binary in compiled:
            binaries[name].add(binary.hash)
    return {name: len(hashes) for name, hashes in binaries.items()}


if __name__ == "__main__":
    if sys.argv[2:] == ["--json"]:
        print(json.dumps({"rows": report(sys.argv[1]), "variants": count_variants(sys.argv[1])}))
    else:
        for row in report(sys.argv[1]):
            print(" ".join(f"{key}={value}" for key, value in row.items()))
