"""The rooms keep their arrows: who may import whom, read from the source; nothing is run.

An import inside a function counts; one under `if TYPE_CHECKING` does not. `from elasticgang import x` counts as the
module `elasticgang.x` if there is one; otherwise as the root package, which knows every room. A string that names a
module of the package (a fork server's target, a preload list) counts as an import of it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "elasticgang"

ROOT = "elasticgang"

# Every arrow there is, and no other. A room stands above all that it knows.
KNOWS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "environment": (),
    "integers": (),
    "torch_private": (),
    "testing": (),
    "progress": (),
    "layout": ("errors", "integers"),
    "protocol": ("errors", "layout"),
    "process": ("errors",),
    "collectives": ("errors", "torch_private", "integers"),
    "comm": ("errors", "torch_private", "environment", "integers", "process", "collectives"),
    "gang": ("errors", "torch_private", "environment", "integers", "layout", "collectives", "comm"),
    "observe": ("errors", "protocol"),
    "simulation": ("errors", "layout", "protocol"),
    "session": ("errors", "protocol", "process"),
    "state": ("errors", "torch_private", "testing", "protocol", "process", "session"),
    "checkpoint": ("errors", "torch_private", "testing", "progress", "layout", "protocol", "process", "state"),
    "reshape": ("errors", "testing", "layout", "protocol", "state", "checkpoint"),
    "coordinator": ("errors", "testing", "layout", "protocol", "process", "session"),
    "watch": ("errors", "environment", "progress", "process", "observe"),
    "doctor": ("errors", "environment", "process", "session"),
    "agent": (
        *("errors", "environment", "testing", "progress", "protocol", "process", "session", "coordinator", "observe"),
    ),
    "member": (
        *(
            "errors",
            "environment",
            "integers",
            "testing",
            "layout",
            "protocol",
            "process",
            "session",
            "collectives",
            "comm",
            "gang",
        ),
    ),
    "train": (
        *("errors", "torch_private", "environment", "integers", "layout", "protocol", "collectives", "comm", "gang"),
        *("process", "member", "state", "checkpoint", "reshape"),
    ),
    "launch": (
        *("errors", "environment", "progress", "layout", "comm", "process", "session", "agent", "coordinator"),
        *("member", "observe", "train", "checkpoint", "watch", "doctor"),
    ),
}
# What one room may take from another alone, where the arrow is no more than that.
ONLY = {
    ("gang", "comm"): ("elasticgang.comm.torch_backend",),
    ("launch", "process"): (
        *("elasticgang.process.own_modules", "elasticgang.process.priority", "elasticgang.process.stop_signals"),
    ),
    ("checkpoint", "process"): (
        *("elasticgang.process.own_modules", "elasticgang.process.parent_death", "elasticgang.process.stop_signals"),
    ),
    ("session", "process"): ("elasticgang.process.lease",),
    ("state", "process"): ("elasticgang.process.memory_group",),
    ("train", "process"): ("elasticgang.process.stop_signals",),
    ("doctor", "process"): ("elasticgang.process.own_modules",),
    ("coordinator", "process"): ("elasticgang.process.parent_death", "elasticgang.process.stop_signals"),
}

PURE_ROOMS = ("layout", "protocol")
PURE_MODULES = (
    "elasticgang.agent.gpus",
    "elasticgang.comm.nccl_settings",
    "elasticgang.checkpoint.digest",
    "elasticgang.checkpoint.manifest",
    "elasticgang.checkpoint.names",
    "elasticgang.checkpoint.plan",
    "elasticgang.checkpoint.saved_objects",
    "elasticgang.collectives.backend_name",
    "elasticgang.comm.membership",
    "elasticgang.doctor.verdicts",
    "elasticgang.integers",
    "elasticgang.observe.change_report",
    "elasticgang.observe.event_names",
    "elasticgang.observe.pace",
    "elasticgang.observe.story",
    "elasticgang.progress",
    "elasticgang.session.tls_rotation",
    "elasticgang.train.partition",
    "elasticgang.train.prefetch",
    "elasticgang.train.summation_tree",
    "elasticgang.watch.history",
    "elasticgang.watch.summary",
    "elasticgang.watch.terminal",
)
IMPURE = ("torch", "torchft", "socket", "threading", "time", "random", "asyncio", "os", "subprocess")


def is_pure(module: str) -> bool:
    return module in PURE_MODULES or room_of(module) in PURE_ROOMS


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


parsed = functools.cache(ast.parse)  # of all tests of this file


def imports(module: str, source: str, *, is_package: bool, known: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Line and full name of each module that `source` imports."""
    for node in import_nodes(parsed(source)):
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


