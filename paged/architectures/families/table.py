"""The native architectures, and which module reads the config.json of each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .reading import Family

# The defaults of transformers' classes, for keys that config.json leaves out.
COMMON = {
    "num_key_value_heads": None,  # as many as query heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "layer_types": None,
}


class Architecture(NamedTuple):
    """One entry of ARCHITECTURES: a family of models that the decoder can compute.

    module: the module with the family's reader; it is imported when a model of the family is read.
    """

    model_type: str
    module: str
    models: str  # which this is, for people


def family_of(architecture: str) -> Family:
    """Return the family that reads an architecture's config.json."""
    module = import_module(f".{ARCHITECTURES[architecture].module}", __package__)
    family: Family = module.families[architecture]
    return family


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", "llama", "Llama 1 to 3, TinyLlama, SmolLM 1 and 2"),
    "MistralForCausalLM": Architecture("mistral", "mistral", "Mistral 7B, NeMo and Small 2409 to 2501"),
    "MinistralForCausalLM": Architecture("ministral", "mistral", "Ministral 8B 2410"),
    "Ministral3ForCausalLM": Architecture("ministral3", "mistral", "Ministral 3 (text alone)"),
    "Qwen2ForCausalLM": Architecture("qwen2", "qwen", "Qwen 2, Qwen 2.5"),
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe", "moe", "Qwen 1.5 MoE, Qwen 2 MoE"),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", "moe", "Qwen 3 MoE (30B-A3B, 235B-A22B)"),
    "Qwen3ForCausalLM": Architecture("qwen3", "qwen", "Qwen 3"),
    "Qwen3NextForCausalLM": Architecture("qwen3_next", "hybrids", "Qwen3-Next, Qwen3-Coder-Next"),
    "Qwen3_5ForCausalLM": Architecture("qwen3_5_text", "hybrids", "Qwen 3.5 (text alone)"),
    "Qwen3_5MoeForCausalLM": Architecture("qwen3_5_moe_text", "hybrids", "Qwen 3.5 MoE (text alone)"),
    "Lfm2ForCausalLM": Architecture("lfm2", "hybrids", "LFM2, LFM2.5"),
    "Lfm2MoeForCausalLM": Architecture("lfm2_moe", "hybrids", "LFM2 8B-A1B, 24B-A2B"),
    "NemotronHForCausalLM": Architecture("nemotron_h", "mamba", "Nemotron-H, Nemotron Nano 2, Nemotron 3"),
    "GraniteMoeHybridForCausalLM": Architecture("granitemoehybrid", "mamba", "Granite 4"),
    "FalconH1ForCausalLM": Architecture("falcon_h1", "mamba", "Falcon-H1"),
    "MixtralForCausalLM": Architecture("mixtral", "moe", "Mixtral 8x7B, 8x22B"),
    "OlmoeForCausalLM": Architecture("olmoe", "moe", "OLMoE"),
    "GptOssForCausalLM": Architecture("gpt_oss", "moe", "gpt-oss 20B, 120B"),
    "Glm4MoeForCausalLM": Architecture("glm4_moe", "moe", "GLM-4.5, GLM-4.6"),
    "MiniMaxM2ForCausalLM": Architecture("minimax_m2", "moe", "MiniMax-M2"),
    "GraniteMoeForCausalLM": Architecture("granitemoe", "moe", "Granite 3 MoE"),
    "Phi3ForCausalLM": Architecture("phi3", "phi3", "Phi-3, Phi-3.5, Phi-4, Phi-4-mini"),
    "GraniteForCausalLM": Architecture("granite", "granite", "Granite 3"),
    "GraniteSWAForCausalLM": Architecture("granite_swa", "granite", "Granite Swash"),
    "Olmo2ForCausalLM": Architecture("olmo2", "olmo", "OLMo 2"),
    "Olmo3ForCausalLM": Architecture("olmo3", "olmo", "OLMo 3"),
    "Gemma2ForCausalLM": Architecture("gemma2", "gemma", "Gemma 2"),
    "Gemma3ForCausalLM": Architecture("gemma3_text", "gemma", "Gemma 3 270M and 1B"),
    "Gemma4ForCausalLM": Architecture("gemma4_text", "gemma4", "Gemma 4 (text alone)"),
    "Gemma4UnifiedForCausalLM": Architecture(
        "gemma4_unified_text", "gemma4", "Gemma 4 without encoders (text alone)"
    ),
    "SmolLM3ForCausalLM": Architecture("smollm3", "smollm3", "SmolLM3"),
    "Glm4ForCausalLM": Architecture("glm4", "glm4", "GLM-4-0414"),
    "GPT2LMHeadModel": Architecture("gpt2", "gpt", "GPT-2, DistilGPT2"),
    "GPTNeoXForCausalLM": Architecture("gpt_neox", "gpt", "Pythia, GPT-NeoX-20B, Dolly 2, RedPajama-INCITE"),
}
