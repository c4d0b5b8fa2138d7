"""System messages anywhere in a conversation reach the model, whatever its template does with them."""

from __future__ import annotations

import random
import re
from zlib import crc32

import pytest

from paged import LLMEngine
from paged.base.errors import RequestError
from paged.protocol.endpoints import parse_call
from paged.protocol.limits import Limits
from paged.text.chat_template import ChatTemplates

MARK = re.compile(r"«(\d+)»")
EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
FIRST = """\
{% if messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% set rest = messages[1:] %}
{% else %}{% set rest = messages %}{% endif %}"""
ALTERNATE = """\
{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
<{{ m.role }}>{{ m.content }}{% endfor %}"""
DIALOGUE = """\
{% for m in messages if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endfor %}"""
TEMPLATES = {
    "takes": EACH,
    "takes parts": """\
{% for m in messages %}<{{ m.role }}>{% set content = m.content %}{% if content is string %}{{ content }}
{% else %}{% for part in content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}""",
    "changes texts": "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}",
    "hoists": """\
{% for m in messages if m.role == 'system' %}<<{{ m.content }}>>{% endfor %}"""
    + DIALOGUE,
    "refuses late ones": FIRST + ALTERNATE,
    "refuses all": """\
{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% set rest = messages %}"""
    + ALTERNATE,
    "drops late ones": FIRST
    + """\
{% for m in rest if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}""",
    "drops some late ones": """\
{% for m in messages %}{% if loop.index0 % 3 == 0 or m.role != 'system' %}
<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}""",
    "shows the last": """\
{% set ns = namespace(s='') %}
{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}{% endfor %}
{{ ns.s }}"""
    + DIALOGUE,
    "drops all": DIALOGUE,
    "developer": """\
{% if messages[0].role == 'developer' %}<<{{ messages[0].content }}>>{% endif %}"""
    + DIALOGUE,
    "moves behind": DIALOGUE
    + """\
{% for m in messages if m.role == 'system' and not loop.first %}<<{{ m.content }}>>{% endfor %}
{% if messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% endif %}""",
    "turns round": """\
{% for m in messages[::-1] if m.role == 'system' %}<<{{ m.content }}>>{% endfor %}"""
    + DIALOGUE,
    "mentions it": "{% if messages[0].role == 'system' %}There is a system message. {% endif %}" + DIALOGUE,
}


def random_order(rng: random.Random) -> list[tuple[str, str]]:
    """Return roles and texts: a dialogue that begins and ends with the user, and system messages anywhere.

    Two messages of the user may follow each other where a system message is between them.
    """
    roles = ["user"]
    for _ in range(rng.randrange(4)):
        roles += ["assistant", "user"] if rng.random() < 0.8 else ["system", "user"]
    for _ in range(rng.randrange(4)):
        roles.insert(rng.randrange(len(roles) + 1), rng.choice(["system", "developer"]))
    return [(role, f"a text «{i}»") for i, role in enumerate(roles)]


def in_chat(order):
    def content(text):
        return text if crc32(text.encode()) % 2 else [{"type": "text", "text": text}]

    return "/v1/chat/completions", {
        "messages": [{"role": role, "content": content(text)} for role, text in order]
    }


def in_responses(order):
    body = {}
    if order[0][0] == "system":
        body["instructions"] = order[0][1]
        order = order[1:]
    items = [{"type": "message", "role": role, "content": text} for role, text in order]
    return "/v1/responses", {**body, "input": items}


def in_messages(order):
    body = {"max_tokens": 5}
    if order[0][0] == "system":
        body["system"] = order[0][1]
        order = order[1:]
    roles = {"developer": "system"}
    return "/v1/messages", {
        **body,
        "messages": [{"role": roles.get(role, role), "content": text} for role, text in order],
    }


