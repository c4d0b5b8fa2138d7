"""The text part of multimodal checkpoints: their tensors, and prompts with tokens that stand for images."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedConfig,
    SiglipVisionConfig,
)

from paged import CheckpointError, RequestError, SamplingParams
from paged.model.config import DEMO
from paged.model.generation_config import read_eos_token_ids
from paged.server.engine_client import EngineClient
from tests.engine.test_matches_transformers import assert_matches, greedy
from tests.support.checkpoints import (
    CONFIGS,
    SHAPE,
    VOCAB_SIZE,
    Reference,
    edit_json,
    new_engine,
    ragged_prompts,
    random_model,
)
from tests.support.served import serving

IMAGE = VOCAB_SIZE - 1
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP = SiglipVisionConfig(**VISION, image_size=16, patch_size=8)
PIXTRAL = PixtralVisionConfig(**VISION, image_size=16, patch_size=8, head_dim=8)


def gemma3() -> PreTrainedConfig:
    text = Gemma3TextConfig(
        **{**SHAPE, "tie_word_embeddings": True},
        sliding_window=24,
        sliding_window_pattern=2,
        rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5}},
    )
    tokens = {"image_token_index": IMAGE, "boi_token_index": 209, "eoi_token_index": 208}
    return Gemma3Config(text_config=text, vision_config=SIGLIP, mm_tokens_per_image=4, **tokens)


def mistral3() -> PreTrainedConfig:
    """Make one as those on the hub: with a head of its own, which its config.json does not tell."""
    text = MistralConfig(**SHAPE, sliding_window=None)
    return Mistral3Config(
        text_config=text, vision_config=PIXTRAL, image_token_index=IMAGE, tie_word_embeddings=False
    )


def ministral3() -> PreTrainedConfig:
    text = CONFIGS["ministral3"]()
    assert isinstance(text, Ministral3Config)
    return Mistral3Config(text_config=text, vision_config=PIXTRAL, image_token_index=IMAGE)


MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3": gemma3,
    "mistral3": mistral3,
    "ministral3": ministral3,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[[str, bool], Path]:
    """Return the directory of one of MODELS, with the names of transformers before version 4.52 or after."""

    @functools.cache
    def write(name: str, old_names: bool) -> Path:
        directory = tmp_path_factory.mktemp(name)
        random_model(MODELS[name]()).save_pretrained(directory, save_original_format=old_names)
        edit_json(directory / "config.json", tie_word_embeddings=None)
        return directory

    return write


def prompts_of_text(lengths: list[int]) -> list[list[int]]:
    return ragged_prompts(lengths, vocab_size=200)


@pytest.mark.parametrize("name", MODELS)
def test_text_part_matches_transformers(name, written, monkeypatch):
    """With the names of both ages."""
    oracle = Reference(written(name, True))
    for old_names, norm in (
        (True, "language_model.model.norm.weight"),
        (False, "model.language_model.norm.weight"),
    ):
        directory = written(name, old_names)
        assert norm in load_file(directory / "model.safetensors")
        engine = new_engine(directory)
        assert_matches(engine, oracle, prompts_of_text([1, 70, 33]), 6, monkeypatch)


def changed(written: Callable[[str, bool], Path], directory: Path, **tensors: Tensor | None) -> Path:
    """Return a copy of a checkpoint with other tensors; None removes one. __ in a name is a dot."""
    shutil.copytree(written("mistral3", True), directory, dirs_exist_ok=True)
    file = directory / "model.safetensors"
    new = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    everything = {**load_file(file), **new}
    save_file({name: x for name, x in everything.items() if x is not None}, file)
    return directory


NORM = torch.ones(48)
WRONG: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "unknown-part": ({"audio_tower__weight": NORM}, "audio_tower.weight is not part of the model"),
    "unknown-of-text": (
        {"language_model__model__extra__weight": NORM},
        "language_model.model.extra.weight is not part of the model",
    ),
    "not-within-the-text-part": ({"model__norm__weight": NORM}, "model.norm.weight is not part of the model"),
    "twice": (
        {"model__language_model__norm__weight": NORM},
        "model.language_model.norm.weight is in model.safetensors too, as language_model.model.norm.weight",
    ),
    "missing": ({"language_model__model__norm__weight": None}, "model.norm.weight is missing"),
    "shape": (
        {"language_model__model__norm__weight": NORM[1:].clone()},
        r"language_model.model.norm.weight has shape \[47\]",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_tensors_are_named(kind, written, tmp_path):
    tensors, message = WRONG[kind]
    with pytest.raises(CheckpointError, match=message):
        new_engine(changed(written, tmp_path, **tensors))


def test_tensors_of_other_parts_may_be_of_any_dtype(written, tmp_path):
    new_engine(changed(written, tmp_path, vision_tower__position_ids=torch.arange(4)))


def test_eos_of_the_text_part(tmp_path):
    edit_json(tmp_path / "config.json", text_config={"eos_token_id": [2, 3]})
    assert read_eos_token_ids(tmp_path) == {2, 3}
    edit_json(tmp_path / "config.json", eos_token_id=1)
    assert read_eos_token_ids(tmp_path) == {1}


# Prompts


@pytest.fixture(scope="module")
def with_text(tmp_path_factory) -> tuple[Path, int]:
    """Return the demo model as the text part of a Mistral 3, and the token "return", its image's."""
    directory = tmp_path_factory.mktemp("text")
    shutil.copytree(DEMO, directory, dirs_exist_ok=True)
    config: dict[str, Any] = json.loads((DEMO / "config.json").read_text())
    text = {**config, "architectures": None, "model_type": "mistral", "sliding_window": None}
    tokens: dict[str, int] = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
    image = tokens["return"]
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    (directory / "config.json").write_text(
        json.dumps({**whole, "image_token_index": image, "dtype": config["dtype"], "text_config": text})
    )
    file = directory / "model.safetensors"
    save_file(
        {f"language_model.{name}": tensor for name, tensor in load_file(DEMO / file.name).items()}, file
    )
    return directory, image


