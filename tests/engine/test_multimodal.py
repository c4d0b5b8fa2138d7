"""The text part of multimodal checkpoints: their tensors, and prompts with tokens that stand for images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paged import CheckpointError, RequestError, SamplingParams
from paged.architectures.config import DEMO
from paged.architectures.generation_config import read_eos_token_ids
from paged.server.engine_client import EngineClient
from tests.engine.test_matches_transformers import assert_matches, greedy
from tests.support.checkpoints import (
    MULTIMODAL_CONFIGS,
    checkpoint,
    edit_json,
    new_engine,
    ragged_prompts,
    random_model,
    reference,
)
from tests.support.served import serving


@pytest.mark.parametrize("name", MULTIMODAL_CONFIGS)
def test_text_part_matches_transformers(name, tmp_path, monkeypatch):
    """With the names of tensors that transformers wrote before version 4.52, and those since."""
    model = random_model(MULTIMODAL_CONFIGS[name]())
    model.save_pretrained(tmp_path, save_original_format=False)
    edit_json(tmp_path / "config.json", tie_word_embeddings=None)
    new = "model.language_model.norm.weight"
    old = "language_model.model.norm.weight"
    if name.startswith(("gemma4", "qwen3")):
        old = new
    elif name.startswith("qwen2"):
        old = "model.norm.weight"
    for directory, norm in ((checkpoint(name), old), (tmp_path, new)):
        assert norm in load_file(directory / "model.safetensors")
        prompts = ragged_prompts([1, 70, 33], vocab_size=200)
        assert_matches(new_engine(directory), reference(name), prompts, 6, monkeypatch)


def test_a_flat_config_is_that_of_its_text_part(tmp_path):
    """As older checkpoints of Qwen2.5-VL have it, with a rope type of their own and a tied head."""
    whole = json.loads((checkpoint("qwen2_5_vl") / "config.json").read_text())
    shutil.copytree(checkpoint("qwen2_5_vl"), tmp_path, dirs_exist_ok=True)
    text = whole.pop("text_config")
    rope = text.pop("rope_parameters")
    older = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**text, **whole, "rope_theta": rope["rope_theta"], "rope_scaling": older}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    prompts = ragged_prompts([1, 70, 33], vocab_size=200)
    found = [
        [
            output.outputs[0].token_ids
            for output in new_engine(each).generate(prompts, greedy(6), use_tqdm=False)
        ]
        for each in (tmp_path, checkpoint("qwen2_5_vl"))
    ]
    assert found[0] == found[1]
    (tmp_path / "config.json").write_text(json.dumps({**flat, "tie_word_embeddings": True}))
    assert not new_engine(tmp_path).runner.model.config.tie_word_embeddings  # it has a head of its own


def test_experts_may_be_stored_by_columns(tmp_path):
    """As the released Qwen3-VL-MoE are. A stack that fits neither way is refused."""
    directory = checkpoint("qwen3_vl_moe")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {
        name: tensor.transpose(1, 2).contiguous() if "experts." in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(turned, tmp_path / "model.safetensors")
    prompts = ragged_prompts([1, 33], vocab_size=200)
    found = [
        [
            output.outputs[0].token_ids
            for output in new_engine(each).generate(prompts, greedy(6), use_tqdm=False)
        ]
        for each in (tmp_path, directory)
    ]
    assert found[0] == found[1]
    name = next(name for name in turned if name.endswith("experts.gate_up_proj"))
    save_file({**turned, name: turned[name][:, :, 1:].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has shape \[8, 48, 39\], but its columns must divide into"):
        new_engine(tmp_path)


def changed(directory: Path, **tensors: Tensor | None) -> Path:
    """Return a copy of a checkpoint with other tensors; None removes one. __ in a name is a dot."""
    shutil.copytree(checkpoint("mistral-vision"), directory, dirs_exist_ok=True)
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
def test_wrong_tensors_are_named(kind, tmp_path):
    tensors, message = WRONG[kind]
    with pytest.raises(CheckpointError, match=message):
        new_engine(changed(tmp_path, **tensors))


def test_tensors_of_other_parts_may_be_of_any_dtype(tmp_path):
    new_engine(changed(tmp_path, vision_tower__position_ids=torch.arange(4)))


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
