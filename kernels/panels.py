"""Linear layers by the CPU kernels: weights in panels, their products and lookups, for a backend that
`has_linear`.
"""

from .cpu.experts.grouped_linear import ExpertPanels as ExpertPanels
from .cpu.experts.grouped_linear import expert_memory as expert_memory
from .cpu.experts.grouped_linear import grouped_panel_linear as grouped_panel_linear
from .cpu.factors import LEAST_GROUP as LEAST_GROUP
from .cpu.factors import group_of as group_of
from .cpu.linear.int4_search import best_fit as best_fit
from .cpu.linear.linear import can_pair as can_pair
from .cpu.linear.linear import linear as linear
from .cpu.linear.linear import pack as pack
from .cpu.linear.linear import pad as pad
from .cpu.linear.pack_bf12 import pack_bf12 as pack_bf12
from .cpu.linear.pack_codes import is_exact as is_exact
from .cpu.linear.pack_codes import pack_codes as pack_codes
from .cpu.linear.panels import Panels as Panels
from .cpu.rows.take_rows import take_panel_rows as take_panel_rows
from .cpu.rows.take_rows import take_rows as take_rows
from .cpu.rows.take_rows import widen_rows as widen_rows
