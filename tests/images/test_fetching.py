"""Images at https: URLs: hosts and addresses in every spelling, and servers that lie, stall and redirect."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator

import pytest

from paged import ConfigError, EngineConfig, RequestError
from paged.images import fetching
from paged.images.addresses import is_public, place_of
from paged.images.fetching import Fetcher
from tests.support.media_server import MediaServer, media_server, moved, ok, slowly


@pytest.fixture(scope="module")
def media() -> Iterator[MediaServer]:
    with media_server() as server:
        yield server


def fetch(media: MediaServer, path: str, fetcher: Fetcher | None = None) -> bytes:
    url = media.url(path)
    return (fetcher or media.fetcher()).fetch_now({url: "url"})[url]


def test_what_a_server_sends(media):
    media.answers |= {
        "/a.png?x=1&y=%20": ok(b"image" * 100, "content-type: text/html"),
        "/chunked": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
        "/to-the-end": b"HTTP/1.0 200 OK\r\n\r\nall of it",
        "/moved": moved("a.png?x=1&y=%20", 308),
        "/moved-again": moved(media.url("/moved").replace("localhost", "LOCALHOST")),
        "/%C3%BC": ok(b"utf-8"),
    }
    assert fetch(media, "/a.png?x=1&y=%20#top") == b"image" * 100
    assert media.asked[-1].startswith("GET /a.png?x=1&y=%20 HTTP/1.1\r\n")
    assert f"host: {media.domain}\r\n" in media.asked[-1].lower()
    assert fetch(media, "/chunked") == b"abcde"
    assert fetch(media, "/to-the-end") == b"all of it"
    assert fetch(media, "/moved-again") == b"image" * 100
    assert fetch(media, "/ü") == b"utf-8"
    urls = {media.url(path): path for path in ("/chunked", "/ü", "/to-the-end")}
    assert [*media.fetcher().fetch_now(urls).values()] == [b"abcde", b"utf-8", b"all of it"]


LARGE = b"x" * 2**16
BAD: dict[str, tuple[bytes, str]] = {
    "status": (b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n", "answers with status 404"),
    "no-http": (b"SSH-2.0-OpenSSH_9.0\r\n" * 3, "gives a wrong answer"),
    "nothing": (b"", "gives a wrong answer|gives no answer"),
    "too-short": (ok(b"abc", length=10), "gives a wrong answer"),
    "says-too-long": (ok(b"abc", length=2**40), "has more than 20,971,520 bytes"),
    "packed": (ok(b"abc", "content-encoding: gzip"), "sends it as 'gzip', which was not asked for"),
    "long-head": (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 2**14, "gives a wrong answer"),
    "other-host": (moved("https://example.org/x.png"), "is at example.org, which is none of allowed_media"),
    "other-port": (moved("https://localhost/x.png"), "is at localhost, which is none of allowed_media"),
    "no-tls": (moved("http://localhost/x.png"), "its redirect must be such as https://host.example"),
    "a-file": (moved("file:///etc/passwd"), "its redirect must be such as https://host.example"),
    "address": (moved("https://169.254.169.254/latest"), "is at 169.254.169.254, which is none of"),
    "no-url": (moved("//[x"), "its redirect must be such as"),
    "round": (moved("/round"), "is redirected more than 3 times"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_answers(media, name):
    answer, message = BAD[name]
    media.answers[f"/{name}"] = answer
    with pytest.raises(RequestError, match=message) as raised:
        fetch(media, f"/{name}")
    assert raised.value.param.startswith("url")


def endless(head: bytes, part: bytes) -> Iterator[bytes]:
    return itertools.chain([head], itertools.repeat(part))


def test_bodies_without_end(media):
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    chunks = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    media.answers |= {
        "/endless": slowly(endless(head, LARGE), 0),
        "/chunks": slowly(endless(chunks, b"10000\r\n" + LARGE + b"\r\n"), 0),
        "/tiny-chunks": slowly(endless(chunks, b"1\r\nx\r\n" * 2**12), 0),
        "/informs": slowly(endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2**12), 0),
    }
    for paths, message in (
        (("/endless", "/chunks"), "has more than 20,971,520 bytes"),
        (("/tiny-chunks", "/informs"), "sends too much that is no image"),
    ):
        for path in paths:
            with pytest.raises(RequestError, match=message):
                fetch(media, path)


def test_slow_servers_end_in_time(media, monkeypatch):
    """Before and within the head, in the body, over redirects, and while a name is looked up."""
    monkeypatch.setattr(fetching, "FETCH_S", 0.4)
    media.answers |= {
        "/silent": lambda _: time.sleep(2),
        "/slow-head": slowly(endless(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"), 0.05),
        "/slow-body": slowly(endless(ok(b"", length=2**20), b"x"), 0.05),
        "/slow-moves": lambda send: slowly(iter([b"", b"", b"", moved("/slow-moves")]), 0.05)(send),
    }
    media.answers["/fine"] = ok(b"fine")
    started = time.monotonic()
    for path in ("/silent", "/slow-head", "/slow-body", "/slow-moves"):
        urls = {media.url("/fine"): "first", media.url(path): "second"}
        late = "first"
        while late == "first":  # where this machine is slow
            with pytest.raises(RequestError, match=r"was not fetched within 0\.4 s") as raised:
                media.fetcher().fetch_now(urls)
            late = str(raised.value).split()[0]
        assert late == "second"

    def hangs(*_: object) -> list[str]:
        time.sleep(1)
        return ["127.0.0.1"]

    with pytest.raises(RequestError, match=r"url was not fetched within 0\.4 s"):
        fetch(media, "/fine", media.fetcher(hangs))
    assert time.monotonic() - started < 120


def test_an_address_is_checked_and_then_connected_to(media):
    """A name that resolves to another address at the second look-up gets no second one."""
    media.answers["/once"] = ok(b"once")
    answers = iter([["127.0.0.1"], ["10.0.0.1"], ["127.0.0.1", "10.0.0.1"], []])
    fetcher = media.fetcher(lambda *_: next(answers))
    assert fetch(media, "/once", fetcher) == b"once"
    connections = media.connections
    for _ in range(3):
        with pytest.raises(RequestError, match="localhost has an address that is not public"):
            fetch(media, "/once", fetcher)
    media.answers["/hop"] = moved("/once")
    answers = iter([["127.0.0.1"], ["192.168.1.1"]])  # checked anew at each hop
    with pytest.raises(RequestError, match="localhost has an address that is not public"):
        fetch(media, "/hop", media.fetcher(lambda *_: next(answers)))
    assert media.connections == connections + 1
    with pytest.raises(RequestError, match="has an address that is not public"):
        Fetcher([media.domain]).fetch_now({media.url("/once"): "url"})  # as users have it
    assert media.connections == connections + 1


def test_a_redirect_stays_on_its_host(media):
    """Although the other host is allowed, too."""
    other = f"other.test:{media.port}"
    media.answers["/away"] = moved(f"https://{other}/once")
    with pytest.raises(RequestError, match=r"localhost:\d+ redirects to another host, other\.test:\d+; give"):
        fetch(media, "/away", media.fetcher(others=[other]))


def test_a_certificate_is_checked(media):
    url = media.url("/once")
    unknown = Fetcher([media.domain], is_allowed=lambda _: True)
    with pytest.raises(RequestError, match="its certificate is not valid: self-signed"):
        unknown.fetch_now({url: "url"})
    other = f"other.test:{media.port}"
    fetcher = media.fetcher(others=[other])
    with pytest.raises(RequestError, match="its certificate is not valid: Hostname mismatch"):
        fetcher.fetch_now({f"https://{other}/once": "url"})


PRIVATE = """
0.0.0.0 10.1.2.3 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254 169.254.169.254 172.16.0.1
172.31.255.255 192.0.0.192 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.51.100.7 203.0.113.7
224.0.0.1 239.255.255.255
240.0.0.1 255.255.255.255 168.63.129.16
:: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::ffff:0:8.8.8.8 64:ff9b::7f00:1 64:ff9b::8.8.8.8 64:ff9b:1::1
100::1 2001::1 2001:db8::1 2002:7f00:1::1 2002:808:808::1 3fff::1 5f00::1 fc00::1 fd00:ec2::254 fe80::1
fe80::1%eth0 2606:4700::1111%1 fec0::1 ff02::1 ff0e::1 2130706433 0x7f.1 127.1 0177.0.0.1 host
"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2a00::1"])
def test_public_addresses(address):
    assert is_public(address)


