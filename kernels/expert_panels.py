"""Panels of the weights of experts, multiplied by one launch: see `panels`."""

from .cpu.experts.grouped_linear import ExpertPanels as ExpertPanels
from .cpu.experts.grouped_linear import expert_memory as expert_memory
from .cpu.experts.grouped_linear import grouped_panel_linear as grouped_panel_linear
