"""What a checkpoint sees images with: config.json has its tower, preprocessor_config.json its processing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..architectures.config import ModelConfig
from ..architectures.families.vision import Seen, require_reader, vision_of
from ..architectures.gguf_paths import GGUF_KEY
from ..architectures.hf_config import read_config, read_hf, read_json
from ..architectures.towers import ProcessingSpec, VisionSpec
from ..base.errors import CheckpointError, ConfigError, UnsupportedModelError
from ..base.validation import check_bool, check_int, check_number, shown

if TYPE_CHECKING:
    from ..options.config import EngineConfig

Config = Mapping[str, Any]
FILE = "preprocessor_config.json"
OLD_FILE = "processor_config.json"  # in which transformers 5 writes both
NEAREST, LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING = range(6)  # Pillow's filters
_FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
MAX_SIZE = 16384
GEMMA4_TOKENS = (70, 140, 280, 560, 1120)  # of an image at most, as in transformers
# Keys that say what wrote the file, or how a batch is laid out, and change no pixel.
NEUTRAL_KEYS = (
    *("feature_extractor_type", "processor_class", "auto_map", "_name_or_path"),
    *("transformers_version", "data_format", "input_data_format", "return_tensors", "device", "backend"),
    *("disable_grouping", "default_to_square", "do_convert_rgb", "do_pad", "pad_size", "padding_mode"),
    *(
        "crop_size",
        "model_input_names",
        "image_token",
        "image_break_token",
        "image_end_token",
        "_processor_class",
    ),
)
TYPE_KEY = "image_processor_type"
SHARED = (
    TYPE_KEY,
    "do_resize",
    "resample",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
)


def read_seeing(config: EngineConfig, directory: Path) -> ModelConfig:
    """Read config.json, with what the model sees images with, if it does.

    Raises CheckpointError and UnsupportedModelError.
    """
    model = read_config(directory)
    return with_vision(config, model, directory)[0] if model.placeholders else model


def with_vision(config: EngineConfig, model: ModelConfig, directory: Path) -> tuple[ModelConfig, str]:
    """Return the model with its `VisionSpec`, and ""; or the model as it is, and why it sees no images.

    Raises CheckpointError for files that are wrong or contradict each other.
    """
    try:
        vision, names = _vision_of(config, model, directory)
    except UnsupportedModelError as error:
        return model, str(error)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; language_model_only=True loads the text part alone") from None
    return replace(model, vision=vision, tensor_names=names), ""


def _vision_of(config: EngineConfig, model: ModelConfig, directory: Path) -> Seen:
    """Return what a model sees images with. Raises UnsupportedModelError if it sees none."""
    if not model.placeholders:
        raise UnsupportedModelError(f"{model.architecture} is a text model")
    if config.language_model_only:
        raise UnsupportedModelError("language_model_only=True leaves its other parts out")
    file = directory / "config.json"
    hf = read_hf(directory)
    if GGUF_KEY in hf:
        raise UnsupportedModelError("a GGUF file has its text part alone, and mmproj files are not read yet")
    require_reader(model)
    source, given, beside = _processor_config(directory)
    try:
        vision, names = vision_of(hf, model)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    processing = _with_kwargs(
        config, source, lambda more: processing_of(vision, _replaced(given, more), beside)
    )
    return replace(vision, processing=processing), names


def request_reader(config: EngineConfig, directory: Path) -> Callable[[VisionSpec, Config], VisionSpec]:
    """Return what gives a model's `VisionSpec` other processing: of mm_processor_kwargs of a request.

    What is returned raises CheckpointError and UnsupportedModelError, which name the key.
    """
    _, given, beside = _processor_config(directory)
    engine = _replaced(given, config.mm_processor_kwargs or {})
    return lambda vision, more: replace(
        vision, processing=processing_of(vision, _replaced(engine, more), beside)
    )


def _replaced(given: Config, more: Config) -> Config:
    """Return values, some of them replaced. A size replaces earlier numbers of pixels, too."""
    if more.get("size") is not None:
        given = {key: value for key, value in given.items() if key not in ("min_pixels", "max_pixels")}
    return {**given, **more}


def _with_kwargs(
    config: EngineConfig, source: Path, read: Callable[[Config], ProcessingSpec]
) -> ProcessingSpec:
    """Read how images are processed, with the engine's values in place of a file's.

    Raises ConfigError where a file is right without these values; else CheckpointError or
    UnsupportedModelError, which name the file.
    """
    kwargs = config.mm_processor_kwargs or {}
    try:
        return read(kwargs)
    except (CheckpointError, UnsupportedModelError) as error:
        wrong = error
    if kwargs:
        try:
            read({})
        except (CheckpointError, UnsupportedModelError) as error:
            wrong = error
        else:
            raise ConfigError(f"mm_processor_kwargs: {wrong}")
    raise type(wrong)(f"{source}: {wrong}")


def _processor_config(directory: Path) -> tuple[Path, Config, Config]:
    """Return the name of the processor's file, its part about images, and its other parts."""
    file = directory / OLD_FILE
    whole = read_json(file) if file.exists() else {}
    nested = whole.get("image_processor")
    if isinstance(nested, dict):  # transformers reads this first, too
        return file, nested, {key: value for key, value in whole.items() if key != "image_processor"}
    file = directory / FILE
    if file.exists():
        return file, read_json(file), whole
    raise UnsupportedModelError(f"there is no {FILE} in {directory}, which says how images are resized")


