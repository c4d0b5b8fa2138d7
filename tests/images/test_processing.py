"""Images to patches, bit for bit as transformers' processors with Pillow; files and limits."""

from __future__ import annotations

import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paged import CheckpointError, ConfigError, RequestError
from paged.architectures.hf_config import read_config
from paged.architectures.towers import VisionSpec
from paged.base.errors import UnsupportedModelError
from paged.images.decoding import decode
from paged.images.processing import patches_of, resizing_of, sha256_of, values_of
from paged.images.processing import processing_of as processing_of_vision
from paged.images.reading import PROCESSINGS, SHARED, processing_of, request_reader, with_vision
from paged.images.sizes import Pixels, Resizing, Size
from paged.options.config import EngineConfig
from paged.text.images import ImagePrompts, NamedImage
from tests.support.checkpoints import edit_json
from tests.support.images import FAMILIES, picture, png, row_by_row, seeing, seeing_reference

SIZES = [
    (1, 1),
    (1, 50),
    (90, 1),
    (3, 200),
    (47, 48),
    (48, 47),
    (97, 31),
    (300, 260),
    *((n, 61 - n) for n in range(2, 60, 9)),
]


def vision_of(name: str) -> VisionSpec:
    directory = seeing(name)
    model, why = with_vision(EngineConfig(str(directory)), read_config(directory), directory)
    assert model.vision is not None, why
    return model.vision


