"""LoRARequest: the LoRA adapter that a request is computed with."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..base.arguments import strict
from ..base.errors import ConfigError, RequestError
from ..base.validation import check_bool, check_int, shown

NO_LORA = "the engine takes no LoRA adapters: make it with enable_lora=True"
_HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class LoRARequest:
    """Names a LoRA adapter, which the engine reads at its first request.

    lora_name: the name that users know the adapter by.
    lora_int_id: a number of the adapter's own, from 1 on.
    lora_path: a directory with adapter_config.json and adapter_model.safetensors, or an id on the hub.
    load_inplace: whether this adapter is read again, and may replace another one of the same name or number.
    content_hash: the sha256 of its tensors and its config, in hexadecimal; an adapter with another content is
        refused. None takes what is loaded, or else what is read.

    Raises RequestError naming the field that is wrong.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False
    content_hash: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if name == "lora_path" and hasattr(value, "__fspath__"):
                value = str(value)
                object.__setattr__(self, name, value)
            if not isinstance(value, str) or not value:
                raise RequestError(
                    f"{name} must be a non-empty string, got {shown(value)}", param="lora_request"
                )
        check_int(RequestError, "lora_int_id", self.lora_int_id, 1, 2**63 - 1)
        check_bool(RequestError, "load_inplace", self.load_inplace)
        if self.content_hash is not None and not (
            isinstance(self.content_hash, str) and _HASH.fullmatch(self.content_hash)
        ):
            raise RequestError(
                f"content_hash must be 64 hexadecimal digits, got {shown(self.content_hash)}",
                param="lora_request",
            )

    @property
    def name(self) -> str:
        """The adapter's name, as vLLM also calls it."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The adapter's number, as vLLM also calls it."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """The adapter's directory or id, as vLLM also calls it."""
        return self.lora_path


strict(LoRARequest, "LoRARequest")


def namespace_of(content_hash: str) -> bytes:
    """Return what the namespace of an adapter's KV begins with."""
    return b"lora" + bytes.fromhex(content_hash)


def lora_modules_of(modules: Sequence[str]) -> list[LoRARequest]:
    """Parse the values of --lora-modules, such as "sql=path/to/adapter". Adapters are numbered from 1 on.

    As in vLLM, a value may also be a JSON object with "name" and "path".

    Raises ConfigError naming the text that is wrong.
    """
    found: list[LoRARequest] = []
    for text in modules:
        name, separator, path = text.partition("=")
        if text.startswith("{"):
            name, path = _named(text)
        elif not separator:
            path = ""
        if not name or not path:
            raise ConfigError(f"lora_modules must be NAME=PATH, got {shown(text)}")
        if name in (each.lora_name for each in found):
            raise ConfigError(f"lora_modules has two adapters of the name {name!r}")
        found.append(LoRARequest(name, len(found) + 1, path))
    return found


def _named(text: str) -> tuple[str, str]:
    """Return name and path of an object in JSON."""
    try:
        found = json.loads(text)
        name, path = found.pop("name"), found.pop("path")
    except (ValueError, KeyError, AttributeError, RecursionError):
        raise ConfigError(
            f'lora_modules must be NAME=PATH or {{"name": ..., "path": ...}}, got {shown(text)}'
        ) from None
    found.pop("base_model_name", None)
    if found or not isinstance(name, str) or not isinstance(path, str):
        raise ConfigError(f"lora_modules takes texts as name and path, and no other keys, got {shown(text)}")
    return name, path


def check_slots(
    enable_lora: bool,
    max_loras: int,
    max_lora_rank: int,
    max_cpu_loras: int | None,
    lora_target_modules: Sequence[str] | None,
) -> None:
    """Raise ConfigError unless the options of an engine for adapters fit together."""
    if max_cpu_loras is not None:
        check_int(ConfigError, "max_cpu_loras", max_cpu_loras, max_loras)
    targets = lora_target_modules
    if targets is not None:
        is_list = isinstance(targets, Sequence) and not isinstance(targets, str)
        if not is_list or not targets or not all(isinstance(each, str) and each for each in targets):
            raise ConfigError(
                f'lora_target_modules must be a list of names such as ["q_proj"], got {shown(targets)}'
            )
    if enable_lora:
        return
    given = {
        "max_loras": (max_loras, 1),
        "max_lora_rank": (max_lora_rank, 16),
        "max_cpu_loras": (max_cpu_loras, None),
        "lora_target_modules": (targets, None),
    }
    for name, (value, default) in given.items():
        if value != default:
            raise ConfigError(
                f"{name} {shown(value)} has no effect without enable_lora=True; give both or none"
            )
