"""What an engine's steps need of a backend, and its service for whole ones: record a step, and replay it."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

MOST_CALL_TENSORS = 3
NoteCall = Callable[[Callable[..., None], tuple[Tensor, ...]], None]


class NotRecordableError(Exception):
    """A torch operation that computes something, which a recorded step cannot replay."""


class _Recording(threading.local):
    note: NoteCall | None = None


_recording = _Recording()


def call_within_step(call: Callable[..., None], *tensors: Tensor) -> None:
    """Call call(*tensors), for example an exchange with other processes. It must not keep the tensors.

    In a step that is being recorded, the call is noted instead. Each replay makes the call at this place
    among the launches, with tensors like these in the memory of the step.
    """
    assert len(tensors) <= MOST_CALL_TENSORS, "a recorded call has a fixed number of places for tensors"
    if _recording.note is None:
        call(*tensors)
    else:
        _recording.note(call, tensors)


def note_calls(note: NoteCall | None) -> None:
    """Pass this thread's calls of `call_within_step` to `note` from now on. None carries them out again."""
    _recording.note = note


class AttentionSchedule(NamedTuple):
    """How attention divides the work of a step, given the lengths of its sequences."""

    of_groups: list[Any]  # of each layer group, in the backend's own form
    sizes: tuple[object, ...]  # a recorded step can be replayed with any plan of the same sizes
    num_steps: int  # that it holds for: this one, and those of one more token in each sequence


class RecordedStep(Protocol):
    """The recorded launches of one step, to be replayed for other steps with as many tokens in total."""

    num_bytes: int  # of the memory that a replay uses

    def use_memory(self, memory: Tensor) -> None:
        """Set the memory for intermediate results. Steps that never run concurrently may share memory."""

    def use(self, plan: AttentionSchedule, inputs: Sequence[Tensor], block_tables: Sequence[Tensor]) -> None:
        """Set the plan and the input tensors for the next replays."""

    def replay(self) -> tuple[Tensor, ...]:
        """Launch everything. Return the outputs. The next replay overwrites them."""


class StepRecorder(Protocol):
    """Records steps of one model, to replay them without any Python between kernels."""

    def plan(self, seq_lens: Tensor, cu_seqlens_q: Tensor) -> AttentionSchedule:
        """Plan the attention of a step."""

    def record(
        self,
        compute: Callable[[], tuple[Tensor, ...]],
        inputs: Sequence[Tensor],  # those for which another step has other tensors
        block_tables: Sequence[Tensor],  # of each layer group; they are among the inputs
    ) -> RecordedStep:
        """Record the launches of compute(). Raises NotRecordableError if torch computes a part of it."""

    def new_memory(self, num_bytes: int) -> Tensor:
        """Allocate memory for `RecordedStep.use_memory`. Raises RuntimeError if memory is short."""


class Needs(NamedTuple):
    """What a backend that compiles ahead of time has to compile.

    operations: names in `operations.Kernels`: the operations of the model's layers, and all operations that a
        request may need.
    head_dims: the head dimensions of K and V in all layers.
    quantization: the format to which float weights are quantised while loading; None if they are not.
    has_codes: whether weights may be stored quantised in the checkpoint.
    tower_head_dim: the head dimension of a vision tower, whose K and V have the model's dtype; None if there
        is no tower.
    """

    operations: frozenset[str]
    dtype: torch.dtype
    cache_dtype: torch.dtype
    head_dims: frozenset[tuple[int, int]]
    quantization: str | None
    has_codes: bool
    tower_head_dim: int | None = None
