"""What the demo refuses: one line, exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.demo_job import demo


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "0"], "--ranks must be from 1 to 8, but is 0 instead"),
        (["--ranks", "9"], "--ranks must be from 1 to 8, but is 9 instead"),
        (["--ranks", "1"], "--ranks must be at least 2, so that somebody is left with the state; or add --no-kill"),
        (["--ranks", "four"], "argument --ranks: must be a whole number, but is 'four' instead"),
        (["--steps", "0"], "--steps must be at least 1, but is 0 instead"),
        (["--seed", "-1"], "--seed must be at least 0, but is -1 instead"),
        (
            ["--kill-every", "0"],
            "argument --kill-every: must be a number of seconds greater than 0, but is '0' instead",
        ),
        (
            ["--kill-every", "x"],
            "argument --kill-every: must be a number of seconds greater than 0, but is 'x' instead",
        ),
        (["--pause", "0"], "argument --pause: must be a number of seconds greater than 0, but is '0' instead"),
        (["--max-kills", "0"], "--max-kills must be at least 1, but is 0 instead; or add --no-kill"),
        (["--kill-every", "nan"], "argument --kill-every: must be a number of seconds greater than 0"),
        (["--output-dir", __file__], "is not a folder"),
        (["--output-dir", str(Path(__file__).parent)], "is not empty; name a new folder"),
        (["--reproducible", "--no-reference"], "compares with the undisturbed run: leave out --no-reference"),
        (["--reproducible", "--layout", "tp=2"], "hold for sdp: leave out tp and pp"),
        (["--reproducible", "--layout", "sdp=2,min_replicas=2/pp=2"], "hold for sdp: leave out tp and pp"),
        (["--layout", "cp=2"], "argument --layout: a layout must be like sdp=2,tp=2 with the names pp, sdp, tp"),
        (["--layout", "tp=0"], "argument --layout: `tp` must be an integer of at least 1"),
        (["--layout", "sdp=2,min_replicas=2/sdp=8"], "sdp must divide 4, the number of slots of a batch, but is 8"),
        (["--layout", "sdp=2/sdp=1"], "needs a first layout with min_replicas of at least 2: of sdp=2, the host that"),
        (["--layout", "sdp=1,min_replicas=4/sdp=2"], "must divide the model in its first layout"),
        (["--layout", "sdp=2,min_replicas=2/sdp=1", "--ranks", "6"], "--ranks must be 4 and --spares 0"),
        (["--layout", "sdp=2,min_replicas=2/sdp=1", "--spares", "1"], "--ranks must be 4 and --spares 0"),
        (["--layout", "sdp=2,min_replicas=2/sdp=4"], "--layout needs a fallback for the 3 ranks that are left"),
        (["--layout", "tp=4"], "argument --layout: tp must divide 2, the number of heads, but is 4 instead"),
        (["--layout", "tp=2", "--ranks", "3"], "--ranks must be a multiple of 2, the ranks of a replica group"),
        (["--layout", "tp=2", "--ranks", "2"], "--ranks must be at least 4, so that a part survives its rank"),
        (["--spares", "-1"], "--spares must be at least 0, but is -1 instead"),
        (["--kills", "3"], "unrecognized arguments: --kills 3"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.parse_args(argv)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("scripts/demo: error: ")
    assert message in line


def test_one_rank_is_enough_without_kills() -> None:
    assert demo.parse_args(["--ranks", "1", "--no-kill"]).ranks == 1


def test_a_layout_has_two_replica_groups_and_a_spare() -> None:
    args = demo.parse_args(["--layout", "sdp=2,tp=2"])
    assert (args.ranks, args.spares) == (8, 1)
    args = demo.parse_args(["--layout", "sdp=2,tp=2,min_replicas=2/sdp=2"])
    assert (args.ranks, args.spares) == (8, 0)
    args = demo.parse_args([])
    assert (args.ranks, args.spares) == (4, 0)


def test_a_reproducible_job_of_shards_is_compared_with_one_rank_of_plain_tensors(tmp_path: Path) -> None:
    args = demo.parse_args(["--reproducible", "--layout", "sdp=2,min_replicas=2/sdp=1"])
    for is_reference, launcher in (
        (False, ["--layout", "sdp=2,min_replicas=2/sdp=1", "--module"]),
        (True, ["--module"]),
    ):
        spec = demo.spec_of(args, tmp_path, is_reference=is_reference)
        assert spec.train_argv[-2:] == ["--reduction", "reproducible"]
        assert list(spec.run_args) == launcher


def test_help_names_the_exit_codes_and_the_tolerance(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.parse_args(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "Exit code" in text
    assert "1e-05" in text
