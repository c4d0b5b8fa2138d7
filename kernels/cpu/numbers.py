"""How numbers are stored: the kinds that vectors are loaded from and stored to."""

import torch

FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8 = range(5)  # FLOAT8 is e4m3fn
ITEM_SIZES = (4, 2, 2, 1, 1)  # bytes of a number
KINDS = {
    torch.float32: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.int8: INT8,
    torch.float8_e4m3fn: FLOAT8,
}
