"""Random request bodies, most of them wrong, from a seed."""

import random
from typing import Any

from paged.protocol.endpoints import ENDPOINTS
from tests.support.api_fields import BODIES, CHANGES

_TEXTS = ["", "a", "text", "json", "json_object", "required", "auto", "\ud800", "\x00", "é" * 3, "x" * 300]
_TEXTS += ["low", "base64", "deltas", "user", "{}", "tool", "function", "5", "^(a+)+$"]
_NUMBERS = [0, 1, -1, 2, 5, 129, 10**6, 2**63, -(2**63), 10**30, 0.0, 0.5, -1.5, 1e300, 1e-300]
_NAMES = ["type", "json_schema", "schema", "role", "content", "text", "function", "name", "parameters", "5"]
_NAMES += ["regex", "json", "choice", "format", "structures", "allowed_tools", "mode", "tools"]
_DEEPEST = 3
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 10**5}}
_DEEP = [{"role": "assistant", "tool_calls": [_CALL]}]  # JSON in a string


def random_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a URL and a valid body in which some fields are replaced, or added."""
    url = rng.choice([*BODIES])
    body = dict(BODIES[url])
    names = [field.name for field in ENDPOINTS[url].table.fields]
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(names) if rng.random() < 0.95 else rng.choice(_TEXTS)
        known = CHANGES.get(name)
        if name == "messages" and rng.random() < 0.1:
            body[name] = _DEEP
            continue
        body[name] = known[0] if known is not None and rng.random() < 0.5 else random_value(rng)
    return url, body


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """Return a JSON value."""
    match rng.randrange(8 if depth < _DEEPEST else 6):
        case 0:
            return rng.choice([None, True, False])
        case 1 | 2:
            return rng.choice(_NUMBERS)
        case 3 | 4:
            return rng.choice(_TEXTS)
        case 5:
            return rng.choice([*CHANGES.values()])[0]
        case 6:
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(_NAMES): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}
