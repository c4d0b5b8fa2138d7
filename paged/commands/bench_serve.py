"""`paged bench serve`: a load of streamed requests on a server, and the figures of vLLM's `bench serve`."""

from __future__ import annotations

import json
import math
import random
import statistics
import string
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.errors import FileError, PagedError
from ..protocol.jobs import check_writable, read_jobs
from . import common
from .api_client import DEFAULT_URL, ApiAddress, ApiClient, has_text
from .common import CliError, FailedError
from .options import with_options

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
WIDTH = 50
# Every vocabulary has these token ids.
_TOKEN_IDS = range(1000)

InputLen = Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Most tokens of an output.")]
NumRequests = Annotated[int, typer.Option(min=1, help="Number of requests.")]
ENDPOINT_HELP = f"Where requests are sent: {COMPLETIONS}, with token ids, or {CHATS}, with words."
RATE_HELP = "Requests a second, at random times as in a Poisson process; inf sends all at once."
CONCURRENCY_HELP = "Most requests at a time; the others wait here. [default: no limit]"
FILE_HELP = """Take the prompts from this file, again and again, as `paged generate --prompts` does.
[default: random ones]"""
EOS_HELP = "Let EOS end no output, by a field that OpenAI does not have. [default: off]"
SAVE_HELP = "Write the figures and those of each request to this file as JSON. [default: none]"


@dataclass(slots=True)
class TimedAnswer:
    """The outcome of a request. Times are from time.perf_counter.

    parts: the arrival times of the parts of the text.
    """

    started: float
    ended: float = 0.0
    parts: list[float] = field(default_factory=list)
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from the request to the first part of the text."""
        return self.parts[0] - self.started

    @property
    def itl(self) -> list[float]:
        """The seconds between consecutive parts of the text."""
        return [b - a for a, b in zip(self.parts, self.parts[1:], strict=False)]


@with_options((ApiAddress, ("url", "api_key")), defaults={"url": DEFAULT_URL})
def serve(
    model: common.ModelArgument = None,
    model_option: Annotated[
        str | None, typer.Option("--model", help="Name of the model. [default: the first of the server]")
    ] = None,
    endpoint: Annotated[str, typer.Option(help=ENDPOINT_HELP)] = COMPLETIONS,
    num_prompts: NumRequests = 1000,
    request_rate: Annotated[float, typer.Option(help=RATE_HELP)] = math.inf,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help=CONCURRENCY_HELP)] = None,
    random_input_len: InputLen = 1024,
    random_output_len: OutputLen = 128,
    prompts: Annotated[Path | None, typer.Option(help=FILE_HELP)] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help=EOS_HELP)] = False,
    seed: Annotated[int, typer.Option(help="Of the random prompts and times.")] = 0,
    save_result: Annotated[Path | None, typer.Option(help=SAVE_HELP)] = None,
    **options: Any,
) -> int:
    """Send streamed requests to a server with OpenAI's API, and measure rates and latencies."""
    if endpoint not in (COMPLETIONS, CHATS):
        raise CliError(f"--endpoint is {COMPLETIONS} or {CHATS}, got {endpoint}")
    if not request_rate > 0:
        raise CliError(f"--request-rate is above 0, or inf, got {request_rate}")
    if save_result is not None:
        check_writable(save_result)
    is_chat = endpoint == CHATS
    rng = random.Random(seed)
    given = (
        _prompts(rng, num_prompts, random_input_len, is_chat)
        if prompts is None
        else _from_file(prompts, is_chat)
    )
    client = ApiClient(options["url"] or DEFAULT_URL, options["api_key"])
    name = common.one_model(model, model_option) or client.first_model()
    common_fields: dict[str, Any] = {"model": name, "max_tokens": random_output_len, "stream": True}
    common_fields["stream_options"] = {"include_usage": True}
    if ignore_eos:
        common_fields["ignore_eos"] = True
    bodies = [common_fields | given[i % len(given)] for i in range(num_prompts)]
    gaps = [rng.expovariate(request_rate) if request_rate < math.inf else 0.0 for _ in bodies]
    answers, duration = _send(client, endpoint.removeprefix("/v1"), bodies, gaps, max_concurrency)
    done = [answer for answer in answers if answer.error is None]
    errors = [answer.error for answer in answers if answer.error is not None]
    if not done:
        raise FailedError(f"all {num_prompts} requests failed, the first with: {errors[0]}")
    figures = figures_of(done, duration) | {"failed": len(errors)}
    terms = {
        "request_rate": request_rate if request_rate < math.inf else "inf",
        "max_concurrency": max_concurrency,
    }
    print("\n".join(report(figures | terms)))
    if save_result is not None:
        whole = {"model_id": name, "num_prompts": num_prompts, **terms, **figures, **_details(answers)}
        save_result.write_text(json.dumps(whole) + "\n", encoding="utf-8")
    if errors:
        common.complain(f"{len(errors)} of {num_prompts} requests failed, the first with: {errors[0]}")
    return common.EXIT_FAILED if errors else 0


def _prompts(rng: random.Random, number: int, length: int, is_chat: bool) -> list[dict[str, Any]]:
    """Return the fields of random prompts.

    Chats get words of one letter, which are one token each in most tokenizers.
    """
    if is_chat:
        return [_chat(" ".join(rng.choices(string.ascii_letters, k=length))) for _ in range(number)]
    return [{"prompt": rng.choices(_TOKEN_IDS, k=length)} for _ in range(number)]


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _from_file(file: Path, is_chat: bool) -> list[dict[str, Any]]:
    """Return the fields of the prompts of a file. Raises FileError or OSError."""
    jobs = [job.prompt for job in read_jobs(file, {})]
    if not jobs:
        raise FileError(f"{file} has no prompts")
    if not is_chat:
        return [{"prompt": next(iter(prompt.values()))} for prompt in jobs]
    if not all("prompt" in prompt for prompt in jobs):
        raise FileError(f"{file} has prompts of token ids, which {CHATS} does not take")
    return [_chat(prompt["prompt"]) for prompt in jobs]


