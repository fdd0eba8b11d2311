"""What is said of TLS files that change, cannot be used, or end, and when."""

from __future__ import annotations

import pytest

from elasticgang.session.tls_rotation import (
    MAX_EARLY_S,
    EndsSoon,
    HasEnded,
    Life,
    News,
    Problem,
    Refused,
    Renewed,
    Rotation,
)

HOUR_S, DAY_S = 3600.0, 86400.0
DAY = Life("the certificate /tls.crt", 0.0, DAY_S)
NEXT = Life("the certificate /tls.crt", DAY_S / 2, 1.5 * DAY_S)
HALF = Problem("--tls-key /tls.key is not the key of --tls-cert /tls.crt")


# TLS-NEWEST
def test_new_files_are_told_of() -> None:
    (told,) = Rotation(DAY).looked(NEXT, 12 * HOUR_S)
    assert told == Renewed(NEXT)
    assert told.text == (
        "the TLS files have changed, and new connections use them; the certificate /tls.crt is valid until "
        "1970-01-02 12:00:00 UTC"
    )


# TLS-WHOLE
def test_files_that_cannot_be_used_are_told_of_once_and_not_at_the_first_look() -> None:
    rotation = Rotation(DAY)
    assert rotation.looked(HALF, 0.0) == []
    (told,) = rotation.looked(HALF, 1.0)
    assert told == Refused(f"{HALF.reason}; the earlier TLS files stay in use")
    assert [rotation.looked(HALF, now_s) for now_s in (2.0, 3.0)] == [[], []]


# TLS-WHOLE
def test_a_look_while_the_files_are_replaced_is_no_problem() -> None:
    rotation = Rotation(DAY)
    for _ in range(3):
        assert rotation.looked(HALF, 0.0) == []
        assert rotation.looked(None, 1.0) == []
    assert rotation.looked(HALF, 2.0) == []
    assert rotation.looked(NEXT, 3.0) == [Renewed(NEXT)]


# TLS-WHOLE
def test_another_reason_is_told_of_and_so_is_the_same_one_after_the_files_were_whole() -> None:
    rotation, other = Rotation(DAY), Problem("the key file /tls.key cannot be read")
    told = [rotation.looked(found, 0.0) for found in (HALF, other, HALF, other, None, HALF, HALF)]
    assert [len(news) for news in told] == [0, 1, 1, 0, 0, 0, 1]


# TLS-WHOLE
def test_reasons_that_always_differ_fill_no_log() -> None:
    rotation = Rotation(DAY)
    told = [rotation.looked(Problem(str(number)), 0.0) for number in range(100)]
    assert sum(map(len, told)) == 8


# TLS-ENDS
@pytest.mark.parametrize(
    ("life_s", "early_s"), [(HOUR_S, HOUR_S / 4), (DAY_S, 6 * HOUR_S), (4 * DAY_S, DAY_S), (90 * DAY_S, DAY_S)]
)
def test_an_end_is_told_of_in_the_last_quarter_and_a_day_at_most(life_s: float, early_s: float) -> None:
    life, begins_s = Life("it", 1000.0, 1000.0 + life_s), 1000.0
    assert MAX_EARLY_S == DAY_S
    rotation, from_s, ends_s = Rotation(life), begins_s + life_s - early_s, begins_s + life_s
    assert rotation.looked(None, from_s - 1.0) == []
    assert rotation.looked(None, from_s) == [EndsSoon(life, early_s)]
    assert rotation.looked(None, ends_s - 1.0) == []
    assert rotation.looked(None, ends_s) == [HasEnded(life)]
    assert rotation.looked(None, ends_s + DAY_S) == []


# TLS-ENDS
def test_an_end_is_told_of_beside_files_that_cannot_be_used() -> None:
    rotation = Rotation(DAY)
    told = [rotation.looked(HALF, hour * HOUR_S) for hour in (1, 2, 18, 24)]
    assert [[type(news) for news in each] for each in told] == [[], [Refused], [EndsSoon], [HasEnded]]


# TLS-ENDS
def test_new_files_have_an_end_of_their_own() -> None:
    rotation = Rotation(DAY)
    assert len(rotation.looked(None, 20 * HOUR_S)) == 1
    assert rotation.looked(NEXT, 21 * HOUR_S) == [Renewed(NEXT)]
    assert rotation.looked(None, 25 * HOUR_S) == []
    assert rotation.looked(None, 36 * HOUR_S) == [HasEnded(NEXT)]  # nobody looked meanwhile


# TLS-ENDS
def test_files_that_end_soon_are_told_of_as_they_come() -> None:
    assert Rotation(DAY).looked(NEXT, 35 * HOUR_S) == [Renewed(NEXT), EndsSoon(NEXT, HOUR_S)]


def test_nothing_is_told_of_an_end_that_is_not_known() -> None:
    assert Rotation(None).looked(None, 1e12) == []


@pytest.mark.parametrize(
    ("news", "text"),
    [
        (
            EndsSoon(DAY, 6 * HOUR_S),
            "the certificate /tls.crt expires in 6 h, at 1970-01-02 00:00:00 UTC: without a new one, new sessions and "
            "heals fail from then on",
        ),
        (EndsSoon(DAY, 700.0), "the certificate /tls.crt expires in 12 min, at 1970-01-02 00:00:00 UTC: "),
        (EndsSoon(DAY, 20.0), "the certificate /tls.crt expires in 20 s, at 1970-01-02 00:00:00 UTC: "),
        (
            HasEnded(DAY),
            "the certificate /tls.crt has expired, at 1970-01-02 00:00:00 UTC: open sessions go on, but new ones and "
            "heals fail until a new one is there",
        ),
    ],
)
def test_what_is_said_of_an_end(news: News, text: str) -> None:
    assert news.text.startswith(text)
