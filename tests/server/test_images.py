"""Images in requests to a server: data: URLs alone, and one error for each wrong part."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from paged.server.engine_client import EngineClient
from paged.server.http import exchange
from tests.images_fuzz import run_parts
from tests.support.images import data_url, picture, png, seeing
from tests.support.media_server import MediaServer, media_server, ok
from tests.support.mortal_engines import processes
from tests.support.served import PATIENCE_S, UnhurriedLauncher, eventually, serving, unhurried


@pytest.fixture(scope="module")
def served() -> Any:
    client = EngineClient(
        str(seeing("mistral3")),
        device="cpu",
        num_threads=1,
        num_blocks=256,
        dtype="float32",
        launcher=UnhurriedLauncher(),
    )
    with serving(client, closes=True) as found:
        yield found


def ask(served: Any, path: str, **body: Any) -> tuple[int, Any]:
    status, _, data = served.request("POST", path, {"temperature": 0, **body})
    return status, json.loads(data)


URL = data_url(picture(1))


def chat(served: Any, *parts: Any, **body: Any) -> tuple[int, Any]:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look:"}, *parts]}]
    return ask(served, "/v1/chat/completions", messages=messages, max_tokens=4, **body)


def image(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def test_every_api_shows_the_same_image(served):
    status, expected = chat(served, image())
    assert status == 200
    content = expected["choices"][0]["message"]["content"]
    num_tokens = expected["usage"]["prompt_tokens"]
    other = chat(served, image(data_url(picture(2))))[1]["choices"][0]["message"]["content"]
    assert other != content
    parts = [
        {"type": "input_text", "text": "Look:"},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ]
    item = {"role": "user", "content": parts}
    status, response = ask(served, "/v1/responses", input=[item], max_output_tokens=4)
    assert status == 200
    assert response["output"][0]["content"][0]["text"] == content
    assert response["usage"]["input_tokens"] == num_tokens
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    blocks = [{"type": "text", "text": "Look:"}, {"type": "image", "source": source}]
    messages = [{"role": "user", "content": blocks}]
    model = expected["model"]
    status, message = ask(served, "/v1/messages", model=model, messages=messages, max_tokens=4)
    assert status == 200
    assert message["content"][0]["text"] == content
    counted = served.request("POST", "/v1/messages/count_tokens", {"model": model, "messages": messages})[2]
    assert json.loads(counted)["input_tokens"] == num_tokens
    chat_parts = [{"type": "text", "text": "Look:"}, image()]
    body = {"messages": [{"role": "user", "content": chat_parts}]}
    tokens = json.loads(served.request("POST", "/tokenize", body)[2])
    assert tokens["count"] == num_tokens
    mark_of_image = parts_of_llamacpp("[user]Look:<__media__>[assistant]", URL)
    status, native = ask(served, "/completion", prompt=mark_of_image, n_predict=4)
    assert status == 200
    assert (native["content"], native["tokens_evaluated"]) == (content, num_tokens)


def test_a_chat_has_processing_of_its_own(served):
    """In sizes and in values, which reach the engine's process; a uuid changes no answer."""
    large = image(data_url(picture(3, 48, 48)))
    usual = chat(served, large)[1]
    answers = {}
    for values in ({}, {"size": {"longest_edge": 24}}, {"size": {"longest_edge": 24}, "image_std": 0.02}):
        status, found = chat(served, large, mm_processor_kwargs=values, logprobs=True)
        assert status == 200, found
        counted = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look:"}, large]}]}
        counted["mm_processor_kwargs"] = values
        tokens = json.loads(served.request("POST", "/tokenize", counted)[2])
        assert tokens["count"] == found["usage"]["prompt_tokens"]
        answers[tokens["count"], str(values)] = found["choices"][0]["logprobs"]["content"][0]["logprob"]
    most = usual["usage"]["prompt_tokens"]
    assert [num_tokens for num_tokens, _ in answers] == [most, most - 30, most - 30]
    assert len({*answers.values()}) == 3
    named = {**large, "uuid": "mine"}
    assert chat(served, named)[1]["choices"] == usual["choices"]
    for values, message in (
        ({"max_pixels": 900}, "mm_processor_kwargs: max_pixels 900 is not supported; known are"),
        ({"do_resize": False}, "mm_processor_kwargs: do_resize false is not supported"),
        ([1], "mm_processor_kwargs must be an object"),
    ):
        status, found = chat(served, large, mm_processor_kwargs=values)
        assert (status, found["error"]["param"]) == (400, "mm_processor_kwargs")
        assert message in found["error"]["message"]
    status, found = chat(served, {**large, "image_url": None, "uuid": "mine"})
    assert status == 400
    assert "got none; each prompt brings its images, as a uuid" in found["error"]["message"]
    status, found = ask(served, "/v1/responses", input="a", mm_processor_kwargs={"image_std": 0.02})
    assert (status, found["error"]["param"]) == (400, "mm_processor_kwargs")
    assert "/v1/chat/completions takes it" in found["error"]["message"]
    counted = {"prompt": "a", "mm_processor_kwargs": {"image_std": 0.02}}
    text = served.request("POST", "/tokenize", counted)[2].decode()
    assert "mm_processor_kwargs needs messages in place of prompt" in text


