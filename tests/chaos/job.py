"""A training job that kills itself at the places it is told to, and whose result is exact.

Gradients are small integers, so that their sums are the same in any order and over any number of ranks: a run with
kills must end in the very bits of the run alone. With `--real` they are not, and `--reduction reproducible` must have
the same effect.

`--faults` is a list of objects, each of which happens once in the life of the job, when the one before it has:
    at      one of PLACES
    rank    the local rank that gets there; null for whichever does first
    kill    "self" (the default), "raise" (OSError), "comm" (its comm process), "standby", "comms" (all comm processes
            of all ranks), "forkserver", "agent", or a list of local ranks;
            to stand still for ever: "stop" (SIGSTOP), "stop-comm", "stop-all" (both), "lock", "gil" (it keeps a core
            busy), "gil-asleep"; or for the seconds of `for`: "busy", "paused";
            to go: "drain" (SIGTERM to itself), "leave" (`manager.leave()`);
            "see-off": to wait until those that were told to go are gone, and their agent knows;
            "await-next": to wait until the fault after it has happened
    full    only once all ranks are active in a generation after that of the fault before (the default), or at any time
    free    it waits for no other fault
    step    only in this step
    later   only in a generation after that of the fault before
    alone   only in a generation without other ranks
    slots   it first waits until other ranks have finished so many slots in this try of the step
    voted   it first waits until so many other ranks have voted in this try of the step
    votes   only within the vote of a step, of the sums that a step has
    without the others enter the next generation before those that it kills start again

`--holds` are steps in which every rank waits for a file, `go-STEP`, or for the end of the generation.

While a fault is still to come and a rank is missing, the second step after the loss waits until somebody comes back, so
that the number of steps does not depend on speed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import functools
import hashlib
import json
import math
import multiprocessing
import os
import re
import signal
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import elasticgang as eg
from elasticgang import testing
from scripts.chaos_runs.soaking.comm_processes import comm_processes
from scripts.demo_job.driver import Tail
from tests.support import wait_until

NUM_SAMPLES, BATCH_SIZE, SLOT, SEED = 37, 8, 2, 5
INIT_SCALE = 2.0**8
COME_BACK_S = 100.0  # a guard: what a fork server imports takes long on a busy machine
HOLD_S = 120.0

PLACES = ("start", "joined", "built", "step", "forward", "slot", "body", "torn", "finished", *testing.PLACES)

GOING = ("drain", "leave")


class Counter(nn.Module):
    """The gradient of `weight[i]` is how often sample i was taken, times what the slot's random numbers say."""

    steps: Tensor

    def __init__(self, num_rows: int, *, is_real: bool = False) -> None:
        super().__init__()
        self.is_real = is_real
        self.weight = nn.Parameter(torch.zeros(NUM_SAMPLES))
        self.bias = nn.Parameter(torch.zeros(num_rows, 5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, index: Tensor) -> Tensor:
        if self.is_real:
            return (self.weight[index] * torch.randn(index.shape)).sum() + (
                self.bias * torch.randn(self.bias.shape)
            ).sum()
        factors = torch.randint(1, 5, index.shape)
        return (self.weight[index] * factors).sum() + self.bias.sum() * len(index)


class Faults:
    """Those that are still to come are known to all ranks by the files of those that were."""

    def __init__(
        self, directory: Path, specs: list[dict[str, Any]], num_ranks: int, num_active: int | None = None
    ) -> None:
        """`num_active`: of `num_ranks`, if some are spares."""
        self._num_active = num_active or num_ranks
        self.rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._directory = directory
        self._specs = specs
        self._num_ranks = num_ranks
        self.manager: eg.QuorumManager | None = None
        self._is_voting = False
        new = directory / f"new-pid-{uuid.uuid4().hex}"
        new.write_text(str(os.getpid()))
        new.replace(self._pid_file(self.rank))  # another rank may read it at this moment

    def _pid_file(self, rank: int) -> Path:
        return self._directory / f"pid-{rank}"

    def _fired(self, number: int) -> Path:
        return self._directory / f"fired-{number}"

    @property
    def more(self) -> bool:
        return not all(self._fired(number).exists() for number in range(len(self._specs)))

    @property
    def _num_going(self) -> int:
        """Ranks that have been told to go."""
        return sum(
            spec.get("kill") in GOING and self._fired(number).exists() for number, spec in enumerate(self._specs)
        )

    def at(self, place: str) -> None:
        if place in ("start", "entered"):
            self._go_without(place)
        if place in ("step", "totals_received", "votes_received"):
            self._is_voting = place == "totals_received"
        if place == "sum_published" and self._is_voting and any("voted" in spec for spec in self._specs):
            (self._directory / f"voted-{self._try}-{self.rank}").touch()
        for number, spec in enumerate(self._specs):
            if spec["at"] != place or spec["rank"] not in (self.rank, None) or not self._is_due(number, spec):
                continue
            generation = 0 if self.manager is None else self.manager.generation
            if "slots" in spec:
                self._wait_for("slot", spec["slots"])
            if "voted" in spec:
                self._wait_for("voted", spec["voted"])
            with contextlib.suppress(FileExistsError), self._fired(number).open("x") as file:
                file.write(str(generation))
                file.flush()
                self._do(spec.get("kill", "self"), float(spec.get("for", 0)))
                if spec.get("kill") == "await-next":
                    wait_until(self._fired(number + 1).exists, "the next fault")

    def _go_without(self, place: str) -> None:
        """Ranks that a fault with `without` has killed wait at their start until another one has entered without
        them."""
        for number, spec in enumerate(self._specs):
            fired, gone = self._fired(number), self._directory / f"without-{number}"
            if not spec.get("without") or not fired.exists():
                continue
            if place == "start":
                wait_until(gone.exists, "the next generation of the others")
            elif self.manager is not None and (told := fired.read_text()) and self.manager.generation > int(told):
                gone.touch()

    def slot_done(self, slot: int) -> None:
        """The backward of a slot of the step under way has ended."""
        (self._directory / f"slot-{self._try}-{self.rank}-{slot}").touch()

    @property
    def _try(self) -> str:
        assert self.manager is not None
        return f"{self.manager.step.index}-{self.manager.generation}"

    def _wait_for(self, what: str, number: int) -> None:
        """Until other ranks have made so many files of this kind in this try of the step."""
        prefix = f"{what}-{self._try}-"

        def are_done() -> bool:
            done = [path.name.removeprefix(prefix) for path in self._directory.glob(f"{prefix}*")]
            return sum(name.partition("-")[0] != str(self.rank) for name in done) >= number

        wait_until(are_done, f"{number} of {what!r} of other ranks")

    def finish(self) -> None:
        """This rank has finished. A rank that meets the fault before may be slower."""
        for number, spec in enumerate(self._specs):
            if number > 0 and spec["at"] == "finished" and spec["rank"] in (self.rank, None):
                wait_until(self._fired(number - 1).exists, "the fault before")
        self.at("finished")

    def _is_due(self, number: int, spec: dict[str, Any]) -> bool:
        if self._fired(number).exists():
            return False
        if spec.get("votes") and not self._is_voting:
            return False
        if "step" in spec and (self.manager is None or self.manager.committed_steps != spec["step"]):
            return False
        if "from" in spec and (self.manager is None or self.manager.committed_steps < spec["from"]):
            return False
        before = self._fired(number - 1)
        if number > 0 and not spec.get("free") and not before.exists():
            return False
        manager = self.manager
        told = before.read_text() if before.exists() else ""  # empty while the one before is just happening
        if spec.get("later") and (manager is None or not told or manager.generation <= int(told)):
            return False
        if spec.get("alone") and (manager is None or manager.num_members != 1):
            return False
        if not spec.get("full", True):
            return True
        if manager is None or manager.num_active < self._num_active - self._num_going or not self._are_all_seated():
            return False
        if number == 0:
            return True
        return bool(told) and manager.generation > int(told)

    def _do(self, what: str | list[int], seconds: float) -> None:
        assert self.manager is not None or isinstance(what, list) or what in ("self", "drain", "raise", "await-next")
        match what:
            case "raise":
                raise OSError(errno.EIO, "a disk of this machine")
            case "lock":
                threading.Semaphore(0).acquire()
            case "gil":
                re.match("(a+)+$", "a" * 64 + "b")  # years, and it never lets go
            case "gil-asleep":
                mutex = ctypes.create_string_buffer(128)  # a `pthread_mutex_t` as it is initialized
                for _ in range(2):  # as some call of a library that does not let go of it either, nor ends by a signal
                    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
            case "busy":
                time.sleep(seconds)
            case "paused":
                assert self.manager is not None
                with self.manager.paused("evaluation"):
                    time.sleep(seconds)
            case "drain":
                os.kill(os.getpid(), signal.SIGTERM)
            case "see-off":
                going = {spec["rank"] for spec in self._specs if spec.get("kill") in GOING}
                wait_until(lambda: not any(psutil.pid_exists(self._pid(rank)) for rank in going), "their end")
                if (events := self._directory / "events.jsonl").exists():
                    wait_until(lambda: going <= _exited(events), "that their agent knows")
            case "leave":
                assert self.manager is not None
                self.manager.leave()
            case "await-next":
                pass  # `at` waits
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "stop-comm":
                os.kill(comm_processes(os.getpid())[0], signal.SIGSTOP)
            case "stop-all":
                os.killpg(os.getpid(), signal.SIGSTOP)
            case _:
                self._kill(what)

    def _kill(self, what: str | list[int]) -> None:
        mine = comm_processes(os.getpid())
        match what:
            case "self":
                pids = [os.getpid()]
            case "comm":
                pids = mine[:1]
            case "standby":
                pids = mine[1:]
            case "comms":
                pids = [pid for rank in range(self._num_ranks) for pid in comm_processes(self._pid(rank))]
            case "agent":
                pids = [os.getppid()]
            case "workers":  # of the data loader
                pids = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
                assert pids
            case "forkserver":
                pids = [child.pid for child in psutil.Process(os.getppid()).children() if "eg-fork" in child.name()]
            case list():
                pids = sorted((self._pid(rank) for rank in what), key=lambda pid: pid == os.getpid())
            case _:
                raise ValueError(what)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def _pid(self, rank: int) -> int:
        return int(self._pid_file(rank).read_text())

    def wait_for_company(self) -> None:
        """In a step that was begun without all ranks: wait for somebody to ask to join."""
        manager = self.manager
        assert manager is not None
        deadline = time.monotonic() + COME_BACK_S
        while self.more and not (self._are_all_seated() or manager.join_noticed or manager.poisoned):
            assert time.monotonic() < deadline, "nobody came back"
            time.sleep(0.002)

    def _are_all_seated(self) -> bool:
        return self.manager is not None and self.manager.num_members >= self._num_ranks - self._num_going

    # -- where it happens

    def install(self, manager: eg.QuorumManager) -> None:
        self.manager = manager
        for place in testing.PLACES:
            testing.fail_at(place, functools.partial(self.at, place))


class Indices:
    """A dataset in which each sample is its own index."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Holds:
    """Where the test takes its time. A rank that waits has made a file, `at-STEP-MEMBER`. What it learns meanwhile: by
    `join-STEP-MEMBER`, that a rank waits to join, and by `leave-STEP-MEMBER`, that it is to leave itself."""

    def __init__(self, directory: Path, steps: list[int]) -> None:
        self._directory, self._steps = directory, steps

    def wait(self, manager: eg.QuorumManager, step: int) -> None:
        go = self._directory / f"go-{step}"
        if step not in self._steps or go.exists():
            return
        self._note("at", manager, step)
        deadline = time.monotonic() + HOLD_S
        while not (go.exists() or manager.poisoned):
            assert time.monotonic() < deadline, f"nobody let step {step} go on"
            if manager.join_noticed:
                self._note("join", manager, step)
            if manager.leave_requested:
                self._note("leave", manager, step)
            time.sleep(0.01)

    def _note(self, what: str, manager: eg.QuorumManager, step: int) -> None:
        (self._directory / f"{what}-{step}-{manager.member.replace('/', '-')}").touch()


class Decay:
    """Sets the weight decay in each step before `optim.step`, once the learners of the step have healed."""

    def __init__(self, directory: Path, faults: Faults, manager: eg.QuorumManager) -> None:
        self._directory, self._faults, self._manager = directory, faults, manager
        testing.fail_at("healed", self._healed)

    def _healed(self) -> None:
        self._faults.at("healed")
        (self._directory / f"healed-{self._manager.generation}-{os.getpid()}").touch()

    def set(self, optim: eg.Optimizer, step: eg.Step) -> None:
        manager = self._manager
        learners = manager.num_members - manager.num_active
        healed = f"healed-{manager.generation}-*"
        if step.share is not None:
            wait_until(
                lambda: manager.poisoned or len(list(self._directory.glob(healed))) >= learners, "the learners' heal"
            )
        for group in optim.param_groups:
            group["weight_decay"] = (step.index + 1) % 3 / 8


class SGD(torch.optim.SGD):
    """Can die when it has changed half of the parameters."""

    faults: Faults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weight, bias = self.param_groups[0]["params"]
        self.param_groups[0]["params"] = [weight]
        super().step()
        self.faults.at("torn")
        self.param_groups[0]["params"] = [bias]
        super().step()
        self.param_groups[0]["params"] = [weight, bias]


class History:
    def __init__(self, directory: Path, member: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"{member.replace('/', '-')}.jsonl").open("a", buffering=1)

    def write(self, kind: str, **fields: object) -> None:
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")


def _exited(events: Path) -> set[int]:
    """The local ranks of which the agent has written that they have exited."""
    return {event["local_rank"] for event in Tail(events).read() if event["event"] == "exited"}


def memory_of(tensor: Tensor | None) -> str:
    """The file that is mapped where `tensor` lies."""
    if tensor is None:
        return ""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, _, _, _, path = line.split(" ", 5)
        first, last = (int(address, 16) for address in bounds.split("-"))
        if first <= tensor.data_ptr() < last:
            return path.lstrip()
    return ""


def overflows(step_index: int) -> bool:
    """With `--scaled`: whether a slot of this step overflows."""
    return step_index % 5 == 2


def digest_of(*states: dict[str, Any]) -> str:
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(value.detach().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list):
            for item in value:
                add(item)
        elif not callable(value):
            digest.update(repr(value).encode())

    for state in states:
        add(state)
    return digest.hexdigest()


def make_process_group(name: str) -> Any:
    import torchft.process_group

    return getattr(torchft.process_group, name)(timedelta(seconds=60))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--faults", type=json.loads, default=[])
    parser.add_argument("--num-ranks", type=int, help="of the job, if it has several agents, of which one has faults")
    parser.add_argument("--holds", type=json.loads, default=[])
    parser.add_argument("--layout", type=json.loads, default={})
    parser.add_argument("--num-workers", type=int, default=0, help="of the data loader of each rank")
    parser.add_argument("--rows", type=int, default=3, help="of a parameter of five columns")
    parser.add_argument("--real", action="store_true", help="gradients that are no integers")
    parser.add_argument("--reduction", default="sum")
    parser.add_argument("--keep", action="store_true", help="keep the gradients of slots when a step is tried again")
    parser.add_argument("--slot", type=int, default=SLOT, help="samples in a slot")
    parser.add_argument("--scaled", action="store_true", help="scale the losses; those of some slots overflow")
    parser.add_argument("--decay", action="store_true", help="set the optimizer's weight decay in each step")
    parser.add_argument("--memory", action="store_true", help="say in which file the gradients lie")
    parser.add_argument("--factory", choices=["ProcessGroupGloo", "ProcessGroupBabyGloo"], help="of torchft")
    args = parser.parse_args()

    torch.set_num_threads(1)
    num_ranks = args.num_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    faults = Faults(args.output_dir, args.faults, num_ranks)
    faults.at("start")
    factory = None if args.factory is None else functools.partial(make_process_group, args.factory)
    manager = eg.join(layout=eg.ParallelLayout(**args.layout), process_group=factory)
    holds = Holds(args.output_dir, args.holds)
    faults.install(manager)
    model = Counter(args.rows, is_real=args.real)
    ddp = eg.DistributedDataParallel(manager, model, reduction=args.reduction, keep=args.keep)
    sgd = SGD(model.parameters(), lr=0.125, momentum=0.5)
    sgd.faults = faults
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=3, enabled=args.scaled)
    optim = eg.Optimizer(manager, sgd, scaler=scaler)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.0 / (1 + step % 4))
    batches = eg.GlobalBatch(NUM_SAMPLES, size=BATCH_SIZE, slot=args.slot, seed=SEED)
    loader = eg.DataLoader(Indices(), batches, num_workers=args.num_workers)
    scale = {"scaler": scaler} if args.scaled else {}
    manager.register_state(model=model, optim=optim, schedule=schedule, **scale)
    decay = Decay(args.output_dir, faults, manager) if args.decay else None
    history = History(args.output_dir / "history", manager.member)
    faults.at("joined")

    for step in manager.steps(args.steps):
        with step:
            faults.at("step")
            faults.wait_for_company()
            holds.wait(manager, step.index)
            model.steps.add_(1)
            slots = batches.slots(step)
            for slot, index in loader.slots(step):
                with ddp.accumulate(last=slot.last):
                    loss = ddp(index)
                    if args.scaled and overflows(step.index) and slot.number == 3:
                        loss = loss * math.inf
                    scaler.scale(loss).backward()
                if args.keep:
                    history.write("computed", step=step.index, generation=step.generation, slot=slot.number)
                    faults.slot_done(slot.number)
                    faults.at("slot")
            faults.at("body")
            group = manager.gangs.root.group_kind if isinstance(manager.gangs.root, eg.ElasticGang) else ""
            mine = (*slots.kept, *slots)
            samples = [int(sample) for slot in mine for sample in slot.index]
            numbers = [slot.number for slot in mine]
            memory = memory_of(model.bias.grad) if args.memory else ""
            history.write(
                "prepared",
                step=step.index,
                generation=step.generation,
                samples=samples,
                slots=numbers,
                group=group,
                memory=memory,
            )
            if decay is not None:
                decay.set(optim, step)
            sums = {"num": len(samples), "squares": sum(sample * sample for sample in samples)}
            if optim.step(weight=slots.num_samples, max_norm=4.0, sums=sums):
                assert manager.tip is not None
                manager.report(index=step.index, tokens=len(samples))
                history.write("committed", step=step.index, generation=manager.tip.generation, sums=optim.sums)
                schedule.step()

    if manager.committed_steps < args.steps:
        return  # by `leave`
    digest = digest_of(model.state_dict(), sgd.state_dict(), schedule.state_dict(), scaler.state_dict())
    at_end = {"steps": int(model.steps), "weight": model.weight.tolist(), "scaler": scaler.state_dict()}
    history.write("finished", digest=digest, **at_end)
    faults.finish()


if __name__ == "__main__":
    main()
