"""Bodies of /v1/responses and /v1/messages: what is wrong with them is named by their own fields."""

import random
import re

import pytest

from paged.base.errors import PagedError
from paged.chat.chat_format import ChatFormat
from paged.protocol.endpoints import error_in_form_of, parse_call
from paged.protocol.limits import Limits
from paged.protocol.messages.events import whole_members
from paged.protocol.responses.call import fitting
from paged.protocol.responses.items import messages_of, num_system, with_instructions
from tests.support.api_fields import BODIES, COUNT, MESSAGE_TOOLS, MESSAGES, RESPONSE_TOOLS, RESPONSES

LIMITS = Limits(chat_format=ChatFormat.of(tool_call_parser="hermes", enable_auto_tool_choice=True))
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
USER = {"role": "user", "content": "x"}
WRONG = [
    (RESPONSES, {"input": [OUTPUT]}, "input[0].call_id", "is no function_call before it"),
    (RESPONSES, {"input": [CALL, OUTPUT, OUTPUT]}, "input[2].call_id", "has an output already"),
    (RESPONSES, {"input": [CALL, CALL]}, "input[1].call_id", "that of an earlier call"),
    (RESPONSES, {"input": [{"type": "web_search_call"}]}, "input[0]", "one of message, function_call"),
    (RESPONSES, {"input": []}, "input", "empty"),
    (
        RESPONSES,
        {"input": [{**USER, "content": [{"type": "input_file"}]}]},
        "input[0].content[0]",
        "input_text, input_image, output_text, refusal",
    ),
    (RESPONSES, {"input": [{**USER, "mood": 1}]}, "input[0].mood", "unknown argument"),
    (RESPONSES, {"inputs": 1}, "inputs", "did you mean 'input'"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'.*--ignore-builtin-tools"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type", "'custom'"),
    (RESPONSES, {"tools": RESPONSE_TOOLS * 2}, "tools[1].name", r"tools\[1\]\.name is that of another tool"),
    (
        RESPONSES,
        {"tools": RESPONSE_TOOLS, "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice.name",
        "not one of",
    ),
    (RESPONSES, {"tools": RESPONSE_TOOLS, "top_logprobs": 1}, "top_logprobs", "may call tools"),
    (RESPONSES, {"background": True}, "background", "not supported"),
    (RESPONSES, {"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    (RESPONSES, {"include": ["nonsense"]}, "include[0]", "must be one of"),
    (RESPONSES, {"metadata": {"a": 1}}, "metadata.a", "must be a string"),
    (RESPONSES, {"input": [{**CALL, "async": True}]}, "input[0].async", "one after the other"),
    (MESSAGES, {"max_tokens": None}, "max_tokens", "max_tokens is missing"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [RESULT]}]},
        "messages[0].content[0].tool_use_id",
        "is no tool_use",
    ),
    (
        MESSAGES,
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [USE]},
                USER,
                {"role": "user", "content": [RESULT] * 2},
            ]
        },
        "messages[3].content[1].tool_use_id",
        "'c' is no tool_use",
    ),
    (
        MESSAGES,
        {"messages": [USER, {"role": "assistant", "content": [USE, USE]}]},
        "messages[1].content[1].id",
        "that of an earlier tool_use",
    ),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice", "tool_choice 'any' needs tools"),
    (
        MESSAGES,
        {"tool_choice": {"type": "tool", "name": "f"}},
        "tool_choice",
        "tool_choice 'tool' needs tools",
    ),
    (MESSAGES, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0]", "user, assistant, system"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [USE]}]},
        "messages[0].content[0]",
        "text, image, tool_result",
    ),
    (
        MESSAGES,
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}, USE]}]},
        "messages[1].content[1]",
        "no tool_result after it",
    ),
    (
        MESSAGES,
        {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "messages[1].content[0]",
        "no text after it to continue",
    ),
    (COUNT, {"mcp_servers": [{}]}, "mcp_servers", "own tools"),
    (MESSAGES, {"tools": [{**MESSAGE_TOOLS[0], "name": "f" * 129}]}, "tools[0].name", "1 to 128 letters"),
    (MESSAGES, {"tools": MESSAGE_TOOLS * 2}, "tools[1].name", r"tools\[1\]\.name"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type", "built-in tool"),
]


@pytest.mark.parametrize(
    ("url", "fields", "param", "message"), WRONG, ids=[f"{u}-{p}" for u, _, p, _ in WRONG]
)
def test_the_wrong_field_is_named(url, fields, param, message):
    with pytest.raises(PagedError, match=message) as caught:
        parse_call(url, {**BODIES[url], **fields}, LIMITS)
    assert caught.value.param.startswith(param)
    error = {"message": str(caught.value), "param": caught.value.param}
    shown = error_in_form_of(url, 400, {"error": error}, "r")
    assert url == RESPONSES or re.match(f".*{re.escape(param)}", shown["error"]["message"])


def test_items_of_an_answer_are_one_message():
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]}
    made = messages_of([{"type": "message", **USER}, thought, said, CALL, OUTPUT, thought, said])
    asked, answer, result, last = made
    assert (asked, result["role"], result["tool_call_id"]) == (USER, "tool", "c")
    assert (answer["content"], answer["reasoning"], answer["tool_calls"][0]["id"]) == ("Well.", "Hm.", "c")
    assert last.keys() == {"role", "content", "reasoning", "reasoning_content"}
    begins = [{"type": "message", "role": role, "content": role} for role in ("developer", "system")]
    system, user = with_instructions(messages_of([*begins, {"type": "message", **USER}]), "Be brief.")
    assert system == {"role": "system", "content": "Be brief.\n\ndeveloper\n\nsystem"}
    assert user == USER


