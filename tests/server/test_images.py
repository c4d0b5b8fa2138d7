"""Images in requests to a server: data: URLs alone, and one error for each wrong part."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest

from paged.server.engine_client import EngineClient
from tests.support.images import data_url, picture, png, seeing
from tests.support.served import serving


@pytest.fixture(scope="module")
def served() -> Any:
    client = EngineClient(
        str(seeing("mistral3")), device="cpu", num_threads=1, num_blocks=256, dtype="float32"
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


WRONG: list[tuple[Any, str]] = [
    (
        image("https://example.org/x.png"),
        r"\.image_url\.url must be a data: URL .* got one of https:; nothing is fetched",
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


def test_numbers_of_images_are_limited(served):
    status, body = chat(served, *[image()] * 5)
    assert status == 400
    assert "the prompt has 5 images, and limit_mm_per_prompt allows 4" in body["error"]["message"]
    assert chat(served, *[image()] * 4)[0] == 200


def test_only_users_send_images(served):
    for role in ("assistant", "developer"):
        item = {"role": role, "content": [{"type": "input_image", "image_url": URL}]}
        status, body = ask(served, "/v1/responses", input=[item, {"role": "user", "content": "x"}])
        assert status == 400
        assert f"is an input_image of role '{role}'; users send images" in body["error"]["message"]


def test_prompts_have_no_paths(served):
    for prompt in ({"prompt": "x", "multi_modal_data": {"image": "/etc/passwd"}}, [{"prompt": "x"}]):
        assert ask(served, "/v1/completions", prompt=prompt, max_tokens=2)[0] == 400


def test_bodies_may_be_larger_than_of_a_text_model(served):
    large = png(picture(3).resize((2400, 2400)), "PNG", compress_level=0)
    assert len(large) > 16 * 2**20
    url = f"data:image/png;base64,{base64.b64encode(large).decode()}"
    assert chat(served, image(url))[0] == 200
