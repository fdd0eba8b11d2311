"""Runs the commands, after the command line has validated their arguments."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

from elasticgang import environment
from elasticgang.agent.agent import Agent
from elasticgang.agent.gpus import visible_devices
from elasticgang.agent.job import Job
from elasticgang.checkpoint.locations import is_url
from elasticgang.errors import OperationalError
from elasticgang.launch.output import PrefixedOutput, log_to
from elasticgang.observe.events import EventLog
from elasticgang.process.priority import raise_priority, weigh_own_session
from elasticgang.session.credentials import Credentials
from elasticgang.watch import registry, serving

_RANK_TARGET = "elasticgang.member.rank_main:main"
# Modules that the fork server imports once for all processes of a host: ranks, comm processes, and a coordinator.
# Its memory is small and has no holes, first of all: what comes first lies side by side.
PRELOAD = (
    "elasticgang.coordinator.server",
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",  # the first optimizer step imports it: 2 s
    "torchft.process_group",
    "elasticgang.comm.error_swallowing",
    "elasticgang.comm.isolated",
    "elasticgang.comm.worker",
    "elasticgang.train",
    "elasticgang.member.rank_main",
    "elasticgang.member.first_calls",
    "encodings.ascii",  # a source of a heal decodes with it
    "encodings.idna",  # and what connects to a host, its name
)
REHEARSAL = "elasticgang.coordinator.rehearsal:rehearse"  # where the fork server forks a coordinator


def run_job(args: argparse.Namespace, credentials: Credentials, listeners: Mapping[str, socket.socket]) -> int:
    """`listeners`: see `serving.serve`."""
    env = {}
    if args.nproc_per_node + args.spares > 1 and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = "1"  # as torchrun: the ranks share the cores
    if args.checkpoint_dir is not None:
        location = args.checkpoint_dir
        env[environment.CHECKPOINT_DIR] = location if is_url(location) else os.path.abspath(location)
    if args.heal_interfaces is not None:
        env[environment.HEAL_INTERFACES] = ",".join(args.heal_interfaces)
    if args.layout is not None:
        env[environment.LAYOUT] = args.layout.text
    job = Job(
        command={"script": args.script, "args": args.args, "module": args.module},
        rank_target=_RANK_TARGET,
        preload=PRELOAD if args.coordinator is not None else (*PRELOAD, REHEARSAL),
        num_ranks=args.nproc_per_node,
        num_spares=args.spares,
        job_id=args.job_id or uuid.uuid4().hex[:12],
        coordinator=args.coordinator,
        connect_timeout=args.connect_timeout,
        max_restarts=args.max_restarts,
        devices=_devices_of(args),
        max_device_faults=args.device_faults,
        grace_period=args.grace_period,
        collective_timeout=args.collective_timeout,
        process_group=args.process_group,
        compare_state=args.compare_state,
        hang_timeout=args.hang_timeout,
        coordinator_timeout=args.coordinator_timeout,
        min_agents=args.nnodes[0],
        max_agents=args.nnodes[1] if args.coordinator is not None else 1,
        credentials=credentials,
        env=env,
    )
    output = PrefixedOutput()
    log_to(output, args.log_level)
    try:
        with contextlib.ExitStack() as held:
            # Before the job is listed: its directory may not be usable.
            given = None if args.log_dir is None else EventLog(args.log_dir, output.write_line)
            log_dir = _list_job(held, job.job_id, args.log_dir, output)
            events = given or EventLog(log_dir, output.write_line, is_bounded=True)
            scalars = args.tensorboard_dir and os.path.join(args.tensorboard_dir, job.job_id)
            _serve(held, listeners, log_dir, scalars, output)
            held.callback(events.close)  # before the page's server ends: it reads the last ones
            return Agent(job, output, events).run()
    except OperationalError as exc:
        print(f"elasticgang: error: {exc}", file=sys.stderr)
        return 2
    finally:
        output.close()


def _devices_of(args: argparse.Namespace) -> tuple[int, ...]:
    """Empty if they are unknown: none is visible, or fewer than ranks, which then do not use one each."""
    if args.devices is not None:
        return tuple(args.devices)
    found = visible_devices(os.environ, os.listdir("/dev"))
    return found if len(found) >= args.nproc_per_node + args.spares else ()


def _serve(
    held: contextlib.ExitStack,
    listeners: Mapping[str, socket.socket],
    log_dir: str | None,
    scalars: str | None,
    output: PrefixedOutput,
) -> None:
    if (listeners or scalars) and log_dir is None:
        raise OperationalError("--status-port, --metrics-port and --tensorboard-dir need --log-dir then")
    for what, listener in listeners.items():
        host, port = listener.getsockname()[:2]
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        path = "metrics" if what == "metrics" else ""
        output.write_line(f"elasticgang: the {what} of this job: http://{at}/{path}")
        if not ipaddress.ip_address(host).is_loopback:
            output.write_line(f"elasticgang: warning: anybody who reaches {at} can read the {what} of this job")
    traces = _wants_traces(log_dir, output)
    if log_dir is not None:
        offset = (Path(log_dir) / registry.EVENTS).stat().st_size  # a directory may have the events of earlier jobs
        held.enter_context(serving.serve(listeners, log_dir, traces=traces, scalars=scalars, offset=offset))


def _wants_traces(log_dir: str | None, output: PrefixedOutput) -> bool:
    if not serving.wants_traces(os.environ):
        return False
    try:
        if log_dir is None:
            raise OperationalError("they need --log-dir then")
        serving.check_traces()
    except OperationalError as exc:
        output.write_line(f"elasticgang: warning: no traces: {exc}")
        return False
    return True


def _list_job(held: contextlib.ExitStack, job: str, log_dir: str | None, output: PrefixedOutput) -> str | None:
    """List the job for `elasticgang status` until `held` ends. Returns the directory of its events."""
    try:
        return held.enter_context(registry.listed(job, log_dir))
    except OperationalError as exc:  # LISTED-2
        output.write_line(f"elasticgang: warning: `elasticgang status` does not find this job: {exc}")
        return log_dir


def run_coordinator(args: argparse.Namespace, credentials: Credentials) -> int:
    from elasticgang.coordinator.server import CoordinatorOptions, prepare_process, serve_until_signalled

    state_dir = args.state_dir and Path(args.state_dir)
    options = CoordinatorOptions(args.host, args.port, credentials, state_dir or None, advertise=args.advertise or "")

    def listening(address: str) -> None:
        output.print_line(f"coordinator listening on {address}")

    output = PrefixedOutput()  # a blocked reader of the log blocks no heartbeat, nor does a full disk end the process

    def log(line: str) -> None:
        output.write_line(f"coordinator: {line}")

    weigh_own_session()
    raise_priority()
    prepare_process()
    try:
        asyncio.run(serve_until_signalled(options, log, listening))
    except OperationalError as exc:
        output.write_line(f"elasticgang: error: {exc}")
        return 2
    finally:
        output.close()
    return 0
