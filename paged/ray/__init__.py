"""Engines on a Ray cluster (pip install 'paged[ray]'). Nothing else of paged imports ray."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data import generate
    from .serve import app

__all__ = ["app", "generate"]

# Modules of the names that import ray, on first use: this package can be imported without it.
_MODULES = {"app": "serve", "generate": "data"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
