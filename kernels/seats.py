"""Optional services of a backend that keeps running requests by seat: unpack a step, and take parameters."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

# The columns of a row, which says what one request does in the step; see `gpu.unpack_step`.
SEAT, START, FIRST_TOKEN, LAST_TOKEN, FIRST_ENTRY, ENTRIES, NUM_ENTRIES = range(7)
NUM_COLUMNS = 7
FROM_SEAT = -1  # as FIRST_TOKEN: the only new token is the seat's last one, which as LAST_TOKEN stays

# The columns that a step has for each token, see `StepTensors`. Those of layer groups follow.
TOKEN, POSITION, SEAT_OF_TOKEN, DRAWN_AT = range(4)
NUM_TOKEN_COLUMNS = 4
NO_SLOT = -1  # as a slot: the K and V of the token are not stored


class StepTensors(NamedTuple):
    """The tensors into which a step is unpacked, see `gpu.unpack_step`.

    by_token: for each token, its id, its position, its seat, the position of the token drawn after it, its
        slot in each group and, for dynamic rope, its length.
    """

    by_token: Tensor  # i64[num_columns, num_tokens]
    tables: Tensor  # i32[num_groups, num_rows and more, width]
    seq_lens: Tensor  # i32[num_rows]
    cu_seqlens_q: Tensor  # i32[num_rows + 1]


class RowParameters(NamedTuple):
    """The parameters of `sample_tokens` for each row of its logits."""

    seeds: Tensor  # i64[num_rows]
    temperature: Tensor  # f32[num_rows], and so are the next four
    min_p: Tensor
    top_n_sigma: Tensor
    typical_p: Tensor
    top_p: Tensor
    top_k: Tensor  # i32[num_rows]


NUM_PARAMETER_FLOATS = 5
NUM_PARAMETER_WORDS = 2 + NUM_PARAMETER_FLOATS + 1  # of 32 bits, in a row of the table of parameters

TakeParameters = Callable[[Tensor, Tensor], RowParameters]  # see `gpu.sampling.take_parameters`
UnpackStep = Callable[..., None]  # with the parameters of `gpu.unpack_step.unpack_step`
