"""Panels of weights in codes, as quantised files have them: see `panels`."""

from .cpu.factor_heads import group_of as group_of
from .cpu.formats import LEAST_GROUP as LEAST_GROUP
from .cpu.linear.int4_search import best_fit as best_fit
from .cpu.linear.pack_codes import is_exact as is_exact
from .cpu.linear.pack_codes import pack_codes as pack_codes
