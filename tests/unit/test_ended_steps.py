"""What a module of torch's `fully_shard` still knows of a step that has ended: nothing. `test_left_steps.py` shows it
with real jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import elasticgang as eg
from elasticgang.errors import PeerLostError
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.manager import QuorumManager
from elasticgang.state.snapshot_server import SnapshotServer

CPU = torch.device("cpu")
WIDTH, NUM_LAYERS = 2, 3


class Exchanges:
    """The collectives of one `fully_shard` module, with another rank that has the same. `log`: gets them by name."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def gather(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        self._log.append(f"gather {self._name}")
        output_tensor.chunk(2)[1].copy_(input_tensor)  # its first part is the input

    def scatter(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        self._log.append(f"scatter {self._name}")
        output_tensor.copy_(2 * input_tensor.view(2, -1)[0])


class Gather(Exchanges):
    __call__ = Exchanges.gather


class Scatter(Exchanges):
    __call__ = Exchanges.scatter


class Trained:
    """A sharded model of layers, wrapped. `num_of_root`: the root has the parameters of so many. `log`: the collectives
    of its present step."""

    def __init__(self, mesh: DeviceMesh, manager: QuorumManager, *, num_of_root: int = 0, keep: bool = False) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        self.log: list[str] = []
        for name, layer in [*list(self.layers.named_children())[num_of_root:], ("root", self.layers)]:
            fully_shard(layer, mesh=mesh)
            sharded = cast(FSDPModule, layer)
            sharded.set_custom_all_gather(cast(Any, Gather(name, self.log)))
            sharded.set_custom_reduce_scatter(cast(Any, Scatter(name, self.log)))
        self.model = eg.ShardedDataParallel(manager, self.layers, keep=keep)

    def reduce(self, is_on: bool) -> None:
        """Whether backward reduces the gradients."""
        cast(FSDPModule, self.layers).set_requires_gradient_sync(is_on)

    def forward(self) -> Tensor:
        output: Tensor = self.model(torch.ones(1, WIDTH, requires_grad=True))
        return output.square().sum()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.forward()

    def step(self) -> tuple[list[str], list[list[float]]]:
        """Forward and backward. Returns the collectives, and the gradients of this rank."""
        self.log.clear()
        self.forward().backward()  # type: ignore[no-untyped-call]
        return list(self.log), [cast(Any, each.grad).to_local().tolist() for each in self.layers.parameters()]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("sdp",))
    dist.destroy_process_group()


def alone() -> QuorumManager:
    layout = eg.ParallelLayout()
    return QuorumManager(LocalRendezvous(layout, CPU), SnapshotServer(), layout, CPU)


@pytest.fixture(params=[0, 1])
def trained(request: pytest.FixtureRequest, mesh: DeviceMesh) -> Callable[[], Trained]:
    return lambda: Trained(mesh, alone(), num_of_root=request.param)


def add_only(each: Trained) -> None:
    """A slot whose gradients `fully_shard` does not reduce."""
    each.reduce(False)
    each.forward().backward()  # type: ignore[no-untyped-call]
    each.reduce(True)


def forward(each: Trained) -> None:
    each.forward()


def _raise(*_: object) -> None:
    raise PeerLostError("a peer has died")


def half_a_forward(each: Trained) -> None:
    hook = each.layers[1].register_forward_pre_hook(_raise)
    with pytest.raises(PeerLostError):
        each.forward()
    hook.remove()


def half_a_backward(each: Trained) -> None:
    hook = each.layers[1].register_full_backward_pre_hook(_raise)
    loss = each.forward()
    with pytest.raises(PeerLostError):
        loss.backward()  # type: ignore[no-untyped-call]
    hook.remove()


# SHARDED-5, SHARDED-6
@pytest.mark.parametrize("what", [add_only, forward, half_a_forward, half_a_backward])
@pytest.mark.parametrize("rebuild", [False, True])
def test_a_dropped_step_changes_neither_gradients_nor_collectives_of_the_next(
    what: Callable[[Trained], None], rebuild: bool, trained: Callable[[], Trained]
) -> None:
    expected, dropped = trained().step(), trained()
    for _ in range(2):
        what(dropped)
        dropped.model.drop(rebuild=rebuild)
        assert dropped.step() == expected
        dropped.model.drop(rebuild=rebuild)


