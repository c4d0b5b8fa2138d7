"""Names that do not exist here: for those of vLLM, the error says what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn


class ExplainsMissing(type):
    """The type of a class whose missing attributes say what to use instead."""

    if not TYPE_CHECKING:  # a type checker would take every attribute to exist

        def __getattr__(cls, name: str) -> NoReturn:
            if name.startswith("__"):  # Python and its libraries ask classes for many
                raise AttributeError(f"{cls.__name__} has no {name!r}", name=name, obj=cls)
            from .from_vllm import missing

            raise AttributeError(missing(cls.__name__, name), name=name, obj=cls)


class MissingNames:
    """The last import hook of Python: says what to use for a module of vLLM, and for a name of `vllm`.

    `from paged import ModelRegistry` looks for a module of that name where paged has no such attribute.
    """

    @staticmethod
    def find_spec(full_name: str, *_: object) -> None:
        """Find no module, so that Python reports it missing. Raises ImportError if vLLM has it."""
        package, _dot, name = full_name.partition(".")
        if package == "paged":
            from .from_vllm import missing, missing_of

            if name in missing_of("paged"):
                raise ImportError(missing("paged", name), name=full_name)
