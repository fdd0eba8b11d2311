"""The names of tensors in a checkpoint: what they say of the seats that have written them (PLACED-1).

Pure: names, and trees of JSON in which `{"tensor": name}` stands for a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

FROZEN = "frozen"  # of what a seat has saved: the parameters that required no gradients
_SCOPED = re.compile(r"(.*)@((?:pp|sdp|tp)=\d+(?:,(?:pp|sdp|tp)=\d+)*)", re.DOTALL)


def without_axes(name: str, axes: Collection[str]) -> str:
    """`name` without what it says of the seat along `axes`."""
    found = _SCOPED.fullmatch(name)
    if found is None:
        return name
    kept = [each for each in found[2].split(",") if each.partition("=")[0] not in axes]
    return f"{found[1]}@{','.join(kept)}" if kept else found[1]


def stage_in(name: str) -> str:
    """The part of `name` that says of which stage it is; "" if there are no stages."""
    found = _SCOPED.fullmatch(name)
    return "" if found is None else next((each for each in found[2].split(",") if each.startswith("pp=")), "")


def replace_names(spec: Any, new_name: Callable[[str], str]) -> Any:
    """`spec` with each tensor's name replaced."""
    if isinstance(spec, list):
        return [replace_names(item, new_name) for item in spec]
    if not isinstance(spec, dict):
        return spec
    if "tensor" in spec:
        return {"tensor": new_name(spec["tensor"])}
    if "tuple" in spec:
        return {"tuple": replace_names(spec["tuple"], new_name)}
    return {"dict": [[key, replace_names(value, new_name)] for key, value in spec["dict"]]}


def tensor_names(spec: Any) -> Iterator[str]:
    """The names in `spec`, in order."""
    if isinstance(spec, list):
        for item in spec:
            yield from tensor_names(item)
    elif isinstance(spec, dict):
        if "tensor" in spec:
            yield str(spec["tensor"])
        elif "tuple" in spec:
            yield from tensor_names(spec["tuple"])
        else:
            for _, value in spec["dict"]:
                yield from tensor_names(value)
