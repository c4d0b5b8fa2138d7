"""/openapi.json: valid, and its schemas take what the tables parse and what the answers are."""

import jsonschema
import pytest

from paged.errors import PagedError
from paged.protocol.endpoints import ENDPOINTS, parse_call
from paged.protocol.limits import Limits
from paged.protocol.openapi import openapi
from tests.protocol.test_bodies import WRONG
from tests.support.api_fields import BODIES, CHAT, changes

GETS = ("/v1/models", "/health", "/ready", "/version", "/metrics", "/openapi.json")
DESCRIPTION = openapi([*(("POST", url) for url in ENDPOINTS), *(("GET", url) for url in GETS)])
SCHEMAS = DESCRIPTION["components"]["schemas"]
TRUSTING = Limits(trust_chat_template=True, max_logprobs=-1)


def validator(url):
    (media,) = DESCRIPTION["paths"][url]["post"]["requestBody"]["content"].values()
    return jsonschema.Draft202012Validator({**media["schema"], "components": {"schemas": SCHEMAS}})


def test_every_reference_has_a_schema():
    names = set()

    def walk(value):
        if isinstance(value, dict):
            if "$ref" in value:
                names.add(value["$ref"].removeprefix("#/components/schemas/"))
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(DESCRIPTION)
    assert names <= SCHEMAS.keys()
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    with pytest.raises(KeyError):
        openapi([("GET", "/unknown")])


@pytest.mark.parametrize(("url", "name", "before", "after"), [*changes()], ids=str)
def test_valid_bodies_match_their_schema(url, name, before, after):
    del name
    validator(url).validate(before)
    validator(url).validate(after)


def test_wrong_bodies_do_not_match_it_or_are_wrong_in_a_way_that_no_schema_says():
    """A body that the schema refuses is refused: checked for each wrong type of each field."""
    refused = 0
    for url, fields, _, _ in WRONG:
        refused += not validator(url).is_valid({**BODIES[url], **fields})
    assert refused > len(WRONG) / 2
    for url, body in BODIES.items():
        properties = SCHEMAS[validator(url).schema["$ref"].rpartition("/")[2]]["properties"]
        for name in properties:
            for value in (True, -1e30, 0.5, "\x00wrong", [], [{}], {"wrong": 1}):
                given = {**body, name: value}
                try:
                    parse_call(url, given, TRUSTING)
                except PagedError:
                    continue
                assert validator(url).is_valid(given), (url, name, value)


def test_a_null_stands_for_a_field_that_is_not_given():
    for url, body in BODIES.items():
        for field in ENDPOINTS[url].table.fields:
            if not field.required and field.name not in body:
                given = {**body, field.name: None}
                assert parse_call(url, given).values == parse_call(url, body).values
                assert validator(url).is_valid(given) or field.effect.value == "refused"
    with pytest.raises(PagedError, match="messages is missing"):
        parse_call(CHAT, {"messages": None})
