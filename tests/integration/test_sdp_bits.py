"""`ShardedDataParallel(reduction="reproducible")`: every `sdp` ends in the bits of one rank, by real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.demo_job.row_digest import sum_of
from tests.exhaustive import exhaustive
from tests.support import run_preloaded

JOB = "tests/integration/sdp_bits_job.py"
DEADLINE_S = 180


def run(
    output: Path, layout: str, ranks: int, *options: str, process_group: str = "isolated-gloo"
) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "elasticgang", "run", "--nproc-per-node", str(ranks), "--layout", layout]
    launcher += ["--process-group", process_group]
    command = [sys.executable, *launcher, JOB, "--output", str(output), *options]
    return run_preloaded(command, timeout=DEADLINE_S)


def digest_of(output: Path, layout: str, ranks: int, *options: str, process_group: str = "isolated-gloo") -> str:
    """The parameters that the job has ended with, on all ranks alike."""
    done = run(output, layout, ranks, *options, process_group=process_group)
    assert done.returncode == 0, done.stderr
    found: dict[int, set[str]] = {}
    for line in map(json.loads, output.read_text().splitlines()):
        found.setdefault(line["part"], set()).add(line["digest"])
        size = line["sdp"]
    assert sorted(found) == list(range(size))
    assert all(len(digests) == 1 for digests in found.values()), found
    return sum_of(digest for (digest,) in found.values())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One rank that holds plain tensors."""
    return digest_of(tmp_path_factory.mktemp("alone") / "out", "sdp=1", 1, "--plain")


# SCATTER-1, OPTIMIZER-2
@pytest.mark.parametrize(("layout", "ranks"), [("sdp=1", 2), pytest.param("sdp=2", 2, marks=exhaustive), ("sdp=4", 4)])
def test_every_sdp_ends_in_the_bits_of_one_rank(layout: str, ranks: int, tmp_path: Path, alone: str) -> None:
    """Some shards are uneven, and some are empty."""
    assert digest_of(tmp_path / "out", layout, ranks) == alone


def test_torchs_gloo_has_the_same_bits(tmp_path: Path, alone: str) -> None:
    assert digest_of(tmp_path / "out", "sdp=2", 2, process_group="gloo") == alone


@pytest.mark.parametrize("options", [(), ("--keep",)], ids=["all slots again", "slots that are kept"])
def test_a_kill_leaves_no_trace_in_the_bits_of_shards(options: tuple[str, ...], tmp_path: Path, alone: str) -> None:
    """The rank dies after its backward. Its group is whole again once it has healed."""
    assert digest_of(tmp_path / "out", "sdp=2", 4, "--kill", "2", *options) == alone
    assert (tmp_path / "out.killed").exists()


def test_plain_sums_of_these_gradients_depend_on_sdp(tmp_path: Path) -> None:
    """Otherwise these tests would show nothing."""
    one = digest_of(tmp_path / "one", "sdp=1", 1, "--reduction", "sum")
    assert digest_of(tmp_path / "two", "sdp=2", 2, "--reduction", "sum") != one


def test_sgd_and_forwards_in_bfloat16_and_layers_that_are_called_twice(tmp_path: Path) -> None:
    options = ("--policy", "bfloat16", "--optimizer", "sgd", "--repeats")
    one = digest_of(tmp_path / "one", "sdp=1", 1, *options)
    assert digest_of(tmp_path / "two", "sdp=2", 2, *options) == one


UNREDUCED = "must reduce the gradients of each slot, but has not reduced those of the last one: leave out `set_requ"
REFUSED = {
    "sums in the dtype of the forward": (("--policy", "rounded"), "give its MixedPrecisionPolicy `reduce_dtype="),
    "two backwards in a slot": (("--twice",), "must reduce a gradient once in a slot, but reduces that of"),
    "slots that are added first": (("--adds",), UNREDUCED),
    "slots that are added first, and kept": (("--adds", "--keep", "--reduction", "sum"), UNREDUCED),
    "parameters that are not sharded": (("--leave-out",), "does not shard embedding.weight: its gradients would be"),
}


# SCATTER-1, SCATTER-2, SHARDED-7
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_depend_on_sdp_is_refused(name: str, tmp_path: Path) -> None:
    options, message = REFUSED[name]
    done = run(tmp_path / "out", "sdp=2", 2, *options)
    assert done.returncode != 0
    assert message in done.stderr


# SHARDED-10
@pytest.mark.parametrize("options", [(), ("--leave-out",)], ids=["whole", "left out"])
def test_a_warning_names_parameters_whose_gradients_are_not_added_over_sdp(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    done = run(tmp_path / "out", "sdp=2", 2, "--reduction", "sum", *options)
    assert done.returncode == 0, done.stderr
    told = "`fully_shard` does not shard embedding.weight, and adds no gradient of it over `sdp`"
    assert (told in done.stderr) == bool(options)
