"""Checkpoints with files of sentence-transformers, and the embeddings that its own library makes of them.

python -m tests.support.embedding_cases --write    # embedding_answers.json; needs sentence-transformers
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from paged.architectures.config import DEMO

ANSWERS = Path(__file__).with_name("embedding_answers.json")
TEXTS = ["def add(a, b):", "import os\nimport Sys\n", "class Stack:\n    Def push(self, item):"]
NUM_KEPT = 8  # numbers of each vector, beside its norm
SIZE = 256  # of the demo's hidden states
NUM_RANDOM = 24
PROMPTS = {"query": "Query: ", "document": "", "Title": "Title of a text | "}
_NAMES = {"last": "lasttoken", "mean": "mean", "cls": "cls"}
_FLAGS = {
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint and a call.

    dense: of each layer the outputs, the class of torch.nn, and whether it has a bias and a residual.
    is_old: the files are as before version 6.
    is_base: the model was saved without its head.
    has_end: its tokenizer ends each text with a special token.
    as_message: texts go through the chat template.
    normalize_first: vectors are normalized before the dense layers, too.
    """

    pooling: str = "mean"
    dense: tuple[tuple[int, str, bool, bool], ...] = ()
    normalize: bool = True
    normalize_first: bool = False
    include_prompt: bool = True
    lower_case: bool = False
    default_prompt_name: str | None = None
    is_old: bool = False
    is_base: bool = False
    has_end: bool = False
    as_message: bool = False
    call: dict[str, Any] = field(default_factory=dict)  # arguments of `LLMEngine.embed`


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    generator = random.Random(59)
    found = {f"random-{i}": _random_case(generator) for i in range(NUM_RANDOM)}
    found["base"] = Case(pooling="last", is_base=True)
    found["end"] = Case(pooling="last", has_end=True, default_prompt_name="query")
    found["end-after-prompt"] = Case(include_prompt=False, has_end=True, default_prompt_name="Title")
    found["message"] = Case(pooling="last", as_message=True)
    prompted = {"default_prompt_name": "query", "include_prompt": False}
    found["message-after-system"] = Case(as_message=True, **prompted)
    return found


def _random_case(generator: random.Random) -> Case:
    def choose(*options: Any) -> Any:
        return generator.choice(options)

    layers = [
        (
            choose(16, SIZE, 300),
            choose("Identity", "Tanh", "GELU", "ReLU", "SiLU", "Sigmoid"),
            choose(True, False),
        )
        for _ in range(choose(0, 0, 1, 2))
    ]
    call: dict[str, Any] = {}
    if choose(True, False):
        call["prompt_name"] = choose(*PROMPTS)
    if choose(True, False):
        # Its own way to cut a vector does not normalize it again, unless it is told to.
        call |= {"dimensions": choose(5, 7, 16), "normalize": True}
    is_old = choose(True, False)
    return Case(
        pooling=choose("last", "mean", "cls"),
        dense=tuple((*layer, False if is_old else choose(True, False)) for layer in layers),
        normalize=choose(True, False),
        normalize_first=bool(layers) and choose(True, False),
        include_prompt=choose(True, False),
        lower_case=choose(True, False),
        default_prompt_name=choose(None, *PROMPTS),
        is_old=is_old,
        call=call,
    )


def write_case(case: Case, directory: Path) -> None:
    """Write a checkpoint: the demo, in float32, and the files of sentence-transformers."""
    shutil.copytree(DEMO, directory, dirs_exist_ok=True)
    weights = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    if case.is_base:
        config["architectures"] = ["LlamaModel"]
        weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    config["dtype"] = "float32"
    save_file({name: tensor.float() for name, tensor in weights.items()}, directory / "model.safetensors")
    _write(directory / "config.json", config)
    if case.has_end:
        _end_texts(directory / "tokenizer.json")
    write_embedding_files(case, directory)


def _end_texts(file: Path) -> None:
    tokenizer = json.loads(file.read_text())
    end = next(token for token in tokenizer["added_tokens"] if token["special"])
    piece = {"SpecialToken": {"id": end["content"], "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [text, piece],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            end["content"]: {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}
        },
    }
    _write(file, tokenizer)


