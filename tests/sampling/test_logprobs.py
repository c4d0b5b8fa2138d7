"""Log-probabilities of tokens, generated or in the prompt, against transformers and by hand."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from paged import RequestError, RequestOutput, SamplingParams
from paged.device.transfers import Transfers
from paged.kernels.backend import load_kernels
from paged.kernels.operations import Kernels
from paged.kernels.reference import token_logprobs as by_sorting
from paged.requests.prompt_report import TokenLogprobs
from paged.requests.request import Request
from paged.sampling import reporter
from paged.sampling.logprobs import AskedLogprobs
from paged.scheduler.schedule import AskedRows, ReportParams
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine, ragged_prompts, reference
from tests.support.error_bounds import assert_logprobs


@pytest.fixture(params=["torch", "numba"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Load the kernels that compute log-probabilities."""
    return load_kernels(request.param)


def token_logprobs(
    kernels: Kernels, logits: Tensor, token_ids: list[int], num_tops: list[int]
) -> list[TokenLogprobs]:
    transfers = Transfers(torch.device("cpu"))
    asked = AskedLogprobs(num_tops, logits.shape[1], transfers.new_upload())
    found = asked.compute(kernels, logits, torch.tensor(token_ids), transfers.new_download())
    return asked.reports(found)


def test_report_by_hand(kernels):
    # Probabilities 0.1, 0.2, 0.3, 0.4: logits may have any offset.
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(3, 1) + torch.tensor([[0.0], [5.0], [-7.0]])
    one, two, every = token_logprobs(kernels, logits, [1, 3, 0], [0, 1, -1])
    assert ([*one.token_ids], one.rank) == ([1], 3)
    assert ([*two.token_ids], two.rank) == ([3, 3], 1)
    assert ([*every.token_ids], every.rank) == ([0, 3, 2, 1, 0], 4)
    assert [torch.tensor(x).exp().item() for x in every.logprobs] == pytest.approx([0.1, 0.4, 0.3, 0.2, 0.1])
    assert one.logprobs == pytest.approx([every.logprobs[3]], abs=1e-6)


def test_report_is_batch_invariant(kernels):
    logits = torch.randn(7, 1009)
    logits[:, ::3] = 0.5  # ties
    together = token_logprobs(kernels, logits, [5] * 7, [3, 3, 0, -1, 3, 2000, 7])
    for row, num_top in enumerate([3, 3, 0, -1, 3, 2000, 7]):
        assert token_logprobs(kernels, logits[row : row + 1], [5], [num_top]) == [together[row]]


def test_report_of_a_row_that_is_not_finite_is_nan(kernels):
    logits = torch.zeros(2, 5)
    logits[0, 1], logits[1, 1] = torch.nan, torch.inf
    for report in token_logprobs(kernels, logits, [0, 1], [1, 1]):
        assert not torch.tensor(report.logprobs[0]).isfinite()