def parts_of_llamacpp(prompt: str, *urls: str) -> dict[str, Any]:
    return {"prompt_string": prompt, "multimodal_data": [url.partition(",")[2] for url in urls]}


def test_ollama_shows_images_before_the_text(served):
    """In messages and in prompts; num_ctx counts their tokens."""
    model = served.front.names[0]
    both = [URL.partition(",")[2], data_url(picture(2)).partition(",")[2]]
    parts = [image(), image(data_url(picture(2))), {"type": "text", "text": "Look"}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    status, expected = ask(served, "/v1/chat/completions", **body)
    assert status == 200
    num_tokens = expected["usage"]["prompt_tokens"]
    options = {"temperature": 0, "num_predict": 4, "num_ctx": num_tokens + 4}
    common: dict[str, Any] = {"model": model, "stream": False, "options": options}
    messages = [{"role": "user", "content": "Look", "images": both}]
    raw = "[user][IMG][IMG]Look[assistant]"
    for path, more, answer_of in (
        ("/api/chat", {"messages": messages}, lambda answer: answer["message"]["content"]),
        ("/api/generate", {"prompt": "Look", "images": both}, lambda answer: answer["response"]),
        ("/api/generate", {"prompt": raw, "images": both, "raw": True}, lambda answer: answer["response"]),
    ):
        status, _, data = served.request("POST", path, {**common, **more})
        answer = json.loads(data)
        assert status == 200, answer
        assert answer_of(answer) == expected["choices"][0]["message"]["content"]
        assert answer["prompt_eval_count"] == num_tokens
        short = {**options, "num_ctx": num_tokens}
        status, _, data = served.request("POST", path, {**common, "options": short, **more})
        assert status == 400
        assert f"the prompt has {num_tokens} tokens, and options.num_ctx is" in data.decode()
    shown = served.post("/api/show", model=model)
    assert "vision" in shown["capabilities"]
    assert json.loads(served.request("GET", "/props")[2])["modalities"] == {"vision": True, "audio": False}


def result_of_chat(*parts: Any) -> tuple[str, dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "shoot", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Shoot"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [*parts]},
    ]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 4}


def result_of_response(*parts: Any) -> tuple[str, dict[str, Any]]:
    items = [
        {"role": "user", "content": "Shoot"},
        {"type": "function_call", "call_id": "c", "name": "shoot", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [*parts]},
    ]
    return "/v1/responses", {"input": items, "max_output_tokens": 4}


def result_of_message(*blocks: Any) -> tuple[str, dict[str, Any]]:
    use = {"type": "tool_use", "id": "c", "name": "shoot", "input": {}}
    messages = [
        {"role": "user", "content": "Shoot"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [*blocks]}]},
    ]
    return "/v1/messages", {"messages": messages, "max_tokens": 4}


def result_of_ollama(*images: str) -> tuple[str, dict[str, Any]]:
    call = {"function": {"name": "shoot", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Shoot"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Here:", "images": [*images]},
    ]
    return "/api/chat", {"messages": messages, "stream": False, "options": {"temperature": 0}}


