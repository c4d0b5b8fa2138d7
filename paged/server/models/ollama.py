"""Ollama's and LM Studio's routes about models, for a server of several."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Mapping
from typing import Any

from ...base.errors import CheckpointError, ConfigError, PagedError, RequestError, ResourceError
from ...base.validation import shown
from ...checkpoints.library.local import find_local, remove_local
from ...checkpoints.library.models_file import ModelEntry
from ...checkpoints.library.pull import HubError, Progress, RemoteFile, RemoteModel, without_hub
from ...protocol.endpoints import (
    DEFAULT_LIMITS,
    GET_LMSTUDIO_MODEL,
    GET_LMSTUDIO_MODELS,
    POST_OLLAMA_COPY,
    POST_OLLAMA_PULL,
    POST_OLLAMA_SHOW,
    parse_call,
)
from ...protocol.ollama.calls import CopyCall, DeleteCall, NamedCall
from ...text.chat_template import PLAIN, PLAIN_TEMPLATE
from ..front_end import LATEST_TAG
from ..http.exchange import JSON_LINES, Exchange, encode_json, until_disconnect
from ..http.failures import HttpError
from ..http.streams import StreamedResponse
from ..ollama_models import RunningModel, lmstudio_card, running_of, shown_model, tag_of, template_of
from ..routes.ollama import NO_CHANGES, capabilities_of
from .catalog import local_of
from .host import in_thread
from .lobby import Lobby

PREFERRED = "Q4_K_M"  # of several GGUF files, where a client names none: as Ollama's models
TELL_S = 0.25  # between two lines of a pull


def _visible(lobby: Lobby, exchange: Exchange) -> list[ModelEntry]:
    allowed = {*lobby.names_for(exchange.key)}
    return [each for each in lobby.catalog.entries() if each.name in allowed]


class ManyTagsRoute:
    """Lists the models, loaded or not."""

    def __init__(self, lobby: Lobby) -> None:
        self._lobby = lobby

    async def __call__(self, exchange: Exchange) -> None:
        entries = _visible(self._lobby, exchange)
        tags = await asyncio.to_thread(lambda: [tag_of(entry, local_of(entry)) for entry in entries])
        await exchange.respond_json(200, {"models": tags})


class ManyPsRoute:
    """Lists the models that are loaded."""

    def __init__(self, lobby: Lobby) -> None:
        self._lobby = lobby

    async def __call__(self, exchange: Exchange) -> None:
        lobby = self._lobby
        allowed = {*lobby.names_for(exchange.key)}
        residents = lobby.host.residency.models
        running = []
        for name, model in lobby.loaded.items():
            if name in allowed:
                own = residents[name]
                until = own.last_use + own.keep_alive
                running.append(RunningModel(model.entry, model.front.engine, own.num_bytes, until))
        shown = await asyncio.to_thread(lambda: [running_of(each, local_of(each.entry)) for each in running])
        await exchange.respond_json(200, {"models": shown})


class ManyShowRoute:
    """Describes a model."""

    def __init__(self, lobby: Lobby) -> None:
        self._lobby = lobby

    async def __call__(self, exchange: Exchange) -> None:
        lobby = self._lobby
        call = await exchange.read_json(lambda body: parse_call(POST_OLLAMA_SHOW.path, body))
        assert isinstance(call, NamedCall)
        entry = lobby.entry_of(call.name, exchange.key)
        loaded = lobby.loaded.get(entry.name)
        front = None if loaded is None else loaded.front
        capabilities = capabilities_of(front)
        template: str | None
        if front is not None:
            template = template_of(front.engine, front.options.chat_template)
        elif (template := lobby.template_of(entry)) is not None and "{" not in template:  # the name of one
            template = PLAIN_TEMPLATE if template == PLAIN else ""
        shown = await asyncio.to_thread(
            lambda: shown_model(
                entry,
                local_of(entry),
                None if front is None else front.engine,
                capabilities,
                template,
                lobby.context_of(entry),
            )
        )
        await exchange.respond_json(200, shown)


class ManyLmStudioRoute:
    """Lists the models, or describes one, in LM Studio's form."""

    def __init__(self, lobby: Lobby) -> None:
        self._lobby = lobby

    async def __call__(self, exchange: Exchange) -> None:
        lobby = self._lobby
        name = exchange.route.removeprefix(GET_LMSTUDIO_MODELS.path).removeprefix("/")
        entries = _visible(lobby, exchange)
        if name:
            exchange.route = GET_LMSTUDIO_MODEL.path  # for the metrics
            entries = [lobby.entry_of(name, exchange.key)]
        cards = []
        for entry in entries:
            loaded = lobby.loaded.get(entry.name)
            front = None if loaded is None else loaded.front
            cards.append(
                lmstudio_card(
                    entry, local_of(entry), None if front is None else front.engine, capabilities_of(front)
                )
            )
        await exchange.respond_json(200, cards[0] if name else {"object": "list", "data": cards})


