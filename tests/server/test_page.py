"""The page at /: its files, the event stream from which it draws the engines, and both in a browser."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from paged.base.errors import EngineDeadError
from paged.protocol.endpoints import PAGE_FILES
from paged.protocol.fields.sampling import SAMPLING_KINDS
from paged.scheduler.picture import EnginePicture, PicturedRequest
from paged.scheduler.schedule import Schedule
from paged.server import gallery
from paged.server.routes.page import PAGE_FOLDER
from tests.server.test_keys import bearing, line, write
from tests.support.chromium import chromium_page, find_chromium
from tests.support.scheduler_cases import new_scheduler
from tests.support.served import PATIENCE_S, Served, eventually, serving, unhurried

PROMPT = "import os\nimport sys\n" * 24
SECRET = "classified"
NODE = shutil.which("node")
MOST_EVENTS = 480  # that are read: in two minutes
RUNNING = {"model": "demo", "max_tokens": 1500, "ignore_eos": True}


@contextmanager
def watching(served: Served, headers: dict[str, str] | None = None) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the events of /watch."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
    connection.request("GET", "/watch", headers=headers or {})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = iter(response.readline, b"")
    try:
        events = (json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: "))
        yield itertools.islice(events, MOST_EVENTS)
    finally:
        response.close()
        connection.close()


@contextmanager
def completions(served: Served, *requests: tuple[dict[str, Any], dict[str, str]]) -> Iterator[None]:
    """Have completions run, each of a body and headers, until the context ends."""
    connections = []
    with unhurried(served.front.engine):  # else one might end before it is in a picture
        for body, headers in requests:
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
            sent = {"content-type": "application/json", **headers}
            asked = json.dumps({**RUNNING, "stream": True, **body})
            connection.request("POST", "/v1/completions", asked, sent)
            assert connection.getresponse().status == 200
            connections.append(connection)
        yield
        for connection in connections:
            connection.close()


def test_files_need_no_key_and_load_nothing_from_elsewhere(engine, tmp_path):
    keys = write(tmp_path / "keys", line("k"))
    with serving(engine, api_keys=keys) as served:
        for endpoint in PAGE_FILES:
            status, headers, body = served.request("GET", endpoint.path)
            assert (status, headers["content-type"]) == (200, f"{endpoint.media}; charset=utf-8")
            assert "default-src 'none'" in headers["content-security-policy"]
            text = body.decode()
            if "markdown-it" not in endpoint.path:  # which knows what addresses look like
                assert "//" not in re.sub(r"(?m)^\s*//.*$|(?<=[;{,] )// .*$", "", text), endpoint.path
            assert not re.search(r"innerHTML|insertAdjacentHTML|eval\(|\sstyle=|\son\w+=", text), (
                endpoint.path
            )
            for name in re.findall(r'(?:src|href)="(page/[^"]+)"|from "\./([^"]+)"', text):
                assert f"/page/{''.join(name).removeprefix('page/')}" in {each.path for each in PAGE_FILES}
        assert served.request("GET", "/watch")[0] == 401


def test_without_the_page_there_is_a_line_about_the_api(engine):
    with serving(engine, page=False) as served:
        status, headers, body = served.request("GET", "/")
        assert (status, headers["content-type"]) == (200, "text/plain; charset=utf-8")
        assert re.fullmatch(rb"paged serves OpenAI's API at /v1[^\n]*--no-page[^\n]*\n", body)
        for path in ("/watch", "/page/main.js"):
            assert served.request("GET", path)[0] == 404


def test_a_picture_shows_shared_blocks_and_no_text(served_by_either):
    served = served_by_either
    bodies = [({"prompt": f"{PROMPT}# {SECRET} {i}"}, {"x-request-id": f"r{i}"}) for i in range(2)]
    with watching(served) as events, completions(served, *bodies):
        for event in events:
            assert SECRET not in json.dumps(event)
            (engine,) = event["engines"]
            by_id = {each["request_id"][:2]: each for each in engine["requests"]}
            if by_id.keys() == {"r0", "r1"} and all(each["blocks"] for each in by_id.values()):
                break
        else:
            pytest.fail("the requests are in no picture")
    first, second = (by_id[name]["blocks"] for name in ("r0", "r1"))
    num_shared = len({*first} & {*second})
    assert num_shared == by_id["r1"]["num_cached_tokens"] // engine["block_size"] > 5
    assert first[:num_shared] == second[:num_shared]
    assert event["scope"] == "all"
    assert engine["num_running"] == 2
    eventually(lambda: not served.front.gallery.num_watchers)


def test_who_watches_sees_what_is_theirs(engine, tmp_path):
    keys = write(tmp_path / "keys", line("key-a", "a"), line("key-b", "b"))
    with serving(engine, api_keys=keys, admin_key="root") as served:
        bodies = [({"prompt": PROMPT}, bearing(f"key-{tenant}")) for tenant in "aab"]
        with completions(served, *bodies):
            for key, scope, tenants in (
                ("root", "all", "aab"),
                ("key-a", "own", "aa"),
                ("key-b", "own", "b"),
            ):
                with watching(served, bearing(key)) as events:
                    for event in events:
                        (view,) = event["engines"]
                        if len(view["requests"]) == len(tenants):
                            break
                assert event["scope"] == scope
                assert sorted(each["tenant"] for each in view["requests"]) == [*tenants]
                assert ("num_used_blocks" in view) == (scope == "all")
                if key == "key-b":  # numbers of its own
                    (own,) = view["requests"]
                    assert own["blocks"] == [*range(own["num_blocks"])]
        assert served.request("GET", "/watch", headers=bearing("other"))[0] == 401


def test_the_picture_of_all_blocks_needs_the_admin_key(engine):
    """Who has a key of --api-key sees what was sent with it; without a key nothing is shown."""
    with serving(engine, api_key=["k", "ä"], admin_key="r") as served:
        body = {"prompt": PROMPT, "user": "someone"}
        with completions(served, *[(body, bearing(key)) for key in ("k", "k", "ä")]):
            for key, scope, num in (("r", "all", 3), ("k", "own", 2), ("ä", "own", 1)):
                with watching(served, bearing(key)) as events:
                    for event in events:
                        (view,) = event["engines"]
                        assert len(view["requests"]) <= num
                        if len(view["requests"]) == num:
                            break
                assert event["scope"] == scope
                assert len(view["requests"]) == num
                assert ("num_used_blocks" in view) == (scope == "all")
        assert served.request("GET", "/watch")[0] == 401
    with serving(engine, admin_key="r") as served:
        with watching(served, bearing("r")) as events:
            assert next(events)["scope"] == "all"
        assert served.request("GET", "/watch")[0] == 401


def test_pictures_are_made_for_watchers_alone_and_seldom(engine, monkeypatch):
    taken: list[float] = []  # the pause before each picture
    pauses = [gallery.PERIOD_S]
    picture = type(engine).picture

    async def counted(self: Any, replica: int) -> Any:
        taken.append(pauses.pop())
        return await picture(self, replica)

    async def paused(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(seconds)

    monkeypatch.setattr(type(engine), "picture", counted)
    monkeypatch.setattr(gallery, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": paused}))
    monkeypatch.setattr(gallery, "MOST_WATCHERS", 2)
    with serving(engine) as served:
        served.post("/v1/completions", model="demo", prompt="a", max_tokens=20)
        assert not taken
        with watching(served) as one, watching(served) as other:
            for _ in range(4):
                assert next(one).keys() == next(other).keys()
            assert served.request("GET", "/watch")[0] == 429
        eventually(lambda: not served.front.gallery.num_watchers)
        num = len(taken)
        assert num >= 4
        assert all(pause_s >= gallery.PERIOD_S for pause_s in taken)
        time.sleep(2 * gallery.PERIOD_S)
        assert len(taken) == num


def test_an_engine_that_hangs_or_is_gone_hides_no_other():
    class Engines:
        async def picture(self, replica: int) -> EnginePicture:
            if replica == 1:
                raise EngineDeadError("it is being replaced")
            if replica == 2:
                await asyncio.sleep(60)
            return EnginePicture.of(new_scheduler(), Schedule())

    async def watch() -> list[list[Any]]:
        found = gallery.Gallery(Engines(), 3)
        views = []
        with found.watching():
            for num in (3, 1, 2):  # engines leave and come
                found.resize(num)
                while (engines := json.loads(found.view(None))["engines"])[0] is None:
                    await found.wait()
                views.append(engines)
        return views

    for num, (first, *others) in zip((3, 1, 2), asyncio.run(watch()), strict=True):
        assert first["num_blocks"] == 16
        assert others == [None] * (num - 1)


def test_the_end_of_the_server_ends_the_stream(engine):
    with serving(engine) as served, watching(served) as events:
        next(events)
        served.front.is_closed = True
        most = int(PATIENCE_S / gallery.PERIOD_S)  # some may have come before it was closed
        assert len([*itertools.islice(events, most)]) < most


CHROMIUM = find_chromium()
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install chromium, or make check-deploy"
)


# How high a row of a table of many columns is.
WIDE_TABLE = """import('./page/markdown.js').then(({ rendered }) => {
  const row = '|' + 'column|'.repeat(32);
  const text = document.createElement('div');
  text.className = 'text markdown';
  text.append(rendered(`${row}\n|${'---|'.repeat(32)}\n${row}`));
  document.getElementById('chatbar').after(text);
  const height = text.querySelector('tr').offsetHeight;
  text.remove();
  return height;
})"""


# What the user does who chooses a file.
IMPORT = """{
  const chosen = new DataTransfer();
  chosen.items.add(new File([%s], 'kept.json'));
  document.getElementById('file').files = chosen.files;
  document.getElementById('file').dispatchEvent(new Event('change'));
}"""
# What each of these files of conversations is made into, or what is wrong with it.
IMPORTS = """
import { imported } from "./conversations.js";
import { readFileSync } from "node:fs";
const tried = (text) => { try { return imported(text).path(); } catch (error) { return error.message; } };
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map((text) => tried(text))));
"""
# Up to so many tokens, without luck: a sampled answer may be shorter.
GREEDILY = (
    "document.getElementById('temperature').value = 0; document.getElementById('max_tokens').value = {}"
)
ASKED = {"number": 1, "parent": 0, "role": "user", "content": "a"}


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_files_that_are_no_conversations_are_refused(tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "x": 1}], "y": 2},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    wrong: list[tuple[Any, str]] = [
        ([], "there are no messages"),
        (None, "neither nodes nor messages"),
        ({"nodes": 3}, "neither nodes nor messages"),
        ({"nodes": [None]}, "nodes[0].role is not one of"),
        ({"nodes": [{**ASKED, "content": 3}]}, "nodes[0].content is not a text"),
        ({"nodes": [ASKED, ASKED]}, "nodes[1].number is not a number of its own"),
        ({"nodes": [{**ASKED, "number": "1"}]}, "nodes[0].number is not a number of its own"),
        ({"nodes": [{**ASKED, "parent": 1}]}, "nodes[0].parent is not an earlier message"),
        ({"nodes": [ASKED], "chosen": [[0, 2]]}, "chosen[0] is not a message and one behind it"),
        ({"nodes": [ASKED], "chosen": [None]}, "chosen[0] is not a message and one behind it"),
        ({"nodes": [ASKED], "chosen": {}}, "chosen is not a list"),
        ({"nodes": [ASKED], "system": 1}, "system is not a text"),
        ({"messages": [{"role": "developer", "content": "a"}]}, "messages[0].role is not one of"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "messages[0].tool_calls[0] has no id, or no"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content is not a text"),
        ([ASKED] * 10_001, "it has 10001 messages"),
    ]
    texts = [json.dumps({"messages": messages, "id": "x"}), *(json.dumps(each) for each, _ in wrong), "[[["]
    shutil.copy(PAGE_FOLDER / "page" / "conversations.js", tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "try.js").write_text(IMPORTS)
    command = [str(NODE), "try.js"]
    done = subprocess.run(
        command, input=json.dumps(texts), capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 0, done.stderr
    made, *refusals, broken = json.loads(done.stdout)
    assert made == [
        {"number": 1, **messages[1], "parent": 0},
        {"number": 2, "parent": 1, "role": "assistant", "content": "", "tool_calls": [call]},
        {"number": 3, "parent": 2, **messages[3]},
    ]
    for refusal, (given, message) in zip(refusals, wrong, strict=True):
        assert message in refusal, given
    assert broken.startswith("it is not JSON: ")


@needs_chromium
def test_in_a_browser(engine, tmp_path):
    assert CHROMIUM is not None
    keys = write(tmp_path / "keys", line("key-a", "a"))
    bodies = [({"prompt": f"{PROMPT}# {i}"}, {**bearing("key-a"), "x-request-id": f"r{i}"}) for i in range(2)]
    with serving(engine, api_keys=keys, admin_key="root") as served, chromium_page(CHROMIUM) as page:
        page.open(served.url)
        page.wait("document.getElementById('keybox')?.open")  # it asks for the keys
        for key in ("wrong, 鍵", "key-a"):  # it asks again
            page.wait("document.getElementById('keybox').open")
            page.run(f"document.getElementById('key').value = '{key}'")
            page.run("document.getElementById('admin').value = 'root'")
            page.run("document.querySelector('#keybox button').click()")
        page.wait("document.getElementById('state').textContent === 'live'")
        # Who has no key is refused, which the console shows; nothing else may be there.
        assert all("401" in error for error in page.errors)
        page.errors.clear()
        page.wait("document.querySelector('#model option')?.value === 'demo'")
        assert page.run("document.getElementById('nothing').hidden")  # which says why there is no picture
        assert page.run("document.getElementById('nothing').textContent") == ""
        assert page.run(WIDE_TABLE) < 40  # it scrolls, and breaks no word
        page.run(GREEDILY.format(24))
        say = "document.getElementById('input').value = {!r}; document.getElementById('send').click()"
        page.run(say.format("Hi"))
        page.wait("document.querySelector('.assistant .note').textContent.includes('24 tokens')")
        assert page.run("document.querySelectorAll('.token').length") == 0  # the answer is Markdown
        press = (
            "[...document.querySelectorAll('.assistant button')].find((b) => b.textContent === '{}').click()"
        )
        page.run(press.format("Tokens"))
        assert page.run("document.querySelectorAll('.assistant .token').length") == 24
        hover = "new PointerEvent('pointermove', {bubbles: true, clientX: 5})"
        page.run(f"document.querySelector('.token').dispatchEvent({hover})")
        assert re.search(r"\d+\.\d %-?\d\.\d\d", page.run("document.getElementById('tip').textContent"))
        for is_reloaded in (False, True):
            if is_reloaded:
                page.reload()
                page.wait(
                    "document.querySelectorAll('.message').length === 2"
                )  # the conversation is still there
            with completions(served, *bodies):
                shared = page.wait(
                    "document.querySelector('.shared li[data-requests=\"2\"]')?.dataset.blocks"
                )
                assert int(shared) > 5
            page.wait("document.querySelector('.requests .none') !== null")
        # Two answers at once are a fork: they share the blocks of what is before them.
        again = press.replace(".find(", ".findLast(")
        with unhurried(engine):  # else one might end before both are in a picture
            page.run(GREEDILY.format(1500))
            page.run(say.format(PROMPT))
            page.wait(
                "document.getElementById('send').hidden && !!document.querySelectorAll('.assistant')[1]"
            )
            page.wait("document.querySelectorAll('.assistant')[1].textContent.length > 40")
            page.run(again.format("Answer again"))
            page.wait("document.querySelector('.count')?.textContent === '2 / 2'")
            shared = page.wait("document.querySelector('.shared li[data-requests=\"2\"]')?.dataset.blocks")
            assert int(shared) > 5
            for _ in range(2):
                page.run("document.getElementById('stop').click()")
                page.run(again.format("‹"))
            page.wait("document.querySelector('.requests .none') !== null")
        # Another wording of the first question begins a branch; both are kept, and exported.
        edit = "document.querySelector('.user .actions button:last-child').click()"
        escape = "new KeyboardEvent('keydown', {key: 'Escape', bubbles: true})"
        page.run(f"{edit}; document.querySelector('.edit textarea').dispatchEvent({escape})")
        assert page.run("document.querySelector('.edit') === null")
        page.run(edit)
        page.run("document.querySelector('.edit textarea').value = 'Ho'")
        page.run(GREEDILY.format(4))
        page.run("document.querySelector('.edit').requestSubmit()")
        page.wait("document.querySelector('.assistant .note')?.textContent.includes('4 tokens')")
        assert page.run("document.querySelectorAll('.message').length") == 2
        page.reload()
        page.wait("document.querySelectorAll('.message').length === 2")
        page.run("document.querySelector('.user .actions button').click()")  # ‹
        assert page.run("document.querySelectorAll('.message').length") == 4
        text = page.run("localStorage.getItem(localStorage.key(0))")
        kept = json.loads(text)
        assert len(kept["nodes"]) == 7
        # A file that was exported opens as a new conversation; a damaged one is said to be so.
        page.run("document.getElementById('forget').click()")
        page.wait("document.querySelectorAll('.message').length === 0")
        page.run(IMPORT % json.dumps("{"))
        page.wait(
            "document.getElementById('unread').textContent.startsWith('kept.json cannot be imported: it is')"
        )
        page.run(IMPORT % json.dumps(text.replace("Hi", "<img src=x onerror=alert(1)>")))
        page.wait("document.querySelectorAll('.message').length === 4")
        assert page.run("document.getElementById('unread').hidden && document.images.length === 0")
        assert page.run("document.querySelector('.user .text').textContent") == "<img src=x onerror=alert(1)>"
        again = json.loads(page.run("localStorage.getItem(localStorage.key(0))"))
        assert again["chosen"] == kept["chosen"]
        assert len(again["nodes"]) == 7
        assert again["id"] != kept["id"]
        assert page.errors == []


def _large_picture() -> dict[str, Any]:
    """Return a picture whose numbers and names are as long as they get."""
    request = PicturedRequest("r" * 128, 127, "t" * 64, "waiting", *[1_234_567] * 6, b"")._asdict()
    numbers = {name: 98_765_432 for name, kind in EnginePicture.__annotations__.items() if kind == "int"}
    requests = [{**request, "request_id": f"{'r' * 60}{i}", "blocks": [*range(40)]} for i in range(3)]
    return {**numbers, "num_blocks": 987_654_321, "time": 1.0, "requests": requests}


# What of the page has text that is wider than it, except where an ellipsis says so.
TOO_WIDE = """[...document.querySelectorAll('body, body *')].filter((each) => {
  const style = getComputedStyle(each);
  return each.scrollWidth > each.clientWidth + 1 && each.clientWidth && style.display !== 'inline'
    && style.textOverflow !== 'ellipsis' && !['INPUT', 'TEXTAREA', 'SELECT'].includes(each.tagName);
}).map((each) => `${each.tagName}.${each.className}: ${each.textContent.slice(0, 40)}`)"""
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
PICTURES = """
const real = window.fetch, pictures = %s;
window.isAlive = true;
window.fetch = (path, options) => {
  if (path !== 'watch') return real(path, options);
  if (!window.isAlive) return Promise.reject(new TypeError('it was killed'));
  let time = 1;
  window.sent = 0;
  const body = new ReadableStream({ start(controller) {
    const send = () => {
      if (!window.isAlive) { clearInterval(timer); controller.close(); return; }
      time += 0.2;
      for (const each of pictures) if (each) each.num_generated_tokens += 1234567;
      const engines = pictures.map((each) => each && { ...each, time });
      const data = JSON.stringify({ scope: 'all', engines });
      window.sent += 1;
      controller.enqueue(new TextEncoder().encode(`data: ${data}\\n\\n`));
    };
    const timer = setInterval(send, 100);
    options.signal.addEventListener('abort', () => {
      clearInterval(timer);
      controller.error(options.signal.reason);
    });
  } });
  return Promise.resolve(new Response(body));
};
"""


@needs_chromium
def test_nothing_overflows_at_any_width_and_old_figures_are_shown_as_old(engine):
    assert CHROMIUM is not None
    with serving(engine) as served, chromium_page(CHROMIUM) as page:
        script = PICTURES % json.dumps([_large_picture(), None])
        page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        page.open(served.url)
        page.wait("document.querySelectorAll('.tiles dd').length >= 7")
        page.run("document.getElementById('parameters').open = true")
        for width in (320, 400, 600, 901, 1280, 1920):
            page.resize(width, 900)
            sent = page.run("window.sent")
            page.wait(f"window.sent > {sent + 2}")  # so that one is drawn in the new size
            page.run(DRAWN)
            assert page.run(TOO_WIDE) == [], width
            text = page.run("getComputedStyle(document.getElementById('messages'), '::before').content")
            assert "beside" not in text
        grey = "getComputedStyle(document.querySelectorAll('.engine')[{}]).filter"
        assert (page.run(grey.format(0)), page.run(grey.format(1))) == ("none", "grayscale(1)")
        page.run("window.isAlive = false")
        page.wait("!document.getElementById('old').hidden")
        assert page.run(grey.format(0)) == "grayscale(1)"
        assert page.run("document.getElementById('old').textContent").startswith("No news from the server")
        page.run("window.isAlive = true")
        page.wait("document.getElementById('old').hidden")
        assert page.run(grey.format(0)) == "none"
        assert page.errors == []


@needs_chromium
def test_numbers_that_the_server_refuses_are_not_sent(engine):
    """What an input takes, the server takes; and what a chat takes by default stands in the inputs."""
    assert CHROMIUM is not None
    value = "document.getElementById('{}').value = {!r}"
    with serving(engine) as served, chromium_page(CHROMIUM) as page:
        page.open(served.url)
        page.wait("document.getElementById('temperature')?.value === '0.8'")
        assert page.run("document.getElementById('min_p').value") == "0.05"
        inputs = "[...document.querySelectorAll('input[type=number]')]"
        limits = page.run(f"{inputs}.map(({{id, min, max}}) => [id, min, max])")
        assert {name for name, _, _ in limits} >= {"temperature", "top_p", "min_p", "max_tokens", "seed"}
        page.run("document.getElementById('input').value = 'Hi'")
        before = page.run(f"Object.fromEntries({inputs}.map(({{id, value}}) => [id, value]))")
        for name, least, most in limits:
            for limit in filter(None, (least, most)):
                SAMPLING_KINDS[name].parse(name, json.loads(limit))  # raises if the server refuses it
            wrong = [str(json.loads(least) - 1), *([str(json.loads(most) + 1)] if most else [])]
            for text in [*wrong, *(["1.5"] if name in ("max_tokens", "seed") else ["9"])]:
                page.run(value.format(name, text))
                page.run("document.getElementById('composer').requestSubmit()")
                assert page.run("document.querySelectorAll('.message').length") == 0, (name, text)
                assert page.run("document.getElementById('input').value") == "Hi"
            page.run(value.format(name, before[name]))
        page.run(value.format("temperature", "0.85"))  # beside the steps of the input
        page.run(value.format("max_tokens", "2"))
        page.run("document.getElementById('composer').requestSubmit()")
        page.wait("document.querySelector('.assistant .note')?.textContent.includes('2 tokens')")
        assert page.errors == []
