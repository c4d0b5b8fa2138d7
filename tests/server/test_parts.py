"""The engine requests of one HTTP request are parts of one call, which take turns with other calls."""

from __future__ import annotations

import pytest

from paged import LLMEngine
from paged.scheduler.scheduler import Scheduler
from paged.server.engine_client import EngineClient
from tests.deaths import OPTIONS
from tests.support.mortal_engines import MortalEngines
from tests.support.served import serving

BODIES = {
    "/v1/completions": {"prompt": [[5, 6], [7, 8], [9]], "max_tokens": 1, "echo": True, "logprobs": 1},
    "/v1/embeddings": {"input": [[5, 6], [7, 8], [9]]},
    "/v1/score": {"prompt": [5, 6], "continuations": [[7], [8], [9]]},
    "/generate/batch": {"prompts": ["a", "b", "c"], "max_tokens": 1},
}


@pytest.fixture(scope="module", params=["in this process", "in another process"])
def server(request, engine):
    if request.param == "in this process":
        with serving(engine) as served:
            yield served
        return
    engines = MortalEngines([LLMEngine("demo", **OPTIONS)], 0, None)
    with engines.installed(), serving(EngineClient("demo", **OPTIONS), closes=True) as served:
        yield served


@pytest.mark.parametrize("path", BODIES)
def test_prompts_and_continuations_are_parts_of_their_http_request(path, server, monkeypatch):
    calls = []
    add = Scheduler.add
    monkeypatch.setattr(
        Scheduler, "add", lambda self, request: (calls.append(request.inputs.part_of), add(self, request))
    )
    for _ in range(2):
        assert server.request("POST", path, BODIES[path])[0] == 200
    first, second = calls[:3], calls[3:]
    assert len({*first}) == len({*second}) == 1, "they are parts of one call"
    assert first[0] != second[0]
    assert all(calls)
    assert server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1, "n": 2})[0] == 200
    assert calls[6:] == [""], "a single prompt is no part"
