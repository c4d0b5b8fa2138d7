"""Uploads and downloads of steps, on a device that does its work late: see tests/support/late_cuda.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from paged.kernels.gpu.target import in_interpreter
from paged.model import transfers
from paged.model.transfers import Transfers
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
def test_a_large_part_comes_back_alone(monkeypatch):
    monkeypatch.setattr(transfers, "LARGEST_PART", 64)
    with late_cuda(0):
        download = Transfers(torch.device("cuda")).new_download()
        large, small = (torch.arange(n, device="cuda") for n in (9, 8))
        parts = [download.get(large), download.get(small)]
        assert parts[0].numbers.tolist() == [*range(9)]
        assert not hasattr(parts[1], "numbers")
        download.send()
        download.wait()
        assert parts[1].numbers.tolist() == [*range(8)]


def test_on_a_cpu_nothing_is_copied_twice_and_arguments_stay_their_owners():
    upload, numbers = Transfers(torch.device("cpu")).new_upload(), np.arange(3)
    sent = upload.put(numbers, torch.int64)
    numbers += 7
    assert sent.tensor.tolist() == [0, 1, 2]
