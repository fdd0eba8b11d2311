"""Weights that torch.distributed.checkpoint has written in its safetensors layout are loaded."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import elasticgang as eg
from elasticgang.checkpoint.object_store import ObjectFolder
from elasticgang.errors import CheckpointError
from elasticgang.state.dtensor import local
from elasticgang.torch_private import forget_meshes
from tests.integration.interchange_ranks import Model
from tests.support import run_preloaded

pytestmark = pytest.mark.usefixtures("no_default_group")


def whole(directory: Path, state: dict[str, Any], files: dict[str, int] | None = None) -> Path:
    """Written by one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that there is one process
        save(state, storage_writer=HuggingFaceStorageWriter(str(directory), files), no_dist=True)
    return directory


@pytest.fixture(scope="module", params=["shards", "consolidated", "several files"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of `Model(1)` that elasticgang has no part in."""
    directory = tmp_path_factory.mktemp("written")
    if request.param == "several files":
        state = Model(1).state_dict()
        files = {name: 1 + number % 2 for number, name in enumerate(state)}
        whole(directory, state, files)
        assert len(list(directory.glob("*.safetensors"))) == 2
        return directory
    script = ["tests/integration/interchange_ranks.py", str(directory)]
    options = ["--consolidate"] if request.param == "consolidated" else []
    command = [sys.executable, "-m", "tests.integration.forked_ranks", "2", *script, *options]
    done = run_preloaded(command, timeout=120)
    assert done.returncode == 0, done.stderr
    if request.param == "shards":
        assert len(list(directory.glob("shard-*.safetensors"))) == 2
    return directory


def test_a_whole_module_takes_them(written: Path) -> None:
    model = Model(2)
    assert eg.load_weights(model, written) == 5
    for name, tensor in Model(1).state_dict().items():
        assert torch.equal(model.get_parameter(name), tensor), name
        assert model.get_parameter(name).requires_grad


def divided(rank: int, size: int) -> nn.Module:
    """The part of `Model(2)` on a rank, as DTensors."""
    forget_meshes()
    root = eg.FakeGang(torch.device("cpu"), rank=rank, size=size)
    mesh = eg.create_parallel_gangs(root, tp_size=size).device_mesh("tp")
    model = Model(2)
    for owner in (model.up, model.norm, model.down):
        for name, parameter in list(owner.named_parameters()):
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            owner.register_parameter(name, nn.Parameter(part))
    return model


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_of_another_division_takes_its_part(written: Path, size: int) -> None:
    wanted = Model(1).state_dict()
    for rank in range(size):
        model = divided(rank, size)
        eg.load_weights(model, written)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            parts = [*wanted[name].chunk(size), wanted[name][:0]]
            assert torch.equal(local(parameter), parts[min(rank, len(parts) - 1)]), name


def test_a_part_of_what_is_written_is_taken_by_its_prefix(tmp_path: Path) -> None:
    """As a trainer writes it that saves its model and its optimizer as one state dict."""
    state = {"model": Model(1).state_dict(), "optim": {"exp_avg": torch.ones(3)}}
    model = Model(2)
    with pytest.raises(CheckpointError, match=r"model\.down\.weight is in .*, and the module has none of that name"):
        eg.load_weights(model, whole(tmp_path, state))
    assert eg.load_weights(model, tmp_path, prefix="model.") == 5
    assert torch.equal(model.up.weight, Model(1).up.weight)


def test_tied_weights_may_be_written_once(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    state = tied.state_dict()
    del state["1.weight"]
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other[1].weight = other[0].weight
    eg.load_weights(other, whole(tmp_path, state))
    assert torch.equal(other[1].get_parameter("weight"), tied[0].get_parameter("weight"))
    assert other[1].weight is other[0].weight


class Stage(nn.Module):
    """Block 1 of two, which is number 0 here."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": nn.Linear(3, 3)})


def blocks() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return nn.ModuleDict({"blocks": nn.ModuleDict({str(number): nn.Linear(3, 3) for number in range(2)})}).state_dict()


def in_model(name: str) -> str:
    return name.replace("blocks.0.", "blocks.1.")


