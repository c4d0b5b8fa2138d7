"""Timeline: a simulation over time, in intervals of equal length, and its plot."""

from __future__ import annotations

from pathlib import Path

from ..base.errors import ResourceError

NUM_INTERVALS = 512


def check_matplotlib() -> None:
    """Raise ResourceError if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ResourceError("a plot needs matplotlib: pip install 'paged[plots]'") from error


class Timeline:
    """The load of a simulated fleet over time, in NUM_INTERVALS intervals of equal length.

    The length of the intervals doubles whenever the simulation outgrows them. used_blocks, running and
    waiting hold the integral of a count over each interval; divided by the interval's length, this is the
    fleet's mean count. An idle replica counts as 0.
    """

    def __init__(self, interval: float = 1e-3) -> None:
        self.interval = interval  # seconds
        self.used_blocks = [0.0] * NUM_INTERVALS
        self.running = [0.0] * NUM_INTERVALS
        self.waiting = [0.0] * NUM_INTERVALS
        self.tokens = [0.0] * NUM_INTERVALS
        self.end = 0.0

    @property
    def _series(self) -> tuple[list[float], ...]:
        return self.used_blocks, self.running, self.waiting, self.tokens

    def add(self, start: float, end: float, used: int, running: int, waiting: int, num_tokens: int) -> None:
        """Add a step of one replica, from time `start` to time `end`."""
        while end >= NUM_INTERVALS * self.interval:
            self._double()
        self.end = max(self.end, end)
        for i in range(int(start / self.interval), int(end / self.interval) + 1):
            seconds = min(end, (i + 1) * self.interval) - max(start, i * self.interval)
            self.used_blocks[i] += used * seconds
            self.running[i] += running * seconds
            self.waiting[i] += waiting * seconds
            self.tokens[i] += num_tokens * seconds / (end - start) if end > start else num_tokens

    def _double(self) -> None:
        self.interval *= 2
        for series in self._series:
            halved = [a + b for a, b in zip(series[::2], series[1::2], strict=True)]
            series[:] = halved + [0.0] * (NUM_INTERVALS - len(halved))

    def plot(self, file: Path, num_blocks: int, title: str) -> None:
        """Write a PNG: requests, tokens per second, and the share of the fleet's num_blocks that is used."""
        from matplotlib.figure import Figure

        num = max(1, int(self.end / self.interval))  # the last interval is not complete
        times = [(i + 0.5) * self.interval for i in range(num)]
        rates = [[value / self.interval for value in series[:num]] for series in self._series]
        used, running, waiting, tokens = rates
        figure = Figure(figsize=(10, 8), layout="constrained")
        requests, speed, blocks = figure.subplots(3, 1, sharex=True)
        requests.plot(times, running, label="running")
        requests.plot(times, waiting, label="waiting")
        requests.set(title=title, ylabel="requests")
        requests.legend()
        speed.plot(times, tokens)
        speed.set(ylabel="tokens/s, prompt and output", ylim=(0, None))
        blocks.fill_between(times, [100 * value / num_blocks for value in used])
        blocks.set(ylabel="blocks used, %", ylim=(0, 100), xlabel="seconds")
        figure.savefig(file, format="png", dpi=100)
