"""The process that holds a tokenizer which is not known to be bounded: see `worker` and `remote_tokenizer`.

A tokenizer of transformers is loaded by the same function, `load`, here and in the engine's process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .tokenizer_source import PROBE, Source

MOST_CHARACTERS = 500  # of an error's message


def load(source: Source) -> Any:
    """Load a tokenizer with transformers.

    Raises the library's errors of any kind, because it does not validate the files.
    """
    from transformers import AutoTokenizer

    _check_class("tokenizer_config.json", source.named_class)
    _check_class("config.json", source.tokenizer_class)
    # Files are found by name. What the settings have instead is where their author's files were.
    paths = dict.fromkeys(key for key in source.settings if key.endswith("_file"))
    hf = AutoTokenizer.from_pretrained(
        source.directory, config=_config(source), trust_remote_code=False, local_files_only=True, **paths
    )
    # The first call may change the tokenizer's settings. No later one does, so threads may share it.
    hf("")
    return hf


def _check_class(file: str, name: str | None) -> None:
    """Raise ValueError for a class of transformers that is not one of tokenizers.

    name: a name that `tokenizer_files` has found to be like a tokenizer's.
    """
    import transformers

    for each in (name, name.removesuffix("Fast")) if name else ():
        found = getattr(transformers, each, transformers.PreTrainedTokenizerBase)
        if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)):
            raise ValueError(f"{file}: tokenizer_class {name!r} is not a class of tokenizers")


def _config(source: Source) -> Any:
    """Return a stand-in for the model's config, so that AutoTokenizer does not read it.

    Its class would import torch's compiler, which is slow to load. It is needed only if no file names the
    tokenizer's class, and then has the defaults.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    is_named = (source.named_class or source.tokenizer_class) and "auto_map" not in source.settings
    has_class = not is_named and source.model_type in CONFIG_MAPPING
    config = CONFIG_MAPPING[source.model_type]() if has_class else PreTrainedConfig()
    config.tokenizer_class = source.tokenizer_class
    config.name_or_path = source.directory
    config.model_type = source.model_type
    if source.model_name is not None:
        config.model_name = source.model_name
    return config


# The process


def watch_files(roots: Sequence[str]) -> None:
    """Make Python raise PermissionError for files outside `roots` and the directories of modules."""
    own = (*sys.path, sys.prefix, sys.base_prefix, os.path.dirname(os.__file__))
    allowed = tuple(os.path.join(os.path.realpath(root), "") for root in (*roots, *filter(None, own)))

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            place = os.path.realpath(os.fsdecode(arguments[0]))
            if not place.startswith(allowed) and not place.startswith("/dev/"):
                raise PermissionError(f"{place} is outside the checkpoint's directory")

    sys.addaudithook(check)


class _Held:
    """The tokenizer of this process."""

    hf: Any = None

    def answer(self, most_characters: int, **request: Any) -> dict[str, Any]:
        """Answer a request: {"load": ...}, {"encode": ...} or {"decode": ...}."""
        ((name, arguments),) = request.items()
        calls: dict[str, Callable[..., dict[str, Any]]] = {
            "load": self._load,
            "encode": self._encode,
            "decode": self._decode,
        }
        try:
            reply = calls[name](**arguments)
        except (MemoryError, RecursionError):
            raise
        # Panics of Rust are BaseExceptions, and the libraries raise anything.
        except BaseException as error:
            message = str(error).strip()[:MOST_CHARACTERS] or type(error).__name__
            return {"error": f"the tokenizer failed: {message}"}
        if len(reply.get("text", reply.get("ids", ()))) > most_characters:
            return {"error": f"the tokenizer makes more than {most_characters} characters or tokens"}
        return reply

    def _load(self, source: list[Any], roots: list[str], checks_file: bool) -> dict[str, Any]:
        import tokenizers

        given = Source(*source)
        file = os.path.join(given.directory, "tokenizer.json")
        if checks_file and os.path.exists(file):
            # A damaged file is found before transformers is imported, which takes a second.
            try:
                tokenizers.Tokenizer.from_file(file).encode(PROBE)
            except (MemoryError, RecursionError):
                raise
            except BaseException as error:  # also a panic
                line = (str(error).strip() or type(error).__name__).splitlines()[0]
                return {"error": f"{file} is damaged: {line[:MOST_CHARACTERS]}"}
        # "Not installed": no tokenizer needs it, and importing it takes longer than all else.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        import transformers  # noqa: F401

        watch_files(roots)
        self.hf = hf = load(given)
        ids = self._encode(PROBE, add_special_tokens=True)["ids"]
        self._decode(ids, skip_special_tokens=False)
        backend = getattr(hf, "backend_tokenizer", None)
        added = hf.added_tokens_decoder
        return {
            "description": None if backend is None else backend.to_str(),
            "has_own_decode": _has_own_decode(hf),
            "special_tokens": dict(hf.special_tokens_map),
            "special_ids": [token_id for token_id, token in added.items() if token.special],
            "chat_template": hf.chat_template,
            "size": len(hf),
        }

    def _encode(self, text: str, add_special_tokens: bool) -> dict[str, Any]:
        encoded = self.hf(text, add_special_tokens=add_special_tokens, verbose=False)
        return {"ids": list(encoded["input_ids"])}

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> dict[str, Any]:
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return {"text": str(self.hf.decode(token_ids, **options))}


def _has_own_decode(hf: Any) -> bool:
    """Return whether a tokenizer's class decodes in another way than the tokenizers library."""
    from transformers import TokenizersBackend

    names = ("decode", "_decode", "convert_tokens_to_string")
    return any(getattr(type(hf), name) is not getattr(TokenizersBackend, name) for name in names)


if __name__ == "__main__":
    from .worker import serve

    os.environ["HF_HUB_OFFLINE"] = "1"
    serve(_Held().answer)
