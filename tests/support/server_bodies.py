"""Seeded request bodies for the server: valid ones, and the same damaged."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from typing import Any, NamedTuple

from paged.protocol.endpoints import ENDPOINTS
from tests.support.api_fields import BODIES, CHAT, TOOLS, changes, honours
from tests.support.assistant_bodies import ASSISTANT_BODIES
from tests.support.mutations import damage_bytes, damage_value, dumps

JSON = "application/json"
MOST_BYTES = 2**21  # twice what the server takes
# Bodies that are valid by themselves. Few tokens are generated.
# Models are not changed by clients of the servers that get them, and the demo cannot fill in the middle.
VALID: dict[str, list[dict[str, Any]]] = {
    url: [body]
    for url, body in BODIES.items()
    if url not in ("/api/pull", "/api/copy", "/infill") and "lora" not in url
}
VALID[CHAT] += ASSISTANT_BODIES.values()
VALID["/tokenize"] += [{"messages": BODIES[CHAT]["messages"], "tools": TOOLS}]
# Fields that readers may act on, with values that lead them astray. Those of other bodies are unknown there.
ASTRAY: list[tuple[str, Any]] = [
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}),
    ("response_format", {"type": "structural_tag", "format": {"type": "wrong"}}),
    ("structured_outputs", {"regex": "(a+)+$"}),
    ("structured_outputs", {"regex": "(((a{1000}){1000}){1000})"}),
    ("structured_outputs", {"regex": "("}),
    ("structured_outputs", {"grammar": "start: start start"}),
    ("structured_outputs", {"grammar": "@long@"}),
    ("structured_outputs", {"choice": ["a", "a", ""]}),
    ("structured_outputs", {"json": "{"}),
    ("structured_outputs", {"json": {"enum": []}}),
    ("structured_outputs", {"json": {"multipleOf": 1e-300, "type": "number"}}),
    ("structured_outputs", {"json": {"properties": {str(i): {"type": "string"} for i in range(300)}}}),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]),
    ("messages", [{"role": "tool", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
    ("messages", [{"role": "user", "content": "<tool_call>\ud800</think>"}] * 20),
    ("messages", [{"role": "wizard", "content": "x"}]),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "wrong"}}}]),
    ("tools", TOOLS * 2),
    ("tools", [{**TOOLS[0], "number": i} for i in range(200)]),
    ("tools", []),
    ("tool_choice", {"type": "function", "function": {"name": "unknown"}}),
    ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
    ("chat_template", "{% for i in range(10**9) %}x{% endfor %}"),
    ("chat_template_kwargs", {"messages": [], "tools": 5, "add_generation_prompt": {}}),
    ("chat_template_kwargs", {"raise_exception": None, "enable_thinking": "@long@"}),
    ("stream_options", {"include_usage": "yes"}),
    ("stop", ["a"] * 65),
    ("stop", ["", "a"]),
    ("stop", "\ud800"),
    ("logit_bias", {"99999": 1}),
    ("logit_bias", {"-1": 1, "1.5": 2}),
    ("logit_bias", {"1": "@infinity@"}),
    ("seed", 2**63),
    ("n", 129),
    ("n", 3),
    ("best_of", 1),
    ("logprobs", 20),
    ("logprobs", -1),
    ("prompt_logprobs", -1),
    ("top_logprobs", 21),
    ("max_tokens", 2**62),
    ("max_tokens", None),
    ("min_tokens", 2**62),
    ("allowed_token_ids", [0, 0, 2**31]),
    ("bad_words", ["a", " a", ""]),
    ("temperature", 1e-320),
    ("temperature", 1e308),
    ("top_k", 2**62),
    ("dry_sequence_breakers", ["\x00", "🙂"]),
    ("request_id", "a\r\nx-evil: 1"),
    ("request_id", "same"),
    ("user", "\x00\x1b[2J"),
    ("model", "another"),
    ("model", "x" * 300),
    ("priority", -1e308),
    ("timeout_s", 1e-9),
    ("timeout_s", 1e308),
    ("cache_salt", "é🙂"),
    ("stream", "deltas"),
    ("prompt", [[1, 2], "x"]),
    ("prompt", [True, 1]),
    ("prompt", ["", [], [2**31]]),
    ("prompt", "\ud83d\ude42"),
    ("prompts", ["x", [], "", None, [-1], {"prompt": "x"}, {"prompt_token_ids": [1]}, {"wrong": 1}]),
    ("input", [[]]),
    ("continuations", ["", "x"]),
    ("tokens", [2**31, 0]),
    ("guided_json", {"type": "object"}),
    ("__proto__", {"n": 2}),
    ("max_token", 3),
    ("x" * 500, 1),
]
_ODD_NUMBERS = [b"NaN", b"-Infinity", b"1e999", b"-1e-999", b"01", b"1.", b"0x1", b"9" * 5000]
_CONTENT_TYPES = [
    "",
    "text/plain",
    "application/json; charset=latin-1",
    "application/JSON ;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "application/json, text/plain",
    "\xff",
]


class Body(NamedTuple):
    """A request body.

    content_type: of its header.
    done: what was done to it; "" if it is valid.
    """

    data: bytes
    content_type: str
    done: str


@cache
def _changes(url: str) -> list[tuple[str, dict[str, Any]]]:
    return [(name, after) for changed, name, _, after in changes() if changed == url]


def valid_body(choose: random.Random, url: str) -> dict[str, Any]:
    """Return a valid body that generates few tokens."""
    body = copy.deepcopy(choose.choice(VALID[url]))
    table = ENDPOINTS[url].table
    for name in ("max_tokens", "max_output_tokens"):
        if honours(table, name):
            body[name] = choose.randint(1, 6)
    if honours(table, "n_predict"):
        body["n_predict"] = choose.randint(1, 6)
    if honours(table, "options"):
        body["options"] = {"num_predict": choose.randint(1, 6)}
    if honours(table, "stream") and choose.random() < 0.5:
        body["stream"] = True
    return body


def new_body(choose: random.Random, url: str) -> Body:
    """Return a body that is valid, or damaged in one or several ways."""
    body = valid_body(choose, url)
    if choose.random() < 0.1:
        return Body(json.dumps(body).encode(), JSON, "")
    done = []
    for _ in range(choose.choice([0, 0, 1, 1, 2, 5])):  # other fields, which may not go together
        name, changed = choose.choice(_changes(url))
        body |= copy.deepcopy(changed)
        done.append(f"with {name}")
    for _ in range(choose.choice([0, 1, 1, 2, 3])):
        done.append(damage_value(choose, body, ASTRAY))
    data = dumps(body).encode("utf-8", "surrogatepass")[:MOST_BYTES]
    content_type = JSON
    if choose.random() < 0.3:
        data, content_type, how = _damage_text(choose, data)
        done.append(how)
    return Body(data, content_type, ", ".join(done) or "as it is")


def _damage_text(choose: random.Random, data: bytes) -> tuple[bytes, str, str]:
    """Return the JSON text of a body damaged, its content type, and what was done."""
    how = choose.randrange(8)
    if how == 0:
        name = choose.choice([*json.loads(_readable(data)), "a"])
        value = choose.choice([b"1", b'"x"', b"null", b"[]"])
        return b"{%b:%b,%b" % (json.dumps(name).encode(), value, data[1:]), JSON, f"{name} twice"
    if how == 1:
        codec = choose.choice(["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
        return data.decode("utf-8", "surrogatepass").encode(codec, "surrogatepass"), JSON, codec
    if how == 2:
        number = choose.choice(_ODD_NUMBERS)
        return data.replace(b"1", number, 1), JSON, f"a number {number[:9].decode()}"
    if how == 3:
        opening, closing = choose.choice([(b"[", b"]"), (b'{"a":', b"}")])
        depth = choose.choice([63, 64, 65, 5000])
        return b'{"a":%b1%b,%b' % (opening * depth, closing * depth, data[1:]), JSON, f"{depth} deep"
    if how == 4:
        content_type = choose.choice(_CONTENT_TYPES)
        return data, content_type, f"content-type {content_type!a}"
    if how == 5:
        other = choose.choice([b"", b"null", b"[]", b'"x"', b"0", b"{}", b"{}{}", b"{", b"\x00", b"\xff\xfe"])
        return other, JSON, f"only {other!a}"
    if how == 6:
        padding = choose.choice([b" " * 70_000, b"\n", b"\x00", b"\xc2\xa0", b"//", b"}"])
        return data + padding, JSON, f"{len(padding)} bytes {padding[:2]!a} behind"
    damaged, done = damage_bytes(choose, data)
    return damaged, JSON, done


def _readable(data: bytes) -> bytes:
    """Return the JSON text, or an empty object for one that Python does not parse."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return b"{}"
    return data
