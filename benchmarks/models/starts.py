"""What a start costs: seconds, memory and modules, each measured in a fresh process."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.report import Row

# The modules with model classes, and that of their base class.
_MODEL_CLASSES = re.compile(r"transformers\.(modeling_utils|models\.(?!auto\.)\w+\.modeling_\w+)")


def start(model: str, root: Path, threads: int, *, classes: bool = False) -> dict[str, Any]:
    """Run one_start.py with the `paged` of a checkout. Raises RuntimeError if it fails.

    classes: import a model class of transformers at the end.
    """
    script = Path(__file__).with_name("one_start.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script), model, *(["--classes"] if classes else [])],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{root}: the engine of {model} did not start:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["paged"]).is_relative_to(root), f"{found['paged']} was imported, not that of {root}"
    return found


def model_classes(modules: Sequence[str]) -> list[str]:
    """Return which of these modules hold model classes of transformers."""
    return [name for name in modules if _MODEL_CLASSES.fullmatch(name)]


def check_native_start(found: Mapping[str, Any]) -> None:
    """Assert that no model class was imported before one was asked for, and that one would be noticed."""
    imported = model_classes(found["modules"]["native"])
    assert not imported, f"a native start imports model classes of transformers: {imported}"
    assert "transformers.models.llama.modeling_llama" in model_classes(found["modules"]["with a model class"])


def medians(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each phase of a start, with the medians of several starts."""
    return [
        {
            "phase": same[0]["phase"],
            **{
                key: statistics.median(phase[key] for phase in same)
                for key in ("seconds", "peak MiB", "more MiB")
            },
        }
        for same in zip(*(run["phases"] for run in runs), strict=True)
    ]
