"""The documents say what the code says: links, rules, files, and every timeout with its value.

`tests/integration` looks at the commands and the reference; it and `tests/chaos` run every Python block.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticgang.launch.arguments import make_parser
from elasticgang.protocol.coordinator_messages import JOB_TIMEOUTS
from tests.documents import DOCUMENTS, PROGRAMS, REPOSITORY, anchors, blocks, links

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
    missing = []
    for link in links(document):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    missing += [name for name in FILE.findall(document.read_text()) if not (REPOSITORY / name).exists()]
    assert missing == []


NOT_RUN = ("StreamingDataset(", "views = [eg.Axes(", "fully_shard(model, mesh=mesh)\n\ngangs = ")


def test_every_python_block_is_part_of_a_program_that_a_test_runs() -> None:
    run = {block for program in PROGRAMS for block in program.blocks()}
    left_out = [block.text for block in blocks("python") if block not in run]
    assert len(left_out) == len(NOT_RUN)
    assert all(any(text in each for each in left_out) for text in NOT_RUN)
    assert {block.language for block in blocks()} <= {"python", "console", ""}, "a language that no test looks at"


# -- timeouts


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
    assert len(said) >= 3
    for option, value in said:
        assert defaults[option.replace("-", "_")] == float(value), option


def test_the_table_of_timeouts_has_the_values_of_the_sessions() -> None:
    said = [pair for row, _ in timeouts() for pair in re.findall(r"`([a-z_]+_s)` ([\d.]+) s", row)]
    assert len(said) == 8
    assert [(name, value) for name, value in said if getattr(JOB_TIMEOUTS, name) != float(value)] == []


def test_the_inequalities_between_timeouts_hold() -> None:
    named = {name: value for _, files in timeouts() for path in files for name, value in constants(path).items()}
    assert 1.0 < named["EXITED_S"] < JOB_TIMEOUTS.lease_s
    assert JOB_TIMEOUTS.answer_s + named["CONNECT_S"] < JOB_TIMEOUTS.lease_s
    assert named["EXCLUSIVE_TIMEOUT_S"] < named["HEAL_TIMEOUT_S"]
    watch = {path.stem: constants(path) for path in (REPOSITORY / "elasticgang" / "watch").glob("*.py")}
    assert watch["server"]["_LAST_READ_S"] + watch["traces"]["FLUSH_S"] < watch["serving"]["_END_S"]
    assert named["PULSE_MS"] * 10 <= 1000 * 1.0  # several pulses in the least time in which a rank counts as hung


# -- rules

# `H5`, or `RESTART-5`; a longer name without a hyphen is something else (`GPT2`, `SHA256`).
LABEL = re.compile(r"(?<![\w`.'/@-])([A-Z]|[A-Z]+-)(\d{1,2})(?![\w'/@-]|\.\d)")
DEFINED_LABEL = re.compile(r"^((?:[A-Z]|[A-Z]+-)\d{1,2})  \S", re.MULTILINE)


def prose(source: str) -> Iterator[str]:
    """The comments and docstrings of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node, clean=False) or ""


def defined_labels() -> dict[str, list[Path]]:
    """Where each rule is stated: in the header of a module, at the start of a line, or in the design's table."""
    found: dict[str, list[Path]] = {}
    for path in (
        path for folder in ("elasticgang", "scripts", "tests") for path in (REPOSITORY / folder).rglob("*.py")
    ):
        for label in DEFINED_LABEL.findall(path.read_text()):
            found.setdefault(label, []).append(path)
    for label in re.findall(r"^\| ((?:R|[A-Z]+-)\d+) ", DESIGN, re.MULTILINE):
        found.setdefault(label, []).append(REPOSITORY / "docs" / "design.md")
    return found


def test_every_label_of_a_rule_resolves() -> None:
    defined = defined_labels()
    prefixes = {label.rstrip("0123456789") for label in defined}
    assert len(defined) > 50
    paths = [path for folder in ("elasticgang", "scripts", "tests") for path in (REPOSITORY / folder).rglob("*.py")]

    def unknown_in(text: str) -> set[str]:
        found = {f"{prefix}{number}" for prefix, number in LABEL.findall(text) if prefix in prefixes}
        return found - set(defined)

    unknown = {f"{path.name}: {label}" for path in DOCUMENTS for label in unknown_in(path.read_text())}
    for path in paths:
        source = path.read_text()
        if unknown_in(source):  # in strings and code, such a word is something else
            prose_unknown = {label for text in prose(source) for label in unknown_in(text)}
            unknown |= {f"{path.relative_to(REPOSITORY)}: {label}" for label in prose_unknown}
    assert unknown == set()


