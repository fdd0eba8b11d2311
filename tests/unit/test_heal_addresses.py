"""Which addresses of its sources a healer asks, and in what order."""

from __future__ import annotations

import pytest

from elasticgang.state.heal_addresses import host_of, main_first, stripes, to_text

A = "10.0.0.1:1,10.1.0.1:2,10.2.0.1:3"
B = "10.0.0.2:1,10.1.0.2:2"
C = "10.0.0.3:1"


# HEALADDR-1
@pytest.mark.parametrize(
    ("sources", "here", "asked", "num_at_once"),
    [
        ([C], "10.0.0.9:1", ["10.0.0.3:1"], 1),
        ([A], "10.0.0.9:1", ["10.1.0.1:2", "10.2.0.1:3", "10.0.0.1:1"], 2),
        ([A], "10.0.0.1:9,10.1.0.1:8", ["10.0.0.1:1"], 1),  # on the same host
        ([A], "", ["10.1.0.1:2", "10.2.0.1:3", "10.0.0.1:1"], 2),
        (
            [A, B, C],
            "10.0.0.9:1",
            ["10.1.0.1:2", "10.1.0.2:2", "10.0.0.3:1", "10.2.0.1:3", "10.0.0.1:1", "10.0.0.2:1"],
            4,
        ),
        (["10.0.0.1:1,10.0.0.1:1,10.1.0.1:2"], "", ["10.0.0.1:1", "10.1.0.1:2"], 2),  # the main one is among them
        ([], "10.0.0.9:1", [], 0),
    ],
)
def test_a_healer_asks_one_interface_of_each_source_and_then_another(
    sources: list[str], here: str, asked: list[str], num_at_once: int
) -> None:
    assert stripes(sources, here) == (asked, num_at_once)


# HEALADDR-2
def test_ranks_begin_with_different_holders_after_those_on_their_host() -> None:
    far = [f"10.0.1.{number}:1" for number in range(20)]
    orders = [stripes([*far, C], f"10.0.0.3:{port}")[0] for port in range(100, 150)]
    assert {order[0] for order in orders} == {C}
    assert len({order[1] for order in orders}) > 10
    assert all(sorted(order) == sorted([*far, C]) for order in orders)


def test_an_address_is_written_as_it_is_read() -> None:
    assert to_text("10.0.0.1:1", ["10.1.0.1:2", "10.2.0.1:3"]) == A
    assert to_text("10.0.0.3:1", []) == C
    assert [host_of(text) for text in (A, C, "")] == ["10.0.0.1", "10.0.0.3", ""]


def test_little_is_asked_on_the_main_network_first() -> None:
    assert main_first(to_text("10.0.0.2:7", ["10.1.0.2:8"])) == ["10.0.0.2:7", "10.1.0.2:8"]