# Reads the keys of a family: (what the model sees with, the file with defaults, what is beside) -> spec
ReadProcessing = Callable[[VisionSpec, Config, Config], ProcessingSpec]


def processing_of(vision: VisionSpec, given: Config, beside: Config) -> ProcessingSpec:
    """Read how images are processed. Raises CheckpointError and UnsupportedModelError, which name the key."""
    read, keys, defaults = PROCESSINGS[vision.family]
    _check_type(vision.family, given.get(TYPE_KEY))
    known = {*NEUTRAL_KEYS, *SHARED, *keys}
    for key, value in given.items():
        if key not in known and value not in (None, False):
            raise UnsupportedModelError(
                f"{key} {shown(value)} is not supported; known are {', '.join(sorted(keys))}"
            )
    return read(vision, {**defaults, **given}, beside)


def _check_type(family: str, given: Any) -> None:
    """Raise UnsupportedModelError for the processor of another family, which makes other patches.

    The "fast" processors are taken for those with Pillow, whose patches differ in the last bits.
    """
    known = PROCESSORS[family]
    name = str(given).removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor")
    if given is not None and name not in known:
        shown_names = " and ".join(f"{each}ImageProcessor" for each in known)
        raise UnsupportedModelError(f"{TYPE_KEY} {shown(given)} is not supported; {shown_names} are")


def _shared(given: Config) -> dict[str, Any]:
    """Read what all families have: the filter, and what is made of the numbers of pixels."""
    if not check_bool(CheckpointError, "do_resize", given["do_resize"]):
        raise UnsupportedModelError("do_resize false is not supported: images come in all sizes")
    fields: dict[str, Any] = {"resample": _filter(given["resample"])}
    if check_bool(CheckpointError, "do_rescale", given["do_rescale"]):
        name = "rescale_factor"
        fields["scale"] = check_number(CheckpointError, name, given[name], 0, 1, above=True)
    if check_bool(CheckpointError, "do_normalize", given["do_normalize"]):
        fields["mean"] = _channels(given, "image_mean", -1e3)
        fields["std"] = _channels(given, "image_std", 1e-6)
    return fields


def _filter(value: Any) -> int:
    if isinstance(value, str) and value.lower() in _FILTERS:
        return _FILTERS[value.lower()]
    return check_int(CheckpointError, "resample", value, 0, HAMMING)


