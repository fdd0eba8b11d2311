"""What an agent and its coordinator know of each other's facts, compared while nothing is under way between them.

TOLD-1   While nothing is under way in an open session, the coordinator has the facts that its agent would tell, and the
     agent has those of the job that the coordinator has summed up last.
TOLD-2   The job has successors if an agent has, and its failures are of agents whose facts are known. Of an agent that
     is not in the record and has no session, only its successors are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticgang.protocol.job_facts import NO_FACTS, AgentFacts
from elasticgang.simulation.invariants import Violation

if TYPE_CHECKING:
    from elasticgang.protocol.coordinator_state import CoordinatorState
    from elasticgang.simulation.host import Host


def check_session(host: Host) -> None:
    """TOLD-1. Waits are not simulated."""
    connection = host.connection
    if connection is None or connection.to_agent or connection.to_coordinator or not host.has_begun:
        return
    coordinator, session = connection.coordinator, host.session
    state = coordinator.state
    if coordinator.outbox or state.is_deciding or session.is_ended or not session.is_welcome:
        return
    if not connection.is_coordinator_open or connection.number not in state.sessions.begun:
        return
    facts = session.facts
    if facts != NO_FACTS and session.decision is not None and session.decision.record.agents == (session.agent,):
        facts = facts.alone()  # FACTS-ALONE
    told = state.facts.by_agent.get(session.agent, NO_FACTS)
    if told != facts:
        raise Violation(f"TOLD-1: {coordinator.name} knows {told} of {host.name}, which has {facts}")
    known, of_job = host.facts, state.facts.sent
    if known is of_job:
        return
    # A failure that is taken back is not told of: who knows it may (FACTS-JOB).
    if known.have_successors != of_job.have_successors or not {*known.failures}.issuperset(of_job.failures):
        raise Violation(f"TOLD-1: {host.name} knows {known} of the job, but {coordinator.name} {of_job}")


def check_sums(name: str, state: CoordinatorState) -> None:
    """TOLD-2. `state`: of the coordinator `name`, which has just looked for agents that were silent for long."""
    if state.is_deciding:
        return
    facts, of_job = state.facts.by_agent, state.facts.sent
    if of_job.have_successors != any(each.has_successors for each in facts.values()):
        raise Violation(f"TOLD-2: {name} knows {of_job} of the job, but {facts} of its agents")
    failures = {(agent, failure.member) for agent, each in facts.items() for failure in each.failures}
    if not failures.issuperset([(failure.agent, failure.member) for failure in of_job.failures]):
        raise Violation(f"TOLD-2: {name} knows {of_job.failures}, but {failures} of its agents")
    record, present = state.record, {session.agent for session in state.sessions.begun.values()}
    for agent, each in facts.items():
        is_absent = agent not in present and (record is None or not record.has_agent(agent))
        if is_absent and each != AgentFacts(has_successors=True):
            raise Violation(f"TOLD-2: {name} knows {each} of {agent}, which takes no part and has no session")
