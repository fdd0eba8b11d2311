"""Groups by name: what there is, and that what there is not is said at once."""

from __future__ import annotations

import inspect
import subprocess
import sys
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torchft.process_group as torchft
from torch import nn
from torch.distributed import AllreduceOptions

import elasticgang as eg
import elasticgang.comm as comm
from elasticgang.comm import ProcessGroupGloo, ProcessGroupIsolatedGloo, create_process_group
from elasticgang.errors import InvalidOperationError, NotSupportedError, StaleGenerationError
from tests.integration.conftest import Rings
from tests.integration.rings import SUM
from tests.support import REPOSITORY

KINDS = {"gloo": ProcessGroupGloo, "isolated-gloo": ProcessGroupIsolatedGloo, "dummy": torchft.ProcessGroupDummy}


@pytest.mark.parametrize("name", list(KINDS))
def test_each_kind_works(name: str, rings: Rings) -> None:
    size = 1 if name == "dummy" else 2
    ring = rings(size, make=lambda: create_process_group(name, 30.0))
    assert all(type(pg) is KINDS[name] for pg in ring.groups)
    assert ring.sums() == [float(size)] * size
    ring.configure()
    assert ring.sums() == [float(size)] * size


@pytest.mark.parametrize("name", ["", "Gloo", "mpi", "isolated", "isolated-mpi"])
def test_an_unknown_kind_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=rf"one of gloo, nccl, isolated-gloo, isolated-nccl, dummy, but is '{name}'"):
        create_process_group(name)


