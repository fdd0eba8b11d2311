"""Where a rank stops when its generation ends: in which collectives, and at which line of its script.

If a collective times out, the ranks that stop in different ones have mostly run different code.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from elasticgang.collectives.description import Description
from elasticgang.layout import RUNTIME_GANGS
from elasticgang.process.status_page import CommBlock, key_of

_MAX_NAMED = 3
_CONTROL, *_REDUCTIONS = RUNTIME_GANGS
_RUNTIME_CODE = tuple(f"{folder}/" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
_STDLIB = f"{sysconfig.get_path('stdlib')}/"
_PACKAGES = ("/site-packages/", "/dist-packages/")  # inside the standard library's folder


def stopped_at(block: CommBlock, under_way: Iterable[tuple[str, Description]]) -> str:
    """In words. `under_way`: collectives, each with the name of its process group, as far as they are known. Any thread
    may call it."""
    described: dict[int, list[str]] = {}
    for group, description in under_way:
        described.setdefault(key_of(group), []).append(str(description))
    names, found = block.last_names(), []
    for stamps in block.last_groups():
        gang, descriptions = names.get(stamps.group, "?"), described.get(stamps.group, [])
        if stamps.submitted > stamps.completed:
            found.append(_name(gang, stamps.completed + 1, descriptions))
        elif stamps.messages_submitted > stamps.messages_completed:
            found.append(f"{descriptions[0] if descriptions else 'a message'} of gang {gang}")
    found = list(dict.fromkeys(found))  # a sum over several hosts counts twice
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    what = f"in {', '.join(found[:_MAX_NAMED])}{more}" if found else "in no collective"
    line = script_line()
    return f"{what}, at {line}" if line else what


def _name(gang: str, number: int, described: list[str]) -> str:
    if gang == _CONTROL:
        return "a sum over all ranks (a vote, or totals)"
    what = described[0] if described else "a collective"
    if gang in _REDUCTIONS:
        return f"the reduction of gradients ({what}, number {number})"
    return f"{what} (number {number} of gang {gang})"


def script_line(thread: threading.Thread | None = None) -> str:
    """The innermost line of `thread`, by default the main thread, that is neither of this package, torch nor the
    standard library. Empty: none is."""
    frame = sys._current_frames().get((thread or threading.main_thread()).ident or 0)
    while frame is not None:
        file = frame.f_code.co_filename
        is_stdlib = file.startswith(_STDLIB) and not any(part in file for part in _PACKAGES)
        if not (file.startswith((*_RUNTIME_CODE, "<")) or is_stdlib):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
