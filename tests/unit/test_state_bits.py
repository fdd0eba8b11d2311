"""The digests of the state that replicas have alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elasticgang.state import state_bits
from elasticgang.state.registered_state import RegisteredState
from elasticgang.state.serialization import as_bytes
from elasticgang.state.staging import CHUNK_BYTES


def digests_of(*tensors: Tensor) -> list[int]:
    large = {"parameters": {"model": {str(number): tensor for number, tensor in enumerate(tensors)}}, "optimizers": {}}
    return state_bits.digest(large, lambda: None)[1]


def of_bits(bits: int) -> Tensor:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


def trained(*, in_order: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, and its optimizer with a state."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optim = torch.optim.AdamW(model.parameters())
    parameters = list(model.parameters())
    for parameter in parameters if in_order else parameters[::-1]:
        parameter.grad = torch.ones_like(parameter)
        optim.step()
        parameter.grad = None
    return model, optim


def large(**objects: object) -> dict[str, Any]:
    state = RegisteredState()
    state.register(**objects)
    return state.large()


# BITS-1
@pytest.mark.parametrize(
    ("one", "other"),
    [(0x7FC00000, 0x7FC00001), (0x00000000, -0x80000000), (0x3F800000, 0x3F800001), (0x7F800001, 0x7FC00001)],
)
def test_every_bit_counts_also_of_nan_and_zero(one: int, other: int) -> None:
    assert digests_of(of_bits(one)) == digests_of(of_bits(one))
    assert digests_of(of_bits(one)) != digests_of(of_bits(other))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.complex64])
def test_a_flipped_bit_shows_in_every_type(dtype: torch.dtype) -> None:
    values = torch.arange(24, dtype=torch.float32).to(dtype).reshape(4, 6)
    flipped = values.clone()
    flipped.view(-1).view(torch.uint8)[17] ^= 4
    assert digests_of(values) != digests_of(flipped)


# BITS-1
@pytest.mark.parametrize("shape", [(6, 4, 3, 5), (3, CHUNK_BYTES // 4 + 7), (1, CHUNK_BYTES // 8, 5), (0, 3)])
def test_strides_do_not_count(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    backwards = tuple(reversed(range(values.ndim)))
    other_way = values.permute(backwards).contiguous().permute(backwards)
    assert torch.equal(values, other_way)
    assert digests_of(values) == digests_of(other_way)
    if values.numel():
        other_way[(-1,) * values.ndim] += 1
        assert digests_of(values) != digests_of(other_way)


def test_views_that_are_computed_are_as_their_values() -> None:
    values = torch.randn(5, dtype=torch.complex64)
    assert digests_of(values.conj()) == digests_of(values.conj().resolve_conj())
    assert digests_of(torch.ones(1).expand(7)) == digests_of(torch.ones(7))


# BITS-2
def test_a_tensor_is_copied_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def recorded(part: Tensor) -> memoryview:
        sizes.append(part.nbytes)
        return as_bytes(part)

    monkeypatch.setattr(state_bits, "as_bytes", recorded)
    values = torch.randn(3 * CHUNK_BYTES // 8, 2).t()
    digests_of(values, torch.randn(3 * CHUNK_BYTES))
    assert sum(sizes) == values.nbytes
    assert max(sizes) <= CHUNK_BYTES


# BITS-3
def test_the_order_in_which_an_optimizer_made_its_state_does_not_count() -> None:
    found = []
    for in_order in (True, False):
        model, optim = trained(in_order=in_order)
        found.append(state_bits.digest(large(model=model, optim=optim), lambda: None))
    assert found[0] == found[1]
    assert list(optim.state_dict()["state"]) == [3, 2, 1, 0]


def test_parameters_and_what_optimizers_keep_are_compared_and_named() -> None:
    model, optim = trained()
    beats: list[int] = []
    names, digests = state_bits.digest(large(model=model, optim=optim), lambda: beats.append(1))
    assert len(names) == len(digests) == len(beats) == 4 + 4 * 3
    assert state_bits.in_words(names, [1]) == "'0.bias' of 'model'"
    optim.state[model.get_parameter("1.weight")]["exp_avg"].view(torch.int32)[0] ^= 1
    others = state_bits.digest(large(model=model, optim=optim), lambda: None)[1]
    places = [number for number, pair in enumerate(zip(digests, others, strict=True)) if len(set(pair)) > 1]
    assert state_bits.in_words(names, places) == "'exp_avg' of '1.weight' of 'model' in 'optim'"
    assert state_bits.in_words(names, [0, 1, 2]) == "'0.weight' of 'model' and 2 more"
    assert state_bits.in_words(names, [99]) == ""


def test_what_has_no_plain_memory_is_left_out() -> None:
    assert digests_of(torch.empty(3, device="meta"), torch.eye(2).to_sparse()) == []


def test_an_optimizer_of_what_is_not_registered_is_compared_too() -> None:
    _, optim = trained()
    names, _ = state_bits.digest(large(optim=optim), lambda: None)
    assert names[0] == "'exp_avg' of parameter 0 in 'optim'"
    assert len(names) == 12
