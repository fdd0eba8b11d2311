"""What torch's `ProcessGroup` takes, in every form that its docstrings name, ours takes with the same meaning.

The forms are read off torch: a newer one shows here what is missing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torchft.process_group as torchft
from torch import Tensor
from torch._C import _distributed_c10d as _c10d
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    HashStore,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import ProcessGroup, ReduceOp

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.group_backend import BackendQueries
from elasticgang.collectives.torch_methods import CollectiveMethods
from elasticgang.collectives.work import Work
from elasticgang.comm import ProcessGroupGloo, ProcessGroupIsolatedGloo, SwallowingProcessGroup
from elasticgang.errors import NotSupportedError
from elasticgang.gang import FakeGang
from elasticgang.gang.torch_process_group import GangProcessGroup
from tests.integration.forms import reducing, rooted
from tests.integration.rings import Ring

_any_c10d: Any = _c10d  # torch 2.13 has no `ReconfigureOptions`
SIZE, ROOT, TAG = 3, 1, 6
LONG = timedelta(seconds=60)


# -- what torch has


@dataclass(frozen=True)
class Parameter:
    """`depth`: of lists around tensors; None for what holds no tensors."""

    name: str
    depth: int | None
    is_required: bool

    @property
    def key(self) -> str:
        return self.name if self.depth is None else f"{self.name}/{self.depth}"


def overloads(name: str) -> list[tuple[Parameter, ...]]:
    """Of the method of torch's, by its docstring."""
    text = re.sub(r"<[^<>]*object at 0x\w+>|<RedOpType[^<>]*>", "...", getattr(ProcessGroup, name).__doc__)
    signatures = re.findall(rf"^(?:\d+\. )?{name}\((.*)\) -> ", text, re.MULTILINE)
    assert signatures, f"{name} has no signature: {text}"
    return [tuple(_parameters(signature)) for signature in signatures]


def _parameters(signature: str) -> Iterator[Parameter]:
    for part in re.split(r", (?![^\[]*\])", signature)[1:]:  # without self
        name, _, rest = part.partition(": ")
        kind, _, default = rest.partition(" = ")
        depth = kind.count("Sequence[") if "torch.Tensor" in kind else None
        yield Parameter(name, depth, not default)


def methods() -> list[str]:
    """Those that start something: torch's own methods that give a work, or wait themselves."""
    found = [name for name in dir(ProcessGroup) if "-> c10d::Work" in (getattr(ProcessGroup, name).__doc__ or "")]
    return sorted({*found, "monitored_barrier"} - {"_end_coalescing", *NOT_HERE})  # Gloo has none of the first


# Since torch 2.15, whose Gloo refuses to gather into one tensor too.
NOT_HERE = ("gather_into_tensor", "gather_single", "reconfigure")


# -- what is given


