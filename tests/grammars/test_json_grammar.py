"""JSON schemas: outputs are exactly what a schema says, have bounded digits, and can end."""

from __future__ import annotations

import json
import logging
import random
import tracemalloc
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from paged import RequestError
from paged.base.strict_json import parse_json
from paged.grammars import json_formats, json_grammar
from paged.grammars.json_grammar import JsonGrammar
from paged.options.structural_tag import exact_json, schema_text, structural_tag_text
from tests.support.json_schemas import closed, listed
from tests.support.random_schemas import (
    COUNT_IN_CI,
    accepts,
    is_valid,
    matcher_of,
    possible,
    random_text,
    try_one,
)

BIG = 1182937465564738561
# Schemas of numbers, texts that match them, and texts that do not.
NUMBERS: list[tuple[str, list[str], list[str]]] = [
    (f'{{"enum":[{BIG},{BIG + 1}]}}', [f"{BIG}", f"{BIG + 1}"], [f"{BIG - 1}", f"{BIG + 2}"]),
    ('{"const":9007199254740993}', ["9007199254740993"], ["9007199254740992"]),
    (
        '{"minimum":9007199254740993,"maximum":9007199254740993,"type":"integer"}',
        [f"{2**53 + 1}"],
        [f"{2**53}"],
    ),
    (
        '{"type":"integer","exclusiveMinimum":9007199254740991,"maximum":9007199254740993}',
        [f"{2**53}"],
        [f"{2**53 - 1}"],
    ),
    ('{"type":"integer","minimum":18446744073709551616}', [f"{2**64}", "9" * 20], [f"{2**64 - 1}", "9" * 21]),
    ('{"type":"integer","maximum":-18446744073709551616}', [f"-{2**64}"], [f"-{2**64 - 1}", "0", "5"]),
    (
        '{"type":"integer","minimum":-9223372036854775808,"maximum":9223372036854775807}',
        [f"{-(2**63)}", f"{2**63 - 1}"],
        [f"{2**63}"],
    ),
    ('{"type":"integer"}', ["9" * 19, "-" + "9" * 19, "0"], ["1" + "0" * 19, "1.0", "01"]),
    ('{"const":0.30000000000000004}', ["0.30000000000000004"], ["0.3", "0.30000000000000005"]),
    ('{"const":0.1000000000000000055}', ["0.1000000000000000055"], ["0.1"]),
    ('{"const":1e400}', ["1E+400"], ["1"]),
    ('{"const":1E2}', ["100"], ["10"]),
    ('{"const":-0.0}', ["0"], ["1"]),
    (
        '{"type":"number","minimum":0.1,"maximum":0.30000000000000004}',
        ["0.30000000000000004", "0.1", "0.10"],
        ["0.30000000000000005", "0.09"],
    ),
    ('{"type":"number","exclusiveMinimum":0,"maximum":0.5}', ["0.5", "0.50", "0.001"], ["0", "0.0", "0.51"]),
    ('{"type":"number","exclusiveMaximum":0}', ["-0.1", "-1e-9", "-1e9"], ["0", "-0", "1"]),
    ('{"type":"number","minimum":2.5}', ["2.5", "1e1", "123456789.5"], ["2.4", "1e0", "0"]),
    ('{"type":"number","maximum":1.7976931348623157e308}', ["1e290", "-1e290"], ["1e291"]),
    (
        '{"type":"number"}',
        ["6.02214076e23", "-1e-05", "0.1", "12345678901234567"],
        ["123456789012345678", "1.", "+1", "1e400"],
    ),
    ('{"type":"integer","multipleOf":3,"minimum":-7,"maximum":7}', ["-6", "6", "0"], ["-7", "1", "9"]),
    (
        '{"type":"number","multipleOf":0.01,"exclusiveMinimum":0,"maximum":1}',
        ["0.01", "1", "0.5"],
        ["0", "0.001"],
    ),
    (
        '{"type":"number","multipleOf":1,"minimum":9007199254740993}',
        ["9007199254740993"],
        ["9007199254740992"],
    ),
    (
        '{"allOf":[{"type":"integer","minimum":9007199254740993},{"maximum":9007199254740994.5}]}',
        [f"{2**53 + 1}"],
        [f"{2**53}", f"{2**53 + 3}"],
    ),
]
# Where a schema may stand, and the value around one that matches it.
PLACES = {
    "alone": ("{}", "{}"),
    "property": ('{{"properties":{{"id":{}}},"required":["id"],"type":"object"}}', '{{"id": {}}}'),
    "optional property": (
        '{{"type":"object","properties":{{"a":{{"type":"null"}},"id":{}}}}}',
        '{{"id":{}}}',
    ),
    "other property": (
        '{{"type":"object","properties":{{"a":false}},"additionalProperties":{}}}',
        '{{"b":{}}}',
    ),
    "items": ('{{"type":"array","items":{},"minItems":1}}', "[{}]"),
    "prefix": ('{{"type":"array","prefixItems":[{{"type":"null"}},{}],"items":false}}', "[null,{}]"),
    "anyOf": ('{{"anyOf":[{{"type":"string"}},{{"type":"null"}},{}]}}', "{}"),
    "allOf": ('{{"allOf":[{{"type":"number"}},{}]}}', "{}"),
    "oneOf": ('{{"oneOf":[{{"type":"string"}},{}]}}', "{}"),
    "definition": ('{{"$ref":"#/$defs/n","description":"n","$defs":{{"n":{}}}}}', "{}"),
    "list of types": ('{{"type":["null","number"],"allOf":[{}]}}', "{}"),
}


