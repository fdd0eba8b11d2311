"""Runs the commands, after the command line has validated their arguments."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import uuid
from pathlib import Path

from elasticgang import environment
from elasticgang.agent.agent import Agent
from elasticgang.agent.job import Job
from elasticgang.errors import OperationalError
from elasticgang.launch.output import PrefixedOutput, log_to
from elasticgang.observe.events import EventLog
from elasticgang.process.stop_signals import release_stop_signals
from elasticgang.session.credentials import Credentials

_RANK_TARGET = "elasticgang.member.rank_main:main"
# Modules that the fork server imports once for all processes of a host: ranks, comm processes, and a coordinator.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",  # the first optimizer step imports it: 2 s
    "torchft.process_group",
    "elasticgang.comm.worker",
    "elasticgang.coordinator.server",
    "elasticgang.train",
    "elasticgang.member.rank_main",
)


def run_job(args: argparse.Namespace, credentials: Credentials) -> int:
    env = {}
    if args.nproc_per_node + args.spares > 1 and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = "1"  # as torchrun: the ranks share the cores
    if args.checkpoint_dir is not None:
        env[environment.CHECKPOINT_DIR] = os.path.abspath(args.checkpoint_dir)
    job = Job(
        command={"script": args.script, "args": args.args, "module": args.module},
        rank_target=_RANK_TARGET,
        preload=PRELOAD,
        num_ranks=args.nproc_per_node,
        num_spares=args.spares,
        job_id=args.job_id or uuid.uuid4().hex[:12],
        coordinator=args.coordinator,
        connect_timeout=args.connect_timeout,
        max_restarts=args.max_restarts,
        grace_period=args.grace_period,
        collective_timeout=args.collective_timeout,
        process_group=args.process_group,
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
        return Agent(job, output, EventLog(args.log_dir, output.write_line)).run()
    except OperationalError as exc:
        print(f"elasticgang: error: {exc}", file=sys.stderr)
        return 2
    finally:
        output.close()


def run_coordinator(args: argparse.Namespace, credentials: Credentials) -> int:
    from elasticgang.coordinator.server import CoordinatorOptions, serve

    state_dir = args.state_dir and Path(args.state_dir)
    options = CoordinatorOptions(args.host, args.port, credentials, state_dir or None)

    async def run() -> None:
        serving = asyncio.ensure_future(serve(options, log, listening))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        release_stop_signals()
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    def listening(address: str) -> None:
        print(f"coordinator listening on {address}", flush=True)

    def log(line: str) -> None:
        print(f"coordinator: {line}", file=sys.stderr, flush=True)

    try:
        asyncio.run(run())
    except OperationalError as exc:
        print(f"elasticgang: error: {exc}", file=sys.stderr)
        return 2
    return 0
