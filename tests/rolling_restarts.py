"""Rolling restarts: two servers behind HAProxy are ended and started in turn, and no client sees an error.

    make haproxy
    python -m tests.rolling_restarts --restarts 20

Clients ask all the while, over connections that stay open and over new ones, for streams and for whole
completions, by a public name. Each answer must be whole, and the text of an undisturbed one. Nothing is tried
again, and HAProxy sends no request twice. Each server ends on SIGTERM with exit code 0.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.support.haproxy import CHECK_INTERVAL_S, find_haproxy, haproxy

NUM_CLIENTS = 16
PUBLIC_NAME = "models.example"
# From the moment at which /ready fails, the proxy may send requests until it has checked once more.
DRAIN_DELAY_S = 5 * CHECK_INTERVAL_S
LENGTHS = (8, 60, 300)


class RestartingServer:
    """A server that is ended and started on the same port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.start()

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        command = [sys.executable, "-m", "paged", "serve", "demo", "--port", str(self.port)]
        command += ["--device", "cpu", "--num-threads", "1", "--allowed-hosts", PUBLIC_NAME]
        command += ["--drain-delay", str(DRAIN_DELAY_S)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self._is_ready():
            assert self._process.poll() is None, "a server has ended"
            time.sleep(0.1)

    def end(self) -> None:
        """End it as systemd and Kubernetes do."""
        self._process.terminate()
        status = self._process.wait(90)
        assert status == 0, f"exit code {status}"

    def kill(self) -> None:
        """End it in any case."""
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5):
                return True
        except OSError:
            return False


def body_of(number: int) -> dict[str, object]:
    """Return a request by its number."""
    length = LENGTHS[number % len(LENGTHS)]
    return {
        "prompt": "def add(a, b):",
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": number % 2 == 0,
    }


def text_of(response: httpx.Response) -> str:
    """Return the text of a whole response. An error, or a stream without its end, is an AssertionError."""
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    if response.headers["content-type"].startswith("application/json"):
        return str(response.json()["choices"][0]["text"])
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def ask(url: str, client: int, expected: dict[int, str], goes_on: Callable[[], bool]) -> list[float]:
    """Send requests, one after the other, and return how long each took.

    A client with an odd number opens a connection for each.
    """
    seconds = []
    headers = {"host": PUBLIC_NAME} | ({"connection": "close"} if client % 2 else {})
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        number = client
        while goes_on():
            body = body_of(number)
            begun = time.monotonic()
            text = text_of(http.post("/v1/completions", json=body))
            seconds.append(time.monotonic() - begun)
            assert text == expected[number % len(LENGTHS)], "an answer is another one"
            number += 1
    return seconds


def run(num_restarts: int, program: str) -> None:
    """Restart servers in turn beneath clients, and print what these noticed."""
    first, second, port, state_port = _free_ports(4)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        servers = [*pool.map(RestartingServer, (first, second))]
        ended = threading.Event()
        try:
            with haproxy(program, (first, second), port, state_port) as proxy:
                proxy.wait_until_up(0)
                proxy.wait_until_up(1)
                url = f"http://127.0.0.1:{port}"
                expected = {
                    i: text_of(httpx.post(f"{url}/v1/completions", json=body_of(i))) for i in range(3)
                }
                clients = [
                    pool.submit(ask, url, i, expected, lambda: not ended.is_set()) for i in range(NUM_CLIENTS)
                ]
                for i in range(num_restarts):
                    servers[i % 2].end()
                    servers[i % 2].start()
                    proxy.wait_until_up(i % 2)
                    for client in clients:
                        if client.done():
                            client.result()  # raises
                ended.set()
                seconds = [took for client in clients for took in client.result()]
        finally:
            ended.set()
            for server in servers:
                server.kill()
    print(
        f"{num_restarts} restarts, {len(seconds)} requests of {NUM_CLIENTS} clients without an error: "
        f"median {statistics.median(seconds):.3f} s, longest {max(seconds):.2f} s"
    )


def _free_ports(num: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def main() -> None:
    """Run as many restarts as are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--restarts", type=int, default=20)
    args = parser.parse_args()
    run(args.restarts, find_haproxy())


if __name__ == "__main__":
    main()