@pytest.mark.parametrize("place", PLACES)
def test_numbers_are_exact(place):
    choose = random.Random(0)
    around, value = PLACES[place]
    for number, right, wrong in NUMBERS:
        schema = around.format(number)
        matcher = matcher_of(schema)
        for text in right:
            assert accepts(matcher, value.format(text)), (schema, text)
        for text in wrong:
            assert not accepts(matcher, value.format(text)), (schema, text)
        for _ in range(2):
            text = random_text(matcher, choose)
            assert is_valid(schema, text), (schema, text)


INEXACT = {
    '{"type":"object","patternProperties":{"^a":{"const":9007199254740993}}}': "patternProperties.^a.const",
    '{"items":{"type":"integer","multipleOf":3,"minimum":9007199254740993}}': "items.minimum",
    '{"properties":{"a":{"enum":[1, 9007199254740993]}},"minProperties":1}': "properties.a.enum[1]",
    '{"items":{"const":1e99999}}': "items.const",
    '{"minimum":1e-300}': "minimum",
    '{"type":"integer","multipleOf":3,"exclusiveMinimum":9007199254740994}': "exclusiveMinimum",
    '{"multipleOf":0}': "multipleOf",
    '{"minimum":"1"}': "minimum",
}


@pytest.mark.parametrize("schema", INEXACT)
def test_what_is_not_exact_is_refused_with_its_key(schema):
    with pytest.raises(RequestError) as refused:
        JsonGrammar(exact_json(schema))
    assert refused.value.param == INEXACT[schema]
    assert str(refused.value).startswith(f"{refused.value.param}: ")


def test_random_schemas():
    found = [try_one(seed) for seed in range(COUNT_IN_CI)]
    assert found.count("compared") > 60


@pytest.mark.parametrize(
    "schema",
    [
        "{}",
        '{"type":"object"}',
        '{"type":"number"}',
        '{"minimum":0}',
        '{"type":"integer"}',
        '{"type":"integer","maximum":-5}',
        '{"type":"number","minimum":-1,"maximum":1}',
        '{"minimum":10,"type":"number"}',
    ],
)
def test_a_model_that_prefers_digits_ends_its_numbers(schema):
    number_bytes = {*b"0123456789.-+eE"}
    for preferred in (b"9", b"0", b"-.1", b"1eE"):
        matcher = matcher_of(schema)
        found = bytearray()
        # The beginning of an object whose value is the number.
        if accepts(matcher, '{"a":1}'):
            found += b'{"a":'
            assert matcher.consume_tokens([*found])
        begin = len(found)
        while digits := number_bytes.intersection(possible(matcher)):
            found.append(next((byte for byte in preferred if byte in digits), min(digits)))
            assert matcher.consume_token(found[-1])
            assert len(found) - begin < 40
        text = found[begin:].decode()
        mantissa = text.lower().partition("e")[0].strip("-").replace(".", "")
        assert len(mantissa) <= (19 if "integer" in schema else 17)
        assert abs(float(text)) < float("inf")


