"""What a checkpoint says of embeddings: files of sentence-transformers, or pooling_type of a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from ..architectures.gguf_paths import GGUF_POOLINGS, POOLING_KEY
from ..architectures.hf_config import read_json, read_json_list
from ..base.errors import CheckpointError, UnsupportedModelError
from ..base.validation import shown

logger = logging.getLogger(__name__)

Pooling = Literal["last", "mean", "cls"]
POOLINGS = ("last", "mean", "cls")
MODULES = "modules.json"
# Where sentence-transformers puts the module behind the transformer.
POOLING_FILE = "1_Pooling/config.json"
MAX_DENSE = 2**16  # inputs or outputs of a dense layer
MAX_MODULES = 64
_MODEL_FILE = "config_sentence_transformers.json"
_TEXT_FILE = "sentence_bert_config.json"
# Its names of what a vector is made of, and ours.
_MODES = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
# The flags that files from before version 6 have in place of a name, in the order of the parts of a vector.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING_KEYS = {*_FLAGS, "pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension"}
_DENSE_KEYS = {
    "in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name",
    "use_residual",
}  # fmt: skip
# The classes of torch that a dense layer may name, and the function of each in torch.nn.functional.
DENSE_ACTIVATIONS = {
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
# How texts become hidden states; at these values all is as in a generation.
_TEXT_KEYS: dict[str, tuple[Any, ...]] = {
    "transformer_task": (None, "feature-extraction"),
    "module_output_name": (None, "token_embeddings"),
    "unpad_inputs": (None, True, False),
    "processing_kwargs": (None, {}),
    "model_args": (None, {}),
    "model_kwargs": (None, {}),
    "tokenizer_args": (None, {}),
    "processor_kwargs": (None, {}),
    "config_args": (None, {}),
    "config_kwargs": (None, {}),
}
_TEXT_OUTPUT = {"method": "forward", "method_output_name": "last_hidden_state"}
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# Tokenizers without a limit have a number beyond any context.
_NO_LIMIT = 2**30


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer over vectors: activation(W x + b). With use_residual, x or a projection of x is added.

    directory: the directory with its model.safetensors.
    activation: the name of a function in torch.nn.functional; None if there is no activation.
    """

    directory: Path
    in_features: int
    out_features: int
    bias: bool = True
    activation: str | None = "tanh"
    use_residual: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """How a checkpoint makes an embedding from its final hidden states.

    size: the size of a vector.
    pooling: how hidden states become one vector; None if the checkpoint names an unsupported way, which
        `unsupported_pooling` then describes.
    include_prompt: whether mean and cls pooling include the tokens of the text from `prompts`.
    steps: the operations on the pooled vector in order: dense layers, and normalisations before them.
    normalize: whether the final vector is scaled to a norm of 1.
    prompts: texts to put before the input, by name; default_prompt_name names the default.
    max_tokens: maximum number of tokens of an input; None allows the whole context. max_tokens_key: the file
        and key that set it.
    lower_case: whether texts are converted to lower case.
    as_message: whether the chat template renders the input as a user message, and the text from `prompts` as
        a system message.
    dimensions: the sizes that a vector may be cut to; None allows any.
    refusal: why the checkpoint cannot make embeddings; None if it can.
    """

    size: int
    pooling: Pooling | None = "last"
    unsupported_pooling: str = ""
    include_prompt: bool = True
    steps: tuple[Dense | Literal["normalize"], ...] = ()
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_tokens: int | None = None
    max_tokens_key: str = ""
    lower_case: bool = False
    as_message: bool = False
    dimensions: tuple[int, ...] | None = None
    refusal: str | None = None

    @property
    def dense(self) -> list[Dense]:
        """The dense layers."""
        return [step for step in self.steps if isinstance(step, Dense)]

    def describe(self) -> str:
        """Describe the settings in one line."""
        parts = [f"{self.pooling} pooling" if self.pooling else self.unsupported_pooling]
        parts += [f"dense {layer.in_features} to {layer.out_features}" for layer in self.dense]
        parts += ["normalized"] * self.normalize
        parts += [f"prompts {', '.join(map(repr, self.prompts))}"] if self.prompts else []
        return ", ".join(parts)


def read_embedding_settings(directory: Path, hidden_size: int) -> EmbeddingSettings:
    """Read a checkpoint's settings for embeddings. Without any, the last token's vector is normalized.

    An unsupported setting sets `refusal` instead of raising, since the checkpoint may still generate text.

    Raises CheckpointError, which names the file, for wrong values.
    """
    hf = read_json(directory / "config.json")
    found: dict[str, Any] = {"size": hidden_size}
    try:
        if (directory / MODULES).exists():
            found |= _read_modules(directory, hidden_size)
        elif (directory / POOLING_FILE).exists():
            found |= _read_pooling(directory / POOLING_FILE, hidden_size)
        elif POOLING_KEY in hf:
            found |= _gguf_pooling(directory / "config.json", hf[POOLING_KEY])
        found["dimensions"] = _read_dimensions(directory / "config.json", hf, found["size"])
    except UnsupportedModelError as error:
        logger.warning("embeddings are refused: %s", error)
        return EmbeddingSettings(hidden_size, refusal=str(error))
    return EmbeddingSettings(**found)