def new(seed: int, count: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(0, 50, (count,), generator=generator).float()


def empty(count: int = 4) -> Tensor:
    return torch.full((count,), 99.0)


def arguments(method: str, rank: int, root: int, op: Any) -> dict[str, Any]:
    """For every parameter of the method, by `Parameter.key`."""
    mine, parts = new(rank), [new(10 * rank + place) for place in range(SIZE)]
    outputs, whole = [empty() for _ in range(SIZE)], new(rank, 4 * SIZE)
    common = {"timeout": LONG, "op": op, "root": root}
    single = {
        "output/0": empty(4 * SIZE), "input/0": mine, "outputs/1": [empty(4 * SIZE)], "inputs/1": [mine],
        "opts": AllgatherOptions(),
    }  # fmt: skip
    scattering = {
        "output/0": (output := empty()), "output_tensors/1": [output], "input/1": parts, "input_tensors/2": [parts],
        "opts": reducing(ReduceScatterOptions, op),
    }  # fmt: skip
    scattered = {
        "outputTensor/0": (part := empty()), "inputTensor/0": whole, "outputs/1": [part], "inputs/1": [whole],
        "opts": reducing(ReduceScatterOptions, op),
    }  # fmt: skip
    exchanged = {"output/0": empty(4 * SIZE), "input/0": whole, "opts": AllToAllOptions()}
    exchanged |= {"output_split_sizes": [4] * SIZE, "input_split_sizes": [4] * SIZE}
    at_root = outputs if rank == root else []
    from_root = parts if rank == root else []
    specific: dict[str, dict[str, Any]] = {
        "allreduce": {"tensors/1": [mine], "tensor/0": mine, "opts": reducing(AllreduceOptions, op)},
        "allreduce_coalesced": {"tensors/1": [mine, new(rank + 5)], "opts": reducing(AllreduceCoalescedOptions, op)},
        "allgather": {
            "output_tensors/2": [outputs], "output_tensors/1": outputs, "input_tensors/1": [mine],
            "input_tensor/0": mine, "opts": AllgatherOptions(),
        },
        "allgather_coalesced": {
            "output_lists/2": [[output] for output in outputs], "input_list/1": [mine], "opts": AllgatherOptions(),
        },
        "_allgather_base": single,
        "all_gather_single": single,
        "all_gather_single_coalesced": single,
        "allgather_into_tensor_coalesced": single,
        "reduce_scatter": scattering,
        "_reduce_scatter_base": scattered,
        "reduce_scatter_single": scattered,
        "reduce_scatter_single_coalesced": scattered,
        "reduce_scatter_tensor_coalesced": scattered,
        "alltoall": {"output_tensors/1": outputs, "input_tensors/1": parts, "opts": AllToAllOptions()},
        "alltoall_base": exchanged,
        "all_to_all_single": exchanged,
        "broadcast": {"tensors/1": [mine], "tensor/0": mine, "opts": rooted(BroadcastOptions, root)},
        "reduce": {"tensors/1": [mine], "tensor/0": mine, "opts": reducing(ReduceOptions, op, root)},
        "gather": {
            "output_tensors/2": [at_root] if at_root else [], "output_tensors/1": at_root, "input_tensors/1": [mine],
            "input_tensor/0": mine, "opts": rooted(GatherOptions, root),
        },
        "scatter": {
            "output_tensors/1": [output], "output_tensor/0": output, "input_tensors/1": from_root,
            "input_tensors/2": [from_root] if from_root else [], "opts": rooted(ScatterOptions, root),
        },
        "barrier": {"opts": BarrierOptions()},
        "monitored_barrier": {"wait_all_ranks": True},
        "send": {"tensors/1": [mine], "dstRank": (rank + 1) % SIZE, "tag": TAG},
        "recv": {"tensors/1": [empty()], "srcRank": (rank - 1) % SIZE, "tag": TAG},
        "recv_anysource": {"arg0/1": [empty()], "arg1": TAG},
    }  # fmt: skip
    assert method in specific, f"torch's ProcessGroup has {method}, which nothing is known of here"
    return {**common, **specific[method]}


OUTPUTS = re.compile(r"output|tensor|arg0")


def perform(pg: Any, method: str, rank: int, form: Sequence[Parameter], is_by_keyword: bool) -> list[list[float]]:
    """What `method` writes when it is given the parameters of `form`."""
    names = {parameter.name for parameter in form}
    root = ROOT if names & {"opts", "root"} else 0
    given = arguments(method, rank, root, ReduceOp.MAX if names & {"opts", "op"} else ReduceOp.SUM)
    for parameter in form:
        assert parameter.key in given, f"{method} takes {parameter.key}, which nothing is known of here"
    chosen = {parameter.name: given[parameter.key] for parameter in form}
    partner = None
    if method == "send":
        partner = pg.recv([received := empty()], (rank - 1) % SIZE, TAG)
    elif method.startswith("recv"):
        partner = pg.send([new(rank)], (rank + 1) % SIZE, TAG)
    work = getattr(pg, method)(**chosen) if is_by_keyword else getattr(pg, method)(*chosen.values())
    if work is not None:
        work.wait()
    if partner is not None:
        partner.wait()
    if method == "send":
        return [received.tolist()]
    if method == "reduce" and rank != root:
        return []
    written = [value for name, value in chosen.items() if OUTPUTS.match(name)]
    return [tensor.tolist() for tensor in flat(written)]


def flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from flat(each)


# -- the tests


@pytest.fixture(scope="module")
def gloo(store: str) -> Iterator[Ring]:
    ring = Ring(lambda: ProcessGroupGloo(LONG), SIZE, store)
    yield ring
    ring.close()


@pytest.fixture(scope="module")
def isolated(store: str) -> Iterator[Ring]:
    ring = Ring(lambda: ProcessGroupIsolatedGloo(LONG), SIZE, store)
    yield ring
    ring.close()


@pytest.fixture(scope="module", params=["isolated", "swallowing", "in-process"])
def ours(request: pytest.FixtureRequest, store: str) -> Iterator[Ring]:
    kinds: dict[str, Callable[[], Any]] = {
        "isolated": lambda: ProcessGroupIsolatedGloo(LONG),
        "swallowing": lambda: SwallowingProcessGroup(ProcessGroupIsolatedGloo(LONG)),
        "in-process": lambda: ProcessGroupGloo(LONG),
    }
    ring = Ring(kinds[request.param], SIZE, store)
    yield ring
    ring.close()


FORMS = [(method, index) for method in methods() for index in range(len(overloads(method)))]
NOT_OF_GLOO = {"alltoall"}  # of lists


def test_there_are_forms() -> None:
    assert {"allreduce", "_allgather_base", "recv_anysource", "monitored_barrier"} <= set(methods())
    assert len(overloads("allreduce")) == 3


# TORCHGROUP-1
@pytest.mark.parametrize(("method", "index"), FORMS)
def test_every_form_of_torchs_is_taken(method: str, index: int, ours: Ring, gloo: Ring) -> None:
    form = overloads(method)[index]
    required = [parameter for parameter in form if parameter.is_required]
    is_named = not any(re.fullmatch(r"arg\d+", parameter.name) for parameter in form)  # pybind's, of those without
    for parameters, is_by_keyword in ((form, True), (form, False), (required, True)):
        if is_by_keyword and not is_named:
            continue
        found = ours.each(lambda rank, p=parameters, k=is_by_keyword: perform(ours[rank], method, rank, p, k))  # type: ignore[misc]
        if method in NOT_OF_GLOO:
            expected = [[new(10 * place + rank).tolist() for place in range(SIZE)] for rank in range(SIZE)]
        else:
            expected = gloo.each(
                lambda rank, p=parameters, k=is_by_keyword: perform(gloo[rank]._pg, method, rank, p, k)  # type: ignore[misc]
            )
        assert found == expected
        assert any(found) or "barrier" in method


@pytest.mark.parametrize("method", methods())
def test_a_keyword_that_there_is_not_is_named(method: str, ours: Ring) -> None:
    form = overloads(method)[0]
    given = arguments(method, 0, 0, ReduceOp.SUM)
    with pytest.raises(TypeError, match="bogus"):
        getattr(ours[0], method)(*[given[parameter.key] for parameter in form], bogus=1)


TWICE: dict[str, Callable[[Any], object]] = {
    "op and opts": lambda pg: pg.allreduce(tensors=[empty()], op=ReduceOp.SUM, opts=AllreduceOptions()),
    "tensor and tensors": lambda pg: pg.broadcast(tensor=empty(), tensors=[empty()], root=0),
    "by place and by name": lambda pg: pg.allreduce([empty()], ReduceOp.SUM, op=ReduceOp.MAX),
    "a number as timeout": lambda pg: pg.allreduce([empty()], op=ReduceOp.SUM, timeout=3.0),
    "a number as timeout, by place": lambda pg: pg.broadcast(empty(), 0, 3),
    "a number as options": lambda pg: pg.allgather([[empty()] * SIZE], [empty()], 3.0),
    "a number as a barrier's options": lambda pg: pg.barrier(3.0),
    "an operation as root": lambda pg: pg.reduce(empty(), ReduceOp.MAX),
    "other options": lambda pg: pg.broadcast([empty()], AllreduceOptions()),
}


# CALL-1
@pytest.mark.parametrize("case", list(TWICE))
def test_what_no_overload_takes_is_a_type_error(case: str, ours: Ring) -> None:
    with pytest.raises(TypeError):
        TWICE[case](ours[0])
    assert ours[0].errored() is None


# Its methods have torch's parameters in the same places, under names of its own.
OF_TORCHFT = sorted(({*methods(), "broadcast_one"} & set(vars(torchft.ProcessGroup))) - {"send", "recv"})


@pytest.mark.parametrize("method", OF_TORCHFT)
def test_torchfts_names_are_taken(method: str, isolated: Ring) -> None:
    names = list(inspect.signature(getattr(torchft.ProcessGroup, method)).parameters)[1:]
    keys = {"broadcast_one": ["tensor/0", "root"], "barrier": ["opts"]}.get(method)
    if keys is None:
        keys = [parameter.key for parameter in overloads(method)[0]]

    def use(rank: int) -> None:
        given = arguments(method.replace("_one", ""), rank, ROOT, ReduceOp.SUM)
        getattr(isolated[rank], method)(**{name: given[key] for name, key in zip(names, keys, strict=True)}).wait()

    isolated.each(use)


def test_torchfts_names_of_messages_are_taken(isolated: Ring) -> None:
    sent = isolated.begin(lambda: isolated[0].send(tensors=[new(3)], dst_rank=1, tag=0).wait())
    isolated[1].recv(tensors=[tensor := empty()], src_rank=0, tag=0).wait()
    assert sent.result()
    assert torch.equal(tensor, new(3))


@pytest.mark.parametrize("method", [name for name in NOT_HERE if hasattr(ProcessGroup, name)])
def test_what_is_not_here_raises(method: str, isolated: Ring) -> None:
    given: list[Any] = (
        [_any_c10d.ReconfigureOptions()] if method == "reconfigure" else [empty(4 * SIZE), empty(), GatherOptions()]
    )
    with pytest.raises(RuntimeError, match="backend"):
        getattr(isolated[0], method)(*given)
    assert isolated[0].errored() is None


# -- beside collectives

INHERITED = {
    "_backend_id", "_enable_collectives_timing", "_end_coalescing", "_get_backend_name",
    "_get_sequence_number_for_group", "_id", "_pybind11_conduit_v1_", "_register_backend",
    "_register_on_completion_hook", "_set_default_backend", "_set_sequence_number_for_group", "_start_coalescing",
    "_wait_for_pending_works", "abort", "boxed", "bound_device_id", "get_group_store", "name", "set_timeout",
    "shutdown", "unbox",
}  # fmt: skip
# Asked of a backend in C++: they raise. There is no hook of a call to unregister.
SINCE_2_15 = {
    "_add_ephemeral_timeout", "get_backend", "get_reconfigure_handle", "new_window", "register_abort_hook",
    "supports_reconfigure", "unregister_abort_hook", "unregister_post_hook", "unregister_pre_hook",
}  # fmt: skip


def test_every_method_of_torchs_is_ours_or_known_to_need_no_backend() -> None:
    """`split_group` of torch's ends the process by a segmentation fault where there is no backend in C++."""
    ours = set(dir(CollectiveMethods))
    members = {name for name in vars(ProcessGroup) if not name.startswith("__")} - set(
        ProcessGroup.BackendType.__members__
    )
    assert members - ours - {"BackendType"} <= {*INHERITED, *SINCE_2_15, *NOT_HERE}


@pytest.mark.parametrize("method", ["register_pre_hook", "register_post_hook"])
def test_hooks_of_calls_are_refused_because_nothing_would_call_them(method: str, ours: Ring) -> None:
    for pg in (ours[0], GangProcessGroup(FakeGang("cpu"))):
        with pytest.raises(NotSupportedError, match="no hooks"):
            getattr(pg, method)(1, print)


NOT_ALIKE = ("supports_reconfigure", "supports_splitting", "supports_tensor_alloc")


def test_devices_and_abilities_are_gloos(ours: Ring, gloo: Ring) -> None:
    cpu = torch.device("cpu")
    for pg in (ours[0], GangProcessGroup(FakeGang(cpu))):
        assert pg._device_types == [cpu]
        backend, theirs = pg._get_backend(cpu), gloo[0]._pg._get_backend(cpu)
        for name in dir(theirs):
            if name.startswith("supports_") and name not in NOT_ALIKE:
                assert getattr(backend, name) == getattr(theirs, name), name
        for name in vars(ProcessGroup):  # since torch 2.15 a group is asked too
            if name.startswith("supports_") and name not in NOT_ALIKE:
                assert getattr(pg, name) == getattr(gloo[0]._pg, name), name
        assert backend.supports_tensor_alloc(cpu) == theirs.supports_tensor_alloc(cpu)
        assert backend.supports_splitting == isinstance(pg, GangProcessGroup)
        assert (backend.rank(), backend.size(), backend.name()) == (pg.rank(), pg.size(), pg.getBackendName())
        assert pg._has_hooks() == gloo[0]._pg._has_hooks()
        assert pg.bound_device_id == gloo[0]._pg.bound_device_id
        assert pg.use_pg_for_symm_mem_rendezvous == gloo[0]._pg.use_pg_for_symm_mem_rendezvous
        with pytest.raises(RuntimeError, match="device type cuda"):
            pg._get_backend(torch.device("cuda"))
        if not isinstance(pg, GangProcessGroup):
            with pytest.raises(NotSupportedError, match="cannot be split"):
                pg.split_group([0])
        with pytest.raises(NotSupportedError, match="merged"):
            pg.merge_remote_group(HashStore(), 2)


def test_a_group_before_its_first_configuration_serves_its_device() -> None:
    for pg in (ProcessGroupGloo(LONG), SwallowingProcessGroup(ProcessGroupGloo(LONG))):
        assert pg._device_types == [torch.device("cpu")]
    assert isinstance(GangProcessGroup(FakeGang("cpu")), BackendQueries)


def test_a_group_that_was_given_a_timeout_gives_it_to_its_calls() -> None:
    class Recording(FakeGang):
        seen: ClassVar[list[float | None]] = []

        def _start(self, collective: Collective) -> Work:
            self.seen.append(collective.timeout_s)
            return super()._start(collective)

    pg: Any = Recording("cpu", size=2).as_process_group()
    pg.allreduce([empty()])
    pg.set_timeout(timedelta(seconds=7))
    pg.allreduce([empty()])
    pg.allreduce([empty()], timeout=timedelta(seconds=3))
    assert Recording.seen == [None, 7.0, 3.0]
    for wrong, error in ((3.0, TypeError), (timedelta(0), ValueError)):
        with pytest.raises(error, match="timeout"):
            pg.set_timeout(wrong)


def test_the_group_of_a_fake_gang_is_split_as_the_gang() -> None:
    pg = GangProcessGroup(FakeGang("cpu", rank=2, size=4))
    part = pg.split_group([3, 2], timeout=LONG, group_name="pair")
    assert part is not None
    assert (part.rank(), part.size(), part.group_name) == (0, 2, "pair")
    assert pg.split_group([0, 1]) is None