REFUSED = r"is {} 'return', which stands for an image, audio or video \(image_token_index\); of Mistral3For"


def test_a_prompt_with_an_image_is_refused_alone(with_text):
    directory, image = with_text
    engine = new_engine(directory, skip_tokenizer_init=False)
    prompts = ["def f(x):", [5, 6, 7]]
    expected = [
        output.outputs[0].token_ids
        for output in new_engine("demo").generate(
            [engine.tokenizer.encode(prompts[0]), prompts[1]], greedy(8), use_tqdm=False
        )
    ]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(8))
    refused = REFUSED.format(image)
    for prompt in ("def f(x):\n    return", [5, image], {"prompt_token_ids": [image]}):
        with pytest.raises(RequestError, match=rf"prompt_token_ids\[\d+\] {refused}"):
            engine.add_request("image", prompt, greedy(8))
    with pytest.raises(RequestError, match=refused):
        engine.chat([{"role": "user", "content": "now return"}], greedy(8), use_tqdm=False)
    with pytest.raises(RequestError, match=rf"continuations\[1\]\[0\] {refused}"):
        engine.score("def", ["x", "return"])
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    assert [finished[str(i)] for i in range(2)] == expected


def test_it_may_be_generated(with_text):
    directory, image = with_text
    engine = new_engine(directory)
    params = SamplingParams(temperature=0.0, max_tokens=3, allowed_token_ids=[image])
    (output,) = engine.generate([[5, 6]], params, use_tqdm=False)
    assert output.outputs[0].token_ids == [image] * 3


def test_a_server_refuses_it(with_text):
    directory, image = with_text
    client = EngineClient(str(directory), device="cpu", num_threads=1, num_blocks=64)
    with serving(client, closes=True) as served:
        for path, prompt in (
            ("completions", {"prompt": [5, image]}),
            ("completions", {"prompt": "x return"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "x return"}]}),
        ):
            status, _, data = served.request("POST", f"/v1/{path}", {**prompt, "max_tokens": 2})
            assert status == 400
            assert "which stands for an image, audio or video (image_token_index)" in data.decode()
        assert served.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