# INTERCHANGE-1
def test_a_stage_takes_its_part_of_a_whole_model(tmp_path: Path) -> None:
    directory = whole(tmp_path, blocks())
    stage = Stage()
    assert eg.load_weights(stage, directory, partial=True, names=in_model) == 2
    assert torch.equal(stage.get_parameter("blocks.0.weight"), blocks()["blocks.1.weight"])
    eg.load_weights(stage, directory, partial=True)
    assert torch.equal(stage.get_parameter("blocks.0.weight"), blocks()["blocks.0.weight"])
    with pytest.raises(CheckpointError, match=r"blocks\.0\.bias is in .* \(`partial=True`: it is a part\)"):
        eg.load_weights(stage, directory, names=in_model)
    with pytest.raises(CheckpointError, match=r"blocks\.7\.weight of the module is not in "):
        eg.load_weights(stage, directory, partial=True, names=lambda name: name.replace("0", "7"))
    with pytest.raises(ValueError, match="each tensor a name of its own, but two have 'same'"):
        eg.load_weights(stage, directory, partial=True, names=lambda name: "same")


def shorter(state: dict[str, Any]) -> None:
    state["norm.weight"] = state["norm.weight"][:2]


def halved(state: dict[str, Any]) -> None:
    state["norm.weight"] = state["norm.weight"].half()


# INTERCHANGE-1
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda state: state.pop("norm.bias"), r"norm\.bias of the module is not in "),
        (lambda state: state.update(more=torch.ones(1)), "more is in .*, and the module has none of that name"),
        (shorter, r"norm\.weight is \[2\] in .*, but \[3\] in the module"),
        (halved, r"norm\.weight is torch\.float16 in .*, but torch\.float32 in the module"),
    ],
)
def test_the_first_difference_is_named_and_nothing_is_loaded(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], difference: str
) -> None:
    state = dict(Model(1).state_dict())
    change(state)
    model = Model(2)
    with pytest.raises(CheckpointError, match=difference):
        eg.load_weights(model, whole(tmp_path, state))
    assert all(torch.equal(each, Model(2).state_dict()[name]) for name, each in model.state_dict().items())


def test_a_shard_file_that_is_missing_is_noticed(tmp_path: Path) -> None:
    """torch's reader would leave that part of the tensor as it is."""
    script = ["tests/integration/interchange_ranks.py", str(tmp_path)]
    done = run_preloaded([sys.executable, "-m", "tests.integration.forked_ranks", "2", *script], timeout=120)
    assert done.returncode == 0, done.stderr
    first, _ = sorted(tmp_path.glob("*.safetensors"))
    first.unlink()
    with pytest.raises(CheckpointError, match="do not hold all of"):
        eg.load_weights(Model(2), tmp_path)


def test_a_directory_without_such_files_and_a_truncated_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        eg.load_weights(Model(2), tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot read the weights in .*absent"):
        eg.load_weights(Model(2), tmp_path / "absent")
    (file,) = whole(tmp_path, Model(1).state_dict()).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="cannot read the weights in"):
        eg.load_weights(Model(2), tmp_path)


# -- files at a URL


@pytest.fixture
def at_url(written: Path) -> Iterator[str]:
    """The same weights in a store of this process."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    for path in written.glob("*.safetensors"):
        fs.pipe_file(f"/weights/{path.name}", path.read_bytes())
    yield "memory://weights"
    fs.store.clear()


def test_weights_at_a_url_are_those_of_the_directory(at_url: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = Model(2)
    assert eg.load_weights(model, at_url) == 5
    for name, tensor in Model(1).state_dict().items():
        assert torch.equal(model.get_parameter(name), tensor), name
    assert list(tmp_path.iterdir()) == [], "the temporary files are deleted"


# INTERCHANGE-2
def test_a_rank_fetches_its_rows_alone(at_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    read_into = ObjectFolder.read_into

    def count(self: ObjectFolder, file: str, offset: int, buffer: memoryview) -> None:
        fetched.append(len(buffer))
        read_into(self, file, offset, buffer)

    monkeypatch.setattr(ObjectFolder, "read_into", count)
    wanted = Model(1).state_dict()
    for rank in range(2):
        model = divided(rank, 2)
        fetched.clear()
        eg.load_weights(model, at_url)
        parts = {name: wanted[name].chunk(2)[rank] for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            assert torch.equal(local(parameter), parts[name]), name
        assert sum(fetched) == sum(part.nbytes for part in parts.values())


@pytest.mark.parametrize("damage", ["cut", "long header", "no header", "missing"])
def test_damaged_files_at_a_url_are_refused(at_url: str, damage: str) -> None:
    fs = fsspec.filesystem("memory")
    for path in [path for path in fs.store if path.endswith(".safetensors")]:
        data = fs.cat_file(path)
        match damage:
            case "cut":
                fs.pipe_file(path, data[:-1])
            case "long header":
                fs.pipe_file(path, (1 << 62).to_bytes(8, "little") + data[8:])
            case "no header":
                fs.pipe_file(path, data[:4])
            case "missing":
                fs.rm_file(path)
    model = Model(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="memory://weights"):
        eg.load_weights(model, at_url)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
