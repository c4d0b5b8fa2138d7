"""/openapi.json: valid, and its schemas take what the tables parse and what the answers are."""

from contextlib import nullcontext

import jsonschema
import pytest

from paged.base.errors import PagedError
from paged.base.fields import Effect
from paged.protocol.endpoints import ENDPOINTS, parse_call
from paged.protocol.limits import Limits
from paged.protocol.openapi import openapi
from tests.protocol.test_bodies import WRONG
from tests.support.api_fields import BODIES, CHAT, changes

DESCRIPTION = openapi()
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


def test_the_schema_has_the_neutral_values_of_refused_fields():
    num_values = 0
    for url, body in BODIES.items():
        for field in ENDPOINTS[url].table.with_effect(Effect.REFUSED):
            for value in field.neutral:
                given = {**body, field.name: value}
                assert parse_call(url, given).values == parse_call(url, body).values
                validator(url).validate(given)
                num_values += 1
            given = {**body, field.name: "wrong"}
            assert not validator(url).is_valid(given)
            with pytest.raises(PagedError, match=f"{field.name} is not supported"):
                parse_call(url, given)
    assert num_values > 50


def tag(**more):
    return {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>", **more}


SCHEMA = {"type": "json_schema", "json_schema": {}}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], "tags": [tag()]}
TAGS = [
    ({"format": {"type": "sequence", "elements": [SCHEMA, {"type": "star", "content": SCHEMA}]}}, True),
    ({"format": {"type": "json_schema", "json_schema": True, "style": "json"}}, True),
    ({"format": {"type": "json_schema", "json_schema": False}}, False),
    ({"format": {"type": "json_schema", "json_schema": {}, "style": "xml"}}, False),
    ({"format": {**TRIGGERED, "tags": [{"begin": "<", "content": SCHEMA, "end": ""}]}}, True),
    ({"format": {**TRIGGERED, "tags": [SCHEMA]}}, False),
    ({"format": {**TRIGGERED, "at_least_one": 1}}, False),
    ({"format": {"type": "or", "elements": [{"type": "optional", "content": {"type": "regexp"}}]}}, False),
    ({"format": tag(wrong=1)}, False),
    ({"format": {"type": "regex"}}, False),
    ({"structures": [{"begin": "<", "schema": {}, "end": ">"}], "triggers": ["<"]}, True),
    ({"structures": [{"begin": "<", "schema": {}}], "triggers": ["<"]}, False),
    ({"format": SCHEMA, "structures": [{"begin": "<", "schema": {}, "end": ">"}]}, False),
]


@pytest.mark.parametrize(("given", "is_valid"), TAGS, ids=str)
def test_the_schema_knows_the_formats_of_structural_tags(given, is_valid):
    for name, value in (
        ("structured_outputs", {"structural_tag": given}),
        ("response_format", {"type": "structural_tag", **given}),
    ):
        body = {**BODIES[CHAT], name: value}
        assert validator(CHAT).is_valid(body) == is_valid
        with nullcontext() if is_valid else pytest.raises(PagedError) as refused:
            parse_call(CHAT, body)
        assert is_valid or refused.value.param.startswith(name)
