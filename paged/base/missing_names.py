"""Names that do not exist here: for those of vLLM, the error says what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn


class ExplainsMissing(type):
    """A metaclass whose classes explain a missing attribute: the error says what to use instead."""

    if not TYPE_CHECKING:  # a type checker would take every attribute to exist

        def __getattr__(cls, name: str) -> NoReturn:
            if name.startswith("__"):  # Python and its libraries ask classes for many
                raise AttributeError(f"{cls.__name__} has no {name!r}", name=name, obj=cls)
            from .from_vllm import missing

            raise AttributeError(missing(cls.__name__, name), name=name, obj=cls)


class MissingNames:
    """Python's last import hook. For a missing module or name that vLLM has, the error says what to use
    instead.

    Python also asks this hook when `from paged import ModelRegistry` finds no attribute of that name.
    """

    @staticmethod
    def find_spec(full_name: str, *_: object) -> None:
        """Return None: Python then reports the module as missing. Raises ImportError for a name of vLLM."""
        package, _dot, name = full_name.partition(".")
        if package == "paged":
            from .from_vllm import missing, missing_of

            if name in missing_of("paged"):
                raise ImportError(missing("paged", name), name=full_name)
