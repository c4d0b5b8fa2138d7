"""llama.cpp as a system of the benchmarks, through its C library; the GGUF is written from the checkpoint.

The loop is here, as in llama.cpp's own server: every step is one batch of a decode for each running sequence
and of prompts, up to the budget. A sequence keeps its KV, so that its next prompt computes only what differs.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import CHECKPOINTS, GGUF_NAMES, gguf_path, rss_mib
from benchmarks.peers import llama_cpp_library
from benchmarks.peers.llama_cpp_library import F16, F32
from benchmarks.peers.worker import Options, Tokens

_INSTALLED = Path(sys.prefix) / "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
LIBRARY = Path(os.environ.get("LLAMA_CPP_LIBRARY", _INSTALLED))
# llama_ftype of each precision.
_FILE_TYPES = {"float32": 0, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "bfloat16": 32}
_NAMES = {
    **GGUF_NAMES,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate.": "ffn_gate_inp.",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


class LlamaCpp:
    """llama_decode over one context for all sequences."""

    @staticmethod
    def prepare(options: Options) -> None:
        """Write the GGUF in float32, then let llama.cpp convert it to the precision."""
        path = gguf_path(options.model, options.dtype)
        if path.exists():
            return
        source = gguf_path(options.model, "float32")
        CHECKPOINTS.mkdir(exist_ok=True)
        if not source.exists():
            write_gguf(Path(options.model), source)
        if path == source:
            return
        lib = llama_cpp_library.load(LIBRARY)
        params = lib.llama_model_quantize_default_params()
        params.ftype = _FILE_TYPES[options.dtype]
        params.nthread = options.threads
        unfinished = path.with_suffix(".unfinished")
        failed = lib.llama_model_quantize(str(source).encode(), str(unfinished).encode(), params)
        assert not failed, f"llama_model_quantize gave {failed}"
        unfinished.rename(path)

    def __init__(self, options: Options) -> None:
        import numpy as np

        self.argmax = np.argmax
        self.harness_mib = rss_mib()
        self.lib = lib = llama_cpp_library.load(LIBRARY)
        self.budget = max(options.max_batched_tokens, options.num_requests)
        path = gguf_path(options.model, options.dtype)
        model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        assert model, "llama.cpp did not load the model"
        params = lib.llama_context_default_params()
        # Each sequence has a pool of its own: in one pool every query goes over the keys of all sequences.
        params.n_ctx = options.longest * options.num_requests
        params.n_batch = params.n_ubatch = self.budget
        params.n_seq_max = options.num_requests
        params.n_threads = params.n_threads_batch = options.threads
        params.type_k = params.type_v = F32 if options.dtype == "float32" else F16
        self.context = lib.llama_init_from_model(model, params)
        assert self.context, "llama.cpp made no context"
        self.memory = lib.llama_get_memory(self.context)
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.batch = lib.llama_batch_init(self.budget, 0, 1)
        self.kept: Tokens = [[] for _ in range(options.num_requests)]  # the tokens that have KV

    def run(
        self,
        prompts: Tokens,
        max_tokens: list[int],
        batch_size: int | None,  # noqa: ARG002  (it batches as it likes)
    ) -> tuple[Tokens, list[float]]:
        """Run all requests at once; the context has a sequence for each."""
        tokens: Tokens = [[] for _ in prompts]
        first = [0.0] * len(prompts)
        for i, prompt in enumerate(prompts):
            kept = self.kept[i]
            pairs = zip(kept, prompt[:-1], strict=False)
            shared = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(kept), len(prompt) - 1))
            self.lib.llama_memory_seq_rm(self.memory, i, shared, -1)
            del kept[shared:]
        while any(len(out) < n for out, n in zip(tokens, max_tokens, strict=True)):
            sampled = self._fill(prompts, tokens, max_tokens)
            failed = self.lib.llama_decode(self.context, self.batch)
            assert not failed, f"llama_decode gave {failed}"
            for row, i in sampled:
                tokens[i].append(self._most_likely(row))
                first[i] = first[i] or time.perf_counter()
        return tokens, first

    def _fill(self, prompts: Tokens, tokens: Tokens, max_tokens: list[int]) -> list[tuple[int, int]]:
        """Fill the batch with missing tokens, decodes first. Return the (row, sequence) pairs to sample."""
        running = [i for i, n in enumerate(max_tokens) if len(tokens[i]) < n]
        sampled: list[tuple[int, int]] = []
        self.batch.n_tokens = 0
        for i in sorted(running, key=lambda i: not tokens[i]):
            # Decoding is the case where one token is missing.
            known = len(prompts[i]) + len(tokens[i])
            start = len(self.kept[i])
            end = min(known, start + self.budget - self.batch.n_tokens)
            for position in range(start, end):
                token = prompts[i][position] if position < len(prompts[i]) else tokens[i][-1]
                self._add(token, position, i, wanted=position == known - 1)
                self.kept[i].append(token)
            if start < end == known:
                sampled.append((self.batch.n_tokens - 1, i))
        return sampled

    def _add(self, token: int, position: int, sequence: int, *, wanted: bool) -> None:
        batch = self.batch
        row = self.batch.n_tokens
        batch.token[row] = token
        batch.pos[row] = position
        batch.logits[row] = wanted
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = sequence
        batch.n_tokens += 1

    def _most_likely(self, row: int) -> int:
        address = self.lib.llama_get_logits_ith(self.context, row)
        return int(self.argmax((ctypes.c_float * self.vocab_size).from_address(address)))


def write_gguf(model: Path, path: Path) -> None:
    """Write the weights of a checkpoint of Llama or Qwen3-MoE as a GGUF in float32, without a tokenizer."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    is_llama = config["model_type"] == "llama"
    writer = gguf.GGUFWriter(path, "llama" if is_llama else "qwen3moe")
    if not is_llama:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, weight in stacked(read_safetensors(model / "model.safetensors")):
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        if is_llama and (".attn_q." in name or ".attn_k." in name):
            # llama.cpp rotates neighbouring elements, transformers the two halves of a head.
            halves = weight.reshape(heads if ".attn_q." in name else kv_heads, 2, -1, weight.shape[1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(name.replace("model.layers.", "blk."), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stacked(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield tensors, those of experts as stacks under their names in a GGUF file."""
    import numpy as np

    stacks: dict[str, dict[int, Any]] = {}
    for name, array in tensors:
        if (match := re.fullmatch(r"(.*)mlp\.experts\.(\d+)\.(\w+)_proj\.weight", name)) is None:
            yield name, array
        else:
            stacks.setdefault(f"{match[1]}ffn_{match[3]}_exps.weight", {})[int(match[2])] = array
    for name, experts in stacks.items():
        yield name, np.stack([experts[i] for i in range(len(experts))])


def read_safetensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each tensor's name and float32 array. numpy lacks bfloat16, the upper half of a float32."""
    import numpy as np

    data = np.memmap(path, dtype=np.uint8, mode="r")
    header_end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:header_end].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, end = (header_end + offset for offset in entry["data_offsets"])
        raw = data[start:end]
        if entry["dtype"] == "BF16":
            array = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            assert entry["dtype"] == "F32", f"{name} is {entry['dtype']}; BF16 and F32 can be read"
            array = raw.view(np.float32)
        yield name, array.reshape(entry["shape"])
