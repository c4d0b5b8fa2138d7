"""A route is declared once, in `protocol/endpoints.py`; a forgotten part is an error before a model loads."""

import subprocess
import sys
import textwrap

import pytest

from paged.protocol import endpoints
from paged.protocol.calls.tokens import TokenizeCall
from paged.protocol.endpoints import ACCESS, PAGE_FILES, ROUTES, Endpoint
from paged.protocol.openapi import openapi
from paged.server.routes import table

WHOLE = {"method": "POST", "path": "/new", "summary": "Do it", "answer": "Any", "call": TokenizeCall}


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.setattr(endpoints, "_LISTED", [*endpoints._LISTED])


def test_each_route_is_answered_described_and_has_a_label():
    assert table.HANDLERS.keys() == {*ROUTES}
    described = openapi()["paths"]
    assert [(method.upper(), path) for path, of in described.items() for method in of] == [
        (route.method, route.path) for route in ROUTES
    ]
    for route in ROUTES:
        operation = described[route.path][route.method.lower()]
        assert (operation.get("security") == []) == (ACCESS[route.path] not in ("keys", "admin", "watch"))
        assert ("401" in operation["responses"]) == route.needs_key
        assert ("requestBody" in operation) == (route.call is not None)
    assert {route.path for route in ROUTES if not route.needs_key} == {
        *("/health", "/ready", "/version", "/api/version", "/metrics", "/openapi.json"),
        *(endpoint.path for endpoint in PAGE_FILES),
    }


@pytest.mark.parametrize("name", ["method", "path", "summary", "answer"])
def test_a_declaration_must_be_whole(name):
    with pytest.raises(TypeError, match=name):
        Endpoint(**{key: value for key, value in WHOLE.items() if key != name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "new"}, "POST new: a path begins with a slash"),
        ({"call": None}, "POST /new: POST has a call"),
        ({"method": "GET"}, "GET /new: POST has a call, GET and admin have none"),
        ({"path": "/admin/new"}, "POST /admin/new: /admin/ is for the admin key"),
        ({"access": "admin"}, "POST /new: /admin/ is for the admin key"),
        ({"path": "/admin/new", "access": "admin"}, "POST has a call, GET and admin have none"),
        ({"answer": "Nonsense"}, "no schema is named 'Nonsense'"),
        ({"answer": None}, "JSON has a schema"),
        ({"path": "/tokenize"}, "POST /tokenize is declared twice"),
    ],
)
def test_a_wrong_declaration_is_an_error(change, message):
    with pytest.raises(AssertionError, match=message):
        Endpoint(**{**WHOLE, **change})


def test_a_route_that_nothing_answers_is_an_error_at_import():
    script = """
        from paged.protocol import endpoints
        new = endpoints.Endpoint(method="GET", path="/new", summary="Do it", answer="Any")
        endpoints.ROUTES += (new,)
        import paged.server.routes.table
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert "AssertionError: nothing answers /new: see docs/add-a-route.md" in done.stderr
