"""Sampling parameters of requests without any: generation_config.json, and max_tokens."""

import asyncio
import json
import logging
import shutil
from pathlib import Path

import pytest

from paged import AsyncLLMEngine, CheckpointError, LLMEngine, SamplingParams
from paged.architectures.config import DEMO
from paged.protocol.endpoints import parse_call
from tests.support.checkpoints import new_engine

HELLO = [{"role": "user", "content": "a"}]
FOUND = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "max_new_tokens": 7,
}
TAKEN = {**{name: value for name, value in FOUND.items() if name != "max_new_tokens"}, "max_tokens": 7}


@pytest.fixture
def directory(tmp_path) -> Path:
    """Return a copy of the demo checkpoint with defaults of sampling."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **FOUND, "do_sample": True}))
    return tmp_path


def make(directory: Path, **options) -> LLMEngine:
    return new_engine(directory, skip_tokenizer_init=False, num_blocks=64, **options)


def test_generation_config_is_used_where_there_are_no_parameters(directory, caplog):
    with caplog.at_level(logging.WARNING, logger="paged"):
        engine = make(directory)
    assert [r.message for r in caplog.records if "generation_config" in r.message] == [
        "sampling defaults from generation_config.json: temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, "
        "repetition_penalty=1.1, max_tokens=7"
    ]
    wanted = SamplingParams(**TAKEN)
    assert engine.get_default_sampling_params() == wanted
    # The request ids, and with them the seeds, are those of a new engine.
    by_default = engine.generate(["def f(x):"], use_tqdm=False)[0].outputs[0].token_ids
    assert (
        by_default == make(directory).generate(["def f(x):"], wanted, use_tqdm=False)[0].outputs[0].token_ids
    )
    assert len(by_default) <= 7
    # Parameters that are given are not merged with it.
    (output,) = engine.generate(["def f(x):"], SamplingParams(ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16
    engine.add_request("a", "def f(x):")
    assert engine.core.groups["a"].samples[0].inputs.params == wanted
    # Fields that a body lacks come from it.
    call = parse_call("/v1/chat/completions", {"messages": HELLO, "top_k": 9})
    assert engine.params_of(call.sampling, call.DEFAULT_MAX_TOKENS) == SamplingParams(**{**TAKEN, "top_k": 9})


@pytest.mark.parametrize("source", ["paged", "vllm", str(DEMO)])
def test_generation_config_may_be_turned_off_or_come_from_elsewhere(directory, source):
    assert make(directory, generation_config=source).get_default_sampling_params() == SamplingParams()
    assert make(DEMO, generation_config=str(directory)).get_default_sampling_params() == SamplingParams(
        **TAKEN
    )


def test_a_wrong_value_is_refused_with_the_file(directory):
    file = directory / "generation_config.json"
    file.write_text(json.dumps({"top_p": 2}))
    with pytest.raises(CheckpointError, match=r"generation_config.json: top_p must be .*got 2"):
        make(directory)
    with pytest.raises(CheckpointError, match="no such directory"):
        make(DEMO, generation_config="/nowhere")


def test_defaults_of_bodies_differ_by_endpoint():
    engine = make(DEMO)
    for url, body, wanted in (
        ("/v1/chat/completions", {"messages": HELLO}, None),
        ("/v1/completions", {"prompt": "a"}, 16),
        ("/v1/completions", {"prompt": "a", "max_tokens": 3}, 3),
    ):
        call = parse_call(url, body)
        assert engine.params_of(call.sampling, call.DEFAULT_MAX_TOKENS).max_tokens == wanted


def test_async_engine_has_the_same_defaults(directory):
    async def main() -> None:
        async with AsyncLLMEngine.from_engine(make(directory)) as engine:
            outputs = [output async for output in engine.generate("def f(x):")]
            assert 0 < len(outputs[-1].outputs[0].token_ids) <= 7

    asyncio.run(main())
