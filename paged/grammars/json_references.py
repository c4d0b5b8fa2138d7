"""References of JSON schemas: by URI, by anchor, or relative to a schema within the schema."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urljoin

# Keys with schemas by name.
MAPS_OF_SCHEMAS = (
    *("properties", "patternProperties", "dependentSchemas", "dependencies"),
    *("$defs", "definitions"),
)
CONSTANTS = ("enum", "const")
Steps = tuple["Steps", str] | None  # from the root to a part, the last one first; None for the root
_VALUES = (*CONSTANTS, "default", "examples")  # of which no part is a schema


def with_pointers(root: Any) -> Any:
    """Rewrite a schema's references to its own parts as JSON pointers from its root, such as #/$defs/a.

    Other references stay as they are.
    """
    pointers = dict[str, Steps]()  # of the parts that have a URI
    for node, base, pointer in _parts(root):
        own = _text(node, "$id")
        if pointer is None or (own and not own.startswith("#")):
            pointers.setdefault(base, pointer)
        anchors = [_text(node, "$anchor"), _text(node, "$dynamicAnchor"), own[1:] if own[:1] == "#" else ""]
        for anchor in filter(None, anchors):
            pointers.setdefault(f"{base}#{anchor}", pointer)
    if all(node["$ref"] == reference for node, reference in _references(root, pointers)):
        return root
    root = copy.deepcopy(root)
    for node, reference in [*_references(root, pointers)]:
        node["$ref"] = reference
    return root


def references(node: Any) -> Iterator[str]:
    """Yield all references within a part of a schema."""
    for part, _, _ in _parts(node):
        if reference := _text(part, "$ref"):
            yield reference


def _references(root: Any, pointers: Mapping[str, Steps]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the parts with a reference, each with what it becomes."""
    for node, base, _ in _parts(root):
        reference = _text(node, "$ref")
        if reference:
            yield node, _pointer(reference, base, pointers)


def _pointer(reference: str, base: str, pointers: Mapping[str, Steps]) -> str:
    try:
        uri = base + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError:
        return reference
    resource, _, fragment = uri.partition("#")
    if fragment and not fragment.startswith("/"):
        return _joined(pointers[uri]) if uri in pointers else reference
    return _joined(pointers[resource]) + fragment if resource in pointers else reference


def _joined(pointer: Steps) -> str:
    steps = list[str]()
    while pointer is not None:
        pointer, key = pointer
        steps.append(quote(key.replace("~", "~0").replace("/", "~1"), safe="~$"))
    return "/".join(["#", *reversed(steps)])


def _parts(root: Any) -> Iterator[tuple[dict[str, Any], str, Steps]]:
    """Yield the objects of a schema, each with the URI of its references and its pointer from the root."""
    pending: list[tuple[Any, str, Steps, bool]] = [(root, "", None, False)]
    while pending:
        node, base, pointer, is_map = pending.pop()
        if isinstance(node, list):
            pending += [(part, base, (pointer, str(i)), False) for i, part in enumerate(node)]
        if not isinstance(node, dict):
            continue
        if not is_map:
            base = _base(_text(node, "$id"), base)
            yield node, base, pointer
        for key, part in node.items():
            if isinstance(part, dict | list) and (is_map or key not in _VALUES):
                pending.append((part, base, (pointer, key), not is_map and key in MAPS_OF_SCHEMAS))


def _base(own: str, base: str) -> str:
    try:
        return base if not own or own.startswith("#") else urljoin(base, own).removesuffix("#")
    except ValueError:
        return base


def _text(node: Mapping[str, Any], key: str) -> str:
    value = node.get(key)
    return value if isinstance(value, str) else ""
