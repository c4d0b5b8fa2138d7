"""What Ollama's API says of models: their files, formats and templates, as far as is known without torch."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..architectures.config import DEMO
from ..architectures.gguf_paths import is_gguf
from ..architectures.gguf_tags import quantisation_of
from ..base.errors import PagedError
from ..checkpoints.library.local import LocalModel
from ..checkpoints.library.models_file import ModelEntry
from ..engine.async_base import AsyncEngine
from ..protocol.ollama.answers import moment

_MOST_READ = 2**22  # bytes of a file that is shown


class RunningModel(NamedTuple):
    """A model that is loaded.

    num_bytes: of memory; 0 if unknown, for which the size of its files is shown.
    expires_at: when it is unloaded without a request, by time.monotonic; inf for never.
    """

    entry: ModelEntry
    engine: AsyncEngine[Any]
    num_bytes: int
    expires_at: float


def tag_of(entry: ModelEntry, local: LocalModel | None) -> dict[str, Any]:
    """Return the entry of a model in /api/tags."""
    files = _files_of(entry, local)
    statuses = [each.stat() for each in files if each.exists()]
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": moment(max((each.st_mtime for each in statuses), default=0.0)),
        "size": sum(each.st_size for each in statuses),
        "digest": _digest_of(entry, files),
        "details": details_of(entry, local),
    }


def details_of(entry: ModelEntry, local: LocalModel | None) -> dict[str, Any]:
    """Return the details of a model."""
    files = _files_of(entry, local)
    config = _config_of(files)
    family = str(config.get("model_type", ""))
    gguf = next((str(each) for each in files if is_gguf(each.name)), None)
    level = quantisation_of(gguf) if gguf else str(config.get("dtype", config.get("torch_dtype", "")))
    return {
        "parent_model": "",
        "format": "gguf" if gguf else "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": level,
    }


def running_of(model: RunningModel, local: LocalModel | None) -> dict[str, Any]:
    """Return the entry of a model in /api/ps."""
    tag = tag_of(model.entry, local)
    left = model.expires_at - time.monotonic()
    never = 100 * 365 * 86_400.0
    return {
        **{name: value for name, value in tag.items() if name != "modified_at"},
        "size": model.num_bytes or tag["size"],
        "size_vram": 0 if model.engine.device == "cpu" else model.num_bytes,
        "expires_at": moment(time.time() + (never if math.isinf(left) else left)),
        "context_length": model.engine.max_model_len,
    }


def shown_model(
    entry: ModelEntry,
    local: LocalModel | None,
    engine: AsyncEngine[Any] | None,
    capabilities: list[str],
    template: str | None,
    context: int | None = None,
) -> dict[str, Any]:
    """Return the response of /api/show.

    engine: None if the model is not loaded. template: None for the one in the checkpoint's own file.
    context: what a load would give it, as far as that is known; None for the checkpoint's own.

    Of a GGUF file that was not loaded yet there is no template and no context: reading it takes torch.
    """
    files = _files_of(entry, local)
    config = _config_of(files)
    if template is None:
        template = _text_of(files[0].parent / "chat_template.jinja") if files else ""
    architecture = str(config.get("model_type", ""))
    info: dict[str, Any] = {"general.architecture": architecture}
    context = (context or _context_of(config)) if engine is None else engine.max_model_len
    if context is not None:
        info[f"{architecture}.context_length"] = context
    if engine is not None:
        info[f"{architecture}.embedding_length"] = engine.text.model_config.hidden_size
    parameters = [f"{name} {json.dumps(value)}" for name, value in entry.sampling.items()]
    return {
        "modelfile": f"# {entry.checkpoint}\n",
        "parameters": "\n".join(parameters),
        "template": template,
        **({"system": entry.system} if entry.system is not None else {}),
        "details": details_of(entry, local),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": tag_of(entry, local)["modified_at"],
    }


def template_of(engine: AsyncEngine[Any], chat_template: str | None) -> str:
    """Return the chat template of a loaded model; "" if it has none.

    chat_template: the one in place of the checkpoint's; see `ChatTemplates.source`.
    """
    with suppress(PagedError):
        return engine.text.chat_templates.source(chat_template)
    return ""


def _files_of(entry: ModelEntry, local: LocalModel | None) -> list[Path]:
    """Return the files of the weights."""
    if local is not None:
        return [*local.files]
    path = DEMO if entry.checkpoint == "demo" else Path(entry.checkpoint).expanduser()
    if path.is_file():
        return [path]
    with suppress(OSError):
        return sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
    return []


def _config_of(files: list[Path]) -> dict[str, Any]:
    for file in files[:1]:
        with suppress(ValueError):
            found = json.loads(_text_of(file.parent / "config.json") or "{}")
            return found if isinstance(found, dict) else {}
    return {}


def _context_of(config: dict[str, Any]) -> Any:
    """Return the longest context by a config.json; of a model that sees images, by its text config."""
    text = config.get("text_config")
    own = text if isinstance(text, dict) else config
    return own.get("max_position_embeddings", config.get("max_position_embeddings"))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= _MOST_READ else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _digest_of(entry: ModelEntry, files: list[Path]) -> str:
    """Return the sha256 of a file of the hub's cache, whose name it is; of other models one of their name."""
    for file in files[:1]:
        name = file.resolve().name
        if len(name) == 64 and set(name) <= set("0123456789abcdef"):
            return name
    return hashlib.sha256(f"{entry.name} {entry.checkpoint}".encode()).hexdigest()


def lmstudio_card(
    entry: ModelEntry, local: LocalModel | None, engine: AsyncEngine[Any] | None, capabilities: list[str]
) -> dict[str, Any]:
    """Return what LM Studio says of a model. engine: None if the model is not loaded."""
    details = details_of(entry, local)
    kind = "embeddings" if capabilities == ["embedding"] else "llm"
    config = _config_of(_files_of(entry, local))
    most = _context_of(config) if engine is None else engine.text.model_config.max_context
    card = {
        "id": entry.name,
        "object": "model",
        "type": kind,
        "publisher": entry.name.partition("/")[0] if re.match(r"\w.*/", entry.name) else "",
        "arch": details["family"],
        "compatibility_type": details["format"],
        "quantization": details["quantization_level"],
        "state": "not-loaded" if engine is None else "loaded",
        "max_context_length": most,
    }
    return card if engine is None else {**card, "loaded_context_length": engine.max_model_len}