def _channels(given: Config, name: str, least: float) -> tuple[float, float, float]:
    value = given[name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = [value] * 3
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise CheckpointError(f"{name} must be a number for each of 3 channels, got {shown(value)}")
    first, second, third = (check_number(CheckpointError, name, each, least, 1e3) for each in value)
    return first, second, third


def _gemma3(vision: VisionSpec, given: Config, beside: Config) -> ProcessingSpec:
    if given["do_pan_and_scan"] not in (None, False):
        raise UnsupportedModelError("do_pan_and_scan true is not supported: an image is shown as a whole")
    height, width = _two_sides(given["size"], ("height", "width"))
    side = vision.square * _side_of(vision)
    if (height, width) != (side, side):
        raise CheckpointError(
            f"size {height} x {width} contradicts config.json, whose tower takes images of {side} x {side}"
        )
    _check_tokens(vision, {**given, **beside})
    return ProcessingSpec(rule="fixed", sizes=(height, width), **_shared(given))


def _side_of(vision: VisionSpec) -> int:
    """Return the embeddings on a side of an image that has a fixed number of them."""
    return vision.tower.grid // vision.projector.side


def _check_tokens(vision: VisionSpec, given: Config) -> None:
    name = "image_seq_length"
    if given.get(name) is not None:
        num_tokens = check_int(CheckpointError, name, given[name], 1)
        if num_tokens != vision.tokens_per_image:
            raise CheckpointError(
                f"{name} {num_tokens} contradicts the {vision.tokens_per_image} tokens that config.json has"
            )


def _two_sides(size: Any, keys: tuple[str, str]) -> tuple[int, int]:
    if isinstance(size, int) and not isinstance(size, bool):
        size = dict.fromkeys(keys, size)
    if not isinstance(size, Mapping) or {*size} != {*keys}:
        raise CheckpointError(f"size must be an object of {' and '.join(keys)}, got {shown(size)}")
    first, second = (check_int(CheckpointError, f"size.{key}", size[key], 1, MAX_SIZE) for key in keys)
    return first, second


def _gemma4(vision: VisionSpec, given: Config, beside: Config) -> ProcessingSpec:  # noqa: ARG001
    parts = vision.projector.side
    if not vision.tower.num_layers:  # without an encoder, what the processor calls a patch is a part of one
        name = "pooling_kernel_size"
        parts = check_int(CheckpointError, name, given[name], 1, vision.square)
    sizes = {"pooling_kernel_size": parts, "patch_size": vision.square // parts}
    for name, own in sizes.items():
        if given[name] != own:
            raise CheckpointError(
                f"{name} {shown(given[name])} contradicts config.json, whose tower has {own}"
            )
    name = "max_soft_tokens"
    most = check_int(CheckpointError, name, given[name], 1, max(GEMMA4_TOKENS))
    if most not in GEMMA4_TOKENS:
        raise CheckpointError(f"{name} must be one of {', '.join(map(str, GEMMA4_TOKENS))}, got {most}")
    assert vision.tower.axes is not None, "places are of columns and rows"
    if most * vision.projector.side > vision.tower.axes.num_places:
        raise CheckpointError(
            f"{name} {most} may be {most * vision.projector.side} patches in a row, but config.json has "
            f"places for {vision.tower.axes.num_places}"
        )
    is_centred = vision.tower.num_layers > 0
    return ProcessingSpec(rule="tokens", sizes=(most,), is_centred=is_centred, **_shared(given))


def _mistral3(vision: VisionSpec, given: Config, beside: Config) -> ProcessingSpec:
    # The processor of texts, beside it, gives the processor of images its own sizes.
    for name, wanted in (
        ("patch_size", vision.tower.patch_size),
        ("spatial_merge_size", vision.projector.side),
    ):
        own = given.get(name) if beside.get(name) is None else beside[name]
        if isinstance(own, Mapping) and own.get("height") == own.get("width"):
            own = own.get("height")
        if own is not None and own != wanted:
            raise CheckpointError(f"{name} {shown(own)} contradicts config.json, whose tower has {wanted}")
    size = given["size"]
    if isinstance(size, Mapping) and {*size} == {"longest_edge"}:
        size = size["longest_edge"]
    return ProcessingSpec(rule="longest_edge", sizes=_two_sides(size, ("height", "width")), **_shared(given))


def _qwen3_vl(vision: VisionSpec, given: Config, beside: Config) -> ProcessingSpec:  # noqa: ARG001
    wanted = {
        "patch_size": vision.tower.patch_size,
        "merge_size": vision.projector.side,
        "temporal_patch_size": vision.tower.frames,
    }
    for name, own in wanted.items():
        if given[name] != own:
            raise CheckpointError(
                f"{name} {shown(given[name])} contradicts config.json, whose tower has {own}"
            )
    size = given["size"]
    if not isinstance(size, Mapping) or not {*size} <= {
        "shortest_edge",
        "longest_edge",
        "min_pixels",
        "max_pixels",
    }:
        raise CheckpointError(f"size must be an object of shortest_edge and longest_edge, got {shown(size)}")
    areas = []
    for name, key, most in (
        ("min_pixels", "shortest_edge", MAX_SIZE**2),
        ("max_pixels", "longest_edge", MAX_SIZE**2),
    ):
        value = given.get(name)
        value = size.get(key, size.get(name)) if value is None else value
        areas.append(
            check_int(CheckpointError, name if given.get(name) is not None else f"size.{key}", value, 1, most)
        )
    if areas[0] > areas[1]:
        raise CheckpointError(f"size has at least {areas[0]} pixels and at most {areas[1]}")
    return ProcessingSpec(rule="area", sizes=(areas[0], areas[1]), **_shared(given))


_MISTRAL3: Config = {
    "do_resize": True,
    "size": {"longest_edge": 1024},
    "resample": BICUBIC,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_QWEN3_VL: Config = {
    **_MISTRAL3,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
_AREAS = ("size", "min_pixels", "max_pixels", "patch_size", "merge_size", "temporal_patch_size")
_GEMMA4: Config = {
    "do_resize": True,
    "resample": BICUBIC,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": False,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
    "patch_size": 16,
    "max_soft_tokens": 280,
    "pooling_kernel_size": 3,
}
_GEMMA3: Config = {
    "do_resize": True,
    "size": {"height": 224, "width": 224},
    "resample": BILINEAR,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_pan_and_scan": None,
}
_PAN_AND_SCAN = (
    *("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
    "pan_and_scan_min_ratio_to_activate",
)
# By family: the processors whose keys are read, in short.
PROCESSORS: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("Gemma3",),
    "gemma4": ("Gemma4", "Gemma4Unified"),
    "mistral3": ("Pixtral",),
    "qwen3_vl": ("Qwen2VL", "Qwen3VL"),
}
# By family: what reads its keys, the keys of its own, and transformers' defaults.
PROCESSINGS: Mapping[str, tuple[ReadProcessing, tuple[str, ...], Config]] = {
    "gemma3": (_gemma3, ("size", "image_seq_length", *_PAN_AND_SCAN), _GEMMA3),
    # image_seq_length changes nothing: the number of an image's tokens follows from its size.
    "gemma4": (
        _gemma4,
        ("patch_size", "max_soft_tokens", "pooling_kernel_size", "image_seq_length"),
        _GEMMA4,
    ),
    "mistral3": (_mistral3, ("size", "patch_size", "spatial_merge_size"), _MISTRAL3),
    "qwen3_vl": (_qwen3_vl, _AREAS, _QWEN3_VL),
}