@pytest.mark.parametrize("vocab_size", [1, 13, 211, 1009])
@pytest.mark.parametrize("num_top", [0, 1, 6, 1009])
def test_log_probabilities_of_kernels_equal_log_softmax(kernels, vocab_size, num_top):
    """For rows of a wider tensor, with ties and -inf. Only rows that are not finite are NaN."""
    num_top = min(num_top, vocab_size)
    wide = 3 * torch.randn(9, vocab_size + 3, generator=torch.Generator().manual_seed(vocab_size))
    logits = wide[:, :vocab_size]
    logits[0, 1:], logits[1] = -torch.inf, logits[1].bfloat16().float()
    logits[2, vocab_size // 2], logits[3, -1], logits[4] = torch.nan, torch.inf, -torch.inf
    tokens = torch.arange(9) % vocab_size
    before = logits.clone()
    values, ids, ranks = kernels.token_logprobs(logits, tokens, num_top)
    expected, expected_ids, expected_ranks = by_sorting(before, tokens, num_top)
    assert_logprobs(values, expected.double(), vocab_size)
    sound = [0, 1, 5, 6, 7, 8]
    assert ranks[sound].equal(expected_ranks[sound])
    assert ids[:, 0].equal(tokens)
    assert ((ids >= 0) & (ids < vocab_size)).all()
    # Compare by value: among equal logits, and among those that are -inf, any may be reported.
    assert before.gather(1, ids)[sound].equal(before.gather(1, expected_ids)[sound])
    assert all(len({*row[1:]}) == num_top for row in ids[sound].tolist())


# --- prompt_logprobs

LENGTHS = (1, 2, 17, 64, 100)


def asking(num_top: int, max_tokens: int = 3, **options: Any) -> SamplingParams:
    options = {"temperature": 0, **options}
    return SamplingParams(prompt_logprobs=num_top, max_tokens=max_tokens, **options)


def expected_logprobs(name: str, prompt: list[int]) -> Tensor:
    """Return transformers' log-probabilities for each prompt token but the first, f32[n - 1, vocab_size]."""
    model = copy.deepcopy(reference(name).model)  # see Reference.greedy
    return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


def check_prompt_logprobs(output: RequestOutput, num_top: int, expected: Tensor) -> None:
    first, *places = output.prompt_logprobs
    assert first is None
    assert len(places) == len(expected) == len(output.prompt_token_ids) - 1
    num_top = len(expected[0]) if num_top < 0 else num_top
    for token, place, row in zip(output.prompt_token_ids[1:], places, expected, strict=True):
        assert next(iter(place)) == token
        told = torch.tensor([entry.logprob for entry in place.values()])
        torch.testing.assert_close(told, row[[*place]], rtol=0, atol=1e-4)
        # Compare by value: two tokens within rounding may come in either order.
        ranked = sorted(place.values(), key=lambda entry: entry.rank)[:num_top]
        assert [entry.rank for entry in ranked] == [*range(1, num_top + 1)]
        best = torch.tensor([entry.logprob for entry in ranked])
        torch.testing.assert_close(best, row.topk(num_top).values, rtol=0, atol=1e-4)
        assert abs(row.sort(descending=True).values[place[token].rank - 1] - row[token]) < 1e-4


@pytest.mark.parametrize("name", ["llama", "mistral", "llama-dynamic"])
def test_prompt_logprobs_match_transformers(name, monkeypatch):
    """In chunks, with other requests, and if the prompt is cached; with bounded rows of logits in memory."""
    engine = new_engine(checkpoint(name), block_size=8, max_num_batched_tokens=40)
    prompts = ragged_prompts(LENGTHS)
    plain = [SamplingParams(temperature=0, max_tokens=3)] * len(prompts)
    cached = engine.generate(prompts, plain, use_tqdm=False)
    head, most = engine.runner.model.logits, []
    monkeypatch.setattr(engine.runner.reporter, "max_rows", 7)
    monkeypatch.setattr(engine.runner.reporter, "head", lambda rows: most.append(len(rows)) or head(rows))
    num_tops = [2, 0, 3, -1, 2]
    outputs = engine.generate([*prompts, *prompts], [*map(asking, num_tops), *plain], use_tqdm=False)
    for output, num_top, prompt, before in zip(outputs, num_tops, prompts, cached, strict=False):
        check_prompt_logprobs(output, num_top, expected_logprobs(name, prompt))
        assert output.num_cached_tokens == 0
        assert output.outputs == before.outputs
    assert all(output.prompt_logprobs is None for output in outputs[len(prompts) :])
    assert outputs[-1].num_cached_tokens > 0
    assert max(most) == 7
    assert_all_free(engine)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_prompt_logprobs_report_every_token_once_despite_preemption_and_failures(mode, monkeypatch):
    """Requests are preempted within their prompts, and steps fail before and after reports are recorded."""
    options = {"preemption_mode": "swap", "swap_space": 0.001} if mode == "swap" else {}
    options |= {"block_size": 8, "num_blocks": 14, "long_prefill_token_threshold": 3, "watermark": 0.0}
    engine = new_engine(checkpoint("llama"), **options)
    preempt, run, update = (
        engine.scheduler.preemption.preempt,
        reporter.StepReports.run,
        engine.scheduler.update,
    )
    midway, num_reports, num_updates = [], itertools.count(), itertools.count()

    def preempting(victim: Request, schedule: Any) -> None:
        midway.append(0 < victim.report.next_row < victim.report.end)
        preempt(victim, schedule)

    def failing_before(*args: Any) -> None:
        if next(num_reports) in (1, 16):
            raise RuntimeError("nothing is booked")
        run(*args)

    def failing_after(*args: Any) -> Any:
        if next(num_updates) in (2, 29):
            raise RuntimeError("reports are booked")
        return update(*args)

    monkeypatch.setattr(engine.scheduler.preemption, "preempt", preempting)
    monkeypatch.setattr(reporter.StepReports, "run", failing_before)
    monkeypatch.setattr(engine.scheduler, "update", failing_after)
    prompts = ragged_prompts([7, 7, 7, 7, 60])
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, asking(i, 30))
    outputs: dict[str, RequestOutput] = {}
    num_failed = 0
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except RuntimeError:
            num_failed += 1
        engine.scheduler.check()
    for i, prompt in enumerate(prompts):
        check_prompt_logprobs(outputs[str(i)], i, expected_logprobs("llama", prompt))
    assert (any(midway), num_failed) == (True, 4)
    assert_all_free(engine)


