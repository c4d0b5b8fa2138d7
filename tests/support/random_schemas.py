"""Random JSON schemas, and random texts of their grammars, which are compared with jsonschema.

python -m tests.support.random_schemas --seconds 60    # schemas until then; CI tries 100
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from decimal import Decimal, InvalidOperation
from typing import Any

import jsonschema
from llguidance import LLMatcher, LLTokenizer

from paged.base.errors import RequestError
from paged.grammars.json_grammar import JsonGrammar
from paged.options.structural_tag import exact_json

TOKENIZER = LLTokenizer("byte", eos_token=0)
MAX_BYTES = 1500
ENDS = b'"]},:'  # bytes that lead to the end of a value
COUNT_IN_CI = 100
# Identifiers and bounds that float64 rounds, and numbers of all forms.
NUMBERS = [
    *("0", "1", "-1", "3", "-7", "100", "0.1", "1.5", "-2.5", "1e3", "1E-3", "12345.678901234567"),
    *("9007199254740993", "9007199254740991", "18446744073709551616", "1182937465564738561"),
    *("0.30000000000000004", "0.1000000000000000055"),
]
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def matcher_of(text: str) -> Any:
    """Return the matcher of a schema, over bytes. Raises RequestError or ValueError."""
    matcher = LLMatcher(TOKENIZER, JsonGrammar(exact_json(text)).lark, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def possible(matcher: Any) -> list[int]:
    """Return the bytes that may follow."""
    mask = matcher.compute_bitmask()
    return [byte for byte in range(1, 256) if mask[byte // 8] >> (byte % 8) & 1]


def accepts(matcher: Any, text: str) -> bool:
    """Return whether a text is one of the grammar."""
    matcher, data = matcher.deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and bool(matcher.is_accepting())


def random_text(matcher: Any, choose: random.Random) -> str:
    """Return a random text of a grammar, which soon ends."""
    matcher, found = matcher.deep_copy(), bytearray()
    while (following := possible(matcher)) and not (matcher.is_accepting() and choose.random() < 0.3):
        assert len(found) < MAX_BYTES, bytes(found)
        ends = [byte for byte in following if byte in ENDS]
        if ends and choose.random() < (0.5 if len(found) < 150 else 0.95):
            following = ends
        found.append(choose.choice(following))
        assert matcher.consume_token(found[-1]), matcher.get_error()
    assert matcher.is_accepting(), (bytes(found), matcher.get_error())
    return found.decode()


def is_valid(schema: str, text: str) -> bool:
    """Return whether a text is JSON of the schema, in exact arithmetic."""
    exact = jsonschema.Draft202012Validator(json.loads(schema, parse_float=Decimal))
    try:
        return bool(exact.is_valid(json.loads(text, parse_float=Decimal)))
    except InvalidOperation:  # jsonschema divides a Decimal that is too large for it
        return True


def random_schema(choose: random.Random) -> str:
    """Return the JSON of a schema whose parts refer to each other; as text, so that no number is rounded."""
    definitions = ",".join(f'"{name}":{_schema(choose, 2)}' for name in "AB")
    return f'{{"allOf":[{_schema(choose, 3)}],"$defs":{{{definitions}}}}}'


def _schema(choose: random.Random, depth: int) -> str:
    kinds = _SCALARS if depth == 0 else [*_SCALARS, *_COMPOUNDS]
    return choose.choice(kinds)(choose, depth - 1)


def _bounded(choose: random.Random, _: int) -> str:
    bounds = choose.sample(BOUNDS, choose.choice([0, 1, 1, 2]))
    rest = "".join(f',"{bound}":{choose.choice(NUMBERS)}' for bound in bounds)
    return f'{{"type":"{choose.choice(["integer", "number"])}"{rest}}}'


def _constants(choose: random.Random, _: int) -> str:
    number = choose.choice(NUMBERS)
    kinds = [number, '"a"', '"b<|x|>"', "null", "true", f"[{number}]", f'{{"k":{number}}}']
    return f'{{"enum":[{",".join(choose.sample(kinds, choose.randrange(1, 4)))}]}}'


def _string(choose: random.Random, _: int) -> str:
    rest = ["", ',"minLength":2', ',"pattern":"^[ab]+$"', ',"format":"password"']
    return f'{{"type":"string","maxLength":4{choose.choice(rest)}}}'


def _other_scalar(choose: random.Random, _: int) -> str:
    number = choose.choice(NUMBERS)
    of_any_type = [
        "{}",
        "true",
        f'{{"minimum":{number}}}',
        f'{{"type":["integer","null"],"minimum":{number}}}',
    ]
    multiples = [
        f'{{"type":"integer","multipleOf":{n},"minimum":-50,"maximum":99}}' for n in ("3", "0.5", "7")
    ]
    kinds = [*of_any_type, *multiples, f'{{"const":{number}}}', '{"type":"boolean"}', '{"type":"null"}']
    return choose.choice([*kinds, '{"$ref":"#/$defs/A"}', '{"$ref":"#/$defs/B"}'])


def _array(choose: random.Random, depth: int) -> str:
    items, least = _schema(choose, depth), choose.randrange(3)
    if choose.random() < 0.5:
        return (
            f'{{"type":"array","items":{items},"minItems":{least},"maxItems":{least + choose.randrange(2)}}}'
        )
    first = f"{_schema(choose, depth)},{_schema(choose, depth)}"
    rest = choose.choice(["false", items])
    return f'{{"type":"array","prefixItems":[{first}],"items":{rest},"minItems":{least}}}'


def _object(choose: random.Random, depth: int) -> str:
    names = choose.sample("abcd", choose.randrange(1, 4))
    properties = ",".join(f'"{name}":{_schema(choose, depth)}' for name in names)
    required = json.dumps([name for name in [*names, "z"] if choose.random() < 0.4])
    others = choose.choice(
        ["", ',"additionalProperties":false', f',"additionalProperties":{_schema(choose, 0)}']
    )
    return f'{{"type":"object","properties":{{{properties}}},"required":{required}{others}}}'


def _combined(choose: random.Random, depth: int) -> str:
    both = f"[{_schema(choose, depth)},{_schema(choose, depth)}]"
    beside = choose.choice(["", ',"type":"object"', f',"minimum":{choose.choice(NUMBERS)}'])
    return choose.choice([f'{{"anyOf":{both}{beside}}}', f'{{"allOf":{both}}}', f'{{"oneOf":{both}}}'])


_SCALARS = [_bounded, _bounded, _constants, _string, _other_scalar, _other_scalar]
_COMPOUNDS = [_array, _array, _object, _object, _object, _combined, _combined]


def try_one(seed: int) -> str:
    """Compare texts of a random schema with jsonschema. Return what became of the schema."""
    choose = random.Random(seed)
    schema = random_schema(choose)
    try:
        matcher = matcher_of(schema)
    except RequestError:
        return "refused"
    except ValueError as error:
        if "oneOf" not in str(error):  # of which the parts may overlap
            raise
        return "refused by the library"
    for _ in range(3):
        text = random_text(matcher, choose)
        assert is_valid(schema, text), (seed, schema, text)
    return "compared"


def main() -> None:
    """Try schemas until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, seed, end = Counter[str](), options.seed, time.monotonic() + options.seconds
    while time.monotonic() < end:
        counts[try_one(seed)] += 1
        seed += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
