"""Forms of a conversation: the same messages in ways that more chat templates take.

Templates refuse a system message that is not the first, or leave it out in silence; others take the arguments
of calls as text alone. A form is tried where the ones before it were refused, or did not show everything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..base.errors import RequestError
from ..base.strict_json import parse_json

Message = dict[str, Any]
Form = Callable[[list[Message]], list[Message]]
Write = Callable[[list[Message]], str]
RAW_ARGUMENTS = "raw_arguments"  # the key of a call's arguments that are no JSON object, such as half of one
SYSTEM_ROLES = ("system", "developer")
_MARK = re.compile("\ue000([0-9]{1,6})\ue000")  # digits: a template may change the case of texts


class RefusedError(RequestError):
    """A template refuses a conversation.

    is_own: whether the error's message comes from the template.
    """

    def __init__(self, message: str, *, is_own: bool) -> None:
        super().__init__(message)
        self.is_own = is_own


def write_shown(messages: list[Message], write: Write, *, knows_developer: bool, keeps_last: bool) -> str:
    """Render a conversation in the first of several forms in which the template shows every system message.

    write: renders a conversation. Raises RefusedError.
    knows_developer: whether the template names the role "developer".
    keeps_last: whether the last message must stay as it is.

    If the template shows all system messages in no form, the first form that it accepts is used. Raises
    RefusedError if it accepts none.
    """
    write_calls = partial(_write_calls, write=write)
    if not _has_system(messages) or (keeps_last and messages[-1]["role"] in SYSTEM_ROLES):
        return write_calls(messages)
    tried = list[list[Message]]()
    texts = list[str]()
    refusals = list[RefusedError]()
    for form in _system_forms(messages, knows_developer=knows_developer):
        given = form(messages)
        if given in tried:
            continue
        tried.append(given)
        try:
            texts.append(write_calls(given))
        except RefusedError as refusal:
            refusals.append(refusal)
            continue
        if _is_plainly_shown(messages, texts[-1]) or _shows_marks(messages, form, write_calls):
            return texts[-1]
    if texts:
        return texts[0]
    raise refusals[0]


def _has_system(messages: Sequence[Message]) -> bool:
    return any(message["role"] in SYSTEM_ROLES for message in messages)


def _system_forms(messages: Sequence[Message], *, knows_developer: bool) -> Iterator[Form]:
    """Yield what makes forms of a conversation: as it is, with one system message, and with none."""
    yield list
    first = next(message["role"] for message in messages if message["role"] in SYSTEM_ROLES)
    for role in dict.fromkeys([first, "system", *(["developer"] if knows_developer else [])]):
        yield partial(_with_first_system, role=role)
        yield partial(_with_first_system, role=role, joins=True)
    yield _with_system_in_user
    yield partial(_with_system_in_user, joins=True)


def _is_plainly_shown(messages: Sequence[Message], text: str) -> bool:
    """Return whether a rendered text shows the first message, if that is the only system message.

    False if another message contains the same text, since this may be what the rendered text shows.
    """
    first, *others = messages
    if first["role"] not in SYSTEM_ROLES or _has_system(others):
        return False
    wanted = _text_of(first).strip()
    return wanted in text and not any(wanted in _text_of(other) for other in others)


def _shows_marks(messages: Sequence[Message], form: Form, write: Write) -> bool:
    """Return whether a form of the messages, rendered with marks, shows the marks of system messages.

    Those behind other messages must not be moved behind later ones.
    """
    with_marks, marks = _marked(messages)
    try:
        text = write(form(with_marks))
    except RefusedError:  # of the mark: the template reads the messages
        return True
    place_of = dict[int, int]()
    for match in _MARK.finditer(text):
        place_of.setdefault(int(match[1]), match.start())
    num_leading = next((i for i, m in enumerate(messages) if m["role"] not in SYSTEM_ROLES), len(messages))
    earliest = len(text)  # of later messages
    earliest_system = len(text)
    for i in sorted(marks, reverse=True):
        place = place_of.get(i)
        if messages[i]["role"] in SYSTEM_ROLES:
            if place is None or place > (earliest if i > num_leading else earliest_system):
                return False
            earliest_system = place
        if place is not None:
            earliest = min(earliest, place)
    return True


def _marked(messages: Sequence[Message]) -> tuple[list[Message], set[int]]:
    """Return the conversation with a mark in each message that has text, and the numbers of these."""
    found = list[Message]()
    numbers = set[int]()
    for i, message in enumerate(messages):
        if message["role"] == "tool" or not _text_of(message).strip():
            found.append(message)
            continue
        numbers.add(i)
        mark = f"\ue000{i}\ue000"
        content = message["content"]
        if isinstance(content, str):
            content = mark + content
        else:
            first = next(j for j, part in enumerate(content) if "text" in part)
            marked = {**content[first], "text": mark + content[first]["text"]}
            content = [*content[:first], marked, *content[first + 1 :]]
        found.append({**message, "content": content})
    return found, numbers


def _text_of(message: Message) -> str:
    """Return the text of a message, its parts joined as templates that want a string see them."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(p["text"] for p in content if "text" in p)


