"""The order of a grouped product's rows: a counting sort by expert."""

from ...rows.experts import SORT_BY_EXPERT
from ..kernels import each_unit
from ..simd.memory import get_int, get_long, set_int, set_long


@each_unit(SORT_BY_EXPERT)
def _sort_by_expert(args, _unit, scratch):
    num_experts = args.num_experts
    for expert in range(num_experts + 1):
        set_long(scratch + 8 * expert, 0)
    for pair in range(args.num_pairs):
        at = scratch + 8 * (get_int(args.experts + 4 * pair) + 1)
        set_long(at, get_long(at) + 1)
    first = 0
    for expert in range(num_experts + 1):
        at = scratch + 8 * expert
        first += get_long(at)
        set_long(at, first)
        set_int(args.offsets + 4 * expert, first)
    for pair in range(args.num_pairs):
        expert = get_int(args.experts + 4 * pair)
        token = pair // args.num_chosen
        at = scratch + 8 * expert
        place = get_long(at)
        set_long(at, place + 1)
        set_long(args.places + 8 * pair, place)
        set_long(args.sources + 8 * place, token)
        if args.slots != 0:
            slot = get_int(args.adapters + 4 * token)
            set_int(args.slots + 4 * place, slot * num_experts + expert if slot >= 0 else -1)
