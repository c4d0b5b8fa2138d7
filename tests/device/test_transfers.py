"""Uploads and downloads of steps, on a device that does its work late: see tests/support/late_cuda.py."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from paged.device import transfers
from paged.device.transfers import Transfers
from paged.kernels.gpu.target import in_interpreter
from tests.support.fake_cuda import lacks
from tests.support.late_cuda import late_cuda

DTYPES = (torch.int64, torch.int32, torch.float32)
late = pytest.mark.skipif(
    lacks() is not None or not in_interpreter(),
    reason=lacks() or "a GPU is here: kernels are not interpreted",
)


def random_parts(rng: np.random.Generator) -> list[tuple[Any, torch.dtype]]:
    shapes = [(int(rng.integers(0, 40)),), (int(rng.integers(1, 5)), 3), (0,)]
    parts = [(rng.integers(-99, 99, shapes[int(rng.integers(3))]), DTYPES[i % 3]) for i in range(7)]
    return [(numbers.tolist() if i == 3 else numbers, dtype) for i, (numbers, dtype) in enumerate(parts)]


def round_trip(device: str, seed: int, num_steps: int = 5) -> None:
    """Send numbers and fetch twice their value, of several steps before the first is waited for."""
    rng, transfers_ = np.random.default_rng(seed), Transfers(torch.device(device))
    under_way = []
    for _ in range(num_steps):
        upload, download = transfers_.new_upload(), transfers_.new_download()
        parts = random_parts(rng)
        sent = [upload.put(numbers, dtype) for numbers, dtype in parts]
        upload.send()
        received = [download.get(part.tensor * 2) for part in sent]
        download.send()
        under_way.append((parts, received, download))
        if len(under_way) == transfers.NUM_BUFFERS:
            check(*under_way.pop(0))
    for step in under_way:
        check(*step)


def check(parts: Any, received: Any, download: Any) -> None:
    download.wait()
    for (numbers, dtype), part in zip(parts, received, strict=True):
        assert part.numbers.tolist() == (2 * np.array(numbers)).tolist()
        assert part.numbers.dtype == transfers.NUMPY_DTYPES[dtype]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=late)])
@pytest.mark.parametrize("seed", range(4))
def test_numbers_arrive_whatever_is_under_way(device, seed):
    with late_cuda(seed) if device == "cuda" else nullcontext():
        round_trip(device, seed)


@late
def test_a_buffer_is_not_written_while_the_device_reads_it(monkeypatch):
    """Without the wait, some order of the device's work gives wrong numbers."""
    monkeypatch.setattr(transfers._Buffer, "in_use", False)
    assert not all(map(arrive_in_order, range(20)))


def arrive_in_order(seed: int) -> bool:
    """Return whether the numbers of more uploads than there are buffers arrive."""
    with late_cuda(seed):
        uploads, sent = Transfers(torch.device("cuda")), []
        for step in range(4):
            upload = uploads.new_upload()
            sent.append(upload.put([step] * 9, torch.int64))
            upload.send()
        return [part.tensor.tolist() for part in sent] == [[step] * 9 for step in range(4)]


@late
@pytest.mark.parametrize("seed", range(4))
def test_uploads_beyond_the_buffers_wait(seed):
    assert arrive_in_order(seed)


@late
def test_what_is_beyond_pinned_memory_comes_back_alone_and_leaves_the_device(monkeypatch):
    """Together, too: 8 numbers fit, 9 do not, nor does one after 8."""
    monkeypatch.setattr(transfers, "MOST_PINNED", 64)
    with late_cuda(0):
        download = Transfers(torch.device("cuda")).new_download()
        tensors = [torch.arange(n, device="cuda") for n in (9, 8, 1)]
        parts = [download.get(tensor) for tensor in tensors]
        assert [hasattr(part, "numbers") for part in parts] == [True, False, True]
        gone = [weakref.ref(tensor) for tensor in tensors]
        del tensors
        assert [tensor() is None for tensor in gone] == [True, False, True]
        download.send()
        download.wait()
        assert [part.numbers.tolist() for part in parts] == [[*range(9)], [*range(8)], [0]]
        assert gone[1]() is None


@late
def test_an_upload_beyond_pinned_memory_goes_without_it(monkeypatch):
    monkeypatch.setattr(transfers, "MOST_PINNED", 64)
    with late_cuda(1):
        upload = Transfers(torch.device("cuda")).new_upload()
        sent = [upload.put([*range(n)], torch.int64) for n in (5, 9)]
        upload.send()
        assert [part.tensor.tolist() for part in sent] == [[*range(5)], [*range(9)]]


@late
def test_a_download_is_not_overwritten_before_it_is_read():
    with late_cuda(2):
        downloads, parts = Transfers(torch.device("cuda")), []
        for step in range(transfers.NUM_BUFFERS + 1):
            download = downloads.new_download()
            parts.append((download, download.get(torch.full((3,), step, device="cuda"))))
            download.send()
        for step, (download, part) in enumerate(parts):
            download.wait()
            assert part.numbers.tolist() == [step] * 3


def test_on_a_cpu_numbers_are_copied_once_when_they_are_put():
    cpu, numbers = Transfers(torch.device("cpu")), np.arange(3)
    sent = cpu.new_upload().put(numbers, torch.int64)
    assert np.shares_memory(sent.numbers, sent.tensor.numpy())
    assert np.shares_memory(cpu.new_download().get(sent.tensor).numbers, sent.numbers)
    numbers += 7
    assert sent.tensor.tolist() == [0, 1, 2]
