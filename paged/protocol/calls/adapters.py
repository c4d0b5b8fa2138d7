"""LoadAdapterCall and UnloadAdapterCall: the operator's bodies about LoRA adapters, in vLLM's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base.fields import Field, FieldTable
from ...base.json_kinds import Text
from ...base.kinds import Boolean, Integer
from ..limits import MAX_NAME_LENGTH, Limits
from .call import Call

MAX_PATH_LENGTH = 4096
_NAME = Field(
    "lora_name",
    Text(1, longest=MAX_NAME_LENGTH),
    "the name by which requests choose it as model",
    required=True,
)
LOAD_TABLE = FieldTable(
    "/v1/load_lora_adapter",
    [
        _NAME,
        Field(
            "lora_path",
            Text(1, longest=MAX_PATH_LENGTH),
            "a directory of the server's machine with adapter_config.json, or an id on the hub",
            required=True,
        ),
        Field(
            "load_inplace", Boolean(), "let it take the place of the adapter of this name, by default false"
        ),
    ],
)
UNLOAD_TABLE = FieldTable(
    "/v1/unload_lora_adapter",
    [_NAME, Field("lora_int_id", Integer(1), "the number of the adapter, which must then be this one")],
)


class LoadAdapterCall(Call):
    """A body of /v1/load_lora_adapter."""

    table = LOAD_TABLE
    is_queued = False

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        self.name: str = self.values["lora_name"]
        self.path: str = self.values["lora_path"]
        self.load_inplace: bool = self.values.get("load_inplace", False)


class UnloadAdapterCall(Call):
    """A body of /v1/unload_lora_adapter."""

    table = UNLOAD_TABLE
    is_queued = False

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        self.name: str = self.values["lora_name"]
        self.number: int | None = self.values.get("lora_int_id")