def named_modules(source: str, known: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Line and full name of each module of `known` that a string of `source` names, whole or as "module:function"."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]
            if re.fullmatch(r"elasticgang(\.\w+)+", module) and module in known:
                yield node.lineno, module


def may_know(module: str, target: str) -> bool:
    room, other = room_of(module), room_of(target)
    if ROOT in (room, other) or room == other:
        return room in (ROOT, other)
    only = ONLY.get((room, other))
    return other in KNOWS.get(room, ()) and (only is None or target in only)


def violations(sources: Mapping[str, str], packages: frozenset[str] = frozenset()) -> list[str]:
    """One line for each import that an arrow forbids. `packages` are those of `sources` that are an `__init__`."""
    found = []
    for module, source in sources.items():
        for line, target in imports(module, source, is_package=module in packages, known=sources):
            top = target.split(".")[0]
            where = f"{module}:{line} imports {target}"
            if top == ROOT:
                if not may_know(module, target):
                    found.append(f"{where}, but {room_of(module)} does not know {room_of(target)}")
                elif is_pure(module) and not is_pure(target) and room_of(target) != "errors":
                    found.append(f"{where}, which is not pure")
            elif is_pure(module) and top in IMPURE:
                found.append(f"{where}, but it is pure")
        if room_of(module) == ROOT:
            continue
        for line, target in named_modules(source, sources):
            if not may_know(module, target):
                found.append(f"{module}:{line} names {target}, but {room_of(module)} does not know {room_of(target)}")
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


# The agent's process and the coordinator's import no torch: it costs them 200 MB and two seconds.
NO_TORCH_ROOMS = ("layout", "protocol", "process", "observe", "watch", "session", "coordinator", "agent", "launch")


def ways_to_torch(sources: Mapping[str, str], packages: frozenset[str]) -> list[str]:
    """One line for each module of `NO_TORCH_ROOMS` that imports torch, itself or through others."""
    targets = {
        module: [target for _, target in imports(module, source, is_package=module in packages, known=sources)]
        for module, source in sources.items()
    }
    found = []
    for start in (module for module in sources if room_of(module) in NO_TORCH_ROOMS):
        ways = [[start]]
        seen = {start}
        while ways:
            way = ways.pop()
            for target in targets[way[-1]]:
                parents = [".".join(target.split(".")[:depth]) for depth in range(2, target.count(".") + 2)]
                for reached in dict.fromkeys((target, *parents)):
                    if reached.split(".")[0] in ("torch", "torchft"):
                        found.append(" -> ".join([*way, reached]))
                    elif reached in targets and reached not in seen and reached != ROOT:
                        seen.add(reached)
                        ways.append([*way, reached])
    return found


def test_no_module_of_the_agent_or_the_coordinator_imports_torch() -> None:
    assert ways_to_torch(*read_package()) == []


def test_a_way_to_torch_through_others_is_found() -> None:
    sources = {
        "elasticgang.agent.agent": "from elasticgang.comm.kinds import NAMES",
        "elasticgang.comm": "from elasticgang.comm import worker",
        "elasticgang.comm.kinds": "",
        "elasticgang.comm.worker": "def f():\n    import torch.distributed",
        "elasticgang.session.frames": "if TYPE_CHECKING:\n    import torch",
    }
    assert ways_to_torch(sources, frozenset({"elasticgang.comm"})) == [
        "elasticgang.agent.agent -> elasticgang.comm -> elasticgang.comm.worker -> torch.distributed"
    ]


PRIVATE = f"{ROOT}.torch_private"
SHARED_C10D = "torch._C._distributed_c10d"  # torch.distributed has its public names too, without types


def private_torch_names(source: str) -> Iterator[str]:
    """What `source` imports or reads of torch's and torchft's private names."""
    tree = parsed(source)
    modules = {"torch", "dist", "distributed_c10d", "c10d", "torchft", "reductions"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                full = f"{origin}.{alias.name}".lstrip(".")
                parts = (alias.name if origin == SHARED_C10D else full).split(".")
                if full.split(".")[0] in ("torch", "torchft") and any(re.match("_[^_]", part) for part in parts):
                    yield full
        elif (
            isinstance(node, ast.Attribute)
            and re.match("_[^_]", node.attr)
            and ast.unparse(node.value).split(".")[0] in modules
        ):
            yield ast.unparse(node)


def test_private_names_of_torch_stand_in_one_module() -> None:
    sources, _ = read_package()
    found = {module: list(private_torch_names(source)) for module, source in sources.items() if module != PRIVATE}
    assert {module: names for module, names in found.items() if names} == {}
    assert len(list(private_torch_names(sources[PRIVATE]))) > 3


def test_private_members_that_one_module_reads_are_read_nowhere_else() -> None:
    """But for those that objects of ours have under the same name."""
    sources, _ = read_package()

    def members(source: str) -> set[str]:
        nodes = (node for node in ast.walk(parsed(source)) if isinstance(node, ast.Attribute))
        return {node.attr for node in nodes if re.match("_[^_]", node.attr) and ast.unparse(node.value) != "self"}

    ours = {name for source in sources.values() for name in re.findall(r"self\.(_\w+)(?:: [^=\n]+)? =", source)}
    private = members(sources[PRIVATE]) - ours
    assert {"_device_types", "_local_tensor", "_allgather_base"} <= private
    found = {module: members(source) & private for module, source in sources.items() if module != PRIVATE}
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch._guards import TracingContext", "torch._guards.TracingContext"),
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._C._distributed_c10d import _register_process_group", "_register_process_group"),
        ("import torch\ntorch._foreach_div_([], 1)", "torch._foreach_div_"),
        (
            "from torch.distributed import distributed_c10d\nX = distributed_c10d._world.pg_map",
            "distributed_c10d._world",
        ),
    ],
)
def test_a_private_name_is_found(source: str, name: str) -> None:
    assert any(name in found for found in private_torch_names(source))


