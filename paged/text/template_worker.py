"""The process that renders chat templates: see `worker`.

A template comes with the checkpoint, so it is untrusted code. Jinja's sandbox keeps it from Python's
internals, but not from `'a' * 10 ** 12`, so the process has limits.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .worker import serve

MOST_MESSAGE = 1000  # characters of an error message that comes from a template


class Raised(jinja2.TemplateError):
    """The template called raise_exception to refuse the messages."""


class GenerationBlock(Extension):
    """The tag `{% generation %}`, which marks text for training and does not change it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block as if it were only its contents."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def raise_exception(message: Any) -> None:
    """Stop the rendering with the template's own message."""
    raise Raised(str(message))


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON. (Jinja's own filter also escapes characters for HTML.)"""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
)
ENVIRONMENT.filters["tojson"] = tojson
ENVIRONMENT.globals["raise_exception"] = raise_exception
ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.now().strftime(form)


@lru_cache(maxsize=16)
def compiled(source: str) -> tuple[jinja2.Template, bool]:
    """Compile a template. Return it, and whether it iterates over the parts of a message's content."""
    tree = ENVIRONMENT.parse(source)
    # {% set content = message['content'] %} {% for part in content %}
    names = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and is_content(node.node, set())
    }
    takes_parts = any(is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    return ENVIRONMENT.from_string(source), takes_parts


def is_content(node: nodes.Node, names: set[str]) -> bool:
    """Return whether a node is message['content'], message.content, or a variable with that value."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def joined(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its text parts joined by line breaks."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "\n".join(part["text"] for part in content)}


def render(source: str, variables: dict[str, Any], most_characters: int) -> dict[str, str]:
    """Return {"text": the rendered text}, or an entry that says why there is none.

    "refused" contains the template's own message; "failed" says what the template cannot do with this
    conversation; "error" is an error that would occur with every conversation.
    """
    try:
        template, takes_parts = compiled(source)
        if not takes_parts:
            variables["messages"] = [joined(message) for message in variables["messages"]]
        pieces = []
        length = 0
        for piece in template.generate(variables):
            length += len(piece)
            if length > most_characters:
                return {"error": f"the chat template writes more than {most_characters} characters"}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except Raised as error:
        return {"refused": f"the chat template refuses this: {str(error)[:MOST_MESSAGE]}"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"the chat template has an error in line {error.lineno}: {error.message}"}
    except MemoryError:
        raise
    except RecursionError:
        return {"error": "the chat template is nested too deeply, or calls itself without end"}
    # The template is code and may raise anything.
    except Exception as error:
        return {"failed": f"the chat template failed: {type(error).__name__}: {str(error)[:MOST_MESSAGE]}"}


if __name__ == "__main__":
    serve(render)
