"""The schemas of custom resources that deploy/kubernetes uses, as their projects publish them.

python -m tests.support.crd_schemas FOLDER

writes tests/deploy/crds/*.json.gz from clones of the projects in FOLDER/lws and FOLDER/kuberay: each schema
without its descriptions, with where it comes from. Both projects have the Apache License 2.0.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CRDS = Path(__file__).parents[1] / "deploy" / "crds"
SOURCES = {
    "LeaderWorkerSet": {
        "repository": "https://github.com/kubernetes-sigs/lws",
        "version": "v0.10.0",
        "path": "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
        "licence": "Apache-2.0",
    },
    "RayService": {
        "repository": "https://github.com/ray-project/kuberay",
        "version": "v1.7.0",
        "path": "ray-operator/config/crd/bases/ray.io_rayservices.yaml",
        "licence": "Apache-2.0",
    },
}
# What an API server itself knows of the metadata of a resource, as far as files to apply need it.
METADATA = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


@cache
def crd_schema(kind: str) -> dict[str, Any]:
    """Return the schema of a custom resource, in which a field that it does not know is an error.

    An API server drops such fields, and `kubectl apply` refuses them.
    """
    published = json.loads(gzip.decompress((CRDS / f"{kind}.json.gz").read_bytes()))
    schema = _strict(published["schema"])
    schema["properties"]["metadata"] = METADATA
    for name in ("apiVersion", "kind"):
        schema["properties"][name] = {"const": published[name]}
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return schema


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a structural schema as a JSON schema that allows no unknown fields."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {
        key: schema[key] for key in ("enum", "required", "pattern", "minimum", "maximum") if key in schema
    }
    kind = schema.get("type")
    if kind is not None:
        found["type"] = [kind, "null"] if schema.get("nullable") else kind
    if "items" in schema:
        found["items"] = _strict(schema["items"])
    if kind == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found["properties"] = {name: _strict(of) for name, of in schema.get("properties", {}).items()}
        values = schema.get("additionalProperties", False)
        found["additionalProperties"] = _strict(values) if isinstance(values, dict) else values
    return found


def _without_descriptions(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_descriptions(each)
            for key, each in value.items()
            if not (key == "description" and isinstance(each, str))
        }
    return [_without_descriptions(each) for each in value] if isinstance(value, list) else value


def main(folder: str) -> None:
    """Write the schemas."""
    for kind, source in SOURCES.items():
        clone = Path(folder) / source["repository"].rpartition("/")[2]
        shown = ["git", "-C", clone, "show", f"{source['version']}:{source['path']}"]
        crd = yaml.safe_load(subprocess.run(shown, check=True, capture_output=True).stdout)["spec"]
        (version,) = (each for each in crd["versions"] if each["storage"])
        published = {
            **source,
            "apiVersion": f"{crd['group']}/{version['name']}",
            "kind": kind,
            "schema": _without_descriptions(version["schema"]["openAPIV3Schema"]),
        }
        packed = gzip.compress(json.dumps(published, separators=(",", ":")).encode(), 9, mtime=0)
        (CRDS / f"{kind}.json.gz").write_bytes(packed)


if __name__ == "__main__":
    main(sys.argv[1])
