"""The choice of a backend, an implementation of `operations.Kernels`.

Importing this module, and loading "torch", needs no Triton.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, cast

from .checked import unchecked

if TYPE_CHECKING:
    from .operations import Kernels

BackendName = Literal["triton", "numba", "torch"]
BACKENDS: tuple[BackendName, ...] = ("triton", "numba", "torch")


def load_kernels(name: BackendName, *, checked: bool = True, ahead: bool = True) -> Kernels:
    """Return the kernels of the backend with this name.

    checked: False leaves out the checks that `checks.TrustedContents` skips, for a caller that guarantees its
        arguments, as the engine does.
    ahead: whether to compile all numba kernels now. If False, they are compiled by `Kernels.compile_for` or
        when launched.

    Raises ValueError for an unknown name, and ImportError if Triton or numba is missing, or if there is no
    directory for compiled kernels.
    """
    kernels = _load(name, ahead)
    if checked:
        return kernels
    return cast("Kernels", _Unchecked(kernels))


class _Unchecked:
    """A backend whose operations are not checked."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._kernels, name)
        value = unchecked(value) if callable(value) else value
        setattr(self, name, value)  # found at once from now on
        return value


def _load(name: BackendName, ahead: bool) -> Kernels:
    if name == "torch":
        from .plain import backend as torch_kernels

        return torch_kernels
    if name == "numba":
        return _numba_kernels(ahead)
    if name == "triton":
        return _triton_kernels()
    raise ValueError(f"attention_backend must be one of {', '.join(map(repr, BACKENDS))}, got {name!r}")


def has_numba() -> bool:
    """Return whether numba, which compiles the CPU kernels, is installed."""
    try:
        return find_spec("numba") is not None
    except ValueError:  # sys.modules["numba"] is None
        return False


def _numba_kernels(ahead: bool) -> Kernels:
    if not has_numba():
        raise ImportError(
            "attention_backend='numba' needs numba, which compiles the CPU's kernels: "
            "`pip install 'paged[cpu]'`, or use attention_backend='torch', which is slower"
        )
    from .cpu import backend as numba_kernels

    if ahead:
        numba_kernels.compile_ahead()
    return cast("Kernels", numba_kernels)


def _triton_kernels() -> Kernels:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "attention_backend='triton' needs Triton, which exists for Linux only: "
            "`pip install triton`, or use attention_backend='torch'"
        ) from error
    from .gpu import backend as triton_kernels

    return triton_kernels
