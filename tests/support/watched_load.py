"""Load damaged checkpoints in this process, and watch memory, files, processes, network and code.

    python -m tests.support.watched_load FIRST STOP STRIDE [FILE ...]

Writes two lines of JSON for each seed, before and after. `tests.strangers` runs this in child processes, and
ends one where a checkpoint takes too long.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load as tensors_of
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer  # noqa: F401 - imported before memory is measured

from paged import CheckpointError, ConfigError, LLMEngine, RequestError, SamplingParams, UnsupportedModelError
from paged.architectures.hf_config import from_hf
from paged.kernels.backend import load_kernels
from paged.model.decoder import Decoder
from paged.model.weights.loading import wanted_tensors
from tests.support.gguf_files import in_type, write_gguf
from tests.support.mutations import Files, mutate
from tests.support.quantised import (
    Sizes,
    Writer,
    float_group,
    fp8,
    gptq,
    int_group,
    nvfp4,
    packed,
)

ROOT = Path(__file__).parents[2]
MOST_BYTES = 256 * 2**20  # that one load may add to this process
MOST_CPU_S = 5.0
MOST_ADDRESS_SPACE = 8 * 2**30  # so that a finding does not take the machine's memory
REFUSALS = (CheckpointError, UnsupportedModelError, ConfigError)
# Parts of a checkpoint that no loader may open: they hold code.
CODE = (".py", ".pyc", ".so", ".bin", ".pt", ".pkl")
FORBIDDEN = (
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
    "socket.getaddrinfo",
    "ftplib.connect",
    "urllib.Request",
)
IN_OPEN = 0x20
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# The processes that a load may start.
WORKERS = [[sys.executable, "-P", "-m", f"paged.text.{name}_worker"] for name in ("template", "tokenizer")]


# The undamaged checkpoints


def base_checkpoints() -> list[Files]:
    """Return the files of small checkpoints that differ in architecture, tokenizer, layout and format."""
    plain = _files("qwen3", _word_piece(), sharded=False)
    return [
        _files("llama", _byte_level(), sharded=False),
        {**_files("llama", _unigram(), sharded=True), "special_tokens_map.json": b'{"eos_token": "<|end|>"}'},
        plain,
        *(_quantised(plain, *quantised) for quantised in QUANTISED),
        {"model.gguf": _gguf(_byte_level())},
    ]


_SMALL = Sizes(8, scale=0.02, spread=2)
_NVFP4 = nvfp4(0.002, modelopt=True, scale=1)
# quantization_config of config.json and of the file beside it, and how attention and MLPs are stored.
QUANTISED: list[tuple[dict[str, Any], dict[str, Any], Writer, Writer]] = [
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "checkpoint_format": "gptq"},
        {},
        gptq(_SMALL, act_order=True),
        gptq(_SMALL),
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "a": {"targets": ["Linear"], "weights": int_group(4, 8, symmetric=False)},
                "b": {
                    "targets": ["re:.*attn.*"],
                    "format": "float-quantized",
                    "weights": float_group(8, "block", block_structure=[4, 8]),
                },
            },
            "ignore": ["lm_head"],
        },
        {},
        fp8((4, 8), scale=0.002),
        packed(_SMALL, zeros="packed"),
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {
            "quantized_layers": {
                f"model.layers.{i}.{part}_proj": {"quant_algo": algorithm}
                for i in (0, 1)
                for algorithm, parts in (
                    ("FP8", [f"self_attn.{x}" for x in "qkvo"]),
                    ("NVFP4", [f"mlp.{x}" for x in ("gate", "up", "down")]),
                )
                for part in parts
            }
        },
        fp8("scalar", scale=0.002),
        _NVFP4,
    ),
]


def _quantised(
    plain: Files, config: dict[str, Any], sidecar: dict[str, Any], attention: Writer, mlp: Writer
) -> Files:
    """Store the layers of a checkpoint in codes."""
    random = np.random.default_rng(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in tensors_of(plain["model.safetensors"]).items():
        if ".layers." in name and tensor.dim() == 2:
            stored = (attention if "attn" in name else mlp)(*tensor.shape, random)
            tensors |= {name.removesuffix("weight") + last: x for last, x in stored.tensors.items()}
        else:
            tensors[name] = tensor
    whole = {**json.loads(plain["config.json"]), "quantization_config": config}
    files = {**plain, "config.json": json.dumps(whole).encode(), "model.safetensors": save(tensors)}
    if sidecar:
        files["hf_quant_config.json"] = json.dumps({"producer": {}, "quantization": sidecar}).encode()
    return files


def _files(model_type: str, tokenizer: Tokenizer, *, sharded: bool) -> Files:
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model_type]],
        "model_type": model_type,
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "dtype": "float32",
    }
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = Decoder(from_hf(config), load_kernels("torch"))
    tensors = {
        name: torch.randn(x.shape, generator=generator)
        for name, x in wanted_tensors(model.loadables(), {}).items()
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "model_max_length": 64,
        "clean_up_tokenization_spaces": False,
    }
    if model_type == "qwen3":
        settings["chat_template"] = TEMPLATE
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {
            "eos_token_id": [0],
            "temperature": 0.7,
            "top_p": 0.9,
            "max_new_tokens": 9,
        },
        "tokenizer_config.json": settings,
        "evil.py": "raise SystemExit('code of a checkpoint ran')",
    }
    if sharded:
        shards = {f"model-0000{i}-of-00002.safetensors": sorted(tensors)[i - 1 :: 2] for i in (1, 2)}
        places = {name: shard for shard, names in shards.items() for name in names}
        files["model.safetensors.index.json"] = {"metadata": {"total_size": 1}, "weight_map": places}
    else:
        shards = {"model.safetensors": sorted(tensors)}
    written = {n: c.encode() if isinstance(c, str) else json.dumps(c).encode() for n, c in files.items()}
    written |= {shard: save({n: tensors[n] for n in names}) for shard, names in shards.items()}
    written["tokenizer.json"] = tokenizer.to_str().encode()
    if model_type == "llama":
        written["chat_template.jinja"] = TEMPLATE.encode()
    return written


def _gguf(tokenizer: Tokenizer) -> bytes:
    """Return a file with weights in blocks and in floats, and with a tokenizer."""
    own = json.loads(tokenizer.to_str())
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    added = {token["id"] for token in own["added_tokens"]}
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 16}
    metadata: dict[str, Any] = {"general.architecture": "llama"}
    metadata |= {f"llama.{key}": value for key, value in sizes.items()}
    metadata |= {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4}
    text = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": [*map(" ".join, own["model"]["merges"])],
    }
    text |= {"token_type": [3 if i in added else 1 for i in range(len(tokens))]}
    text |= {"eos_token_id": tokens.index("<|end|>"), "add_bos_token": False}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in text.items()}
    metadata["tokenizer.chat_template"] = TEMPLATE
    rows = {
        "attn_q": 32,
        "attn_k": 16,
        "attn_v": 16,
        "attn_output": 32,
        "ffn_gate": 32,
        "ffn_up": 32,
        "ffn_down": 32,
    }
    shapes = {f"blk.{i}.{name}": (count, 32) for i in range(2) for name, count in rows.items()}
    shapes |= {"token_embd": (len(tokens), 32), "output": (len(tokens), 32), "output_norm": (32,)}
    shapes |= {f"blk.{i}.{name}": (32,) for i in range(2) for name in ("attn_norm", "ffn_norm")}
    generator = torch.Generator().manual_seed(0)
    stored = {
        f"{name}.weight": in_type("Q8_0" if len(shape) > 1 else "F32", torch.randn(shape), generator)[0]
        for name, shape in sorted(shapes.items())
    }
    with tempfile.TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "a.gguf", metadata, stored).read_bytes()


def _with_end(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|user|>", special=True)])
    return tokenizer


def _byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    vocab = {"<|end|>": 0} | {token: 1 + i for i, token in enumerate([*letters, "th", "the", "Ġthe"])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_end(tokenizer)


def _unigram() -> Tokenizer:
    vocab = [("<|end|>", 0.0), ("<unk>", 0.0), *((f"<0x{i:02X}>", -9.0) for i in range(256))]
    vocab += [(piece, -float(i)) for i, piece in enumerate(("▁", "▁the", "e", "t", "a", "o", "lo", "hel"))]
    tokenizer = Tokenizer(models.Unigram(vocab, 1, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _with_end(tokenizer)


def _word_piece() -> Tokenizer:
    pieces = ["<|end|>", "[UNK]", *"abcdehlorstw", *(f"##{c}" for c in "abcdehlorstw"), "the"]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _with_end(tokenizer)


# What is watched


class Watch:
    """What this process does while it loads a checkpoint. One per process, as audit hooks stay."""

    def __init__(self, work: Path) -> None:
        self.model, self.away, self.is_on = work / "model", work / "away", False
        self.findings: list[str] = []
        self.away.mkdir()
        allowed = {
            ROOT,
            Path(sys.prefix),
            Path(sys.base_prefix),
            work / "model",
            work / "blobs",
            work / "cache",
        }
        allowed |= {Path(p) for p in ("/proc", "/sys", "/dev", "/etc", "/usr", "/run", "/lib")}
        allowed |= {Path(p) for p in sys.path if p}
        self._allowed = tuple(f"{path.resolve()}{os.sep}" for path in allowed)
        # Audit events of Python do not show the files that other languages open.
        self._libc = ctypes.CDLL(None)
        self._inotify = self._libc.inotify_init1(os.O_NONBLOCK)
        assert self._libc.inotify_add_watch(self._inotify, os.fsencode(self.away), IN_OPEN) >= 0
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this process
        sys.stderr.flush()
        for terminal in (1, 2):
            os.dup2(self._stderr.fileno(), terminal)
        sys.addaudithook(self._audit)

    def begin(self) -> None:
        """Start a measurement."""
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak of resident memory
        self._bytes, self._cpu_s = _resident("VmRSS"), time.process_time()
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        self._opened_away()  # what was noticed before does not count
        self.findings, self.is_on = [], True

    def end(self) -> tuple[int, float, list[str]]:
        """Return the memory and CPU time since `begin`, and what must not have happened."""
        self.is_on = False
        num_bytes, cpu_s = _resident("VmHWM") - self._bytes, time.process_time() - self._cpu_s
        if num_bytes > MOST_BYTES:
            self.findings.append(f"took {num_bytes / 2**20:,.0f} MiB")
        if cpu_s > MOST_CPU_S:
            self.findings.append(f"took {cpu_s:.1f} s")
        if self._opened_away():
            self.findings.append("opened a file outside the checkpoint")
        sys.stderr.flush()
        shown = os.pread(2, 2**16, 0).decode(errors="replace")
        if len(shown) > 1500 or not shown.replace("\n", "").isprintable():
            self.findings.append(f"wrote {len(shown)} characters to the terminal: {shown[:300]!r}")
        return num_bytes, cpu_s, self.findings

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "open" and isinstance(args[0], str | bytes | Path):
            self._opened(os.path.abspath(os.fsdecode(args[0])))
        elif event in FORBIDDEN:
            self.findings.append(f"{event}{args[:2]}")
        elif event == "subprocess.Popen" and [*args[1][:4]] not in WORKERS:
            self.findings.append(f"started {args[1]}")
        elif event in ("exec", "compile", "ctypes.dlopen"):
            name = getattr(args[0], "co_filename", args[-1] if event == "compile" else args[0])
            if str(name).startswith(str(self.model)):
                self.findings.append(f"{event} of {name}")

    def _opened_away(self) -> bool:
        """Return whether a file beside the checkpoint was opened since the last call."""
        try:
            return bool(os.read(self._inotify, 2**16))
        except BlockingIOError:
            return False

    def _opened(self, path: str) -> None:
        if not f"{path}{os.sep}".startswith(self._allowed):
            self.findings.append(f"opened {path}")
        elif path.startswith(str(self.model)) and path.endswith(CODE):
            self.findings.append(f"opened {path}, which is code")


def _resident(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


class _Records(logging.Handler):
    """Keeps log records, which must be readable lines as errors are."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _fault_of(message: str) -> str | None:
    if len(message) > 500:
        return f"a message of {len(message):,} characters: {message[:200]}"
    return None if message.isprintable() else f"an unprintable message: {message[:300]!r}"


