"""Tools of a model whose chat template does not show them: in messages, in the form of the chosen parser."""

from __future__ import annotations

import json
import logging

import pytest

from paged.chat.chat_format import ChatFormat
from paged.chat.parts import ChatOutput
from paged.chat.tool_format import JSON_FORMAT
from paged.chat.tools import tools_of
from paged.protocol.endpoints import parse_call
from paged.protocol.limits import Limits
from tests.protocol.test_tool_plan import CHAT, FORMATS, TOOLS
from tests.text.test_chat_template import CHATML

# As SmolLM2's: roles and contents, and nothing of tools or calls.
ROLES_ALONE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
# As Gemma's: no system messages, and roles alternate.
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "draw", "arguments": '{"at": [true]}'}},
    {"id": "c2", "type": "function", "function": {"name": "stop", "arguments": "null"}},
]
TALK = [
    {"role": "user", "content": "Draw."},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "drawn"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "stopped"}]},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": [{"type": "text", "text": "Again."}]},
]


def prompt_of(text, template: str, chat_format: ChatFormat, messages=TALK, **fields) -> str:
    limits = Limits(chat_template=template, chat_format=chat_format)
    body = {"messages": messages, "tools": TOOLS, "tool_choice": "required", **fields}
    (prompt,) = parse_call(CHAT, body, limits).prompts(text)
    return prompt["prompt"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("template", [ROLES_ALONE, STRICT], ids=["roles alone", "strict"])
def test_tools_calls_and_results_are_in_messages(text, name, template):
    """The parser reads the calls as they are written, so that the model sees the form that it is to write."""
    prompt = prompt_of(text, template, FORMATS[name])
    first, call, results = _parts(prompt)
    assert all(json.dumps(tool, ensure_ascii=False) in first for tool in TOOLS)
    tools = FORMATS[name].tools or JSON_FORMAT
    parser = tools.new_parser(tools_of(TOOLS), "")
    output = ChatOutput.of([*parser.feed(call), *parser.finish()])
    assert [(c.name, c.arguments) for c in output.tool_calls] == [("draw", '{"at": [true]}'), ("stop", "{}")]
    assert not output.content
    assert (
        results.strip()
        == "<tool_response>\ndrawn\n</tool_response>\n<tool_response>\nstopped\n</tool_response>"
    )


def _parts(prompt: str) -> tuple[str, str, str]:
    """Return the texts with the tools, with the calls and with the results of TALK."""
    head, _, rest = prompt.partition("<assistant>")
    call, _, rest = rest.partition("\n<user>")
    return head, call, rest.partition("\n<assistant>")[0]


def test_results_keep_their_images():
    """Between the marks of a result, also where another result comes before or behind."""
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Here:"}, image]}
    messages = [*TALK[:2], result, TALK[3], result, TALK[2], *TALK[4:]]
    (shown,) = (
        message["content"]
        for message in JSON_FORMAT.messages_with(messages, TOOLS, shows_system=True)[3:]
        if message["role"] == "user" and image in message["content"]
    )
    texts = [part["text"] if part["type"] == "text" else "IMAGE" for part in shown]
    one = ["<tool_response>", "Here:", "IMAGE", "</tool_response>"]
    others = [f"<tool_response>\n{name}\n</tool_response>" for name in ("stopped", "drawn")]
    assert texts == [*one, others[0], *one, others[1]]
    behind_text = JSON_FORMAT.messages_with([*TALK[:3], result], TOOLS, shows_system=True)[-1]["content"]
    assert [part.get("text") for part in behind_text] == [
        others[1],
        "<tool_response>",
        "Here:",
        None,
        one[-1],
    ]


def test_the_system_message_keeps_its_own_text(text):
    system = [{"role": "system", "content": "Be brief."}, *TALK]
    prompt = prompt_of(text, ROLES_ALONE, FORMATS["hermes"], system)
    assert prompt.startswith("<system>Be brief.\n\n# Tools")
    assert prompt.count("<system>") == 1
    assert prompt_of(text, ROLES_ALONE, FORMATS["hermes"]).startswith("<system># Tools")
    assert prompt_of(text, STRICT, FORMATS["hermes"]).startswith("<user># Tools")
    parts = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *TALK]
    assert prompt_of(text, ROLES_ALONE, FORMATS["hermes"], parts).startswith("<system>Be brief.\n# Tools")


def test_a_template_that_shows_tools_has_them_itself(text):
    prompt = prompt_of(text, CHATML, FORMATS["hermes"], TALK[:1])
    assert prompt.count('"name": "draw"') == 1
    assert "You may call" not in prompt
    untouched = prompt_of(text, ROLES_ALONE, FORMATS["hermes"], TALK[:1], tool_choice="none")
    assert untouched == "<user>Draw.\n<a>"


def test_the_start_says_that_tools_are_not_shown(text, caplog):
    with caplog.at_level(logging.WARNING):
        ChatFormat.of_model(text, chat_template=CHATML, tool_call_parser="hermes")
        ChatFormat.of_model(text, chat_template=ROLES_ALONE)  # who asked for no tools need not know
        assert not caplog.messages
        ChatFormat.of_model(text, chat_template=ROLES_ALONE, tool_call_parser="hermes")
    (message,) = caplog.messages
    assert message.startswith("the chat template does not show tools to the model: messages describe them")