def check_may_change(lobby: Lobby, exchange: Exchange) -> None:
    """Raise HttpError unless clients may change models; with keys of some models alone they may not."""
    if not lobby.options.allow_model_changes:
        raise HttpError(403, NO_CHANGES, code="not_allowed")
    if exchange.key is not None and exchange.key.entry.models is not None:
        raise HttpError(403, "this key is for some models, and may not change any", code="not_allowed")
    if not lobby.catalog.is_open:
        raise HttpError(403, "this server has the models of its command line alone", code="not_allowed")


class PullRoute:
    """Downloads a model of the hub, and tells the progress as lines of JSON.

    A pull whose client goes ends; the next one of the same model goes on where it stopped.
    """

    def __init__(self, lobby: Lobby) -> None:
        self._lobby = lobby

    async def __call__(self, exchange: Exchange) -> None:
        check_may_change(self._lobby, exchange)
        call = await exchange.read_json(lambda body: parse_call(POST_OLLAMA_PULL.path, body))
        assert isinstance(call, NamedCall)
        name = hub_name(call.name)
        async with until_disconnect(exchange):
            pull = _Pull(name, self._lobby.host.residency.memory)
            try:
                if call.stream:
                    await self._stream(exchange, pull)
                else:
                    await in_thread(pull.run)
                    await exchange.respond_json(200, {"status": "success"})
            except PagedError as error:
                raise HttpError(_status_of(error), str(error), param="model") from None
            finally:
                pull.stop()

    async def _stream(self, exchange: Exchange, pull: _Pull) -> None:
        """Send the lines of a pull. An error is a line, too, as in Ollama: the status has been sent."""
        response = StreamedResponse(exchange, JSON_LINES)
        await response.write(encode_json({"status": "pulling manifest"}) + b"\n")
        pulling = asyncio.ensure_future(in_thread(pull.run))
        last_line = {"status": "success"}
        try:
            is_done = False
            while not is_done:
                is_done = bool((await asyncio.wait([pulling], timeout=TELL_S))[0])
                for line in pull.take():
                    await response.write(encode_json(line) + b"\n")
            pulling.result()
        except PagedError as error:
            last_line = {"error": str(error)}
        finally:
            pulling.cancel()
        await response.write(encode_json(last_line) + b"\n", more=False)


def _status_of(error: PagedError) -> int:
    """Return the status of a pull that failed."""
    if isinstance(error, HubError):
        return error.status
    if isinstance(error, ResourceError):
        return 507
    return 404  # the repository has no model, or none of this quantisation


def hub_name(name: str) -> str:
    """Return owner/name or owner/name:QUANT for a name of a client. Raises RequestError for other names."""
    name = without_hub(name).removesuffix(LATEST_TAG)
    if "/" not in name.partition(":")[0]:
        raise RequestError(
            f"{name} is a name of Ollama's registry, and models come from the hub: give owner/name or "
            "owner/name:QUANT",
            param="model",
        )
    return name


class _Stopped(Exception):  # noqa: N818 - an event like CancelledError, no error
    """A pull that was stopped. It is no PagedError, so that no part of the pull tries again."""