def test_no_circle_between_rooms() -> None:
    try:
        TopologicalSorter(KNOWS).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of rooms: {error.args[1]}")


def test_no_circle_between_modules() -> None:
    """Nor inside of a room."""
    sources, packages = read_package()
    graph = {
        module: {
            target
            for _, target in imports(module, source, is_package=module in packages, known=sources)
            if target in sources and target != module and module not in packages
        }
        for module, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of modules: {' -> '.join(error.args[1])}")


def test_every_arrow_is_used() -> None:
    """An arrow that nobody needs would let somebody take it."""
    sources, packages = read_package()
    used = {
        (room_of(module), room_of(target))
        for module, source in sources.items()
        for _, target in (
            *imports(module, source, is_package=module in packages, known=sources),
            *named_modules(source, sources),
        )
        if target in sources
    }
    assert [(room, other) for room, others in KNOWS.items() for other in others if (room, other) not in used] == []


def test_the_readme_lists_the_rooms_so_that_arrows_point_down() -> None:
    section = (PACKAGE.parent / "README.md").read_text().split("## Layout of the code")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    listed = [room for row in rows for room in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(KNOWS)
    place = {room: index for index, room in enumerate(listed)}
    assert [(room, other) for room, others in KNOWS.items() for other in others if place[room] > place[other]] == []


# HEALER-2
def test_healing_unpickles_nothing() -> None:
    sources = [path.read_text() for path in (PACKAGE / "state").glob("*.py")]
    assert len(sources) > 4
    assert [source for source in sources if re.search(r"import pickle|pickle\.|torch\.load|marshal", source)] == []


def test_the_rules_name_what_exists() -> None:
    """A rule for a module that was renamed away would hold for ever."""
    sources, _ = read_package()
    assert {*PURE_MODULES, *(target for targets in ONLY.values() for target in targets)} <= set(sources)
    assert {room_of(module) for module in sources} - {ROOT} == set(KNOWS)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("elasticgang.layout.grid", "import torch", "it is pure"),
        ("elasticgang.layout.grid", "import os.path", "it is pure"),
        ("elasticgang.protocol.next_record", "from time import monotonic", "it is pure"),
        ("elasticgang.protocol.commit", "def f():\n    import random", "it is pure"),
        ("elasticgang.train.partition", "from torch.distributed import ReduceOp", "it is pure"),
        ("elasticgang.train.partition", "from elasticgang.train import ddp", "not pure"),
        ("elasticgang.train.partition", "from . import ddp", "not pure"),
        (
            "elasticgang.protocol.next_record",
            "from elasticgang.process import framing",
            "protocol does not know process",
        ),
        ("elasticgang.layout.grid", "from elasticgang.protocol.commit import Attempt", "layout does not know protocol"),
        ("elasticgang.layout", "from ..gang import base", "layout does not know gang"),
        ("elasticgang.comm.mesh", "from elasticgang.protocol import commit", "comm does not know protocol"),
        ("elasticgang.comm.mesh", "from ..state import heal", "comm does not know state"),
        ("elasticgang.comm.mesh", "from elasticgang.gang import base", "comm does not know gang"),
        ("elasticgang.gang.base", "from elasticgang.comm.worker import Worker", "gang does not know comm"),
        ("elasticgang.gang.base", "import elasticgang.train.loop", "gang does not know train"),
        ("elasticgang.agent.agent", "from elasticgang import launch", "agent does not know launch"),
        ("elasticgang.agent.agent", "from elasticgang.member import drain", "agent does not know member"),
        ("elasticgang.member.manager", "from elasticgang.agent import job", "member does not know agent"),
        ("elasticgang.simulation.rank", "import elasticgang.member.manager", "simulation does not know member"),
        ("elasticgang.process.forkserver", "X = 'elasticgang.agent.agent:main'", "process does not know agent"),
        ("elasticgang.agent.rank_launch", "X = 'elasticgang.member.drain'", "agent does not know member"),
        ("elasticgang.train.loop", "if True:\n    import elasticgang.launch.cli", "train does not know launch"),
        ("elasticgang.comm.mesh", "import elasticgang as eg", "comm does not know elasticgang"),
        ("elasticgang.comm.mesh", "if TYPE_CHECKING:\n    pass\nelse:\n    import elasticgang.train", "not know train"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str, complaint: str) -> None:
    others = (
        "elasticgang.process.framing",
        "elasticgang.protocol.commit",
        "elasticgang.gang.base",
        "elasticgang.state.heal",
        "elasticgang.agent.agent",
        "elasticgang.agent.job",
        "elasticgang.member.drain",
        "elasticgang.train.ddp",
        "elasticgang.launch",
    )
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
        ("elasticgang.protocol.next_record", "from elasticgang.layout import plan\nfrom .commit import Attempt"),
        (
            "elasticgang.agent.agent",
            "import os, socket\nfrom elasticgang.process import framing\nfrom elasticgang import errors",
        ),
        ("elasticgang.comm.mesh", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import elasticgang.train"),
        ("elasticgang.layout.grid", "import typing\nif typing.TYPE_CHECKING:\n    import torch"),
        ("elasticgang.gang.base", "from elasticgang.comm.torch_backend import register"),
        ("elasticgang.launch.cli", "import elasticgang.agent.agent"),
        ("elasticgang.launch.run", "X = 'elasticgang.member.rank_main:main'"),
    ],
)
def test_an_allowed_import_is_not_found(module: str, source: str) -> None:
    others = (
        "elasticgang.errors",
        "elasticgang.layout",
        "elasticgang.layout.planner",
        "elasticgang.protocol.commit",
        "elasticgang.process.framing",
        "elasticgang.comm.torch_backend",
        "elasticgang.member.rank_main",
        "elasticgang.agent.agent",
    )
    assert violations({**dict.fromkeys(others, ""), module: source}) == []
