"""Which gangs are current, in which thread."""

from __future__ import annotations

import threading

import pytest
import torch

from elasticgang.errors import InvalidOperationError
from elasticgang.gang import (
    FakeGang,
    Gangs,
    create_fake_gangs,
    get_current_gangs,
    get_default_gangs,
    maybe_get_current_gangs,
)

CPU = torch.device("cpu")
GUARD_S = 20.0


def gangs_of(rank: int = 0, size: int = 1) -> Gangs:
    gang = FakeGang(CPU, rank=rank, size=size)
    return Gangs(root=gang, dp=gang, rdp=gang, sdp=FakeGang(CPU), tp=FakeGang(CPU), pp=FakeGang(CPU))


def test_the_innermost_gangs_are_current() -> None:
    assert maybe_get_current_gangs() is None
    outer, inner = gangs_of(), gangs_of()
    with outer as entered:
        assert entered is outer
        with inner:
            assert maybe_get_current_gangs() is inner
            with outer:
                assert get_current_gangs() is outer
            assert maybe_get_current_gangs() is inner
        assert maybe_get_current_gangs() is outer
    assert maybe_get_current_gangs() is None


def test_what_was_not_entered_last_is_not_left() -> None:
    outer, inner = gangs_of(), gangs_of()
    with pytest.raises(InvalidOperationError, match="other gangs were entered last"):
        outer.__exit__(None, None, None)
    with outer:
        with pytest.raises(InvalidOperationError, match="other gangs were entered last"):
            inner.__exit__(None, None, None)
        assert maybe_get_current_gangs() is outer


def test_a_device_may_be_given_by_its_name() -> None:
    assert FakeGang("cpu").device == CPU
    gangs = create_fake_gangs("cpu")
    assert gangs.device == CPU
    with gangs:
        assert get_current_gangs("cpu") is gangs
    assert get_default_gangs("cpu") is get_default_gangs(CPU)
    assert get_default_gangs("meta").device == CPU
    with pytest.raises(ValueError, match="must not be of type `meta`"):
        FakeGang("meta")
    with pytest.raises(ValueError, match="`device` must be a device of torch, but is 'xyz'"):
        FakeGang("xyz")


def test_an_error_inside_leaves_no_gangs_behind() -> None:
    with pytest.raises(RuntimeError, match="mine"), gangs_of():
        raise RuntimeError("mine")
    assert maybe_get_current_gangs() is None


def test_other_threads_have_their_own() -> None:
    """GANGS-1, also in threads that were started before, and inside each other. There was a fairseq2 that had a stack
    in the main thread only, and an AttributeError in all others."""
    seen: list[Gangs | None] = []
    mine, theirs = gangs_of(), gangs_of()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        seen.append(maybe_get_current_gangs())
        with theirs:
            seen.append(maybe_get_current_gangs())
            inside.set()
            assert leave.wait(GUARD_S)
        seen.append(maybe_get_current_gangs())

    with mine:
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(GUARD_S)
        assert maybe_get_current_gangs() is mine
    assert maybe_get_current_gangs() is None
    leave.set()
    thread.join(GUARD_S)
    assert seen == [None, theirs, None]


def test_closing_closes_each() -> None:
    gangs = create_fake_gangs(CPU)
    gangs.close()
    for gang in (gangs.root, gangs.dp, gangs.rdp, gangs.sdp, gangs.tp, gangs.pp):
        with pytest.raises(InvalidOperationError):
            gang.barrier()