def _send(
    client: ApiClient,
    path: str,
    bodies: Sequence[Mapping[str, Any]],
    gaps: Sequence[float],
    max_concurrency: int | None,
) -> tuple[list[TimedAnswer], float]:
    """Send each body after its gap. Return the answers, and the seconds until the last one."""
    started = time.perf_counter()
    due = started
    futures: list[Future[TimedAnswer]] = []
    with ThreadPoolExecutor(max_concurrency or len(bodies)) as threads:
        for body, gap in zip(bodies, gaps, strict=True):
            due += gap
            time.sleep(max(0.0, due - time.perf_counter()))
            futures.append(threads.submit(_ask, client, path, body))
    return [future.result() for future in futures], time.perf_counter() - started


def _ask(client: ApiClient, path: str, body: Mapping[str, Any]) -> TimedAnswer:
    """Send one request and read its answer."""
    answer = TimedAnswer(time.perf_counter())
    try:
        with client.request("POST", path, body) as exchange:
            for event in exchange.events():
                if has_text(event):
                    answer.parts.append(time.perf_counter())
                if usage := event.get("usage"):
                    answer.num_input_tokens = int(usage["prompt_tokens"])
                    answer.num_output_tokens = int(usage["completion_tokens"])
        if not answer.parts:
            answer.error = "the answer has no text"
        elif not answer.num_output_tokens:
            answer.error = "the answer has no usage, from which tokens are counted"
    except PagedError as error:
        answer.error = str(error)
    except (LookupError, TypeError, ValueError):
        answer.error = "the usage of the answer has no counts of tokens"
    answer.ended = time.perf_counter()
    return answer


def figures_of(answers: Sequence[TimedAnswer], duration: float) -> dict[str, Any]:
    """Return the results of a load test, under the names of vLLM's JSON."""
    from ..simulate.statistics import percentile

    num_input = sum(answer.num_input_tokens for answer in answers)
    num_output = sum(answer.num_output_tokens for answer in answers)
    figures = {
        "duration": duration,
        "completed": len(answers),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(answers) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": _most_parts_in_a_second(answers),
        "max_concurrent_requests": _most_at_once(answers),
    }
    latencies = {
        "ttft": [answer.ttft for answer in answers],
        "tpot": [
            (answer.parts[-1] - answer.parts[0]) / (answer.num_output_tokens - 1)
            for answer in answers
            if answer.num_output_tokens > 1
        ],
        "itl": [gap for answer in answers for gap in answer.itl],
    }
    for name, seconds in latencies.items():
        values = sorted(1000 * value for value in seconds) or [0.0]
        figures[f"mean_{name}_ms"] = statistics.fmean(values)
        figures[f"median_{name}_ms"] = percentile(values, 50)
        figures[f"std_{name}_ms"] = statistics.pstdev(values)
        figures[f"p99_{name}_ms"] = percentile(values, 99)
    return figures


def _most_parts_in_a_second(answers: Sequence[TimedAnswer]) -> float:
    """Return the most parts of texts that came in one of the seconds since the first request."""
    first = min(answer.started for answer in answers)
    return float(max(Counter(int(at - first) for answer in answers for at in answer.parts).values()))


def _most_at_once(answers: Sequence[TimedAnswer]) -> int:
    """Return the most requests that were open at a time."""
    changes = sorted(
        change for answer in answers for change in ((answer.started, 1), (answer.ended, -1))
    )  # at the same time, ends come first
    return max(accumulate(number for _, number in changes))


def report(figures: Mapping[str, Any]) -> list[str]:
    """Return the lines that vLLM prints for these results."""
    lines = [
        " Serving Benchmark Result ".center(WIDTH, "="),
        _row("Successful requests:", figures["completed"]),
        _row("Failed requests:", figures["failed"]),
    ]
    if figures["max_concurrency"] is not None:
        lines.append(_row("Maximum request concurrency:", figures["max_concurrency"]))
    if figures["request_rate"] != "inf":
        lines.append(_row("Request rate configured (RPS):", float(figures["request_rate"])))
    lines += [
        _row("Benchmark duration (s):", figures["duration"]),
        _row("Total input tokens:", figures["total_input_tokens"]),
        _row("Total generated tokens:", figures["total_output_tokens"]),
        _row("Request throughput (req/s):", figures["request_throughput"]),
        _row("Output token throughput (tok/s):", figures["output_throughput"]),
        _row("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"]),
        _row("Peak concurrent requests:", float(figures["max_concurrent_requests"])),
        _row("Total token throughput (tok/s):", figures["total_token_throughput"]),
    ]
    for heading, name in (
        ("Time to First Token", "ttft"),
        ("Time per Output Token (excl. 1st token)", "tpot"),
        ("Inter-token Latency", "itl"),
    ):
        lines.append(heading.center(WIDTH, "-"))
        lines += [
            _row(f"{label} {name.upper()} (ms):", figures[f"{label.lower()}_{name}_ms"])
            for label in ("Mean", "Median", "P99")
        ]
    return [*lines, "=" * WIDTH]


def _row(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def _details(answers: Sequence[TimedAnswer]) -> dict[str, list[Any]]:
    """Return what is known of each request, in vLLM's names."""
    return {
        "input_lens": [answer.num_input_tokens for answer in answers],
        "output_lens": [answer.num_output_tokens for answer in answers],
        "ttfts": [answer.ttft if answer.parts else 0.0 for answer in answers],
        "itls": [answer.itl for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }
