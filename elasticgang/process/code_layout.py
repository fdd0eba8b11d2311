"""Moves the code of functions that a process calls side by side, so that its forks copy fewer pages.

CPython counts the references to an object in the object: each call writes to the function's code, and a fork copies
the page. The code objects of a module lie among its constants and docstrings, about one to a page.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any


@dataclass
class Called:
    """Code that was called, by id, in the order of the first calls, and the names of the modules that it is from.

    By id, because equal code may be from two files: tracebacks name the file."""

    codes: dict[int, CodeType] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)


@contextlib.contextmanager
def recording() -> Iterator[Called]:
    """Record what this thread calls."""
    called = Called()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            called.codes[id(frame.f_code)] = frame.f_code
            called.modules.add(frame.f_globals.get("__name__", ""))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)


@dataclass(frozen=True)
class Plan:
    """Which functions get a copy of their code, in this order."""

    functions: list[list[FunctionType]]
    called: dict[int, CodeType]


def plan(called: Called) -> Plan:
    """Find the functions of which the code was called. Those that no module, class or other function refers to keep
    their code."""
    of: dict[int, list[FunctionType]] = {}
    for function in _functions(called.modules):
        of.setdefault(id(function.__code__), []).append(function)
    return Plan([of[code] for code in called.codes if code in of], called.codes)


def move(plan: Plan) -> object:
    """Give each function its copy. The copies lie side by side if no blocks are free in between (`free_blocks.py`).
    Returns what the caller keeps: the former code, which would leave free blocks between objects that forks share."""
    copies: dict[int, CodeType] = {}
    for functions in plan.functions:
        copy = _copy(functions[0].__code__, plan.called, copies)
        for function in functions:
            function.__code__ = copy
    return plan, copies


def _copy(code: CodeType, called: Container[int], copies: dict[int, CodeType]) -> CodeType:
    """With copies of the code within it that was called: of lambdas, comprehensions and closures. `copies`: by the id
    of the former code, which `called` or a caller keeps."""
    if id(code) not in copies:
        consts = tuple(
            _copy(const, called, copies) if isinstance(const, CodeType) and id(const) in called else const
            for const in code.co_consts
        )
        copies[id(code)] = code.replace(co_consts=consts)
    return copies[id(code)]


def _functions(modules: Container[str]) -> Iterator[FunctionType]:
    """Those of the modules and of their classes, and those within these. It asks `issubclass`, because `isinstance`
    looks an attribute up in each type, and so drives others out of Python's cache (FORK-6)."""
    seen: set[int] = set()
    found: list[Any] = [vars(module) for name, module in sys.modules.items() if name in modules]
    while found:
        each = found.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kind = type(each)
        if kind is dict:
            found += each.values()
        elif issubclass(kind, type):
            names = vars(each)
            if names.get("__module__") in modules:
                found += names.values()
        elif kind is staticmethod or kind is classmethod:
            found.append(each.__func__)
        elif kind is property:
            found += (each.fget, each.fset, each.fdel)
        elif kind is functools.cached_property:
            found.append(each.func)
        elif kind is functools._lru_cache_wrapper:
            found.append(each.__wrapped__)
        elif kind is FunctionType:
            yield each
            for cell in each.__closure__ or ():
                with contextlib.suppress(ValueError):  # it is empty
                    found.append(cell.cell_contents)
