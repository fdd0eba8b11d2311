"""The settings of optimizers: what their parameter groups have beside the parameters (SMALLSTATE-1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from elasticgang.errors import WireError
from elasticgang.protocol.form import UNKNOWN, Form, Item, all_but_false

_NO_SETTINGS = ("params", "param_names")  # of a parameter group
_NOT_OF_THE_SCRIPT = ("foreach", "fused")  # `elasticgang.Optimizer` may turn them off


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.param_groups
    return groups


def parameters_of(optimizer: Any) -> list[Tensor]:
    return [parameter for group in groups_of(optimizer) for parameter in group["params"]]


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """SMALLSTATE-1."""
    return {key: value for key, value in group.items() if key not in _NO_SETTINGS}


def without_settings(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict (SMALLSTATE-1)."""
    groups = [{key: group[key] for key in _NO_SETTINGS if key in group} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def with_settings(state: dict[str, Any], settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """An optimizer's state dict with these settings of its first groups."""
    groups = state["param_groups"]
    changed = [{**group, **copy_of(own)} for group, own in zip(groups, settings, strict=False)]
    return {**state, "param_groups": changed + groups[len(changed) :]}


def set_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Give `group` these settings alone. A tensor of it stays the same tensor, as a captured graph needs it."""
    for key in settings_of(group).keys() - settings.keys():
        del group[key]
    for key, value in settings.items():
        own = group.get(key)
        if (
            isinstance(own, Tensor)
            and isinstance(value, Tensor)
            and (own.shape, own.dtype) == (value.shape, value.dtype)
        ):
            own.copy_(value)
        elif isinstance(own, tuple) and type(value) is tuple and len(own) == len(value):
            group[key] = _made_as(own, copy_of(value))  # a named tuple is sent as a tuple
        else:
            group[key] = copy_of(value)


def tensors_of(optimizer: Any) -> list[dict[str, Tensor]]:
    """The settings of each group that are tensors. Groups may share one, as that of a learning rate that was given for
    all of them."""
    return [
        {key: value for key, value in settings_of(group).items() if isinstance(value, Tensor)}
        for group in groups_of(optimizer)
    ]


def keep_tensors(optimizer: Any, former: Sequence[dict[str, Tensor]]) -> None:
    """Let the groups have the tensors again that they had before the optimizer loaded a state, with the values that it
    has loaded: what shares a tensor goes on to share it, as on the ranks that have loaded nothing."""
    for group, own in zip(groups_of(optimizer), former, strict=False):
        set_settings(own, {key: group[key] for key in own if key in group})
        group.update(own)


def copy_of(value: Any) -> Any:
    """A copy of settings. What is no tensor, list, tuple or dict is taken for a constant."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copy_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(copy_of, value))
    if isinstance(value, tuple):
        return _made_as(value, tuple(map(copy_of, value)))
    return value


def _made_as(like: tuple[Any, ...], items: tuple[Any, ...]) -> tuple[Any, ...]:
    """`items` as a tuple with names, if `like` has them."""
    return type(like)(*items) if hasattr(like, "_fields") else items


def settings_form(optimizer: Any, max_norm: float | None, required: Sequence[Sequence[bool]] | None = None) -> Form:
    """The settings of all groups, and the limit of the gradients' norm: numbers, strings and what is made of them.
    `required`: of each group, which parameters require gradients; None: this rank cannot say."""
    found: list[Item] = [] if max_norm is None else [("`max_norm`", _described(max_norm) or "")]
    for number, group in enumerate(groups_of(optimizer)):
        for key, value in settings_of(group).items():
            if (description := _described(value)) is not None:
                found.append((f"{key!r} of parameter group {number}", description))
        described = UNKNOWN if required is None else all_but_false(required[number])
        found.append((f"what requires gradients in parameter group {number}", described))
    return tuple(found)


def own_settings(optimizer: Any, *, is_scheduled: bool) -> Iterator[tuple[str, str, object]]:
    """What a script chooses for an optimizer: the names of the settings of all groups, in words, and as they are. Not
    the learning rate if a schedule of torch sets it: what the script has given is `initial_lr` then, if anything."""
    for number, group in enumerate(groups_of(optimizer)):
        for key, value in settings_of(group).items():
            is_chosen = key not in _NOT_OF_THE_SCRIPT and not (key == "lr" and (is_scheduled or "initial_lr" in group))
            if is_chosen and (description := _described(value)) is not None:
                yield f"{key!r} of parameter group {number}", description, value


def _described(value: Any) -> str | None:
    """In words. Numbers are rounded, because hosts may compute the last bits otherwise. None: ranks may have others."""
    if isinstance(value, Tensor):
        return _described(value.item()) if value.numel() == 1 else None
    if isinstance(value, list | tuple):
        parts = list(map(_described, value))
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(value, bool | str | None):
        return repr(value)
    return f"{float(value):.9g}" if isinstance(value, int | float) else None


def check_num_groups(name: str, offered: Sequence[object], optimizer: Any) -> None:
    if len(offered) != (own := len(groups_of(optimizer))):
        raise WireError(f"the optimizer {name!r} has {len(offered)} parameter groups at the source, and {own} here")


def check_groups(name: str, offered: Sequence[dict[str, Any]], optimizer: Any) -> None:
    """Raises WireError: `offered` has other numbers of groups, or of parameters in a group, than `optimizer`."""
    check_num_groups(name, offered, optimizer)
    for number, (theirs, mine) in enumerate(zip(offered, groups_of(optimizer), strict=True)):
        if (num := len(theirs["params"])) != (own := len(mine["params"])):
            raise WireError(
                f"group {number} of the optimizer {name!r} has {num} parameters at the source, and {own} here"
            )
