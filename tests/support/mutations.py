"""Seeded damage to the files of a checkpoint: bytes, the structure of JSON, and the kind of file."""

from __future__ import annotations

import copy
import json
import os
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Files = dict[str, bytes]

# Stand for values that json.dumps does not write, or that are cheaper as text.
RAW = {
    "@digits@": "9" * 5000,
    "@lists@": "[" * 3000 + "]" * 3000,
    "@deep@": "[" * 100_000 + "]" * 100_000,
    "@objects@": '{"a":' * 2000 + "1" + "}" * 2000,
    "@long@": '"' + "x" * 200_000 + '"',
    "@many@": "[" + ",".join(["[]"] * 20_000) + "]",
    "@escapes@": '"' + "\\u001b[2J" * 2000 + '"',
    "@infinity@": "1e999",
    # What json reads and repr may refuse, which depends on the depth of the stack: so several depths.
    **{f"@nested{depth}@": "[" * depth + "]" * depth for depth in (300, 900, 940, 960, 975, 985)},
    **{f"@within{depth}@": '{"a":' * depth + "1" + "}" * depth for depth in (300, 900, 940, 960, 975, 985)},
    # What Python still reads as an int, and what no encoding writes.
    "@most digits@": "9" * 4300,
    "@surrogate@": '"\\ud800"',
    "@surrogates@": '["a\\udfffb", {"\\udc80": 1}]',
}
# What transformers makes objects of the tokenizers library of, wherever it is.
TOKEN = {"__type": "AddedToken", "content": "x"}
TOKENS: list[Any] = [
    TOKEN,
    {**TOKEN, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True},
    {**TOKEN, "content": ""},
    {**TOKEN, "special": "x"},
    [TOKEN],
    {"a": TOKEN},
    [{"name": "default", "template": TOKEN}],
]
NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    0.5,
    -0.0,
    1e-320,
    1e-9,
    1e12,
    1e300,
    -1e308,
    float("nan"),
    float("inf"),
    255,
    65536,
]
NUMBERS += [2**24, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30]
STRINGS = [
    "",
    "x",
    "\x1b[2J\x07",
    "\x00",
    "a\nb\r\n",
    "\u2028\x9b",
    "\ud800",
    "é🙂",
    "../away/x",
    "/etc/passwd",
    "0",
]
STRINGS += ["null", "NaN", "__class__", "{{ 1 }}", "%s%n", "auto", "a" * 5000, "bfloat16", "F8_E4M3", "llama"]
VALUES: list[Any] = [None, True, False, [], {}, [None], [0], ["x"], {"a": 1}, {"": {}}, *RAW]

# Keys that a loader may act on, and values which point it somewhere else.
AWAY = "../away"
KEYS: dict[str, list[tuple[str, Any]]] = {
    "config.json": [
        ("auto_map", {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", None]}),
        ("quantization_config", {"quant_method": "gptq"}),
        ("quantization_config", {"quant_method": "gptq", "bits": 4, "group_size": 2**70}),
        ("quantization_config", {"quant_method": "awq", "bits": 4, "group_size": 32}),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [2**20, 1]}),
        ("quantization_config", {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*" * 300]}),
        (
            "quantization_config",
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"a": {"targets": ["re:(.*)*x"], "weights": {"num_bits": 8}}},
                "ignore": ["re:([a-z._0-9]+)+$!"],
            },
        ),
        (
            "quantization_config",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {},
                "ignore": ["re:((a{1000}){1000}){1000}", "re:(?R)", "re:" + "(" * 500],
            },
        ),
        ("quantization_config", {"quant_method": "x" * 5000}),
        ("quantization_config", {"load_in_4bit": True}),
        ("tokenizer_class", "AutoModelForCausalLM"),
        ("model_type", "qwen2"),
        ("model_name", "x"),
        ("architectures", ["Qwen3ForCausalLM"]),
        ("architectures", ["MistralForCausalLM"]),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 4.0}),
        ("rope_scaling", {"type": "linear", "factor": 1e4}),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        ("layer_types", ["sliding_attention"]),
        ("max_position_embeddings", 2**24),
        ("max_position_embeddings", 2**27),
        ("sliding_window", 4),
        ("vocab_size", 2**24),
        ("hidden_size", 2**17),
        ("num_hidden_layers", 1024),
        ("eos_token_id", [-1, 2**40]),
        ("dtype", "float64"),
        ("torch_dtype", "int8"),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
    ],
    "generation_config.json": [
        ("temperature", -1),
        ("top_p", 2),
        ("top_k", 2**70),
        ("max_new_tokens", 0),
        ("eos_token_id", ["a"]),
        ("repetition_penalty", 0),
    ],
    "tokenizer_config.json": [
        ("fast_tokenizer_files", [f"{AWAY}/tokenizer.4.0.0.json", "tokenizer.4.0.0.json"]),
        ("tokenizer_file", f"{AWAY}/tokenizer.json"),
        ("vocab_file", f"{AWAY}/vocab.txt"),
        ("tokenizer_class", "AutoModelForCausalLM"),
        ("tokenizer_class", "LlamaTokenizerFast"),
        ("tokenizer_class", "BertTokenizer"),
        ("tokenizer_class", "evil.Tokenizer"),
        ("auto_map", {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}),
        ("model_max_length", "x"),
        ("chat_template", 5),
        ("chat_template", TOKEN),
        ("chat_template", [{"name": "default", "template": TOKEN}]),
        ("response_template", TOKEN),
        ("padding_side", TOKEN),
        ("chat_template", [{"name": 5, "template": "x"}]),
        ("chat_template", "{% for i in range(10**9) %}x{% endfor %}"),
        ("chat_template", "{{ raise_exception('\x1b[2J' * 1000) }}"),
        ("added_tokens_decoder", {"x": {"content": "y"}}),
        ("added_tokens_decoder", {"5": {"content": "\x00", "special": True}}),
        ("bos_token", {"__type": "AddedToken", "content": 5}),
        ("extra_special_tokens", {"image_token": "<i>"}),
        ("name_or_path", "someone/else"),
        ("processor_class", "evil"),
    ],
    "tokenizer.json": [
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}),
        ("normalizer", {"type": "Replace", "pattern": {"String": "e"}, "content": "x" * 10_000}),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFKD"}] * 3}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
        ),
        ("pre_tokenizer", None),
        ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}),
        ("model", {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]"}),
        ("model", {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 5}),
        ("truncation", {"max_length": 0, "strategy": "LongestFirst", "stride": 9, "direction": "Right"}),
        ("padding", {"strategy": {"Fixed": 10**9}, "direction": "Left", "pad_id": 0, "pad_type_id": 0}),
    ],
}
TEMPLATES = [
    "{{ messages[0]['content'] * 10 ** 9 }}",
    "{% for a in range(10 ** 8) %}{% endfor %}",
    "{{ raise_exception('\x1b]0;x\x07' * 500) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% include '/etc/passwd' %}{% import 'evil' as e %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ undefined.attribute }}",
    "{% if %}",
    "{{ " + "(" * 500 + " }}",
]


