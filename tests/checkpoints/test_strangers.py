"""Whatever the files of a checkpoint say, loading it ends soon and with one readable line."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged import CheckpointError, PagedError, RequestError, UnsupportedModelError
from paged.architectures.config import DEMO
from paged.architectures.families.multimodal import MULTIMODAL, NATIVE
from paged.architectures.families.table import COMMON, family_of
from paged.architectures.generation_config import read_eos_token_ids, read_sampling_defaults
from paged.architectures.hf_config import from_hf, read_config
from paged.base.strict_json import parse_json
from paged.checkpoints.safetensors_file import SafetensorsFile
from paged.text.tokenizer import Tokenizer
from tests.support.checkpoints import checkpoint, edit_json, new_engine

MANY = 200_000


@pytest.fixture
def copy(tmp_path) -> Path:
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    return tmp_path


def refused(load: Callable[[], Any], *named: str) -> str:
    """Return the message, which is one readable line of bounded length."""
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        load()
    message = str(caught.value)
    assert len(message) <= 500
    assert message.isprintable()
    for part in named:
        assert part in message
    return message


def with_header(file: Path, header: str) -> Path:
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(64))
    return file


def entry(shape: str = "[1]", offsets: str = "[0, 4]") -> str:
    return f'{{"dtype": "F32", "shape": {shape}, "data_offsets": {offsets}}}'


HEADERS = {
    "a name twice among many": "{" + ", ".join([f'"{i}": {entry()}' for i in range(20_000)] * 2) + "}",
    "many names": "{" + ", ".join(f'"n{i}": 1' for i in range(MANY)) + "}",
    "a shape of nines": f'{{"a": {entry("[" + ", ".join(["9"] * 10**6) + "]")}}}',
    "huge sizes": f'{{"a": {entry("[" + ", ".join(["9" * 4300] * 8) + "]")}}}',
    "more digits than Python reads": f'{{"a": {entry(offsets="[0, " + "9" * 5000 + "]")}}}',
    "an offset beyond 64 bits": f'{{"a": {entry(offsets="[0, " + "9" * 300 + "]")}}}',
    "lists": '{"a": [' + ", ".join(["[]"] * 10**6) + "]}",
    "lists behind an escaped quote": '{"a' + chr(92) + '"": [' + ", ".join(["[]"] * 10**6) + "]}",
    "quotes": '{"a": ' + '"' * 10**6 + "}",
    "nested lists": '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}",
    "objects": '{"a": [' + ", ".join(["{}"] * 10**6) + "]}",
    "an escape sequence as dtype": f'{{"a": {entry().replace("F32", "X" + chr(92) + "u001b[2J")}}}',
    "a name of a megabyte": f'{{"{"n" * 10**6}": {entry("[2]")}}}',
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers(copy, case):
    file = with_header(copy / "model.safetensors", HEADERS[case])
    refused(lambda: SafetensorsFile(file), "model.safetensors")


@pytest.mark.parametrize(
    "case", ["lists", "lists behind an escaped quote", "quotes", "nested lists", "objects"]
)
def test_a_header_takes_at_most_four_times_its_memory(copy, case):
    file = with_header(copy / "model.safetensors", HEADERS[case])
    tracemalloc.start()
    try:
        refused(lambda: SafetensorsFile(file))
        assert tracemalloc.get_traced_memory()[1] < 4 * file.stat().st_size + 2**20
    finally:
        tracemalloc.stop()


def test_metadata_may_hold_any_text(copy):
    text = json.dumps(json.dumps([[[]]] * 100))
    file = with_header(
        copy / "model.safetensors", f'{{"__metadata__": {{"x": {text}}}, "a": {entry("[16]", "[0, 64]")}}}'
    )
    with SafetensorsFile(file) as opened:
        assert {name: tensor.shape for name, tensor in opened.tensors.items()} == {"a": [16]}


def test_a_shard_name_may_not_be_too_long(copy):
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    refused(lambda: new_engine(copy), "does not exist")


def make_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def make_link_to_zeros(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def make_sparse(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(8 * 2**30)


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    "make", [make_fifo, make_link_to_zeros, make_sparse, make_folder], ids=lambda f: f.__name__
)
def test_special_files(copy, make):
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        file = copy / name
        file.touch()
        make(file)
    refused(lambda: read_config(copy), "config.json")
    refused(lambda: read_eos_token_ids(copy), "generation_config.json")
    refused(lambda: read_sampling_defaults(copy), "generation_config.json")
    refused(lambda: SafetensorsFile(copy / "model.safetensors"), "model.safetensors")


def test_saved_prefixes_are_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "prefixes")
    engine = new_engine(checkpoint("llama"))
    refused(lambda: engine.load_prefix(tmp_path / "prefixes"), "prefixes: is not a regular file")


def test_a_line_of_a_batch_is_read_in_linear_time():
    names = ", ".join(f'"{i}": 1' for i in [*range(MANY), MANY - 1])
    with pytest.raises(RequestError, match=f"'{MANY - 1}' is given twice"):
        parse_json(f"{{{names}}}")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "theta": ({"rope_theta": 1e300, "rope_parameters": None}, "rope_theta"),
    "linear factor": ({"rope_parameters": {"rope_type": "linear", "factor": 1e6}}, "factor"),
    "linear factor beyond float32": ({"rope_parameters": {"rope_type": "linear", "factor": 1e308}}, "factor"),
    "dynamic rope of a head of 2": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2},
        "head_dim must be even and at least 4 for dynamic rope, got 2",
    ),
    "equal frequency factors": (
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "high_freq_factor 4 must be more than low_freq_factor 4",
    ),
    "dtype": ({"dtype": "\x1b[2J" + "a" * 10**6}, "dtype"),
    "architecture": ({"architectures": ["\x00" * 10**6]}, "architecture"),
    "a list for a number": ({"hidden_size": [1] * 10**6}, "hidden_size"),
    "an object for a number": ({"vocab_size": {"a": "\u2028"}}, "vocab_size"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(copy, case):
    values, named = CONFIGS[case]
    edit_json(copy / "config.json", **values)
    refused(lambda: read_config(copy), named, "config.json")


def nested(holder: Callable[[Any], Any]) -> Any:
    """Return a value that is nested deeper than repr goes."""
    value: Any = 1
    for _ in range(5000):
        value = holder(value)
    return value


UNPRINTABLE: dict[str, Any] = {
    "list": nested(lambda value: [value]),
    "object": nested(lambda value: {"a": value}),
    "list of lists": [nested(lambda value: [value])] * 6,  # as many as there are layers
    "parameters of rope": {"rope_type": "linear", "factor": nested(lambda value: [value])},
    "digits": 10**6000,
    "surrogate": "\ud800",
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Keys that all families read, beside those that have defaults.
SHARED = (
    *("architectures", "model_type", "quantization_config", "is_causal", "dtype", "torch_dtype", "auto_map"),
    *("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq"),
    *("original_max_position_embeddings", "rotary_pct", "rotary_emb_base", "text_config", *SIZES),
)


@pytest.mark.parametrize("architecture", NATIVE)
def test_no_value_is_too_strange_for_a_message(architecture):
    """Whatever each key has: a value that repr refuses makes a message too."""
    sound = {"architectures": [architecture], "model_type": NATIVE[architecture].model_type, **SIZES}
    if architecture == "Lfm2MoeForCausalLM":  # it has no default
        sound["layer_types"] = ["conv", "full_attention"] * 3
    if architecture == "NemotronHForCausalLM":
        sound["hybrid_override_pattern"] = "M*-E*M"
    if architecture == "GraniteMoeHybridForCausalLM":
        sound["layer_types"] = ["mamba", "attention"] * 3
    known = NATIVE[architecture] if architecture in MULTIMODAL else family_of(architecture)
    places = [sound]
    if architecture in MULTIMODAL:
        sound["text_config"] = {**SIZES}
        places.append(sound["text_config"])
    own = [getattr(known, field, {}) for field in ("defaults", "placeholders")]
    keys = {*COMMON, *SHARED, *own[0], *own[1], *filter(None, getattr(known, "keys", {}).values())}
    from_hf(sound)
    messages = []
    for key in sorted(keys):
        for place in places:
            before = {**place}
            for value in UNPRINTABLE.values():
                place[key] = value
                try:
                    from_hf(sound)
                except (CheckpointError, UnsupportedModelError) as error:
                    messages.append(str(error))
            place.clear()
            place.update(before)
    assert len(messages) > 100
    assert max(map(len, messages)) <= 500
    assert all(map(str.isprintable, messages))


def test_eos_ids_that_repr_refuses_make_a_message(copy, monkeypatch):
    for value in UNPRINTABLE.values():
        monkeypatch.setattr(
            "paged.architectures.generation_config.read_json", lambda _, eos=value: {"eos_token_id": eos}
        )
        if not isinstance(value, int):
            refused(lambda: read_eos_token_ids(copy), "eos_token_id must be")


TOKEN = {"__type": "AddedToken", "content": "x"}
NO_TEXTS = {
    "chat_template": TOKEN,
    "padding_side": TOKEN,
    "tokenizer_class": TOKEN,
    "model_max_length": TOKEN,
    "add_bos_token": TOKEN,
}


@pytest.mark.parametrize("key", NO_TEXTS)
def test_objects_of_the_tokenizers_library_are_no_text(key, tmp_path):
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    for value in (NO_TEXTS[key], [NO_TEXTS[key]], {"a": TOKEN}, [{"name": "default", "template": TOKEN}]):
        edit_json(tmp_path / "tokenizer_config.json", **{key: value})
        refused(lambda: Tokenizer(tmp_path), "tokenizer_config.json", f"{key} must be", "got")


def test_float64_is_computed_in_float32(copy):
    edit_json(copy / "config.json", dtype="float64", torch_dtype="float64")
    assert read_config(copy).dtype == "float32"


def test_messages_are_one_line_of_printable_text():
    assert str(PagedError("a\n\x1b[2Jb\u2028\x9bé🙂")) == "a\\n\\x1b[2Jb\\u2028\\x9bé🙂"
    assert str(PagedError("\ud800\u202e")) == r"\ud800\u202e"  # neither encodable nor left to right
    for error in (CheckpointError, UnsupportedModelError, RequestError):
        long = str(error("config.json: " + "x" * 10**6 + " end"))
        assert len(long) <= 500
        assert long.startswith("config.json: xxx")
        assert long.endswith("xxx end")
