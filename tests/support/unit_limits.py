"""Run a command under the system calls and address families that a unit of systemd allows.

    python -m tests.support.unit_limits deploy/paged.service COMMAND ARGUMENTS

systemd itself does this to a service; here it needs neither systemd as the first process nor root.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

CALLS = {"x86_64": 41, "aarch64": 198}  # the number of the system call
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # SECCOMP_RET_...
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # instructions of BPF: a word, a comparison, an answer


def setting(unit: Path, name: str) -> list[str]:
    """Return the words of a setting of a unit."""
    found = re.search(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)
    return found[1].split() if found else []


def restrict_families(names: list[str]) -> None:
    """Refuse sockets of other families from now on, as RestrictAddressFamilies does."""
    families = [int(getattr(socket, name)) for name in names]
    last = len(families)
    program = [
        (_LOAD, 0, 0, 0),  # the number of the system call
        (_EQUAL, 0, last + 2, CALLS[platform.machine()]),  # of others nothing is asked
        (_LOAD, 0, 0, 16),  # its first argument
        *((_EQUAL, last - i, 0, family) for i, family in enumerate(families)),
        (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    whole = Program(len(program), ctypes.addressof(code))
    if libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(whole), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refuses the filter")


def restrict_calls(groups: list[str]) -> None:
    """Refuse other system calls, as SystemCallFilter does, if systemd-analyze and libseccomp are here."""
    path = ctypes.util.find_library("seccomp")
    if path is None or shutil.which("systemd-analyze") is None:
        return
    library = ctypes.CDLL(path)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(_ERRNO | errno.EPERM))
    for name in calls_of(groups):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            library.seccomp_rule_add(context, _ALLOW, number, 0)
    if library.seccomp_load(context):
        raise OSError("libseccomp refuses the filter")


def calls_of(groups: list[str]) -> set[str]:
    """Return the system calls of groups such as @system-service."""
    calls = set()
    for group in groups:
        if not group.startswith("@"):
            calls.add(group)
            continue
        listed = subprocess.run(
            ["systemd-analyze", "--no-pager", "syscall-filter", group],
            capture_output=True,
            text=True,
            check=True,
        )
        words = re.findall(r"^ +([@\w-]+)$", listed.stdout, re.MULTILINE)
        calls |= calls_of(words)
    return calls


if __name__ == "__main__":
    of_unit = Path(sys.argv[1])
    restrict_calls(setting(of_unit, "SystemCallFilter"))
    restrict_families(setting(of_unit, "RestrictAddressFamilies"))
    os.execvp(sys.argv[2], sys.argv[2:])