def load(directory: Path, *, with_tokenizer: bool, with_tokens: bool) -> tuple[str, list[str]]:
    """Load and use a checkpoint. Return the outcome, and what is wrong with it."""
    findings, records = [], _Records()
    logging.getLogger().addHandler(records)
    outcome = "loads"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            _use(directory, with_tokenizer=with_tokenizer, with_tokens=with_tokens)
        except REFUSALS as error:
            message, outcome = str(error), type(error).__name__
            if str(directory) not in message:
                findings.append(f"a message without a file: {message}")
            findings.append(_fault_of(message) or "")
        except RequestError as error:
            outcome = "loads, refuses a text"
            findings.append(_fault_of(str(error)) or "")
        except BaseException as error:  # a Rust panic is no Exception
            outcome = f"{type(error).__module__}.{type(error).__name__}"
            findings.append(f"{outcome}: {str(error)[:300]!r}")
    logging.getLogger().removeHandler(records)
    findings += [_fault_of(line) or "" for line in [*records.lines, *(str(w.message) for w in warned)]]
    return outcome, list(filter(None, findings))


def _use(directory: Path, *, with_tokenizer: bool, with_tokens: bool) -> None:
    engine = LLMEngine(
        str(directory),
        device="cpu",
        num_threads=1,
        attention_backend="torch",
        num_blocks=8,
        skip_tokenizer_init=not with_tokenizer,
    )
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=0)
    if with_tokenizer:
        prompt = engine.render_chat([{"role": "user", "content": "Hello, the world"}])
        engine.generate(prompt, params, use_tqdm=False)
    elif with_tokens:
        engine.generate([1, 2, 3], params, use_tqdm=False)


