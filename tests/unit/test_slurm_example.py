"""`examples/slurm.sh` gives commands options that they have, to start a job as docs/operations.md says."""

from __future__ import annotations

import re
import shlex

from elasticgang.launch.arguments import make_parser
from tests.documents import REPOSITORY

TEXT = (REPOSITORY / "examples" / "slurm.sh").read_text().replace("\\\n", " ")


def arguments_of(command: str) -> list[str]:
    """Those of `elasticgang COMMAND`, with the script of the user and its arguments in place of "$@", and a number for
    each variable."""
    pattern = {"run": r"(?<=run_agent \"\$@\"' - ).*", "coordinator": "(?<=elasticgang coordinator ).*(?= &)"}[command]
    (found,) = re.findall(pattern, TEXT)
    return [command, *shlex.split(re.sub(r"\$\w+", "7", found.replace('"$@"', "train.py --steps 7")))]


def test_the_commands_take_its_options() -> None:
    run = make_parser().parse_args(arguments_of("run"))
    assert (run.script, run.args, run.nnodes) == ("train.py", ["--steps", "7"], (2, 3))
    coordinator = make_parser().parse_args(arguments_of("coordinator"))
    assert coordinator.port == 7
    assert run.coordinator.endswith(":7")


def test_agents_have_the_time_to_save_before_the_limit() -> None:
    (before_s,) = re.findall(r"^#SBATCH --signal=TERM@(\d+) ", TEXT, re.MULTILINE)
    assert make_parser().parse_args(arguments_of("run")).grace_period < int(before_s)
