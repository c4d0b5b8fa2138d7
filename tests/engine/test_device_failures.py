"""What goes wrong on a GPU is one clear error, of the engine or of a request, and loses no request."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paged import ConfigError, EngineDeadError, LLMEngine, RequestOutputKind, SamplingParams
from paged.device.transfers import Upload
from paged.kernels.gpu.target import in_interpreter
from paged.model.decoder import Decoder
from tests.support.checkpoints import assert_all_free, checkpoint
from tests.support.engine_uses import draws_of_a_gpu, greedy, run_to_end
from tests.support.fake_cuda import lacks
from tests.support.late_cuda import GIB, LateCuda, late_cuda

pytestmark = pytest.mark.skipif(
    lacks() is not None or not in_interpreter(),
    reason=lacks() or "a GPU is here: kernels are not interpreted",
)
GONE = "CUDA error: unspecified launch failure\nCUDA kernel errors might be reported at some other call"


def new_engine(model: Any = None, **options: Any) -> LLMEngine:
    defaults = {"dtype": "float32", "num_blocks": 32, "max_model_len": 40, "skip_tokenizer_init": True}
    if options.get("device") != "cpu":
        defaults |= {"device": "cuda", "preemption_mode": "recompute"}
    return LLMEngine(str(model or checkpoint("qwen3")), **{**defaults, **options})


class Fault:
    """A fault of the device, which raises an error at this call, and perhaps at all later ones."""

    def __init__(self, at: int, error: BaseException, *, for_good: bool = False) -> None:
        self.at, self.error, self.for_good, self.num_calls = at, error, for_good, 0

    def __call__(self) -> None:
        self.num_calls += 1
        if self.num_calls == self.at or (self.for_good and self.num_calls > self.at):
            raise self.error


@pytest.fixture
def gpu() -> Iterator[LateCuda]:
    with late_cuda(seed=2) as device:
        yield device


def test_requests_outlive_their_gpu(gpu):
    """What had finished is returned; what had not goes on elsewhere, and ends as if nothing had happened."""
    long, prompts = greedy(6), {"a": [5, 6, 7], "b": [9, 8]}
    on_cpu = new_engine(device="cpu", attention_backend="torch")
    for name, prompt in prompts.items():
        on_cpu.add_request(name, prompt, long)
    expected = run_to_end(on_cpu)

    engine = new_engine()
    for name, prompt in prompts.items():
        delta = {"output_kind": RequestOutputKind.DELTA} if name == "b" else {}
        engine.add_request(name, prompt, greedy(6, **delta))
    engine.step()
    engine.add_request("short", [1, 2], greedy(1))
    engine.step()  # launches the step of its only token; another one was in flight
    update = engine.core.scheduler.update

    def finish_and_fail(*args: Any) -> Any:
        """Let the GPU fail when the tokens of the step are known and its outputs are not made yet."""
        update(*args)
        gpu.fault = Fault(1, torch.AcceleratorError(GONE), for_good=True)
        gpu.enqueue(lambda: None)

    engine.core.scheduler.update = finish_and_fail
    with pytest.raises(EngineDeadError, match=r"^cuda has failed: CUDA error: unspecified launch failure; "):
        engine.step()
    (finished,) = engine.step()
    assert (finished.request_id, finished.finished) == ("short", True)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="has failed") as raised:
            engine.step()
        assert isinstance(raised.value.__cause__, torch.AcceleratorError)
    with pytest.raises(EngineDeadError, match="has failed"):
        engine.generate([[1, 2]], long, use_tqdm=False)
    left = engine.unfinished()
    assert [output.request_id for output in left] == ["a", "b"]
    gpu.fault = lambda: None
    for output in left:
        tokens = [*output.outputs[0].token_ids]
        assert tokens == expected[output.request_id][:3]
        on_cpu.add_request(output.request_id, output.prompt_token_ids + tokens, greedy(6 - len(tokens)))
    rest = run_to_end(on_cpu)
    assert {o.request_id: [*o.outputs[0].token_ids, *rest[o.request_id]] for o in left} == expected


PARAMS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.0},
    "penalised": {"seed": 1, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "logprobs": 1},
    "filtered": {"seed": 2, "top_p": 0.7, "logit_bias": {3: 1.0}, "bad_words": []},
}


def outputs_of(engine: LLMEngine) -> dict[str, Any]:
    """Run PARAMS to their end, whatever steps raise."""
    for name, params in PARAMS.items():
        engine.add_request(name, [4, 5, 6], SamplingParams(max_tokens=2, ignore_eos=True, **params))
    found = {}
    for _ in range(100):
        try:
            outputs = engine.step()
        except (RuntimeError, KeyboardInterrupt):
            continue
        found |= {output.request_id: output.outputs[0].token_ids for output in outputs}
        if not engine.has_unfinished_requests():
            break
    assert_all_free(engine)
    return found


def test_an_error_or_ctrl_c_between_upload_and_download_loses_nothing(gpu):
    with draws_of_a_gpu():
        expected = outputs_of(new_engine(device="cpu", attention_backend="torch"))
    engine = new_engine()
    for _ in range(2):  # the second run of an engine has fewer tensors to make
        gpu.fault = counter = Fault(0, RuntimeError())
        assert outputs_of(engine) == expected
    places = random.Random(1).sample(range(1, counter.num_calls + 1), 2)
    for at, error in zip(places, [RuntimeError("no launch"), KeyboardInterrupt()], strict=True):
        gpu.fault = fault = Fault(at, error)
        assert outputs_of(engine) == expected, (at, error)
        assert fault.num_calls > at


@pytest.mark.usefixtures("gpu")
def test_logits_processor_that_keeps_its_tensor_or_returns_one_elsewhere():
    kept: list[torch.Tensor] = []

    def keep(_: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Change the tensors of earlier calls, which are the processor's own by now."""
        for tensor in kept:
            tensor.fill_(torch.nan)
        kept.append(logits)
        return logits

    params = [
        greedy(3),
        greedy(3, logits_processors=[keep]),
        greedy(3, logits_processors=[lambda _, x: x.cpu()]),
    ]
    plain, keeping, elsewhere = new_engine().generate([[4, 5, 6]] * 3, params, use_tqdm=False)
    assert plain.outputs[0].token_ids == keeping.outputs[0].token_ids
    assert elsewhere.outputs[0].finish_reason == "error"
    assert elsewhere.outputs[0].stop_reason == (
        "logits_processors[0] must return a tensor on cuda:0, as its logits are, got cpu"
    )


