"""Memory files (memfd) that a rank shares with its agent and its peers, in the children that its script forks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container

_PREFIX, _SUFFIX = "/memfd:", " (deleted)"  # of a descriptor's link


def detach(names: Container[str]) -> None:
    """Let no descriptor of this process refer to a memory file of these names: each refers to /dev/null instead. Those
    that a mapping of Python's has are among them, and cannot be closed: the mapping would later close whatever has the
    number then. The mappings stay. Takes no lock: a forked child may call it, of a process with threads."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the listing itself
                link = os.readlink(f"/proc/self/fd/{name}")
                if link.startswith(_PREFIX) and link[len(_PREFIX) :].removesuffix(_SUFFIX) in names:
                    os.dup2(null, int(name), inheritable=False)
    finally:
        os.close(null)
