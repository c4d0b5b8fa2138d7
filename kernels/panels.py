"""Linear layers by the CPU kernels: weights in panels, their products and lookups, for a backend that
`has_linear`. `coded_panels` has those of weights in codes, `expert_panels` those of experts.
"""

from .cpu.launch.huge_pages import in_huge_pages as in_huge_pages
from .cpu.linear.linear import can_pair as can_pair
from .cpu.linear.linear import linear as linear
from .cpu.linear.linear import pack as pack
from .cpu.linear.linear import pad as pad
from .cpu.linear.pack_bf12 import pack_bf12 as pack_bf12
from .cpu.linear.panels import Panels as Panels
from .cpu.rows.take_rows import take_panel_rows as take_panel_rows
from .cpu.rows.take_rows import take_rows as take_rows
from .cpu.rows.take_rows import widen_rows as widen_rows
from .cpu.target import HAS_TILES as HAS_TILES
from .cpu.target import TARGET as TARGET
