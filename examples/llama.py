"""Llama from top to bottom: its weights, its forward pass, and the loop that serves many prompts at once.

Scheduler, block manager and kernels are the engine's. A test holds that the tokens are the engine's too.
"""

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding, linear
from torch.nn.utils.rnn import pad_sequence

import paged
from paged.blocks.manager import BlockManager
from paged.kernels.attention_options import AttentionOptions
from paged.kernels.backend import load_kernels
from paged.kernels.operations import Kernels
from paged.requests.request import Request, RequestInputs
from paged.scheduler.schedule import Schedule
from paged.scheduler.scheduler import Scheduler
from paged.text.tokenizer import Tokenizer


@dataclass
class Batch:
    """One step: the new tokens of all sequences in a row, without padding."""

    token_ids: Tensor  # i64[num_tokens]
    positions: Tensor  # i64[num_tokens]
    slot_mapping: Tensor  # i64[num_tokens], where the K and V of each new token go
    block_tables: Tensor  # i32[num_seqs, max_blocks_per_seq], padded with zeros
    seq_lens: Tensor  # i32[num_seqs], cached and new tokens
    cu_seqlens_q: Tensor  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    max_seqlen_q: int
    output_rows: Tensor  # i64[num_sampled], the last new token of each sequence in schedule.sampled

    @classmethod
    def from_schedule(cls, schedule: Schedule, block_size: int) -> "Batch":
        token_ids, positions, slots, tables = list[int](), list[int](), list[int](), list[Tensor]()
        starts, counts = schedule.num_computed_tokens, schedule.num_new_tokens
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        for request, start, end in zip(schedule.requests, starts, ends, strict=True):
            table = request.blocks.tables[0].tolist()  # of the only layer group
            token_ids += request.token_ids[start:end]
            positions += range(start, end)
            slots += [table[pos // block_size] * block_size + pos % block_size for pos in range(start, end)]
            tables.append(torch.tensor(table, dtype=torch.int32))
        cu_seqlens_q = [0, *accumulate(counts)]
        return cls(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_tables=pad_sequence(tables, batch_first=True),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            cu_seqlens_q=torch.tensor(cu_seqlens_q, dtype=torch.int32),
            max_seqlen_q=max(counts),
            output_rows=torch.tensor([cu_seqlens_q[i + 1] - 1 for i in schedule.sampled], dtype=torch.int64),
        )


class Llama:
    """A `LlamaForCausalLM` checkpoint in float32 on the CPU, and its KV cache."""

    def __init__(self, directory: Path, kernels: Kernels, num_blocks: int, block_size: int) -> None:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type") or rope.get("type", "default")
        tensors = [item for file in directory.glob("*.safetensors") for item in load_file(file).items()]
        self.weights = {name: tensor.float() for name, tensor in tensors}
        others = [name for name in self.weights if not name.endswith(".weight")]  # biases, scales
        kind = [*config["architectures"], config["hidden_act"], rope_type, *others[:1]]
        if kind != ["LlamaForCausalLM", "silu", "default"]:
            raise ValueError(f"{directory} is {kind}, which is not computed here; LLMEngine may load it")
        if config.get("tie_word_embeddings", False):
            self.weights["lm_head.weight"] = self.weights["model.embed_tokens.weight"]
        self.kernels = kernels
        self.num_layers = config["num_hidden_layers"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config.get("num_key_value_heads", self.num_heads)
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.num_heads
        self.eps = config["rms_norm_eps"]
        theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        self.inv_freq = theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        shape = (2, self.num_layers, num_blocks, block_size, self.num_kv_heads, self.head_dim)
        self.key_cache, self.value_cache = torch.zeros(shape)

    def forward(self, batch: Batch) -> Tensor:  # f32[num_sampled, vocab_size]
        angles = batch.positions[:, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()  # [num_tokens, head_dim // 2]
        hidden = embedding(batch.token_ids, self.weights["model.embed_tokens.weight"])  # [num_tokens, size]
        for layer in range(self.num_layers):
            normed = self.norm(hidden, f"model.layers.{layer}.input_layernorm")
            hidden = hidden + self.attention(normed, layer, batch, cos, sin)
            normed = self.norm(hidden, f"model.layers.{layer}.post_attention_layernorm")
            hidden = hidden + self.mlp(normed, layer)
        return self.linear(self.norm(hidden[batch.output_rows], "model.norm"), "lm_head")

    def attention(self, x: Tensor, layer: int, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
        name = f"model.layers.{layer}.self_attn"
        caches = self.key_cache[layer], self.value_cache[layer]
        qkv = torch.cat([self.linear(x, f"{name}.{part}_proj") for part in "qkv"], dim=-1)
        qkv = qkv.view(len(x), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        # Rotates queries and keys, and writes K and V of the new tokens into their slots.
        query = self.kernels.rotary_store_kv(qkv, cos, sin, *caches, batch.slot_mapping)
        sequences = batch.block_tables, batch.seq_lens, batch.cu_seqlens_q
        options = AttentionOptions(scale=self.head_dim**-0.5, max_seqlen_q=batch.max_seqlen_q)
        attended = self.kernels.paged_attention(query, *caches, *sequences, options)
        return self.linear(attended.flatten(1), f"{name}.o_proj")

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        name = f"model.layers.{layer}.mlp"
        gate_and_up = torch.cat([self.linear(x, f"{name}.{part}_proj") for part in ("gate", "up")], dim=-1)
        return self.linear(self.kernels.silu_and_mul(gate_and_up), f"{name}.down_proj")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.kernels.rms_norm(x, self.weights[f"{name}.weight"], self.eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"])


def generate(model: Llama, scheduler: Scheduler, prompts: list[list[int]], max_tokens: int) -> list[Request]:
    """Generate greedily until every prompt has max_tokens. Return the requests, with their output."""
    inputs = [RequestInputs(prompt_token_ids=p, max_total_tokens=len(p) + max_tokens) for p in prompts]
    for request in (requests := [*map(Request, inputs)]):
        scheduler.add(request)
    while scheduler.has_unfinished():
        schedule = scheduler.schedule()
        assert not schedule.moves_blocks, "only forks and swapping move blocks"
        logits = model.forward(Batch.from_schedule(schedule, scheduler.block_manager.block_size))
        tokens, _ = model.kernels.greedy(logits)  # the argmax of each row, and its logit
        scheduler.update(schedule, tokens.tolist())
    return requests


if __name__ == "__main__":
    demo = Path(paged.__file__).parent / "demo"
    tokenizer = Tokenizer(demo)
    llama = Llama(demo, load_kernels("numba"), num_blocks=64, block_size=16)
    # A step has at most 32 tokens: the first prompt is computed in chunks, while others already decode.
    loop = Scheduler(BlockManager(64, 16), max_num_seqs=8, max_num_batched_tokens=32)
    stack = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def "
    texts = [f"{stack}push(self, item):", f"{stack}pop(self):", "def fibonacci(n):", "import os"]
    for done in generate(llama, loop, [tokenizer.encode(text) for text in texts], max_tokens=24):
        print(f"--- {done.num_cached_tokens} tokens from the prefix cache")
        print(tokenizer.decode(done.token_ids))
