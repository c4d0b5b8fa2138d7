"""What the kernels compile to for GPUs that are not here.

A stand-in driver makes every launcher compile, on CPU tensors, exactly the specialisation it would launch
on a target; figures() reads registers, spills, shared memory and instruction counts out of the binaries.

    python -m tests.aot sm_90          # one target's table; needs TRITON_INTERPRET unset
    python -m tests.aot sm_90 --json
    python -m tests.aot --write        # kernels/README.md
"""

import collections
import dataclasses
import functools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from paged import EngineConfig, SamplingParams, model_runner
from paged.kernels.backend import Kernels, load_kernels
from paged.kernels.filter_logits import filter_logits
from paged.kernels.penalties import apply_penalties
from paged.kernels.sample_tokens import sample_tokens
from paged.request import Request
from paged.weights import read_config, resolve

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
ROOT = Path(__file__).parent.parent
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
    """Read one binary's figures; "stack", where registers spill to, is in bytes."""
    return _amd_figures(binary) if target.startswith("gfx") else _nvidia_figures(target, binary)


def _machine_code(cubin: bytes) -> int:
    """How many bytes of code a cubin holds: its section .text.<kernel>, found in the table of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, num_sections, names = struct.unpack_from("<HHH", cubin, 0x3A)
    # name, type, flags, address, offset and size of each
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(num_sections)]
    first_name = sections[names][4]
    return sum(section[5] for section in sections if cubin.startswith(b".text.", first_name + section[0]))


def cuobjdump(cubin: bytes, option: str) -> str:
    """What NVIDIA's tool prints: "--dump-resource-usage" takes 3 ms, "--dump-sass" half a second."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _nvidia_figures(target: str, binary: Any) -> dict[str, float]:
    """Whatever does not fit into the registers of a thread is in its stack."""
    cubin, ptx = binary.asm["cubin"], binary.asm["ptx"]
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", cuobjdump(cubin, "--dump-resource-usage"))
    registers, stack = int(registers), int(stack)
    all_registers, max_warps, shared, max_blocks = SM_LIMITS[target]
    warps = binary.metadata.num_warps
    per_warp = -(-registers * 32 // 256) * 256  # allocated in units of 256
    return {
        "registers": registers,
        "stack": stack,
        "shared": binary.metadata.shared,
        "blocks_per_sm": min(
            all_registers // per_warp // warps,
            shared // (binary.metadata.shared + 1024),  # 1 KiB is reserved for each block
            max_warps // warps,
            max_blocks,
        ),
        # Each of these becomes one instruction of the tensor cores.
        "wgmma": ptx.count("wgmma.mma_async."),
        "mma": len(re.findall(r"(?<!\.)\bmma\.sync\.", ptx)),
        "tcgen05": ptx.count("tcgen05.mma"),
        "async_copies": len(
            re.findall(r"cp\.async\.c[ag]\.shared\.global[^,]*,[^,]*, (?:0x10|16)\b|bulk\.tensor", ptx)
        ),
        "loads_2B": len(re.findall(r"ld\.global(?:\.\w+)*\.b16 ", ptx)),
        **_widths(re.findall(r"\b(ld|st)\.global((?:\.\w+)*) ", ptx), _ptx_bytes),
        "loads_behind_barrier": ptx.partition("bar.sync")[2].count("ld.global"),
        "instructions": _machine_code(cubin) // 16,
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
        "shared": binary.metadata.shared,
        "mfma": len(re.findall(r"^\s+v_mfma", isa, re.M)),
        "instructions": len(re.findall(r"^\s+[vs]_|^\s+(?:global|ds|buffer|flat)_", isa, re.M)),
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


DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn")}
# Every row of choose_config's tables and each branch of the kernels, with head dims that are padded and the
# smallest and the largest blocks: head_dim, group, dtype, block_size, and what else is not as usual.
ATTENTION_CASES: list[tuple[int, int, str, int, dict[str, Any]]] = [
    (64, 4, "bfloat16", 16, {"alibi": True, "causal": False}),
    (128, 4, "bfloat16", 16, {"window": 4096}),
    (128, 7, "float16", 64, {}),
    (128, 20, "bfloat16", 64, {"tree": True}),
    (256, 4, "bfloat16", 16, {"window": 4096, "softcap": True}),
    (96, 3, "float16", 8, {"window": 1024}),
    (32, 1, "bfloat16", 256, {}),
    (64, 8, "bfloat16", 16, {"window": 128, "sinks": True}),
    (128, 4, "bfloat16", 16, {"cache": "int8"}),
    (128, 4, "bfloat16", 16, {"cache": "float8_e4m3fn"}),
    (128, 4, "bfloat16", 16, {"shared": True}),
    (576, 16, "bfloat16", 64, {"value_dim": 512}),
    (64, 4, "float32", 16, {}),
    (128, 7, "float32", 16, {}),
    (256, 4, "float32", 16, {"window": 4096}),
    (576, 16, "float32", 64, {"value_dim": 512}),
]
# e4m3 arithmetic begins with sm_89, and gfx942 has a format of its own.
FP8_TARGETS = ("sm_90", "sm_100")


def compile_attention(
    kernels: Kernels,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    block_size: int,
    *,
    window: int | None = None,
    value_dim: int | None = None,
    cache: str | None = None,
    softcap: bool = False,
    sinks: bool = False,
    alibi: bool = False,
    tree: bool = False,
    causal: bool = True,
    shared: bool = False,
    num_tokens: int = 40,
    num_seqs: int = 2,
    max_blocks: int = 128,
) -> None:
    """Launch attention once, as a batch with prefill does: it compiles prefill, plan, decode and merge.

    A value_dim other than head_dim is a view of the key cache, as in MLA.
    """
    num_kv_heads, num_blocks = 2, 4
    num_heads = num_kv_heads * group
    if shared:
        num_tokens = num_seqs
    key_cache = torch.empty(
        num_blocks, block_size, num_kv_heads, head_dim, dtype=DTYPES[cache] if cache else dtype
    )
    scales = torch.empty(num_blocks, num_kv_heads, block_size) if cache else None
    kernels.paged_attention(
        torch.empty(num_tokens, num_heads, head_dim, dtype=dtype),
        key_cache,
        key_cache[..., :value_dim] if value_dim == 512 else torch.empty_like(key_cache)[..., :value_dim],
        torch.zeros(num_seqs, max_blocks, dtype=torch.int32),
        torch.zeros(num_seqs, dtype=torch.int32),
        torch.zeros(num_seqs + 1, dtype=torch.int32),
        scale=head_dim**-0.5,
        max_seqlen_q=1 if shared else num_tokens,
        sliding_window=window,
        causal=causal,
        softcap=50.0 if softcap else None,
        sinks=torch.empty(num_heads) if sinks else None,
        alibi_slopes=torch.empty(num_heads) if alibi else None,
        tree_mask=torch.empty(num_tokens, dtype=torch.int64) if tree else None,
        key_scales=scales,
        value_scales=scales,
        shared_prefix_len=max_blocks * block_size // 2 if shared else 0,
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


# Llama 3's: a row begins at 16 bytes. With an odd one no kernel can load more than 4 bytes a thread.
VOCAB_SIZE = 128256


def compile_sampling(*filters: str, num_rows: int = 3) -> None:
    """Launch what makes tokens of logits, with these filters."""
    logits = torch.empty(num_rows, VOCAB_SIZE)
    rows = torch.zeros(num_rows, dtype=torch.int64)
    counts = torch.zeros(2, VOCAB_SIZE, dtype=torch.int32)
    ones = torch.ones(num_rows)
    apply_penalties(logits, rows, rows, counts, counts > 0, ones, ones, ones)
    params: dict[str, Any] = {
        name: (ones.int() if name == "top_k" else ones) if name in filters else None
        for name in ("min_p", "top_n_sigma", "typical_p", "top_k", "top_p")
    }
    sample_tokens(logits, rows, rows, temperature=ones, **params)
    if filters:
        filter_logits(logits, temperature=ones, **params)


def report(target: str) -> list[dict[str, Any]]:
    """Compile every kernel for `target` and return a row of figures for each binary."""
    kernels = load_kernels("triton")
    rows = []
    with compiling(target) as compiled:
        for head_dim, group, dtype, block_size, options in ATTENTION_CASES:
            if options.get("cache") == "float8_e4m3fn" and target not in FP8_TARGETS:
                continue
            compile_attention(kernels, head_dim, group, DTYPES[dtype], block_size, **options)
            case = " ".join([f"{head_dim}x{group} {dtype} block {block_size}", *map(_told, options.items())])
            rows += [(name, case, binary) for name, binary in compiled]
            compiled.clear()
        for num_heads, num_kv_heads, head_dim, dtype, norm in ROTARY_CASES:
            compile_rotary_store_kv(kernels, num_heads, num_kv_heads, head_dim, DTYPES[dtype], norm)
            case = f"{num_heads}/{num_kv_heads}x{head_dim} {dtype}" + (" norm" if norm else "")
            rows += [(name, case, binary) for name, binary in compiled]
            compiled.clear()
        compile_others(kernels, torch.bfloat16)
        rows += [(name, "bfloat16", binary) for name, binary in compiled]
        compiled.clear()
        compile_sampling()
        rows += [(name, f"vocabulary {VOCAB_SIZE}", binary) for name, binary in compiled]
        compiled.clear()
        compile_sampling("top_n_sigma", "top_k")
        known = {binary.hash for _, _, binary in rows}
        case = f"vocabulary {VOCAB_SIZE} filters"
        rows += [(name, case, binary) for name, binary in compiled if binary.hash not in known]
    named: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name, case, binary in rows:  # several cases may share a plan or a merge
        name = name.strip("_").removesuffix("_kernel")
        key = (name, "" if name in ("plan", "merge") else case, binary.hash)
        if key not in named:
            named[key] = {"kernel": name, "case": case, **figures(target, binary)}
    return list(named.values())


def _told(option: tuple[str, Any]) -> str:
    name, value = option
    return name if value is True else f"no {name}" if value is False else f"{name} {value}"


def count_variants(target: str) -> dict[str, int]:
    """How many binaries each kernel has after batches of every awkward size of one model."""
    kernels = load_kernels("triton")
    binaries = collections.defaultdict(set)
    with compiling(target) as compiled:
        for num_tokens, num_seqs, max_blocks in [(1, 1, 33), (16, 2, 48), (17, 16, 1024), (3, 3, 1001)]:
            sizes = {"num_tokens": num_tokens, "num_seqs": num_seqs, "max_blocks": max_blocks}
            compile_attention(kernels, 128, 7, torch.float16, 64, **sizes)
            compile_rotary_store_kv(kernels, 28, 4, 128, torch.bfloat16, False, num_tokens)
            compile_others(kernels, torch.bfloat16, num_tokens)
            for filters in [(), ("top_k",), ("min_p", "top_p"), ("top_n_sigma", "typical_p")]:
                compile_sampling(*filters, num_rows=num_tokens)
        for name, binary in compiled:
            binaries[name].add(binary.hash)
    return {name: len(hashes) for name, hashes in binaries.items()}


WAYS_TO_SAMPLE = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=5, frequency_penalty=0.5),
    SamplingParams(min_p=0.1, top_n_sigma=2.0),
)


def warm_up(target: str) -> dict[str, Any]:
    """Which kernels an engine's warm-up compiles, and which a day's batches add to them."""
    config = EngineConfig(model="demo", device="cpu", dtype="bfloat16", num_blocks=200)
    directory = resolve("demo")
    model_runner.resolve_backend = lambda *_: "triton"
    with compiling(target) as compiled:
        runner = model_runner.ModelRunner(config, read_config(directory), directory)
        num_compiled = runner.warm_up()
        ready = {binary.hash for _, binary in compiled}
        manager = runner.sizes.new_block_manager(200)
        scheduler = runner.sizes.new_scheduler(manager)
        for i, prompt_len in enumerate([1, 2, 3, 700, 17, 640]):
            params = dataclasses.replace(WAYS_TO_SAMPLE[i % len(WAYS_TO_SAMPLE)], max_tokens=3)
            request = Request(str(i), None, [i] * prompt_len, params, prompt_len + 3, frozenset(), 0)
            scheduler.add(request)
            for _ in range(2):
                schedule = scheduler.schedule()
                schedule.copies.append((0, 1))
                tokens = runner.execute(schedule).tokens
                scheduler.update(schedule, [0] * len(tokens))  # what is not launched computes nothing
    later = [name for name, binary in compiled if binary.hash not in ready]
    return {"num_compiled": num_compiled, "ready": len(ready), "later": later}


COLUMNS = {
    "registers": "registers",
    "shared": "shared memory",
    "blocks_per_sm": "blocks per SM",
    "instructions": "instructions",
    "tensor": "tensor core instructions",
    "wide": "wide loads",
}


def table(target: str, rows: list[dict[str, Any]]) -> str:
    """The figures of one target as Markdown."""
    lines = [
        f"## {target}\n",
        "| kernel | case | " + " | ".join(COLUMNS.values()) + " |",
        "|---|---|" + "---:|" * len(COLUMNS),
    ]
    for row in rows:
        values = {
            **row,
            "tensor": sum(row.get(name, 0) for name in ("wgmma", "mma", "tcgen05", "mfma")),
            "wide": row.get("async_copies", 0) + row.get("loads_16B", 0),
        }
        cells = [row["kernel"], row["case"], *(str(values.get(name, "")) for name in COLUMNS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


README = """# What the kernels compile to

Made by `python -m tests.aot --write` with Triton {version} and no GPU; a test fails when it is stale.
Nothing spills: no row has a stack. Registers are per thread, shared memory is in bytes per block; blocks per
SM follow from both. Instructions are the machine code's bytes over the 16 of each, the padding behind them
included; on gfx942 those listed. Tensor core instructions are wgmma (sm_90), tcgen05 (sm_100), mma (sm_80,
and where a block has less than 64 rows), counted in the PTX, and MFMA (gfx942). Wide loads are asynchronous
copies of 16 bytes, on gfx942 loads of 16 bytes. A case names head_dim x GQA group, dtype, tokens of a block
and options.

"""


def readme(reports: dict[str, list[dict[str, Any]]]) -> str:
    """kernels/README.md from the reports of all targets."""
    return README.format(version=triton.__version__) + "\n".join(map(table, reports, reports.values()))


def reports() -> dict[str, Any]:
    """What `--json` prints, for all targets: each in a process of its own, with a cache of its own."""

    def of(target: str) -> Any:
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            environment.pop("TRITON_INTERPRET", None)
            command = [sys.executable, "-m", "tests.aot", target, "--json"]
            done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(TARGETS, pool.map(of, TARGETS), strict=True))


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        rows = {target: report["rows"] for target, report in reports().items()}
        (ROOT / "kernels" / "README.md").write_text(readme(rows))
    elif sys.argv[2:] == ["--json"]:
        name = sys.argv[1]
        print(json.dumps({"rows": report(name), "variants": count_variants(name), "warm_up": warm_up(name)}))
    else:
        print(table(sys.argv[1], report(sys.argv[1])))