def check(order, rendered):
    """Each message is there once; the dialogue in its order, a system message before what followed it."""
    places = [int(number) for number in MARK.findall(rendered)]
    assert sorted(places) == [*range(len(order))], rendered
    is_system = [role in ("system", "developer") for role, _ in order]
    assert [i for i in places if not is_system[i]] == [i for i, system in enumerate(is_system) if not system]
    leading = is_system.index(False)
    for i, system in enumerate(is_system):
        if system and i > leading:
            assert all(places.index(i) < places.index(j) for j in range(i + 1, len(order))), rendered


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_message_reaches_the_model_in_order(text, name):
    rng = random.Random(name)
    templates = ChatTemplates({"default": TEMPLATES[name]}, {})
    for _ in range(8):
        order = random_order(rng)
        for to_body in (in_chat, in_responses, in_messages):
            url, fields = to_body(order)
            call = parse_call(url, {"model": "demo", **fields}, Limits(chat_template=TEMPLATES[name]))
            ((prompt),) = call.prompts(text)
            check(order, prompt["prompt"])
        check(order, templates.render([{"role": role, "content": words} for role, words in order]))


def test_what_a_template_takes_is_rendered_as_it_is():
    """Also where the text of a system message stands elsewhere, and where an empty one is nowhere."""
    talk = [
        {"role": "system", "content": "Hi"},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": " "},
        {"role": "user", "content": "Hi"},
    ]
    templates = ChatTemplates({"default": EACH}, {})
    assert templates.render(talk) == "<system>Hi<user>Hi<system><user>Hi"
    assert templates.render(talk, chat_template=TEMPLATES["drops all"]) == "<user>Hi\n\nHi<user>Hi"
    assert templates.render(talk[:2], chat_template="{{ messages[0].role }}") == "system"


def test_a_conversation_that_no_form_saves_is_refused_in_the_templates_own_words():
    templates = ChatTemplates({"default": TEMPLATES["refuses late ones"]}, {})
    talk = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    with pytest.raises(RequestError, match="refuses this: roles must alternate user/assistant") as refused:
        templates.render(talk)
    assert type(refused.value) is RequestError


def test_a_message_that_is_continued_stays_the_last():
    templates = ChatTemplates({"default": TEMPLATES["drops late ones"]}, {})
    talk = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "be kind"},
        {"role": "assistant", "content": "Well, "},
    ]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert templates.render(talk, **options) == "<<be kind>><user>a<assistant>Well, "


# As DeepSeek-R1's distilled models have it: arguments are text, and calls stand in messages without content.
CONCATENATES = """\
{% for m in messages %}{% if m['role'] == 'user' %}{{ '<U>' + m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}{%- for call in m['tool_calls'] %}
{{- '<C>' + call['type'] + '<S>' + call['function']['name'] + '\\n' + call['function']['arguments'] + '<E>' }}
{%- endfor %}{%- endif %}
{%- if m['role'] == 'assistant' and m['content'] is not none %}{{- '<A>' + m['content'] }}{%- endif %}
{%- if m['role'] == 'tool' %}{{- '<R>' + m['content'] }}{%- endif %}{% endfor %}"""
PRINTS = """\
{% for m in messages %}{% for call in m.tool_calls %}
{{- call.function.name }}
{{ call.function.arguments }}{% endfor %}{% endfor %}"""
ARGUMENTS = '{"city": "Orléans", "days": [1, null, true], "big": 12345678901234567890}'


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}], ids=["null", "empty", "none"])
@pytest.mark.parametrize("template", [CONCATENATES, PRINTS], ids=["concatenates", "prints"])
@pytest.mark.parametrize("arguments", [ARGUMENTS, "{}", '{"cut": '], ids=["object", "empty", "cut"])
def test_templates_that_want_arguments_as_text_get_text(content, template, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    talk = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", **content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    rendered = ChatTemplates({"default": template}, {}).render(talk)
    assert f"weather\n{arguments}" in rendered
    if template is CONCATENATES:
        assert "Be brief" in rendered
        assert "<R>rain" in rendered


def test_a_template_that_takes_calls_in_no_form_says_so():
    template = CONCATENATES.replace("<C>'", "<C>' + call['flavour']")
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(RequestError, match="the chat template failed: UndefinedError"):
        ChatTemplates({"default": template}, {}).render(talk)
    own = "{% for m in messages if m.tool_calls %}{{ raise_exception('one call at once') }}{% endfor %}"
    with pytest.raises(RequestError, match="refuses this: one call at once"):
        ChatTemplates({"default": own}, {}).render(talk)


def test_offline_chats_take_late_system_messages():
    engine = LLMEngine("demo", device="cpu", num_blocks=64)
    talk = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "b"},
    ]
    (output,) = engine.chat(talk, chat_template=TEMPLATES["drops late ones"], use_tqdm=False)
    assert output.prompt == "<<be kind>><user>a<user>b"
