"""A bar on a terminal while the CPU's kernels are compiled, at the first start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def compile_bar(number: int, text: str) -> Iterator[Callable[[int, str], None]]:
    """Show a progress bar for compiling `number` kernels. The bar stays when the context ends."""
    with tqdm(total=number, desc=text, bar_format="{desc} |{bar}| {n}/{total} in {elapsed}") as bar:

        def update(num_compiled: int, text: str) -> None:
            bar.n = num_compiled
            bar.set_description_str(text, refresh=False)
            bar.refresh()

        yield update
