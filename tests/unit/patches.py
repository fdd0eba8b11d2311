"""Patches that make a rule another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Patch = tuple[object, str, Any]  # of this object, this attribute becomes that


def always(value: object) -> Callable[..., Any]:
    return lambda *_: value


def with_monkeypatch(test: Callable[..., None], *args: object) -> Callable[[], None]:
    def run() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            test(*args, monkeypatch)

    return run
