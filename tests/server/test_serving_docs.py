"""docs/serving*.md name every route, status and option of the server."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from paged.protocol.endpoints import ROUTES
from paged.protocol.openapi import openapi
from paged.server.options import ServeOptions

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("serving*.md"))
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def test_every_route_and_option_is_documented():
    for route in ROUTES:
        assert f"`{route.method} {route.path}`" in TEXT
    for field in fields(ServeOptions):
        assert f"`--{field.name.replace('_', '-')}`" in TEXT


def test_every_status_is_documented():
    paths = openapi()["paths"].values()
    statuses = {code for path in paths for operation in path.values() for code in operation["responses"]}
    for status in statuses - {"200"}:
        assert f"\n| {status} |" in TEXT