def _gguf_pooling(file: Path, number: object) -> dict[str, Any]:
    """Return the pooling of a GGUF file, by llama.cpp's number."""
    name = GGUF_POOLINGS.get(number) if type(number) is int else None
    if name is None:
        raise CheckpointError(f"{file}: {POOLING_KEY} is {shown(number)}; give the GGUF file itself")
    return _pooling_of(name, name in POOLINGS, f"pooling_type {number} ({name}) of the GGUF file")


def _pooling_of(name: str, is_supported: bool, place: str) -> dict[str, Any]:
    if is_supported:
        return {"pooling": name}
    return {"pooling": None, "unsupported_pooling": f"{place} is not supported"}


# modules.json


def _read_modules(directory: Path, hidden_size: int) -> dict[str, Any]:
    """Read modules.json and the files of its modules."""
    file = directory / MODULES
    modules = [_module_of(file, i, entry) for i, entry in enumerate(read_json_list(file, MAX_MODULES))]
    if not modules or modules[0][0] != "Transformer":
        raise UnsupportedModelError(f"{file}: the first module must be a Transformer")
    if modules[0][1] != "":
        raise UnsupportedModelError(
            f"{file}: the path of the Transformer must be empty, got {shown(modules[0][1])}"
        )
    found: dict[str, Any] = {"steps": (), "normalize": False}
    size = hidden_size
    for i, (kind, path) in enumerate(modules[1:], 1):
        folder = directory / path
        if (kind == "Pooling") != (i == 1):
            raise UnsupportedModelError(f"{file}: the second module alone must be a Pooling, got {kind}")
        if kind == "Pooling":
            found |= _read_pooling(folder / "config.json", hidden_size)
        elif kind == "Dense":
            layer = _read_dense(folder, size)
            found["steps"] += (layer,)
            size = layer.out_features
        elif kind == "Normalize":
            _check_names(folder / "config.json", _optional_json(folder / "config.json"))
            found["steps"] += ("normalize",)
    if len(modules) == 1:
        raise UnsupportedModelError(f"{file}: there is no Pooling")
    if found["steps"][-1:] == ("normalize",):
        found |= {"steps": found["steps"][:-1], "normalize": True}
    return found | {"size": size} | _read_model_file(directory) | _read_text_file(directory)


