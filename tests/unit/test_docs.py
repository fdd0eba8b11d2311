"""The documents say what the code says: links, rules, files, and every timeout with its value."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticgang.launch.cli import make_parser

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
FILE = re.compile(r"`((?:elasticgang|tests|scripts|docker)/[\w./-]+)`")
CONSTANT = re.compile(r"`(_?[A-Z][A-Z_]+)` ([\d.]+)(?: (s|ms))?")
OPTION = re.compile(r"`--([a-z-]+)` ([\d.]+) s")
DESIGN = (REPOSITORY / "docs" / "design.md").read_text()


def timeouts() -> Iterator[tuple[str, list[Path]]]:
    """Each row of the table of timeouts, and the files that it names."""
    table = DESIGN.split("## Timeouts and intervals")[1]
    for row in re.findall(r"^\|(?! what|---)(.+)\|$", table, re.MULTILINE):
        yield row, [REPOSITORY / name for name in FILE.findall(row)]


def constants(path: Path) -> dict[str, float]:
    """The numbers that a module names."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        ):
            found[node.targets[0].id] = float(node.value.value) if isinstance(node.value.value, int | float) else 0.0
    return found


def in_seconds(value: float, unit: str) -> float:
    return value / 1000 if unit == "ms" else value


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_named_files_exist(document: Path) -> None:
    text = document.read_text()
    links = [target for target, _ in LINK.findall(text) if not target.startswith("http")]
    missing = [target for target in links if not (document.parent / target).exists()]
    missing += [name for name in FILE.findall(text) if not (REPOSITORY / name).exists()]
    assert missing == []


def test_the_table_of_timeouts_has_the_values_of_the_code() -> None:
    rows = list(timeouts())
    assert len(rows) > 20
    wrong = []
    for row, files in rows:
        named = {name: value for path in files for name, value in constants(path).items()}
        for name, value, unit in CONSTANT.findall(row):
            unit_of_name = "ms" if name.endswith("_MS") else "s"
            if name not in named or in_seconds(named[name], unit_of_name) != in_seconds(float(value), unit or "s"):
                wrong.append(f"{name} is {named.get(name)}, not {value} {unit}")
    assert wrong == []


def test_the_table_of_timeouts_has_the_defaults_of_the_options() -> None:
    commands = next(each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction))
    defaults = {action.dest: action.default for action in commands.choices["run"]._actions}
    said = [pair for row, _ in timeouts() for pair in OPTION.findall(row)]
    assert len(said) >= 4
    for option, value in said:
        assert defaults[option.replace("-", "_")] == float(value), option


def test_the_inequalities_between_timeouts_hold() -> None:
    named = {name: value for _, files in timeouts() for path in files for name, value in constants(path).items()}
    assert named["_COUNT_INTERVAL_S"] * 2 < named["GONE_S"] < named["LEASE_S"]
    assert named["_REACH_TIMEOUT_S"] + named["_PROBE_TIMEOUT_S"] < named["LEASE_S"]
    assert named["JOIN_TIMEOUT_MS"] >= named["_FLOOR_MS"]
    assert named["HEARTBEAT_TIMEOUT_MS"] >= 4 * 1000 * named["_BEAT_INTERVAL_S"]
    assert named["HOLD_TIMEOUT_S"] < named["HEAL_TIMEOUT_S"]
    assert named["PULSE_MS"] * 10 <= 1000 * 1.0  # several pulses in the least time in which a rank counts as hung


def test_every_rule_of_the_design_that_the_code_names_is_in_its_table() -> None:
    rules = set(re.findall(r"^\| (R\d+) ", DESIGN, re.MULTILINE))
    assert rules == {f"R{number}" for number in range(1, 11)}
    sources = [path.read_text() for path in (REPOSITORY / "elasticgang").rglob("*.py")]
    assert {rule for text in sources for rule in re.findall(r"\b(R\d+)\b(?!')", text)} <= rules


def test_each_failure_of_the_readme_is_one_short_line() -> None:
    table = DOCUMENTS[0].read_text().split("| what fails | what happens |")[1].split("\n\n")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ")]
    assert len(rows) > 15
    assert [row for row in rows if len(row.replace("|", " ").split()) > 25] == []
