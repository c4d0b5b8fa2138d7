"""Workload: the requests of a simulation and their arrival times, from distributions or from a trace.

Traces are recorded requests, one JSON object per line.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..base.errors import ConfigError, FileError, RequestError
from ..base.validation import changed, check_int, check_number

NAMES = ("timestamp", "input_tokens", "prompt_token_ids", "output_tokens", "tenant", "priority", "prefix_id")
MAX_TOKENS = 2**24  # a longer request is a mistake, and its token ids would fill the memory
MAX_TOKEN_ID = 2**31 - 1


class TraceLine(NamedTuple):
    """One request of a trace.

    timestamp: seconds since the first request.
    """

    timestamp: float
    input_tokens: int
    prompt_token_ids: list[int] | None
    output_tokens: int
    tenant: str
    priority: float
    prefix_id: str | int | None


def read_trace(file: Path) -> list[TraceLine]:
    """Return the requests of a trace file, sorted by time. Blank lines are skipped.

    Raises FileError naming file and line, OSError if the file cannot be read.
    """
    lines = []
    with file.open("rb") as source:
        for number, line in enumerate(source, start=1):
            try:
                if line.strip():
                    lines.append(_parse(line))
            except (ValueError, RecursionError) as error:  # from the decoder, json, and our own
                raise FileError(f"{file}:{number}: {error}") from error
    if not lines:
        raise FileError(f"{file}: there is no request in it")
    lines.sort(key=lambda line: line.timestamp)
    start = lines[0].timestamp
    return [line._replace(timestamp=line.timestamp - start) for line in lines]


def _parse(line: bytes) -> TraceLine:
    value = json.loads(line.decode("utf-8-sig"))
    if not isinstance(value, dict):
        raise RequestError('a line must be an object such as {"timestamp": 0, "input_tokens": 9, ...}')
    if unknown := sorted(set(value) - set(NAMES)):
        raise RequestError(f"unknown {unknown[0]!r}; a line has {', '.join(NAMES)}")
    for name in ("timestamp", "output_tokens"):
        if name not in value:
            raise RequestError(f"{name} is missing")
    if ("input_tokens" in value) == ("prompt_token_ids" in value):
        raise RequestError("a line must have either input_tokens or prompt_token_ids")
    tokens = value.get("prompt_token_ids")
    num_tokens = value.get("input_tokens") if tokens is None else _num_tokens(tokens)
    tenant = value.get("tenant", "")
    prefix_id = value.get("prefix_id")
    if not isinstance(tenant, str):
        raise RequestError(f"tenant must be a string, got {tenant!r}")
    if prefix_id is not None and not isinstance(prefix_id, str | int):
        raise RequestError(f"prefix_id must be a string or an int, got {prefix_id!r}")
    if prefix_id is not None and tokens is not None:
        raise RequestError("prompt_token_ids already shows shared prefixes; prefix_id needs input_tokens")
    return TraceLine(
        timestamp=check_number(RequestError, "timestamp", value["timestamp"], -math.inf),
        input_tokens=check_int(RequestError, "input_tokens", num_tokens, 1, MAX_TOKENS),
        prompt_token_ids=tokens,
        output_tokens=check_int(RequestError, "output_tokens", value["output_tokens"], 1, MAX_TOKENS),
        tenant=tenant,
        priority=check_number(RequestError, "priority", value.get("priority", 0.0), -math.inf),
        prefix_id=prefix_id,
    )


def _num_tokens(tokens: Any) -> int:
    if not isinstance(tokens, list) or not tokens:
        raise RequestError(f"prompt_token_ids must be a list of ints, got {tokens!r}")
    for token in tokens:
        check_int(RequestError, "prompt_token_ids", token, 0, MAX_TOKEN_ID)
    return len(tokens)


ARRIVALS = ("poisson", "bursty")
DEFAULT_BURSTINESS = 0.25
# Token ids are placeholders. A prompt's own part begins with a unique id, so no later block is shared:
# the digest of a block depends on all tokens before it.
SAMPLED = -1
FILLER = 0
FIRST_OWN = -3

Turn = tuple[int, int]  # new prompt tokens, output tokens


@dataclass(slots=True)
class Arrival:
    """A request at its arrival time.

    following: the later turns of its conversation.
    """

    time: float
    token_ids: list[int]
    num_output_tokens: int
    tenant: str = ""
    priority: float = 0.0
    following: Sequence[Turn] = ()

    def next_turn(self, history: list[int], now: float) -> Arrival:
        """Return the next turn, whose prompt begins with the conversation so far."""
        (own, output), *following = self.following
        prompt = history + [FILLER] * own
        return Arrival(now, prompt, output, self.tenant, self.priority, following)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests that a fleet gets. A length is fixed:N, uniform:LOW-HIGH or lognormal:MEAN,SIGMA.

    requests: number of requests, including later turns of conversations.
    rate: requests per second; with inf, all arrive at once. With several turns, conversations begin at rate /
        turns.
    arrivals: "poisson", or "bursty" for intervals from a gamma distribution.
    burstiness: shape of the gamma distribution; 1 is poisson, smaller is burstier; None takes 0.25.
    input_len: prompt tokens of a request, without shared prefix and earlier turns.
    output_len: output tokens of a request.
    prefixes: number of system prompts, used with weights 1, 1/2, 1/3, ...; 0 for none.
    prefix_len: tokens of a system prompt, or of the prefix shared by lines of a trace with the same
        prefix_id.
    turns: requests of a conversation; each prompt contains all earlier turns.
    think_time: seconds from an answer to the next turn.
    tenants: shares of the requests by tenant, such as a=3,b=1.
    trace: a JSONL file to take the requests from. Lines have timestamp in seconds, output_tokens, either
        input_tokens or prompt_token_ids, and optionally tenant, priority (the lowest first) and prefix_id.
    seed: seed of all random numbers.

    Raises ConfigError naming the value and what is allowed; RequestError for a trace's line.
    """

    requests: int = 1000
    rate: float = 10.0
    arrivals: str = "poisson"
    burstiness: float | None = None
    input_len: str = "lognormal:500,0.8"
    output_len: str = "lognormal:150,0.8"
    prefixes: int = 0
    prefix_len: int = 512
    turns: int = 1
    think_time: float = 10.0
    tenants: Mapping[str, float] = field(default_factory=dict)
    trace: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("requests", 1), ("prefixes", 0), ("prefix_len", 1), ("turns", 1), ("seed", 0)):
            check_int(ConfigError, name, getattr(self, name), low)
        if self.rate != math.inf:
            check_number(ConfigError, "rate", self.rate, 0.0, above=True)
        check_number(ConfigError, "think_time", self.think_time, 0.0)
        if self.arrivals not in ARRIVALS:
            raise ConfigError(f"arrivals must be one of {', '.join(ARRIVALS)}; got {self.arrivals!r}")
        if self.burstiness is not None:
            check_number(ConfigError, "burstiness", self.burstiness, 0.0, above=True)
        for name in ("input_len", "output_len"):
            new_length(name, getattr(self, name), random.Random())
        for tenant, share in self.tenants.items():
            check_number(ConfigError, f"the share of tenant {tenant!r}", share, 0.0, above=True)
        self._check_has_effect()

    def _check_has_effect(self) -> None:
        """Raise ConfigError for an option that would change nothing."""
        conditions = {
            "arrivals": (self.rate < math.inf, "a finite rate"),
            "burstiness": (self.arrivals == "bursty", "arrivals 'bursty'"),
            "prefix_len": (self.prefixes > 0 or self.trace is not None, "prefixes, or a trace"),
            "think_time": (self.turns > 1, "turns above 1"),
        }
        for name in changed(self):
            if self.trace is not None and name not in ("trace", "prefix_len", "seed"):
                raise ConfigError(f"the trace determines the requests; {name} must be left out with it")
            holds, condition = conditions.get(name, (True, ""))
            if not holds:
                raise ConfigError(f"{name} needs {condition}; leave it out, or give that")

    def sliced(self, share: float) -> Self:
        """Return a workload with as many requests at a share of the rate. Raises ConfigError if it is inf."""
        if self.trace is not None or self.rate == math.inf:
            given = "a trace" if self.trace is not None else "rate inf"
            raise ConfigError(f"slice needs a finite rate, of which it takes its share; got {given}")
        return replace(self, rate=self.rate * share)

    def open(self) -> tuple[int, Iterator[Arrival]]:
        """Return the number of requests, and an iterator over the arrivals by time.

        Later turns of a conversation are not among the arrivals; see `Arrival.following`.
        """
        if self.trace is None:
            return self.requests, self._synthetic()
        lines = read_trace(Path(self.trace))
        if "prefix_len" in changed(self) and all(line.prefix_id is None for line in lines):
            raise ConfigError("prefix_len needs lines of the trace with a prefix_id; leave it out")
        return len(lines), _replay(lines, self.prefix_len)

    def _synthetic(self) -> Iterator[Arrival]:
        rng = random.Random(self.seed)
        interval = _interval(self, rng)
        input_len = new_length("input_len", self.input_len, rng)
        output_len = new_length("output_len", self.output_len, rng)
        prefixes = [_shared(k, self.prefix_len) for k in range(self.prefixes)]
        popularity = [*itertools.accumulate(1 / rank for rank in range(1, self.prefixes + 1))]
        tenants = [*self.tenants]
        shares = [*itertools.accumulate(self.tenants.values())]
        now = 0.0
        for number, first in enumerate(range(0, self.requests, self.turns)):
            now += interval()
            num_turns = min(self.turns, self.requests - first)
            (own, output), *following = [(input_len(), output_len()) for _ in range(num_turns)]
            prompt = _own(number, own)
            if prefixes:
                prompt = rng.choices(prefixes, cum_weights=popularity)[0] + prompt
            tenant = rng.choices(tenants, cum_weights=shares)[0] if tenants else ""
            yield Arrival(now, prompt, output, tenant, 0.0, following)