def test_results_of_tools_show_images(served):
    """In each API; `test_tool_prompts` has templates that do not show tools."""

    def answer(url: str) -> tuple[str, int]:
        path, body = result_of_chat({"type": "text", "text": "Here:"}, image(url))
        found = served.post(path, **body, temperature=0)
        return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens"]

    content, num_tokens = answer(URL)
    assert answer(data_url(picture(2)))[0] != content
    path, body = result_of_response({"type": "input_text", "text": "Here:"}, input_image(URL))
    found = served.post(path, **body, temperature=0)
    assert found["output"][0]["content"][0]["text"] == content
    assert found["usage"]["input_tokens"] == num_tokens
    path, body = result_of_message({"type": "text", "text": "Here:"}, block(**_BASE64, data=B64))
    found = served.post(path, model=served.front.names[0], **body, temperature=0)
    assert found["content"][0]["text"] == content
    assert found["usage"]["input_tokens"] == num_tokens
    path, body = result_of_ollama(B64)
    found = served.post(path, model=served.front.names[0], **body)
    assert found["prompt_eval_count"] == num_tokens


WRONG: list[tuple[Any, str]] = [
    (
        image("https://example.org/x.png"),
        r"messages\[0\]\.content\[1\]\.image_url\.url must be a data: URL .* got one of https:; nothing is "
        r"fetched, as the server names no hosts \(--allowed-media-domains\)",
    ),
    (image("http://169.254.169.254/latest"), "nothing is fetched"),
    (image("file:///etc/passwd"), "got one of file:"),
    (image("/etc/passwd"), "got '/etc/passwd'"),
    (image("data:image/png,abc"), "must be a data: URL such as data:image/png;base64"),
    (image("data:text/html;base64,AAAA"), "must be a data: URL such as"),
    (image("data:image/png;base64,A*"), "is not base64"),
    (
        image("data:image/png;base64,AAAA"),
        r"messages\[0\]\.content\[1\] is no image in PNG, JPEG, WEBP or GIF",
    ),
    (image(URL[: URL.index(",") + 1 + 400]), r"messages\[0\]\.content\[1\] is a damaged PNG"),
    (image(detail="huge"), "detail must be one of 'auto', 'low', 'high', 'original', got 'huge'"),
    ({**image(), "text": "x"}, "must have one image, got image_url and text"),
    ({**image(), "uuid": 5}, "uuid must be a string, got 5"),
    ({"type": "image_url"}, "must have one image, got none"),
    ({"type": "image_url", "image_url": {}}, "must be a URL or an object with a url"),
    ({**image(), "place": "x"}, "has an unknown field 'place'"),
    (image(extra=1), "has an unknown field 'extra'"),
    (
        {"type": "input_audio", "input_audio": {}},
        "is of type 'input_audio'; parts of type 'text' and 'image_url'",
    ),
    ({"type": "video_url", "video_url": {"url": URL}}, "is of type 'video_url'"),
    ({"type": "image", "image": "/etc/passwd"}, "is of type 'image'; parts of type"),
    ({"type": "image_pil", "image_pil": "/etc/passwd"}, "is of type 'image_pil'; parts of type"),
]


