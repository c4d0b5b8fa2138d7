"""Random bodies are parsed or refused by name; none raises anything else."""

import json
import random

from paged.base.errors import RequestError, UnknownArgumentError
from paged.base.strict_json import parse_json
from paged.chat.chat_format import ChatFormat
from paged.protocol.calls.adapters import LoadAdapterCall, UnloadAdapterCall
from paged.protocol.calls.call import GenerationCall
from paged.protocol.calls.tokens import TextCall
from paged.protocol.endpoints import parse_call
from paged.protocol.limits import Limits
from paged.protocol.ollama.calls import CopyCall, NamedCall
from tests.support.random_bodies import random_body

FORMATS = [
    ChatFormat(),
    ChatFormat.of(tool_call_parser="hermes", reasoning_parser="qwen3", enable_auto_tool_choice=True),
]


def test_random_bodies_are_parsed_or_refused(text):
    rng, taken = random.Random(0), 0
    for i in range(1500):
        url, body = random_body(rng)
        limits = Limits(trust_chat_template=i % 3 == 0, max_logprobs=-1, chat_format=FORMATS[i % 2])
        try:
            call = parse_call(url, parse_json(json.dumps(body)), limits)
            if isinstance(call, TextCall):
                call.answer(text, 2048)
            elif not isinstance(call, NamedCall | CopyCall | LoadAdapterCall | UnloadAdapterCall):
                call.prompts(text)
            if isinstance(call, GenerationCall):
                call.params(text)
            taken += 1
        except (RequestError, UnknownArgumentError):
            pass
    assert 150 < taken < 1000