ENDLESS = {
    '{"required":["c"],"properties":{"c":{"$ref":"#"}},"type":"object"}': "properties.c",
    '{"$ref":"#"}': "",
    '{"type":"object","required":["c"],"properties":{"c":{"$ref":"#/$defs/a"}},"$defs":{'
    '"a":{"$ref":"#/$defs/b"},"b":{"type":"array","minItems":1,"items":{"anyOf":['
    '{"$ref":"#/$defs/a"},{"$ref":"#"}]}}}}': "properties.c.items.anyOf",
    '{"type":"array","prefixItems":[{"type":"null"},{"$ref":"#"}],"minItems":2}': "items",
    '{"properties":{"a":{"type":"integer","minimum":5,"maximum":3}},"required":["a"]'
    ',"type":"object"}': "properties.a",
    '{"properties":{"a":{"enum":[]}},"required":["a"],"type":"object"}': "properties.a.enum",
}


@pytest.mark.parametrize("schema", ENDLESS)
def test_a_schema_without_a_finite_value_is_refused(schema):
    with pytest.raises(RequestError) as refused:
        JsonGrammar(exact_json(schema))
    assert (refused.value.param or "") == ENDLESS[schema], refused.value


TREE = closed({"v": {"type": "null"}, "c": {"$ref": "#"}}, [])
LIST = {"type": "array", "items": {"$ref": "#"}}
# Schemas whose recursion can end, and a value.
ENDING: list[tuple[Any, Any]] = [
    (TREE, {"v": None, "c": {"c": {}}}),
    (closed({"c": LIST}), {"c": [{"c": []}]}),
    (closed({"c": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}), {"c": {"c": None}}),
    ({"type": "array", "prefixItems": [{"$ref": "#"}], "items": False}, [[[]]]),
    # A part that has no value is left out where it need not be.
    (
        closed({"a": {"$ref": "#/$defs/x"}, "v": {}}, ["v"], **{"$defs": {"x": {"$ref": "#/$defs/x"}}}),
        {"v": 1},
    ),
]


@pytest.mark.parametrize("case", ENDING, ids=lambda case: json.dumps(case[1]))
def test_recursion_that_can_end_is_not_refused(case):
    schema, value = case
    jsonschema.validate(value, schema)
    assert accepts(matcher_of(json.dumps(schema)), json.dumps(value, separators=(",", ":")))


def ring(num: int) -> Any:
    """Return a schema of definitions that only the library can compile, each of which reaches all."""
    names = [f"d{i}" for i in range(num)]
    texts = {f"p{j}": {"type": "string"} for j in range(20)}
    definitions = {
        name: {
            "type": "object",
            "properties": texts,
            "patternProperties": {"^x": {"$ref": f"#/$defs/{other}"}},
        }
        for name, other in zip(names, [*names[1:], names[0]], strict=True)
    }
    return closed({name: {"$ref": f"#/$defs/{name}"} for name in names}, [], **{"$defs": definitions})


def chain(num: int) -> Any:
    """Return a schema whose definitions need each other in a row, of which any may be the whole value."""
    definitions: dict[str, Any] = {
        f"a{i}": closed({"n": {"$ref": f"#/$defs/a{i + 1}"}}, ["n"]) for i in range(num)
    }
    definitions[f"a{num}"] = {"type": "null"}
    return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in definitions], "$defs": definitions}


