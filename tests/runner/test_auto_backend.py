"""attention_backend="auto" takes what computes a model; a backend that is named does not give way."""

import logging
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from paged import ConfigError, LLMEngine, SamplingParams
from paged.kernels.gpu.target import in_interpreter
from tests.support.checkpoints import SHAPE, random_model
from tests.support.fake_cuda import lacks
from tests.support.late_cuda import late_cuda

PROMPT = [5, 3, 8, 2, 9, 4, 7]
# Heads that native kernels do not take on a CPU: narrow, and too many for a KV head.
HEADS = {
    "dim2": {"head_dim": 2},
    "dim14-num3": {"head_dim": 14, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 42},
    "group129": {"hidden_size": 129, "num_attention_heads": 129, "num_key_value_heads": 1},
}
SAID = "attention_backend 'torch' is taken for"


@pytest.fixture
def model(request, tmp_path) -> Any:
    """Return a model with these heads, saved in the test's folder."""
    made = random_model(LlamaConfig(**{**SHAPE, **request.param}))
    made.save_pretrained(tmp_path)
    return made


def new_engine(path: Any, **options: Any) -> LLMEngine:
    return LLMEngine(
        str(path),
        **{"device": "cpu", "dtype": "float32", "num_blocks": 32, "skip_tokenizer_init": True, **options},
    )


def greedy(engine: LLMEngine) -> list[int]:
    (output,) = engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)
    return [*output.outputs[0].token_ids]


def expected(model: Any) -> list[int]:
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=5, do_sample=False)
    return ids[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("model", HEADS.values(), ids=HEADS, indirect=True)
def test_heads_without_native_kernels_are_computed_by_torch(model, tmp_path, caplog):
    pytest.importorskip("numba")
    with caplog.at_level(logging.WARNING):
        engine = new_engine(tmp_path)
    assert sum(SAID in line for line in caplog.messages) == 1
    assert "attention by torch" in engine.describe()
    assert greedy(engine) == expected(model)
    for named in ({"attention_backend": "numba"}, {"deterministic": True}):
        with pytest.raises(ConfigError, match=r"'numba' takes (a head_dim|at most) .*; use 'torch'"):
            new_engine(tmp_path, **named)


@pytest.mark.skipif(
    lacks() is not None or not in_interpreter(),
    reason=lacks() or "a GPU is here: kernels are not interpreted",
)
@pytest.mark.parametrize("target", ["sm_75", "gfx1100"])
@pytest.mark.parametrize("model", [{"head_dim": 144}], ids=["dim144"], indirect=True)
def test_gpu_without_kernels_for_a_model_runs_torch_and_one_step_at_a_time(
    model, tmp_path, monkeypatch, target
):
    monkeypatch.setattr("paged.runner.part_runner.target_of", lambda _: target)
    options = {"device": "cuda", "preemption_mode": "recompute"}
    with late_cuda(seed=2):
        engine = new_engine(tmp_path, **options)
        assert greedy(engine) == expected(model)
        for named in ({"attention_backend": "triton"}, {"async_scheduling": True}, {"quantization": "int8"}):
            with pytest.raises(
                ConfigError, match=r"'triton'(: .* is sm_75| takes a head_dim from 16 to 128)"
            ):
                new_engine(tmp_path, **options, **named)
    assert engine.runner.num_in_flight == 1