def _own(number: int, length: int) -> list[int]:
    return [FIRST_OWN - number, *[FILLER] * (length - 1)]


def _shared(number: int, length: int) -> list[int]:
    return [number + 1, *[FILLER] * (length - 1)]


def _interval(workload: Workload, rng: random.Random) -> Callable[[], float]:
    """Return a source of the seconds from one conversation to the next."""
    if workload.rate == math.inf:
        return lambda: 0.0
    rate = workload.rate / workload.turns
    if workload.arrivals == "poisson":
        return lambda: rng.expovariate(rate)
    shape = workload.burstiness or DEFAULT_BURSTINESS
    return lambda: rng.gammavariate(shape, 1 / (rate * shape))


def _replay(lines: list[TraceLine], prefix_len: int) -> Iterator[Arrival]:
    numbers: dict[str | int, int] = {}
    for number, line in enumerate(lines):
        tokens = line.prompt_token_ids
        if tokens is None:
            tokens = _own(number, line.input_tokens)
            if line.prefix_id is not None:
                prefix = _shared(numbers.setdefault(line.prefix_id, len(numbers)), prefix_len)
                # The last token always differs between requests.
                tokens = prefix[: line.input_tokens - 1] + tokens[: max(1, line.input_tokens - prefix_len)]
        yield Arrival(line.timestamp, tokens, line.output_tokens, line.tenant, line.priority)


