"""Code that is moved does what it did, and what was not called stays where it is."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

from elasticgang.process import code_layout

NAME = "tests.unit.moved_module"
SOURCE = """
    import functools
    from dataclasses import dataclass

    def plain(a, b=2, *, c=3):
        return a, b, c

    def untouched():
        return "untouched"

    def outer(n):
        def inner(m):
            return [n * each for each in range(m)]
        return inner

    three_times = outer(3)
    TABLE = {"key": {"of": lambda value: -value}}

    def decorated(function):
        @functools.wraps(function)
        def call(*args):
            return "decorated", function(*args)
        return call

    @functools.cache
    def cached(n):
        return n + 1

    @decorated
    def within(a):
        return a

    def generate(n):
        yield from (each for each in range(n))

    async def awaited(n):
        return n

    @dataclass(order=True)
    class Value:
        number: int

        @property
        def half(self):
            return self.number / 2

        @functools.cached_property
        def third(self):
            return self.number / 3

        @classmethod
        def of(cls, number):
            return cls(number)

        @staticmethod
        def nothing():
            return None

        class Nested:
            def method(self):
                return __class__.__name__
"""


def result_of(coroutine: Coroutine[Any, Any, int]) -> int:
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return int(ended.value.value)


CALLS: dict[str, Callable[[Any], object]] = {
    "plain": lambda module: (module.plain(1), module.plain(1, c=4)),
    "three_times": lambda module: module.three_times(3),
    "outer": lambda module: module.outer(5)(2),
    "within": lambda module: module.within(1),
    "generate": lambda module: list(module.generate(3)),
    "awaited": lambda module: result_of(module.awaited(7)),
    "value": lambda module: (module.Value(3).half, module.Value.of(4), module.Value.nothing()),
    "repr and order": lambda module: (repr(module.Value(1)), module.Value(1) < module.Value(2)),
    "cached": lambda module: (module.Value(9).third, module.cached(4)),
    "nested": lambda module: module.Value.Nested().method(),
    "table": lambda module: module.TABLE["key"]["of"](5),
}


@pytest.fixture
def module() -> Iterator[Any]:
    made = sys.modules[NAME] = ModuleType(NAME)
    exec(compile(textwrap.dedent(SOURCE), "moved_module.py", "exec"), vars(made))
    yield made
    del sys.modules[NAME]


def code_of(module: Any) -> dict[str, Any]:
    value, method = module.Value, module.Value.Nested.method
    functions = {name: each for name, each in vars(module).items() if isinstance(each, FunctionType)}
    functions |= {f"Value.{name}": each for name, each in vars(value).items() if isinstance(each, FunctionType)}
    functions |= {"half": value.half.fget, "of": value.of.__func__, "nothing": value.nothing, "method": method}
    functions |= {"third": vars(value)["third"].func, "cached": inspect.unwrap(module.cached)}
    functions |= {"lambda": module.TABLE["key"]["of"], "wrapped": inspect.unwrap(module.within)}
    return {name: function.__code__ for name, function in functions.items()}


def test_functions_of_which_the_code_was_moved_do_what_they_did(module: Any) -> None:
    with code_layout.recording() as called:
        before = {name: call(module) for name, call in CALLS.items()}
    code = code_of(module)
    code_layout.move(code_layout.plan(called))
    moved = code_of(module)
    same = {name for name in code if moved[name] is code[name]}
    assert (
        same & {"plain", "outer", "three_times", "within", "generate", "awaited", "wrapped", "lambda", "cached"}
        == set()
    )
    assert (
        same & {"Value.__init__", "Value.__repr__", "Value.__lt__", "half", "third", "of", "nothing", "method"} == set()
    )
    assert {"untouched", "Value.__eq__"} <= same  # they were not called
    assert moved == code  # but for their places
    assert {name: call(module) for name, call in CALLS.items()} == before


def test_code_within_code_is_moved_with_it(module: Any) -> None:
    """Each call of `outer` makes a function of the code among its constants."""
    with code_layout.recording() as called:
        module.outer(1)(1)
    code = module.outer(1).__code__
    code_layout.move(code_layout.plan(called))
    assert module.outer(1).__code__ is not code
    assert module.outer(1).__code__ is module.outer(2).__code__ is module.three_times.__code__


def test_equal_code_of_two_files_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that differs in nothing but its file is equal, and a traceback names the file."""
    modules = [ModuleType(f"{NAME}_{each}") for each in "ab"]
    for each in modules:
        exec(compile("def f():\n    return 1\n", f"{each.__name__}.py", "exec"), vars(each))
        monkeypatch.setitem(sys.modules, each.__name__, each)
    codes = [each.f.__code__ for each in modules]
    assert codes[0] == codes[1]
    with code_layout.recording() as called:
        assert [each.f() for each in modules] == [1, 1]
    code_layout.move(code_layout.plan(called))
    moved = [each.f.__code__ for each in modules]
    assert [code.co_filename for code in moved] == [f"{each.__name__}.py" for each in modules]
    assert not any(after is before for after, before in zip(moved, codes, strict=True))


def test_a_profiler_goes_on_after_a_recording_also_after_one_that_fails() -> None:
    noted: list[str] = []

    def note(frame: Any, event: str, arg: Any) -> None:
        noted.append(event)

    sys.setprofile(note)
    try:
        with pytest.raises(ValueError, match="it fails"), code_layout.recording():
            raise ValueError("it fails")
        found = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert found is note


def test_nothing_is_moved_without_a_call(module: Any) -> None:
    with code_layout.recording() as called:
        pass
    before = code_of(module)
    code_layout.move(code_layout.plan(called))
    assert [name for name, code in code_of(module).items() if code is not before[name]] == []