def main() -> None:
    """Load the checkpoints of these seeds."""
    first, stop, stride = map(int, sys.argv[1:4])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    only = sys.argv[4:]
    first_base, *_ = every = base_checkpoints()
    bases = [base for base in every if not only or not base.keys().isdisjoint(only)]
    with tempfile.TemporaryDirectory(prefix="paged-strangers-") as folder:
        work = Path(folder).resolve()
        os.environ["XDG_CACHE_HOME"] = str(work / "cache")  # where what is made of GGUF files is kept
        watch = Watch(work)
        for name, content in first_base.items():
            (watch.away / name).write_bytes(content)
        (watch.away / "tokenizer.4.0.0.json").write_bytes(first_base["tokenizer.json"])
        for i, base in enumerate(bases):  # warm up, so that what is imported once does not count
            _refill(watch.model, base)
            outcome, findings = load(watch.model, with_tokenizer=True, with_tokens=True)
            assert outcome == "loads", (i, outcome, findings)
        soft = _resident("VmSize") + MOST_ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))
        for seed in range(first, stop, stride):
            _refill(watch.model, {})
            done = mutate(seed, watch.model, bases[seed % len(bases)], only)
            out.write(json.dumps({"seed": seed, "done": done}) + "\n")
            is_gguf = done.startswith("model.gguf")
            touches_text = not done.startswith(("model", "config", "generation")) or (
                is_gguf and seed % 8 < 4
            )
            started = time.perf_counter()
            watch.begin()
            outcome, findings = load(watch.model, with_tokenizer=touches_text, with_tokens=seed % 4 == 0)
            num_bytes, cpu_s, more = watch.end()
            result = {"seed": seed, "done": done, "outcome": outcome, "findings": findings + more}
            result |= {"bytes": num_bytes, "cpu_s": cpu_s, "s": time.perf_counter() - started}
            out.write(json.dumps(result) + "\n")


def _refill(directory: Path, files: Files) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)


if __name__ == "__main__":
    main()
