"""LoRA adapters written by PEFT with strong random weights, and PEFT itself as their reference."""

from __future__ import annotations

import functools
import json
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from paged import LLMEngine, LoRARequest, SamplingParams
from paged.checkpoints.model_directory import resolve
from tests.support.checkpoints import HYBRIDS, checkpoint

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# Of experts and what is beside them, as transformers 5 and PEFT name them.
EXPERTS = {
    "qwen3_moe": {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"],
        "rank_pattern": {"experts.down_proj": 2},
        "alpha_pattern": {r"layers\.1\..*gate_up_proj": 3},
    },
    "gpt_oss": {"target_modules": ["v_proj"], "target_parameters": ["gate_up_proj"], "use_rslora": True},
    "qwen2_moe": {
        "target_modules": r".*shared_expert(\.(gate|up)_proj|_gate)",
        "target_parameters": ["experts.down_proj", "shared_expert.down_proj.weight"],
        "rank_pattern": {"shared_expert.down_proj.weight": 1},
    },
    "granitemoe": {
        "target_modules": ["v_proj"],
        "target_parameters": ["experts.down_proj", "experts.gate_up_proj"],
    },
    "gemma4-experts": {
        "target_modules": ["q_proj", "router.proj"],
        "target_parameters": ["experts.gate_up_proj"],
    },
    "nemotron_h_moe": {
        "target_modules": ["shared_experts.up_proj"],
        "target_parameters": ["experts.up_proj", "experts.down_proj"],
    },
}
_STACKS = {"target_modules": ["v_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
# The other mixtures, which tests by command compare alone.
OTHER_EXPERTS = {
    "olmoe": _STACKS,
    "mixtral": _STACKS,
    "glm4_moe": _STACKS,
    "minimax_m2": _STACKS,
    "qwen3_5_moe": _STACKS,
    "qwen3_next": _STACKS,
    "lfm2_moe": _STACKS,
    "granitemoehybrid": _STACKS,
    "nemotron_h_moe-latent": {**_STACKS, "target_parameters": ["experts.up_proj", "experts.down_proj"]},
}
# The names that lora_target_modules needs for them.
_DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
# Of families that name their layers otherwise.
TARGETS = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "glm4": (*ATTENTION, "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "qwen3_moe": ATTENTION,
    "gpt_oss": ATTENTION,
    "qwen3_5": (*ATTENTION, *MLP, *_DELTA),
    "qwen3_next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "lfm2": (*ATTENTION[:3], "out_proj", "in_proj", "w1", "w2", "w3"),
    # PEFT adapts no out_proj of Mamba-2.
    "nemotron_h": (*ATTENTION, "in_proj", "up_proj", "down_proj"),
    "granitemoehybrid-dense": (*ATTENTION, "in_proj", "shared_mlp.input_linear", "output_linear"),
    "falcon_h1": (*ATTENTION, *MLP, "in_proj"),
    "gemma4": (
        *ATTENTION,
        *MLP,
        "per_layer_input_gate",
        "per_layer_projection",
        "per_layer_model_projection",
    ),
}


@contextmanager
def _quietly() -> Iterator[None]:
    """Ignore what PEFT warns of: patterns that match nothing, and old names of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _base(model: str | Path) -> Any:
    path = resolve(model) if model == "demo" else checkpoint(model) if isinstance(model, str) else model
    model_class = transformers.AutoModelForCausalLM
    return model_class.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def drawn_config(model: str, seed: int) -> dict[str, Any]:
    """Return arguments of a LoraConfig: layers, ranks, patterns and scales by chance."""
    generator = random.Random(f"{model} {seed}")
    layers = TARGETS.get(model, (*ATTENTION, *MLP))
    chosen = generator.sample(layers, generator.randint(1, len(layers)))
    options: dict[str, Any] = {"r": generator.randint(1, 8), "lora_alpha": generator.choice([1, 8, 16])}
    options["target_modules"] = generator.choice([chosen, rf".*\.({'|'.join(chosen)})"])
    options["use_rslora"] = generator.random() < 0.5
    if generator.random() < 0.5:
        options["rank_pattern"] = {chosen[0]: generator.randint(1, 8)}
    if generator.random() < 0.5:
        options["alpha_pattern"] = {rf"layers\.1\..*{chosen[-1]}": 3}
    return options


@functools.cache
def adapter(directory: Path, model: str, seed: int = 0, scale: float = 0.3) -> Path:
    """Write an adapter of a tiny checkpoint into a folder of `directory`. Return the folder."""
    return adapter_of(model, directory / f"{model}-{seed}-{scale}", drawn_config(model, seed), seed, scale)


def adapter_of(
    model: str | Path, target: Path, config: dict[str, Any], seed: int = 0, scale: float = 0.3
) -> Path:
    """Write an adapter of a checkpoint, which has a name or a directory, into a folder. Return the folder."""
    with _quietly():
        made = get_peft_model(_base(model), LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    with _quietly():
        made.save_pretrained(target)
    return target


def with_experts(model: str) -> list[str]:
    """Return the lora_target_modules of a tiny mixture of experts, with what is beside them."""
    beside = {"gpt_oss": (), "nemotron_h_moe": MLP[1:]}.get(model, MLP)
    gates = {"qwen3_moe": ("gate",), "qwen2_moe": ("shared_expert_gate",), "gemma4-experts": ("router",)}
    beside += gates.get(model, ())
    return [*ATTENTION, *beside, "experts"]


def adapter_of_experts(directory: Path, model: str, seed: int) -> Path:
    """Write an adapter of a tiny mixture of experts. Return its folder."""
    config = {"r": 3 + seed, "lora_alpha": 6, **{**EXPERTS, **OTHER_EXPERTS}[model]}
    return adapter_of(model, directory / f"{model}-experts-{seed}", config, seed, 0.2)


def by_expert(path: Path, model: str, target: Path) -> Path:
    """Write an adapter of stacked experts as transformers 4 had them: matrices of each expert."""
    config = json.loads((path / "adapter_config.json").read_text())
    names = ("w1", "w3", "w2") if model == "mixtral" else MLP
    found = {}
    for name, tensor in load_file(path / "adapter_model.safetensors").items():
        start, is_expert, kind = name.partition(".experts.")
        if not is_expert:
            found[name] = tensor
            continue
        start = start.replace(".mlp", ".block_sparse_moe") if model == "mixtral" else start
        rank = config["r"]
        parts = names[:2] if kind.startswith("base_layer.") else names[2:]
        kind = kind.removeprefix("base_layer.")
        if kind.startswith("lora_A"):
            each = [[own] * len(parts) for own in tensor.split(rank)]
        else:
            pairs = tensor.view(len(tensor), rank, -1)
            each = [pairs[:, :, expert].chunk(len(parts)) for expert in range(pairs.shape[2])]
        for expert, matrices in enumerate(each):
            for part, matrix in zip(parts, matrices, strict=True):
                found[f"{start}.experts.{expert}.{part}.{kind}"] = matrix.contiguous().clone()
    target.mkdir()
    save_file(found, target / "adapter_model.safetensors")
    modules = [*config["target_modules"], *names]
    own = {"target_parameters": None, "target_modules": modules}
    (target / "adapter_config.json").write_text(json.dumps({**config, **own}))
    return target


def request(path: Path, number: int) -> LoRARequest:
    """Return a request for the adapter in a directory."""
    return LoRARequest(f"adapter {number}", number, str(path))


def of_peft(model: str | Path, path: Path | None) -> Any:
    """Return the model of PEFT, or without an adapter that of transformers."""
    with _quietly():
        found = _base(model) if path is None else PeftModel.from_pretrained(_base(model), path)
    found.generation_config.eos_token_id = None
    return found.eval()


def logprobs_of(found: Any, prompt: Sequence[int]) -> Tensor:  # [num_tokens, vocab_size]
    """Return the log-probabilities of a model of PEFT or transformers after each token of a prompt."""
    rows: Tensor = found(input_ids=torch.tensor([[*prompt]]), use_cache=False).logits[0].detach()
    return rows.log_softmax(-1)


def logprobs_by(
    engine: LLMEngine, prompt: Sequence[int], own: LoRARequest | None
) -> Tensor:  # [num_tokens, vocab_size]
    """Return the log-probabilities of an engine after each token of a prompt."""
    size = engine.runner.model_config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=size, prompt_logprobs=size)
    prompts = [{"prompt_token_ids": [*prompt]}]
    (output,) = engine.generate(prompts, params, lora_request=own, use_tqdm=False)
    rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    return torch.tensor([[row[token].logprob for token in range(size)] for row in rows])


def by_peft(model: str | Path, path: Path | None, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the greedy tokens of PEFT, or without an adapter those of transformers."""
    found = of_peft(model, path)
    with _quietly():
        result = found.generate(
            input_ids=torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            use_cache=not str(model).startswith(HYBRIDS),
        )
    return result[0, len(prompt) :].tolist()
