"""Images of a checkpoint, each compared with what transformers makes of it, in float32 on the CPU.

    python -m tests.real_images CHECKPOINT                     # ten drawn pictures
    python -m tests.real_images CHECKPOINT photo.jpg page.png  # these files
    python -m tests.real_images CHECKPOINT --tokens 64 --tolerance 0.01

CHECKPOINT is a directory with a tokenizer, a chat template and preprocessor_config.json. For each picture, a
line tells whether the patches are the same bits, how far the embeddings are apart that enter the text model,
and whether a greedy answer has the same tokens. Sums have another order in transformers, so that a token may
differ where its two best logits are close. Placeholders are left out of answers: transformers takes them for
images there.

Exit code 1 if patches differ, or tokens whose two best logits are further apart than the tolerance. Both
models are loaded one after the other; each takes 4 bytes for each weight.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from paged import LLMEngine, SamplingParams
from paged.images.decoding import in_rgb
from paged.images.processing import patches_of, sha256_of
from paged.images.reading import read_seeing
from paged.options.config import EngineConfig
from paged.text.images import NamedImage
from tests.support.images import FAMILIES, SeeingReference, picture, row_by_row

# Which of FAMILIES an architecture is like.
LIKE = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
}
# Width, height and mode: the usual ones, small and large, wide and tall, in colours and in grey.
DRAWN = (
    *((640, 480, "RGB"), (480, 640, "RGB"), (224, 224, "RGB"), (30, 57, "RGB"), (61, 7, "RGB")),
    *((9, 40, "RGB"), (1280, 720, "RGB"), (33, 33, "L"), (300, 1100, "L"), (897, 513, "RGB")),
)
QUESTION = "What is this?"
MAX_MODEL_LEN = 8192


class Seen(NamedTuple):
    """What a model makes of a picture: patches, embeddings, a prompt with it, and tokens of an answer."""

    patches: NDArray[np.float32]
    embeddings: Tensor
    prompt_token_ids: list[int]
    token_ids: list[int]


class Comparison(NamedTuple):
    """The differences between both models for one picture.

    parting: where the answers part; None if they do not.
    margin: how far transformers' two best logits are apart there.
    """

    num_embeddings: int
    has_equal_patches: bool
    difference: float
    parting: int | None
    margin: float

    def is_failure(self, tolerance: float) -> bool:
        """Return whether patches differ, or tokens that are not nearly as likely as each other."""
        return not self.has_equal_patches or (self.parting is not None and self.margin > tolerance)

    def __str__(self) -> str:
        tokens = "tokens equal"
        if self.parting is not None:
            tokens = f"tokens part after {self.parting}, where two logits are {self.margin:.2g} apart"
        patches = "equal" if self.has_equal_patches else "DIFFERENT"
        return (
            f"{self.num_embeddings:5,} embeddings  patches {patches}, "
            f"embeddings within {self.difference:.2g}, {tokens}"
        )


def seen_by_paged(directory: Path, pictures: Sequence[Image.Image], max_tokens: int) -> list[Seen]:
    """Ask about each picture, and return what the engine has made of it."""
    model = read_seeing(EngineConfig(str(directory)), directory)
    limits = {"max_model_len": min(MAX_MODEL_LEN, model.max_context), "max_num_seqs": 1}
    engine = LLMEngine(str(directory), dtype="float32", device="cpu", **limits)
    bias = {token: -100.0 for token, _ in model.placeholders}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logit_bias=bias)
    return [_seen(engine, each, params) for each in pictures]


def _seen(engine: LLMEngine, image: Image.Image, params: SamplingParams) -> Seen:
    prompts = engine.text.images
    if prompts is None:
        engine.generate([{"prompt": "", "multi_modal_data": {"image": image}}])  # raises why it sees none
    content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": QUESTION}]
    (output,) = engine.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    pixels = prompts._read(NamedImage("image", image))
    images: Any = engine.runner.images
    embeddings = {**images._held, **images._kept}[sha256_of(prompts.vision, pixels)]
    hidden = engine.model_config.hidden_size
    patches = row_by_row(prompts.vision, patches_of(prompts.vision, *pixels.size, pixels.data), *pixels.size)
    return Seen(patches, embeddings[:, :hidden].clone(), output.prompt_token_ids, output.outputs[0].token_ids)


def reference_of(directory: Path) -> SeeingReference:
    """Load a checkpoint by transformers."""
    model = read_seeing(EngineConfig(str(directory)), directory)
    vision = model.vision
    assert vision is not None, "the engine has taken images"
    family = FAMILIES[LIKE[model.architecture]]
    # What the processor of texts tells that of images: the patches of one embedding at once.
    sides = {"patch_size": vision.square, "pooling_kernel_size": 1}
    told = {name: sides[name] for name in family.overridden}
    if isinstance(family.overridden.get("patch_size"), dict):
        told["patch_size"] = dict.fromkeys(("height", "width"), vision.square)
    processor = family.processor_class.from_pretrained(directory, **told)
    reference = SeeingReference(family, directory, processor, vision.token_id)
    reference.model.generation_config.suppress_tokens = [token for token, _ in model.placeholders]
    return reference


def compare(reference: SeeingReference, image: Image.Image, own: Seen) -> Comparison:
    """Compare what the engine has made of a picture with what transformers makes of it."""
    found: list[Tensor] = []

    def on_input(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])

    first = reference.model.model.language_model.layers[0]
    hook = first.register_forward_pre_hook(on_input, with_kwargs=True)
    with torch.inference_mode():
        tokens, logits = reference.greedy(own.prompt_token_ids, [image], len(own.token_ids))
    hook.remove()
    is_image = torch.tensor(own.prompt_token_ids) == reference.marker
    embeddings = found[0][0][is_image]
    parting = next(
        (i for i, both in enumerate(zip(tokens, own.token_ids, strict=True)) if len({*both}) > 1), None
    )
    margin = 0.0
    if parting is not None:
        suppressed = reference.model.generation_config.suppress_tokens
        best = logits[parting].index_fill(0, torch.tensor(suppressed), -torch.inf).topk(2).values
        margin = float(best[0] - best[1])
    theirs = reference.patches(image)
    return Comparison(
        len(embeddings),
        theirs.shape == own.patches.shape and np.array_equal(theirs, own.patches),
        float((embeddings - own.embeddings).abs().max()),
        parting,
        margin,
    )


def compared(directory: Path, pictures: Sequence[Image.Image], max_tokens: int) -> Iterator[Comparison]:
    """Compare pictures one by one, once the engine has seen all of them and is gone."""
    seen = seen_by_paged(directory, pictures, max_tokens)
    gc.collect()
    reference = reference_of(directory)
    for image, own in zip(pictures, seen, strict=True):
        yield compare(reference, image, own)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print a line for each picture, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("images", nargs="*", type=Path)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer; default: 16")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of logits; default: 0.001")
    given = parser.parse_args(arguments)
    names = [file.name for file in given.images]
    pictures = [in_rgb(Image.open(file)) for file in given.images]
    if not pictures:
        names = [f"{width} x {height} {mode}" for width, height, mode in DRAWN]
        pictures = [picture(i, *each).convert("RGB") for i, each in enumerate(DRAWN)]
    num_failures = 0
    for name, each in zip(names, compared(given.checkpoint, pictures, given.tokens), strict=True):
        print(f"{name:>16}  {each}", flush=True)
        num_failures += each.is_failure(given.tolerance)
    print(f"{num_failures} of {len(pictures)} pictures differ")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
