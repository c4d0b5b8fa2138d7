"""How numbers are stored: the kinds that vectors are loaded from and stored to."""

FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8 = range(5)  # FLOAT8 is e4m3fn
ITEM_SIZES = (4, 2, 2, 1, 1)  # bytes of a number
