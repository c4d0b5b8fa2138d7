"""Kubernetes' published schemas, cut to what the files of deploy/kubernetes use.

python -m tests.support.kubernetes_schemas

writes tests/deploy/kubernetes_schemas.json from the package kubernetes-validate, which holds the schemas of
every version: all names of fields where the files have objects, and the types of those that are used. Custom
resources have schemas of their own: crd_schemas.py.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from .crd_schemas import SOURCES

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
EXTRACT = ROOT / "tests" / "deploy" / "kubernetes_schemas.json"
VERSION = "v1.30.0"
# The schema of a field that no file has. It allows nothing: who uses the field makes the extract again.
UNUSED = False


def manifests() -> dict[str, dict[str, Any]]:
    """Return the objects for Kubernetes by the names of their files."""
    files = sorted(MANIFESTS.rglob("*.yaml"))
    return {file.relative_to(MANIFESTS).as_posix(): yaml.safe_load(file.read_text()) for file in files}


def _published(name: str) -> Any:
    spec = find_spec("kubernetes_validate")  # without its dependencies
    assert spec is not None, "pip install --no-deps kubernetes-validate"
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "kubernetes-json-schema" / f"{VERSION}-local-strict"
    return json.loads((folder / name).read_text())


def _file_of(manifest: dict[str, Any]) -> str:
    group, slash, version = manifest["apiVersion"].partition("/")
    api = f"{group.partition('.')[0]}-{version}" if slash else group
    return f"{manifest['kind'].lower()}-{api}.json"


def _cut(schema: dict[str, Any], value: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without what this value does not have."""
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    kept = {
        key: each for key, each in schema.items() if key in ("type", "enum", "required", "oneOf", "format")
    }
    if isinstance(value, dict) and "properties" in schema:
        kept["additionalProperties"] = False
        kept["properties"] = {
            name: _cut(of, value[name], definitions) if name in value else UNUSED
            for name, of in schema["properties"].items()
        }
    elif isinstance(value, dict) and isinstance(of := schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = _cut(of, next(iter(value.values()), None), definitions)
    elif isinstance(value, list):
        kept["items"] = _merged([_cut(schema["items"], each, definitions) for each in value])
    return kept


def _merged(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a schema with what any of several has kept."""
    first, *others = schemas
    for other in others:
        for name, of in other.get("properties", {}).items():
            known = first["properties"][name]
            first["properties"][name] = (
                of if known is UNUSED else known if of is UNUSED else _merged([known, of])
            )
        if "items" in other and "items" in first:
            first["items"] = _merged([first["items"], other["items"]])
    return first


def main() -> None:
    """Write the extract."""
    definitions = _published("_definitions.json")["$defs"]
    extract = {
        name: _cut(_published(_file_of(manifest)), manifest, definitions)
        for name, manifest in manifests().items()
        if manifest["kind"] not in SOURCES
    }
    EXTRACT.parent.mkdir(exist_ok=True)
    EXTRACT.write_text(json.dumps({"version": VERSION, "files": extract}, indent=1) + "\n")


if __name__ == "__main__":
    main()
