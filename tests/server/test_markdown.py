"""What the page makes of the text of a model: listed elements and text, checked with Node.js."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from paged.server.routes.page import PAGE_FOLDER

NODE = shutil.which("node")
PLAIN = "p h1 h2 h3 h4 h5 h6 ul li blockquote pre code em strong s br hr tr tbody thead table span"
# Everything that a text may become: the attributes that are set, by tag.
MADE = {tag: set[str]() for tag in re.findall(r"\w+", PLAIN)} | {
    "th": {"className"},
    "td": {"className"},
    "ol": {"start"},
    "div": {"className"},
    "a": {"href", "target", "rel"},
    "button": {"className", "type"},
}
TRY = """
import { rendered } from "./markdown.js";
import { readFileSync } from "node:fs";
const tree = ({ tag, children, ...rest }) => ({ tag, ...rest,
  children: children.map((each) => (typeof each === "string" ? each : tree(each))) });
class Element {
  constructor(tag) { this.tag = tag; this.children = []; }
  append(...parts) { this.children.push(...parts); }
  set textContent(text) { this.children = [text]; }
  addEventListener() {}
}
globalThis.document = {
  createElement: (tag) => new Element(tag), createDocumentFragment: () => new Element("root"),
};
const texts = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(texts.map((text) => tree(rendered(text)))));
"""
SHOWN = """\
# A

1. **b** `c<d`
2. x

```py
a < b
```

|a|b|
|--|--:|
|1|2|

http://x.org/ main.py ~~s~~
"""
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a <b onclick='x()'>b</b> <!-- c --> <?php ?> <![CDATA[x]]>",
    "<div>\n\n**b**\n\n</div><style>*{display:none}</style>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:x) [c](data:text/html,x) [d](vbscript:x) [e](//evil/x) [f](/x)",
    "[a](&#106;avascript:alert(1)) [b](java\tscript:x) <javascript:alert(1)> <a href='javascript:x'>y</a>",
    "![a](javascript:x) ![b](http://evil/x.png) ![c](data:image/svg+xml,x)",
    '[a][1]\n\n[1]: javascript:alert(1) "t onmouseover=x"',
    '```"><script>x</script>\n</code></pre><script>y</script>\n```',
    "| a<script> | b |\n|:-:|--:|\n| <img src=x> | `</td>` |",
    "> " * 500 + "x",
    "[" * 5000 + "](" * 5000,
    "- " * 300 + "*" * 3000 + "_" * 3000,
    "&lt;script&gt; &#60;b&#62; \x00\ud800 \u202e",
]


@pytest.mark.skipif(NODE is None, reason="needs Node.js: apt-get install nodejs")
def test_what_a_model_writes_becomes_listed_elements_and_text_alone(tmp_path):
    rng = random.Random(0)
    pieces = [*HOSTILE[:10], "\n", "`", "*", "|", "<a href=", "](", "\n\n", ">", "<!--", "&#x3c;"]
    mixed = ["".join(rng.choices(pieces, k=12)) for _ in range(300)]
    first, *trees = _trees(tmp_path, [SHOWN, *HOSTILE, *mixed])
    for tree in trees:
        for tag, attributes in _elements_of(tree):
            assert attributes.keys() <= MADE[tag], (tag, attributes)
            assert re.match("(https?|mailto):", attributes.get("href", "http:")), attributes
    assert [_text_of(tree) for tree in trees[:2]] == HOSTILE[:2]
    found = [(tag, attributes) for tag, attributes in _elements_of(first)]
    wanted = ("h1", "ol", "strong", "s", "table", "pre")
    assert [tag for tag, _ in found if tag in wanted] == ["h1", "ol", "strong", "pre", "table", "s"]
    assert ("th", {"className": "right"}) in found
    assert [attributes["href"] for tag, attributes in found if tag == "a"] == ["http://x.org/"]
    assert {"a < b", "c<d"} <= {*_texts(first)}


def _trees(folder: Any, texts: list[str]) -> list[dict[str, Any]]:
    """Return what the page makes of each text, by elements that only note what is set."""
    for name in ("markdown.js", "markdown-it.js"):
        shutil.copy(PAGE_FOLDER / "page" / name, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "try.js").write_text(TRY)
    done = subprocess.run(
        [str(NODE), "try.js"], input=json.dumps(texts), capture_output=True, text=True, cwd=folder, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def _elements_of(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield tag and attributes of each element below one."""
    for each in tree["children"]:
        if isinstance(each, dict):
            yield each["tag"], {name: each[name] for name in each.keys() - {"tag", "children"}}
            yield from _elements_of(each)


def _texts(tree: dict[str, Any]) -> Iterator[str]:
    for each in tree["children"]:
        if isinstance(each, str):
            yield each
        else:
            yield from _texts(each)


def _text_of(tree: dict[str, Any]) -> str:
    return "".join(_texts(tree))