@pytest.mark.parametrize("name", ["nccl", "isolated-nccl"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_a_kind_that_is_not_available_says_why(name: str) -> None:
    why = r"^(isolated-)?nccl is not available: (torch was built without nccl|there is no CUDA device)"
    with pytest.raises(NotSupportedError, match=why):
        create_process_group(name)


@pytest.mark.parametrize("name", ["gloo", "isolated-gloo"])
def test_gloo_that_is_not_there_is_said_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(NotSupportedError, match="torch was built without gloo"):
        create_process_group(name)


@pytest.mark.parametrize("timeout", [0.0, -1.0, timedelta(seconds=-1)])
@pytest.mark.parametrize("name", ["gloo", "isolated-gloo"])
def test_a_timeout_that_is_none_is_refused(name: str, timeout: Any) -> None:
    with pytest.raises(ValueError, match="`timeout` must be above 0"):
        create_process_group(name, timeout)


def test_an_in_process_group_that_is_not_configured_says_so(rings: Rings) -> None:
    pg: Any = create_process_group("gloo")
    with pytest.raises(InvalidOperationError, match="configure"):
        pg.allreduce([torch.ones(1)], SUM)
    ring = rings(2, make=lambda: create_process_group("gloo", 30.0))
    ring[0].abort()
    with pytest.raises(StaleGenerationError, match="aborted; call `configure`"):  # a loss, and no misuse
        ring[0].allreduce([torch.ones(1)], SUM)
    assert (ring[1].rank(), ring[1].size(), ring[0].size()) == (1, 2, 2)


def test_gloo_connects_by_the_address_that_it_is_given(rings: Rings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two addresses that no host's name has."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    hosts = iter(["127.0.0.2", "127.0.0.3"])
    ring = rings(2, make=lambda: create_process_group("gloo", 30.0, next(hosts)))
    assert ring.sums() == [2.0, 2.0]
    used = {each.laddr.ip for each in psutil.Process().net_connections("tcp")}
    assert {"127.0.0.2", "127.0.0.3"} <= used


def test_an_in_process_group_checks_before_it_sends(rings: Rings) -> None:
    ring = rings(2, make=lambda: create_process_group("gloo", 30.0))
    with pytest.raises(ValueError, match="must not share memory"):
        ring[0].allreduce([torch.ones(1).expand(3)], SUM)
    with pytest.raises(ValueError, match="elements"):
        ring[0]._allgather_base(torch.ones(3), torch.ones(3))
    assert ring.sums() == [2.0, 2.0]


@pytest.mark.parametrize("name", list(KINDS))
def test_ddp_takes_each_kind(name: str, rings: Rings) -> None:
    size = 1 if name == "dummy" else 2
    ring = rings(size, make=lambda: create_process_group(name, 30.0))

    def train(rank: int) -> list[float]:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            module = nn.Linear(2, 1)
        ddp = nn.parallel.DistributedDataParallel(module, process_group=ring[rank])
        torch.autograd.backward(ddp(torch.full((1, 2), rank + 1.0)).sum())
        assert module.weight.grad is not None
        found: list[float] = module.weight.grad[0].tolist()
        return found

    assert ring.each(train) == [[(size + 1) / 2] * 2] * size


def test_the_public_names_are_there() -> None:
    for module in (comm, eg):
        for name in module.__all__:
            home = getattr(module, name).__module__
            assert home.startswith("elasticgang.") or (module is comm and home.startswith("torchft.")), name
        assert {*module.__all__} <= {*dir(module)}
        with pytest.raises(AttributeError, match="no_such_name"):
            module.no_such_name  # noqa: B018
    public = {name: getattr(comm, name) for name in dir(comm) if not name.startswith("_")}
    ours = ("elasticgang.", "torchft.")
    assert {name for name, it in public.items() if getattr(it, "__module__", "").startswith(ours)} == {*comm.__all__}
    assert eg.SwallowingProcessGroup is comm.SwallowingProcessGroup


IN_PLACE_OF = {
    "ErrorSwallowingProcessGroupWrapper": "SwallowingProcessGroup",
    "ProcessGroupBabyGloo": "ProcessGroupIsolatedGloo",
    "ProcessGroupBabyNCCL": "ProcessGroupIsolatedNCCL",
    "ManagedProcessGroup": "ManagedProcessGroup",
    "ProcessGroupGloo": "ProcessGroupGloo",
    "ProcessGroupNCCL": "ProcessGroupNCCL",
}


def test_torchfts_names_are_there() -> None:
    """All that its module defines, whichever they are."""
    theirs = {
        name: value
        for name, value in vars(torchft).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == torchft.__name__
    }
    assert {*IN_PLACE_OF, "FakeProcessGroupWrapper", "create_store_client"} <= {*theirs}
    for name, value in theirs.items():
        found = getattr(comm, name)
        if name in IN_PLACE_OF:
            assert found is getattr(comm, IN_PLACE_OF[name])
            assert found is not value
            assert issubclass(found, torchft.ProcessGroup)
            required = [each for each in inspect.signature(found).parameters.values() if each.default is each.empty]
            assert len(required) == (1 if "Wrapper" in name or "Managed" in name else 0), "as theirs"
        elif name == "ProcessGroupBaby":
            assert issubclass(comm.ProcessGroupBabyGloo, found)
        else:
            assert found is value


def test_the_names_come_on_first_use() -> None:
    code = "import sys, elasticgang.comm; print(any(name in sys.modules for name in ('torch', 'torchft')))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, text=True) == "False\n"


def test_torchfts_wrappers_take_ours(rings: Rings) -> None:
    """Its fake one lets a future fail; its error-swallowing one is ours."""
    ring = rings(2, make=lambda: comm.FakeProcessGroupWrapper(comm.ProcessGroupBabyGloo(timedelta(seconds=30))))

    def reduce(rank: int) -> float:
        tensor = torch.tensor([rank + 1.0])
        ring[rank].allreduce([tensor], AllreduceOptions()).wait()
        return tensor.item()

    assert ring.each(reduce) == [3.0, 3.0]
    error = RuntimeError("injected")
    swallowing = comm.ErrorSwallowingProcessGroupWrapper(comm.ProcessGroupDummy(0, 1))
    swallowing.allreduce([torch.ones(1)], AllreduceOptions()).wait()
    assert swallowing.error() is None
    swallowing.report_error(error)
    assert swallowing.error() is swallowing.errored() is error
    swallowing.allreduce([torch.ones(1)], AllreduceOptions()).wait()


def test_a_comm_process_imports_little() -> None:
    """What it imports, each one has for itself unless the fork server imported it."""
    code = (
        "import sys, elasticgang.comm.worker\n"
        "print(*sorted(name for name in sys.modules if name.startswith(('elasticgang.', 'torchft'))))\n"
    )
    found = subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, text=True).split()
    assert {*found} <= {
        *(f"elasticgang.{room}" for room in ("collectives", "comm", "process")),
        *(f"elasticgang.comm.{name}" for name in ("agent_store", "arena", "task_threads", "torch_backend", "worker")),
        *(f"elasticgang.collectives.{name}" for name in ("backend_name", "collective", "dtypes", "exchange")),
        *(f"elasticgang.collectives.{name}" for name in ("table", "work")),
        *(f"elasticgang.{name}" for name in ("environment", "errors", "integers", "torch_private")),
        *(f"elasticgang.process.{name}" for name in ("death_watch", "framing", "futex", "parent_death")),
        *(f"elasticgang.process.{name}" for name in ("priority", "status_page", "stop_signals")),
    }


@pytest.mark.parametrize("name", [[], None, {}, 3])
def test_a_name_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="`name` must be one of gloo, "):
        create_process_group(name)


@pytest.mark.parametrize("name", ["gloo", "isolated-gloo"])
def test_a_timeout_without_end_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="`timeout` must be above 0 seconds and at most 1e"):
        create_process_group(name, float("inf"))
