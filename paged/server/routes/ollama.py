"""Ollama's routes about models, for a server of one model."""

from __future__ import annotations

import asyncio
import math

from ...chat.chat_format import ChatFormat
from ...checkpoints.library.models_file import ModelEntry
from ...protocol.endpoints import GET_LMSTUDIO_MODEL, GET_LMSTUDIO_MODELS, parse_call
from ...protocol.ollama.calls import NamedCall
from ..front_end import LATEST_TAG, FrontEnd
from ..http.exchange import Exchange
from ..http.failures import HttpError
from ..ollama_models import RunningModel, lmstudio_card, running_of, shown_model, tag_of, template_of

NO_CHANGES = "clients may not change the models of this server; start it with --allow-model-changes"


def capabilities_of(front: FrontEnd | None) -> list[str]:
    """Return what a model can do, in Ollama's names. front: None for a model that is not loaded."""
    if front is None:
        return ["completion"]
    engine = front.engine
    options = front.options
    if engine.text.has_embedding_files:
        return ["embedding"]
    found = ChatFormat.of_model(
        engine.text,
        chat_template=options.chat_template,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        enable_auto_tool_choice=options.enable_auto_tool_choice,
    )
    tools = ["tools"] if found.tools is not None else []
    thinking = ["thinking"] if found.reasoning is not None else []
    vision = ["vision"] if engine.text.images is not None else []
    return ["completion", *vision, *tools, *thinking]


def _entries(front: FrontEnd, exchange: Exchange) -> list[ModelEntry]:
    checkpoint = front.engine.config.model
    return [ModelEntry(name=name, checkpoint=checkpoint) for name in front.names_for(exchange.key)]


async def list_tags(front: FrontEnd, exchange: Exchange) -> None:
    """List the names of the model."""
    entries = _entries(front, exchange)
    tags = await asyncio.to_thread(lambda: [tag_of(entry, None) for entry in entries])
    await exchange.respond_json(200, {"models": tags})


async def list_running(front: FrontEnd, exchange: Exchange) -> None:
    """List the model, which stays loaded."""
    running = [RunningModel(each, front.engine, 0, math.inf) for each in _entries(front, exchange)]
    models = await asyncio.to_thread(lambda: [running_of(each, None) for each in running])
    await exchange.respond_json(200, {"models": models})


async def show_model(front: FrontEnd, exchange: Exchange) -> None:
    """Describe the model."""
    call = await exchange.read_json(lambda body: parse_call(exchange.route, body))
    assert isinstance(call, NamedCall)
    name = call.name.removesuffix(LATEST_TAG)
    front.check_model(name, exchange.key)
    entry = ModelEntry(name=name, checkpoint=front.engine.config.model)
    template = template_of(front.engine, front.options.chat_template)
    shown = await asyncio.to_thread(shown_model, entry, None, front.engine, capabilities_of(front), template)
    await exchange.respond_json(200, shown)


async def refuse_change(front: FrontEnd, exchange: Exchange) -> None:  # noqa: ARG001
    """Refuse to change the models: a server of one model has no others."""
    raise HttpError(403, NO_CHANGES, code="not_allowed")


async def list_for_lmstudio(front: FrontEnd, exchange: Exchange) -> None:
    """List the names of the model, or describe one, in LM Studio's form."""
    name = exchange.route.removeprefix(GET_LMSTUDIO_MODELS.path).removeprefix("/")
    capabilities = capabilities_of(front)
    entries = _entries(front, exchange)
    if name:
        exchange.route = GET_LMSTUDIO_MODEL.path  # for the metrics
        front.check_model(name, exchange.key)
        entries = [each for each in entries if each.name == name]
    cards = [lmstudio_card(each, None, front.engine, capabilities) for each in entries]
    await exchange.respond_json(200, cards[0] if name else {"object": "list", "data": cards})