DOMAINS = ("images.example", "images.example:8443", "xn--bcher-kva.example")


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("https://images.example/x.png", "images.example", "/x.png"),
        ("HTTPS://Images.Example", "images.example", "/"),
        ("https://images.example:443?a=b", "images.example", "/?a=b"),
        ("https://images.example:8443/a/../b?c=d%20e#f", "images.example:8443", "/a/../b?c=d%20e"),
        ("https://xn--bcher-kva.example/ü?{}", "xn--bcher-kva.example", "/%C3%BC?%7B%7D"),
        ("https://images.example/@other.example:80/", "images.example", "/@other.example:80/"),
    ],
)
def test_urls_that_are_taken(url, authority, path):
    place = place_of("url", url, DOMAINS)
    assert (place.authority, place.path) == (authority, path)


REFUSED = r"""
http://images.example/ ftp://images.example/ https:images.example https:///images.example/ //images.example/
https://images.example./ https://.images.example/ https://images..example/ https://images.example:/
https://images.example:99999/ https://images.example:8444/ https://user@images.example/
https://images.example@127.0.0.1/ https://127.0.0.1\@images.example/ https://images.example\.evil.example/
https://images.example%2e/ https://images%2eexample/ https://a.images.example/
https://images.example.evil.example/
https://bücher.example/ https://ｉmages.example/ https://images。example/ https://[::1]/ https://[::ffff:7f00:1]/
https://2130706433/ https://0x7f000001/ https://0177.0.0.1/ https://127.1/ https://127.0.0.1/ https://localhost/
https://images.example%00.evil.example/ https://images.example:443:80/ https://images.example:+443/
"""


