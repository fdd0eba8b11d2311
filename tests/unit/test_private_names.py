"""No test reaches into what is private to the package: it calls what is public, or looks from outside.

Private are the names with a leading underscore that a module of the package defines. A test that needs a moment in the
runtime takes `elasticgang.testing.fail_at`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "elasticgang"

PRIVATE = re.compile(r"_[A-Za-z]\w*")
OWN = ("self", "cls", "super()")
# A mutant replaces a rule, wherever it stands.
MUTANTS = (
    *("unit/mutants.py", "unit/coordinator_mutants.py", "unit/agent_mutants.py", "unit/record_mutants.py"),
    *("unit/member_mutants.py", "unit/slot_mutants.py", "unit/comparison_mutants.py"),
)
# Names of the package that are also others': torch's, namedtuples', argparse's, Megatron-LM's.
OTHERS = {
    *("_allgather_base", "_base", "_device_types", "_get_backend", "_has_hooks", "_pg", "_reduce_scatter_base"),
    *("_alltoall", "_devices", "_flatten", "_source_rank", "_timeout", "_world"),
    *("_T", "_actions", "_exit", "_gen_rank_enum", "_replace"),
}


def defined_in(source: str) -> Iterator[str]:
    """The private names that a module defines: functions, classes, constants and attributes of `self`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def reached_in(source: str, private: set[str]) -> set[str]:
    """The names of `private` that a test takes from an object, patches, imports, or uses in a program as text."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in OWN:
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elasticgang"):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"(?<!self)\.(_[A-Za-z]\w*)", node.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("getattr", "setattr", "delattr")):
            found.update(arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))
    return found & private


def private_names() -> set[str]:
    names = {name for path in PACKAGE.rglob("*.py") for name in defined_in(path.read_text())}
    return {name for name in names if PRIVATE.fullmatch(name)} - OTHERS


def test_no_test_reaches_into_private_names() -> None:
    private = private_names()
    assert len(private) > 300
    paths = (path for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__))
    found = {str(path.relative_to(TESTS)): reached_in(path.read_text(), private) for path in paths}
    assert {name: names for name, names in found.items() if names and name not in MUTANTS} == {}


@pytest.mark.parametrize(
    "source",
    [
        "manager._link.send('request')",
        "monkeypatch.setattr(module, '_link', 1)",
        "from elasticgang.member.manager import _link",
        "BODY = '''if manager._link: pass'''",
        "def f(self): return self.manager._link",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert reached_in(source, {"_link"}) == {"_link"}


@pytest.mark.parametrize("source", ["self._link = 1", "tensor._version", "link = '_of_links'", "'self._link'"])
def test_what_is_not_private_to_the_package_is_not_found(source: str) -> None:
    assert reached_in(source, {"_link"}) == set()
