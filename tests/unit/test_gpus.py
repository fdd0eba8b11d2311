"""The devices that CUDA shows, from the environment and the files in /dev."""

from __future__ import annotations

import pytest

from elasticgang.agent.gpus import nvml_names, visible_devices

NODES = ["null", "nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps"]


@pytest.mark.parametrize(
    ("visible", "num"),
    [("", 0), ("-1", 0), ("2", 1), ("2,1", 2), (" 0 , 1", 2), ("0,-1,1", 1), ("0,,1", 1), ("GPU-1a,MIG-GPU-2b", 2)],
)
def test_the_entries_of_the_variable_count_if_it_is_set(visible: str, num: int) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": visible}, NODES) == tuple(range(num))


@pytest.mark.parametrize(("visible", "num"), [("3", 0), ("0,3", 1), ("0,1,7,2", 2), ("GPU-1a,3", 1)])
def test_the_entries_end_at_the_index_of_no_device(visible: str, num: int) -> None:
    """CUDA shows none of those behind it. A rank would get a spare device that is not there."""
    assert visible_devices({"CUDA_VISIBLE_DEVICES": visible}, NODES) == tuple(range(num))
    assert len(visible_devices({"CUDA_VISIBLE_DEVICES": visible}, ["null"])) == len(visible.split(","))


def test_without_the_variable_the_files_of_devices_count() -> None:
    assert visible_devices({}, NODES) == (0, 1, 2)
    assert visible_devices({}, ["null", "tty0"]) == ()


@pytest.mark.parametrize(
    ("environ", "models", "names"),
    [
        ({}, "aa", {0: 0, 1: 1}),
        ({}, "a", {0: 0}),
        ({}, "ab", {}),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "ab", {0: 0, 1: 1}),
        ({"CUDA_VISIBLE_DEVICES": "1, GPU-7f"}, "aa", {0: 1, 1: "GPU-7f"}),
        ({"CUDA_VISIBLE_DEVICES": "1,GPU-7f"}, "ab", {1: "GPU-7f"}),
        ({"CUDA_VISIBLE_DEVICES": "2,MIG-7f"}, "aa", {}),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "aa", {0: 1}),
    ],
)
def test_devices_have_their_names_in_nvml(environ: dict[str, str], models: str, names: dict[int, int | str]) -> None:
    assert nvml_names(environ, (0, 1), models) == names
