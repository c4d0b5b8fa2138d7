"""The options that a file of results was begun with, in a file next to it: no run goes on with others."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from ..base.errors import FileError
from ..base.validation import shown
from ..options.config import EngineConfig
from .jobs import check_writable

# Options on which no result depends (docs/exactness.md); whether a request fits is the exception. A run may
# go on with others of these; every other option must be the same.
WITHOUT_EFFECT = frozenset(
    {
        *("cudagraph_capture_sizes", "max_cudagraph_capture_size", "weights_cache", "verify_weights_cache"),
        *("num_threads", "enforce_eager", "async_scheduling", "enable_prefix_caching", "block_size"),
        *("num_blocks", "swap_space", "language_model_only", "limit_mm_per_prompt", "mm_processor_cache_gb"),
        "allowed_media_domains",
        *("state_snapshots", "state_interval"),
        *("gpu_memory_utilization", "cpu_memory_utilization", "watermark", "preemption_mode"),
        *("max_preemptions", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold"),
        *("max_num_partial_prefills", "max_waiting", "max_queued_tokens", "scheduling_policy"),
        *("tenant_weights", "pipeline_parallel_size", "tensor_parallel_size", "pipeline_layers"),
        *("max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules"),
        *("rank_timeout_s", "speculative_config", "num_speculative_tokens", "priority", "cache_salt"),
    }
)


class RunOptions:
    """The options of a run. A resumed run must have the options of the run that created the file of results.

    results: the file of results, NAME. The options are stored in NAME.options.json.
    engine: arguments of LLMEngine. more: other options; None if an option is not given.

    Raises FileError if the options cannot be stored.
    """

    def __init__(
        self, results: Path, engine: Mapping[str, Any], more: Mapping[str, Any], *inputs: Path
    ) -> None:
        check_writable(results, *inputs)  # first, so that it is what an error names
        self._results = results
        target = results.resolve()
        self.path = target.with_name(f"{target.name}.options.json")
        check_writable(self.path, *inputs)
        given = {**_not_defaults(engine), **more}
        relevant = {
            name: value for name, value in given.items() if name not in WITHOUT_EFFECT and value is not None
        }
        self._options = json.loads(json.dumps(relevant, default=_plain))

    def keep(self) -> None:
        """Write the options when a file of results is begun. A kill leaves the old or the new options."""
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text(json.dumps(self._options, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)

    def check(self) -> bool:
        """Return whether the options of the earlier results are known.

        Raises FileError, naming the differences, if they differ from this run's options.
        """
        try:
            kept = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return False
        except (ValueError, RecursionError):
            kept = None
        if not isinstance(kept, dict):
            raise FileError(
                f"{self.path}: not the options of a run; delete it to go on without comparing them"
            )
        now = self._options
        differences = [
            f"{name} was {_said(kept, name)} and is {_said(now, name)}"
            for name in sorted({*kept, *now})
            if kept.get(name) != now.get(name)
        ]
        if differences:
            raise FileError(
                f"{self._results} was begun with other options: {'; '.join(differences)}. Go on with the "
                "options that it was begun with, or name another output"
            )
        return True


def _not_defaults(engine: Mapping[str, Any]) -> dict[str, Any]:
    config = EngineConfig(**engine)
    values = ((field, getattr(config, field.name)) for field in fields(config))
    return {
        field.name: value for field, value in values if field.default is MISSING or value != field.default
    }


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot hold to one that it can."""
    if is_dataclass(value):
        given = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name: part for name, part in given if part is not None}
    return str(value)


def _said(options: Mapping[str, Any], name: str) -> str:
    return shown(options[name]) if name in options else "not given"