V = '"type":"object","required":["v"],"additionalProperties":false,"properties":{"v":{"type":"integer"}'
EMPTY = '{"enum":["x"],"pattern":"^y$"}'
# Schemas of which the library compiles parts, texts that match them, and texts that do not.
PARTS: list[tuple[str, list[str], list[str]]] = [
    # References lead from the root of the whole schema.
    (
        f'{{{V},"c":{{"type":"object","patternProperties":{{"^a":{{"$ref":"#"}}}}}}}}}}',
        ['{"v":1,"c":{"a":{"v":2}}}'],
        ['{"v":1,"c":{"a":{}}}', '{"v":1,"c":{"a":{"z":1}}}'],
    ),
    (
        f'{{{V},"c":{{"type":"object","minProperties":1,"additionalProperties":{{"$ref":"#"}}}}}}}}',
        ['{"v":1,"c":{"a":{"v":2}}}'],
        ['{"v":1,"c":{"a":{}}}', '{"v":1,"c":{}}'],
    ),
    (
        f'{{{V},"c":{{"type":"object","patternProperties":{{"^a":{{"$ref":"#/properties/v"}}}}}}}}}}',
        ['{"v":1,"c":{"a":2}}'],
        ['{"v":1,"c":{"a":"2"}}'],
    ),
    (json.dumps(ring(60)), ['{"d0":{"p0":"","x":{"x1":{}}}}'], ['{"d0":{"p0":1}}', '{"d0":{"x":1}}']),
    # By URI, by anchor, and from a schema within the schema.
    ('{"$id":"http://x/y","$defs":{"a":{"type":"integer"}},"$ref":"http://x/y#/$defs/a"}', ["1"], ['"x"']),
    ('{"$defs":{"a":{"$anchor":"foo","type":"integer"}},"$ref":"#foo"}', ["1"], ['"x"']),
    ('{"$defs":{"a/b~":{"$id":"#foo","type":"integer"}},"$ref":"#foo"}', ["1"], ['"x"']),
    (
        '{"$id":"http://x/y","$ref":"z","$defs":{"b":{"type":"string"},"a":{"$id":"z","$ref":"#/$defs/b",'
        '"$defs":{"b":{"type":"integer"}}}}}',
        ["1"],
        ['"x"'],
    ),
    (json.dumps(chain(200)), ["null", '{"n":{"n":null}}'], ['{"n":1}']),
    # A part without a value is left out where it is not needed.
    (f'{{"type":"object","properties":{{"a":{EMPTY},"b":{{}}}}}}', ['{"b":1}'], ['{"a":"x"}', '{"a":"y"}']),
    (f'{{"anyOf":[{EMPTY},{{"type":"integer"}}]}}', ["1"], ['"x"', '"y"']),
    (
        '{"anyOf":[{"type":"object","minProperties":1,"additionalProperties":false},{"type":"null"}]}',
        ["null"],
        ["{}"],
    ),
    (
        '{"type":"object","patternProperties":{"^k":{"$ref":"#/$defs/a"},"^b":{"type":"null"}},'
        '"additionalProperties":false,"$defs":{"a":{"$ref":"#/$defs/a"}}}',
        ["{}", '{"b":null}'],
        ['{"k":1}', '{"k":{}}'],
    ),
    # Annotations, and definitions that nothing refers to, may have any numbers.
    (
        '{"patternProperties":{"^a":{"type":"integer","default":9007199254740993}},"examples":[1e-400],'
        '"x-id":123456789012345678901,"$defs":{"a":{"const":9007199254740993}}}',
        ['{"a":1}'],
        ['{"a":"1"}'],
    ),
    # Integers of the library are bounded.
    (
        '{"type":"object","minProperties":1,"additionalProperties":{"type":["integer","null"]}}',
        ['{"a":1}', '{"a":null}'],
        [f'{{"a":{"1" * 60}}}'],
    ),
    ('{"type":"integer","multipleOf":1000}', ["3000"], ["1" * 60 + "000"]),
]


@pytest.mark.parametrize("case", PARTS, ids=lambda case: case[0][:60])
def test_parts_of_the_library(case):
    schema, right, wrong = case
    matcher = matcher_of(schema)
    for text in right:
        assert accepts(matcher, text), text
    for text in wrong:
        assert not accepts(matcher, text), text


def test_identical_parts_share_their_rules():
    part = closed({f"p{j}": True for j in range(60)}, ["p0"])
    one = JsonGrammar({"type": "array", "prefixItems": [part]}).lark
    assert len(JsonGrammar({"type": "array", "prefixItems": [part] * 200}).lark) < 3 * len(one)


def test_a_schema_of_too_many_rules_is_left_to_the_library(monkeypatch):
    schema = json.dumps({"items": closed({"a": {"type": "string"}, "b": {"type": "integer"}}, ["a"])})
    texts = {'[{"a":"","b":1}]': True, "[]": True, "[{}]": False, f'[{{"a":"","b":{"1" * 20}}}]': False}
    own = JsonGrammar(exact_json(schema)).lark
    assert {text: accepts(matcher_of(schema), text) for text in texts} == texts
    monkeypatch.setattr(json_grammar, "MAX_RULES", 10)
    assert JsonGrammar(exact_json(schema)).lark.count("\n") < 5 < own.count("\n")
    assert {text: accepts(matcher_of(schema), text) for text in texts} == texts
    with pytest.raises(RequestError, match=r"^items\.const: 9007199254740993 is not exact"):
        JsonGrammar(
            exact_json('{"items":{"const":9007199254740993},"properties":{"a":{"minLength":1},"b":{}}}')
        )


