"""The form of a rank's training state: what is the same on all ranks that hold the same part of the model.

Pure. Values change from step to step, and are no part of it.

FORM-1  Two forms are alike if they have the same items with the same descriptions, whatever their order. Where an order
    counts, as that of an optimizer's parameters, the items have numbers.
FORM-2  An item that one of the ranks describes as `UNKNOWN` is no difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TypeAlias

Item: TypeAlias = tuple[str, str]  # the name of an object, and its description
Form: TypeAlias = tuple[Item, ...]

UNKNOWN = "unknown"


def form_from_json(data: Iterable[Iterable[object]]) -> Form:
    """Raises TypeError or ValueError: `data` is not a form."""
    return tuple((str(name), str(description)) for name, description in data)


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
