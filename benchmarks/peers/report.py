"""The rows of a table, from the runs of all rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.fleet import Way

Run = dict[str, Any]  # what Server.run answers
Row = dict[str, Any]


def summarise(
    runs: Mapping[Way, Sequence[Run]], least: Mapping[Way, float], num_prompt_tokens: int, num_new_tokens: int
) -> list[Row]:
    """Return a row for each way: medians of its rounds, and the gain of this engine in the same precision.

    least: the least seconds of any schedule.
    """
    return [
        {
            "way": str(way),
            "tokens/s": num_new_tokens / seconds,
            "total/s": (num_prompt_tokens + num_new_tokens) / seconds,
            "TTFT s": statistics.median(statistics.mean(run["first_token_s"]) for run in found),
            "worst": statistics.median(max(run["first_token_s"]) for run in found),
            "peak MiB": max(run["peak_rss_mib"] for run in found),
            "of limit": least[way] / seconds,
            **gain(runs, way),
        }
        for way, found in runs.items()
        if (seconds := statistics.median(run["seconds"] for run in found))
    ]


def gain(runs: Mapping[Way, Sequence[Run]], way: Way) -> Row:
    """Return how much faster paged is in the same precision: the median over the rounds, and the range."""
    ours = runs.get(Way("paged", way.dtype))
    if ours is None or way.system == "paged":
        return {"paged is faster by": None, "range": None}
    ratios = [t["seconds"] / o["seconds"] for o, t in zip(ours, runs[way], strict=True)]
    return {"paged is faster by": statistics.median(ratios), "range": f"{min(ratios):.2f}-{max(ratios):.2f}"}