def _module_of(file: Path, index: int, entry: Any) -> tuple[str, str]:
    """Return the kind and the folder of a module."""
    if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key), str) for key in ("type", "path")):
        raise CheckpointError(f"{file}: [{index}] must be an object with type and path, got {shown(entry)}")
    name, path = entry["type"], entry["path"]
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path or "\0" in path:
        raise CheckpointError(f"{file}: [{index}].path must be a folder within, got {shown(path)}")
    package, _, kind = name.rpartition(".")
    if package.partition(".")[0] != "sentence_transformers":
        raise UnsupportedModelError(
            f"{file}: module {shown(name)} is not supported: code of the checkpoint is never run"
        )
    if kind not in ("Transformer", "Pooling", "Dense", "Normalize", "Dropout"):
        raise UnsupportedModelError(
            f"{file}: module {shown(kind)} is not supported; supported are Transformer, Pooling, Dense, "
            "Normalize and Dropout, which does nothing"
        )
    return kind, path


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _check_names(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse a module that reads or writes something else than the pooled vector."""
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise UnsupportedModelError(
                f"{file}: {key} {shown(config[key])} is not supported, only 'sentence_embedding'"
            )


def _read_pooling(file: Path, hidden_size: int) -> dict[str, Any]:
    config = read_json(file)
    _check_keys(file, config, _POOLING_KEYS)
    for key in ("word_embedding_dimension", "embedding_dimension"):
        if config.get(key) not in (None, hidden_size):
            raise CheckpointError(
                f"{file}: {key} is {shown(config[key])}, but the hidden states have {hidden_size} numbers"
            )
    flags = {key: _flag(file, config, key, False) for key in _FLAGS}
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [_FLAGS[key] for key, is_set in flags.items() if is_set] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) for mode in modes):
        raise CheckpointError(f"{file}: pooling_mode must be a name or several, got {shown(modes)}")
    name = "+".join(modes)
    mode = _MODES.get(name, name)
    pooling = _pooling_of(mode, name in _MODES, f"{file}: pooling by {shown(name)}")
    return pooling | {"include_prompt": _flag(file, config, "include_prompt", True)}


def _read_dense(folder: Path, size: int) -> Dense:
    file = folder / "config.json"
    config = read_json(file)
    _check_keys(file, config, _DENSE_KEYS)
    _check_names(file, config)
    num_inputs, num_outputs = (_size(file, config, key) for key in ("in_features", "out_features"))
    if num_inputs != size:
        raise CheckpointError(f"{file}: in_features is {num_inputs}, but the vectors have {size} numbers")
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    package, _, kind = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if not package.startswith("torch.nn.") or kind not in DENSE_ACTIVATIONS:
        raise UnsupportedModelError(
            f"{file}: activation_function {shown(name)} is not supported; supported are those of torch.nn "
            f"that are called {', '.join(DENSE_ACTIVATIONS)}"
        )
    if not (folder / "model.safetensors").exists():
        raise UnsupportedModelError(
            f"{folder} has no model.safetensors; weights in pickles (pytorch_model.bin) are not read"
        )
    return Dense(
        folder,
        num_inputs,
        num_outputs,
        bias=_flag(file, config, "bias", True),
        activation=DENSE_ACTIVATIONS[kind],
        use_residual=_flag(file, config, "use_residual", False),
    )


def _size(file: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= MAX_DENSE:
        raise CheckpointError(f"{file}: {key} must be from 1 to {MAX_DENSE}, got {shown(value)}")
    return value


def _check_keys(file: Path, config: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(config.keys() - known):
        raise UnsupportedModelError(f"{file}: {shown(unknown[0])} is not supported")


def _flag(file: Path, config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise CheckpointError(f"{file}: {key} must be true or false, got {shown(value)}")
    return default if value is None else value


# The files beside it


def _read_model_file(directory: Path) -> dict[str, Any]:
    """Read the prompts. How vectors are compared is checked only, as it is the user who compares them."""
    file = directory / _MODEL_FILE
    config = _optional_json(file)
    if config.get("model_type") not in (None, "SentenceTransformer"):
        raise UnsupportedModelError(
            f"{file}: model_type {shown(config['model_type'])} is not supported, only 'SentenceTransformer'"
        )
    similarity = config.get("similarity_fn_name")
    if similarity is not None and similarity not in [*_SIMILARITIES]:  # a list, as it may be unhashable
        raise UnsupportedModelError(f"{file}: similarity_fn_name {shown(similarity)} is not supported")
    prompts = {} if config.get("prompts") is None else config["prompts"]
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise CheckpointError(f"{file}: prompts must be texts by name, got {shown(prompts)}")
    name = config.get("default_prompt_name")
    if name is not None and name not in [*prompts]:
        known = ", ".join(map(shown, prompts)) or "none"
        raise CheckpointError(
            f"{file}: default_prompt_name must be one of prompts ({known}), got {shown(name)}"
        )
    return {
        "prompts": {name: text or "" for name, text in prompts.items()},
        "default_prompt_name": name,
    }


def _read_text_file(directory: Path) -> dict[str, Any]:
    """Read how texts are tokenized, and how many tokens they may have."""
    file = directory / _TEXT_FILE
    config = _optional_json(file)
    _check_keys(file, config, {*_TEXT_KEYS, "max_seq_length", "do_lower_case", "modality_config"})
    for key, values in _TEXT_KEYS.items():
        if config.get(key) not in [*values]:
            raise UnsupportedModelError(f"{file}: {key} {shown(config[key])} is not supported")
    lower_case = _flag(file, config, "do_lower_case", False)
    as_message = _is_message(file, config.get("modality_config"))
    if as_message and lower_case:
        raise UnsupportedModelError(f"{file}: do_lower_case of texts that are messages is not supported")
    limits = [
        (_limit(path, _optional_json(path), key), f"{key} of {path}")
        for path, key in ((file, "max_seq_length"), (directory / "tokenizer_config.json", "model_max_length"))
    ]
    most, key = min(limits)
    found = {} if most >= _NO_LIMIT else {"max_tokens": most, "max_tokens_key": key}
    return {**found, "lower_case": lower_case, "as_message": as_message}


def _is_message(file: Path, modality: Any) -> bool:
    """Return whether a text is embedded as the message of a user, as it is where messages are supported."""
    if modality is None or (isinstance(modality, dict) and modality.get("text") == _TEXT_OUTPUT):
        if modality is None or "message" not in modality:
            return False
        if modality["message"] == {**_TEXT_OUTPUT, "format": "flat"}:
            return True
    raise UnsupportedModelError(
        f"{file}: modality_config {shown(modality)} is not supported; the embedding of a text, or of a flat "
        "message, must be made of last_hidden_state"
    )


def _limit(file: Path, config: Mapping[str, Any], key: str) -> int:
    """Return the most tokens of a text."""
    value = config.get(key)
    if value is None:
        return _NO_LIMIT
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        raise CheckpointError(f"{file}: {key} must be at least 1, got {shown(value)}")
    return int(min(value, _NO_LIMIT))


def _read_dimensions(file: Path, hf: Mapping[str, Any], size: int) -> tuple[int, ...] | None:
    """Return the sizes that vectors may be cut to, by the keys that vLLM reads in config.json."""
    listed = hf.get("matryoshka_dimensions")
    if listed is not None:
        if not isinstance(listed, list) or not all(type(n) is int and n > 0 for n in listed):
            raise CheckpointError(
                f"{file}: matryoshka_dimensions must be a list of sizes, got {shown(listed)}"
            )
        return tuple(sorted({*(n for n in listed if n < size), size}))
    return (size,) if hf.get("is_matryoshka") is False else None
