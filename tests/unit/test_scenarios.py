"""Golden scenarios: stories of a job, replayed over the real rules by the simulator.

`scripts/chaos simulate --replay FILE` says what is told in one, and how it differs from what the file expects.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticgang.simulation.invariants import is_broken
from elasticgang.simulation.scenario import play, read
from tests.unit.mutants import FOUND, MUTANTS, mutated

SCENARIOS = Path(__file__).parent / "scenarios"
FILES = sorted(SCENARIOS.glob("*.txt"))

# By scenario and mutant: how a line begins that is told without the rule alone.
TOLD = [
    ("all_leave_by_their_scripts", "ranks that start are not waited for", "coordinator1: generation 2 "),
    ("answer_comes_late", "a lease runs from the answer", "LOST-1: "),
    ("coordinator_stands_still", "a coordinator's standstill counts", "LOST-2: "),
    ("directory_beside_promises", "directories and promises are mixed", "LOST-1: "),
    ("back_after_the_loss_was_told", "what is lost stays lost", "a ends: the job's state is lost"),
    ("end_told_again", "a death ends no generation", "RULE-7: "),
    ("end_told_again", "an agent without ranks is silent", "RULE-7: "),
    ("end_told_again", "the end of a generation is told once", "RULE-7: "),
    ("exit_begins", "a rank is restarted before it is gone", "SIMHOST-4: "),
    ("exit_begins", "an exit that has begun ends no generation", "SIMHOST-4: "),
    ("exit_of_a_living_rank", "a rank whose exit has begun is heard", "SIMHOST-4: "),
    ("exit_of_a_living_rank", "a rank whose exit has begun runs on", "SIMHOST-4: "),
    ("failed_starts", "failed starts never give up", "SIMHOST-2: "),
    ("fenced_and_rejoins", "a fenced agent's ranks run on", "RULE-3: "),
    ("fenced_while_it_forks", "a rank forked while its agent is fenced runs on", "RULE-3: "),
    ("fenced_while_it_forks", "an agent rejoins at once", "RULE-3: "),
    ("finished_while_its_session_is_down", "the end of the job is told once", "b ends: "),
    ("finishes_and_exits", "an exit is noticed before messages are read", "b ends: the job's state is lost"),
    ("finishes_and_exits", "what a dead rank sent is not read", "b ends: the job's state is lost"),
    ("first_start_fails", "a failure exits with code 0", "SIMHOST-1: "),
    ("first_start_fails", "a first start is tried again", "coordinator1: generation 2 "),
    ("first_start_fails", "two ranks are forked at once", "SIMHOST-1: "),
    ("given_up_out_of_office", "what is lost stays lost out of office", "COMMIT-1: "),
    ("given_up_out_of_office", "a promise is not told", "COMMIT-1: "),
    ("grace_period_ends", "a grace period does not end", "a0 holds 3@1"),
    ("higher_term_before_the_first_record", "office is kept at a higher term", "OFFICE-1: "),
    ("half_open_session_out_of_office", "silent agents keep their sessions out of office", "RULE-7: "),
    ("half_is_lost", "any part will do", "RECOVERY-2: "),
    ("half_is_lost", "lost before it is fenced", "LOST-2: "),
    ("holder_is_known_to_be_dead", "the first state has one name", "RULE-4: "),
    ("holders_on_two_hosts", "whoever holds the state sits anywhere", "RECOVERY-2: "),
    ("host_of_another_layout", "who does not fit is let in", "coordinator1: generation 2  {a0} learn b0"),
    ("id_is_taken", "an id is free once its agent is lost", "SIMHOST-3: "),
    ("id_is_taken", "two processes have one id", "SIMHOST-3: "),
    ("in_doubt_dropped", "a dropped step keeps what forward changed", "MANAGER-4: "),
    ("in_doubt_dropped", "learners do not heal", "a0 holds 4@2; b0 holds nothing; c0.2 holds nothing"),
    ("in_doubt_dropped", "what is pending stays so", "MEMBER-2: "),
    ("in_doubt_rolled_forward", "a failed vote drops what is prepared", "MEMBER-2: "),
    ("in_doubt_rolled_forward", "a rank in doubt begins another step", "MEMBER-2: "),
    ("in_doubt_rolled_forward", "a rank has sums only of what it has counted", "MANAGER-15: "),
    ("in_doubt_rolled_forward", "never rolled forward", "COMMIT-1: "),
    ("interrupted", "a signal exits with code 0", "SIMHOST-1: "),
    ("join_notice_lost", "notices are sent once", "RULE-7: "),
    ("joiner_first_to_have_it", "joiners are sent a record at once", "ACCEPT-1: "),
    ("joins_as_the_job_ends", "an exit after the end ends no generation", "RULE-7: "),
    ("higher_term_before_the_first_record", "a record is delivered without a lease", "FENCE-1: "),
    ("joiner_never_accepts", "an agent that accepts no record is heard", "a0 holds 3@1"),
    ("joiners_first", "anybody founds a job", "OFFICE-1: "),
    ("last_holder_stays", "the last holder leaves", "b ends: the job's state is lost"),
    ("last_step_in_doubt", "the last step is waited for", "b0 holds 2@1"),
    ("leaves_in_order", "a commit is applied before it is reported", "MANAGER-8: "),
    ("leaves_in_order", "a draining rank leaves without a vote", "MANAGER-10: "),
    ("leaves_in_order", "a rank has its own numbers for sums", "MANAGER-15: "),
    ("lost_with_all_it_knew", "all that is lost begins anew", "COMMIT-1: "),
    ("majority_elsewhere", "a majority is trusted", "LOST-1: "),
    ("member_accepts_no_further_record", "an agent that accepts no record gets a lease", "LOST-1: "),
    ("member_accepts_no_further_record", "the facts of who has gone end in silence", "TOLD-2: "),
    ("majority_elsewhere", "the first to come is trusted", "LOST-1: "),
    ("newcomer_in_a_step", "a newcomer ends the generation", "coordinator1: generation 2  {a0} learn b0  2@1"),
    ("no_live_rank", "a rank requests before it is fenced", "RULE-3: "),
    ("newcomer_in_a_step", "facts cross a record", "TOLD-1: "),
    ("nobody_has_slots", "a step commits without a vote", "RULE-4: "),
    ("nobody_has_slots", "a step without shares counts", "RULE-5: "),
    ("nobody_has_slots", "an agent asks while its ranks run", "RULE-3: "),
    ("nobody_has_slots", "each learner is active for itself", "RULE-5: "),
    ("office_is_left", "an agent accepts earlier terms", "LOST-1: "),
    ("office_is_left", "office is kept", "LOST-1: "),
    ("office_is_left", "the highest term alone decides", "LOST-1: "),
    ("only_learners_left", "learners never decide", "COMMIT-1: "),
    ("promise_outlives_its_session", "others' records are not learned", "RULE-7: "),
    ("promise_outlives_its_session", "promises count by sessions", "RULE-7: "),
    ("pushed_before_written", "pushed before it is written", "RULE-1: "),
    ("raised_and_hangs", "a script that has raised is waited for", "a0 holds 2@1; b0 holds 2@1"),
    ("raised_and_hangs", "an agent exits before its restarts", "SIMHOST-1: "),
    ("ready_and_gone", "reports outlive their session", "REPORT-1: "),
    ("refused_after_a_promise", "a refusal where the former coordinator was renews the lease", "LOST-1: "),
    ("refused_elsewhere", "any refusal renews the lease", "LOST-1: "),
    ("reported_in_a_former_session", "a report is sent once", "RULE-7: "),
    ("reported_before_it_accepts", "a report counts although it crosses a record", "RULE-3: "),
    ("restarted_elsewhere", "leases of another address are not thought of", "LOST-1: "),
    ("rolled_back_for_good", "a rollback is not said", "COMMIT-1: "),
    ("rolled_back_for_good", "what was given up counts", "coordinator1: generation 4  {b0 c1} wait a0 a1.2  2@3  goes"),
    ("rolled_back_with_a_word", "what was told does not count", "COMMIT-1: "),
    ("rolled_back_with_a_word", "decision not in the record", "COMMIT-1: "),
    ("script_raises_as_it_is_seated", "all leave in order", "RULE-7: "),
    ("unaccepted_out_of_office", "a record that nobody has accepted outlives its office", "RULE-7: "),
    ("unaccepted_state_is_not_lost", "a state is lost with a record that nobody has accepted", "COMMIT-1: "),
    ("session_is_down_for_a_moment", "absent agents are not waited for", "PRESENT-1: "),
    ("session_is_down_for_a_moment", "a new session is sent no facts", "TOLD-1: "),
    ("signalled_before_a_restart", "an agent that ends starts ranks", "SIMHOST-1: "),
    ("spare_follows", "a seat is asked for each member", "PLAN-2: "),
    ("spare_follows", "draining members count like others", "PLAN-2: "),
    ("spare_keeps_its_part", "a spare forgets its part", "RULE-6: "),
    ("start_expires", "ranks that start are waited for", "RULE-7: "),
    ("torn_apply", "a rank prepares whoever failed", "RULE-5: "),
    ("torn_apply", "a torn state has a share", "RULE-5: "),
    ("torn_apply", "a torn state is whole", "RULE-4: "),
    ("undecided_told_again", "why a proposal is undecided is told once", "RULE-7: "),
    ("word_for_an_agent_that_goes_elsewhere", "the operator's word stands for all agents", "LOST-1: "),
    ("vote_cannot_begin", "a vote that cannot begin makes nothing ready", "MANAGER-5: "),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    story, expected = read(path.read_text())
    assert expected
    assert not is_broken(expected[-1])
    assert play(story) == expected


@pytest.mark.parametrize(("name", "rule", "shown"), TOLD)
def test_what_a_story_shows_depends_on_the_rule(name: str, rule: str, shown: str) -> None:
    story, expected = read((SCENARIOS / f"{name}.txt").read_text())
    with mutated(rule):
        told = play(story)
    assert any(line.startswith(shown) for line in told)
    assert not any(line.startswith(shown) for line in expected)


def test_every_rule_that_is_left_out_is_found() -> None:
    told = {rule for _, rule, _ in TOLD}
    assert told | set(FOUND) == set(MUTANTS)
    assert not told & set(FOUND)


def test_the_rules_are_ours_again() -> None:
    owners = [(owner, attribute) for patches in MUTANTS.values() for owner, attribute, _ in patches]
    before = [vars(owner)[attribute] for owner, attribute in owners]
    for name in MUTANTS:
        with mutated(name):
            pass
    assert [vars(owner)[attribute] for owner, attribute in owners] == before


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("step 2", "a scenario begins with `hosts`"),
        ("hosts 1\na flies", "`a flies` is not possible; a could: dials coordinator1"),
        ("hosts 1\nrun-until-idle ; a0 ends", "`a0 ends` is not possible; a0 could: begins"),
        ("hosts 1\nz dies", "`z dies` is not possible; z could: do nothing"),
    ],
)
def test_what_is_not_a_scenario_says_so(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        play(text)
