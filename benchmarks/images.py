"""What do images in prompts cost on a CPU? A Qwen3-VL with random weights.

    python -m benchmarks.images                        # Qwen3-VL-2B's shape, 5 GB of memory
    python -m benchmarks.images --text-layers 4        # its tower, and a part of its text model
    python -m benchmarks.images --sections tower --dtype float32

- tower: the vision tower over 1,024 patches, in turns with that of transformers with torch's SDPA attention.
  `speed` is the median of paired times: those of transformers over ours. The embeddings are compared.
- again: the time until the first token of a prompt with a new image, and of the next turn about it.
- beside: steps of eight decodes while a large image is computed, and while a text of equal cost is.
- text: decodes of text alone, by an engine with the tower and by one without it, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.common import parse_args, print_json, print_table
from paged import LLMEngine, SamplingParams
from paged.model.towers.patches import Grid

SECTIONS = ("tower", "again", "beside", "text")
IMAGE, START, END, VIDEO = 50, 51, 52, 53  # tokens
NUM_DECODES = 8
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,  # less than the model's: the benchmark is not about its head
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
}
TINY_VISION = {"depth": 3, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
TINY_TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


def main() -> None:
    """Run the sections, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of " + ", ".join(SECTIONS))
    parser.add_argument("--text-layers", type=int, default=28)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--side", type=int, default=512, help="pixels of an image; that of `beside` has twice as many"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a model that is made in a second")
    args = parse_args(parser, text_layers=4, side=64, rounds=1, tiny=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        theirs = write_model(Path(folder), args.text_layers, tiny=args.tiny)
        for name in args.sections.split(","):
            print(f"# {name}", file=sys.stderr, flush=True)
            rows += {"tower": tower, "again": again, "beside": beside, "text": text}[name](
                folder, theirs, args
            )
    print_table(rows)
    print_json({"benchmark": "images", "rows": rows, **vars(args)})


def write_model(folder: Path, text_layers: int, *, tiny: bool) -> Any:
    """Write a checkpoint with random weights. Return transformers' model of it."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {**TEXT, **(TINY_TEXT if tiny else {}), "num_hidden_layers": text_layers}
    vision = {**VISION, **(TINY_VISION if tiny else {}), "out_hidden_size": text["hidden_size"]}
    if tiny:
        vision["deepstack_visual_indexes"] = [0, 1]
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")
    tokens = dict(zip(names, (IMAGE, START, END, VIDEO), strict=True))
    torch.manual_seed(0)
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
    config._attn_implementation = "sdpa"
    model = Qwen3VLForConditionalGeneration(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    processor = {"patch_size": 16, "size": {"shortest_edge": 1024, "longest_edge": 16384**2}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def new_engine(folder: str, args: argparse.Namespace, **options: Any) -> LLMEngine:
    """Make an engine with room for eight decodes and a large image."""
    return LLMEngine(
        folder, dtype=args.dtype, skip_tokenizer_init=True, max_model_len=8192, num_blocks=2048, **options
    )


def picture(seed: int, side: int) -> Image.Image:
    """Draw a random picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def asked(image: Image.Image, *more: int) -> dict[str, Any]:
    """Return a prompt about an image."""
    token_ids = [5, 6, START, IMAGE, END, 7, 8, *more]
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": [image]}}


def greedy(max_tokens: int) -> SamplingParams:
    """Return parameters for so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def seconds(run: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def tower(folder: str, theirs: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the towers over the same patches."""
    engine = new_engine(folder, args)
    own = engine.runner.model.tower
    dtype = engine.runner.dtype
    grid = Grid(args.side // 16, args.side // 16)
    patches = torch.randn(grid.num_patches, own.spec.patch_numbers).to(dtype)
    frames = patches.view(grid.num_patches, 3, 1, -1).expand(-1, -1, 2, -1).reshape(grid.num_patches, -1)
    visual = theirs.model.visual.to(dtype)
    sizes = torch.tensor([[1, *grid]])

    def run_theirs() -> Any:
        with torch.inference_mode():
            return visual(frames, grid_thw=sizes)

    expected = run_theirs().pooler_output.float()
    found = own(patches, [grid])[:, : expected.shape[1]].float()
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < 0.05, f"the embeddings differ by {error}"
    pairs = [(seconds(run_theirs), seconds(lambda: own(patches, [grid]))) for _ in range(args.rounds + 1)][
        -args.rounds :
    ]
    return [
        {
            "what": f"tower, {grid.num_patches} patches, {str(dtype).removeprefix('torch.')}",
            "ms": round(1e3 * statistics.median(ours for _, ours in pairs), 1),
            "beside": round(1e3 * statistics.median(other for other, _ in pairs), 1),
            "ratio": round(statistics.median(other / ours for other, ours in pairs), 3),
        }
    ]


def again(folder: str, theirs: Any, args: argparse.Namespace) -> list[dict[str, Any]]:  # noqa: ARG001
    """Time the first turn about an image, and the next one."""
    engine = new_engine(folder, args)
    engine.generate([asked(picture(0, args.side))], greedy(1), use_tqdm=False)
    pairs = []
    for seed in range(1, args.rounds + 1):
        image = picture(seed, args.side)
        times = []
        for more in ([], [9, 10, 11]):
            prompt = asked(image, *more)
            times.append(seconds(lambda: engine.generate([prompt], greedy(1), use_tqdm=False)))  # noqa: B023
        pairs.append(times)
    assert engine.runner.images.num_computed == args.rounds + 1, "an image was computed twice"
    return [
        {
            "what": f"the next turn about an image of {args.side} x {args.side}",
            "ms": round(1e3 * statistics.median(second for _, second in pairs), 1),
            "beside": round(1e3 * statistics.median(first for first, _ in pairs), 1),
            "ratio": round(statistics.median(second / first for first, second in pairs), 3),
        }
    ]


def beside(folder: str, theirs: Any, args: argparse.Namespace) -> list[dict[str, Any]]:  # noqa: ARG001
    """Compare steps of decodes beside an image with those beside a text of equal cost."""
    engine = new_engine(folder, args, enable_prefix_caching=False)
    image = picture(0, 2 * args.side)
    queue = engine.scheduler.towers
    num_patches = (2 * args.side // 16) ** 2
    layer = num_patches * (queue.costs.linear + num_patches * queue.costs.attention)
    num_tokens = num_patches // 4 + round(layer * queue.costs.num_layers)
    prompts = asked(image), {"prompt_token_ids": [1 + i % 49 for i in range(min(num_tokens, 8000))]}
    pairs = [[steps_beside(engine, prompt, args) for prompt in prompts] for _ in range(args.rounds + 1)]
    pairs = pairs[-args.rounds :]
    return [
        {
            "what": f"{name} step of {NUM_DECODES} decodes beside {num_patches} patches, {num_tokens} tokens",
            "ms": round(1e3 * statistics.median(of(ours) for ours, _ in pairs), 1),
            "beside": round(1e3 * statistics.median(of(other) for _, other in pairs), 1),
            "ratio": round(statistics.median(of(ours) / of(other) for ours, other in pairs), 3),
        }
        for name, of in (("median", statistics.median), ("longest", max))
    ]


def steps_beside(engine: LLMEngine, prompt: dict[str, Any], args: argparse.Namespace) -> list[float]:  # noqa: ARG001
    """Return the seconds of steps of decodes until a prompt beside them has its first token."""
    for i in range(NUM_DECODES):
        engine.add_request(str(i), {"prompt_token_ids": [i + 1] * 8}, greedy(500))
    for _ in range(3):
        engine.step()
    engine.add_request("prompt", prompt, greedy(1))
    times = []
    is_done = False
    while not is_done:
        started = time.perf_counter()
        outputs = engine.step()
        times.append(time.perf_counter() - started)
        is_done = any(output.request_id == "prompt" and output.finished for output in outputs)
    engine.abort_request([str(i) for i in range(NUM_DECODES)])
    engine.step()
    return times


def text(folder: str, theirs: Any, args: argparse.Namespace) -> list[dict[str, Any]]:  # noqa: ARG001
    """Compare decodes of text with the tower and without it."""
    engines = [new_engine(folder, args, language_model_only=each) for each in (False, True)]
    prompts = [[1 + i, 2, 3] for i in range(NUM_DECODES)]

    def run(engine: LLMEngine) -> float:
        return seconds(lambda: engine.generate(prompts, greedy(32), use_tqdm=False))

    pairs = [[run(each) for each in engines] for _ in range(args.rounds + 1)][-args.rounds :]
    return [
        {
            "what": f"{NUM_DECODES} texts by a model with a tower",
            "ms": round(1e3 * statistics.median(ours for ours, _ in pairs), 1),
            "beside": round(1e3 * statistics.median(other for _, other in pairs), 1),
            "ratio": round(statistics.median(ours / other for ours, other in pairs), 3),
        }
    ]


if __name__ == "__main__":
    main()
