"""Small random models that see images, pictures for them, and what transformers makes of both."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
    Mistral3Config,
    PixtralVisionConfig,
    PreTrainedConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SiglipVisionConfig,
)
from transformers.masking_utils import create_masks_for_generate
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4_unified import modeling_gemma4_unified
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from paged.architectures.towers import VisionSpec
from tests.support.checkpoints import CONFIGS, IMAGE, VOCAB_SIZE, gemma4_config, random_model


@dataclass(frozen=True)
class Family:
    """A family of models that see images.

    processor: the values of its preprocessor_config.json, and the class of transformers that reads them.
    placeholder: the token that stands for an image in a prompt.
    marker: the token that stands for an embedding.
    inputs: the arguments of transformers' forward for processed images, and where a prompt has embeddings.
    special: the texts of the tokens of images, by their ids.
    written: how the chat template writes an image.
    replacement: what the processor writes for one of the processed images.
    overridden: what the processor of texts tells that of images.
    """

    config: Callable[[], PreTrainedConfig]
    processor: dict[str, Any]
    processor_class: type
    placeholder: int
    marker: int
    inputs: Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]]
    special: dict[int, str]
    written: str
    replacement: Callable[[dict[str, Tensor], int], str]
    overridden: dict[str, Any] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        """The tokens of `written`, of a prompt that is given as tokens."""
        texts = {text: token for token, text in self.special.items()}
        found = re.findall("|".join(map(re.escape, texts)), self.written)
        return [texts[text] for text in found] or [self.placeholder]

    @property
    def placeholder_text(self) -> str:
        """The text of the placeholder."""
        return self.special[self.placeholder]


def _gemma3() -> PreTrainedConfig:
    vision = SiglipVisionConfig(
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=24,
        patch_size=4,
    )
    return Gemma3Config(
        text_config=CONFIGS["gemma3"](),
        vision_config=vision,
        mm_tokens_per_image=9,
        image_token_index=IMAGE,
        boi_token_index=IMAGE - 1,
        eoi_token_index=IMAGE - 2,
    )


def _of_gemma3(processed: dict[str, Tensor], is_image: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": processed["pixel_values"], "token_type_ids": is_image.long()}


def _written_gemma3(processed: dict[str, Tensor], i: int) -> str:
    tokenizer = SimpleNamespace(
        boi_token="<start_of_image>",
        boi_token_id=IMAGE - 1,
        eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
        image_token_id=IMAGE,
    )
    processor = Gemma3Processor.__new__(Gemma3Processor)
    with contextlib.suppress(Exception):  # of what checks the classes of its parts
        processor.__init__(None, tokenizer, image_seq_length=9)
    return processor.replace_image_token(processed, i)


def _gemma4(text: str, **vision: Any) -> PreTrainedConfig:
    return gemma4_config(
        text,
        Gemma4Config,
        vision_config=Gemma4VisionConfig(
            hidden_size=40,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            patch_size=4,
            pooling_kernel_size=3,
            position_embedding_size=210,
            **vision,
        ),
    )


def _masks_of_12b(block_sequence_ids: Tensor | None = None, **others: Any) -> Any:
    """Make the masks as in the other models of Gemma 4, and as in Google's code and in vLLM.

    Where it generates, transformers lets tokens of an image see later ones in layers without a window, too,
    although the module has a function that does not.
    """
    if block_sequence_ids is None:
        return create_masks_for_generate(**others)
    make = modeling_gemma4_unified.create_masks_for_vision_model
    return make(block_sequence_ids=block_sequence_ids, **others)


modeling_gemma4_unified.create_masks_for_generate = _masks_of_12b


def _gemma4_unified() -> PreTrainedConfig:
    vision = Gemma4UnifiedVisionConfig(
        patch_size=4, pooling_kernel_size=3, mm_embed_dim=40, mm_posemb_size=80, output_proj_dims=40
    )
    config = gemma4_config("gemma4-unified", Gemma4UnifiedConfig, vision_config=vision)
    config.text_config.use_bidirectional_attention = "vision"
    return config


def _of_gemma4(processed: dict[str, Tensor], is_image: Tensor) -> dict[str, Tensor]:
    known = {name: processed[name] for name in ("pixel_values", "image_position_ids")}
    return {**known, "mm_token_type_ids": is_image.int()}


def _written_gemma4(processed: dict[str, Tensor], i: int) -> str:
    tokens = SimpleNamespace(boi_token="<|image>", eoi_token="<image|>", image_token="<|image|>")
    return Gemma4Processor.replace_image_token(tokens, processed, i)


def _gemma4_family(config: Callable[[], PreTrainedConfig], **overridden: Any) -> Family:
    return Family(
        config,
        {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70},
        Gemma4ImageProcessorPil,
        IMAGE,
        IMAGE,
        _of_gemma4,
        {IMAGE: "<|image|>", IMAGE - 1: "<|image>", IMAGE - 2: "<image|>"},
        "<|image|>",
        _written_gemma4,
        overridden,
    )


def _mistral3(text: str) -> PreTrainedConfig:
    vision = PixtralVisionConfig(
        hidden_size=64,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=48,
        patch_size=4,
        hidden_act="silu" if text == "mistral" else "gelu",
    )
    return Mistral3Config(
        text_config=CONFIGS[text](),
        vision_config=vision,
        spatial_merge_size=2,
        image_token_index=IMAGE - 3,
        tie_word_embeddings=False,
    )


def _of_mistral3(processed: dict[str, Tensor], token_ids: Tensor) -> dict[str, Tensor]:  # noqa: ARG001
    return {name: processed[name] for name in ("pixel_values", "image_sizes")}


def _written_mistral3(processed: dict[str, Tensor], i: int) -> str:
    """Write what transformers' PixtralProcessor does, whose module needs torchvision."""
    height, width = processed["image_sizes"][i]
    rows = [["[IMG]"] * (width // 8) + ["[IMG_BREAK]"]] * (height // 8)
    tokens = [token for row in rows for token in row]
    tokens[-1] = "[IMG_END]"
    return "".join(tokens)


def _pixtral(text: str) -> Family:
    return Family(
        lambda: _mistral3(text),
        {"size": {"longest_edge": 48}, "patch_size": 4},
        PixtralImageProcessorPil,
        IMAGE - 3,
        IMAGE - 3,
        _of_mistral3,
        {IMAGE - 3: "[IMG]", IMAGE - 1: "[IMG_BREAK]", IMAGE: "[IMG_END]"},
        "[IMG]",
        _written_mistral3,
        {"patch_size": {"height": 8, "width": 8}},
    )


def _qwen3_vl(text_name: str, whole: type[PreTrainedConfig]) -> PreTrainedConfig:
    text = CONFIGS[text_name]().to_dict()
    dropped = ("model_type", "rope_parameters", "layer_types")
    text = {key: value for key, value in text.items() if key not in dropped} | {"num_hidden_layers": 4}
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 1],
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return whole(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        **{name: IMAGE - i for i, name in enumerate(tokens)},
    )


def _of_qwen3_vl(processed: dict[str, Tensor], is_image: Tensor) -> dict[str, Tensor]:
    known = {name: processed[name] for name in ("pixel_values", "image_grid_thw")}
    return {**known, "mm_token_type_ids": is_image.int()}


def _written_qwen3_vl(processed: dict[str, Tensor], i: int) -> str:
    """Write what transformers' Qwen3VLProcessor does, whose module needs torchvision."""
    return "<|image_pad|>" * (int(processed["image_grid_thw"][i].prod()) // 4)


def _qwen3_vl_family(text: str, whole: type[PreTrainedConfig]) -> Family:
    return Family(
        lambda: _qwen3_vl(text, whole),
        {"size": {"shortest_edge": 300, "longest_edge": 2000}, "patch_size": 4},
        Qwen2VLImageProcessorPil,
        IMAGE,
        IMAGE,
        _of_qwen3_vl,
        {IMAGE: "<|image_pad|>", IMAGE - 2: "<|vision_start|>", IMAGE - 3: "<|vision_end|>"},
        "<|vision_start|><|image_pad|><|vision_end|>",
        _written_qwen3_vl,
    )


FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        _gemma3,
        {"size": {"height": 24, "width": 24}, "image_seq_length": 9, "do_pan_and_scan": None},
        Gemma3ImageProcessorPil,
        IMAGE - 1,
        IMAGE,
        _of_gemma3,
        {IMAGE: "<image_soft_token>", IMAGE - 1: "<start_of_image>", IMAGE - 2: "<end_of_image>"},
        "<start_of_image>",
        _written_gemma3,
    ),
    # As E2B; as 31B, whose images' tokens see each other; and 12B, whose processor merges the patches.
    "gemma4": _gemma4_family(lambda: _gemma4("gemma4", use_clipped_linears=True)),
    "gemma4_large": _gemma4_family(lambda: _gemma4("gemma4-keys-as-values", standardize=True)),
    "gemma4_unified": _gemma4_family(_gemma4_unified, patch_size=12, pooling_kernel_size=1),
    "mistral3": _pixtral("mistral"),
    "ministral3": _pixtral("ministral3"),
    "qwen3_vl": _qwen3_vl_family("qwen3", Qwen3VLConfig),
    "qwen3_vl_moe": _qwen3_vl_family("qwen3_moe", Qwen3VLMoeConfig),
}


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="paged-seeing-")


