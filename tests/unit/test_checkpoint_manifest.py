"""The manifest of a checkpoint: what is read back, and which ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elasticgang.checkpoint.digest import digest_of
from elasticgang.checkpoint.manifest import (
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    merge_tensors,
    parse,
)
from elasticgang.errors import CheckpointError
from elasticgang.protocol.commit import Attempt

DIGEST = "0" * 32
FILES = (FileEntry("a.safetensors", 8 + 24, 8, DIGEST), FileEntry("b.safetensors", 8 + 24 + 4, 8, DIGEST))
WEIGHT = TensorEntry(
    "model.weight",
    (4, 3),
    "float32",
    "replicated",
    (
        Piece("a.safetensors", 8, (0, 0), (2, 3), DIGEST),
        Piece("b.safetensors", 8, (2, 0), (2, 3), DIGEST),
    ),
)
STEP = TensorEntry("optim.step", (), "float32", "replicated", (Piece("b.safetensors", 32, (), (), DIGEST),))
MANIFEST = Manifest("job", Attempt(7, 2), "record", {"tp": 1}, FILES, (WEIGHT, STEP), {"0-0-0": {"a": [1, 2.5]}})


def test_a_manifest_is_read_back() -> None:
    assert parse(MANIFEST.encode()) == MANIFEST
    assert parse(MANIFEST.encode()).digest == json.loads(MANIFEST.encode())["digest"]
    assert MANIFEST.num_bytes == 68


def test_a_change_of_any_byte_is_found() -> None:
    """MANIFEST-1."""
    data = MANIFEST.encode()
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        with pytest.raises(CheckpointError):
            parse(bytes(changed))
    for size in range(0, len(data), 7):
        with pytest.raises(CheckpointError):
            parse(data[:size])


def with_digest(content: dict[str, Any]) -> bytes:
    rest = b'",' + json.dumps({name: value for name, value in content.items() if name != "digest"}).encode()[1:]
    return b'{"digest":"' + digest_of(rest).encode() + rest


def piece(number: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["tensors"][0]["pieces"][number].update(changes)

    return change


def of(kind: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content[kind][0].update(changes)

    return change


def test_the_helper_of_these_tests_changes_nothing_by_itself() -> None:
    assert parse(with_digest(json.loads(MANIFEST.encode()))) == MANIFEST


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda content: content.update(format=4),
            "its format is 4, and this version of elasticgang reads 1, 2 and 3:",
        ),
        (lambda content: content.update(format="1"), "its format is '1'"),
        (lambda content: content.pop("tensors"), "tensors"),
        (lambda content: content.update(step=-1), "-1 is no size"),
        (lambda content: content.update(step=True), "True is no size"),
        (lambda content: content.update(data_position={"step": 8}), "the data position is not the step"),
        (lambda content: content["files"].append(content["files"][0]), "a file appears twice"),
        (lambda content: content["tensors"].append(content["tensors"][0]), "a tensor appears twice"),
        (of("files", name="../a.safetensors"), "'../a.safetensors' is no name of a file"),
        (of("files", name="/etc/a.safetensors"), "is no name of a file"),
        (of("files", name=".a.safetensors"), "is no name of a file"),
        (of("files", name="a.safetensors\n"), "is no name of a file"),
        (of("files", size=33), "is said to have 33 bytes, but its pieces end at 32"),
        (of("files", size=1 << 70), "is no size"),
        (of("files", header_digest="0"), "is no digest"),
        (of("tensors", dtype="float31"), "there is no dtype 'float31'"),
        (of("tensors", shape=[4, 4]), "the pieces of model.weight do not cover it"),
        (of("tensors", shape=[1 << 40, 1 << 40]), "the pieces of model.weight do not cover it"),
        (of("tensors", shape=[3, 3]), "a piece of model.weight lies outside it"),
        (of("tensors", shape=[1] * 65), "is no shape"),
        (of("tensors", shape=[-4, -3]), "is no size"),
        (of("tensors", name="n" * 5000), "is no name"),
        (piece(0, file="c.safetensors"), "lies in c.safetensors, which is not listed"),
        (piece(0, file="../../x.safetensors"), "is no name of a file"),
        (piece(0, start=[1, 0]), "pieces of model.weight overlap"),
        (piece(0, start=[3, 0]), "a piece of model.weight lies outside it"),
        (piece(0, start=[0]), "a piece of model.weight lies outside it"),
        (piece(0, offset=12), "a.safetensors has a gap or an overlap at byte 12"),
        (piece(0, offset=0), "a.safetensors has a gap or an overlap at byte 0"),
        (piece(0, file="b.safetensors"), "a.safetensors is said to have 32 bytes, but its pieces end at 8"),
        (piece(0, digest="x" * 32), "is no digest"),
    ],
)
def test_an_inconsistent_manifest_is_refused(change: Callable[[dict[str, Any]], None], complaint: str) -> None:
    """MANIFEST-2: also with the right digest, which does not say who has written it."""
    content = json.loads(MANIFEST.encode())
    change(content)
    with pytest.raises(CheckpointError) as refused:
        parse(with_digest(content))
    assert complaint in str(refused.value)


def test_shares_that_disagree_on_a_tensor_are_refused() -> None:
    first, second = (replace(WEIGHT, pieces=WEIGHT.pieces[number : number + 1]) for number in (0, 1))
    assert merge_tensors([[first], [second, STEP]]) == (WEIGHT, STEP)
    with pytest.raises(CheckpointError, match=r"model.weight is float32 \[4, 3\] in one file and float64"):
        merge_tensors([[first], [replace(second, dtype="float64")]])
