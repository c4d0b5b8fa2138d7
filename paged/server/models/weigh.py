"""What an engine will take of the memory, computed by a process of its own, as it needs torch.

The process runs this module: a line of JSON in, a line of JSON out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...base import errors
from ...base.errors import ConfigError, PagedError, ResourceError
from ...text.worker import ROOT


class ModelWeight(NamedTuple):
    """The memory of an engine.

    num_bytes: of weights, KV, activations and states. num_blocks, max_model_len: the options that bound them.
    parts: the figures, in words.
    """

    num_bytes: int
    num_blocks: int
    max_model_len: int
    parts: str


def weigh(options: Mapping[str, Any], memory: int) -> ModelWeight:
    """Return what an engine with these options takes. This starts a process, and takes seconds.

    memory: the bytes that it shares with other engines.

    Raises what an engine with these options would.
    """
    path = os.pathsep.join([ROOT, *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        input=json.dumps({"options": dict(options), "memory": memory}),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    *_, last = ended.stdout.splitlines() or [""]
    try:
        found = json.loads(last)
    except ValueError:
        lines = ended.stderr.strip().splitlines()
        why = lines[-1] if lines else f"exit code {ended.returncode}"
        raise ResourceError(f"the memory of the model could not be computed: {why}") from None
    if "error" in found:
        kind = getattr(errors, found["error"], ConfigError)
        raise kind(found["message"])
    return ModelWeight(**found)


def _main() -> None:
    given = json.loads(sys.stdin.readline())
    try:
        print(json.dumps(_weighed(given["options"], given["memory"])._asdict()))
    except PagedError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))


def _weighed(options: Mapping[str, Any], memory: int) -> ModelWeight:
    from ...options.config import EngineConfig
    from ...runner.planned import bounded, footprint_here

    footprint = bounded(footprint_here(EngineConfig(**options), free=memory), memory)
    return ModelWeight(
        footprint.num_bytes, footprint.num_blocks, footprint.sizes.max_model_len, str(footprint)
    )


if __name__ == "__main__":
    _main()
