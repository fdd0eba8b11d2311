"""Whether what this container runs does its part: exit code 0, or 1 and a line that says why not.

A coordinator does when it accepts connections. An agent does when its coordinator's host answers; a refused connection
is an answer, since a job goes on while its coordinator is started again. (An agent that ends, ends its container.)
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 2.0
PORT = "29400"


def main(argv: Sequence[str]) -> int:
    """`argv`: nothing, or the pid of the process to look at instead of the container's first."""
    command = Path("/proc", argv[0] if argv else "1", "cmdline").read_bytes().decode().split("\0")
    is_coordinator = "coordinator" in command and "run" not in command
    if is_coordinator:
        host, port = option(command, "--host") or "127.0.0.1", option(command, "--port") or PORT
    else:
        address = option(command, "--coordinator") or option(command, "--rdzv-endpoint")
        if address is None:
            return 0  # its coordinator is its own, and ends with it
        host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S).close()
    except ConnectionRefusedError as refused:
        if is_coordinator:
            print(f"nobody listens on {host}:{port}: {refused}")
            return 1
    except OSError as silent:
        print(f"{host}:{port} does not answer: {silent}")
        return 1
    return 0


def option(command: Sequence[str], name: str) -> str | None:
    """The value of `name` in `command`, written in either way."""
    for place, word in enumerate(command):
        if word == name and place + 1 < len(command):
            return command[place + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
