"""Ranks whose scripts make other training state than the others do: at the start, and when one comes back."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from tests.chaos.training_scripts import script
from tests.chaos.training_scripts import training as simple_training
from tests.support import Job

HERE = "127.0.0.1"
REFUSED = "elasticgang: rank 1 differs from the others: it is refused, and not restarted"

FROZEN = "what requires gradients in parameter group 0 is each parameter here, and each parameter but 0 to 1 there"
TURNED = r"the order in memory of one.weight in wrapper 0 is missing here, and \(1, 3\) there"


def training(directory: Path, *, change: str, begins: bool = False, builds: bool = False, setup: str = "") -> Path:
    """Rank 1 differs by `change`, from its restart on or, with `begins`, from its start. `builds`: the state is made by
    `manager.build`."""
    make = "state = manager.build(make)" if builds else "state = make()\n        manager.register_state(**vars(state))"
    return script(
        directory,
        f"""\
        import os, pathlib, signal, time, types
        import torch
        from torch import nn
        import elasticgang as eg

        here, rank = pathlib.Path({str(directory)!r}), int(os.environ["LOCAL_RANK"])
        manager = eg.join()
        sizes, names, optimizer, frozen, steps = 3, ("one", "two"), torch.optim.AdamW, (), 10**9
        rate, decay, norm, freezes_at, turns_at, divides = 0.1, 0.99, 1.0, 0, 0, False
        if rank == 1 and ({begins} or (here / "killed").exists()):
            {change}

        def make(seat=None):
            torch.manual_seed(0)
            module = nn.Sequential()
            for name in names:
                module.add_module(name, nn.Linear(sizes, sizes))
            for name in frozen:
                module.get_submodule(name).requires_grad_(False)
            model = eg.DistributedDataParallel(manager, module)
            found = dict(model=model, optim=eg.Optimizer(manager, optimizer(module.parameters(), lr=0.1)))
            return found if seat is not None else types.SimpleNamespace(**found)

        {make}
        {setup}
        batches = eg.GlobalBatch(16, size=4, slot=2)
        for step in manager.steps(steps):
            with step:
                if step.index >= freezes_at > 0:
                    state.model.module.get_submodule("one").requires_grad_(False)
                if step.index == turns_at > 0:
                    weight = state.model.module.get_submodule("one").weight
                    weight.data = weight.detach().T.contiguous().T
                time.sleep(0.01)
                slots = batches.share(step.index, step.share) if divides else batches.slots(step)
                for slot in slots:
                    with state.model.accumulate(last=slot.last):
                        state.model(torch.ones(2, sizes)).sum().backward()
                if rank == 1 and step.index == 5 and not (here / "killed").exists():
                    (here / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                for group in state.optim.param_groups:
                    group["lr"] = rate * decay**step.index
                state.optim.step(weight=slots.num_samples, max_norm=norm)
            if (here / "over").exists():
                manager.leave()
        print("left", manager.committed_steps, flush=True)
        """,
    )


CHANGES = {
    "sizes = 4": "parameter 'module.one.weight' of 'model' is [4, 4] of float32 here, and [3, 3] of float32 there",
    'names = ("two", "one")': "parameter 0 of group 0 of 'optim' is module.two.weight of 'model' here, and "
    "module.one.weight of 'model' there",
    'frozen = ("one",)': "the gradient of one.bias in wrapper 0 is missing here, and number 2, in bucket 0, of 3 "
    "elements of float32 there",
    "optimizer = torch.optim.SGD": "the class of 'optim' is torch.optim.sgd.SGD here, and torch.optim.adamw.AdamW "
    "there",
}


# ALIKE-1 AGENT-12
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("builds", [False, True], ids=["registered", "built"])
def test_a_rank_that_comes_back_with_another_form_is_refused_and_the_others_go_on(
    tmp_path: Path, change: str, builds: bool
) -> None:
    with Job(tmp_path, training(tmp_path, change=change, builds=builds), ranks=3) as job:
        job.expect_line(REFUSED)
        refused_in = job.expect("entered", local_rank=1, count=2)["generation"]
        job.expect("generation_change", generation=refused_in + 1)
        (tmp_path / "over").touch()
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
        assert job.stderr.count("Traceback (most recent call last)") == 1
        assert (
            f"MismatchError: this rank makes other training state than rank 0 on {HERE}: {CHANGES[change]}"
            in job.stderr
        )
        assert job.stdout.count("left ") == 2
        spawned = [event["local_rank"] for event in job.events() if event["event"] == "spawned"]
        assert spawned.count(1) == 2


# ALIKE-2
@pytest.mark.parametrize(
    ("change", "what", "divides"),
    [
        ("rate = 0.2", "'lr' of parameter group 0", False),
        ("norm = 2.0", "`max_norm` is 2 here, and 1 there", False),
        ("freezes_at = -1", FROZEN, False),  # as a script that freezes in one step, which this rank has not run
        ("freezes_at = -1", FROZEN, True),
        ("turns_at = -1", TURNED, False),
    ],
)
def test_a_rank_that_comes_back_with_other_settings_is_refused_before_it_votes(
    tmp_path: Path, change: str, what: str, divides: bool
) -> None:
    """`divides`: whether the script divides the samples, so that `GlobalBatch` does not know of the slots."""
    setup = f"freezes_at, turns_at, divides = freezes_at or 3, turns_at or 3, {divides}"
    with Job(tmp_path, training(tmp_path, change=change, setup=setup), ranks=2) as job:
        job.expect_line(REFUSED)
        (tmp_path / "over").touch()
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
        assert re.search(rf"is about to apply step \d+ with other settings than rank 0 on {HERE}: {what}", job.stderr)
        assert job.stdout.count("left ") == 1


# ALIKE-2
def test_a_schedule_that_is_not_registered_is_named_when_a_rank_comes_back(tmp_path: Path) -> None:
    """It begins anew there, after the first step of the rank."""
    path = script(
        tmp_path,
        f"""\
        import os, pathlib, signal
        import torch
        from torch import nn
        import elasticgang as eg

        here, rank = pathlib.Path({str(tmp_path)!r}), int(os.environ["LOCAL_RANK"])
        manager = eg.join()
        model = eg.DistributedDataParallel(manager, nn.Linear(2, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1 / (1 + step))
        optim = eg.Optimizer(manager, sgd)
        batches = eg.GlobalBatch(16, size=4, slot=2)
        manager.register_state(model=model, optim=optim)
        for step in manager.steps(10**9):
            with step:
                slots = batches.slots(step)
                for slot in slots:
                    with model.accumulate(last=slot.last):
                        model(torch.ones(2, 2)).sum().backward()
                if rank == 1 and step.index == 5 and not (here / "killed").exists():
                    (here / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if optim.step(weight=slots.num_samples):
                    schedule.step()
            if (here / "over").exists():
                manager.leave()
        """,
    )
    with Job(tmp_path, path, ranks=2) as job:
        job.expect_line(REFUSED)
        (tmp_path / "over").touch()
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
        assert "'lr' of parameter group 0 is 0.0" in job.stderr
        assert "by `register_state(schedule=schedule)`" in job.stderr


# AGREEMENT-2
def test_a_rank_may_heal_in_the_last_step_of_a_job_with_a_schedule_and_checkpoints(tmp_path: Path) -> None:
    """Its own learning rate is that of its start until it has healed, and it takes part in the sum after the step."""
    path = script(
        tmp_path,
        f"""\
        import os, pathlib, signal, time
        import torch
        from torch import nn
        import elasticgang as eg

        here, rank = pathlib.Path({str(tmp_path)!r}), int(os.environ["LOCAL_RANK"])
        manager = eg.join()
        torch.manual_seed(0)
        model = eg.DistributedDataParallel(manager, nn.Linear(2, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(sgd, 2, 0.5)
        optim = eg.Optimizer(manager, sgd)
        manager.register_state(model=model, optim=optim, schedule=schedule)
        manager.checkpoints(every_steps=4)
        batches = eg.GlobalBatch(16, size=4, slot=2)
        for step in manager.steps(8):
            with step:
                if rank == 1 and step.index == 4 and not (here / "killed").exists():
                    (here / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                while step.index == 6 and not (manager.num_members == 2 or manager.join_noticed or manager.poisoned):
                    time.sleep(0.01)
                slots = batches.slots(step)
                for slot in slots:
                    with model.accumulate(last=slot.last):
                        model(torch.ones(2, 2)).sum().backward()
                if optim.step(weight=slots.num_samples):
                    schedule.step()
        print("ends with", [each.tolist() for each in model.parameters()], flush=True)
        """,
    )
    with Job(tmp_path, path, ranks=2, options=["--checkpoint-dir", str(tmp_path / "checkpoints")]) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
        assert any(event["event"] == "healed" for event in job.events() if event.get("generation", 0) > 1)
        ends = re.findall(r"ends with .*", job.stdout)
        assert len(ends) == 2
        assert len(set(ends)) == 1


# AGENT-12
def test_a_rank_that_comes_back_with_another_number_of_steps_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    with Job(tmp_path, training(tmp_path, change="steps = 20"), ranks=2) as job:
        job.expect_line(
            "rank 1 loops over 20 steps, but the other ranks over 1000000000: it is refused, and not restarted"
        )
        (tmp_path / "over").touch()
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
        assert job.stdout.count("left ") == 1


# ALIKE-1
def test_ranks_that_load_a_checkpoint_with_other_forms_end_the_job(tmp_path: Path) -> None:
    setup = f"manager.checkpoints({str(tmp_path / 'checkpoints')!r}, every_steps=2)"
    former, later = tmp_path / "former", tmp_path / "later"
    for directory in (former, later):
        directory.mkdir()
    (former / "killed").touch()  # nobody is
    with Job(former, training(former, change="pass", setup=setup)) as job:
        job.expect("saved")
        (former / "over").touch()
        assert job.wait() == 0, job.stderr
    change = "optimizer = torch.optim.SGD"
    with Job(later, training(later, change=change, begins=True, setup=setup)) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert f"than rank 0 on {HERE}: {CHANGES[change]}" in job.stderr


# ALIKE-1
def test_ranks_that_begin_with_other_forms_end_the_job_with_both(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        jobs = {}
        for number, change in enumerate(CHANGES):
            directory = tmp_path / str(number)
            directory.mkdir()
            path = training(directory, change=change, begins=True)
            jobs[change] = stack.enter_context(Job(directory, path))
        for change, job in jobs.items():
            assert job.wait() == 1
            job.assert_nothing_left()
            assert f"than rank 0 on {HERE}: {CHANGES[change]}" in job.stderr
            assert job.stderr.splitlines()[-1].endswith("rank 1 exited with code 1 before its first committed step")


AGAIN = (
    r"bias' of 'model' did not require gradients in the state that was loaded, but in each step since\. If they are to "
    "stay frozen, freeze them by `if step.index >= N:`"
)


# LOADED-1 PLACED-4
@pytest.mark.parametrize(
    ("is_trained", "is_told"),
    [
        ("bias.requires_grad and step.index != 3", True),
        ("step.index < 3", False),
        ("step.index % 2 == 0", False),  # two networks may train in turns
    ],
)
def test_what_was_frozen_before_the_checkpoint_is_told_once_it_is_trained(
    tmp_path: Path, is_trained: str, is_told: bool
) -> None:
    setup = f"bias = model.module.bias; manager.checkpoints({str(tmp_path / 'checkpoints')!r}, every_steps=6)"
    for steps in (6, 12):
        path = simple_training(tmp_path, steps=steps, setup=setup, body=f"bias.requires_grad_({is_trained})")
        with Job(tmp_path, path, ranks=2) as job:
            assert job.wait() == 0, job.stderr
    assert len(re.findall(AGAIN, job.stderr)) == is_told, job.stderr


REPLACED = "'lr' of parameter group 0 of 'optim' is 0.1 and not 0.05: the optimizer goes on with the settings"


# LOADED-2
@pytest.mark.parametrize(("body", "is_told"), [("", True), ("optim.param_groups[0]['lr'] = 0.05", False)])
def test_settings_of_a_resumed_script_that_are_not_those_of_the_checkpoint_are_told_unless_a_step_sets_them(
    tmp_path: Path, body: str, is_told: bool
) -> None:
    checkpoints = f"manager.checkpoints({str(tmp_path / 'checkpoints')!r}, every_steps=4)"
    again = f"optim.param_groups[0]['lr'] = 0.05; {checkpoints}"
    for steps, setup, in_step in ((4, checkpoints, ""), (8, again, body)):
        path = simple_training(tmp_path, steps=steps, setup=setup, body=in_step)
        with Job(tmp_path, path, ranks=2) as job:
            assert job.wait() == 0, job.stderr
    assert job.stderr.count(REPLACED) == is_told, job.stderr


def sharded(directory: Path, *, killed: int, size: int, freezes: str, body: str = "pass") -> Path:
    """Two groups of `sdp=2`, of which the rank `killed` is killed once in step 5. `freezes`: when the bias is frozen.
    `body` runs in each step before `optim.step`."""
    return script(
        directory,
        f"""\
        import os, pathlib, signal
        import torch
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        import elasticgang as eg

        killed = pathlib.Path({str(directory / "killed")!r})
        layout = eg.ParallelLayout(sdp=2, min_replicas=2, fallback=(eg.ParallelLayout(),))
        manager = eg.join(layout=layout)

        def build(seat):
            torch.manual_seed(0)
            module = nn.Linear(4, 4)
            if manager.layout.sdp > 1:
                fully_shard(module, mesh=manager.gangs.device_mesh("sdp"))
            model = eg.ShardedDataParallel(manager, module)
            return dict(model=model, optim=eg.Optimizer(manager, torch.optim.SGD(module.parameters(), lr=0.1)))

        state, batches = manager.build(build), eg.GlobalBatch(16, size={size}, slot=2)
        for step in manager.steps(20):
            with step:
                if {freezes}:
                    state.model.module.bias.requires_grad_(False)
                slots = batches.slots(step)
                if not len(slots) and step.index > 5:
                    print("without slots", flush=True)
                for slot in slots:
                    with state.model.accumulate(last=slot.last):
                        state.model(torch.ones(2, 4)).sum().backward()
                if step.index == 5 and os.environ["LOCAL_RANK"] == "{killed}" and not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                {body}
                state.optim.step(weight=slots.num_samples)
        """,
    )


# ALIKE-3 LOADED-1
def test_a_rank_of_a_group_that_trains_what_the_others_have_frozen_is_refused_before_its_backward(
    tmp_path: Path,
) -> None:
    """The others go on with another layout, whose ranks have all been built anew."""
    path = sharded(tmp_path, killed=1, size=8, freezes="step.index == 3")
    with Job(tmp_path, path, ranks=4) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
    assert REFUSED in job.stderr
    what = "what requires gradients in wrapper 0 is each parameter here, and each parameter but 1 there"
    assert re.search(rf"gradients of other parameters in step \d+ than rank \d on {HERE}: {what}", job.stderr)
    assert re.search(AGAIN, job.stderr), job.stderr


# ALIKE-3
def test_a_peer_without_slots_does_not_keep_a_rank_waiting_that_comes_back(tmp_path: Path) -> None:
    """Although it is in a collective of the script that waits for that rank."""
    body = "manager.gangs.root.all_reduce(torch.ones(1), eg.ReduceOperation.SUM)"
    path = sharded(tmp_path, killed=3, size=4, freezes="step.index >= 3", body=body)
    with Job(tmp_path, path, ranks=4, options=["--collective-timeout", "5"]) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
    assert "without slots" in job.stdout
    assert job.stderr.count("elasticgang: generation ") == 2, job.stderr
