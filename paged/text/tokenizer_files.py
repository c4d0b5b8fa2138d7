"""The files of a checkpoint's tokenizer: which are read, and errors that name what is missing or damaged.

DirectTokenizer reads those that tokenizer.json describes completely without transformers, which takes a third
of an engine's start to import. It adds nothing to a checkpoint whose tokenizer_config.json names
transformers' general class and has no token or setting beyond tokenizer.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..architectures.families.table import ARCHITECTURES
from ..architectures.gguf_paths import GGUF_KEY, NO_TOKENIZER_KEY
from ..architectures.hf_config import MAX_JSON_BYTES, check_file, read_json
from ..base.errors import CheckpointError, MissingModelError, UnsupportedModelError
from ..base.garbage import without_collection
from ..base.validation import shown
from .tokenizer_published import is_published
from .tokenizer_source import GENERAL_CLASSES, MOST_OF_TOKEN, Source

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
# Files that hold a vocabulary. Without one, transformers makes a tokenizer that knows no text.
VOCABULARIES = ("tokenizer.*json", "*.model", "*.tiktoken", "vocab*", "merges.txt", "tekken*.json")
TEMPLATES = "additional_chat_templates"
OTHERS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*.json",
    "*.jinja",
    "*.txt",
    "*.spm",
    "bpe.codes",
    TEMPLATES,
    f"{TEMPLATES}/*",
)
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Classes that take their tokens from tokenizer.json, and are made in this process if that is bounded.
KNOWN_CLASSES = (
    "TokenizersBackend",
    "PreTrainedTokenizer",
    "LlamaTokenizer",
    "CodeLlamaTokenizer",
    "Qwen2Tokenizer",
    "GPT2Tokenizer",
    "GPTNeoXTokenizer",
    "GemmaTokenizer",
    "T5Tokenizer",
)
WAY_OUT = "give another tokenizer with tokenizer=, or do without one: skip_tokenizer_init=True"


def check_tokenizer(directory: Path) -> None:
    """Raise CheckpointError unless the directory has a vocabulary and the files needed to read it.

    Links must lead to files of the checkpoint, and settings must have the types that the loader expects.
    """
    if not any(file for pattern in VOCABULARIES for file in directory.glob(pattern)):
        config = directory / "config.json"
        if config.exists() and (reason := read_json(config).get(NO_TOKENIZER_KEY)):
            raise UnsupportedModelError(f"{reason}; {WAY_OUT}")
        found = [name for name in FILES if (directory / name).exists()]
        but = f", found only {found[0]}" if found else ""
        files = f"{', '.join(FILES[:-1])} and {FILES[-1]}"
        raise MissingModelError(f"{directory} has no tokenizer: looked for {files}{but}; {WAY_OUT}")
    try:
        for file in _files(directory):
            _check_place(directory, file)
            if file.name != TEMPLATES:
                check_file(file, MAX_JSON_BYTES)
        for name, kinds in _KINDS.items():
            if (directory / name).exists():
                _check_values(directory / name, read_json(directory / name), kinds)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {WAY_OUT}") from None
    file = directory / "tokenizer.model"
    is_alone = file.exists() and not (directory / "tokenizer.json").exists()
    if is_alone and not any(map(find_spec, ("sentencepiece", "tiktoken"))):
        raise CheckpointError(f"{file} takes a package to read: pip install sentencepiece; {WAY_OUT}")


def allowed_roots(directory: Path) -> list[Path]:
    """Return the directories to which links among a tokenizer's files may lead.

    The hub's cache keeps a model's files in models--owner--name/blobs and links to them from
    models--owner--name/snapshots/commit.
    """
    place = directory.resolve()
    return [place, place.parents[1] / "blobs"] if place.parent.name == "snapshots" else [place]


def _files(directory: Path) -> Iterator[Path]:
    for pattern in (*VOCABULARIES, *OTHERS):
        yield from sorted(directory.glob(pattern))


def _check_place(directory: Path, file: Path) -> None:
    try:
        target = file.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError in Python 3.12
        raise CheckpointError(f"{file} is a link that leads nowhere") from error
    if not any(target.is_relative_to(root) for root in allowed_roots(directory)):
        raise CheckpointError(
            f"{file} is a link to {target}, outside the checkpoint's directory; copy the file if it is yours"
        )


def source_of(directory: Path) -> Source:
    """Return the information that transformers needs to load a tokenizer. Raises CheckpointError."""
    config_file = directory / "config.json"
    settings_file = directory / "tokenizer_config.json"
    config = read_json(config_file) if config_file.exists() else {}
    settings = read_json(settings_file) if settings_file.exists() else {}
    _check_values(config_file, config, _CONFIG)
    named = {name: config.get(name) for name in _CONFIG}
    return Source(str(directory), **named, settings=[*settings], named_class=settings.get("tokenizer_class"))


def may_load_here(source: Source) -> bool:
    """Return whether a tokenizer's files show that loading it here takes bounded time and memory.

    Raises CheckpointError for a file that is not JSON, or a tokenizer that lengthens text too much.
    """
    directory = Path(source.directory)
    file = directory / "tokenizer.json"
    others = sorted(directory.glob("tokenizer.*json")) if "fast_tokenizer_files" in source.settings else []
    are_bounded = [_is_bounded(each) for each in {file: None, **dict.fromkeys(others)} if each.exists()]
    named = source.named_class or source.tokenizer_class
    return (
        file.exists()
        and _is_native(source.model_type)
        and (named is None or named.removesuffix("Fast") in KNOWN_CLASSES)
        and not {"auto_map", "fast_tokenizer_files"} & {*source.settings}
        and not any(directory.glob("tekken*.json"))
        and all(are_bounded)
    )


def _is_native(model_type: str | None) -> bool:
    if model_type is None or any(model_type == known.model_type for known in ARCHITECTURES.values()):
        return True
    from ..architectures.families.multimodal import MULTIMODAL

    return any(model_type == known.model_type for known in MULTIMODAL.values())


def _is_bounded(file: Path) -> bool:
    """Return whether a file describes a tokenizer that is known to be bounded.

    Raises CheckpointError if it is not JSON, or makes text too long.
    """
    with without_collection():  # a list for each merge: it would triple the time
        description = read_json(file)
        if is_published(description):
            return True
        from .tokenizer_bounds import why_unbounded
        from .tokenizer_growth import why_growing

        if why := why_growing(description):
            raise CheckpointError(f"{file}: {why}")
        return why_unbounded(description) is None


# The types of values


def _is_token(value: Any) -> bool:
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or len(content) > MOST_OF_TOKEN:
        return False
    flags = {**value, "__type": False, "id": False, "content": False} if isinstance(value, dict) else {}
    return all(isinstance(flag, bool) for flag in flags.values())


def _is_tokens(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list) and all(_is_token(token) for token in values)


def _is_added(value: Any) -> bool:
    return isinstance(value, dict) and all(
        key.isdecimal() and len(key) < 10 and isinstance(token, dict) and _is_token(token)
        for key, token in value.items()
    )


def _is_templates(value: Any) -> bool:
    if isinstance(value, dict):
        if "__type" in value:  # transformers makes an object of the tokenizers library of it
            return False
        value = [{"name": name, "template": template} for name, template in value.items()]
    return isinstance(value, str) or (
        isinstance(value, list)
        and all(
            isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
            for entry in value
        )
    )


def _is_plain_names(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(name, str) and fnmatch(name, "tokenizer.*json") and not {"/", "\\", "\0"} & {*name}
        for name in value
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_class(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\w{1,100}(Tokenizer(Fast)?|Backend)", value) is not None


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_empty(value: Any) -> bool:
    return value in ([], {}, "", False)


Kind = tuple[Callable[[Any], bool], str]
_TOKEN: Kind = (_is_token, f"a string or the fields of a token, of at most {MOST_OF_TOKEN:,} characters")
_TOKENS: Kind = (_is_tokens, "a list or object of tokens")
_TEXT: Kind = (_is_text, "a string")
_CLASS: Kind = (_is_class, 'the name of a tokenizer\'s class, such as "LlamaTokenizer"')
_FLAG: Kind = (_is_flag, "true or false")
_NONE: Kind = (_is_empty, "left out: such arguments of transformers' classes are not taken from a checkpoint")
_SETTINGS: Mapping[str, Kind] = {
    **dict.fromkeys(SPECIAL_TOKENS, _TOKEN),
    **dict.fromkeys(("additional_special_tokens", "extra_special_tokens"), _TOKENS),
    **dict.fromkeys(("padding_side", "truncation_side"), _TEXT),
    "tokenizer_class": _CLASS,
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens"), _FLAG),
    **dict.fromkeys(("clean_up_tokenization_spaces", "legacy"), _FLAG),
    **dict.fromkeys(("init_inputs", "vocab", "merges", "tokenizer_object", "gguf_file"), _NONE),
    "added_tokens_decoder": (_is_added, "an object of ids and the fields of tokens"),
    "auto_map": (lambda value: isinstance(value, dict | list), "an object or a list"),
    "chat_template": (_is_templates, "a string, or a list of objects with the strings name and template"),
    "fast_tokenizer_files": (_is_plain_names, 'a list of names such as "tokenizer.4.0.0.json"'),
    "model_max_length": (_is_number, "a number"),
}
_CONFIG: Mapping[str, Kind] = {"tokenizer_class": _CLASS, "model_type": _TEXT, "model_name": _TEXT}
# The kind of each key of a file; "" for keys that are not listed.
_KINDS: Mapping[str, Mapping[str, Kind]] = {
    "tokenizer_config.json": _SETTINGS,
    "special_tokens_map.json": {
        "": (lambda value: _is_token(value) or _is_tokens(value), "a token or tokens"),
    },
    "added_tokens.json": {"": (_is_id, "a token id")},
    "chat_template.json": {"chat_template": _SETTINGS["chat_template"]},
}


def _check_values(file: Path, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    for key, value in values.items():
        kind = kinds.get(key, kinds.get(""))
        if kind is not None and value is not None and not kind[0](value):
            raise CheckpointError(f"{file}: {key} must be {kind[1]}, got {shown(value)}")


def damaged_tokenizer(directory: Path, error: BaseException) -> CheckpointError:
    """Return the error for a tokenizer that could not be loaded: one line with the damaged file and the
    reason.

    error: the error that transformers raised. It does not always name the file.
    """
    reason = first_line(error)
    if not reason.startswith(str(directory)):
        reason = f"{directory}: the tokenizer cannot be loaded: {reason}"
    return CheckpointError(f"{reason}; {WAY_OUT}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" :.") if lines else type(error).__name__


# Types of model for which transformers takes no other class.
MODEL_TYPES = ("llama", "qwen3")
# The settings of tokenizer_config.json that do not change what a text's tokens are, and those read here.
KNOWN = {
    "added_tokens_decoder",
    "backend",
    "chat_template",
    "clean_up_tokenization_spaces",
    "is_local",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "padding_side",
    "tokenizer_class",
    *SPECIAL_TOKENS,
}
# Files that change tokens or templates in ways that are left to transformers.
OTHER_FILES = (
    "added_tokens.json",
    "special_tokens_map.json",
    "additional_chat_templates",
    "chat_template.json",
)


class DirectTokenizer:
    """Replaces a transformers tokenizer if it can be loaded directly: has the methods `Tokenizer` uses."""

    def __init__(self, backend: Tokenizer, special_tokens: dict[str, str], chat_template: str | None) -> None:
        self.backend_tokenizer = backend
        self.special_tokens_map = special_tokens
        self.chat_template = chat_template

    @classmethod
    def of(cls, directory: Path) -> DirectTokenizer | None:
        """Return the tokenizer in a directory; None if only transformers can load it.

        Raises CheckpointError for a file that is not JSON, and the errors of the tokenizers library.
        """
        files = [directory / name for name in ("config.json", "tokenizer_config.json", "tokenizer.json")]
        if not all(file.exists() for file in files) or any(
            (directory / name).exists() for name in OTHER_FILES
        ):
            return None
        for_model, settings = map(read_json, files[:2])
        is_general = settings.get("tokenizer_class") in GENERAL_CLASSES
        is_known = for_model.get("model_type") in MODEL_TYPES or GGUF_KEY in for_model
        if not (is_general and is_known and settings.keys() <= KNOWN):
            return None
        if "model_name" in for_model:
            return None
        backend = Tokenizer.from_file(str(files[2]))
        if backend.padding is not None:  # it names a special token
            return None
        named = {name: settings[name] for name in SPECIAL_TOKENS if settings.get(name) is not None}
        template = directory / "chat_template.jinja"
        chat = template.read_text(encoding="utf-8") if template.exists() else settings.get("chat_template")
        if not (chat is None or isinstance(chat, str)) or not _agree(backend, named, settings):
            return None
        backend.no_truncation()
        return cls(backend, named, chat)

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The added tokens by id."""
        added: Mapping[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return added

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        """Encode a text; other options of transformers change what it returns besides the ids."""
        encoded = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, **_: Any) -> str:
        """Decode tokens."""
        return str(self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def _agree(backend: Tokenizer, named: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether tokenizer.json has the settings' tokens; transformers would add or change others."""
    added = backend.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    listed = settings.get("added_tokens_decoder", {})
    if not isinstance(listed, dict) or not all(isinstance(token, str) for token in named.values()):
        return False
    if not all(key.isdecimal() and token == _fields(added.get(int(key))) for key, token in listed.items()):
        return False
    if "added_tokens_decoder" in settings:
        special &= {token["content"] for token in listed.values()}
    return set(named.values()) <= special


def _fields(token: Any) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name, None) for name in names}