def mutate(seed: int, directory: Path, base: Files, only: Sequence[str] = ()) -> str:
    """Write the files of `base`, one of them damaged, into an empty directory. Return what was done.

    only: the files that may be damaged; by default any.
    """
    choose, files = random.Random(seed), dict(base)
    names = sorted(name for name in files if not only or name in only)
    kind = choose.choices([*names, "special"], [*(_WEIGHTS.get(name, 1) for name in names), 2])[0]
    if kind == "special":  # no regular file, or an odd one
        name = choose.choice(names)
        done = _make_special(choose, directory / name, files.pop(name))
    else:
        name, done = kind, _damage(choose, kind, files)
    for file, content in files.items():
        (directory / file).write_bytes(content)
    return f"{name}: {done}"


# How often each file is damaged; others once.
_WEIGHTS = {
    "model.safetensors": 5,
    "model.gguf": 8,
    "model.safetensors.index.json": 3,
    "config.json": 5,
    "hf_quant_config.json": 3,
    "generation_config.json": 2,
    "tokenizer.json": 4,
    "tokenizer_config.json": 4,
}


def _damage(choose: random.Random, name: str, files: Files) -> str:
    content = files[name]
    if choose.random() < 0.2:
        files[name], done = damage_bytes(choose, content)
    elif name.endswith(".json"):
        files[name], done = _damage_json(choose, name, content)
    elif name.endswith(".safetensors"):
        files[name], done = _damage_tensors(choose, content)
    elif name.endswith(".gguf"):
        files[name], done = _damage_gguf(choose, content)
    else:
        files[name] = choose.choice(TEMPLATES).encode()
        done = files[name][:60].decode()
    return done


def damage_bytes(choose: random.Random, content: bytes) -> tuple[bytes, str]:
    """Damage a few bytes. Return the result and what was done."""
    data, at = bytearray(content), choose.randrange(len(content))
    length = choose.choice([1, 1, 2, 8, 100])
    how = choose.randrange(6)
    if how == 0:
        data[at] ^= 1 << choose.randrange(8)
        return bytes(data), f"a bit of byte {at} flipped"
    if how == 1:
        return bytes(data[:at]), f"cut at byte {at}"
    if how == 2:
        return bytes(data + choose.randbytes(length)), f"{length} bytes appended"
    if how == 3:
        data[at : at + length] = choose.randbytes(length)
        return bytes(data), f"{length} random bytes at {at}"
    if how == 4:
        del data[at : at + length]
        return bytes(data), f"{length} bytes missing at {at}"
    data[at:at] = data[at : at + length]
    return bytes(data), f"{length} bytes twice at {at}"


def _damage_json(choose: random.Random, name: str, content: bytes) -> tuple[bytes, str]:
    value = json.loads(content)
    done = [damage_value(choose, value, KEYS.get(name, ())) for _ in range(choose.choice([1, 1, 1, 2, 3]))]
    return dumps(value).encode("utf-8", "surrogatepass"), ", ".join(done)