def test_paths_are_not_copied():
    tracemalloc.start()
    JsonGrammar({"x" * 60_000: None, "properties": {"x" * 60_000: {"anyOf": [{"const": "a"}, False] * 2000}}})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_names_have_one_spelling():
    schema = '{"type":"object","properties":{"a":{"type":"null"}},"additionalProperties":{"type":"boolean"}}'
    matcher = matcher_of(schema)
    assert accepts(matcher, '{"a":null,"b\\n\\"é":true}')
    assert accepts(matcher, '{"\\u0001\\u001f":true}')
    assert not accepts(matcher, '{"\\u000a":true}')
    assert not accepts(matcher, '{"a":  null}')  # one blank at most
    assert not accepts(matcher, '{"a":true}')
    assert not accepts(matcher, '{"\\u0061":true}')
    for name in ("a  b", chr(34), chr(92), "é\x7f\n", "", "<|x|>", "/"):
        value = json.dumps({name: [1.5]}, ensure_ascii=False, separators=(",", ":"))
        for schema in (
            {"enum": [[json.loads(value)]]},
            listed(closed({name: listed({"const": 1.5}, 1, 1)}), 1, 1),
        ):
            assert accepts(matcher_of(json.dumps(schema)), f"[{value}]"), name


@pytest.mark.parametrize(
    "name", ["path", "password", "binary", "uri-reference", "int32", "no such \n one", 7]
)
def test_unknown_formats_are_annotations(name, caplog, monkeypatch):
    monkeypatch.setattr(json_formats, "_logged", set())
    schema = {"properties": {"a": {"type": "string", "format": name}}, "required": ["a"], "type": "object"}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert accepts(matcher_of(json.dumps(schema)), '{"a":"/tmp/x"}')
    (line,) = caplog.messages
    assert repr(name) in line
    caplog.clear()
    for known, text in (("ipv4", "127.0.0.1"), ("uuid", "01234567-89ab-4def-8123-456789abcdef")):
        matcher = matcher_of(json.dumps({"type": "string", "format": known}))
        assert accepts(matcher, f'"{text}"')
        assert not accepts(matcher, '"/tmp/x"')
    matcher_of('{"type":"integer","format":"int64"}')
    assert not caplog.messages


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "properties.a.type"),
        ({"properties": []}, "properties"),
        ({"anyOf": [{"items": 3}]}, "anyOf[0].items"),
        ({"properties": {"a": {"$ref": "http://x"}}}, "properties.a.$ref"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"maxLength": -1}, "maxLength"),
        ({"required": "a"}, "required"),
    ],
)
def test_errors_name_the_part(schema, param):
    with pytest.raises(RequestError) as refused:
        JsonGrammar(exact_json(json.dumps(schema)))
    assert refused.value.param == param


@pytest.mark.parametrize("digits", ["1e999999999", "1e-99999999999999999999", "-1.5E99999999999999999999"])
def test_huge_exponents_are_refused(digits):
    for parse in (exact_json, schema_text):
        with pytest.raises(RequestError, match="has an exponent of more than 100,000"):
            parse(f'{{"x-default": {digits}}}')
    with pytest.raises(RequestError):
        structural_tag_text(f'{{"format":{{"type":"json_schema","json_schema":{{"const":{digits}}}}}}}')
    if "e-" in digits:
        with pytest.raises(RequestError):
            parse_json(f'{{"a":{digits}}}')


@pytest.mark.parametrize("schema", ['{"const": NaN}', '{"maximum": Infinity}'])
def test_json_has_finite_numbers(schema):
    with pytest.raises(ValueError, match="is not JSON; numbers are finite"):
        exact_json(schema)
    assert exact_json('{"a":1e400}')["a"] == Decimal("1e400")


HOSTILE = {
    "references that branch": {
        "$ref": "#/$defs/d0",
        "$defs": {
            "d99": {"type": "null"},
            **{f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(99)},
        },
    },
    "alternatives that multiply": {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"a{j}": {"const": j}}} for j in range(9)]}
            for _ in range(20)
        ]
    },
    "a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
    "recursive parts of a oneOf": {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {name: closed({"c": {"$ref": f"#/$defs/{name}"}}) for name in "ab"},
    },
    "a number of a billion digits": {"minimum": Decimal("1e999999999")},
    "an annotation of a billion digits": {"minProperties": 1, "default": Decimal("1e999999999")},
    "a constant of a billion digits": {"minProperties": 1, "const": Decimal("1e999999999")},
    "constants that are tried with many rules": {
        "allOf": [
            {"enum": [f"s{i}" for i in range(12_000)]},
            *({"type": "string", "minLength": 1 + i % 3} for i in range(3000)),
        ]
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_or_small(name):
    try:
        grammar = JsonGrammar(HOSTILE[name])
    except RequestError:
        return
    assert len(grammar.lark) < 50_000
