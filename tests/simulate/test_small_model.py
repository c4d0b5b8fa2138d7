"""The cost of a small model's steps is found from the times of some of them."""

from contextlib import nullcontext

import pytest

from paged import EngineConfig
from paged.architectures.config import DEMO
from paged.architectures.hf_config import read_config
from paged.runner.sizes import Sizes
from paged.simulate import small_model
from paged.simulate.cost import Coefficients, decode_work, prompt_work

WINDOWS = [(None, 1.0)]


@pytest.mark.parametrize("max_num_seqs", [1, 8, 256])
def test_steps_that_follow_the_cost_model_are_predicted(monkeypatch, max_num_seqs):
    """Within what a prompt's first pair and the context of its own step make: these are left out."""
    cost = Coefficients(step_s=2e-4, token_s=1e-5, seq_s=3e-5, context_s=8e-8, pair_s=2e-7)

    def decode_s(_, num_seqs, length):
        assert num_seqs <= max_num_seqs
        return cost.seconds(decode_work(num_seqs, length, WINDOWS))

    def prompt_s(_, length):
        return sum(map(cost.seconds, prompt_work(length, 8192, WINDOWS)))

    monkeypatch.setattr("paged.engine.engine.LLMEngine", lambda **_: nullcontext())
    monkeypatch.setattr(small_model, "_decode_s", decode_s)
    monkeypatch.setattr(small_model, "_prompt_s", prompt_s)
    config = EngineConfig("demo", device="cpu", max_num_seqs=max_num_seqs)
    sizes = Sizes(config, read_config(DEMO), "cpu", "bfloat16", "cpu")
    found = small_model.measure_steps(config, sizes, 1024)
    for num_seqs in {1, min(64, max_num_seqs)}:
        for length in (128, 1000):
            work = decode_work(num_seqs, length, WINDOWS)
            assert found.seconds(work) == pytest.approx(cost.seconds(work), rel=0.05)
    assert sum(map(found.seconds, prompt_work(1024, 8192, WINDOWS))) == pytest.approx(
        prompt_s(None, 1024), rel=0.02
    )