# By rule: the most that a side may be of the other, and what is said of more.
TOO_NARROW = {
    "longest_edge": (48, "within 48 x 48 nothing is left of its shorter side"),
    "area": (200, "one side may be 200 times the other"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_patches_are_those_of_transformers(name):
    """Of pictures of every shape: odd, one pixel wide, larger than every limit."""
    vision = vision_of(name)
    resizing = resizing_of(vision)
    for seed, (width, height) in enumerate(SIZES):
        image = picture(seed, width, height)
        refusal = TOO_NARROW.get(resizing.rule)
        if refusal is not None and refusal[0] * min(width, height) < max(width, height):
            with pytest.raises(RequestError, match=refusal[1]):
                resizing.apply(image)
            continue
        pixels = resizing.apply(image)
        ours = patches_of(vision, *pixels.size, pixels.data)
        assert np.array_equal(row_by_row(vision, ours, *pixels.size), seeing_reference(name).patches(image))


FULL_SIZE = Resizing("longest_edge", (16384, 16384), 3, 1)  # of which no image is resized


def rgb(image: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(image)


def test_every_kind_of_file_becomes_rgb():
    """Palettes, grey, alpha on white, 16 bits, CMYK, and the first frame of a GIF."""
    colours = picture(1, 20, 12)
    grey = picture(2, 20, 12, "L")
    assert np.array_equal(rgb(decode(png(colours))), rgb(colours))
    assert np.array_equal(rgb(decode(png(grey))), rgb(grey.convert("RGB")))
    palette = colours.quantize(16)
    assert np.array_equal(rgb(decode(png(palette))), rgb(palette.convert("RGB")))
    alpha = colours.copy()
    alpha.putalpha(grey)
    white = Image.new("RGB", alpha.size, "white")
    white.paste(alpha, mask=grey)
    assert np.abs(rgb(decode(png(alpha))).astype(int) - rgb(white)).max() <= 1
    clear = Image.new("RGBA", (3, 3), (9, 9, 9, 0))
    assert (rgb(decode(png(clear))) == 255).all()
    deep = Image.fromarray((np.asarray(grey).astype(np.uint16) << 8) + 77)
    assert np.array_equal(rgb(decode(png(deep)))[:, :, 0], rgb(grey))
    hidden = int(np.asarray(deep)[0, 0])
    shown = np.where(np.asarray(deep) == hidden, 255, rgb(grey))
    assert np.array_equal(rgb(decode(png(deep, transparency=hidden)))[:, :, 0], shown)
    cmyk = colours.convert("CMYK")
    file = png(cmyk, "JPEG")
    assert np.array_equal(rgb(decode(file)), rgb(Image.open(io.BytesIO(file)).convert("RGB")))
    frames = png(colours.quantize(16), "GIF", save_all=True, append_images=[grey.convert("P")])
    assert np.array_equal(rgb(decode(frames)), rgb(Image.open(io.BytesIO(frames)).convert("RGB")))
    lossless = png(colours, "WEBP", lossless=True)
    assert np.array_equal(rgb(decode(lossless)), rgb(colours))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    upright = picture(3, 17, 9)
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(turns[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(rgb(decode(png(stored, exif=exif))), rgb(upright))


def declared(width: int, height: int) -> bytes:
    """Return a PNG that declares a size, and has few pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = b"IDAT" + zlib.compress(bytes(9))
    chunks = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (head, body))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is no image in PNG, JPEG, WEBP or GIF"),
        (b"%PDF-1.4 x", "is no image in PNG, JPEG, WEBP or GIF"),
        (png(picture(1), "BMP"), "is no image in PNG, JPEG, WEBP or GIF"),
        (png(picture(1), "TIFF"), "is no image in PNG, JPEG, WEBP or GIF"),
        (declared(20000, 2), "has 20,000 x 2 pixels, more than 16,384 on a side or 64,000,000 in all"),
        (declared(16000, 16000), "has more pixels than 16,384 on a side or 64,000,000 in all"),
        (declared(8001, 8001), "has 8,001 x 8,001 pixels, more than 16,384 on a side or 64,000,000 in all"),
        (declared(8, 8), "is a damaged PNG"),
        (png(picture(1))[:-30], "is a damaged PNG"),
    ],
    ids=range(9),
)
def test_wrong_files_are_refused(data, message):
    with pytest.raises(RequestError, match=message):
        decode(data)


def test_damaged_files_have_one_error_each():
    """Files with wrong bytes are an image or one error, whatever the bytes are."""
    generator = random.Random(0)
    kinds = [png(picture(4), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]
    num_refused = 0
    for _ in range(400):
        file = bytearray(generator.choice(kinds))
        for _ in range(generator.randint(1, 8)):
            file[generator.randrange(len(file))] = generator.randrange(256)
        try:
            assert decode(bytes(file[: generator.randint(1, len(file))])).mode == "RGB"
        except RequestError:
            num_refused += 1
    assert 100 < num_refused < 400


def test_files_are_decoded_in_a_process_of_their_own(tmp_path):
    """The same pixels as here. A damaged file, or too much memory, is one error; the next image is read."""
    vision = vision_of("gemma3")
    prompts = ImagePrompts(vision, None, 4)
    image = picture(5, 70, 45)
    expected = resizing_of(vision).apply(image)
    path = tmp_path / "an image.png"
    path.write_bytes(png(image))
    marker = prompts.placeholder_id
    urls = [path.as_uri(), f"FILE://localhost{path}", f"file:{path}"]
    given = [png(image), path, str(path), *urls, image, np.asarray(image)]
    for each in given:
        (found,) = prompts.parse([marker], [NamedImage("it", each)]).images
        assert (found.height, found.width, found.pixels) == (*expected.size, expected.data)
    for wrong, message in (
        (png(image)[:-40], "it is a damaged PNG"),
        (tmp_path / "none.png", r"it: '.*none\.png' cannot be read: No such file"),
        (b"GIF89a", "it is no image in PNG"),
        (tmp_path, r"^it: '[^']*' is no regular file$"),
        ("file://elsewhere/x.png", "^it must be a file: URL such as file:///folder/x.png, got"),
        ("file:x.png", "^it must be a file: URL such as"),
        (5, "it must be an image of Pillow or numpy, a path, or the bytes of a file, got 5"),
        (
            np.zeros((4, 4, 2), np.uint8),
            r"it must be an array uint8\[height, width, 3\], got uint8\[4, 4, 2\]",
        ),
        (np.zeros((4, 4, 3)), "it must be an array uint8"),
    ):
        with pytest.raises(RequestError, match=message):
            prompts.parse([marker], [NamedImage("it", wrong)])
    assert prompts.parse([marker], [NamedImage("it", png(image))]).images[0].pixels == expected.data


def test_the_digest_is_of_pixels_size_and_processing():
    vision = vision_of("mistral3")
    pixels = Pixels(Size(8, 16), bytes(range(256)) * 2)
    others = [
        sha256_of(vision, pixels),
        sha256_of(vision, Pixels(Size(16, 8), pixels.data)),
        sha256_of(vision, Pixels(pixels.size, pixels.data[::-1])),
        sha256_of(vision_of("gemma3"), pixels),
        sha256_of(vision, pixels, "a"),
        sha256_of(vision, pixels, "b"),
    ]
    assert len({*others}) == 6
    assert sha256_of(vision, Pixels(Size(8, 16), bytes(pixels.data))) == others[0]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gemma3", {"size": {"height": 32, "width": 32}}, "size 32 x 32 contradicts .* images of 24 x 24"),
    ("gemma3", {"size": {"longest_edge": 32}}, "size must be an object of height and width"),
    ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan true is not supported"),
    ("gemma3", {"do_resize": False}, "do_resize false is not supported"),
    ("gemma3", {"do_center_crop": True}, "do_center_crop True is not supported"),
    ("gemma3", {"image_std": [0.5, 0, 0.5]}, "image_std must be at least 1e-06 .*, got 0"),
    ("gemma3", {"image_mean": [0.5]}, "image_mean must be a number for each of 3 channels"),
    ("gemma3", {"resample": 9}, "resample must be from 0 to 5, got 9"),
    ("gemma3", {"image_seq_length": 8}, "image_seq_length 8 contradicts the 9 tokens"),
    ("mistral3", {"patch_size": 14}, "patch_size 14 contradicts config.json, whose tower has 4"),
    (
        "mistral3",
        {"image_processor_type": "LlavaNextImageProcessorFast"},
        "LlavaNextImageProcessorFast' is not",
    ),
    ("qwen3_vl", {"image_processor_type": "SmolVLMImageProcessor"}, "Qwen2VLImageProcessor and Qwen3VLImage"),
    ("mistral3", {"size": {"longest_edge": 0}}, "size.height must be from 1 to 16384, got 0"),
    ("qwen3_vl", {"merge_size": 3}, "merge_size 3 contradicts config.json, whose tower has 2"),
    ("qwen3_vl", {"min_pixels": 5000}, "size has at least 5000 pixels and at most 2000"),
    ("qwen3_vl", {"size": {"height": 9}}, "size must be an object of shortest_edge and longest_edge"),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG, ids=str)
def test_unknown_and_contradictory_keys_are_refused(name, changes, message):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        processing_of(vision_of(name), {**FAMILIES[name].processor, **changes}, {})
    neutral = {"processor_class": "X", "do_center_crop": False, "crop_size": {"height": 9}, "unknown": None}
    processing_of(vision_of(name), {**FAMILIES[name].processor, **neutral}, {})


def test_the_processor_of_texts_has_the_sizes_of_pixtral():
    """As in transformers: those of the processor of images have no effect then."""
    vision = vision_of("mistral3")
    given = {**FAMILIES["mistral3"].processor, "patch_size": {"height": 16, "width": 16}}
    beside = {"patch_size": vision.tower.patch_size, "spatial_merge_size": vision.projector.side}
    assert processing_of(vision, given, beside) == vision.processing
    with pytest.raises(CheckpointError, match=r"patch_size 16 contradicts config\.json, whose tower has 4"):
        processing_of(vision, given, {**beside, "patch_size": 16})


@pytest.mark.parametrize("kind", ["", "Fast", "Pil"])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_kind_of_the_processor_is_read_alike(name, kind):
    own = FAMILIES[name].processor_class.__name__.removesuffix("Pil")
    given = {**FAMILIES[name].processor, "image_processor_type": own + kind}
    assert processing_of(vision_of(name), given, {}) == vision_of(name).processing


def test_a_model_without_its_processor_sees_nothing(tmp_path):
    directory = seeing("gemma3")
    for file in ("config.json",):
        (tmp_path / file).write_bytes((directory / file).read_bytes())
    config = EngineConfig(str(tmp_path))
    model, why = with_vision(config, read_config(tmp_path), tmp_path)
    assert model.vision is None
    assert "there is no preprocessor_config.json" in why
    whole = {"image_processor": FAMILIES["gemma3"].processor, "image_seq_length": 9}
    edit_json(tmp_path / "processor_config.json", **whole)
    assert with_vision(config, read_config(tmp_path), tmp_path)[0].vision == vision_of("gemma3")
    edit_json(tmp_path / "preprocessor_config.json", image_mean=[0.5])  # older, as transformers reads them
    assert with_vision(config, read_config(tmp_path), tmp_path)[0].vision == vision_of("gemma3")
    edit_json(tmp_path / "processor_config.json", image_processor=None)
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json: size 224 x 224"):
        with_vision(config, read_config(tmp_path), tmp_path)
    only_text = EngineConfig(str(tmp_path), language_model_only=True)
    assert with_vision(only_text, read_config(tmp_path), tmp_path)[1].startswith("language_model_only=True")
    edit_json(tmp_path / "processor_config.json", **whole)
    edit_json(tmp_path / "config.json", mm_tokens_per_image=8)
    with pytest.raises(
        CheckpointError, match=r"mm_tokens_per_image 8 must be squares .*; language_model_only"
    ):
        with_vision(config, read_config(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("mistral3", {"unknown": 3}, "^mm_processor_kwargs: unknown 3 is not supported; known are"),
        ("gemma3", {"do_pan_and_scan": True}, "^mm_processor_kwargs: do_pan_and_scan true"),
        ("qwen3_vl", {"max_pixels": 1}, "^mm_processor_kwargs: size has at least 300 pixels and at most 1"),
        ("qwen3_vl", {"images_kwargs": {"max_pixels": 900}}, "^mm_processor_kwargs: images_kwargs"),
    ],
)
def test_values_of_the_engine_are_its_errors(name, kwargs, message, tmp_path):
    """A model does not see less because of a wrong value, and a file is wrong only by itself."""
    directory = seeing(name)
    config = EngineConfig(str(directory), mm_processor_kwargs=kwargs)
    with pytest.raises(ConfigError, match=message):
        with_vision(config, read_config(directory), directory)
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_bytes((directory / file).read_bytes())
    edit_json(tmp_path / "preprocessor_config.json", image_mean=[0.5])
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json: image_mean must be a number"):
        with_vision(config, read_config(tmp_path), tmp_path)
    right = EngineConfig(str(tmp_path), mm_processor_kwargs={"image_mean": 0.25})
    model, _ = with_vision(right, read_config(tmp_path), tmp_path)
    assert model.vision is not None
    assert model.vision.processing is not None
    assert model.vision.processing.mean == (0.25, 0.25, 0.25)


# Of JSON: numbers that overflow, and values of every type.
ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 10**400, -(10**400), 0.5, 1e308, 1e-320, "", "bicubic", "1", [], [1]),
    *([0.5] * 3, [0.5, None, "a"], [10**400] * 3, {}, {"height": 24, "width": 24}, {"longest_edge": 10**400}),
    *({"longest_edge": [1]}, {"shortest_edge": 9, "longest_edge": 99}, {"max_pixels": None}, {"height": {}}),
]


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4_unified", "mistral3", "qwen3_vl"])
def test_values_of_a_request_are_read_or_refused(name):
    """Whatever they are; and what is read resizes and makes finite patches."""
    config = EngineConfig(str(seeing(name)))
    model, _ = with_vision(config, read_config(seeing(name)), seeing(name))
    assert model.vision is not None
    read = request_reader(config, seeing(name))
    keys = [*SHARED, *PROCESSINGS[model.vision.family][1], "unknown", "crop_size"]
    rng = random.Random(name)
    num_read = 0
    for _ in range(1500):
        values = {key: rng.choice(ODD_VALUES) for key in rng.sample(keys, rng.choice([1, 1, 2]))}
        try:
            vision = read(model.vision, values)
        except (CheckpointError, UnsupportedModelError):
            continue
        num_read += 1
        assert vision.processing is not None
        made = values_of(vision.processing, processing_of_vision(model.vision))
        numbers = patches_of(model.vision, vision.square, vision.square, bytes(vision.square**2 * 3), made)
        assert np.isfinite(numbers).all(), values
        assert (
            numbers == patches_of(vision, vision.square, vision.square, bytes(vision.square**2 * 3))
        ).all()
    assert 100 < num_read < 1400


def test_a_size_replaces_earlier_numbers_of_pixels():
    """Where both are given in one place, the numbers count, as in transformers."""
    directory = seeing("qwen3_vl")
    vision = vision_of("qwen3_vl")
    size = {"shortest_edge": 400, "longest_edge": 900}
    read = request_reader(EngineConfig(str(directory), mm_processor_kwargs={"max_pixels": 500}), directory)

    def sizes_of(**values: Any) -> tuple[int, ...]:
        processing = read(vision, values).processing
        assert processing is not None
        return processing.sizes

    assert sizes_of() == (300, 500)
    assert sizes_of(max_pixels=700) == (300, 700)
    assert sizes_of(size=size) == (400, 900)
    assert sizes_of(size=size, max_pixels=700) == (400, 700)
    config = EngineConfig(str(directory), mm_processor_kwargs={"size": size})
    model, _ = with_vision(config, read_config(directory), directory)
    assert model.vision is not None
    assert model.vision.processing == read(vision, {"size": size}).processing


def test_limits_are_numbers_or_counts():
    def limits(given: Any) -> Any:
        return EngineConfig("demo", limit_mm_per_prompt=given).limit_mm_per_prompt

    assert limits({"image": {"count": 2}, "video": {"count": 0}}) == limits({"image": 2, "video": 0})
    assert (limits({"image": 2}), limits({}), limits(None)) == ({"image": 2}, None, None)
    for given, message in (
        ({"image": {"count": 2, "width": 512}}, r"\['image'\] has 'width'; it takes count"),
        ({"image": {}}, r"\['image'\] must be an int, or a dict such as"),
        ({"image": {"count": 4097}}, r"\['image'\]\['count'\] must be from 0 to 4096"),
        ({"image": {"count": None}}, r"\['count'\] must be an int"),
        ({"video": {"count": 1}}, r"\['video'\]\['count'\] must be 0, as video is not supported"),
        ({"picture": 1}, "has 'picture'; it takes image"),
        *((wrong, "must be a dict such as") for wrong in (2, [], "", '{"image": 2}')),
    ):
        with pytest.raises(ConfigError, match=f"^limit_mm_per_prompt.*{message}"):
            limits(given)


def test_pillow_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    prompts = ImagePrompts(vision_of("gemma3"), None, 4)
    with pytest.raises(RequestError, match="images need Pillow, which is not installed; install paged with"):
        prompts.parse([prompts.placeholder_id], [NamedImage("it", Path("x.png"))])