def test_a_label_with_a_name_is_defined_once() -> None:
    assert {label: paths for label, paths in defined_labels().items() if "-" in label and len(paths) > 1} == {}


def test_a_module_has_its_label_names_for_itself() -> None:
    """So that a search for a label finds its rule, the code that enforces it and the test, and nothing else."""
    places: dict[str, set[Path]] = {}
    for label, paths in defined_labels().items():
        places.setdefault(label.rstrip("0123456789"), set()).update(paths)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
    assert [name for name in places if not name.endswith("-")] == [], "labels of one letter, which are not unique"


def test_every_rule_of_the_design_that_the_code_names_is_in_its_table() -> None:
    rules = set(re.findall(r"^\| (RULE-\d+) ", DESIGN, re.MULTILINE))
    assert rules == {f"RULE-{number}" for number in range(1, 11)}
    sources = [path.read_text() for path in (REPOSITORY / "elasticgang").rglob("*.py")]
    assert {rule for text in sources for rule in re.findall(r"\b(RULE-\d+)\b(?!')", text)} <= rules


# Labels of rules without a test that would fail without them.
UNTESTED = frozenset(
    re.findall(
        r"\S+",
        """
        BATCH-2 DATA-4 DDP-1 DDP-3 DDP-4 FAULT-2 FAULT-3 KILL-1 KILL-3
        NCCLWORKER-1 RANK-1 RENDEZVOUS-1 SUPERVISOR-2 WORKER-3
        """,
    )
)
# Labels without a mention at the line that enforces them.
UNENFORCED = frozenset({"DATA-1"})


def mentioned(*folders: str) -> Counter[str]:
    """How often the sources in `folders` name each label, by itself or in a range such as "AXES-1 to AXES-3"."""
    found: Counter[str] = Counter()
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    for source in (path.read_text() for path in paths if path != Path(__file__).resolve()):
        found.update(re.findall(r"(?<![\w-])[A-Z]+-\d{1,2}(?!\d)", source))
        for name, first, last in re.findall(r"\b([A-Z]+)-(\d+) to \1-(\d+)\b", source):
            found.update(f"{name}-{number}" for number in range(int(first) + 1, int(last)))
    return found


def test_each_rule_is_named_where_it_is_enforced_and_in_a_test() -> None:
    """A rule of the code: where it is stated, at least once more in the code, and in a test."""
    defined = {label: paths[0] for label, paths in defined_labels().items()}
    rules = {label: path for label, path in defined.items() if REPOSITORY / "tests" not in path.parents}
    assert len(rules) > 100
    in_code, in_tests = mentioned("elasticgang", "scripts"), mentioned("tests")
    unenforced = {label for label, path in rules.items() if in_code[label] <= (path.suffix == ".py")}
    untested = {label for label in rules if not in_tests[label]}
    assert unenforced - UNENFORCED == set(), "name the label at the line that enforces the rule"
    assert untested - UNTESTED == set(), "name the label at the test that fails without the rule"
    assert (UNENFORCED - unenforced) & set(rules) == set(), "named now: take it off the list"
    assert (UNTESTED - untested) & set(rules) == set(), "tested now: take it off the list"


def test_files_that_the_documents_name_define_the_names_beside_them() -> None:
    """`file` (`name`, `name`)."""
    wrong, num_names = [], 0
    for document in DOCUMENTS:
        for file, names in re.findall(r"`([\w./-]+\.py)` \(((?:`\w+`(?:, )?)+)\)", document.read_text()):
            source = (REPOSITORY / file).read_text()
            for name in re.findall(r"\w+", names):
                num_names += 1
                if not re.search(rf"^(?: *(?:async )?def {name}\(|class {name}\b|{name}\b.* = )", source, re.MULTILINE):
                    wrong.append(f"{file}: {name}")
    assert wrong == []
    assert num_names > 15


# -- the README


def test_each_failure_of_the_readme_is_one_short_line() -> None:
    table = DOCUMENTS[0].read_text().split("| what fails | what happens |")[1].split("\n\n")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ")]
    assert len(rows) > 15
    assert [row for row in rows if len(row.replace("|", " ").split()) > 25] == []