def write_embedding_files(case: Case, directory: Path) -> None:
    """Write modules.json, what it names, and the two files beside it."""
    modules = [("Transformer", "")]
    pooling = directory / "1_Pooling" / "config.json"
    if case.is_old:
        flags = {flag: mode == case.pooling for mode, flag in _FLAGS.items()}
        _write(pooling, {"word_embedding_dimension": SIZE, **flags, "include_prompt": case.include_prompt})
    else:
        mode = _NAMES[case.pooling]
        _write(
            pooling,
            {"embedding_dimension": SIZE, "pooling_mode": mode, "include_prompt": case.include_prompt},
        )
    modules.append(("Pooling", "1_Pooling"))
    if case.normalize_first:
        modules.append(("Normalize", "2_Normalize"))
    size = SIZE
    for layer in case.dense:
        folder = f"{len(modules)}_Dense"
        modules.append(("Dense", folder))
        _write_dense(directory / folder, size, layer)
        size = layer[0]
    if case.normalize:
        modules.append(("Normalize", f"{len(modules)}_Normalize"))
    for kind, path in modules:
        (directory / path).mkdir(exist_ok=True)
        if kind == "Normalize" and not case.is_old:
            _write(directory / path / "config.json", {"module_input_name": "sentence_embedding"})
    package = "sentence_transformers.models"
    listed = [
        {"idx": i, "name": str(i), "path": p, "type": f"{package}.{k}"} for i, (k, p) in enumerate(modules)
    ]
    _write(directory / "modules.json", listed)
    _write(
        directory / "config_sentence_transformers.json",
        {
            "prompts": PROMPTS,
            "default_prompt_name": case.default_prompt_name,
            "similarity_fn_name": "cosine",
        },
    )
    text: dict[str, Any] = {"max_seq_length": 64, "do_lower_case": case.lower_case}
    if case.as_message:
        output = {"method": "forward", "method_output_name": "last_hidden_state"}
        text["modality_config"] = {"text": output, "message": {**output, "format": "flat"}}
        text["module_output_name"] = "token_embeddings"
    _write(directory / "sentence_bert_config.json", text)


def _write_dense(folder: Path, size: int, layer: tuple[int, str, bool, bool]) -> None:
    outputs, activation, bias, residual = layer
    module = "linear" if activation == "Identity" else "activation"
    config = {
        "in_features": size,
        "out_features": outputs,
        "bias": bias,
        "activation_function": f"torch.nn.modules.{module}.{activation}",
    }
    tensors = {"linear.weight": _weight(outputs, size, 0.7)}
    if bias:
        tensors["linear.bias"] = _weight(1, outputs, 1.3)[0].contiguous()
    if residual:
        config["use_residual"] = True
        if outputs != size:
            tensors["residual.weight"] = _weight(outputs, size, 0.3)
    _write(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors")


def _weight(rows: int, columns: int, step: float) -> torch.Tensor:
    """Return numbers that no generator of random ones has to repeat."""
    places = torch.arange(rows * columns, dtype=torch.float64)
    return (torch.sin(places * step + places**2 * 0.001) / columns**0.5).float().view(rows, columns)


def _write(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=2))


def kept(vector: list[float]) -> list[float]:
    """Return what the record keeps of a vector."""
    norm = torch.tensor(vector, dtype=torch.float64).norm().item()
    return [float(f"{number:.6g}") for number in (*vector[:NUM_KEPT], norm)]


def theirs(case: Case, directory: Path) -> list[list[float]]:
    """Return the embeddings of TEXTS that sentence-transformers makes."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory), device="cpu", model_kwargs={"dtype": torch.float32})
    call = case.call
    vectors = model.encode(
        TEXTS,
        prompt_name=call.get("prompt_name"),
        truncate_dim=call.get("dimensions"),
        normalize_embeddings=call.get("normalize", False),
        convert_to_tensor=True,
    )
    return [kept(vector) for vector in vectors.tolist()]


def write() -> None:
    """Write the record."""
    found = {}
    for name, case in cases().items():
        with tempfile.TemporaryDirectory() as directory:
            write_case(case, Path(directory))
            found[name] = theirs(case, Path(directory))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(vectors)}" for name, vectors in found.items())
    ANSWERS.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    write()
