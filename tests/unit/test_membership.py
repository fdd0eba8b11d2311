"""Who is in a reconfigured group, from handles alone."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta

import pytest

from elasticgang.comm.membership import Handle, membership
from elasticgang.errors import InvalidOperationError, MembershipError

A, B, C = (Handle(name * 32, 0, f"10.0.0.{number}:4000{number}") for number, name in enumerate("abc"))


@dataclass(frozen=True)
class Options:
    """As torch's, which torch 2.13 does not have."""

    handles: Collection[str]
    uuid: int = 7
    timeout: timedelta | None = None


def texts(*handles: Handle) -> list[str]:
    return list(map(str, handles))


def test_a_handle_is_read_as_it_was_written() -> None:
    assert str(A) == f"elasticgang:{'a' * 32}:0:10.0.0.0:40000"
    for handle in (A, B, Handle("m", 12, "fe80::1%eth0:29400")):
        assert Handle.parse(str(handle)) == handle


@pytest.mark.parametrize("text", ["", "gloo:0:1:2:host:1", "elasticgang:member", "elasticgang:member:first:host:1"])
def test_what_is_no_handle_of_ours_is_refused(text: str) -> None:
    with pytest.raises(MembershipError, match="is no handle"):
        Handle.parse(text)
    with pytest.raises(MembershipError, match="is no handle"):
        membership(Options([str(A), text]), A, frozenset())


def test_a_list_gives_ranks_by_position_and_a_set_the_same_to_all() -> None:
    for member, rank in ((C, 0), (A, 1), (B, 2)):
        found = membership(Options(texts(C, A, B)), member, frozenset())
        assert (found.rank, found.size, found.address) == (rank, 3, C.address)
    of_set = [membership(Options(set(texts(C, B, A))), member, frozenset()) for member in (A, B, C)]
    assert [found.rank for found in of_set] == [0, 1, 2]
    assert {found.address for found in of_set} == {A.address}
    assert len({found.prefix for found in of_set}) == 1


# MEMBERSHIP-1
def test_an_outdated_handle_is_no_member() -> None:
    assert membership(Options(texts(A.next(), B)), A.next(), frozenset()).rank == 0
    for handles in (texts(A, B), texts(B, C)):
        with pytest.raises(MembershipError, match="present handle is not among"):
            membership(Options(handles), A.next(), frozenset())


# MEMBERSHIP-2
def test_members_that_disagree_do_not_share_a_prefix() -> None:
    def prefix(handles: Iterable[Handle], uuid: int = 7) -> str:
        return membership(Options(texts(*handles), uuid), A, frozenset()).prefix

    assert prefix([A, B]) == prefix([A, B])
    found = [prefix([A, B]), prefix([B, A]), prefix([A, B, C]), prefix([A, B], uuid=8), prefix([A, B.next()])]
    assert len(set(found)) == len(found)
    assert all(len(each) < 100 for each in found)


# MEMBERSHIP-3
def test_a_uuid_is_used_once() -> None:
    with pytest.raises(MembershipError, match="uuid 7 was already used"):
        membership(Options(texts(A)), A, {3, 7})


@pytest.mark.parametrize(("handles", "what"), [([], "at least one"), (texts(A, B, A), "unique")])
def test_impossible_members_are_refused(handles: list[str], what: str) -> None:
    with pytest.raises(MembershipError, match=what):
        membership(Options(handles), A, frozenset())


def test_the_error_is_one_that_callers_of_torch_catch() -> None:
    assert issubclass(MembershipError, InvalidOperationError)
    assert issubclass(MembershipError, RuntimeError)
    assert str(pickle.loads(pickle.dumps(MembershipError("why")))) == "why"
