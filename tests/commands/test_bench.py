"""`paged bench`: figures that follow from counts and times, and prompts that follow from the seed."""

from __future__ import annotations

import json
import statistics

import pytest

from paged import LLMEngine
from paged.commands import common
from paged.commands.bench_serve import TimedAnswer, figures_of


@pytest.fixture(scope="module")
def engine():
    return LLMEngine("demo", num_blocks=64, device="cpu", seed=5)


@pytest.fixture
def calls(engine, monkeypatch):
    """Share one engine, and record the options and prompts it is given."""
    given, generate = [], engine.generate

    def recorded(**arguments):
        given.append(arguments)
        return generate(**arguments)

    monkeypatch.setattr(engine, "generate", recorded)
    monkeypatch.setattr(common, "start", lambda options: given.append(options) or engine)
    return given


def test_peaks_of_a_load():
    """Requests that end when another begins are not open with it; seconds count from the first request."""
    times = [(0.5, 1.6, [0.7, 1.4, 1.6]), (1.6, 2.0, [1.7, 1.8]), (0.9, 3.0, [1.2, 1.6, 2.6, 2.7])]
    answers = [TimedAnswer(start, end, parts) for start, end, parts in times]
    figures = figures_of(answers, 3.0)
    assert figures["max_concurrent_requests"] == 2
    assert figures["max_output_tokens_per_s"] == 4  # from 0.5 to 1.5 there are three, from 1.5 to 2.5 four


def test_throughput(run, calls, tmp_path):
    sizes = ["--num-prompts", 3, "--input-len", 20, "--prefix-len", 6, "--output-len", 5, "--n", 2]
    argv = ["bench", "throughput", "demo", *sizes, "--num-warmups", 2, "--output-json", tmp_path / "out.json"]
    code, out, err = run(*argv)
    result = json.loads(out.splitlines()[-1])
    assert code == 0
    assert json.loads((tmp_path / "out.json").read_text()) == result
    seconds, total = result["elapsed_time"], 3 * (26 + 2 * 5)
    assert result == {
        "model_id": "demo",
        "elapsed_time": seconds,
        "num_requests": 3,
        "total_num_tokens": total,
        "requests_per_second": 3 / seconds,
        "tokens_per_second": total / seconds,
    }
    assert "78 prompt tokens, 30 output tokens" in out
    assert "3/3" in err
    options, warm_up, measured = calls
    assert options == {"model": "demo"}
    prompts = warm_up["prompt_token_ids"] + measured["prompt_token_ids"]
    assert [len(prompt) for prompt in prompts] == [26] * 5
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({tuple(prompt[6:]) for prompt in prompts}) == 5
    assert (measured["sampling_params"].ignore_eos, measured["sampling_params"].detokenize) == (True, True)
    run(*argv, "--disable-detokenize", "--seed", 5)
    assert calls[3]["seed"] == 5
    assert calls[5]["prompt_token_ids"] == measured["prompt_token_ids"]
    assert not calls[5]["sampling_params"].detokenize


def test_latency(run, calls):
    argv = ["--batch-size", 3, "--input-len", 9, "--output-len", 4, "--num-iters-warmup", 2, "--num-iters", 5]
    code, out, err = run("bench", "latency", "--model", "demo", *argv)
    result = json.loads(out.splitlines()[-1])
    assert code == 0
    assert [*result] == ["model_id", "avg_latency", "latencies", "percentiles"]
    assert len(result["latencies"]) == 5
    assert result["avg_latency"] == pytest.approx(statistics.mean(result["latencies"]))
    assert [*result["percentiles"]] == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == statistics.median(result["latencies"])
    assert "7/7" in err
    options, *batches = calls
    # With the cache, later iterations would not compute their prompts.
    assert options == {"model": "demo", "enable_prefix_caching": False}
    assert [len(batch["prompt_token_ids"]) for batch in batches] == [3] * 7
    run("bench", "latency", "--enable-prefix-caching", *argv)
    assert calls[8]["enable_prefix_caching"]


@pytest.mark.usefixtures("calls")
def test_requests_that_do_not_fit(run):
    """They would be cut short, and the figures wrong."""
    assert "2000 prompt tokens and 100 output tokens are more than max_model_len 2048" in run.fails(
        "bench", "throughput", "--input-len", 2000, "--output-len", 100
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["thruput"],
            "paged bench has no command 'thruput'; did you mean 'throughput'? it has throughput, latency",
        ),
        (["latency", "--num-prompts", "1"], "No such option: --num-prompts"),
        (["throughput", "--num-prompts", "0"], "'--num-prompts'"),
        (["throughput", "--block-size", "3"], "--block-size must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_flags(run, argv, message):
    assert message in run.refused("bench", *argv)


def test_a_directory_that_is_missing(run):
    argv = ("bench", "throughput", "--output-json", "missing/x.json")
    assert "no such directory: missing" in run.refused(*argv, code=1)


def test_help_of_the_group(run):
    assert run("bench") == run("bench", "--help")
    assert "throughput" in run("bench")[1]
