"""What every tier shares: the folder of a test gives its marker, and GPU tests are skipped where there is no GPU."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

# On a busy machine the time that an example takes says nothing.
hypothesis.settings.register_profile("elasticgang", deadline=None)
hypothesis.settings.load_profile("elasticgang")

# torch looks up the name of whoever connects to a store, and of whom it connects to. Where the DNS loses an answer now
# and then, such a look-up costs 5 s otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
# Before torch is imported: OpenMP threads that wait for a core which another test has made tests 30 times slower.
os.environ["OMP_NUM_THREADS"] = "1"

# Large memory has a mapping of its own. glibc would put it on the heap once a test has freed as much, and later tests
# would find it there, or not, by the tests before them.
_M_MMAP_THRESHOLD = -3
ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 4 << 20)

# A shell's background job ignores it, and so would what a test starts and then interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# With OpenTelemetry's variables of whoever runs the tests, every job of a test would export traces.
for _name in [name for name in os.environ if name.startswith("OTEL_")]:
    del os.environ[_name]

# Where this is set, each process that a test starts compiles the package anew, and each of pytest's all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The jobs of the tests are listed apart from those of the user.
os.environ["ELASTICGANG_RUN_DIR"] = _run_dir = tempfile.mkdtemp(prefix="elasticgang-tests-")
atexit.register(shutil.rmtree, _run_dir, ignore_errors=True)

TESTS = Path(__file__).parent
os.environ["PYTHONPATH"] = str(TESTS.parent)  # so that what a test starts finds `tests` and `scripts`
MARKED_TIERS = ("chaos", "gpu")
# torchft's case shuts one rank down as soon as it is configured, maybe before another one is.
ALONE, ALONE_IN = re.compile(r"test_collective_with_resiliency_\d+_send_recv"), "test_torchft.py"


# Begun first, the longest one first: a file that begins last keeps one core busy and the others idle.
LONG = (
    *("test_agents.py", "test_agents_coordinator.py", "test_simulation.py", "test_soak.py", "test_run.py"),
    *("test_programs.py", "test_mutants.py", "test_hosts.py", "test_demo.py", "test_repair.py", "test_drain.py"),
    *("test_agent_ends.py", "test_hangs.py", "test_isolated_ends.py", "test_layout_recipe.py", "test_hsdp.py"),
    *("test_process_groups.py", "test_kills.py", "test_torch_environment.py", "test_script_failures.py"),
)
# What a job in the test's own process leaves set: its root gang stays torch's default group after its end.
TORCH_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _forget_the_job() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in TORCH_ENVIRONMENT}
    had_default_group = _has_default_group()
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if _has_default_group() and not had_default_group:
        import torch.distributed as dist

        dist.destroy_process_group()


def _has_default_group() -> bool:
    dist = sys.modules.get("torch.distributed")  # the unit tier does not wait for it
    return dist is not None and dist.is_available() and dist.is_initialized()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m alone` imports only the files with such tests: the import of all others takes longer than many of these."""
    if config.option.markexpr != "alone" or not collection_path.name.startswith("test_"):
        return None
    has_any = collection_path.name == ALONE_IN or "mark.alone" in collection_path.read_text()
    return None if has_any else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0]
        if tier in MARKED_TIERS:
            item.add_marker(tier)
        if item.path.name == ALONE_IN and ALONE.fullmatch(item.name):
            item.add_marker("alone")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """While the tests are imported next to nothing is garbage, and afterwards nothing of that is: no garbage
    collection, of which some tests begin many, looks through what thousands of tests and torch consist of."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # here, so that the unit tier does not wait for it

        if not torch.cuda.is_available():
            pytest.skip("needs CUDA")
