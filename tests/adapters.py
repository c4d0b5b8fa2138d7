"""LoRA adapters against PEFT, for each native family: log-probabilities to 1e-4, and greedy tokens.

    python -m tests.adapters                     # one drawn adapter of each family
    python -m tests.adapters --seeds 20 llama    # twenty of one

An adapter has attention, MLP, all linear layers or experts, in a list, by an expression or as "all-linear",
with ranks and scales by pattern and rslora, by chance. PEFT computes it beside the weights, and merged.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paged import SamplingParams
from paged.architectures.hf_config import read_config
from paged.checkpoints.adapter_files import read_adapter
from tests.support.checkpoints import checkpoint, new_engine, ragged_prompts
from tests.support.lora_adapters import (
    EXPERTS,
    OTHER_EXPERTS,
    TARGETS,
    adapter_of,
    adapter_of_experts,
    by_peft,
    drawn_config,
    logprobs_by,
    logprobs_of,
    of_peft,
    request,
)

FAMILIES = (*TARGETS, "llama", "llama-tied-bias", "mistral", "ministral3", "qwen2", "qwen3", "granite")
FAMILIES += ("olmo2", "gemma2", "gemma3", "gemma4-keys-as-values", "smollm3")
WITHOUT_ALL = ("nemotron_h", "granitemoehybrid-dense", "falcon_h1")  # PEFT adapts no out_proj of Mamba-2
LARGEST_ERROR = 1e-4


def main() -> None:
    """Compare the adapters, print a line for each, and exit with 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", help="only these")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    models = args.models or dict.fromkeys((*FAMILIES, *EXPERTS, *OTHER_EXPERTS))
    is_right = True
    with tempfile.TemporaryDirectory() as folder:
        for model, seed in itertools.product(models, range(args.seeds)):
            for name, path, options in _adapters(Path(folder) / f"{model}-{seed}", model, seed):
                try:
                    said = _compare(model, path, options, seed)
                except Exception as error:
                    said = f"{type(error).__name__}: {error}"
                is_right = is_right and said.startswith("right")
                print(f"{model} {seed} {name}: {said}", flush=True)
    sys.exit(not is_right)


def _adapters(folder: Path, model: str, seed: int) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Write the adapters of a model. Yield the name, the folder and the options of the engine of each."""
    folder.mkdir()
    if model in FAMILIES:
        config = drawn_config(model, seed)
        if seed % 4 == 1 and model not in WITHOUT_ALL:
            config["target_modules"] = "all-linear"
        path = adapter_of(model, folder / "linear", config, seed, 0.1)
        yield str(config["target_modules"]), path, {"lora_target_modules": _targets(path, model)}
    if model in (*EXPERTS, *OTHER_EXPERTS):
        path = adapter_of_experts(folder, model, seed)
        yield "experts", path, {"lora_target_modules": _targets(path, model)}


def _targets(path: Path, model: str) -> list[str]:
    """Return the lora_target_modules that an adapter needs."""
    parts = read_adapter(str(path), read_config(checkpoint(model))).parts
    return sorted({"experts" if ".experts." in name else name.rpartition(".")[2] for name in parts})


def _compare(model: str, path: Path, options: dict[str, Any], seed: int) -> str:
    """Return "right" and the largest error, or what is wrong."""
    engine = new_engine(checkpoint(model), enable_lora=True, max_lora_rank=8, **options)
    prompt = ragged_prompts([random.Random(seed).randint(2, 30)], seed=seed)[0]
    own = request(path, 1)
    expected = logprobs_of(of_peft(model, path), prompt)
    merged = logprobs_of(of_peft(model, path).merge_and_unload(), prompt)
    found = logprobs_by(engine, prompt, own)
    error = float((found - expected).abs().max())
    of_merged = float((merged - expected).abs().max())  # how far apart two right answers may be
    if error > max(LARGEST_ERROR, of_merged):
        return f"log-probabilities differ by {error:.1e}; those of PEFT's merged model by {of_merged:.1e}"
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,) = engine.generate([{"prompt_token_ids": prompt}], params, lora_request=own, use_tqdm=False)
    if [*output.outputs[0].token_ids] != by_peft(model, path, prompt, 8):
        return "the greedy tokens are others"
    return f"right to {error:.1e}; PEFT's merged model to {of_merged:.1e}"


if __name__ == "__main__":
    main()
