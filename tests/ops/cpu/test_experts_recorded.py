"""Products of experts: launches in recorded steps, and their scratch memory."""

import pytest
import torch

from paged.kernels.checks import TrustedContents
from paged.kernels.coded_panels import pack_codes
from paged.kernels.cpu.launch.graph import Graph, Recorder, column
from paged.kernels.cpu.linear import linear as module
from paged.kernels.cpu.linear.amx_linear import TILES, multiply_tiles
from paged.kernels.cpu.linear.linear import LINEAR
from paged.kernels.cpu.rows.experts import route, sort_by_expert
from paged.kernels.cpu.target import HAS_DOT
from paged.kernels.expert_panels import ExpertPanels, grouped_panel_linear
from paged.kernels.panels import pack
from paged.kernels.routing import RoutingOptions


def test_a_replay_follows_another_routing_and_keeps_what_late_threads_read():
    """A thread that comes late looks at the offsets to find that no unit is left: nothing else lies there."""
    options = RoutingOptions(num_chosen=2)
    weights = torch.randn(3, 8, 32, 32)
    experts = [ExpertPanels([pack(weight) for weight in layer]) for layer in weights]

    def compute(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for own in experts:
            rows = sort_by_expert(route(logits, options)[0], 8)
            x = grouped_panel_linear(x, own, rows.offsets, rows.sources)[: len(logits)]
        return x

    logits, x = torch.randn(5, 8), torch.randn(5, 32)
    with TrustedContents(), Recorder() as recorder:
        out = compute(logits, x)
    graph = Graph(recorder, (logits, x), (out,), 2)
    memory = torch.empty(graph.num_bytes + 64, dtype=torch.uint8)
    graph.use_memory(memory[-memory.data_ptr() % 64 :])
    for _ in range(3):
        inputs = torch.randn(5, 8), torch.randn(5, 32)
        graph.use_inputs(inputs)
        assert torch.equal(graph.replay()[0], compute(*inputs))
    read = {}  # by the launch that looks at them last
    for number, launch in enumerate(recorder.launches):
        pointers = {
            name: int(graph._table[number, column(name, launch.task)]) for name in launch.task.pointers
        }
        for first in read.values():  # of earlier launches
            assert not any(first <= address < first + 4 * 9 for address in pointers.values())
        if launch.task in (LINEAR, TILES):
            read[number] = pointers["offsets"]
    assert len(read) == 3


@pytest.mark.skipif(not HAS_DOT, reason="no AVX512-BF16: nothing is packed in pairs")
def test_tiles_have_memory_for_factors_wherever_an_expert_in_codes_is(monkeypatch):
    """After one in floats, too: without it the factors would be written behind the scratch memory."""
    sizes = []
    monkeypatch.setattr(module, "_fills_tiles", lambda _: True)  # as on a CPU with AMX
    monkeypatch.setattr(module, "multiply_tiles", multiply_tiles, raising=False)
    monkeypatch.setattr(TILES, "run", lambda *_, scratch_size, **_fields: sizes.append(scratch_size))
    floats = pack(torch.randn(32, 64).bfloat16(), pairs=True)
    codes = pack_codes(torch.randint(-127, 128, (32, 64), dtype=torch.int8), torch.rand(32, 2), pairs=True)
    assert codes.has_groups
    x, offsets = torch.randn(4, 64).bfloat16(), torch.tensor([0, 2, 4], dtype=torch.int32)
    for experts in ([floats, codes], [codes, floats], [codes, codes], [floats, floats]):
        grouped_panel_linear(x, ExpertPanels(experts), offsets)
    assert sizes[0] == sizes[1] == sizes[2] > sizes[3]