def test_what_claude_code_adds_is_no_part_of_the_prompt_or_is_text():
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2;"}
    found = {"type": "tool_reference", "tool_name": "g"}
    call = parse_call(
        MESSAGES,
        {
            **BODIES[MESSAGES],
            "tools": [{**MESSAGE_TOOLS[0], "name": "f" * 128}],
            "output_config": {"task_budget": {"type": "tokens", "total": 9}},
            "system": [billing, {"type": "text", "text": "Be brief."}],
            "messages": [
                USER,
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [{**RESULT, "content": [found]}]},
            ],
        },
        LIMITS,
    )
    system, _, _, result = call.conversation.messages
    assert (system["content"], result["content"]) == ("Be brief.", "Found the tool g.")
    assert call.ignored == ("output_config.task_budget", "system[0]")


def test_messages_of_one_role_after_the_other_are_one_turn():
    said = [{"role": "assistant", "content": text} for text in ("a", "b")]
    given = [
        USER,
        USER,
        *said,
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [RESULT]},
    ]
    call = parse_call(MESSAGES, {**BODIES[MESSAGES], "messages": [*given, USER]}, LIMITS)
    asked, answer, result, more = call.conversation.messages
    assert asked == {"role": "user", "content": [{"type": "text", "text": "x"}] * 2}
    assert (answer["content"], answer["tool_calls"][0]["id"], result["role"], more) == (
        "ab",
        "c",
        "tool",
        USER,
    )


def random_conversation(rng: random.Random) -> list[dict]:
    """Return messages, of which some call tools whose results come later, or never."""
    messages = [{"role": "system"}] * rng.randint(0, 2)
    waiting = list[str]()
    for i in range(rng.randint(1, 12)):
        if waiting and rng.random() < 0.5:
            messages.append({"role": "tool", "tool_call_id": waiting.pop(rng.randrange(len(waiting)))})
        elif rng.random() < 0.5:
            made = [f"{i}-{j}" for j in range(rng.randint(0, 2))]
            waiting += made
            messages.append({"role": "assistant", "tool_calls": [{"id": each} for each in made]})
        else:
            messages.append({"role": rng.choice(["user", "system"])})
    return messages


def test_no_more_than_the_oldest_messages_is_left_out():
    rng = random.Random(0)
    for _ in range(300):
        messages = random_conversation(rng)
        num_first = num_system(messages)
        first, rest = messages[:num_first], messages[num_first:]

        def is_whole(cut: int, rest=rest) -> bool:
            calls = {call["id"] for m in rest[:cut] for call in m.get("tool_calls", ())}
            return not calls & {m.get("tool_call_id") for m in rest[cut:]}

        most = rng.randint(0, len(messages))
        wholes = [first + rest[cut:] for cut in range(len(rest)) if is_whole(cut)] or [messages]
        wanted = next((whole for whole in wholes if len(whole) <= most), wholes[-1])
        assert fitting(messages, lambda given, most=most: len(given) <= most) == wanted


def test_what_is_whole_of_arguments_that_are_cut():
    text = '{"a": [1, {"b": "}"}], "c": "d\\"", "e": 12, "f": nul'
    whole = {"a": [1, {"b": "}"}], "c": 'd"', "e": 12}
    for end in range(len(text) + 1):
        made = whole_members(text[:end])
        assert made == dict([*whole.items()][: len(made)])
    assert made == whole
    assert whole_members('{"e": 12') == {}
    assert whole_members('{"e": 12}') == {"e": 12}
