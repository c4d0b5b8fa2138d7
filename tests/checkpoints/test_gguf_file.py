"""GGUF files are read as llama.cpp reads them; damaged ones give one error, with the byte."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from paged import CheckpointError, UnsupportedModelError
from paged.checkpoints.formats.gguf import format_in
from paged.checkpoints.gguf.gguf_file import GGML_TYPES, GgufFile, open_gguf
from tests.support.gguf_files import Stored, Typed, in_type, string, write_gguf

FLOATS = Stored("F32", [3, 8], torch.arange(24.0).numpy().tobytes())
BLOCKS = [kind for kind in GGML_TYPES.values() if kind.in_blocks]


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_numbers_are_those_of_llama_cpp(kind):
    """Bit for bit, of random bytes: subnormal, negative and zero factors among them."""
    quants = pytest.importorskip("gguf", reason="the package gguf is not installed").quants
    data = torch.randint(0, 256, (67, 5, kind.num_bytes), dtype=torch.uint8)
    for place in kind.factors:
        data[:, :, place + 1][data[:, :, place + 1] & 0x7C == 0x7C] = 0x83  # no infinity: it is refused
        data[::7, 0, place : place + 2] = 0
    for place in kind.exponents:
        data[:, :, place] %= 251  # no infinity, no NaN
    data = data.flatten(1)
    expected = quants.dequantize(data.numpy(), quants.GGMLQuantizationType[kind.name])
    weight = format_in(kind).weight({"weight": data})
    assert torch.equal(weight.floats().view(torch.int32), torch.from_numpy(expected.copy()).view(torch.int32))
    rows = torch.tensor([66, 0, 3])
    assert torch.equal(weight.take(rows).floats(), weight.floats()[rows])


def test_metadata_of_every_type(tmp_path):
    values = dict(zip((0, 1, 2, 3, 4, 5, 10, 11), range(1, 9), strict=True))
    metadata = {f"n.{number}": Typed(number, value) for number, value in values.items()}
    metadata |= {"f": 0.5, "d": Typed(12, 1e300), "yes": True, "text": "dé", "none": Typed(8, [])}
    metadata |= {"ints": [1, -2], "floats": [0.5], "texts": ["a", ""], "flags": [True, False]}
    metadata |= {"nested": [[1], [2, 3]]}
    with GgufFile(write_gguf(tmp_path / "a.gguf", metadata, {"w": FLOATS})) as file:
        read = file.metadata
        assert [read[f"n.{number}"] for number in values] == list(values.values())
        assert (read["f"], read["d"], read["yes"], read["text"]) == (0.5, 1e300, True, "dé")
        assert (list(read["ints"]), list(read["floats"])) == ([1, -2], [0.5])
        assert (read["none"], read["texts"], read["flags"]) == ([], ["a", ""], [True, False])
        assert [list(each) for each in read["nested"]] == [[1], [2, 3]]
        assert torch.equal(file.tensors["w"].read(slice(1, 3)), torch.arange(8.0, 24).view(2, 8))


def test_dimensions_are_stored_the_fastest_first(tmp_path):
    stored, floats = in_type("Q4_K", torch.randn(6, 512), torch.Generator())
    path = write_gguf(
        tmp_path / "a.gguf", {"general.alignment": 64}, {"f": FLOATS, "q": stored}, alignment=64
    )
    with GgufFile(path) as file:
        assert file.tensors["f"].shape == [3, 8]
        assert file.tensors["q"].shape == [6, 288]
        weight = format_in(file.tensors["q"].type).weight({"weight": file.tensors["q"].read()})
        assert torch.equal(weight.floats(), floats)


def test_every_cut_is_one_error(tmp_path):
    metadata = {"general.architecture": "llama", "k": [1, 2], "t": ["ab", "c"], "n": [[1]]}
    whole = write_gguf(tmp_path / "a.gguf", metadata, {"w": FLOATS, "v": FLOATS}).read_bytes()
    for length in range(len(whole)):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: (at byte \d+|is truncated)"):
            GgufFile(path)


HUGE = 2**63
BEGIN = b"GGUF" + struct.pack("<I", 3)
ONE_KEY = BEGIN + struct.pack("<QQ", 0, 1)
ONE_TENSOR = BEGIN + struct.pack("<QQ", 1, 0) + string("w")
DAMAGES = {
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "at byte 4: is a big-endian"),
    "version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "at byte 4: GGUF version 1"),
    "magic": (b"GGML" + bytes(40), "no GGUF file"),
    "tensors": (BEGIN + struct.pack("<QQ", HUGE, 0), f"at byte 8: {HUGE} tensors"),
    "pairs": (BEGIN + struct.pack("<QQ", 0, HUGE), f"at byte 16: {HUGE} pairs"),
    "key": (ONE_KEY + struct.pack("<Q", HUGE) + bytes(40), "at byte 24: a key has"),
    "string": (ONE_KEY + string("k") + struct.pack("<IQ", 8, HUGE), "at byte 37: 'k' has 9223"),
    "array": (ONE_KEY + string("k") + struct.pack("<IIQ", 9, 4, HUGE), "at byte 41: 9223"),
    "strings": (ONE_KEY + string("k") + struct.pack("<IIQ", 9, 8, HUGE // 8), "at byte 41: 1152"),
    "type": (ONE_KEY + string("k") + struct.pack("<II", 13, 0), "at byte 33: 'k' has type 13"),
    "bools": (
        ONE_KEY + string("k") + struct.pack("<IIQ2B", 9, 7, 2, 1, 3),
        "at byte 49: 'k' has a value that is no bool",
    ),
    "bool": (ONE_KEY + string("k") + struct.pack("<IB", 7, 2), "at byte 37: 'k' is no bool: 2"),
    "utf-8": (ONE_KEY + string(b"k\xff") + struct.pack("<II", 4, 0), "at byte 33: a key is not UTF-8"),
    "rank": (ONE_TENSOR + struct.pack("<I", 5) + bytes(60), "at byte 33: 'w' has 5 dimensions"),
    "product": (
        ONE_TENSOR + struct.pack("<I4QIQ", 4, *[2**32] * 4, 0, 0),
        "at byte 37: 'w' of shape [4294967296, 4294967296, 4294967296, 4294967296] does not fit",
    ),
    "zero": (ONE_TENSOR + struct.pack("<IQIQ", 1, 0, 0, 0), "at byte 37: 'w' of shape [0] does not fit"),
    "block": (
        ONE_TENSOR + struct.pack("<IQIQ", 1, 33, 8, 0) + bytes(90),
        "in blocks of 32, but its rows have 33",
    ),
    "unknown": (ONE_TENSOR + struct.pack("<IQIQ", 1, 32, 10, 0), "at byte 45: w is of type Q2_K; supported"),
    "offset": (ONE_TENSOR + struct.pack("<IQIQ", 1, 8, 0, HUGE), "at byte 49: w ends at byte 9223"),
    "unaligned": (
        ONE_TENSOR + struct.pack("<IQIQ", 1, 8, 0, 8),
        "at byte 49: offset 8 of w is not a multiple",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_wrong_is_named_with_its_byte(name, tmp_path):
    content, expected = DAMAGES[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises((CheckpointError, UnsupportedModelError)) as info:
        GgufFile(path)
    assert expected in str(info.value)


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as info:
        read_all(path)
    return str(info.value)


def read_all(path: Path) -> None:
    with open_gguf(path) as gguf:
        for tensor in gguf.tensors.values():
            tensor.read()


def test_tensors_and_keys_are_there_once(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {}, {"w": FLOATS, "v": FLOATS}, offsets={"v": 64})
    assert "v begins at byte 192, within w" in refusal(path)
    twice = path.read_bytes().replace(string("v"), string("w"))
    path.write_bytes(twice)
    assert "at byte 65: tensor 'w' is there twice" in refusal(path)
    write_gguf(path, {"k": 1, "l": 2}, {})
    path.write_bytes(path.read_bytes().replace(string("l"), string("k")))
    assert "at byte 41: key 'k' is there twice" in refusal(path)
    write_gguf(path, {"general.alignment": 24}, {})
    assert "general.alignment must be a power of two" in refusal(path)


def test_factors_are_numbers(tmp_path):
    stored, _ = in_type("Q6_K", torch.randn(3, 512), torch.Generator())
    data = bytearray(stored.data)
    data[4 * 210 + 208 : 4 * 210 + 210] = b"\x00\xfc"  # -inf
    path = write_gguf(tmp_path / "a.gguf", {}, {"w": stored._replace(data=bytes(data))})
    assert f"w has an infinite factor or NaN at byte {96 + 4 * 210 + 208}" in refusal(path)
    stored, _ = in_type("MXFP4", torch.randn(3, 64), torch.Generator())
    data = bytearray(stored.data)
    data[4 * 17] = 255
    path = write_gguf(tmp_path / "a.gguf", {}, {"w": stored._replace(data=bytes(data))})
    assert f"w has an infinite factor or NaN at byte {96 + 4 * 17}" in refusal(path)


def split_key(no: int, count: int, total: int) -> dict[str, Typed]:
    return {"split.no": Typed(2, no), "split.count": Typed(2, count), "split.tensors.count": Typed(5, total)}


def test_files_in_parts(tmp_path):
    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    write_gguf(paths[0], {"a": 1, **split_key(0, 2, 2)}, {"v": FLOATS})
    assert "m-00002-of-00002.gguf missing: the model is in 2 files" in refusal(paths[0])
    write_gguf(paths[1], split_key(1, 2, 2), {"w": FLOATS})
    for path in paths:  # any part names all
        with open_gguf(path) as gguf:
            assert gguf.metadata["a"] == 1
            assert {name: tensor.path for name, tensor in gguf.tensors.items()} == dict(
                zip("vw", paths, strict=True)
            )
    write_gguf(paths[1], split_key(0, 2, 2), {"w": FLOATS})
    assert "split.no 0 and split.count 2 contradict its name" in refusal(paths[0])
    write_gguf(paths[1], split_key(1, 2, 2), {"v": FLOATS})
    assert "v is in m-00001-of-00002.gguf too" in refusal(paths[0])
    write_gguf(paths[1], split_key(1, 2, 2), {"w": FLOATS, "x": FLOATS})
    assert "split.tensors.count is 2, but its parts have 3" in refusal(paths[0])
    alone = write_gguf(tmp_path / "alone.gguf", split_key(0, 2, 2), {"v": FLOATS})
    assert "split.no 0 and split.count 2 contradict its name" in refusal(alone)
