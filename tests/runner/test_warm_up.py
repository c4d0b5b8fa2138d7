"""A model whose steps raise ends the start, in one line, before any request comes."""

from __future__ import annotations

import pytest
import torch

from paged import EngineDeadError, RankError, ResourceError, UnsupportedModelError
from paged.model.decoder import Decoder
from paged.ranks.driver import DriverRunner
from tests.support.checkpoints import checkpoint, new_engine
from tests.support.ranks import ranked_engines

FAILURES = {
    "shapes": (RuntimeError("Sizes of tensors must match\nexcept in dimension 0"), UnsupportedModelError),
    "types": (TypeError("x"), UnsupportedModelError),
    "checks": (ValueError("x must have shape [any, 128], got [1, 256]"), UnsupportedModelError),
    "memory": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried …"), ResourceError),
    "gpu memory": (torch.OutOfMemoryError("CUDA out of memory"), ResourceError),
}


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("name", FAILURES)
def test_a_step_that_raises_ends_the_start(name, backend, monkeypatch):
    error, kind = FAILURES[name]

    def fail(*_):
        raise error

    monkeypatch.setattr(Decoder, "attend_last", fail)
    with pytest.raises(kind) as caught:
        new_engine(checkpoint("llama"), attention_backend=backend)
    assert caught.value.__cause__ is error
    assert str(error).partition("\n")[0] in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RankError("rank 1 has ended"), EngineDeadError), (TypeError("x"), UnsupportedModelError)],
)
def test_a_step_of_shards_that_raises_ends_the_start(error, kind, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(DriverRunner, "compute", fail)
    with pytest.raises(kind) as caught, ranked_engines(1, 2):
        new_engine(checkpoint("llama"))
    assert caught.value.__cause__ is error


def test_one_small_step_is_run(monkeypatch):
    """Of few tokens, by a pool of any size; it leaves no request and no block behind."""
    steps = []
    compute_kv = Decoder.compute_kv

    def counting(self, batch, *others):
        steps.append((self, batch.num_tokens))
        return compute_kv(self, batch, *others)

    monkeypatch.setattr(Decoder, "compute_kv", counting)
    sizes = []
    for options in ({}, {"num_blocks": 1}, {"max_model_len": 1}, {"max_num_batched_tokens": 3}):
        engine = new_engine(checkpoint("llama"), attention_backend="torch", **{"num_blocks": 8, **options})
        assert not engine.has_unfinished_requests()
        engine.block_manager.check()
        # Not all steps: a thread that another test has left behind may start an engine, too.
        sizes += [num_tokens for model, num_tokens in steps if model is engine.runner.model]
    assert sizes == [8, 8, 1, 3]
