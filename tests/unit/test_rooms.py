"""The rooms keep the arrows of the design (section 9): who may import whom, read from the source, nothing is run.

An import inside a function counts; one under `if TYPE_CHECKING` does not. `from elasticgang import x` counts as the
module `elasticgang.x` if there is one; otherwise as the root package, which knows every room.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "elasticgang"

ROOT = "elasticgang"
ROOMS = ("errors", "environment", "layout", "gang", "comm", "quorum", "state", "train", "launch", "observe", "testing")

DOES_NOT_KNOW: dict[str, tuple[str, ...]] = {
    "errors": (ROOT, *ROOMS),
    "environment": (ROOT, *ROOMS),
    "layout": (ROOT, *(room for room in ROOMS if room != "errors")),
    "gang": (ROOT, "quorum", "state", "train", "launch"),
    "comm": (ROOT, "quorum", "state", "train", "launch"),
    "quorum": (ROOT, "train", "launch"),
    "state": (ROOT, "train", "launch"),
    "train": (ROOT, "launch"),
}

PURE_ROOM = "elasticgang.layout"
PURE_MODULES = (
    "elasticgang.quorum.commit",
    "elasticgang.quorum.decide",
    "elasticgang.quorum.ledger",
    "elasticgang.quorum.progress",
    "elasticgang.quorum.record",
    "elasticgang.quorum.happenings",
    "elasticgang.quorum.lifecycle",
    "elasticgang.quorum.restarts",
    "elasticgang.quorum.roster",
    "elasticgang.quorum.settle",
    "elasticgang.train.slots",
)
IMPURE = ("torch", "torchft", "socket", "threading", "time", "random", "asyncio", "os", "subprocess")


def is_pure(module: str) -> bool:
    return module in PURE_MODULES or module == PURE_ROOM or module.startswith(PURE_ROOM + ".")


def room_of(module: str) -> str:
    """`elasticgang.comm.mesh` is in `comm`; the root package and its `__main__` are in none, and have its name."""
    parts = module.split(".")
    return ROOT if module in (ROOT, f"{ROOT}.__main__") else parts[1]


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def import_nodes(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and is_type_checking(child.test):
            yield from import_nodes(ast.Module(body=child.orelse, type_ignores=[]))
        else:
            yield from import_nodes(child)


def imports(module: str, source: str, *, is_package: bool, known: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Line and full name of each module that `source` imports."""
    for node in import_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
            continue
        origin = node.module or ""
        if node.level:
            parts = module.split(".")
            up = node.level - is_package
            origin = ".".join([*parts[: len(parts) - up], *filter(None, [node.module])])
        for alias in node.names:
            submodule = f"{origin}.{alias.name}"
            yield node.lineno, submodule if submodule in known else origin


def violations(sources: Mapping[str, str], packages: frozenset[str] = frozenset()) -> list[str]:
    """One line for each import that an arrow forbids. `packages` are those of `sources` that are an `__init__`."""
    found = []
    for module, source in sources.items():
        for line, target in imports(module, source, is_package=module in packages, known=sources):
            top = target.split(".")[0]
            where = f"{module}:{line} imports {target}"
            if top == ROOT:
                if room_of(target) in DOES_NOT_KNOW.get(room_of(module), ()) and room_of(target) != room_of(module):
                    found.append(f"{where}, but {room_of(module)} does not know {room_of(target)}")
                elif is_pure(module) and not is_pure(target) and room_of(target) != "errors":
                    found.append(f"{where}, which is not pure")
            elif is_pure(module) and top in IMPURE:
                found.append(f"{where}, but it is pure")
    return found


def read_package() -> tuple[dict[str, str], frozenset[str]]:
    sources: dict[str, str] = {}
    packages = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
            packages.add(".".join(parts))
        sources[".".join(parts)] = path.read_text(encoding="utf-8")
    return sources, frozenset(packages)


def test_the_package_keeps_its_arrows() -> None:
    assert violations(*read_package()) == []


def test_the_rules_name_what_exists() -> None:
    """A rule for a module that was renamed away would hold for ever."""
    sources, _ = read_package()
    assert set(PURE_MODULES) | {PURE_ROOM} <= set(sources)
    assert {room_of(module) for module in sources} - {ROOT} == set(ROOMS)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("elasticgang.layout.grid", "import torch", "it is pure"),
        ("elasticgang.layout.grid", "import os.path", "it is pure"),
        ("elasticgang.quorum.decide", "from time import monotonic", "it is pure"),
        ("elasticgang.quorum.commit", "def f():\n    import random", "it is pure"),
        ("elasticgang.train.slots", "from torch.distributed import ReduceOp", "it is pure"),
        ("elasticgang.quorum.decide", "from elasticgang.quorum import wire", "not pure"),
        ("elasticgang.quorum.decide", "from . import wire", "not pure"),
        ("elasticgang.layout.grid", "from elasticgang.quorum.commit import Attempt", "layout does not know quorum"),
        ("elasticgang.layout", "from ..gang import base", "layout does not know gang"),
        ("elasticgang.comm.mesh", "from elasticgang.quorum import wire", "comm does not know quorum"),
        ("elasticgang.comm.mesh", "from ..state import heal", "comm does not know state"),
        ("elasticgang.gang.base", "import elasticgang.train.loop", "gang does not know train"),
        ("elasticgang.quorum.agent", "from elasticgang import launch", "quorum does not know launch"),
        ("elasticgang.state.heal", "from elasticgang.train.loop import Step", "state does not know train"),
        ("elasticgang.train.loop", "if True:\n    import elasticgang.launch.cli", "train does not know launch"),
        ("elasticgang.comm.mesh", "import elasticgang as eg", "comm does not know elasticgang"),
        ("elasticgang.comm.mesh", "if TYPE_CHECKING:\n    pass\nelse:\n    import elasticgang.train", "not know train"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str, complaint: str) -> None:
    others = ("elasticgang.quorum.wire", "elasticgang.gang.base", "elasticgang.state.heal", "elasticgang.launch")
    tree = {**dict.fromkeys(others, ""), module: source}
    (found,) = violations(tree, packages=frozenset({"elasticgang.layout", "elasticgang.launch"}))
    assert complaint in found
    assert found.startswith(f"{module}:")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "elasticgang.layout.grid",
            "import itertools\nfrom elasticgang.errors import LayoutError\nfrom . import planner",
        ),
        ("elasticgang.quorum.decide", "from elasticgang.layout import plan\nfrom .commit import Attempt"),
        (
            "elasticgang.quorum.agent",
            "import os, socket\nfrom elasticgang.comm import mesh\nfrom elasticgang import errors",
        ),
        ("elasticgang.comm.mesh", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import elasticgang.train"),
        ("elasticgang.layout.grid", "import typing\nif typing.TYPE_CHECKING:\n    import torch"),
        ("elasticgang.launch.cli", "import elasticgang.train.loop\nimport elasticgang as eg"),
    ],
)
def test_an_allowed_import_is_not_found(module: str, source: str) -> None:
    others = ("elasticgang.errors", "elasticgang.layout", "elasticgang.layout.planner", "elasticgang.quorum.commit")
    assert violations({**dict.fromkeys(others, ""), module: source}) == []
