"""schemathesis against a server: bodies that it derives from /openapi.json, valid ones and others.

    python -m tests.support.server_schemathesis                  # 1,000 random bodies for each route
    python -m tests.support.server_schemathesis --examples 20 --seed 7

Beside these there is a body for each boundary and each type of each field. Responses must have declared
statuses, below 500 or 504, declared content types and bodies that match their schemas. A body that does not
match its schema must be refused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paged.options.structural_tag import SCHEMA_NAME
from tests.support.served import PATIENCE_S
from tests.support.server_fuzz import fuzzed_server

# A body may match its schema and be wrong for the model: a token id outside its vocabulary.
NOT_CHECKED = "positive_data_acceptance"
# 504 is what timeout_s asks for.
CONFIG = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "4xx", "504"]\n'


def run(
    url: str, *, examples: int, seed: int, excluded: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run it against the server at a URL. Its exit code is 0 if nothing was found.

    examples: random bodies for each route.
    excluded: routes that are left out.
    """
    options = {
        "--max-examples": examples,
        "--request-timeout": PATIENCE_S,
        "--seed": seed,
        "--phases": "coverage,fuzzing",
        "--exclude-checks": NOT_CHECKED,
        "--generation-database": "none",
        "--warnings": "off",
        # The same as /generate, and what needs an admin key.
        "--exclude-path-regex": "^(/generate/batch|/admin/.*|/watch)$",
    }
    words = [str(word) for option in options.items() for word in option]
    words += [word for path in excluded for word in ("--exclude-path", path)]
    program = [sys.executable, "-m", "schemathesis.cli", "run"]
    command = [*program, "openapi.json", "--url", url, "--no-color", *words]
    with urllib.request.urlopen(f"{url}/openapi.json") as response:
        description = json.load(response)
    schemas = description["components"]["schemas"]
    schemas[SCHEMA_NAME] = _without_references(schemas[SCHEMA_NAME])
    with tempfile.TemporaryDirectory() as directory:  # it keeps files where it runs
        (Path(directory) / "openapi.json").write_text(json.dumps(description))
        (Path(directory) / "schemathesis.toml").write_text(CONFIG)
        return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def _without_references(schema: Any) -> Any:
    """Return the schema of formats with any object within one: unrolled it makes thousands of cases."""
    if isinstance(schema, list):
        return [_without_references(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {"type": "object"} if "$ref" in schema else {k: _without_references(v) for k, v in schema.items()}


def main() -> None:
    """Run it against a server of a small random model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with fuzzed_server() as served:
        ended = run(served.url, examples=args.examples, seed=args.seed)
    print(ended.stdout, ended.stderr)
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
