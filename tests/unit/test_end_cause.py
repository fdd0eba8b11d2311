"""Why a generation ends, in the words of each agent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticgang.protocol.end_cause import EndCause


@pytest.mark.parametrize(
    ("cause", "own", "others"),
    [
        (EndCause("died", ("a",), (0,)), "rank 0 died", "rank 0 of agent a died"),
        (EndCause("died", ("a",), (0, 2)), "rank 0, 2 died", "rank 0, 2 of agent a died"),
        (EndCause("exits", ("a",)), "agent a exits", "agent a exits"),
        (EndCause("is lost", ("a", "b")), "agent a, b is lost", "agent a, b is lost"),
        (EndCause("it was over"), "it was over", "it was over"),
    ],
)
def test_an_agent_names_its_own_ranks_without_itself(cause: EndCause, own: str, others: str) -> None:
    assert (cause.text("a"), cause.text("c")) == (own, others)


def test_the_end_of_ranks_is_no_end_of_their_agent() -> None:
    assert EndCause("exits", ("a",)).ended_agents == ("a",)
    assert EndCause("died", ("a",), (0,)).ended_agents == ()


def test_a_cause_is_elsewhere_if_it_is_known_of_other_agents_alone() -> None:
    died = EndCause("was killed by SIGKILL", ("b",), (1,))
    assert died.is_elsewhere("a")
    assert not died.is_elsewhere("b")
    assert not replace(died, is_effect=True).is_elsewhere("a")
    assert not replace(died, timed_out=True).is_elsewhere("a")
    assert not EndCause("it was over when an agent came back").is_elsewhere("a")
