"""The registered objects of one rank take the state of another one as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elasticgang.errors import WireError
from elasticgang.state.optimizer_settings import settings_form
from elasticgang.state.registered_state import RegisteredState
from elasticgang.state.serialization import flatten, unflatten


def state_of(registered: RegisteredState) -> dict[str, Any]:
    return copy.deepcopy({"large": registered.large(), "small": registered.small.copy()})


class Mixed(torch.optim.Optimizer):
    """Keeps state in other dtypes than its parameters, as 8-bit optimizers and those with master weights do."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "step": torch.tensor(1.0),
                "master": parameter.float() + 1e-4,
                "codes": torch.full_like(parameter, 201, dtype=torch.uint8),
                "history": {"norms": [torch.tensor(1 / 3, dtype=torch.float64)]},
                "average": torch.ones_like(parameter),
            }


# SMALLSTATE-1
def test_groups_that_share_a_tensor_share_it_after_a_heal_too() -> None:
    """torch gives all groups the learning rate as one tensor, which a schedule with a function for each group sets."""

    def made() -> tuple[RegisteredState, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "betas": (0.5, 0.5)}]
        optim = torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False)
        registered = RegisteredState()
        registered.register(model=model, optim=optim)
        return registered, optim

    (registered, optim), (source, others) = made(), made()
    others.param_groups[0]["lr"].fill_(0.3)
    rate = optim.param_groups[0]["lr"]
    registered.load(state_of(source))
    assert all(group["lr"] is rate for group in optim.param_groups)
    assert rate.item() == pytest.approx(0.3)
    assert [group["betas"] for group in optim.param_groups] == [(0.9, 0.999), (0.5, 0.5)]