def new_length(name: str, text: str, rng: random.Random) -> Callable[[], int]:
    """Return a source of lengths of at least 1, from a text such as "lognormal:500,0.8".

    SIGMA is the standard deviation of the logarithm. Raises ConfigError.
    """
    kind, _, rest = text.partition(":")
    parts = rest.split("-" if kind == "uniform" else ",")
    try:
        values = [float(part) if kind == "lognormal" else int(part) for part in parts]
    except ValueError:
        values = []
    if len(values) != {"fixed": 1, "uniform": 2, "lognormal": 2}.get(kind):
        forms = "fixed:N, uniform:LOW-HIGH, lognormal:MEAN,SIGMA"
        raise ConfigError(f"{name} must be one of {forms}; got {text!r}")
    first = check_number(ConfigError, name, values[0], 1.0)
    last = values[-1]
    if kind == "fixed":
        return lambda: int(first)
    if kind == "uniform":
        check_number(ConfigError, f"{name}'s upper end", last, first)
        return lambda: rng.randint(int(first), int(last))
    check_number(ConfigError, f"{name}'s sigma", last, 0.0, 10.0)
    mu = math.log(first) - last**2 / 2  # so that `first` is the mean
    return lambda: max(1, round(rng.lognormvariate(mu, last)))


def read_shares(name: str, texts: Sequence[str]) -> dict[str, float]:
    """Return numbers by tenant from texts such as "a=3,b=1". Raises ConfigError."""
    shares: dict[str, float] = {}
    text = ",".join(texts)
    for part in text.split(","):
        tenant, equals, value = part.partition("=")
        try:
            share = float(value)
        except ValueError:
            share = math.nan
        if not (tenant and equals and math.isfinite(share)) or tenant in shares:
            raise ConfigError(f"{name} must be a number for each tenant such as a=3,b=1; got {text!r}")
        shares[tenant] = share
    return shares