def test_samples_and_forks_have_the_log_probabilities_of_their_prompt():
    engine = new_engine(checkpoint("llama"), max_num_batched_tokens=16)
    (prompt,) = ragged_prompts([40])
    engine.add_request("two", prompt, asking(2, 6, n=2, temperature=1.0))
    engine.add_request("parent", prompt, asking(1, 6))
    engine.step()
    assert (engine.scheduler.running[0].num_computed_tokens, engine.scheduler.num_waiting) == (16, 1)
    outputs: dict[str, RequestOutput] = {}
    while "parent" not in outputs:
        outputs |= {output.request_id: output for output in engine.step()}
    running = {request.request_id: request for request in engine.scheduler.running}
    assert running["parent"].report.is_complete
    engine.fork("parent", "same")
    engine.fork("parent", "none", SamplingParams(temperature=0, max_tokens=6))
    with pytest.raises(
        RequestError, match="prompt_logprobs of a fork must be None, or its parent's 1, got 3"
    ):
        engine.fork("parent", "other", asking(3, 6))
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    expected = expected_logprobs("llama", prompt)
    check_prompt_logprobs(outputs["two"], 2, expected)
    check_prompt_logprobs(outputs["parent"], 1, expected)
    check_prompt_logprobs(outputs["same"], 1, expected)
    assert outputs["none"].prompt_logprobs is None
    assert_all_free(engine)


def test_fork_within_the_prompt_continues_its_report():
    engine = new_engine(checkpoint("llama"), max_num_batched_tokens=16)
    (prompt,) = ragged_prompts([40])
    engine.add_request("parent", prompt, asking(1))
    engine.step()
    engine.fork("parent", "child")
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    for request_id in ("parent", "child"):
        check_prompt_logprobs(outputs[request_id], 1, expected_logprobs("llama", prompt))
    assert_all_free(engine)


@pytest.mark.parametrize("chunk", [0, 1, 2], ids="chunk-{}".format)
def test_prompt_row_that_is_not_finite_ends_its_request(chunk, monkeypatch):
    """With all its samples, also in the last chunk, with which the samples start."""
    engine = new_engine(checkpoint("llama"), max_num_batched_tokens=16)
    head = engine.runner.reporter.head
    prompt, other = ragged_prompts([40, 40])
    calls = itertools.count()

    def broken(hidden: Tensor) -> Tensor:
        logits = head(hidden)
        if next(calls) == chunk:
            logits[3, 7] = torch.nan
        return logits

    monkeypatch.setattr(engine.runner.reporter, "head", broken)
    bad, good = engine.generate(
        [prompt, other], [asking(0, n=2, temperature=1.0), SamplingParams(max_tokens=2)], use_tqdm=False
    )
    assert [o.finish_reason for o in bad.outputs] == ["error", "error"]
    assert "not finite" in bad.outputs[0].stop_reason
    assert bad.prompt_logprobs is None
    assert good.outputs[0].finish_reason == "length"
    assert_all_free(engine)


def test_rows_of_logits_in_memory_are_bounded(monkeypatch):
    vocab_size, num_rows = 50, 33
    monkeypatch.setattr(reporter, "MAX_LOGITS", 4 * vocab_size)
    weight, hidden, sizes = torch.randn(8, vocab_size), torch.randn(num_rows, 8), []

    def head(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return rows @ weight

    token_ids = [i % vocab_size for i in range(num_rows + 1)]
    asked = AskedRows(0, 0, num_rows, 0)
    transfers = Transfers(torch.device("cpu"))
    reports = reporter.Reporter(head, vocab_size, load_kernels("torch")).prepare(
        [asked], [ReportParams(0, token_ids[1:])], transfers.new_upload()
    )
    reports.run(hidden, transfers.new_download())
    ((row, end, rows),) = reports.results()
    assert (row, end) == (0, num_rows)
    assert sizes == [4] * 8 + [1]
    own = (hidden @ weight).log_softmax(-1)[range(num_rows), token_ids[1:]]
    torch.testing.assert_close(torch.tensor([row.logprobs[0] for row in rows]), own)


def test_too_large_a_report_is_refused():
    engine = new_engine("demo", num_blocks=512)
    with pytest.raises(RequestError, match=r"prompt_logprobs -1 for 1100 tokens would report 4,502,603"):
        engine.add_request("a", [1] * 1100, asking(-1))
    assert not engine.has_unfinished_requests()


# --- best_of


def test_best_of_returns_the_most_likely_samples():
    engine = new_engine(checkpoint("llama"), max_num_seqs=8)
    (prompt,) = ragged_prompts([9])
    params = {"max_tokens": 5, "seed": 3, "temperature": 1.0}
    (every,) = engine.generate([prompt], SamplingParams(n=6, logprobs=0, **params), use_tqdm=False)
    engine.add_request("best", prompt, SamplingParams(n=2, best_of=6, **params))
    shown = []
    while engine.has_unfinished_requests():
        shown += engine.step()
    assert [output.outputs for output in shown[:-1]] == [[]] * 4
    best = sorted(every.outputs, key=lambda sample: -sample.cumulative_logprob)[:2]
    assert [sample.index for sample in shown[-1].outputs] == [0, 1]
    assert [sample.token_ids for sample in shown[-1].outputs] == [sample.token_ids for sample in best]
    assert [sample.cumulative_logprob for sample in shown[-1].outputs] == [
        pytest.approx(sample.cumulative_logprob) for sample in best
    ]
    assert all(sample.logprobs is None for sample in shown[-1].outputs)
    assert_all_free(engine)
