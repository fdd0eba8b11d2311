"""The commands that the documents show exist, with every option that they name."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from elasticgang.launch.arguments import make_parser
from scripts.demo_job import demo
from tests.documents import DOCUMENTS, REPOSITORY, blocks, inline_code
from tests.support import run_preloaded

PACKAGES = {"scripts/bench": "scripts.benches", "scripts/chaos": "scripts.chaos_runs"}  # of the modules they execute


@cache
def options_of(command: str) -> frozenset[str]:
    """The long options that `--help` of a command names: `elasticgang run`, `scripts/demo`, `scripts/bench scale`."""
    if command.startswith("elasticgang "):
        commands = next(each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction))
        return frozenset(commands.choices[command.split()[1]].format_help().split())
    if command == "scripts/demo":
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
            demo.parse_args(["--help"])
        return frozenset(said.getvalue().split())
    script, *name = command.split()
    if script in PACKAGES and name:
        shows_help = [sys.executable, "-m", f"{PACKAGES[script]}.{name[0]}", "--help"]
        done = run_preloaded(shows_help, ends_at_once=True)
    else:
        done = subprocess.run([script, *name, "--help"], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return frozenset(done.stdout.split())


def commands_in(document: Path) -> Iterator[list[str]]:
    """Each command line of the document, in a block or between backticks, as a list of words."""
    lines = [line for block in blocks("console") if block.path == document for line in block.text.splitlines()]
    shown = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in [*shown, *(" ".join(code.split()) for code in inline_code(document))]:
        if re.match(r"(\.venv/bin/)?elasticgang [a-z]|scripts/\w+( |$)", line):
            yield re.sub(r"\s+#.*", "", line.removeprefix(".venv/bin/")).split()


COMMANDS = [(path, words) for path in DOCUMENTS for words in commands_in(path)]


def test_the_documents_show_commands() -> None:
    assert len({words[0] for _, words in COMMANDS}) > 5


@pytest.mark.parametrize("words", [words for _, words in COMMANDS], ids=" ".join)
def test_a_command_exists_and_knows_its_options(words: list[str]) -> None:
    command = words[0]
    if command == "elasticgang":
        command += f" {words[1]}"
    else:
        assert os.access(REPOSITORY / command, os.X_OK)
    options = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--help"}
    if command in ("scripts/chaos", "scripts/bench") and len(words) > 1 and re.match(r"[a-z]", words[1]):
        assert words[1] in options_of(command)
        command += f" {words[1]}"
    if options:
        assert options <= {word.strip("[],()`:;.") for word in options_of(command)}


def test_the_shown_jobs_can_be_started() -> None:
    """The command lines that the documents show are such as the parser takes."""
    shown = [words for _, words in COMMANDS if words[:2] == ["elasticgang", "run"] and words[-1] == "train.py"]
    assert len(shown) > 1
    for words in shown:
        assert make_parser().parse_args(words[1:]).script == "train.py"


def test_a_path_of_a_tier_stands_for_itself() -> None:
    path = "tests/unit/test_collective_table.py"
    command = [str(REPOSITORY / "scripts" / "test"), "unit", path, "--collect-only", "-q"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert found
    assert all(line.startswith(path) for line in found)


OF_OTHERS = {"--build-arg"}  # docker's


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_option_between_backticks_is_one_of_ours(document: Path) -> None:
    ours = {
        option
        for command in ("elasticgang run", "elasticgang coordinator", "scripts/demo")
        for word in options_of(command)
        for option in re.findall(r"--[a-z][a-z-]+", word)
    }
    named = {option for code in inline_code(document) for option in re.findall(r"^--[a-z][a-z-]+", code)}
    assert named - ours - OF_OTHERS == set()
