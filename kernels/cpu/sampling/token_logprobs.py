"""Log-probabilities of tokens and of the likeliest ones, and the tokens' ranks."""

import torch
from torch import Tensor

from ...checked import checked
from ...plain.sampling import selection as torch_selection
from ..launch.tasks import Task
from ..rows.row_kernel import has_regular_rows, in_torch
from ..target import padded

LOGPROBS = Task(
    "sampling.token_logprobs.logprobs",
    ("logits", "tokens", "values", "ids", "ranks"),
    ("size", "stride", "width", "num_top"),
)


by_torch = in_torch("token_logprobs")


@checked
def token_logprobs(
    logits: Tensor,  # f32[n, vocab_size]
    tokens: Tensor,  # i64[n]
    num_top: int,  # 0 to vocab_size
) -> tuple[Tensor, Tensor, Tensor]:  # f32 and i64 [n, 1 + num_top], i64[n]
    """Return log_softmax of tokens and of the likeliest; see `reference.token_logprobs`."""
    if not (has_regular_rows(logits) and tokens.is_contiguous()):
        return by_torch(logits, tokens, num_top)
    num_rows, size = logits.shape
    values = logits.new_empty(num_rows, 1 + num_top)
    ids = tokens.new_empty(num_rows, 1 + num_top)
    ranks = torch.empty_like(tokens)
    width = -(-size // torch_selection.HEIGHT)
    LOGPROBS.run(
        num_rows,
        logits=logits,
        tokens=tokens,
        values=values,
        ids=ids,
        ranks=ranks,
        size=size,
        stride=logits.stride(0) * 4,
        width=width,
        num_top=num_top,
        # Column maxima, and a key of each logit.
        scratch_size=8 * padded(width) + 8 * size,
    )
    return values, ids, ranks
