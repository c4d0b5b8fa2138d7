"""Chat templates render to the text of transformers, and templates that exhaust resources are stopped."""

from __future__ import annotations

import datetime
import gc
import json
import os
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest

from paged.architectures.config import DEMO
from paged.base.errors import RequestError, WorkerLostError
from paged.text.chat_template import MOST_RENDERED, ChatTemplates
from paged.text.tokenizer import Tokenizer
from paged.text.worker import PIECE, Worker, WorkerLimits

LLAMA_3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if tools is not none %}{% for t in tools %}{{- t | tojson(indent=4) + "\\n\\n" }}{% endfor %}{% endif %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{% endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% break %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not (loop.first and tools)) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- generation %}
        {%- if message.reasoning_content %}
            {{- '\\n<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {%- if message.content %}{{- '\\n' + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments | tojson ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message, loop_messages = messages[0]["content"], messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages | rejectattr("role", "in", ["tool", "tool_results"]) %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user/assistant.") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- for key, val in tool.function.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.first and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" and message["content"] is defined %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- else %}{%- continue %}{%- endif %}
{%- endfor %}
"""

PARTS = """\
{% for message in messages %}<{{ message.role }}>{% set content = message['content'] | default('') %}
{% if content is string %}{{ content }}{% else %}
{% for part in content | selectattr('type', 'eq', 'text') %}[{{ part.text }}]{% endfor %}{% endif %}
{% endfor %}{{ documents is none }}"""

# As those of models that write an argument on a line of its own.
THROUGH_ARGUMENTS = """\
{%- for message in messages %}{%- for call in message.tool_calls or [] %}
{%- for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}
{%- endfor %}{%- endfor %}
"""
TEMPLATES = {"llama-3": LLAMA_3, "chatml": CHATML, "mistral": MISTRAL, "parts": PARTS}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The <weather> of a place, in °C & more",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
TALK = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "Wie geht's? 日本 <b>&amp;</b> 🙂"},
    {"role": "assistant", "content": "Gut. ", "tool_calls": None},
    {"role": "user", "content": "{{ 7 * 7 }} 'quotes' \"double\"\n"},
]
CALL = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I should look.",
        "tool_calls": [
            {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"place": "Ås"}}}
        ],
    },
    {"role": "tool", "content": "12", "tool_call_id": "c1"},
]


@pytest.fixture(scope="module")
def hf():
    return Tokenizer(DEMO).hf


@pytest.fixture(scope="module")
def templates(hf):
    return ChatTemplates(TEMPLATES, dict(hf.special_tokens_map))


rendered_as_today = pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < (5, 23),
    reason="this older transformers, the oracle, renders keys of messages that are None",
)


@rendered_as_today
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [TALK[:2], TALK, CALL], ids=["short", "talk", "call"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
def test_text_is_that_of_transformers(templates, hf, name, messages, tools):
    for options in (
        {"add_generation_prompt": True, "enable_thinking": False},
        {"add_generation_prompt": False},
    ):
        expected = hf.apply_chat_template(
            messages, tools=tools, chat_template=TEMPLATES[name], tokenize=False, **options
        )
        extra = {key: value for key, value in options.items() if key != "add_generation_prompt"}
        if tools is not None and name == "parts":
            with pytest.raises(RequestError, match=r"tools are refused: .* does not show them") as refused:
                templates.render(messages, tools=tools, chat_template=name)
            assert refused.value.param == "tools"
            continue
        text = templates.render(
            messages,
            tools=tools,
            chat_template=name,
            add_generation_prompt=options["add_generation_prompt"],
            chat_template_kwargs=extra,
        )
        assert text == expected


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda sign: sign.name)
def test_a_process_that_is_ended_from_outside_is_asked_again_once(sign, monkeypatch):
    monkeypatch.setattr("paged.text.worker.LOOK_AT_PROCESS_S", 0.01)
    templates = ChatTemplates({}, {})
    first = templates._workers.first
    started = []
    start, is_hit = Worker._start, [True, False, True, True, False]

    def start_and_hit(worker):
        start(worker)
        started.append(worker._process.pid)
        if is_hit.pop(0):
            os.kill(worker._process.pid, sign)

    monkeypatch.setattr(Worker, "_start", start_and_hit)
    assert templates.render(TALK[:1], chat_template="{{ 1 }}") == "1"
    first.close()
    with pytest.raises(
        WorkerLostError, match=r"was (killed by signal 9|killed by signal 15|stopped); try again"
    ):
        templates.render(TALK[:1], chat_template="{{ 1 }}")
    assert first._process is None
    assert templates.render(TALK[:1], chat_template="{{ 1 }}") == "1"
    assert (len({*started}), is_hit) == (5, [])


def test_a_process_that_a_request_ends_is_not_asked_again(monkeypatch):
    """By its limits, or by an error of a library."""
    templates = ChatTemplates({}, {})
    asked = []
    exchange = Worker._exchange

    def end(worker, line, time_s):
        asked.append(line)
        os.kill(worker._process.pid, signal.SIGSEGV)
        return exchange(worker, line, time_s)

    monkeypatch.setattr(Worker, "_exchange", end)
    with pytest.raises(RequestError, match=r"ended the process that runs it \(exit code -11\)") as caught:
        templates.render(TALK[:1], chat_template="{{ 1 }}")
    assert not isinstance(caught.value, WorkerLostError)
    assert len(asked) == 1


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, 2 * PIECE + 1])
def test_long_texts_are_the_same_in_pieces(size):
    odd = ('\n"\\😀é\u2028' * size)[:size]
    templates = ChatTemplates({}, {})
    talk = [{"role": "user", "content": odd, "more": [1, None, {"a": [odd, 1.5]}]}]
    template = "{{ messages[0].content }}{{ messages[0].more[2].a[0] }}{{ messages[0].more[:2] }}"
    assert templates.render(talk, chat_template=template) == odd + odd + "[1, None]"


@rendered_as_today
@pytest.mark.parametrize(
    ("name", "last"),
    [
        *((name, text) for name in TEMPLATES for text in ("def f(x):\n  ", "The answer is")),
        ("parts", [{"type": "text", "text": "I said"}, {"type": "text", "text": "that "}]),
    ],
)
def test_a_message_is_continued_where_transformers_does(templates, hf, name, last):
    messages = [*TALK, {"role": "assistant", "content": last}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = hf.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, **options)
    assert templates.render(messages, chat_template=name, **options) == expected
    assert messages[-1]["content"] == last


def test_text_parts_are_joined_where_the_template_wants_a_string(templates):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    render = templates.render
    for name in ("chatml", "llama-3"):
        joined = render([{"role": "user", "content": "one\ntwo"}], chat_template=name)
        assert render([{"role": "user", "content": parts}], chat_template=name) == joined
    assert "[one][two]" in render([{"role": "user", "content": parts}], chat_template="parts")


def test_arguments_of_calls_may_be_text_as_openai_has_them(templates):
    text = {"name": "weather", "arguments": '{"place": "Ås"}'}
    messages = [CALL[0], {"role": "assistant", "tool_calls": [{"type": "function", "function": text}]}]
    assert '"arguments": {"place": "Ås"}}' in templates.render(messages, chat_template="chatml")


@pytest.mark.parametrize("arguments", [None, "", " ", "null"], ids=repr)
@pytest.mark.parametrize("template", [CHATML, THROUGH_ARGUMENTS], ids=["printed", "gone through"])
def test_calls_without_arguments_have_an_empty_object(templates, template, arguments):
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [CALL[0], {"role": "assistant", "tool_calls": [call]}]
    empty = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    same = [CALL[0], {"role": "assistant", "tool_calls": [empty]}]
    rendered = templates.render(messages, chat_template=template)
    assert rendered == templates.render(same, chat_template=template)
    del call["function"]["arguments"]
    assert rendered == templates.render(messages, chat_template=template)


@pytest.mark.parametrize("arguments", ['{"place": "Å', "{place", "[1]", "5", "{" * 10**5, '{"a": NaN}', "hi"])
@pytest.mark.parametrize("template", [CHATML, THROUGH_ARGUMENTS], ids=["printed", "gone through"])
def test_arguments_that_are_no_object_break_no_template(templates, template, arguments):
    """Such as those of a call that max_tokens has cut: the model sees their text."""
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [CALL[0], {"role": "assistant", "tool_calls": [call]}]
    rendered = templates.render(messages, chat_template=template)
    shown = json.dumps(arguments, ensure_ascii=False) if template == CHATML else f"raw_arguments={arguments};"
    assert shown in rendered


def test_which_template_is_meant():
    named = ChatTemplates(
        {"default": "{{ 'd' }}", "tool_use": "t{{ tools | length }}", "rag": "{{ documents[0] }}"}, {}
    )
    render, messages = named.render, TALK[:1]
    assert [render(messages), render(messages, tools=TOOLS)] == ["d", "t1"]
    assert render(messages, chat_template="rag", chat_template_kwargs={"documents": ["doc"]}) == "doc"
    assert render(messages, chat_template="{{ 'own' }}") == "own"
    plain = "System: Be brief.\nUser: Hi\nAssistant:"
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert render(talk, chat_template="plain") == plain
    with pytest.raises(
        RequestError, match=r"'rga' is neither .* there is 'default', 'plain', 'rag', 'tool_use'"
    ):
        render(messages, chat_template="rga")
    with pytest.raises(
        RequestError, match="several chat templates; name one with chat_template=: 'a', 'b', 'pl"
    ):
        ChatTemplates({"a": "{{1}}", "b": "{{2}}"}, {}).render(messages)
    with pytest.raises(RequestError, match="no chat template: give a Jinja template as chat_template "):
        ChatTemplates({}, {}).render(messages)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LLAMA_3, (True, True)),
        (CHATML, (True, True)),
        (MISTRAL, (True, True)),
        (PARTS, (False, True)),
        ("{{ messages[-1].content }}", (False, False)),
        ("{{ raise_exception('no') }}", (True, False)),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ tools }}",
            (True, False),
        ),
        ("{% if messages[0].role == 'system' %}{{ tools }}{% endif %}", (True, False)),
        ("{% if tools %}{{ raise_exception('no') }}{% endif %}", (True, False)),
        ("{% if tools is not none %}{% for t in tools %}{% endfor %}{% endif %}a", (False, False)),
        ("{{ strftime_now('%Y') }}", (False, False)),
    ],
    ids=range(11),
)
def test_what_a_template_shows_is_seen_by_rendering_it(template, expected):
    """A template that raises is taken to show tools: it may want another conversation."""
    templates = ChatTemplates({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"})
    assert templates.abilities() == expected


def test_the_time_is_that_of_the_clock(templates):
    year = str(datetime.datetime.now().year)
    assert templates.render(TALK[:1], chat_template="{{ strftime_now('%Y') }}") == year


BOMBS = {
    "{{ 'a' * 10 ** 9 }}": "64 MiB of memory",
    "{{ [0] * 10 ** 8 }}": "64 MiB of memory",
    "{{ 'a' | center(10 ** 9) }}": "64 MiB of memory",
    "{{ '%1000000000d' % 1 }}": "64 MiB of memory",
    "{% set n = namespace(s='ab') %}{% for i in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}": "64 MiB",
    "{{ 10 ** (10 ** 8) }}": "0.4 s",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "0.4 s",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}": "calls itself without end",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "nested too deeply",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}": "writes more than 1048576 characters",
    "{{ ''.__class__.__mro__ }}": "'__class__' of 'str' object is unsafe",
    "{{ (messages | attr('__class__')).mro() }}": "unsafe",
    "{{ '{0.__class__.__mro__}'.format(messages) }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ raise_exception.__globals__.os.getpid() }}": "unsafe",
    "{{ raise_exception('no\nsystem') }}": "the chat template refuses this: no\\nsystem",
    "{{ a.b.c }}": "UndefinedError: 'a' is undefined",
    "x\n{% for %}": "an error in line 2",
    "{% include '/etc/passwd' %}": "failed",
}


@pytest.fixture(scope="module")
def bounded():
    return ChatTemplates({}, {}, WorkerLimits(time_s=0.4, memory=64 * 2**20, characters=2**20))


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda text: text[:40])
def test_bombs_end_in_an_error(bounded, bomb):
    started = time.thread_time()
    with pytest.raises(RequestError) as refused:
        bounded.render(TALK, chat_template=bomb)
    assert BOMBS[bomb] in str(refused.value)
    assert time.thread_time() - started < 0.35, "it was this process that worked"
    # The next rendering works.
    assert bounded.render(TALK, chat_template="{{ messages[0].role }}") == "system"


def test_the_limit_of_time_is_of_the_processor():
    templates = ChatTemplates({}, {}, WorkerLimits(time_s=0.2))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(RequestError, match=r"takes more than 0\.2 s"):
        templates.render(TALK, chat_template="{{ 10 ** (10 ** 8) }}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert 0.2 <= used < 5, "the process was not ended by its limit"


def test_what_is_too_long_to_render_is_said(bounded, templates):
    long = [{"role": "user", "content": "x" * 2**20}]
    with pytest.raises(RequestError, match="characters as JSON, more than 1048576"):
        bounded.render(long, chat_template="plain")
    long[0]["content"] = "🙂x" * 2_000_000
    assert len(templates.render(long, chat_template="plain")) > 4_000_000


def test_a_process_that_hangs_delays_no_other_and_is_replaced_when_its_time_is_over(monkeypatch):
    """It uses no CPU time, so the limit of that does not end it."""
    monkeypatch.setattr("paged.text.worker.LOOK_AT_PROCESS_S", 3600.0)  # it is stopped, and not seen to be
    templates = ChatTemplates({}, {})
    template = "{{ messages[0].role }}"
    assert templates.render(TALK[:1], chat_template=template) == "system"
    templates._workers.first.limits = WorkerLimits(wall_s=0.5)
    process = templates._workers.first._process
    os.kill(process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        # Longer than the pipe: it hangs while the request is written, too.
        long = [{"role": "user", "content": "x" * 2**20}]
        hangs = pool.submit(templates.render, long, chat_template=template)
        while templates._workers._free.qsize() == MOST_RENDERED and not hangs.done():
            time.sleep(0.001)
        assert templates.render(TALK[:1], chat_template=template) == "system"
        with pytest.raises(RequestError, match=r"the chat template takes more than 0\.5 s"):
            hangs.result()
    assert process.returncode == -signal.SIGKILL
    templates._workers.first.limits = WorkerLimits()
    assert {templates.render(TALK[:1], chat_template=template) for _ in range(3)} == {"system"}


def test_the_process_goes_with_its_owner_and_is_replaced_when_it_died():
    templates = ChatTemplates({}, {})
    pids = []
    for _ in range(2):
        assert templates.render(TALK[:1], chat_template="{{ 1 }}") == "1"
        process = templates._workers.first._process
        pids.append(process.pid)
        os.kill(process.pid, signal.SIGKILL)
    templates.render(TALK[:1], chat_template="{{ 1 }}")
    last = templates._workers.first._process
    assert len({*pids, last.pid}) == 3
    del templates, process
    gc.collect()
    assert last.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ("hi", {}, "messages must be a list of messages, got 'hi'"),
        ([], {}, "at least one message"),
        (["hi"], {}, r'messages\[0\] must be a dict such as {"role": ..., "content": ...}, got \'hi\''),
        ([{"content": "x"}], {}, r'messages\[0\] must have a "role"'),
        ([TALK[0], {"role": "user"}], {}, r'messages\[1\]\["content"\] must be text .*, got None'),
        ([{"role": "user", "name": "x"}], {}, "got None"),
        ([{"role": "user", "content": 5}], {}, "got 5"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            {},
            r"content\[0\] is of type 'image_url'; 'text', and",
        ),
        ([{"role": "user", "content": ["x"]}], {}, r'must be a dict such as {"type": "text"'),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, r'\["text"\] must be a string, got None'),
        ([{"role": "user", "content": "x", "at": datetime}], {}, "must be JSON: Object of type module"),
        (TALK, {"tools": {}}, "tools must be a list of JSON schemas"),
        (TALK, {"tools": [print]}, r"tools\[0\] must be a dict"),
        (TALK, {"chat_template": 5}, "chat_template must be a Jinja template or a name, got 5"),
        (TALK, {"chat_template_kwargs": {"tools": []}}, "must not have 'tools', which is an argument itself"),
        (TALK, {"chat_template_kwargs": 3}, "chat_template_kwargs must be a dict"),
        (TALK, {"add_generation_prompt": 1}, "add_generation_prompt must be True or False, got 1"),
        (TALK, {"continue_final_message": True}, "give add_generation_prompt=False with continue_final"),
        (
            CALL[:2],
            {"continue_final_message": True, "add_generation_prompt": False},
            "needs a last message that ends with text",
        ),
        (
            TALK,
            {"continue_final_message": True, "add_generation_prompt": False, "chat_template": "{{ 1 }}"},
            "changes the last message, or leaves it out",
        ),
    ],
)
def test_what_is_wrong_is_said(templates, messages, options, message):
    with pytest.raises(RequestError, match=message):
        templates.render(messages, **{"chat_template": "plain", **options})
