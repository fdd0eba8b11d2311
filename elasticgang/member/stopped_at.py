"""Where a rank stops when its generation ends: in which collectives, and at which line of its script.

If a collective times out, the ranks that stop in different ones have mostly run different code.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from elasticgang.collectives.description import Description
from elasticgang.collectives.table import TABLE
from elasticgang.layout import RUNTIME_GANGS
from elasticgang.process.status_page import MAX_NAME_BYTES, CommBlock, key_of
from elasticgang.protocol.shortened import shortened

_MAX_NAMED = 3
_KINDS = False, True
_MAX_FILE_NAME = 255  # what a file can have; code that `compile` makes may name any
_CONTROL, *_REDUCTIONS = RUNTIME_GANGS
_RUNTIME_CODE = tuple(f"{folder}/" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
_STDLIB = f"{sysconfig.get_path('stdlib')}/"
_PACKAGES = ("/site-packages/", "/dist-packages/")  # inside the standard library's folder


def stopped_at(
    block: CommBlock, under_way: Iterable[tuple[str, Description]], healing: tuple[int, int] = (0, 0)
) -> str:
    """In words. `under_way`: collectives, each with the name of its process group, as far as they are known. `healing`:
    as `StatusPage` has it. Any thread may call it."""
    described: dict[str, list[Description]] = {}
    for group, description in under_way:
        described.setdefault(group, []).append(description)
    groups = {key_of(group): group for group in described}
    names, found = block.last_names(), []
    for stamps in block.last_groups():
        gang, of_group = names.get(stamps.group, "?"), described.get(groups.pop(stamps.group, ""), [])
        collectives, messages = ([each for each in of_group if TABLE[each.call].is_message is kind] for kind in _KINDS)
        if (oldest := _oldest(stamps.submitted, stamps.completed, collectives)) is not None:
            found.append(_name(gang, *oldest))
        if (oldest := _oldest(stamps.messages_submitted, stamps.messages_completed, messages)) is not None:
            found.append(f"{oldest[1] or 'a message'} of gang {gang}")
    for group in groups.values():  # which the block does not count
        of_group = [each for each in described[group] if not each.has_ended]
        found += [f"{each} of gang {group[:MAX_NAME_BYTES]}" for each in of_group[:1]]
    found = list(dict.fromkeys(found))  # a sum over several hosts counts twice
    received, total = healing
    elsewhere = f"while it healed ({received:,} of {total:,} bytes)" if received < total else "in no collective"
    what = f"in {shortened(found, _MAX_NAMED)}" if found else elsewhere
    line = script_line()
    return f"{what}, at {line}" if line else what


def _oldest(submitted: int, completed: int, described: Sequence[Description]) -> tuple[int, str] | None:
    """The number of the oldest one that has not ended, and what it is, as far as that is known. `described`: the newest
    of those submitted; the end of some may be counted already, and not be known to the rank yet."""
    if submitted <= completed:
        return None
    last = described[completed - submitted :]
    for number, description in enumerate(last, submitted - len(last) + 1):
        if not description.has_ended:
            return number, str(description)
    return None if last else (completed + 1, "")


def _name(gang: str, number: int, what: str) -> str:
    if gang == _CONTROL:
        return "a sum over all ranks (a vote, or totals)"
    what = what or "a collective"
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
            return f"{Path(file).name[-_MAX_FILE_NAME:]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