@pytest.mark.parametrize(("part", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_part_is_an_error_of_its_request(served, part, message):
    status, body = chat(served, part)
    assert status == 400
    assert re.search(message, body["error"]["message"]), body


B64 = URL.partition(",")[2]
CUT = B64[:400]
PDF = base64.b64encode(b"%PDF-1.7 " * 20).decode()
_USER = {"role": "user"}
_BASE64 = {"type": "base64", "media_type": "image/png"}


def responses(*parts: Any) -> tuple[str, dict[str, Any]]:
    content = [{"type": "input_text", "text": "x"}, *parts]
    return "/v1/responses", {"input": [{**_USER, "content": content}]}


def anthropic(*blocks: Any) -> tuple[str, dict[str, Any]]:
    content = [{"type": "text", "text": "x"}, *blocks]
    return "/v1/messages", {"max_tokens": 2, "messages": [{**_USER, "content": content}]}


def ollama(*images: Any, role: str = "user") -> tuple[str, dict[str, Any]]:
    return "/api/chat", {"messages": [{"role": role, "content": "x", "images": [*images]}]}


def generated(*images: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/api/generate", {"prompt": "x", "images": [*images], **more}


def native(prompt: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/completion", {"prompt": prompt, "n_predict": 2, **more}


def input_image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **more}


def block(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


HTTPS = "https://example.org/x.png"
MANY = "the prompt has 5 images, and limit_mm_per_prompt allows 4"
NO_IMAGE = "is no image in PNG, JPEG, WEBP or GIF"
WRONG_ELSEWHERE: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (
        responses(input_image(HTTPS)),
        r"input\[0\]\.content\[1\]\.image_url must be a data: URL .* one of https:",
    ),
    (responses(input_image("http://a.b/x")), r"input\[0\]\.content\[1\]\.image_url must be .* one of http:"),
    (responses(input_image("file:///etc/passwd")), r"content\[1\]\.image_url must be .* one of file:"),
    (anthropic(block(type="url", url="file:///etc/passwd")), r"source\.url must be .* one of file:"),
    (ollama("file:///etc/passwd"), "is not base64"),
    (responses(input_image("data:;base64,A*")), r"input\[0\]\.content\[1\]\.image_url is not base64"),
    (responses(input_image(f"data:;base64,{PDF}")), rf"input\[0\]\.content\[1\] {NO_IMAGE}"),
    (responses(input_image(f"data:;base64,{CUT}")), r"input\[0\]\.content\[1\] is a damaged PNG"),
    (responses(input_image(URL, detail="huge")), "detail must be .*got 'huge'"),
    (responses(input_image(URL, file_id="f")), "there are no uploaded files"),
    (responses(*[input_image(URL)] * 5), MANY),
    (responses({"type": "input_audio", "input_audio": {}}), "input_audio"),
    (responses({"type": "input_video", "video_url": "x"}), "input_video"),
    (
        anthropic(block(type="url", url=HTTPS)),
        r"messages\[0\]\.content\[1\]\.source\.url must be a data: URL",
    ),
    (anthropic(block(type="url", url="ftp://x")), r"content\[1\]\.source\.url must be .* one of ftp:"),
    (anthropic(block(**_BASE64, data="A*")), r"messages\[0\]\.content\[1\]\.source\.data is not base64"),
    (anthropic(block(**_BASE64, data=PDF)), rf"messages\[0\]\.content\[1\] {NO_IMAGE}"),
    (anthropic(block(**{**_BASE64, "media_type": "image/tiff"}, data=B64)), "media_type must be one of"),
    (anthropic(block(**_BASE64, data=B64, url=URL)), "url"),
    (anthropic(block(type="file", file_id="f")), "source must be an object whose type is one of"),
    (anthropic(*[block(**_BASE64, data=B64)] * 5), MANY),
    (anthropic({"type": "document", "source": {}}), "document"),
    (
        result_of_chat(image(f"data:;base64,{PDF}")),
        rf"^messages\[2\]\.content\[0\] {NO_IMAGE}",
    ),
    (
        result_of_response(input_image(f"data:;base64,{PDF}")),
        rf"^input\[2\]\.output\[0\] {NO_IMAGE}",
    ),
    (
        result_of_message(block(**_BASE64, data=PDF)),
        rf"^messages\[2\]\.content\[0\]\.content\[0\] {NO_IMAGE}",
    ),
    (result_of_message(block(type="file", file_id="f")), "source must be an object whose type is one of"),
    (result_of_ollama(PDF), rf"^messages\[2\]\.images\[0\] {NO_IMAGE}"),
    (ollama("A*"), r"messages\[0\]\.images\[0\] is not base64"),
    (ollama(B64, PDF), rf"messages\[0\]\.images\[1\] {NO_IMAGE}"),
    (ollama(B64, CUT), r"messages\[0\]\.images\[1\] is a damaged PNG"),
    (ollama(B64, 7), r"messages\[0\]\.images\[1\] must be"),
    (ollama(B64, ""), r"messages\[0\]\.images\[1\] must"),
    (ollama(HTTPS), r"messages\[0\]\.images\[0\] is not base64"),
    (ollama("/etc/passwd"), r"messages\[0\]\.images\[0\] is (not base64|no image)"),
    (ollama(*[B64] * 5), MANY),
    (ollama(B64, role="system"), r"messages\[0\]\.images is of role 'system'; users and tools send images"),
    (generated(PDF), rf"images\[0\] {NO_IMAGE}"),
    (generated(PDF, raw=True), rf"images\[0\] {NO_IMAGE}"),
    (generated("A*", raw=True), r"images\[0\] is not base64"),
    (
        generated(B64, prompt="[IMG][IMG]", raw=True),
        r"the prompt has 2 times '\[IMG\]', which .* and 1 image",
    ),
    (generated(*[B64] * 5, raw=True), MANY),
    (native(parts_of_llamacpp("<__media__>")), "1 times <__media__>, and prompt.multimodal_data 0 images"),
    (native(parts_of_llamacpp("x", URL)), "0 times <__media__>, and prompt.multimodal_data 1 images"),
    (
        native({**parts_of_llamacpp("<__media__>"), "multimodal_data": [PDF]}),
        rf"multimodal_data\[0\] {NO_IMAGE}",
    ),
    (native({**parts_of_llamacpp("<__media__>"), "multimodal_data": ["A*"]}), r"data\[0\] is not base64"),
    (native({**parts_of_llamacpp("x"), "image": 1}), "image"),
    (native(parts_of_llamacpp("<__media__>" * 5, *[URL] * 5)), MANY),
    (native("x", image_data=[{"id": 1, "data": B64}]), "image_data .*multimodal_data.* shows images"),
    (native("x [IMG]"), r"\[IMG\]', which stands for an image, audio or video .* give images as multi_modal"),
]


@pytest.mark.parametrize(("call", "message"), WRONG_ELSEWHERE, ids=range(len(WRONG_ELSEWHERE)))
def test_a_wrong_image_is_an_error_in_each_api(served, call, message):
    path, body = call
    status, _, data = served.request("POST", path, {"model": served.front.names[0], "stream": False, **body})
    assert status == 400, data
    error = json.loads(data)["error"]
    assert re.search(message, error if isinstance(error, str) else error["message"]), error


def test_numbers_of_images_are_limited(served):
    status, body = chat(served, *[image()] * 5)
    assert status == 400
    assert "the prompt has 5 images, and limit_mm_per_prompt allows 4" in body["error"]["message"]
    assert chat(served, *[image()] * 4)[0] == 200


def test_malformed_bodies_are_one_error_each(served):
    report = run_parts(served, range(60))
    assert report.findings == {}, "python -m tests.images_fuzz --part SEED"
    assert sum(count for outcome, count in report.outcomes.items() if outcome.startswith("400")) > 30


def test_no_answer_goes_on_behind_an_image(served):
    status, body = chat(served, image(), continue_final_message=True, add_generation_prompt=False)
    assert status == 400
    assert "continue_final_message needs a last message that ends with text" in body["error"]["message"]
    assert body["error"]["param"] == "continue_final_message"


def test_assistants_and_developers_send_no_images(served):
    for role in ("assistant", "developer"):
        item = {"role": role, "content": [{"type": "input_image", "image_url": URL}]}
        status, body = ask(served, "/v1/responses", input=[item, {"role": "user", "content": "x"}])
        assert status == 400
        assert f"is an input_image of role '{role}'; users and tools send images" in body["error"]["message"]


def test_prompts_have_no_paths(served):
    for prompt in ({"prompt": "x", "multi_modal_data": {"image": "/etc/passwd"}}, [{"prompt": "x"}]):
        assert ask(served, "/v1/completions", prompt=prompt, max_tokens=2)[0] == 400


@pytest.fixture
def media(served: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[MediaServer]:
    """Yield a server of images, whose address the front end may connect to."""
    with media_server() as server:
        monkeypatch.setattr(served.front.engine.text.images, "fetcher", server.fetcher())
        yield server


def test_images_are_fetched_from_hosts_that_are_named(served, media):
    """The answer is that of a data: URL; a wrong image, and another host, are errors with their places."""
    media.answers |= {"/1.png": ok(png(picture(1)), "content-type: text/html"), "/x.png": ok(b"%PDF-1.7")}
    status, expected = chat(served, image())
    url = media.url("/1.png")
    status, found = chat(served, image(url), image(url))
    assert status == 200
    assert len(media.asked) == 1, "one URL is fetched once"
    status, found = chat(served, image(url))
    assert (status, found["choices"], found["usage"]) == (200, expected["choices"], expected["usage"])
    num_tokens = expected["usage"]["prompt_tokens"]
    model = expected["model"]
    given = [{"role": "user", "content": [{"type": "text", "text": "Look:"}, image(url)]}]
    assert served.post("/tokenize", messages=given)["count"] == num_tokens
    blocks = [{"type": "text", "text": "Look:"}, block(type="url", url=url)]
    messages = [{"role": "user", "content": blocks}]
    counted = served.post("/v1/messages/count_tokens", model=model, messages=messages)
    assert counted["input_tokens"] == num_tokens
    path, body = responses(input_image(url))
    assert served.post(path, **body, max_output_tokens=2)["status"] in ("completed", "incomplete")
    for part, message in (
        (image(media.url("/x.png")), r"^messages\[0\]\.content\[1\] is no image in PNG"),
        (
            image("https://other.example/x"),
            r"content\[1\]\.image_url\.url is at other\.example, which is none of",
        ),
        (image("https://127.0.0.1/x"), r"content\[1\]\.image_url\.url is at 127\.0\.0\.1, which is none of"),
        (image("http://localhost/x"), r"got one of http:; nothing is fetched"),
    ):
        status, body = chat(served, part)
        assert status == 400
        assert re.search(message, body["error"]["message"]), body
    num_asked = len(media.asked)
    status, body = chat(served, *[image(media.url(f"/{i}")) for i in range(5)])
    assert (status, MANY in body["error"]["message"]) == (400, True)
    assert len(media.asked) == num_asked


def test_what_is_fetched_counts_as_the_body(served, media, monkeypatch):
    """Nobody else waits meanwhile, and all room is given back at the end."""
    go_on = threading.Event()
    first = ok(b"", length=2**21) + bytes(2**20)

    def answer(send: Any) -> None:
        send(first)
        go_on.wait(PATIENCE_S)

    media.answers["/slow"] = answer
    budget = served.front.body_budget
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(chat, served, image(media.url("/slow")))
        eventually(lambda: budget.num_bytes > 2**20)
        assert chat(served, image())[0] == 200
        go_on.set()
        status, body = asked.result()
    assert status == 400
    assert "gives a wrong answer" in body["error"]["message"]
    eventually(lambda: budget.num_bytes == 0)
    monkeypatch.setattr(budget, "max_bytes", 2**18)
    monkeypatch.setattr(exchange, "WAIT_FOR_ROOM_S", 0.1)
    status, body = chat(served, image(media.url("/slow")))
    assert status == 503
    assert "bodies of the requests in progress" in body["error"]["message"]
    eventually(lambda: budget.num_bytes == 0)
    budget.check()


def test_bodies_may_be_larger_than_of_a_text_model(served):
    large = png(picture(3).resize((2400, 2400)), "PNG", compress_level=0)
    assert len(large) > 16 * 2**20
    url = f"data:image/png;base64,{base64.b64encode(large).decode()}"
    assert chat(served, image(url))[0] == 200


def test_an_engine_that_ends_costs_no_stream(served):
    """Its requests about images go on in its successor, which computes the images again."""
    parts = [{"type": "text", "text": "Look:"}, image(), image(data_url(picture(5, 47, 90)))]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }

    def streamed(on_event: Callable[[int], None] = lambda _: None) -> tuple[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
        with closing(connection):
            sent = json.dumps({**body, "stream": True})
            connection.request("POST", "/v1/chat/completions", sent, {"content-type": "application/json"})
            response = connection.getresponse()
            chunks = []
            for line in response:
                if line.startswith(b"data: {"):
                    chunks.append(json.loads(line[6:]))
                    on_event(len(chunks))
        deltas = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
        return "".join(deltas), chunks[-1]["usage"]

    expected = streamed()
    (process,) = processes(served.front.engine)

    def end(count: int) -> None:
        if count == 1:  # texts of 400 tokens come in few pieces
            os.kill(process.pid, signal.SIGKILL)
            until_then.close()

    with ThreadPoolExecutor(1) as thread, ExitStack() as until_then:
        until_then.enter_context(unhurried(served.front.engine))
        beside = thread.submit(chat, served, image(data_url(picture(7))))
        assert streamed(end) == expected
        assert beside.result()[0] == 200
    (successor,) = processes(served.front.engine)
    assert successor.pid != process.pid
