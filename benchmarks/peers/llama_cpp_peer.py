"""llama.cpp as a system of the benchmarks, through llama-cpp-python; the GGUF is written from the checkpoint.

Its Python package does not batch, so the loop is here, as in llama.cpp's own server: every step is one batch
of a decode for each running sequence and of prompts, up to the budget. Sequences share no prefixes.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import CHECKPOINTS
from benchmarks.peers.worker import Options, Tokens

# llama.cpp's names for how weights are stored.
_FILE_TYPES = {
    "float32": "LLAMA_FTYPE_ALL_F32",
    "bfloat16": "LLAMA_FTYPE_MOSTLY_BF16",
    "int8": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "int4": "LLAMA_FTYPE_MOSTLY_Q4_0",
}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


class LlamaCpp:
    """llama_decode over one context for all sequences."""

    @staticmethod
    def prepare(options: Options) -> None:
        """Write the GGUF in float32, then let llama.cpp convert it to the precision."""
        import llama_cpp

        path = _gguf(options, options.dtype)
        if path.exists():
            return
        source = _gguf(options, "float32")
        CHECKPOINTS.mkdir(exist_ok=True)
        if not source.exists():
            write_gguf(Path(options.model), source)
        if path != source:
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype = getattr(llama_cpp, _FILE_TYPES[options.dtype])
            params.pure = True  # quantise the output head as everything else
            params.nthread = options.threads
            failed = llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), params)
            assert not failed, f"llama_model_quantize gave {failed}"

    def __init__(self, options: Options) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self.budget = max(options.max_batched_tokens, options.num_requests)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            str(_gguf(options, options.dtype)).encode(), llama_cpp.llama_model_default_params()
        )
        assert model, "llama.cpp did not load the model"
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = options.num_tokens + options.num_requests
        params.n_batch = params.n_ubatch = self.budget
        params.n_seq_max = options.num_requests
        params.kv_unified = True  # one pool for sequences of any length
        params.n_threads = params.n_threads_batch = options.threads
        if options.dtype == "float32":
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self.context = llama_cpp.llama_init_from_model(model, params)
        assert self.context, "llama.cpp made no context"
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(self.budget, 0, 1)

    def run(
        self,
        prompts: Tokens,
        max_tokens: list[int],
        batch_size: int | None,  # noqa: ARG002  (it batches as it likes)
    ) -> tuple[Tokens, list[float]]:
        """Run all requests at once; the context has a sequence for each."""
        lib = self.lib
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        tokens: Tokens = [[] for _ in prompts]
        first = [0.0] * len(prompts)
        computed = [0] * len(prompts)
        while any(len(out) < n for out, n in zip(tokens, max_tokens, strict=True)):
            sampled = self._fill(prompts, tokens, max_tokens, computed)
            failed = lib.llama_decode(self.context, self.batch)
            assert not failed, f"llama_decode gave {failed}"
            for row, i in sampled:
                tokens[i].append(self._most_likely(row))
                first[i] = first[i] or time.perf_counter()
                if len(tokens[i]) == max_tokens[i]:
                    lib.llama_memory_seq_rm(lib.llama_get_memory(self.context), i, -1, -1)
        return tokens, first

    def _fill(
        self, prompts: Tokens, tokens: Tokens, max_tokens: list[int], computed: list[int]
    ) -> list[tuple[int, int]]:
        """Fill the batch with missing tokens, decodes first. Return the (row, sequence) pairs to sample."""
        running = [i for i, n in enumerate(max_tokens) if len(tokens[i]) < n]
        sampled: list[tuple[int, int]] = []
        self.batch.n_tokens = 0
        for i in sorted(running, key=lambda i: not tokens[i]):
            known = len(prompts[i]) + len(tokens[i])
            # Decoding is the case where one token is missing.
            end = min(known, computed[i] + self.budget - self.batch.n_tokens)
            for position in range(computed[i], end):
                token = prompts[i][position] if position < len(prompts[i]) else tokens[i][-1]
                self._add(token, position, i, wanted=position == known - 1)
            if computed[i] < end == known:
                sampled.append((self.batch.n_tokens - 1, i))
            computed[i] = end
        return sampled

    def _add(self, token: int, position: int, sequence: int, *, wanted: bool) -> None:
        batch, row = self.batch, self.batch.n_tokens
        batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        batch.n_tokens += 1

    def _most_likely(self, row: int) -> int:
        import numpy as np

        logits = self.lib.llama_get_logits_ith(self.context, row)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, shape=(self.vocab_size,)).argmax())


def write_gguf(model: Path, path: Path) -> None:
    """Write the weights of a Llama checkpoint as a GGUF in float32, without a tokenizer."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
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
    for name, weight in read_safetensors(model / "model.safetensors"):
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        if ".attn_q." in name or ".attn_k." in name:
            # llama.cpp rotates neighbouring elements, transformers the two halves of a head.
            halves = weight.reshape(heads if ".attn_q." in name else kv_heads, 2, -1, weight.shape[1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(name.replace("model.layers.", "blk."), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def _gguf(options: Options, dtype: str) -> Path:
    return CHECKPOINTS / f"{Path(options.model).name}-{dtype}.gguf"