class Copied:
    """An optimizer whose state dict is a copy, so that its state can be changed by loading alone."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim, self.param_groups = optim, optim.param_groups

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.optim.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optim.load_state_dict(state)


def with_optimizer(wrap: Callable[[torch.optim.Optimizer], object] = lambda optim: optim) -> RegisteredState:
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optim = Mixed(model.parameters())
    registered = RegisteredState()
    registered.register(model=model, optim=wrap(optim))
    return registered


def trained() -> RegisteredState:
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optim = Mixed(model.parameters())
    optim.step()
    registered = RegisteredState()
    registered.register(model=model, optim=optim)
    return registered


# OPTIMIZERSTATE-1
def test_what_an_optimizer_keeps_has_the_dtype_of_the_source() -> None:
    state, registered = state_of(trained()), with_optimizer()
    registered.load(state)
    expected, found = (each["optimizers"]["optim"]["state"] for each in (state["large"], registered.large()))
    assert found.keys() == expected.keys() == {0, 1}
    for index in expected:
        history, same = expected[index].pop("history"), found[index].pop("history")
        assert (same["norms"][0].dtype, same) == (torch.float64, history)
        for key, tensor in expected[index].items():
            assert (found[index][key].dtype, found[index][key].tolist()) == (tensor.dtype, tensor.tolist()), key


# OPTIMIZERSTATE-1
def test_an_optimizer_that_converts_what_it_loads_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with_optimizer(Copied).load(state_of(trained()))
    assert "load_state_dict of 'optim' has converted state to another dtype than torch.float32" in caplog.text


class Schedule(NamedTuple):
    warm_up: int
    rate: float


def test_a_setting_with_names_is_sent_as_a_tuple_and_has_them_again() -> None:
    model, registered = nn.Linear(3, 2), RegisteredState()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    (group,) = optim.param_groups
    group["schedule"] = Schedule(5, 0.5)
    registered.register(optim=optim)
    registered.begin_step()
    spec, _ = flatten(registered.small.copy()["settings"])
    received = unflatten(spec, [])
    assert received["optim"][0]["schedule"] == (5, 0.5)
    for settings in (received, registered.small.copy()["settings"]):
        group["schedule"] = Schedule(6, 0.25)
        registered.small.load({"buffers": {}, "others": {}, "settings": settings})
        assert group["schedule"] == Schedule(5, 0.5)
        assert group["schedule"].rate == 0.5


@pytest.mark.parametrize("dropped", [True, False], ids=["a dropped step", "a heal"])
def test_a_buffer_that_is_expanded_takes_its_values(dropped: bool) -> None:
    module, registered = nn.Module(), RegisteredState()
    mask = torch.arange(3.0).view(3, 1).expand(3, 4)
    module.register_buffer("mask", mask)
    registered.register(model=module)
    registered.begin_step()
    state = state_of(registered)
    mask[:, :1] += 1
    registered.restore() if dropped else registered.load(state)
    assert mask.tolist() == [[float(row)] * 4 for row in range(3)]
    assert mask.stride() == (1, 0)


class Rotary(nn.Module):
    """Makes its table anew for a longer sequence, as models that cache one do."""

    table: Tensor
    mask: Tensor | None
    alias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.length = 1
        self.register_buffer("table", torch.ones(1))
        self.register_buffer("alias", self.table, persistent=False)
        self.register_buffer("mask", None)
        self.register_buffer("codes", torch.tensor([1, 2]))

    def grow(self, length: int) -> None:
        self.length = length
        self.register_buffer("table", torch.arange(float(length)))
        self.register_buffer("mask", torch.ones(length), persistent=False)
        self.register_buffer("further", torch.zeros(length), persistent=False)
        self.register_buffer("codes", torch.tensor([3], dtype=torch.int8))


def registered_rotary() -> tuple[nn.Sequential, Rotary, RegisteredState]:
    rotary, registered = Rotary(), RegisteredState()
    model = nn.Sequential(nn.Linear(2, 2), rotary)
    registered.register(model=model)
    registered.begin_step()
    return model, rotary, registered


# BUFFERS-1
def test_a_dropped_step_puts_back_the_tensors_that_it_has_replaced() -> None:
    model, rotary, registered = registered_rotary()
    before, keys = dict(model.named_buffers(remove_duplicate=False)), model.state_dict().keys()
    rotary.table += 6
    rotary.grow(4)
    del rotary.alias
    registered.restore()
    after = dict(model.named_buffers(remove_duplicate=False))
    assert after.keys() == before.keys() == {"1.table", "1.alias", "1.codes"}
    assert all(after[name] is tensor for name, tensor in before.items())
    assert (rotary.table.tolist(), rotary.codes, rotary.mask) == ([1.0], before["1.codes"], None)
    assert rotary.length == 1
    assert not hasattr(rotary, "further")
    assert model.state_dict().keys() == keys


def test_a_step_that_replaces_no_buffer_keeps_the_attributes_of_its_modules() -> None:
    _, rotary, registered = registered_rotary()
    rotary.length = 7
    registered.restore()
    assert rotary.length == 7


# BUFFERS-3
def test_a_dropped_step_puts_back_the_mode_of_each_module() -> None:
    model, rotary, registered = registered_rotary()
    rotary.eval()  # stays so, as a part that is frozen
    registered.begin_step()
    model.eval()
    registered.restore()
    assert [each.training for each in model.modules()] == [True, True, False]


# BUFFERS-2
def test_a_buffer_takes_a_value_of_another_shape_or_dtype_and_one_that_it_has_not() -> None:
    source, rotary, registered = registered_rotary()
    rotary.grow(4)
    registered.begin_step()
    state = state_of(registered)
    model, healed, learner = registered_rotary()
    learner.small.check(state["small"])
    learner.load(state)
    expected = dict(source.named_buffers())
    assert expected.keys() == {"1.table", "1.alias", "1.mask", "1.codes", "1.further"}
    for name, tensor in dict(model.named_buffers(remove_duplicate=False)).items():
        assert (tensor.dtype, tensor.tolist()) == (expected[name].dtype, expected[name].tolist()), name
    healed.grow(2)
    learner.restore()  # to what was healed
    assert {name: tensor.tolist() for name, tensor in model.named_buffers()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }


# BUFFERS-2
def test_names_of_one_buffer_have_its_new_tensor() -> None:
    _, rotary, registered = registered_rotary()
    rotary.table = rotary.alias = torch.arange(3.0)
    registered.begin_step()
    _, healed, learner = registered_rotary()
    learner.load(state_of(registered))
    assert healed.alias is healed.table
    assert healed.table.tolist() == [0.0, 1.0, 2.0]


def test_a_buffer_without_a_place_is_refused() -> None:
    _, _, registered = registered_rotary()
    for name in ("2.table", "1.grow"):
        with pytest.raises(WireError, match=f"only the source's module has the buffer '{name}'"):
            registered.small.check({"buffers": {"model": {name: torch.ones(1)}}, "others": {}})


def test_models_of_other_names_shapes_or_dtypes_are_told_apart() -> None:
    def model(**modules: nn.Module) -> str:
        state = RegisteredState()
        state.register(**modules)
        return state.objects.model

    one = model(model=nn.Linear(2, 3))
    assert one.startswith("2 parameters of 9 elements (")
    assert model(model=nn.Linear(2, 3)) == one
    others = [model(m=nn.Linear(2, 3)), model(model=nn.Linear(3, 2)), model(model=nn.Linear(2, 3).double())]
    assert len({one, *others, model(model=nn.Linear(2, 3, bias=False))}) == 5


# -- the form that peers compare


class Two(nn.Module):
    one: nn.Linear
    two: nn.Linear
    scale: Tensor

    def __init__(self, first: str = "one", second: str = "two", *, size: int = 3) -> None:
        super().__init__()
        for name in (first, second):
            setattr(self, name, nn.Linear(size, size))
        self.register_buffer("scale", torch.ones(1))


def form_of(module: nn.Module, optim: object) -> dict[str, str]:
    registered = RegisteredState()
    registered.register(model=module, optim=optim)
    return dict(registered.objects.form)


def differing(module: nn.Module, optim: object) -> set[str]:
    """The items of the form that are not those of `Two` with AdamW."""
    usual = Two()
    one, other = form_of(usual, torch.optim.AdamW(usual.parameters())), form_of(module, optim)
    return {name for name in {**one, **other} if one.get(name) != other.get(name)}


def adamw(module: nn.Module, **settings: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), **settings)  # type: ignore[arg-type]


# STATEFORM-1
def test_a_form_names_what_all_ranks_have_alike() -> None:
    module = Two()
    groups: list[dict[str, Any]] = [{"params": [module.two.bias]}, {"params": [module.one.weight]}]
    found = form_of(module, torch.optim.SGD(groups, lr=0.1))
    assert found["parameter 'one.weight' of 'model'"] == "[3, 3] of float32"
    assert found["the class of 'optim'"] == "torch.optim.sgd.SGD"
    assert found["group 1 of 'optim'"] == "1 parameters"
    assert found["parameter 0 of group 0 of 'optim'"] == "two.bias of 'model'"
    assert found["parameter 0 of group 1 of 'optim'"] == "one.weight of 'model'"


# STATEFORM-1
@pytest.mark.parametrize("case", ["order", "tied", "dtype", "class", "buffer", "groups"])
def test_another_script_has_another_form(case: str) -> None:
    module = Two("two", "one") if case == "order" else Two()
    if case == "tied":
        module.two.weight = module.one.weight
    elif case == "dtype":
        module.one.double()
    elif case == "buffer":
        module.register_buffer("further", torch.ones(1))
    optim: torch.optim.Optimizer = torch.optim.SGD(module.parameters()) if case == "class" else adamw(module)
    if case == "groups":
        optim = torch.optim.AdamW([{"params": list(each.parameters())} for each in (module.one, module.two)])
    found = differing(module, optim)
    expected = {
        "order": "parameter 0 of group 0 of 'optim'",
        "tied": "parameter 'two.weight' of 'model'",
        "dtype": "parameter 'one.bias' of 'model'",
        "class": "the class of 'optim'",
        "buffer": "buffer 'further' of 'model'",
        "groups": "group 1 of 'optim'",
    }
    assert expected[case] in found


# STATEFORM-1
def test_a_form_has_no_values_and_nothing_that_a_heal_takes() -> None:
    module = Two()
    module.scale = torch.ones(7)
    module.register_buffer("cache", torch.ones(1), persistent=False)  # by a forward that this rank alone has run
    optim = adamw(module, lr=0.5)
    module.one(torch.ones(3)).sum().backward()
    optim.step()
    module.one.requires_grad_(False)
    assert differing(module, optim) == set()


# STATEFORM-1
def test_the_form_of_an_object_stays_as_it_was_before_the_first_step() -> None:
    module, registered = Two(), RegisteredState()
    registered.register(model=module)
    before = registered.objects.form
    module.register_buffer("cache", torch.ones(1))  # by forward
    assert registered.objects.form == before
    registered.register(later=nn.Linear(1, 1))
    assert set(before) < set(registered.objects.form)
    registered.unregister(["later"])
    assert registered.objects.form == before


# LOADED-1
def test_what_was_frozen_is_named_once_it_has_required_gradients_in_three_steps() -> None:
    module, registered = Two(), RegisteredState()
    registered.register(model=module)
    small = registered.small.copy()
    loaded = {"small": small, "large": {"parameters": {}, "optimizers": {}}}
    assert [registered.unlike_loaded()[0] for _ in range(4)] == [[]] * 4
    frozen = [("model", "one.weight"), ("model", "one.bias"), ("model", "two.bias")]
    registered.load({**loaded, "frozen": frozen})
    module.one.bias.requires_grad_(False)
    found = [registered.unlike_loaded()[0]]
    module.one.bias.requires_grad_(True)  # as of one of two networks that train in turns
    registered.load(loaded)  # of a peer
    found += [registered.unlike_loaded()[0] for _ in range(3)]
    assert found == [[], [], ["'one.weight' of 'model'", "'two.bias' of 'model'"], []]
    registered.load({**loaded, "frozen": frozen})
    registered.unregister(["model"])  # the next seat has another module
    assert [registered.unlike_loaded()[0] for _ in range(4)] == [[]] * 4


# LOADED-2
def test_settings_of_the_script_that_a_load_has_replaced_are_named_unless_a_step_changes_them() -> None:
    def registered_adam(**settings: Any) -> tuple[Any, RegisteredState]:
        module, registered = Two(), RegisteredState()
        groups = [{"params": module.one.parameters()}, {"params": module.two.parameters(), "weight_decay": 0.0}]
        adam = torch.optim.AdamW(groups, **settings)  # type: ignore[arg-type]
        registered.register(model=module, optim=adam)
        return adam, registered

    saved, source = registered_adam(lr=0.5, betas=(0.9, 0.95), eps=1e-6, foreach=False)
    torch.optim.lr_scheduler.ExponentialLR(saved, 0.9)  # `initial_lr`
    saved.param_groups[1]["lr"] = 0.25  # by the schedule
    loaded = {"small": source.small.copy(), "large": source.large()}

    adam, registered = registered_adam(lr=0.1, betas=(0.9, 0.99), eps=1e-8)
    torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
    registered.load({**loaded, "frozen": []})
    found = [registered.unlike_loaded()[1]]
    for group in adam.param_groups:
        group["eps"] = 1e-8
    found += [registered.unlike_loaded()[1] for _ in range(3)]
    replaced = ["{} of parameter group %d of 'optim' is {} and not {}".format(*each) for each in REPLACED]
    assert found == [[], [], [each % number for number in (0, 1) for each in replaced], []]

    adam, same = registered_adam(lr=0.1, betas=(0.9, 0.99))
    same.load({**loaded, "frozen": []})
    for group in adam.param_groups:  # to numbers that are equal to those that were loaded
        group.update(lr=float(group["lr"]), eps=float("1e-6"), betas=(0.9, 0.95), initial_lr=float("0.5"))
    assert [same.unlike_loaded()[1] for _ in range(4)] == [[]] * 4

    _, running = registered_adam(lr=0.1)
    running.begin_step()
    running.load({**loaded, "frozen": []})  # the job goes back to a checkpoint, or takes another layout
    assert [running.unlike_loaded()[1] for _ in range(4)] == [[]] * 4

    _, learner = registered_adam(lr=0.1)
    learner.load(loaded)  # of a peer, with whose settings its own are compared
    assert [learner.unlike_loaded()[1] for _ in range(4)] == [[]] * 4


REPLACED = [("'betas'", "(0.9, 0.95)", "(0.9, 0.99)"), ("'initial_lr'", "0.5", "0.1")]


def test_settings_are_what_can_be_compared_rounded() -> None:
    module = Two()
    groups: list[dict[str, Any]] = [{"params": [module.one.weight]}, {"params": [module.two.weight], "lr": 0.1 + 1e-12}]
    optim = torch.optim.AdamW(groups, lr=torch.tensor(0.5), betas=(0.5, 0.25))
    optim.param_groups[0].update(hook=print, steps=np.float64(3), per_layer=torch.ones(2), name="slow")
    found = dict(settings_form(optim, None))
    assert found["'lr' of parameter group 0"] == "0.5"
    assert found["'lr' of parameter group 1"] == "0.1"
    assert found["'betas' of parameter group 1"] == "(0.5, 0.25)"
    assert found["'steps' of parameter group 0"] == "3"
    assert found["'name' of parameter group 0"] == "'slow'"
    assert found["'amsgrad' of parameter group 0"] == "False"
    assert not {f"{key!r} of parameter group 0" for key in ("hook", "per_layer", "params")} & found.keys()
    assert settings_form(optim, 1.0)[0] == ("`max_norm`", "1")


@pytest.mark.parametrize(
    ("required", "words"),
    [
        (None, "unknown"),
        ([True, True], "each parameter"),
        ([False] * 9 + [True, False, True], "each parameter but 0 to 8, 10"),
    ],
)
def test_what_requires_gradients_is_told_briefly(required: list[bool] | None, words: str) -> None:
    optim = torch.optim.SGD(Two().parameters(), lr=0.1)
    found = dict(settings_form(optim, None, None if required is None else [required]))
    assert found["what requires gradients in parameter group 0"] == words
