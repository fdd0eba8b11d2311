"""The form of a rank's training state: what is the same on all ranks that hold the same part of the model.

Pure. Values change from step to step, and are no part of it.

FORM-1  Two forms are alike if they have the same items with the same descriptions, whatever their order. Where an order
    counts, as that of an optimizer's parameters, the items have numbers.
FORM-2  An item that one of the ranks describes as `UNKNOWN` is no difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import Enum
from typing import TypeAlias

Item: TypeAlias = tuple[str, str]  # the name of an object, and its description
Form: TypeAlias = tuple[Item, ...]

UNKNOWN = "unknown"


class FormOf(str, Enum):
    """What a form describes."""

    STATE = "state"  # the training state of a part of the model
    SETTINGS = "settings"  # those with which a rank is about to apply an attempt at a step
    TRAINED = "trained"  # what it computes gradients of in that attempt


def form_from_json(data: Iterable[Iterable[object]]) -> Form:
    """Raises TypeError or ValueError: `data` is not a form."""
    return tuple((str(name), str(description)) for name, description in data)


def all_but_false(each_parameter: Iterable[bool]) -> str:
    """In words, as briefly as for a model of which the first layers are frozen."""
    runs: list[range] = []
    for place, is_so in enumerate(each_parameter):
        if is_so:
            continue
        if runs and runs[-1].stop == place:
            runs[-1] = range(runs[-1].start, place + 1)
        else:
            runs.append(range(place, place + 1))
    found = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"each parameter but {', '.join(found)}" if found else "each parameter"


def digest_of(form: Form) -> str:
    """The same for forms that are alike (FORM-1), and for no others."""
    return hashlib.blake2b(repr(sorted(form)).encode(), digest_size=16).hexdigest()


def difference(own: Form, other: Form) -> str | None:
    """In words, for this rank: the first difference, in the order of `other`, and how many more there are. None: the
    forms are alike."""
    here, there = dict(own), dict(other)
    names = [name for name in {**there, **here} if here.get(name) != there.get(name)]  # FORM-1
    names = [name for name in names if UNKNOWN not in (here.get(name), there.get(name))]  # FORM-2
    if not names:
        return None
    first, num_more = names[0], len(names) - 1
    mine, theirs = (form.get(first, "missing") for form in (here, there))
    more = f" ({num_more} more difference{'' if num_more == 1 else 's'})" if num_more else ""
    return f"{first} is {mine} here, and {theirs} there{more}"
