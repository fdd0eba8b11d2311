"""What `elasticgang export` writes is a state dict of the whole model: tied weights under each of their keys, no buffer
that is not persistent, whatever the layout of the job was."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from elasticgang.checkpoint import listing
from elasticgang.checkpoint.digest import digest_of
from elasticgang.checkpoint.export import export
from elasticgang.checkpoint.export import main as export_main
from elasticgang.checkpoint.interchange import load_weights
from elasticgang.checkpoint.locations import storage_at
from elasticgang.checkpoint.manifest import MANIFEST
from elasticgang.errors import CheckpointError
from tests.integration.exported_job import NUM_STEPS, Model
from tests.support import REPOSITORY, Job, run_preloaded

SCRIPT = REPOSITORY / "tests" / "integration" / "exported_job.py"
TOLERANCE = 1e-12  # of sums of doubles in another order


@cache
def alone() -> dict[str, Tensor]:
    """The state dict that one undisturbed rank ends with."""
    with TemporaryDirectory() as name:
        train_alone(Path(name))
        return loaded(Path(name))


def train_alone(directory: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(directory), "sdp=1"]
    done = run_preloaded(command, env={"LOCAL_RANK": "0"}, ends_at_once=True)
    assert done.returncode == 0, done.stderr


def loaded(directory: Path) -> dict[str, Tensor]:
    """The state dict of a plain model that has loaded the export of the newest checkpoint, strictly. From both forms of
    it, which are alike."""
    (out := directory / "out").mkdir()
    forms: list[dict[str, Tensor]] = []
    for file in ("weights.safetensors", "weights.pt"):
        path, num_keys = export(directory, output := out / file)
        assert f"step-{NUM_STEPS:012d}" in path
        weights: dict[str, Any] = load_file(output) if output.suffix == ".safetensors" else torch.load(output)
        assert num_keys == len(weights)
        model = Model()
        model.load_state_dict(weights, strict=True)
        forms.append(model.state_dict())
    other = Model()
    assert load_weights(other, out) == len(weights)  # as files of another trainer
    forms.append(other.state_dict())
    assert all(torch.equal(forms[0][key], tensor) for form in forms for key, tensor in form.items())
    assert torch.equal(weights["blocks.1.up.weight"], weights["blocks.1.down.weight"])
    assert weights["blocks.1.up.weight"].data_ptr() == weights["blocks.1.down.weight"].data_ptr()  # of the .pt
    return forms[0]


# PLACED-3, REGISTERED-2
@pytest.mark.parametrize(
    ("layout", "ranks", "env"),
    [
        ("sdp=1", 2, {}),
        ("sdp=2", 2, {}),
        ("tp=2", 2, {}),
        ("pp=2", 2, {}),
        ("pp=2", 2, {"OWN_NAMES": "1"}),
        ("pp=2,sdp=2", 4, {}),
    ],
    ids=lambda each: "own names" if isinstance(each, dict) and each else str(each or ""),
)
def test_a_plain_model_loads_the_export_strictly(layout: str, ranks: int, env: dict[str, str], tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    with Job(tmp_path / "job", SCRIPT, str(checkpoints), layout, ranks=ranks, env=env) as job:
        assert job.wait() == 0, job.stderr
    found = loaded(checkpoints)
    wanted = alone()
    assert not torch.equal(wanted["blocks.0.up.weight"], Model().state_dict()["blocks.0.up.weight"])
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.allclose(found[key], tensor, rtol=TOLERANCE, atol=TOLERANCE), key


def rewrite(directory: Path, change: Any) -> None:
    """Change what the manifest says, with its digest."""
    (found,) = listing.scan(storage_at(directory))
    file = Path(found.path) / MANIFEST
    content = json.loads(file.read_text())
    del content["digest"]
    change(content)
    rest = b'",' + json.dumps(content).encode()[1:]
    file.write_bytes(b'{"digest":"' + digest_of(rest).encode() + rest)


def test_a_checkpoint_of_format_2_is_exported_by_the_names_of_its_tensors(tmp_path: Path) -> None:
    train_alone(tmp_path)

    def to_format_2(content: dict[str, Any]) -> None:
        content["format"] = 2
        for objects in content["objects"].values():
            del objects["keys"]

    rewrite(tmp_path, to_format_2)
    export(tmp_path, tmp_path / "weights.safetensors")
    keys = load_file(tmp_path / "weights.safetensors").keys()
    assert keys == (Model().state_dict().keys() - {f"blocks.{number}.down.weight" for number in range(2)}) | {
        f"blocks.{number}.cache" for number in range(2)
    }


@pytest.mark.parametrize("keys", [3, {"dict": [["model", {"dict": [["a"]]}]]}, {"dict": [["model", {"list": []}]]}])
def test_keys_that_are_no_keys_are_refused(keys: Any, tmp_path: Path) -> None:
    train_alone(tmp_path)
    rewrite(tmp_path, lambda content: content["objects"]["0-0-0"].update(keys=keys))
    with pytest.raises(CheckpointError, match="its manifest is invalid"):
        export(tmp_path, tmp_path / "weights.safetensors")
    assert not (tmp_path / "weights.safetensors").exists()


def test_a_key_of_no_tensor_is_refused(tmp_path: Path) -> None:
    train_alone(tmp_path)
    keys = {"dict": [["model", {"dict": [["a", {"tensor": "model.module.a"}]]}]]}
    rewrite(tmp_path, lambda content: content["objects"]["0-0-0"].update(keys=keys))
    with pytest.raises(CheckpointError, match="is not among its tensors"):
        export(tmp_path, tmp_path / "weights.safetensors")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_output_that_cannot_be_written_is_named(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, output, lost = (
        tmp_path / "checkpoints",
        tmp_path / f"model{suffix}",
        tmp_path / "no" / f"model{suffix}",
    )
    train_alone(checkpoints)
    output.mkdir()
    for path, why in ((output, "Is a directory"), (lost, "No such file or directory")):
        assert export_main(["export", str(checkpoints), str(path)]) == 1
        assert f"elasticgang: error: {path}: {why}\n" in capsys.readouterr().err