def _with_first_system(messages: list[Message], *, role: str, joins: bool = False) -> list[Message]:
    """Return the conversation with all system messages in one at its beginning.

    joins: whether messages of one role that a system message stood between become one.
    """
    first = next(message for message in messages if message["role"] in SYSTEM_ROLES)
    return [{**first, "role": role, "content": _system_text(messages)}, *_without_system(messages, joins)]


def _with_system_in_user(messages: list[Message], *, joins: bool = False) -> list[Message]:
    """Return the conversation with the system messages' texts at the beginning of the first user message."""
    text = _system_text(messages)
    others = _without_system(messages, joins)
    at = next((i for i, message in enumerate(others) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": text}, *others]
    others[at] = _joined({"role": "user", "content": text}, others[at]) if text else others[at]
    return others


def _system_text(messages: Sequence[Message]) -> str:
    texts = (_text_of(message) for message in messages if message["role"] in SYSTEM_ROLES)
    return "\n\n".join(text for text in texts if text.strip())


def _without_system(messages: Sequence[Message], joins: bool) -> list[Message]:
    kept = list[Message]()
    was_system = False
    for message in messages:
        is_system = message["role"] in SYSTEM_ROLES
        if joins and was_system and kept and _is_one_turn(kept[-1], message):
            kept[-1] = _joined(kept[-1], message)
        elif not is_system:
            kept.append(message)
        was_system = is_system
    return kept


def _is_one_turn(before: Message, after: Message) -> bool:
    """Return whether two messages can be one: both of a user, or both texts of an assistant."""
    if before["role"] != after["role"]:
        return False
    return before["role"] == "user" or (
        before["role"] == "assistant" and before.keys() == after.keys() == {"role", "content"}
    )


def _joined(before: Message, after: Message) -> Message:
    """Return one message of two; a text for each part where one of them has parts."""
    contents = [message.get("content") or "" for message in (before, after)]
    if all(isinstance(content, str) for content in contents):
        return {**before, **after, "content": "\n\n".join(contents)}
    parts = [
        part
        for content in contents
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]
    return {**before, **after, "content": parts}


def _write_calls(messages: list[Message], write: Write) -> str:
    """Return the text of a conversation in the first form in which the template shows each call.

    If it shows them in no form, that is the first form which it takes. Raises RefusedError if it takes none.
    """
    texts = list[str]()
    refusals = list[RefusedError]()
    for form in _call_forms(messages):
        try:
            texts.append(write(form))
        except RefusedError as refusal:
            refusals.append(refusal)
            continue
        if _shows_calls(form, texts[-1]):
            return texts[-1]
    if texts:
        return texts[0]
    raise next((refusal for refusal in refusals if refusal.is_own), refusals[0])


def _call_forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield the conversation with the arguments of calls as objects, then as JSON text.

    The last form has null as the content of messages with nothing but calls, as OpenAI writes them: some
    templates show calls only there.
    """
    if not any(message.get("tool_calls") for message in messages):
        yield messages
        return
    yield [_with_arguments(message, _arguments_of) for message in messages]
    as_text = [_with_arguments(message, _text_of_arguments) for message in messages]
    yield as_text
    yield [
        {**message, "content": None} if message.get("tool_calls") and not _text_of(message) else message
        for message in as_text
    ]


def _shows_calls(messages: Sequence[Message], text: str) -> bool:
    """Return whether a rendered text names each call, and has no arguments as Python would print them."""
    for function in _functions(messages):
        arguments = function.get("arguments")
        is_printed = isinstance(arguments, dict) and bool(arguments) and str(arguments) in text
        if is_printed or str(function.get("name", "")) not in text:
            return False
    return True


def _functions(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            if isinstance(call.get("function"), Mapping):
                yield call["function"]


def _with_arguments(message: Message, converted: Callable[[Any], Any]) -> Message:
    """Return the message with converted arguments of its calls."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        if isinstance(function, Mapping):
            call = {**call, "function": {**function, "arguments": converted(function.get("arguments"))}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _arguments_of(given: Any) -> Any:
    """Return the arguments of a call as an object.

    Arguments that a limit has cut are no JSON. Templates that iterate over the arguments, or print them, take
    neither a text nor null, so such a text is put into an object.
    """
    if _are_none(given):
        return {}
    if not isinstance(given, str):
        return given
    try:
        parsed = parse_json(given)
    except RequestError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {RAW_ARGUMENTS: given}


def _text_of_arguments(given: Any) -> str:
    """Return the arguments of a call as the text that the model wrote, or as JSON."""
    if _are_none(given):
        return "{}"
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _are_none(given: Any) -> bool:
    return given is None or (isinstance(given, str) and given.strip() in ("", "null"))
