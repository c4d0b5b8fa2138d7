"""Scrape: the metrics of a server at one moment, read back from GET /metrics, of `paged` or of vLLM."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ...base.errors import ConfigError, PagedError

TIMEOUT_S = 5.0
MAX_BYTES = 16 * 2**20
_FIRST = "num_requests_running"  # the gauge by which the prefix of the names is found


class ScrapeError(PagedError):
    """No server answers at the address, or its answer is not a server's metrics."""

    MAX_LENGTH = 500


@dataclass(slots=True)
class Scrape:
    """The metrics of all engines together, by name without the prefix.

    at: the time of the scrape, by time.monotonic.
    values: gauges and counters, summed over their labels.
    by_label: gauges and counters, by name and by the value of one of their labels, such as state or reason.
    buckets: the cumulative counts of each histogram, by upper bound.
    """

    at: float
    model_names: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    values: dict[str, float] = field(default_factory=dict)
    by_label: dict[str, dict[str, float]] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)


def metrics_url(url: str) -> str:
    """Return the address of the metrics. Raises ConfigError unless `url` is an HTTP URL.

    url: the URL of the server, of its API with /v1, or of the metrics themselves.
    """
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"the address of a server is a URL such as http://127.0.0.1:8000, got {url!r}")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return parts._replace(path=path if path.endswith("/metrics") else f"{path}/metrics").geturl()


def scrape(url: str, key: str | None = None) -> Scrape:
    """Fetch the metrics from an address, with a key if one is given. Raises ScrapeError."""
    request = Request(url)
    if key is not None:  # not for another server, should this one redirect
        request.add_unredirected_header("authorization", f"Bearer {key}")
    try:
        with urlopen(request, timeout=TIMEOUT_S) as response:
            body: bytes = response.read(MAX_BYTES)
    except HTTPError as error:
        needs_key = "; give the key of its operator by PAGED_ADMIN_KEY" if error.code in (401, 403) else ""
        raise ScrapeError(f"{url} answers {error.code} {error.reason}{needs_key}") from None
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise ScrapeError(f"no server answers at {url}: {reason}") from None
    return parse(url, body)


def parse(url: str, body: bytes) -> Scrape:
    """Parse metrics in Prometheus's text format. Raises ScrapeError if an engine server has other ones."""
    try:
        families = [*text_string_to_metric_families(body.decode("utf-8", "replace"))]
    except Exception:  # whatever the parser stumbles on
        raise ScrapeError(f"{url} does not answer in the text format of Prometheus") from None
    found = [family.name.partition(":")[0] for family in families if family.name.endswith(f":{_FIRST}")]
    if not found:
        raise ScrapeError(f"{url} has no metrics of an engine: there is no …:{_FIRST}")
    own = [family for family in families if family.name.startswith(f"{found[0]}:")]
    result = Scrape(time.monotonic())
    for family in own:
        _add(result, family, family.name.removeprefix(f"{found[0]}:"))
    labels = [
        sample.labels for family in own if family.name.endswith(f":{_FIRST}") for sample in family.samples
    ]
    result.model_names = tuple(sorted({_printable(label.get("model_name", "")) for label in labels}))
    result.engines = tuple(sorted({label.get("engine", "0") for label in labels})) or ("0",)
    return result


def quantile(before: Mapping[float, float], after: Mapping[float, float], share: float) -> float | None:
    """Return a quantile of the values that a histogram counted between two scrapes; None without values.

    As in Prometheus, values are assumed to be evenly distributed within a bucket. Values beyond the last
    bound count as that bound.
    """
    bounds = sorted(after)
    counts = [after[bound] - before.get(bound, 0.0) for bound in bounds]
    total = counts[-1] if counts else 0.0
    if total <= 0:
        return None
    rank = share * total
    start = 0.0
    below = 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank:
            if math.isinf(bound):
                return start
            return start + (bound - start) * (rank - below) / max(count - below, 1e-9)
        start = bound
        below = count
    return start


def _add(result: Scrape, family: Metric, name: str) -> None:
    if family.type == "histogram":
        buckets = defaultdict[float, float](float)
        for sample in family.samples:
            if sample.name.endswith("_bucket") and "le" in sample.labels:
                buckets[float(sample.labels["le"])] += sample.value
        result.buckets[name] = dict(buckets)
        return
    by_label = defaultdict[str, float](float)
    for sample in family.samples:
        if sample.name.endswith("_created"):  # of vLLM
            continue
        result.values[name] = result.values.get(name, 0.0) + sample.value
        for label in ("state", "reason", "finished_reason"):
            if label in sample.labels:
                by_label[_printable(sample.labels[label])] += sample.value
    if by_label:
        result.by_label[name] = dict(by_label)


def _printable(text: str) -> str:
    """Escape what could command a terminal: the server may be a stranger's."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
