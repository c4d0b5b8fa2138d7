"""The options about sizes of CUDA graphs, which few engines are given."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.errors import ConfigError
from ..base.validation import check_int, shown


def check_sizes(sizes: object, most: object) -> None:
    """Raise ConfigError for wrong cudagraph_capture_sizes or a wrong max_cudagraph_capture_size."""
    if most is not None:
        check_int(ConfigError, "max_cudagraph_capture_size", most, 1)
    if sizes is None:
        return
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise ConfigError(
            f"cudagraph_capture_sizes must be a list of ints such as [1, 2, 4], got {shown(sizes)}; "
            "enforce_eager=True captures none"
        )
    for size in sizes:
        check_int(ConfigError, "cudagraph_capture_sizes", size, 1)
    if most is not None and most != max(sizes):
        raise ConfigError(
            f"max_cudagraph_capture_size {most} must be the largest of cudagraph_capture_sizes, "
            f"{max(sizes)}; leave one of them out"
        )
