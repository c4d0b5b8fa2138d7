"""A file of results goes on with the options that it was begun with."""

from dataclasses import fields

import pytest

from paged import EngineConfig, SamplingParams, StructuredOutputsParams
from paged.base.errors import FileError
from paged.protocol.run_options import WITHOUT_EFFECT, RunOptions

# Another value of each option.
ENGINE = {
    "cudagraph_capture_sizes": [1, 2],
    "max_cudagraph_capture_size": 2,
    "weights_cache": False,
    "verify_weights_cache": True,
    "model": "other",
    "tokenizer": "other",
    "revision": "v1",
    "tokenizer_revision": "v1",
    "generation_config": "paged",
    "dtype": "bfloat16",
    "quantization": "int8",
    "kv_cache_dtype": "int8",
    "device": "cpu",
    "block_size": 32,
    "max_model_len": 64,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 64,
    "num_blocks": 9,
    "gpu_memory_utilization": 0.5,
    "cpu_memory_utilization": 0.5,
    "enable_prefix_caching": False,
    "state_snapshots": 5,
    "state_interval": 64,
    "scheduling_policy": "priority",
    "tenant_weights": {},
    "long_prefill_token_threshold": 5,
    "max_num_partial_prefills": 2,
    "max_waiting": 7,
    "max_queued_tokens": 99,
    "watermark": 0.1,
    "preemption_mode": "recompute",
    "max_preemptions": 3,
    "swap_space": 0.5,
    "attention_backend": "torch",
    "num_threads": 1,
    "pipeline_parallel_size": 2,
    "tensor_parallel_size": 2,
    "pipeline_layers": [2, 4],
    "rank_timeout_s": 9.0,
    "deterministic": True,
    "enforce_eager": True,
    "async_scheduling": False,
    "speculative_config": {"method": "ngram"},
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "max_cpu_loras": 3,
    "lora_target_modules": ["q_proj"],
    "seed": 3,
    "skip_tokenizer_init": True,
    "language_model_only": True,
    "limit_mm_per_prompt": {"image": 2},
    "mm_processor_kwargs": {"size": {"longest_edge": 99}},
    "mm_processor_cache_gb": 1.0,
    "allowed_media_domains": ["images.example"],
}
SAMPLING = {
    "temperature": 0.5,
    "stop": ["a"],
    "logit_bias": {5: float("-inf")},
    "structured_outputs": StructuredOutputsParams(json={"const": "é"}),
    "timeout_s": 1.0,
    "priority": 1.0,
    "cache_salt": "a",
    "num_speculative_tokens": 2,
}


@pytest.fixture
def begun(tmp_path):
    """Return what makes the options of a run of results.jsonl, which was begun without any."""

    def options(engine=None, **more):
        return RunOptions(tmp_path / "results.jsonl", {"model": "demo", **(engine or {})}, more)

    options().keep()
    return options


def test_every_option_is_compared_or_changes_no_result(begun):
    assert ENGINE.keys() == {field.name for field in fields(EngineConfig)}
    assert ENGINE.keys() - WITHOUT_EFFECT == {
        *("model", "tokenizer", "revision", "tokenizer_revision", "generation_config", "max_model_len"),
        *("dtype", "quantization", "kv_cache_dtype", "device", "attention_backend", "deterministic"),
        *("seed", "skip_tokenizer_init", "mm_processor_kwargs", "enable_lora"),
    }
    assert ENGINE.keys() | {field.name for field in fields(SamplingParams)} > WITHOUT_EFFECT
    stages = {"pipeline_parallel_size": ENGINE["pipeline_parallel_size"]}  # which pipeline_layers is about
    lora = {"enable_lora": True}  # which these are about, and which does not go with stages
    about_lora = {"max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules"}
    alone = {name: value for name, value in ENGINE.items() if name not in about_lora}
    runs = [
        (name, begun({**(stages if name != "enable_lora" else {}), name: value}))
        for name, value in alone.items()
    ]
    for name in about_lora:
        with pytest.raises(FileError, match=r"options: enable_lora was not given and is True. Go on"):
            begun({**lora, name: ENGINE[name]}).check()
    runs += [(name, begun(**{name: value})) for name, value in SAMPLING.items()]
    for name, run in runs:
        if name in WITHOUT_EFFECT:
            assert run.check()
            continue
        was = "'demo'" if name == "model" else "not given"
        with pytest.raises(
            FileError, match=f"results.jsonl was begun with other options: {name} was {was} and"
        ):
            run.check()
        run.keep()
        assert run.check()
        with pytest.raises(FileError, match=f": {name} was .* and is {was}. Go on with"):
            begun().check()
        begun().keep()


def test_a_default_may_be_spelt_out(begun):
    assert begun({"seed": 0, "dtype": "auto"}, chat_template=None).check()


def test_all_differences_are_named(begun):
    begun({"seed": 3, "dtype": "float32"}, stop=["a"]).keep()
    with pytest.raises(FileError) as error:
        begun({"seed": 3}, stop=["b"], top_k=2).check()
    assert "options: dtype was 'float32' and is not given; stop was ['a'] and is ['b']; top_k" in str(
        error.value
    )


def test_files_that_hold_no_options(begun, tmp_path):
    file = tmp_path / "results.jsonl.options.json"
    assert [*tmp_path.iterdir()] == [file]
    for text in ("", "[]", "{", "[" * 100_000, b"\xff"):
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(FileError, match="not the options of a run; delete it to go on"):
            begun().check()
    file.unlink()
    assert not begun().check()
