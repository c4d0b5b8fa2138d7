"""LiveView: the state of a running engine, redrawn in the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..scheduler.stats import EngineStats

REDRAW_S = 0.1
BAR_WIDTH = 50


class LiveView:
    """A context manager; inside it, `update` redraws a view on stderr at most every REDRAW_S seconds."""

    def __init__(
        self, stats: Callable[[], EngineStats], num_requests: int, console: Console | None = None
    ) -> None:
        self._stats = stats
        self._num_requests = num_requests
        self.num_done = 0
        self._live = Live(console=console or Console(stderr=True), auto_refresh=False)
        self._drawn = time.perf_counter()
        self._num_tokens = 0
        self._rate = 0.0

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._draw()
        self._live.__exit__(kind, error, traceback)

    def update(self) -> None:
        """Redraw the view if the last drawing is at least REDRAW_S old."""
        if time.perf_counter() - self._drawn >= REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        now = time.perf_counter()
        stats = self._stats()
        num_tokens = stats.num_decode_tokens + stats.num_prefill_tokens
        elapsed = now - self._drawn
        if elapsed > 0:
            self._rate = (num_tokens - self._num_tokens) / elapsed
        self._drawn = now
        self._num_tokens = num_tokens
        self._live.update(render(stats, self.num_done, self._num_requests, self._rate), refresh=True)


def render(stats: EngineStats, num_done: int, num_requests: int, tokens_per_s: float) -> Group:
    """Return the view: requests, blocks by state, and tokens of the last step."""
    blocks = blocks_bar(stats.num_used_blocks, stats.num_cached_blocks, stats.num_free_blocks)
    table = Table.grid(padding=(0, 3))
    table.add_row(
        "requests",
        f"{stats.num_running:,} running",
        f"{stats.num_waiting:,} waiting",
        f"{num_done:,} of {num_requests:,} done",
    )
    table.add_row(
        "blocks",
        f"[green]{stats.num_used_blocks:,} used[/]",
        f"[blue]{stats.num_cached_blocks:,} cached[/]",
        f"{stats.num_free_blocks:,} free, {stats.num_pinned_blocks:,} pinned",
    )
    table.add_row(
        "step",
        f"{stats.step_prefill_tokens:,} prompt tokens",
        f"{stats.step_decode_tokens:,} decoded",
        f"{tokens_per_s:,.0f} tokens/s",
    )
    table.add_row(
        "so far",
        f"{stats.prefix_hit_rate:.0%} prefix hits",
        f"{stats.num_recompute_preemptions + stats.num_swap_preemptions:,} preemptions",
        f"{stats.waste:.1%} of slots wasted",
    )
    return Group(
        ProgressBar(total=max(1, num_requests), completed=num_done, width=BAR_WIDTH + 9), blocks, table
    )


def blocks_bar(used: float, cached: float, free: float) -> Text:
    """Return a bar of blocks by state. The arguments are counts or shares."""
    bar = Text("blocks   ")
    total = max(used + cached + free, 1e-9)
    for count, mark, style in (
        (used, "\u2588", "green"),
        (cached, "\u2593", "blue"),
        (free, "\u2591", "dim"),
    ):
        bar.append(mark * round(BAR_WIDTH * count / total), style=style)
    return bar
