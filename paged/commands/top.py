"""`paged top`: a live view of a server, from its metrics."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..base.errors import ResourceError
from .api_client import DEFAULT_URL
from .common import one_of
from .live_view import blocks_bar

if TYPE_CHECKING:
    from ..server.telemetry.scrape import Scrape

# Rows of the view: a histogram's heading and name.
LATENCIES = (
    ("first token", "time_to_first_token_seconds"),
    ("next token", "inter_token_latency_seconds"),
    ("whole request", "e2e_request_latency_seconds"),
    ("in the queue", "request_queue_time_seconds"),
    ("step", "step_time_seconds"),
)
QUANTILES = (0.5, 0.9, 0.99)
URL_HELP = f"Address of the server, such as other commands take it. [default: {DEFAULT_URL}]"
Buckets = Mapping[str, Mapping[float, float]]  # of histograms, by name


def top(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="The same as --url.", show_default=False)
    ] = None,
    url_option: Annotated[str | None, typer.Option("--url", help=URL_HELP)] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.01, max=3600.0)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view and exit.")] = False,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="PAGED_ADMIN_KEY", help="Key of a server's operator, where it has tenants."),
    ] = None,
) -> int:
    """Show what a server does: requests, tokens per second, latencies, memory. Ctrl-C ends it.

    Rates and latencies cover the last interval; with --once, latencies cover the time since the server's
    start. Without a terminal, views are printed one after the other. The server may also be vLLM's.
    """
    try:
        from ..server.telemetry.scrape import metrics_url, scrape
    except ImportError as error:
        raise ResourceError(f"paged top needs {error.name}: pip install 'paged[server]'") from None
    address = metrics_url(one_of("address", "--url", url, url_option) or DEFAULT_URL)
    console = Console()
    if once:
        before = scrape(address, admin_key)
        time.sleep(interval)
        console.print(view(address, before, scrape(address, admin_key), whole=True))
        return 0
    # The default of this process would end it with the cursor hidden.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    views = _views(address, interval, admin_key)
    try:
        first = next(views)
        if console.is_terminal:
            with Live(first, auto_refresh=False, console=console) as live:
                for shown in views:
                    live.update(shown, refresh=True)
        else:
            for shown in views:
                console.print(shown, "", sep="\n")
    except KeyboardInterrupt:
        pass
    return 0


def _views(address: str, interval: float, key: str | None) -> Iterator[Group]:
    """Yield a first view without rates at once, then one view for each interval, without end."""
    from ..server.telemetry.scrape import ScrapeError, scrape

    before = scrape(address, key)
    yield view(address, before, before)
    while True:
        time.sleep(interval)
        try:
            after = scrape(address, key)
        except ScrapeError as error:
            yield Group(view(address, before, before), Text(str(error), style="red"))
            continue
        yield view(address, before, after)
        before = after


def view(address: str, before: Scrape, after: Scrape, *, whole: bool = False) -> Group:
    """Return the view of a server between two scrapes.

    whole: whether latencies cover the time since the server's start.
    """
    models = ", ".join(after.model_names)
    engines = f", {len(after.engines)} engines" if len(after.engines) > 1 else ""
    return Group(
        Text(f"{models} at {address}{engines}", style="bold"),
        _blocks(after),
        _counts(before, after),
        _latencies({} if whole or before is after else before.buckets, after.buckets),
    )


def _blocks(after: Scrape) -> Text:
    states = after.by_label.get("kv_cache_blocks")
    if states:
        return blocks_bar(*(states.get(state, 0.0) for state in ("used", "cached", "free")))
    used = after.values.get("kv_cache_usage_perc", 0.0) / len(after.engines)
    return blocks_bar(used, 0.0, 1.0 - used)


def _counts(before: Scrape, after: Scrape) -> Table:
    elapsed = after.at - before.at

    def gained(name: str) -> float:
        # A server that was started anew counts from zero.
        return max(0.0, after.values.get(name, 0.0) - before.values.get(name, 0.0))

    def rate(name: str) -> str:
        return f"{gained(name) / elapsed:,.0f}" if elapsed > 0 else "–"

    def total(name: str) -> float:
        return after.values.get(name, 0.0)

    num_engines = len(after.engines)
    reasons = after.by_label.get("request_success", {})
    finished = ", ".join(f"{count:,.0f} {why}" for why, count in reasons.items() if count)
    refused = after.by_label.get("requests_refused", {})
    refusals = ", ".join(f"{count:,.0f} {why}" for why, count in refused.items() if count)
    queried = gained("prefix_cache_queries")
    hits = gained("prefix_cache_hits") / queried if queried else None
    ever = total("prefix_cache_hits") / max(total("prefix_cache_queries"), 1.0)
    table = Table.grid(padding=(0, 3))

    def add_row(*cells: str) -> None:
        table.add_row(*map(Text, cells))  # brackets are no markup

    add_row(
        "requests",
        f"{total('num_requests_running'):,.0f} running",
        f"{total('num_requests_waiting'):,.0f} waiting",
        f"{rate('request_success')} finished/s",
    )
    add_row("so far", finished or "none finished", "", f"refused: {refusals or 'none'}")
    add_row(
        "tokens/s",
        f"{rate('generation_tokens')} generated",
        f"{rate('prompt_tokens')} of prompts",
        f"{rate('prompt_tokens_cached')} of them cached",
    )
    add_row(
        "memory",
        f"{total('kv_cache_usage_perc') / num_engines:.1%} of KV in use",
        f"{'–' if hits is None else f'{hits:.0%}'} prefix hits, {ever:.0%} ever",
        f"{total('num_preemptions'):,.0f} preemptions",
    )
    return table


def _latencies(before: Buckets, after: Buckets) -> Table:
    from ..server.telemetry.scrape import quantile

    table = Table.grid(padding=(0, 3))
    table.add_row("", *(Text(f"p{share * 100:.0f}", justify="right") for share in QUANTILES))
    for heading, name in LATENCIES:
        if name in after:
            shown = (_seconds(quantile(before.get(name, {}), after[name], share)) for share in QUANTILES)
            table.add_row(heading, *(Text(text, justify="right") for text in shown))
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:,.1f} ms" if value < 1 else f"{value:,.2f} s"