@pytest.mark.parametrize("url", REFUSED.split())
def test_urls_that_are_refused(url):
    with pytest.raises(RequestError, match=r"^url (must|is at)"):
        place_of("url", url, DOMAINS)


@pytest.mark.parametrize("part", [" ", "\t", "\r\nx: y", "\x00", "\\", "\ud800", "x" * 9000])
def test_what_no_url_has(part):
    with pytest.raises(RequestError, match=r"^url "):
        place_of("url", f"https://images.example/{part}", DOMAINS)


def test_domains_are_names():
    config = EngineConfig("demo", allowed_media_domains=["Images.Example", "a.test:8443", "b.test:443"])
    assert config.allowed_media_domains == ("images.example", "a.test:8443", "b.test")
    assert EngineConfig("demo", allowed_media_domains="a.test").allowed_media_domains == ("a.test",)
    for wrong in (
        ["10.0.0.1"],
        ["0x7f000001"],
        ["2130706433"],
        ["127.0x1"],
        ["[::1]"],
        ["*"],
        ["*.example"],
        [""],
    ):
        with pytest.raises(ConfigError, match=re.escape(repr(wrong[0]))):
            EngineConfig("demo", allowed_media_domains=wrong)
    for wrong in (
        ["https://a.test"],
        ["a.test/x"],
        ["a.test."],
        ["bücher.test"],
        ["a.test:99999"],
        [1],
        1,
        ["a b"],
    ):
        with pytest.raises(ConfigError, match="allowed_media_domains must be"):
            EngineConfig("demo", allowed_media_domains=wrong)
