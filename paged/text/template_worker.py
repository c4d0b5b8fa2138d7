"""A process of its own that renders chat templates: a line of JSON in, a line of JSON out.

A template comes with the checkpoint, so it is somebody else's code. Jinja's sandbox keeps it from Python's
internals, but not from `'a' * 10 ** 12`, nor can one call into C be stopped from within its own process. Here
the system does it: beyond its memory there is a MemoryError, beyond its CPU time the process ends.

Run as a file by `chat_template.ChatTemplates`, and imports nothing of paged.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

JOINT = "\n"  # between the text parts of a message
MOST_MESSAGE = 1000  # characters of an error that a template chose itself


class Raised(jinja2.TemplateError):
    """raise_exception was called: the template refuses these messages."""


class GenerationBlock(Extension):
    """`{% generation %}`, which marks what a model is trained on, and changes nothing of the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as what is inside of it."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def raise_exception(message: Any) -> None:
    """End the rendering with the template's own message."""
    raise Raised(str(message))


def strftime_now(form: str) -> str:
    """The local time in this form."""
    return datetime.now().strftime(form)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes what HTML would not like."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
)
ENVIRONMENT.filters["tojson"] = tojson
ENVIRONMENT.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}


@lru_cache(maxsize=16)
def compiled(source: str) -> tuple[jinja2.Template, bool]:
    """A template, and whether it goes through the parts of a message by itself."""
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
    """Whether this is message['content'], message.content, or a name that was given to one."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def joined(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text parts as one string."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": JOINT.join(part["text"] for part in content)}


def render(source: str, variables: dict[str, Any], most_characters: int) -> dict[str, str]:
    """The text under "text", or under "error" why there is none."""
    try:
        template, takes_parts = compiled(source)
        if not takes_parts:
            variables["messages"] = [joined(message) for message in variables["messages"]]
        pieces, length = [], 0
        for piece in template.generate(variables):
            length += len(piece)
            if length > most_characters:
                return {"error": f"the chat template writes more than {most_characters} characters"}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except Raised as error:
        return {"error": f"the chat template refuses this: {str(error)[:MOST_MESSAGE]}"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"the chat template has an error in line {error.lineno}: {error.message}"}
    except MemoryError:
        raise
    except RecursionError:
        return {"error": "the chat template is nested too deeply, or calls itself without end"}
    # Whatever else: the template is code, and may do anything wrong that code can.
    except Exception as error:
        return {"error": f"the chat template failed: {type(error).__name__}: {str(error)[:MOST_MESSAGE]}"}


def main(time_limit_s: float, memory_limit: int, most_characters: int) -> None:
    """Answer the lines of stdin until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the program that asks
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file is written, only pipes
    if sys.platform != "darwin":  # which has no such limit; time and output are bounded there too
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    for line in sys.stdin.buffer:
        try:
            signal.setitimer(signal.ITIMER_PROF, time_limit_s)  # SIGPROF ends the process, also inside of C
            reply = json.dumps(render(**json.loads(line), most_characters=most_characters))
        except MemoryError:
            reply = "{}"
        except RecursionError:
            reply = json.dumps({"error": "the messages are nested too deeply"})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
