"""Measure how long it takes to find, check and read the tensors of a checkpoint.

    python -m benchmarks.loading                         # 20,000 small tensors, in 1, 8 and 64 files
    python -m benchmarks.loading --tensors 5000 10000 --files 1
    python -m benchmarks.loading --model                 # a whole engine with as many layers as are allowed
    python -m benchmarks.loading --mib 4096 --dtype float32   # one large bfloat16 tensor, converted
    python -m benchmarks.loading --formats               # layers in each quantised format, beside bfloat16

Each tensor that was read is compared with what was written. Files are in the page cache. Layers in a format
are loaded in turn with those in bfloat16 that take as many bytes, and their products compared with torch's. A
ratio is the median over the rounds of the format's time for a byte over that of bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from benchmarks.common import parse_args, print_json, print_table
from benchmarks.format_files import FLOATS, FORMATS, config_of, layers_for, write_checkpoint
from benchmarks.timing import device_name
from paged import LLMEngine
from paged.architectures.config import LLAMA_NAMES
from paged.architectures.families.reading import CEILINGS
from paged.architectures.hf_config import from_hf, read_config, read_hf
from paged.architectures.schemes import quantization_of
from paged.checkpoints.formats.recognizers import recognizers_of
from paged.kernels.backend import load_kernels
from paged.model.decoder import Decoder
from paged.model.weights.choice import Forms, choose_forms
from paged.model.weights.forms import PlainWeight
from paged.model.weights.loading import Loader, check_weights, open_tensors, wanted_tensors

CPU = torch.device("cpu")
SHAPE = (16, 16)
MODEL_SHAPE = "tinyllama-1.1b"  # of layers in quantised formats
# 21 tensors in each layer, the most of all families.
MODEL: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "dtype": "float32",
}


def write(directory: Path, tensors: dict[str, torch.Tensor], num_files: int) -> None:
    """Write tensors into so many files and their index."""
    places = {name: f"model-{i % num_files:05}.safetensors" for i, name in enumerate(tensors)}
    for i in range(num_files):
        file = f"model-{i:05}.safetensors"
        save_file({name: tensors[name] for name, place in places.items() if place == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def read(directory: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> float:
    """Return the seconds that the weights path takes for these tensors, after checking what it reads."""
    destinations = {name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in tensors.items()}
    started = time.perf_counter()
    with open_tensors(directory, LLAMA_NAMES) as sources:
        for name, destination in destinations.items():
            sources[name].copy_to(destination)
    passed = time.perf_counter() - started
    for name, tensor in tensors.items():
        torch.testing.assert_close(destinations[name], tensor.to(dtype), rtol=0, atol=0)
    return passed


def measure_reader(num_tensors: int, num_files: int) -> dict[str, Any]:
    """Read many small tensors."""
    tensors = {f"model.layers.{i}.weight": torch.full(SHAPE, float(i)) for i in range(num_tensors)}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), tensors, num_files)
        s = read(Path(folder), tensors, torch.float32)
    return {"tensors": num_tensors, "files": num_files, "s": round(s, 3), "us_each": s / num_tensors * 1e6}


def measure_large(mib: int, dtype: str) -> dict[str, Any]:
    """Read one large tensor of bfloat16."""
    tensors = {"model.embed_tokens.weight": torch.rand(mib * 2**20 // 2048, 1024).bfloat16()}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), tensors, 1)
        s = read(Path(folder), tensors, getattr(torch, dtype))
    return {"mib": mib, "dtype": dtype, "s": round(s, 3), "gb_per_s": mib * 2**20 / s / 1e9}


def measure_model(num_layers: int, num_files: int) -> dict[str, Any]:
    """Make an engine of as many small tensors as config.json may ask for."""
    config = MODEL | {"num_hidden_layers": num_layers}
    with torch.device("meta"):
        model = Decoder(from_hf(config), load_kernels("torch"))
    tensors = {name: torch.ones(x.shape) for name, x in wanted_tensors(model.loadables(), {}).items()}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), tensors, num_files)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        before = psutil.Process().memory_info().rss
        started = time.perf_counter()
        LLMEngine(folder, skip_tokenizer_init=True, device="cpu", attention_backend="torch", num_blocks=64)
        s = time.perf_counter() - started
        grown = psutil.Process().memory_info().rss - before
    return {
        "model": num_layers,
        "tensors": len(tensors),
        "files": num_files,
        "s": round(s, 3),
        "mib": grown >> 20,
    }


def load(directory: Path, *, in_panels: bool) -> Decoder:
    """Load a model of a checkpoint, with everything that is checked on the way."""
    model_config = read_config(directory)
    names = model_config.tensor_names
    recognizers = recognizers_of(quantization_of(read_hf(directory)), names)
    with open_tensors(directory, names) as sources:
        forms = choose_forms(CPU, torch.bfloat16, None, tied=False, in_panels=in_panels)
        if not in_panels:  # without oneDNN's layout
            forms = Forms(dict.fromkeys(forms.of_floats, PlainWeight), forms.of_codes)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            model = Decoder(model_config, load_kernels("numba"))
        torch.set_default_dtype(torch.float32)
        check_weights(model.loadables(), sources, names, directory, recognizers)
        model.load(Loader(sources, forms, CPU, recognizers))
    return model


def check_products(directory: Path) -> None:
    """Compare the products of the first layer's weights with torch's."""
    found, expected = (load(directory, in_panels=in_panels).layers[0] for in_panels in (True, False))
    for own, other in (
        (found.mixer.qkv, expected.mixer.qkv),
        (found.mlp.down, expected.mlp.down),
    ):
        x = torch.randn(3, own.in_features).bfloat16()
        difference = (own(x) - other(x)).float().norm() / other(x).float().norm()
        assert difference < 0.02, f"{directory}: {difference}"


def measure_formats(names: Sequence[str], num_layers: int, rounds: int) -> list[dict[str, Any]]:
    """Write, check and load layers in each format."""
    sizes = {}
    with tempfile.TemporaryDirectory(prefix="paged-loading-") as folder:
        for name, form in {"bfloat16": FLOATS, **{name: FORMATS[name] for name in names}}.items():
            directory = Path(folder) / name
            directory.mkdir()
            config = config_of(MODEL_SHAPE, layers_for(form, num_layers))
            sizes[name] = write_checkpoint(directory, config, form)
            check_products(directory)
        return time_formats(Path(folder), sizes, rounds)


def time_formats(folder: Path, sizes: Mapping[str, int], rounds: int) -> list[dict[str, Any]]:
    """Load checkpoints of so many bytes, which are called as their formats are, in turn."""
    times: dict[str, list[float]] = {name: [] for name in sizes}
    for _ in range(rounds):
        for name, own in times.items():
            started = time.perf_counter()
            model = load(folder / name, in_panels=True)
            own.append((time.perf_counter() - started) / sizes[name])
            del model
    return [
        {
            "format": name,
            "MB": sizes[name] / 1e6,
            "s/GB": statistics.median(own) * 1e9,
            "to bfloat16": statistics.median(x / y for x, y in zip(own, times["bfloat16"], strict=True)),
        }
        for name, own in times.items()
    ]


def main() -> None:
    """Print a line of JSON for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[20_000])
    parser.add_argument("--files", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--model", action="store_true", help="a whole engine")
    parser.add_argument("--layers", type=int, default=CEILINGS["num_hidden_layers"])
    parser.add_argument("--mib", type=int, help="read one large tensor")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--formats", nargs="*", choices=FORMATS, help="layers in quantised formats; all by default"
    )
    parser.add_argument("--format-layers", type=int, default=1, help="of bfloat16; others have as many bytes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parse_args(parser, tensors=[50], files=[1, 2], rounds=1)
    torch.set_num_threads(args.threads)
    if args.formats is not None:
        results = measure_formats(args.formats or list(FORMATS), args.format_layers, args.rounds)
        print_table(results)
        print_json({"benchmark": "loading", "device": device_name(CPU), "results": results, **vars(args)})
        return
    if args.mib:
        print(json.dumps(measure_large(args.mib, args.dtype)))
        return
    for num_files in args.files:
        if args.model:
            print(json.dumps(measure_model(args.layers, num_files)))
            continue
        for num_tensors in args.tensors:
            print(json.dumps(measure_reader(num_tensors, num_files)))


if __name__ == "__main__":
    main()
