"""Weights in codes for Triton's kernels: packing, products and lookups, for a backend that
`has_coded_linear`.
"""

from .gpu.experts.grouped_linear import grouped_coded_linear as grouped_coded_linear
from .gpu.linear.coded_linear import coded_linear as coded_linear
from .gpu.linear.coded_rows import take_coded_rows as take_coded_rows
from .gpu.linear.packed import PackedCodes as PackedCodes
from .gpu.linear.packed import PackedExperts as PackedExperts
from .gpu.linear.packed import can_pack_codes as can_pack_codes
from .gpu.linear.packed import pack_codes as pack_codes
from .gpu.linear.packed import stack_codes as stack_codes