# SHARDED-5, SHARDED-6
@pytest.mark.parametrize("what", [add_only, forward])
def test_a_torch_without_reset_iter_state_forgets_gradients_and_the_order_of_the_forward(
    what: Callable[[Trained], None], trained: Callable[[], Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    expected, dropped = trained().step(), trained()
    what(dropped)
    dropped.model.drop(rebuild=True)
    assert dropped.step() == expected


def test_a_module_that_has_not_run_can_be_dropped(trained: Callable[[], Trained]) -> None:
    expected, dropped = trained().step(), trained()
    dropped.model.drop(rebuild=True)
    assert dropped.step() == expected


# SHARDED-6
@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize("num_of_root", [0, 1])
def test_an_evaluation_changes_neither_parameters_nor_collectives_of_the_next_step(
    num_of_root: int, has_slots: bool, mesh: DeviceMesh
) -> None:
    """It follows the slots of its step, or there are none, as on a rank that heals. Parameters change in each step."""

    def run(*, evaluates: bool) -> tuple[list[list[str]], list[list[float]]]:
        manager, logs = alone(), []
        each = Trained(mesh, manager, num_of_root=num_of_root)
        optim = eg.Optimizer(manager, torch.optim.SGD(each.layers.parameters(), lr=0.1))
        manager.register_state(model=each.model, optim=optim)
        for step in manager.steps(4):
            with step:
                if step.index % 2 == 0:
                    logs.append(each.step()[0])
                if evaluates and has_slots == (step.index % 2 == 0):
                    each.evaluate()
                assert optim.step(weight=1.0)
            with torch.no_grad():
                for value in each.layers.parameters():
                    value.mul_(0.5)
        return logs, [cast(Any, value.detach()).to_local().tolist() for value in each.layers.parameters()]

    assert run(evaluates=True) == run(evaluates=False)


def drop_all(module: FSDPModule, reset: Callable[[FSDPModule], None] = FSDPModule.reset_iter_state) -> None:
    """What `reset_iter_state` does in torch 2.15."""
    reset(module)
    for value in cast(nn.Module, module).parameters():
        value.grad = None


# SHARDED-6
@pytest.mark.parametrize("resets", [FSDPModule.reset_iter_state, drop_all])
def test_a_committed_step_keeps_the_gradients_for_its_optimizer(
    resets: Callable[[FSDPModule], None], mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FSDPModule, "reset_iter_state", resets)
    manager = alone()
    each = Trained(mesh, manager)
    optim = eg.Optimizer(manager, torch.optim.SGD(each.layers.parameters(), lr=0.5))
    manager.register_state(model=each.model, optim=optim)
    before = [cast(Any, value.detach()).to_local().clone() for value in each.layers.parameters()]
    for step in manager.steps(1):
        with step:
            _, gradients = each.step()
            assert optim.step(weight=1.0)
    after = [cast(Any, value.detach()).to_local() for value in each.layers.parameters()]
    expected = [old - 0.5 * torch.tensor(gradient) for old, gradient in zip(before, gradients, strict=True)]
    torch.testing.assert_close(after, expected)
    assert any(map(torch.Tensor.any, map(torch.tensor, gradients)))


# SHARDED-7
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("where", ["inside `accumulate`", "behind it"])
def test_a_last_slot_whose_gradients_are_only_added_is_refused(where: str, keep: bool, mesh: DeviceMesh) -> None:
    """Nothing would be trained, without an error. `test_sdp_bits.py` has slots before it: these may not be kept."""
    manager = alone()
    kept = Trained(mesh, manager, keep=keep)
    optim = eg.Optimizer(manager, torch.optim.SGD(kept.layers.parameters(), lr=0.1))
    manager.register_state(model=kept.model, optim=optim)
    for num_tries, step in enumerate(manager.steps(2)):
        kept.reduce(num_tries != 1)
        with contextlib.ExitStack() as stack:
            if num_tries == 1:
                message = r"must reduce the gradients of each slot, .*: leave out `set_requires_gradient_sync\(False\)`"
                if not keep:
                    message = "has not reduced the gradients of this rank's slots: call `set_requires_gradient_sync"
                stack.enter_context(pytest.raises(eg.InvalidOperationError, match=message))
            stack.enter_context(step)
            for slot in eg.GlobalBatch(1, size=1, slot=1).slots(step):
                with kept.model.accumulate(last=slot.last):
                    loss = kept.forward()
                    if where != "behind it":
                        loss.backward()  # type: ignore[no-untyped-call]
                if where == "behind it":
                    loss.backward()  # type: ignore[no-untyped-call]
            assert optim.step(weight=1.0)
