"""State as JSON and tensors, there and back."""

from __future__ import annotations

import enum
import json
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elasticgang.state.serialization import as_bytes, flatten, unflatten

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
DTYPES = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64])
TENSORS = st.builds(
    lambda shape, dtype: torch.ones(shape, dtype=dtype), st.lists(st.integers(0, 3), max_size=3).map(tuple), DTYPES
)
TREES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text() | st.booleans() | st.none(), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return all(map(same, a, b)) and len(a) == len(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def there_and_back(tree: object) -> Any:
    spec, tensors = flatten(tree)
    return unflatten(json.loads(json.dumps(spec)), tensors)


# SERIAL-1
@given(TREES)
def test_any_state_comes_back_equal_through_json(tree: object) -> None:
    assert same(there_and_back(tree), tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor": 0},  # looks like our own spelling
        {"dict": []},
        {"tuple": [1]},
        {2: "a", "2": "b", None: "c", "null": "d", True: "e", "true": "f"},  # JSON would make three keys of them
        {None: (), 2: ((), [])},
        [math.inf, -math.inf, math.nan, -0.0, 1e308, 2**80],
        (),
        {},
    ],
)
def test_what_json_would_confuse_is_kept(tree: object) -> None:
    assert same(there_and_back(tree), tree)


def test_the_state_of_a_real_optimizer_and_scheduler_comes_back() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    adam = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, max_lr=0.1, total_steps=9)
    for _ in range(3):
        model(torch.ones(5, 3)).sum().backward()
        adam.step()
        schedule.step()
    for state in (adam.state_dict(), model.state_dict()):
        assert same(there_and_back(dict(state)), dict(state))
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(there_and_back(adam.state_dict()))
    assert same(again.state_dict(), adam.state_dict())


def test_an_ordered_dict_comes_back_in_its_order() -> None:
    tree = OrderedDict([("z", 1), ("a", 2)])
    assert list(there_and_back(tree).items()) == [("z", 1), ("a", 2)]


def test_tensors_are_counted_in_the_order_of_the_tree_and_not_copied() -> None:
    first, second = torch.zeros(2), torch.zeros(3, requires_grad=True)
    spec, tensors = flatten({"a": [first, {"b": second}]})
    assert [tensor.data_ptr() for tensor in tensors] == [first.data_ptr(), second.data_ptr()]
    assert not tensors[1].requires_grad
    assert "tensor" in json.dumps(spec)


class Name(str):
    def __str__(self) -> str:
        return "another"


class Count(int):
    def __int__(self) -> int:
        return -1


class Color(enum.IntEnum):
    RED = 1


# SERIAL-3
@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float64(0.1), 0.1),
        (np.int64(-3), -3),
        (np.uint8(3), 3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (Name("a"), "a"),
        (Count(3), 3),
    ],
)
def test_values_of_numpy_and_of_subclasses_become_plain(value: Any, plain: Any) -> None:
    assert same(there_and_back([value]), [plain])
    assert same(there_and_back({value: 1}), {plain: 1})


# SERIAL-3
@pytest.mark.parametrize("value", [np.float32(1), Color.RED, np.zeros(2), np.complex128(1)])
def test_what_would_not_be_the_same_as_a_plain_value_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"state\['a'\] is of {type(value).__name__}"):
        flatten({"a": value})


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("unpickled",)


# SERIAL-2
@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a": [1, object()]}, "state['a'][1]"),
        ({"a": {"b": {1, 2}}}, "state['a']['b']"),
        ((b"bytes",), "state[0]"),
        ([Evil()], "state[0]"),
        ([pickle.dumps(1)], "state[0]"),
        ({"f": print}, "state['f']"),
    ],
)
def test_any_other_kind_is_refused_by_its_path(tree: object, path: str) -> None:
    with pytest.raises(TypeError) as refused:
        flatten(tree)
    assert str(refused.value).startswith(f"{path} is of ")


# SERIAL-2
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    ],
    ids=["coo", "csr", "jagged", "nested"],
)
def test_a_tensor_that_is_not_strided_is_refused_by_its_path(make: Callable[[], Tensor], layout: str) -> None:
    told = rf"state\['a'\] is a tensor of the layout {layout}; state must be made of strided"
    with pytest.raises(TypeError, match=told):
        flatten({"a": make()})


def test_any_other_kind_of_key_is_refused() -> None:
    with pytest.raises(TypeError, match=r"state\['a'\] has the key \(1, 2\) of tuple"):
        flatten({"a": {(1, 2): 3}})


@pytest.mark.parametrize("data", [{"tensor": 1}, {"tensor": "x"}, {"dict": [[1, 2, 3]]}, {"other": 1}, {"dict": 3}])
def test_what_is_not_of_flatten_is_refused(data: object) -> None:
    with pytest.raises((KeyError, IndexError, TypeError, ValueError)):
        unflatten(data, [torch.zeros(1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_the_bytes_of_a_tensor_are_all_of_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.arange(math.prod(shape)).to(dtype).view(shape)
    data = as_bytes(tensor)
    assert len(data) == tensor.numel() * tensor.element_size()
    assert bytes(data) == b"".join(bytes(as_bytes(item)) for item in tensor.flatten())


def test_a_tensor_that_torch_conjugates_or_negates_when_it_is_read_has_these_bytes() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert bytes(as_bytes(tensor.conj())) == bytes(as_bytes(torch.tensor([1 - 2j, 3 + 4j])))
    assert bytes(as_bytes(tensor.conj().imag)) == bytes(as_bytes(torch.tensor([-2.0, 4.0])))


def test_bytes_are_shared_where_the_tensor_is_contiguous_and_right_where_it_is_not() -> None:
    tensor = torch.zeros(4, dtype=torch.uint8)
    as_bytes(tensor)[1] = 7
    assert tensor.tolist() == [0, 7, 0, 0]
    transposed = torch.arange(6, dtype=torch.uint8).view(2, 3).t()
    assert bytes(as_bytes(transposed)) == bytes([0, 3, 1, 4, 2, 5])
