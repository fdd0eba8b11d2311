"""Two forms of training state, and how they differ in words."""

from __future__ import annotations

import pytest

from elasticgang.protocol import form
from elasticgang.protocol.form import Form, form_from_json

OWN: Form = (("parameter 'weight' of 'model'", "[3, 2] of float32"), ("the class of 'optim'", "torch.optim.sgd.SGD"))


# FORM-1
def test_the_order_of_the_items_does_not_count() -> None:
    assert form.difference(OWN, OWN[::-1]) is None
    assert form.difference((), ()) is None
    assert form.digest_of(OWN) == form.digest_of(OWN[::-1]) != form.digest_of(OWN[1:])


# FORM-2
def test_what_one_rank_cannot_say_is_no_difference() -> None:
    unknown: Form = ((OWN[0][0], form.UNKNOWN), OWN[1])
    assert form.difference(OWN, unknown) is form.difference(unknown, OWN) is None
    assert form.difference(OWN[:1], unknown) == "the class of 'optim' is missing here, and torch.optim.sgd.SGD there"


# FORM-1
@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        (
            OWN,
            (("parameter 'weight' of 'model'", "[3, 4] of float32"), OWN[1]),
            "parameter 'weight' of 'model' is [3, 2] of float32 here, and [3, 4] of float32 there",
        ),
        (OWN, OWN[:1], "the class of 'optim' is torch.optim.sgd.SGD here, and missing there"),
        (OWN[1:], OWN, "parameter 'weight' of 'model' is missing here, and [3, 2] of float32 there"),
        (
            OWN,
            (),
            "parameter 'weight' of 'model' is [3, 2] of float32 here, and missing there (1 more difference)",
        ),
        (
            (),
            (*OWN, ("c", "d")),
            "parameter 'weight' of 'model' is missing here, and [3, 2] of float32 there (2 more differences)",
        ),
    ],
)
def test_the_first_difference_names_both_sides(own: Form, other: Form, words: str) -> None:
    assert form.difference(own, other) == words


def test_a_form_that_a_peer_sends_is_checked() -> None:
    assert form_from_json([["a", "b"], ["c", "d"]]) == (("a", "b"), ("c", "d"))
    for data in (5, [1], [["a"]], [["a", "b", "c"]]):
        with pytest.raises((TypeError, ValueError)):
            form_from_json(data)  # type: ignore[arg-type]