def damage_value(choose: random.Random, value: dict[str, Any], known: Sequence[tuple[str, Any]] = ()) -> str:
    """Change one thing in a JSON object, in place. Return what was done.

    known: keys that a reader may act on, and values for them.
    """
    if known and choose.random() < 0.3:
        key, new = choose.choice(known)
        value[key] = copy.deepcopy(new)
        return f"{key} = {_short(new)}"
    if not value:
        return "nothing left"
    holder, key, path = _place(choose, value)
    how = choose.randrange(8)
    if how == 0:
        del holder[key]
        return f"without {path}"
    if how == 1:
        other, other_key, other_path = _place(choose, value)
        holder[key], other[other_key] = json.loads(json.dumps([other[other_key], holder[key]]))
        return f"{path} and {other_path} swapped"
    if how == 2 and isinstance(holder, dict):
        renamed = choose.choice([*STRINGS, str(key)[:-1], str(key).upper()])
        holder[renamed] = holder.pop(key)
        return f"{path} renamed {_short(renamed)}"
    if how == 3:
        holder[key] = choose.choice([[holder[key]], {str(key): holder[key]}, [holder[key]] * 50])
        return f"{path} wrapped"
    if how == 4 and isinstance(holder[key], int | float):
        holder[key] *= choose.choice([-1, 2, 10, 2**20, 10**12, 0.5, 1 + 1e-9])
        return f"{path} = {_short(holder[key])}"
    if how == 4 and isinstance(holder[key], str) and holder[key]:
        holder[key] = choose.choice([holder[key] * 1000, holder[key][:-1], holder[key] + "\x1b[31m"])
        return f"{path} = {_short(holder[key])}"
    holder[key] = copy.deepcopy(choose.choice(choose.choice([NUMBERS, STRINGS, VALUES, TOKENS])))
    return f"{path} = {_short(holder[key])}"


def _place(choose: random.Random, value: Any) -> tuple[Any, Any, str]:
    """Return a container within a JSON value, one of its keys, and the path of that key."""
    path: list[Any] = []
    while True:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = choose.choice(keys)
        path.append(key)
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or choose.random() < 0.4:
            return value, key, "/".join(map(_short, path))
        value = inner


def _damage_tensors(choose: random.Random, content: bytes) -> tuple[bytes, str]:
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    how = choose.randrange(6)
    if how == 0:
        claimed = choose.choice([0, 1, length - 1, length + 1, 2**31, 2**40, 2**63, 2**64 - 1])
        return struct.pack("<Q", claimed) + content[8:], f"header of {claimed} bytes"
    if how == 1:
        at, bad = choose.randrange(len(data) - 4), choose.choice([float("nan"), float("inf"), 1e38])
        at -= at % 4
        return content[: 8 + length] + data[:at] + struct.pack("<f", bad) + data[at + 4 :], f"weight {bad}"
    if how == 2:
        gone = choose.choice(sorted(header))
        del header[gone]
        done = f"without {gone}"
    else:
        done = damage_value(choose, header)
    text = dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + data, done


def _damage_gguf(choose: random.Random, content: bytes) -> tuple[bytes, str]:
    """Damage the header, most of which are numbers of 4 and 8 bytes; sometimes a weight."""
    end = content.index(b"blk.1.")  # among the infos of tensors
    at = choose.randrange(4, end)
    how = choose.randrange(4)
    if how == 0:
        number = choose.choice([0, 1, 7, 8, 9, 12, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
        return content[:at] + struct.pack("<I", number) + content[at + 4 :], f"{number} at byte {at}"
    if how == 1:
        number = choose.choice([0, 1, 2**20, 2**31, 2**32, 2**40, 2**63, 2**64 - 1])
        return content[:at] + struct.pack("<Q", number) + content[at + 8 :], f"{number} at byte {at}"
    if how == 2:
        damaged, done = damage_bytes(choose, content[:end])
        return damaged + content[end:], done
    at = choose.randrange(end, len(content) - 2)
    return content[:at] + b"\x00\x7e" + content[at + 2 :], f"NaN at byte {at}"


def _make_special(choose: random.Random, file: Path, content: bytes) -> str:
    """Put something that is no regular file, or an odd one, in the place of a file."""
    how = choose.choice(
        ["fifo", "zero", "null", "loop", "dangling", "folder", "sparse", "unreadable", "empty", "link"]
    )
    if how == "fifo":
        os.mkfifo(file)
    elif how in ("zero", "null"):
        file.symlink_to(f"/dev/{how}")
    elif how == "loop":
        file.symlink_to(file)
    elif how == "dangling":
        file.symlink_to("missing")
    elif how == "folder":
        file.mkdir()
    elif how == "sparse":
        with file.open("wb") as stream:
            stream.truncate(8 * 2**30)
    elif how == "link":  # as in the hub's cache, to a regular file
        target = file.parent.with_name("blobs")
        target.mkdir(exist_ok=True)
        (target / file.name).write_bytes(content)
        file.symlink_to(target / file.name)
    else:
        file.write_bytes(b"" if how == "empty" else content)
        file.chmod(0o000 if how == "unreadable" else 0o644)
    return how


def dumps(value: Any) -> str:
    """Return a value as JSON, with NaN, Infinity and what RAW stands for."""
    text = json.dumps(value, ensure_ascii=False)
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