def test_no_memory_for_the_kv_cache(gpu):
    options = {"num_blocks": None, "max_num_batched_tokens": 8, "max_num_seqs": 2}
    assert new_engine(**options).runner.kv_cache.num_blocks > 1
    gpu.free_bytes = GIB // 20
    with pytest.raises(ConfigError, match=r"^no memory for a KV cache: -\d+ MiB .* raise gpu_memory_"):
        new_engine(**options)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "logits",
            r"no memory for a step of 8 tokens beside the weights on cuda: lower max_num_",
        ),
        (
            "load",
            r"no memory for the weights of Qwen3ForCausalLM on cuda: 51,600 weights .*; take a smaller .*; O",
        ),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_no_memory_for_weights_or_a_step(monkeypatch, part, message):
    def allocate(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Decoder, part, allocate)
    with pytest.raises(ConfigError, match=message):
        new_engine(num_blocks=None, max_num_batched_tokens=8, max_num_seqs=2)


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.usefixtures("gpu")
def test_upload_that_failed_leaves_nothing_behind(monkeypatch, at):
    """The next step has the same requests, and sends again what the failed one did not."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=5,
        ignore_eos=True,
        repetition_penalty=1.5,
        logit_bias={3: 1.0},
        logprobs=1,
    )
    engine, prompts, send = new_engine(), [[5, 6, 7], [9, 8]], Upload.send
    expected = [o.outputs[0].token_ids for o in engine.generate(prompts, params, use_tqdm=False)]
    fault = Fault(at, MemoryError())

    def failing(upload: Upload) -> None:
        fault()
        send(upload)

    monkeypatch.setattr(Upload, "send", failing)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    found, num_failed = {}, 0
    while engine.has_unfinished_requests():
        try:
            found |= {output.request_id: output for output in engine.step() if output.finished}
        except MemoryError:
            num_failed += 1
    assert num_failed == 1
    assert [found[str(i)].outputs[0].token_ids for i in range(2)] == expected
    assert_all_free(engine)
