"""Embeddings follow what a checkpoint says of them, as sentence-transformers does, or say why not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from paged import LLM, CheckpointError, PoolingParams, RequestError
from paged.checkpoints.embedding_files import read_embedding_settings
from paged.engine.embedding_head import EmbeddingHead
from paged.sampling.reporter import exact_sums
from tests.support.checkpoints import checkpoint, edit_json, new_engine, ragged_prompts
from tests.support.embedding_cases import (
    ANSWERS,
    SIZE,
    TEXTS,
    Case,
    cases,
    kept,
    write_case,
    write_embedding_files,
)

OPTIONS = {"device": "cpu", "dtype": "float32", "num_blocks": 64}


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM("demo", **OPTIONS)


def follow(engine: LLM, directory: Path) -> LLM:
    """Have an engine of the same weights make embeddings by other files."""
    edit_json(directory / "config.json", architectures=["LlamaForCausalLM"], model_type="llama")
    settings = read_embedding_settings(directory, SIZE)
    head = EmbeddingHead(settings) if settings.steps else None
    engine.text.__dict__.update(embedding=settings, embedding_head=head)
    return engine


def vectors(engine: LLM, texts=TEXTS, **call) -> list[list[float]]:
    return [output.outputs.embedding for output in engine.embed(texts, use_tqdm=False, **call)]


@pytest.mark.parametrize("name", cases())
def test_embeddings_are_those_of_sentence_transformers(name, demo, tmp_path):
    case = cases()[name]
    if case.is_base or case.has_end:
        write_case(case, tmp_path)
        engine = LLM(str(tmp_path), **OPTIONS)
    else:
        write_embedding_files(case, tmp_path)
        engine = follow(demo, tmp_path)
    found = [kept(vector) for vector in vectors(engine, **case.call)]
    expected = json.loads(ANSWERS.read_text())[name]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=2e-5)


def test_what_a_call_says_goes_before_the_files(demo, tmp_path):
    write_embedding_files(Case(normalize=False, default_prompt_name="query"), tmp_path)
    engine = follow(demo, tmp_path)
    plain = vectors(engine, prompt_name="", pooling="last", normalize=True)
    write_embedding_files(Case(pooling="last"), tmp_path)
    assert vectors(follow(demo, tmp_path)) == plain
    (ids,) = (output.prompt_token_ids for output in engine.embed(TEXTS[0], use_tqdm=False))
    assert vectors(engine, [ids], normalize=False) == vectors(engine, TEXTS[0], normalize=False)
    params = [PoolingParams(dimensions=4), PoolingParams(dimensions=9, use_activation=False), PoolingParams()]
    cut = vectors(engine, pooling_params=params)
    assert [len(vector) for vector in cut] == [4, 9, SIZE]
    assert math.hypot(*cut[0]) == pytest.approx(1)
    assert cut[1] == vectors(engine, TEXTS[1], normalize=False)[0][:9]


@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_a_mean_has_the_bits_of_one_chunk(chunk):
    """The order in which rows are added must not matter, nor what the prefix cache has."""
    (prompt,) = ragged_prompts([100])
    engine = new_engine(checkpoint("llama"), block_size=8, max_num_batched_tokens=200)
    (expected,) = vectors(engine, [prompt], pooling="mean", normalize=False)
    other = new_engine(checkpoint("llama"), block_size=8, max_num_batched_tokens=chunk)
    other.generate([prompt[:50]], use_tqdm=False)
    assert vectors(other, [prompt, prompt[:60]], pooling="mean", normalize=False)[0] == expected
    numbers = torch.randn(2, 500, 5, generator=torch.Generator().manual_seed(chunk))
    rows = numbers[0] * torch.exp(numbers[1] * 5)  # from 1e-7 to 1e7: float64 has not bits enough
    sums = sum(exact_sums(part) for part in rows.split(chunk))
    assert torch.equal(sums, exact_sums(rows))
    exact = [math.fsum(column) for column in rows.double().T.tolist()]
    torch.testing.assert_close(sums.sum(0), torch.tensor(exact, dtype=torch.float64), rtol=1e-14, atol=1e-9)


WRONG = {
    "max": ("1_Pooling/config.json", {"pooling_mode": "max"}, "by 'max' is not supported; pooling='last'"),
    "two modes": ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, r"by 'cls\+mean' is not"),
    "weighted": ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "by 'weightedmean' is not"),
    "key": ("1_Pooling/config.json", {"new_key": 1}, "'new_key' is not supported"),
    "activation": ("2_Dense/config.json", {"activation_function": "os.system"}, "'os.system' is not"),
    "input": ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "'token_embeddings' is not"),
    "task": ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "'fill-mask' is not"),
    "message": (
        "sentence_bert_config.json",
        {"modality_config": {"message": {"format": "structured"}}},
        "'structured'.* is not",
    ),
    "kind": ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "'SparseEncoder' is not"),
    "similarity": ("config_sentence_transformers.json", {"similarity_fn_name": "angle"}, "'angle' is not"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_supported_is_refused_by_name(name, demo, tmp_path):
    file, values, message = WRONG[name]
    write_embedding_files(Case(dense=((8, "Tanh", True, False),)), tmp_path)
    edit_json(tmp_path / file, **values)
    engine = follow(demo, tmp_path)
    with pytest.raises(RequestError, match=f"embeddings are refused: .*{Path(file).name}: .*{message}"):
        vectors(engine)
    if name == "max":  # another pooling may be named
        assert len(vectors(engine, pooling="mean")) == 3


@pytest.mark.parametrize(
    "module",
    ["sentence_transformers.models.LSTM", "custom_st.Transformer", "sentence_transformers.models.Pooling"],
)
def test_other_modules_are_refused_by_name(module, demo, tmp_path):
    write_embedding_files(Case(), tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3", "type": module})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(RequestError, match=f"embeddings are refused: .*{module.rpartition('.')[2]}"):
        vectors(follow(demo, tmp_path))


DAMAGED = {
    "size": ("1_Pooling/config.json", {"embedding_dimension": 8}, "is 8, but .* 256 numbers"),
    "mode": ("1_Pooling/config.json", {"pooling_mode": 3}, "pooling_mode must be a name or several, got 3"),
    "prompts": ("config_sentence_transformers.json", {"prompts": [1]}, "prompts must be texts by name"),
    "default": ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "must be one of prompts"),
    "inputs": ("2_Dense/config.json", {"in_features": 8}, "in_features is 8, but the vectors have 256"),
    "outputs": ("2_Dense/config.json", {"out_features": 8}, r"linear.weight is .* of shape \[16, 256\], but"),
    "huge": ("2_Dense/config.json", {"out_features": 2**40}, "out_features must be from 1 to 65536"),
    "length": ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length must be at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_one_error(name, demo, tmp_path):
    file, values, message = DAMAGED[name]
    write_embedding_files(Case(dense=((16, "Tanh", True, False),)), tmp_path)
    edit_json(tmp_path / file, **values)
    with pytest.raises(CheckpointError, match=message):
        follow(demo, tmp_path)


def test_calls_that_the_checkpoint_contradicts_are_refused(demo, tmp_path):
    write_embedding_files(Case(dense=((16, "Tanh", True, False),)), tmp_path)
    edit_json(tmp_path / "config.json", matryoshka_dimensions=[4, 8])
    engine = follow(demo, tmp_path)
    assert len(vectors(engine, dimensions=8)[0]) == 8
    for call, message in {
        "dimensions 12": ({"dimensions": 12}, "dimensions must be 4 or 8 or 16, as config.json says"),
        "dimensions 17": ({"dimensions": 17}, "dimensions must be at most 16"),
        "prompt": ({"prompt_name": "x"}, "prompt_name must be one of the checkpoint's prompts .*'query'"),
        "ids": ({"texts": [[5]], "prompt_name": "query"}, "prompt_name goes with text alone"),
        "long": ({"texts": ["word " * 65]}, "the text has .* max_seq_length of .* allows 64"),
        "both": ({"dimensions": 4, "pooling_params": PoolingParams(dimensions=4)}, "give either dimensions"),
        "count": ({"pooling_params": [PoolingParams()]}, "pooling_params has 1 entries for 3 prompts"),
    }.values():
        with pytest.raises(RequestError, match=message):
            vectors(engine, **call)
    edit_json(tmp_path / "config.json", matryoshka_dimensions=None, is_matryoshka=False)
    with pytest.raises(RequestError, match="dimensions must be 16, as config"):
        vectors(follow(demo, tmp_path), dimensions=8)


def test_pooling_without_modules_is_followed(tmp_path):
    edit_json(tmp_path / "config.json", architectures=["LlamaForCausalLM"])
    (tmp_path / "1_Pooling").mkdir()
    edit_json(tmp_path / "1_Pooling" / "config.json", pooling_mode_mean_tokens=True)
    assert read_embedding_settings(tmp_path, SIZE).pooling == "mean"


def test_a_model_without_a_head_makes_embeddings_alone(tmp_path):
    prompts = ragged_prompts([9])
    whole = new_engine(checkpoint("llama"))
    from transformers import AutoModel

    AutoModel.from_pretrained(checkpoint("llama")).save_pretrained(tmp_path)
    engine = new_engine(tmp_path)
    assert vectors(engine, prompts) == vectors(whole, prompts)
    for refused in (
        lambda: engine.generate(prompts, use_tqdm=False),
        lambda: engine.score(prompts[0], [[1]]),
    ):
        with pytest.raises(RequestError, match="was saved without its head"):
            refused()
