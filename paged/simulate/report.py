"""Reports: the figures of simulations as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# What the counts of refused requests mean, and what changes them.
_REASONS = {
    "longer_than_max_model_len": "have a prompt that is longer than max_model_len",
    "larger_than_kv_cache": "need more KV blocks than there are: raise num_blocks",
    "max_waiting": "came when max_waiting requests were waiting",
    "earlier_turn_refused": "follow a refused turn of their conversation",
}
TIMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}


def report(summary: dict[str, Any]) -> str:
    """Return the figures of one simulation as text."""
    s = summary
    rows = [["milliseconds", "p50", "p90", "p99", "mean"]]
    for tenant, times in [("", s), *s["tenants"].items()]:
        for name, label in TIMES.items():
            rows.append([f"{label} {tenant}".strip(), *_milliseconds(times[name])])
    represented = s["replicas"] - s["simulated_replicas"]
    return "\n".join(
        [
            f"{s['finished']:,} requests finished, {s['refused']:,} refused, in {s['duration_s']:,.1f} s of "
            f"virtual time on {s['simulated_replicas']:,} x {s['num_blocks']:,} blocks"
            + (f", which stand for {s['replicas']:,}" if represented else ""),
            *(f"refused      {n:,} {_REASONS[name]}" for name, n in s["refused_because"].items() if n),
            "",
            *table(rows),
            "",
            f"throughput   {s['requests_per_s']:,.2f} requests/s, {s['output_tokens_per_s']:,.0f} output "
            f"tokens/s, {s['total_tokens_per_s']:,.0f} tokens/s with prompts",
            f"utilisation  replicas busy {s['busy_share']:.1%}; blocks used {s['block_share_mean']:.1%} in "
            f"the mean, {s['block_share_peak']:.1%} at most",
            f"cache        {s['hit_rate']:.1%} of prompt tokens were hits; {s['preemptions']:,} preemptions",
            *_deaths(s),
            f"steps        {s['steps']:,} with {s['tokens_per_step']:,.1f} tokens each; simulated in "
            f"{s['wall_s']:,.1f} s",
        ]
    )


def _deaths(s: dict[str, Any]) -> Iterable[str]:
    if s["deaths"]:
        yield f"deaths       {s['deaths']:,} of replicas; {s['moved_requests']:,} requests were moved"


def sweep_report(name: str, summaries: Sequence[tuple[object, dict[str, Any]]]) -> str:
    """Return a table with a row for each value of the varied option."""
    percentiles = (cell for label in TIMES.values() for cell in (f"{label} p50 ms", "p99"))
    shares = ("busy %", "blocks %", "hits %")
    rows = [[name, "req/s", "tokens/s", *percentiles, *shares, "preemptions", "refused"]]
    for value, s in summaries:
        times = (s[time] and (s[time]["p50"], s[time]["p99"]) for time in TIMES)
        rows.append(
            [
                str(value),
                f"{s['requests_per_s']:,.2f}",
                f"{s['output_tokens_per_s']:,.0f}",
                *(cell for pair in times for cell in (map(_ms, pair) if pair else ("-", "-"))),
                *(f"{100 * s[share]:.1f}" for share in ("busy_share", "block_share_mean", "hit_rate")),
                f"{s['preemptions']:,}",
                f"{s['refused']:,}",
            ]
        )
    return "\n".join(table(rows))


def table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yield aligned lines, the first row underlined."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        yield "  ".join(cells)
        if i == 0:
            yield "  ".join("-" * width for width in widths)


def _milliseconds(times: dict[str, float] | None) -> Iterable[str]:
    return ("-",) * 4 if times is None else map(_ms, times.values())


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"
