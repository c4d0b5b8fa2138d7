"""Telling systemd, which started the server with Type=notify, that it is ready, or that it ends."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

NOTIFY_READY = b"READY=1"
NOTIFY_STOPPING = b"STOPPING=1"


def notify(state: bytes) -> None:
    """Send a state to systemd, if that started this process and waits for it; see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # of the abstract namespace
        address = f"\0{address[1:]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
        sender.sendto(state, address)