class _Pull:
    """A download of a model.

    name: owner/name or owner/name:QUANT. most_bytes: of a model, where the name leaves open which.
    """

    def __init__(self, name: str, most_bytes: int) -> None:
        self._name = name
        self._most_bytes = most_bytes
        self._is_stopped = False
        self._lock = threading.Lock()
        self._lines: list[dict[str, Any]] = []

    def stop(self) -> None:
        """Let `run` end at its next piece of a file."""
        self._is_stopped = True

    def take(self) -> list[dict[str, Any]]:
        """Return the lines of the progress since the last call. Of the steps of one file, it has the last."""
        with self._lock:
            taken, self._lines = self._lines, []
        return taken

    def _tell(self, status: str, **more: Any) -> None:
        line = {"status": status, **more}
        with self._lock:
            if self._lines and self._lines[-1]["status"] == status:
                self._lines.pop()
            self._lines.append(line)

    def run(self) -> None:
        """Download the model, in a thread. Raises CheckpointError, or what `RemoteModel.pull` raises."""
        repository, _, quantisation = self._name.partition(":")
        remote = RemoteModel(repository)
        chosen = quantisation or preferred(remote, self._most_bytes)
        files = remote.files_of(chosen)

        def on_progress(progress: Progress) -> None:
            if self._is_stopped:
                raise _Stopped
            self._tell(f"pulling {_name_of(progress.file)}", **_digest_of(progress, files))

        remote.pull(files, on_progress)
        self._tell("verifying sha256 digest")
        self._tell(f"pulled {repository if chosen is None else f'{repository}:{chosen}'}")


def preferred(remote: RemoteModel, most_bytes: int) -> str | None:
    """Return the quantisation that Ollama would take, else one of as many bits, else the largest that fits.

    None stands for safetensors.
    """
    quantisations = remote.quantisations
    if remote.has_safetensors or not quantisations:
        return None
    for like in (PREFERRED, f"UD-{PREFERRED}", ".*q4_k.*", ".*q4.*"):
        for name in quantisations:
            if re.fullmatch(like, name, re.IGNORECASE):
                return name
    fitting = [
        name for name, files in quantisations.items() if sum(each.size for each in files) <= most_bytes
    ]
    return (fitting or [*quantisations][-1:])[0]


def _name_of(file: RemoteFile) -> str:
    return file.digest[:12]


def _digest_of(progress: Progress, files: list[RemoteFile]) -> dict[str, Any]:
    before = sum(each.size for each in files[: files.index(progress.file)])
    completed = min(progress.file.size, progress.done - before)
    digest = f"sha256:{progress.file.digest}"
    return {"digest": digest, "total": progress.file.size, "completed": completed}


def _deleted(body: Any) -> DeleteCall:
    """Return the body of a DELETE, of which other routes have none."""
    if not isinstance(body, Mapping):
        raise RequestError(f"body must be an object, got {shown(body)}")
    return DeleteCall(body, DEFAULT_LIMITS)


class DeleteRoute:
    """Removes a model from the hub's cache, or forgets a name of models.toml."""

    def __init__(self, lobby: Lobby) -> None:
        self._lobby = lobby

    async def __call__(self, exchange: Exchange) -> None:
        lobby = self._lobby
        check_may_change(lobby, exchange)
        call = await exchange.read_json(_deleted)
        entry = lobby.entry_of(call.name, exchange.key)
        await asyncio.to_thread(self._remove, entry)
        lobby.host.unload(entry.name)
        await exchange.respond(200, b"")

    def _remove(self, entry: ModelEntry) -> None:
        file = self._lobby.catalog.file
        if file.find(entry.name) is not None:
            file.remove(entry.name)
            return
        local = find_local(entry.name)
        if local is None:
            raise RequestError(f"{entry.name} is not in the hub's cache, and is not removed", param="model")
        remove_local(local)


class CopyRoute:
    """Gives a model a further name, in models.toml."""

    def __init__(self, lobby: Lobby) -> None:
        self._lobby = lobby

    async def __call__(self, exchange: Exchange) -> None:
        lobby = self._lobby
        check_may_change(lobby, exchange)
        call = await exchange.read_json(lambda body: parse_call(POST_OLLAMA_COPY.path, body))
        assert isinstance(call, CopyCall)
        entry = lobby.entry_of(call.values["source"], exchange.key)
        destination = call.values["destination"].removesuffix(LATEST_TAG)
        try:
            await asyncio.to_thread(lobby.catalog.file.set, destination, entry.name)
        except (ConfigError, CheckpointError) as error:
            raise RequestError(str(error), param="destination") from None
        await exchange.respond(200, b"")