@functools.cache
def seeing(name: str) -> Path:
    """Return the directory of a model that sees images, written once per session."""
    family = FAMILIES[name]
    directory = Path(_root().name) / name
    model = random_model(family.config())
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if part.endswith("mm_input_projection_weight"):  # stored as [in, out]
                parameter.mul_(math.sqrt(parameter.shape[1] / parameter.shape[0]))
            elif "patch" in part and parameter.dim() == 4:
                parameter.div_(math.sqrt(parameter[0, 0].numel()))
            elif part.endswith("position_embedding_table"):
                parameter.mul_(math.sqrt(parameter.shape[1]))
        generator = torch.Generator().manual_seed(0)
        for part, buffer in model.named_buffers():
            if part.endswith(("put_min", "put_max")):
                bound = torch.rand((), generator=generator) + 0.7
                buffer.copy_(bound if part.endswith("max") else -bound)
            elif part.endswith(("std_bias", "std_scale")):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(family.processor))
    _write_tokenizer(directory, family)
    return directory


# As those of the families: images are parts of a content, which may also be text.
TEMPLATE = """\
{%- for message in messages -%}
[{{ message['role'] }}]
{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{ 'IMAGE' }}
{%- elif part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}
"""
STRINGS_ALONE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"


def _write_tokenizer(directory: Path, family: Family) -> None:
    """Write a tokenizer of single characters, with the family's special tokens, and a chat template."""
    texts = [*map(chr, range(32, 127)), "\n", "\n\n"]
    vocab = {text: i for i, text in enumerate(texts)}
    vocab |= {f"<unused{i}>": i for i in range(len(texts), VOCAB_SIZE) if i not in family.special}
    vocab |= {text: i for i, text in family.special.items()}
    backend = Tokenizer(BPE(vocab, [("\n", "\n")]))
    backend.decoder = Fuse()
    backend.add_special_tokens([AddedToken(text, special=True) for text in family.special.values()])
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", family.written))


