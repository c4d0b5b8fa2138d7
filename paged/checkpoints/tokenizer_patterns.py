r"""The regular expressions of published tokenizers that take time linear in the text, whatever the text is.

The tokenizers library matches by backtracking: in a run of a's, `(a+)+$` takes exponential time, and `a+b`
quadratic time. So a tokenizer runs in the engine's process only if each of its expressions is one of these,
character by character. With any other one it runs in a worker. No match of these is empty: on an empty match
of a Replace the library panics.
"""

from __future__ import annotations

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TIKTOKEN = (  # as newer versions of tiktoken have CL100K
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _unescaped(pattern: str) -> str:
    """Return a pattern with line breaks themselves in place of their escapes, as some files have it."""
    return pattern.replace(r"\r", "\r").replace(r"\n", "\n")


# Expressions of normalizers whose matches are runs of one kind of character: of a text that is cut, they
# match the same but at the cut.
RUNS = {
    " {2,}": "transformers' conversions of SentencePiece",
    r"\s+": "CLIP",
    r"\n": "Pegasus",
    r"\s{2,}|[\n\r\t]": "DeBERTa 2 and 3, BARThez",
}
# The families that have each expression.
PUBLISHED = {
    _GPT2: "GPT-2",
    CL100K: "Llama 3, SmolLM3, OLMo 2 and 3, Phi-4, GLM-4, DBRX",
    QWEN2: "Qwen 2, 2.5 and 3, StableLM 2, Hunyuan, Grok 2",
    QWEN3_5: "Qwen 3.5 and 3.6",
    O200K: "GPT-4o, gpt-oss, Phi-4-mini, MiniMax-M2",
    TEKKEN: "Mistral Nemo, Ministral, Mistral Small 3",
    _TIKTOKEN: "GPT-4",
    _TIKTOKEN.replace("{1,3}", "{1,2}"): "nanochat",
    _TIKTOKEN.replace("{1,3}", ""): "Ling (BailingMoE)",
    _DEEPSEEK3: "Trinity (AFMoE)",
    _unescaped(_DEEPSEEK3): "DeepSeek V3 and R1, Hunyuan dense",
    r"\p{N}{1,3}": "DeepSeek V3 and R1, Hunyuan dense",
    "[一-龥\u3040-ゟ゠-ヿ]+": "DeepSeek V3 and R1, Hunyuan dense",
    "[\r\n]": "DeepSeek Coder",
    r"\s?\p{L}+": "DeepSeek Coder",
    r"\s?\p{P}+": "DeepSeek Coder",
    "[一-龥ࠀ-一가-\ud7ff]+": "DeepSeek Coder",
    r"\p{N}": "DeepSeek Coder, Viking",
    _SEED: "Seed-Coder",
    _unescaped(_SEED): "Seed-Coder",
    r" ?[^(\s|[.,!?…。，、।۔،])]+": "BLOOM, Poro, Viking",
    r" ?[^(\s|.,!?…。，、।۔،)]+": "BLOOM, as llama.cpp has it",
    "[0-9][0-9][0-9]": "Falcon",
    r"\w+ ?|[^\w\s]+ ?|\s+": "the demo",
    **RUNS,
}
