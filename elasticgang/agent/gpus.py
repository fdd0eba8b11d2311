"""The CUDA devices of this host, as the agent sees them, which must not start CUDA."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NODE = re.compile(r"nvidia\d+", re.ASCII)


def visible_devices(environ: Mapping[str, str], nodes: Iterable[str]) -> tuple[int, ...]:
    """The indices of the devices that CUDA shows to a process with this environment. `nodes`: the names in /dev. As
    CUDA does, it takes the entries of CUDA_VISIBLE_DEVICES up to the first one that is empty or negative."""
    if _VISIBLE in environ:
        entries = (entry.strip() for entry in environ[_VISIBLE].split(","))
        num = len(list(itertools.takewhile(lambda entry: entry and not entry.startswith("-"), entries)))
    else:
        num = sum(_NODE.fullmatch(node) is not None for node in nodes)
    return tuple(range(num))