def png(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture as a file."""
    memory = io.BytesIO()
    image.save(memory, kind, **options)
    return memory.getvalue()


def data_url(image: Image.Image) -> str:
    """Return a picture as a data: URL."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def picture(seed: int, width: int = 30, height: int = 20, mode: str = "RGB") -> Image.Image:
    """Return a random picture, of coarse squares and noise."""
    rng = np.random.default_rng(seed)
    channels = len(Image.new(mode, (1, 1)).getbands())
    coarse = rng.integers(0, 256, (5, 5, channels), dtype=np.uint8)
    rows, columns = (np.arange(n) * 5 // n for n in (height, width))
    noise = rng.integers(0, 30, (height, width, channels), dtype=np.uint8)
    pixels = np.minimum(coarse[rows][:, columns], 220) + noise
    return Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels, mode)


def row_by_row(vision: VisionSpec, patches: Any, height: int, width: int) -> Any:
    """Return the patches of a resized image, which `patches_of` gives square by square, row by row."""
    side = vision.projector.side
    rows, columns = (n // vision.tower.patch_size for n in (height, width))
    squares = patches.reshape(rows // side, columns // side, side, side, -1)
    return squares.transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)


class SeeingReference:
    """transformers itself, eager and in float32, one prompt at a time.

    processor: makes patches of images.
    marker: the token that stands for an embedding.
    """

    def __init__(self, family: Family, directory: Path, processor: Any, marker: int) -> None:
        self.family = family
        self.processor = processor
        self.marker = marker
        model_class = transformers.AutoModelForImageTextToText
        self.model = model_class.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.model.generation_config.eos_token_id = None

    def processed(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Return what the processor makes of images."""
        return dict(self.processor([*images], return_tensors="pt"))

    def patches(self, image: Image.Image) -> Any:
        """Return the patches of an image as a convolution takes them: f32[num_patches, numbers]."""
        pixels = self.processed([image])["pixel_values"]
        if "image_position_ids" in self.processed([image]):  # row by row, of pixels, and then padding
            is_real = self.processed([image])["image_position_ids"][0, :, 0] >= 0
            patches = pixels[0, is_real].unflatten(1, (-1, 3)).transpose(1, 2).flatten(1)
            has_encoder = hasattr(self.model.config.vision_config, "num_hidden_layers")
            return (2 * (patches - 0.5) if has_encoder else patches).numpy()
        if "image_grid_thw" in self.processed([image]):  # patches already, square by square, of two frames
            _, rows, columns = self.processed([image])["image_grid_thw"][0].tolist()
            frames = pixels.view(rows * columns, 3, 2, -1)
            assert torch.equal(frames[:, :, 0], frames[:, :, 1])
            squares = frames[:, :, 0].reshape(rows // 2, columns // 2, 2, 2, -1)
            return squares.transpose(1, 2).reshape(rows * columns, -1).numpy()
        pixels = pixels[0].numpy()
        size = self.model.config.vision_config.patch_size
        channels, height, width = pixels.shape
        grid = pixels.reshape(channels, height // size, size, width // size, size)
        return grid.transpose(1, 3, 0, 2, 4).reshape(height // size * (width // size), -1)

    def written(self, text: str, images: Sequence[Image.Image]) -> str:
        """Return a text with what transformers' processor puts in the place of each image."""
        processed = self.processed(images)
        for i in range(len(images)):
            text = text.replace(self.family.placeholder_text, f"\0{i}\0", 1)
        for i in range(len(images)):
            text = text.replace(f"\0{i}\0", self.family.replacement(processed, i))
        return text

    def greedy(
        self, token_ids: Sequence[int], images: Sequence[Image.Image], max_tokens: int
    ) -> tuple[list[int], Tensor]:
        """Return the generated tokens and the logits of each."""
        given = torch.tensor([[*token_ids]])
        inputs = self.family.inputs(self.processed(images), given == self.marker) if images else {}
        result = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            output_logits=True,
            return_dict_in_generate=True,
            **inputs,
        )
        return result.sequences[0, len(token_ids) :].tolist(), torch.cat(result.logits)


@functools.cache
def seeing_reference(name: str) -> SeeingReference:
    """Return transformers on one of FAMILIES."""
    family = FAMILIES[name]
    processor = family.processor_class(**{**family.processor, **family.overridden})
    return SeeingReference(family, seeing(name), processor, family.marker)
