"""Every rule of `protocol/` has a mutant: without the rule a golden scenario, random schedules or a unit test fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _pytest.outcomes import Failed

import elasticgang.protocol
from tests.unit.mutants import MUTANTS, patched
from tests.unit.unit_mutants import UNIT_MUTANTS

PROTOCOL = Path(elasticgang.protocol.__file__).parent

# By rule: the mutants that leave it out, or weaken it.
RULES = {
    "ABANDON": (
        "a forgotten job is founded anew",
        "a job is abandoned without sessions",
        "a job out of office is never abandoned",
    ),
    "ACCEPT": ("joiners are sent a record at once",),
    "AGENT-1": ("an agent asks while its ranks run",),
    "AGENT-2": ("a death ends no generation",),
    "AGENT-3": ("a newcomer ends the generation",),
    "AGENT-4": ("ranks that start are not waited for", "ranks that start are waited for"),
    "AGENT-5": ("the last step is waited for", "a finished job fails for a rank in doubt"),
    "AGENT-6": ("an agent without ranks is silent",),
    "AGENT-7": ("a notice is about any generation",),
    "AGENT-8": (
        "a rank is restarted before it is gone",
        "a rank whose exit has begun is heard",
        "a rank whose exit has begun runs on",
        "an exit that has begun ends no generation",
    ),
    "AGENT-9": (
        "a rank that raises is not waited for",
        "no layout waits for ranks that start",
        "ranks that start are never late",
        "a signal stops no start",
    ),
    "AGENT-10": ("a kill after the last step is nothing",),
    "AGENT-11": ("a lost state ends ranks that have left their loop",),
    "AGENT-12": ("a rank that differs ends the others", "a rank that differs is restarted"),
    "AGENT-13": (
        "a difference is told by each rank",
        "an agent goes on without anybody who is right",
        "one agent fails alone",
    ),
    "AGENT-14": (
        "a rank that dies in each of its first steps is restarted at once",
        "early deaths are never forgotten",
    ),
    "AGENT-15": ("a firewall is blamed for what something else has ended",),
    "ALONE": ("joiners go on alone",),
    "BACK": (
        "a record that nobody has accepted outlives its office",
        "a state is lost with a record that nobody has accepted",
        "nobody is sent the record that is the newest again",
    ),
    "COMMIT-1": ("never rolled forward", "what was told does not count", "learners never decide"),
    "COMMIT-2": ("by step alone",),
    "COMMIT-3": ("decision not in the record",),
    "COMMIT-4": ("what was given up counts",),
    "COMPARE-1": ("what is saved is not compared", "the last state is not compared"),
    "COMPARE-2": ("the most ranks are right", "ranks are compared with all others"),
    "COMPARE-3": ("a boundary is passed without its comparison",),
    "COMPARE-4": ("a rank goes on if others may not know the difference",),
    "COMPARE-5": ("a damaged rank keeps its state", "the others go on beside a damaged rank"),
    "COMPARE-6": ("ranks that came later were alike before",),
    "COVERAGE-1": ("a name may be in no stage",),
    "COVERAGE-2": ("one rank that knows is enough",),
    "CUDA-1": ("every CUDA error is a fault of the device", "a fault of the device is an error of the script"),
    "DELTA-EXACT": ("a delta makes what it makes",),
    "DELTA-SENT": ("a delta is sent untried",),
    "DEVICE-1": ("faults of a device are not counted", "faults of a device count for ever"),
    "DEVICE-2": (
        "a rank starts on a quarantined device",
        "a rank without a device is started after a rejoin",
        "a rank that drains takes a spare device",
    ),
    "DEVICE-3": ("a step may fault on every device",),
    "DEVICE-4": ("faults count for the agent's index", "a rank that chooses its device is moved"),
    "DIVISION-1": ("runs of two groups are kept",),
    "DIVISION-2": ("the first group computes what is missing",),
    "DIVISION-3": ("one rank of a group keeps a run for all",),
    "DIVISION-4": ("a sum is kept with a run that the group has not",),
    "DIVISION-5": ("gradients of another state are kept",),
    "CUT-1": ("who comes first in turn is left out",),
    "CUT-2": ("a host is left out whom the others need",),
    "FACTS-ABSENT": (
        "an agent without a session has no successors",
        "an agent without a session has successors for ever",
        "all facts outlive a session",
    ),
    "FACTS-ALONE": ("an agent alone tells its facts",),
    "FACTS-JOB": (
        "a new session is sent no facts",
        "all failures of a step are told",
        "the facts of who has gone end in silence",
        "the waits of each agent are told",
    ),
    "FACTS-RECENT": ("successors end with a session",),
    "FACTS-TICK": ("waits are told at once",),
    "FACTS-WHOLE": ("facts cross a record", "facts outlive their agent", "facts are told once"),
    "FENCE": ("a record is delivered without a lease", "an agent is ready beside a record that waits"),
    "FORM-1": ("the order of a form counts",),
    "FORM-2": ("what a rank cannot say differs",),
    "FORMER": ("a coordinator remembers all agents that it has ever had",),
    "HANG-1": ("a rank that is blocked may hang", "every edge blocks every rank"),
    "HANG-2": ("nobody is blocked in a collective",),
    "HANG-3": ("paused time counts", "the agent's own standstill counts"),
    "HANG-4": ("a hung comm process costs its rank",),
    "HANG-5": ("a standstill is reported at every look",),
    "HANG-6": ("a rank that goes on is killed once it was found to hang",),
    "KEYS-ASKED": (
        "who asks for a key gets those of its group",
        "a key that comes later is not sent to who has asked for it",
        "who has left waits for a key",
    ),
    "KEYS-BOUND": ("a key has any length", "any number of keys is waited for", "each question is answered"),
    "KEYS-FIRST": ("the last value of a key stays",),
    "KEYS-GROUP": ("keys are sent to all",),
    "LEASE": ("a lease runs from the answer",),
    "LEFT": ("who has exited has left",),
    "LIFE-1": ("an agent that ends starts ranks", "two ranks are forked at once"),
    "LIFE-2": ("a first start is tried again", "failed starts never give up"),
    "LIFE-3": (
        "a commit of any generation starts a rank",
        "a restart always waits as long as it may",
        "a restart takes the cores of the first commit",
        "a restart waits for no survivor",
    ),
    "LIFE-4": ("a script that has raised is waited for",),
    "LIFE-5": ("a grace period does not end",),
    "LIFE-6": (
        "a fenced agent's ranks run on",
        "a rank forked while its agent is fenced runs on",
        "an agent rejoins at once",
    ),
    "LIFE-7": ("a failure exits with code 0", "a signal exits with code 0", "an agent exits before its restarts"),
    "LIFE-8": ("a used device holds up other starts",),
    "LIFE-9": ("ranks that do not leave are killed without a word",),
    "LOST": (
        "a lost spare costs a step",
        "a coordinator's standstill counts",
        "an exit after the end ends no generation",
        "lost before it is fenced",
        "silent agents keep their sessions out of office",
    ),
    "MANAGER-1": ("a step commits without a vote",),
    "MANAGER-2": ("a failed vote drops what is prepared", "a rank in doubt begins another step"),
    "MANAGER-3": ("a torn state is whole",),
    "MANAGER-4": ("a dropped step keeps what forward changed",),
    "MANAGER-5": ("a vote that cannot begin makes nothing ready",),
    "MANAGER-6": ("a rank prepares whoever failed",),
    "MANAGER-7": ("learners do not heal",),
    "MANAGER-8": ("a commit is applied before it is reported",),
    "MANAGER-9": ("a rank requests before it is fenced",),
    "MANAGER-10": ("a draining rank leaves without a vote",),
    "MANAGER-11": ("a checkpoint is not loaded",),
    "MANAGER-12": (
        "a rank leaves while others save the final state",
        "a final save that has failed is not repeated",
        "a rank does not look for the saved final state",
    ),
    "MANAGER-13": ("a fault of the device is dropped with a lost step",),
    "MANAGER-14": ("other state is built over the kept one", "state of another layout is not fetched"),
    "MANAGER-15": ("a rank has sums only of what it has counted", "a rank has its own numbers for sums"),
    "MANAGER-16": ("numbers of other names are added",),
    "MANAGER-17": (
        "generations that are not connected do not count",
        "a rank without state costs the others as many generations as any",
        "a generation that was not connected is requested again at once",
        "a generation that takes long to be not connected counts as a quick one",
        "a generation that ends by a short time limit counts as a quick one",
        "what other hosts end counts for a rank without state",
    ),
    "MANAGER-18": ("a rank that has fewer steps than its peers ends their generations",),
    "MANAGER-19": ("a script goes on in the generation in which an exception has left a step",),
    "MANAGER-20": ("a rank leaves before it has compared",),
    "MANAGER-21": ("a rank whose heals get no further tries again for ever",),
    "MANAGER-22": ("the last holders leave without a save",),
    "MEMBER-1": ("a torn state is whole",),
    "MEMBER-2": ("a failed vote drops what is prepared", "what is pending stays so"),
    "MEMBER-3": ("a torn state has a share",),
    "MEMBER-4": ("each learner is active for itself",),
    "MEMBER-5": ("a step without shares counts",),
    "MEMBER-6": ("the last holder leaves", "the last holder leaves before another layout is taken"),
    "MEMBER-7": ("holders keep nothing", "spares are not relieved"),
    "MOVED": ("leases of another address are not thought of",),
    "NEWEST": ("a session that has yet to send its decision stays",),
    "NEXT-1": ("chains are told apart by number",),
    "NEXT-2": ("who does not fit is let in", "joiners with other settings are let in"),
    "NEXT-3": ("draining members count like others",),
    "NEXT-4": ("the first layout is always in force",),
    "NEXT-5": ("a layout is left while its ranks start",),
    "NEXT-6": ("nobody keeps the parts of another layout",),
    "NEXT-7": ("seats of another layout are given as to newcomers",),
    "NEXT-8": ("a record names the checkpoint that is reported last",),
    "NEXT-9": ("a record has any size", "one joiner too many costs all"),
    "NEXT-10": ("hosts that do not reach each other take part together",),
    "NOTICE": (
        "nobody is told for whom the job waits",
        "nobody is told of a late disk",
        "nobody is told why a coordinator is not in office",
        "why a proposal is undecided is told once",
    ),
    "OFFICE": (
        "a majority is trusted",
        "anybody founds a job",
        "directories and promises are mixed",
        "office is kept",
        "office is kept at a higher term",
        "others' records are not learned",
        "promises count by sessions",
        "the first to come is trusted",
        "the highest term alone decides",
        "what is lost stays lost",
        "what is lost stays lost out of office",
    ),
    "OVER": ("spares go on with a job that has finished",),
    "PERSIST": ("pushed before it is written",),
    "PACK-1": ("a count runs over into the next one", "more counts share a number than it holds exactly"),
    "POSITION-1": ("all steps take the same number of samples",),
    "POSITION-2": ("any number of samples goes on",),
    "POSITION-3": ("a rank heals with any global batch",),
    "PRESENT": ("absent agents are not waited for",),
    "PROMISE": ("a promise is not told", "an agent accepts earlier terms"),
    "FORM-DIGEST": ("a digest covers no order",),
    "READDRESS": ("ranks stay at an address that is lost",),
    "RECORD-1": ("a digest covers no rollback",),
    "RECORD-2": ("an agent parses all of a record",),
    "RECOVERY-1": ("no witness is needed", "nobody is waited for", "spares are not waited for"),
    "RECOVERY-2": (
        "any part will do",
        "whoever holds the state sits anywhere",
        "who is one too many waits, whatever it holds",
    ),
    "RECOVERY-3": ("the first state has one name",),
    "RECOVERY-4": ("a rollback is not said", "all that is lost begins anew"),
    "RECOVERY-5": ("a job begins without its checkpoint",),
    "RECOVERY-6": ("state in memory counts as the checkpoint's", "a rank keeps its state beside the checkpoint"),
    "RECOVERY-7": ("state is whole in the layout in force alone", "parts of several layouts add up"),
    "RECOVERY-8": ("a job goes back at once to what is here",),
    "REFUSED": ("a refusal where the former coordinator was renews the lease", "any refusal renews the lease"),
    "REJOIN": ("lost agents come back as they are",),
    "REPEAT-1": ("sigterm that every process gets stops the ranks",),
    "REPORT": (
        "a report counts although it crosses a record",
        "reports of earlier generations count",
        "reports outlive their session",
    ),
    "RESEND": (
        "a report is sent once",
        "notices are sent once",
        "the end of a generation is told once",
        "the end of the job is told once",
        "what is notified before a welcome is lost",
    ),
    "RESTART-1": ("a script that never worked is tried again",),
    "RESTART-2": ("a step may fail twice", "ranks that heal fail a step"),
    "RESTART-3": ("a rank may fail before its first step again",),
    "RESTART-4": ("failures count for ever", "restarts are not counted"),
    "ROUTE-1": ("every rank exchanges the sums of its host", "a host's sums are exchanged by nobody"),
    "ROUTE-2": ("agents of one host share memory",),
    "REACH-1": ("an agent reports before it knows which hosts it reaches",),
    "REACH-2": ("a host is reached as soon as it answers",),
    "REACHED": ("a host that was left out stays out",),
    "SENDER": (
        "an agent reports as another one",
        "an end of any generation counts",
        "an id is free once its agent is lost",
        "two processes have one id",
    ),
    "SESSION-ORDER": ("the higher generation is newer",),
    "SESSION-TERM": ("equal numbers are one term",),
    "UNACCEPTED": ("an agent that accepts no record gets a lease", "an agent that accepts no record is heard"),
    "UNBOUND": ("an agent without a record is fenced", "an agent without a record is in a hurry"),
    "WORD": ("the operator's word stands for all agents", "an agent that comes back stays excused"),
}
# Of other rules: of the agent's driver (RANK-2, RANKLINK-1), of seats that are asked for (PLAN-2), and of leaving.
OTHERS = {
    "a seat is asked for each member",
    "a spare forgets its part",
    "all leave in order",
    "an exit is noticed before messages are read",
    "what a dead rank sent is not read",
}


def defined_rules() -> set[str]:
    headers = [path.read_text().split('"""')[1] for path in PROTOCOL.glob("*.py")]
    return {
        rule for header in headers for rule in re.findall(r"^([A-Z]+(?:-[A-Z0-9]+)?) +[A-Z`]", header, re.MULTILINE)
    }


def test_every_rule_has_a_mutant() -> None:
    assert set(RULES) == defined_rules()
    assert len(RULES) > 70


def test_every_mutant_is_of_a_rule() -> None:
    named = {name for names in RULES.values() for name in names}
    assert not named & OTHERS
    assert named | OTHERS == {*MUTANTS, *UNIT_MUTANTS}
    assert not MUTANTS.keys() & UNIT_MUTANTS.keys()


@pytest.mark.parametrize("name", UNIT_MUTANTS)
def test_a_unit_test_fails_without_the_rule(name: str) -> None:
    mutant = UNIT_MUTANTS[name]
    mutant.shown_by()
    with patched(mutant.patches), pytest.raises((Exception, Failed)):
        mutant.shown_by()
    mutant.shown_by()
