"""llama.cpp's routes about the server: /props and /slots."""

from __future__ import annotations

from ... import __version__
from ..front_end import FrontEnd
from ..http.exchange import Exchange
from ..ollama_models import template_of


async def tell_props(front: FrontEnd, exchange: Exchange) -> None:
    """Return the context, the template and the number of requests at once."""
    engine = front.engine
    await exchange.respond_json(
        200,
        {
            "default_generation_settings": {"n_ctx": engine.max_model_len, "params": {}},
            "total_slots": engine.config.num_seats,
            "model_alias": front.names[0],
            "model_path": engine.config.model,
            "modalities": {"vision": engine.text.images is not None, "audio": False},
            "chat_template": template_of(engine, front.options.chat_template),
            "build_info": f"paged {__version__}",
        },
    )


async def list_slots(front: FrontEnd, exchange: Exchange) -> None:
    """Return a slot for each request in progress, without its prompt."""
    records = [each for each in front.open_records if exchange.owner in (None, each.owner)]
    slots = [
        {
            "id": number,
            "id_task": number,
            "n_ctx": front.engine.max_model_len,
            "is_processing": True,
            "n_decoded": sum(sum(own.num_generated) for own in record.progress.values()),
        }
        for number, record in enumerate(records)
    ]
    await exchange.respond_json(200, slots)
