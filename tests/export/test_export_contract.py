"""What every exporter promises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from nets import difference
from safetensors.torch import load_file
from samples import FULL, images, slim
from stripes import hooks, same_state, snapshot
from torch import Tensor, nn

from stamppruner import export_onnx, export_program, export_state_dict, recipe
from stamppruner.errors import CheckpointError, DataError, ExportError, StampError
from stamppruner.export import ExportReport
from stamppruner.rewire import GATHER, SCATTER

Run = Callable[[Tensor], Tensor]


def run_onnx(path: Path, _full: Callable[[], nn.Module], _slim: nn.Module) -> Run:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])


def run_program(path: Path, _full: Callable[[], nn.Module], _slim: nn.Module) -> Run:
    return torch.export.load(path).module()


def run_state_dict(path: Path, full: Callable[[], nn.Module], slim: nn.Module) -> Run:
    scope: dict[str, Any] = {"model": full()}
    exec(recipe(slim, full), scope)
    scope["model"].load_state_dict(load_file(path), strict=True)
    return scope["model"].eval()


@dataclass(frozen=True)
class Exporter:
    """An exporter, how its files are run, and what it can do."""

    name: str
    write: Callable[[nn.Module, Path], ExportReport]
    run: Callable[[Path, Callable[[], nn.Module], nn.Module], Run]
    exact: bool = True
    half: bool = True
    traces: bool = True


EXPORTERS = [
    Exporter("onnx", lambda m, p: export_onnx(m, p, images(1)), run_onnx, exact=False, half=False),
    Exporter("program", lambda m, p: export_program(m, p, images(1)), run_program),
    Exporter("state dict", export_state_dict, run_state_dict, traces=False),
]


@pytest.fixture(scope="module", params=EXPORTERS, ids=lambda e: e.name)
def exporter(request: pytest.FixtureRequest) -> Exporter:
    return request.param


@dataclass(frozen=True)
class Exported:
    """One export, with what was there before it."""

    exporter: Exporter
    name: str
    model: nn.Module
    before: tuple[Any, ...]
    path: Path
    report: ExportReport


def facts(model: nn.Module) -> tuple[Any, ...]:
    """All that an exporter might leave changed."""
    modes = [module.training for module in model.modules()]
    places = [p.device for p in model.parameters()], [p.dtype for p in model.parameters()]
    grads = [p.requires_grad for p in model.parameters()], [p.grad for p in model.parameters()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    return modes, places, grads, attributes, hooks(model)


@pytest.fixture(scope="module", params=list(FULL))
def exported(
    exporter: Exporter, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Exported:
    model = slim(request.param)
    for number, module in enumerate(model.modules()):
        module.training = number % 2 == 0
    next(model.parameters()).requires_grad_(False)
    state, before, drawn = snapshot(model), facts(model), torch.random.get_rng_state()
    path = tmp_path_factory.mktemp("export") / "net"
    report = exporter.write(model, path)
    unchanged = same_state(model, state) and torch.equal(torch.random.get_rng_state(), drawn)
    return Exported(exporter, request.param, model, (unchanged, before), path, report)


def test_the_file_computes_what_the_model_computes(exported: Exported) -> None:
    reference = copy.deepcopy(exported.model).eval()
    run = exported.exporter.run(exported.path, FULL[exported.name], exported.model)
    for count in (1, 2, 5):
        x = images(count)
        with torch.no_grad():
            expected, found = reference(x), run(x)
        if exported.exporter.exact:
            assert torch.equal(expected, found)
        else:
            assert difference(expected, found) <= 1e-5


def test_the_model_and_the_random_state_are_left_as_they_were(exported: Exported) -> None:
    assert exported.before == (True, facts(exported.model))


def test_the_report_tells_the_truth(exported: Exported) -> None:
    report = exported.report
    assert report.path == str(exported.path)
    assert report.size_bytes == exported.path.stat().st_size
    assert report.max_relative_difference <= (0 if exported.exporter.exact else 1e-5)
    assert str(exported.path) in str(report)
    if exported.exporter.traces:
        assert report.batch_sizes == (1, 3)
        assert list(report.inputs.values()) == [("batch", 3, 8, 8)]
        assert "(batch, 3, 8, 8)" in str(report)


def test_the_file_stands_alone_and_names_no_place_of_this_machine(exported: Exported) -> None:
    assert [p.name for p in exported.path.parent.iterdir()] == ["net"]
    blob = exported.path.read_bytes()
    for place in (str(Path(torch.__file__).parent), str(Path(__file__).parent), "site-packages"):
        assert place.encode() not in blob


def test_the_samples_hold_what_they_are_named_after() -> None:
    for places in (GATHER, SCATTER):
        assert any(key.endswith(places) for key in slim("rewired").state_dict())
    assert any(isinstance(m, torch.fx.GraphModule) for m in slim("spliced").modules())
    assert hooks(slim("plain")) == 0


# Failures


class Broken(nn.Module):
    """It branches on values, and has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"no": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Undefined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan")


def test_a_failing_export_leaves_an_older_file(exporter: Exporter, tmp_path: Path) -> None:
    (tmp_path / "net").write_bytes(b"older")
    with pytest.raises(StampError, match=r"Broken|extra_state"):
        exporter.write(Broken(), tmp_path / "net")
    assert [p.name for p in tmp_path.iterdir()] == ["net"]
    assert (tmp_path / "net").read_bytes() == b"older"


@pytest.mark.parametrize(
    ("write", "make"),
    [(export_onnx, Noisy), (export_onnx, Undefined), (export_program, Undefined)],
)
def test_other_outputs_are_refused(
    write: Any, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=f"{make.__name__} differs from the model"):
        write(make(), tmp_path / "net", images(1))
    assert list(tmp_path.iterdir()) == []


def test_a_bad_path_is_told_before_any_work(
    exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "__call__", lambda *_: pytest.fail("the model was run"))
    monkeypatch.setattr(nn.Module, "state_dict", lambda *_: pytest.fail("the model was read"))
    for path in (tmp_path / "missing" / "net", tmp_path):
        with pytest.raises(CheckpointError, match="cannot write"):
            exporter.write(nn.Conv2d(3, 4, 1), path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_kept_or_refused_by_name(
    exporter: Exporter, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = slim("rewired").to(dtype)
    if not exporter.half:
        with pytest.raises(ExportError, match=rf"first.0.weight is {dtype}.*float\(\)"):
            exporter.write(model, tmp_path / "net")
        assert list(tmp_path.iterdir()) == []
        return
    exporter.write(model, tmp_path / "net")
    run = exporter.run(tmp_path / "net", FULL["rewired"], model)
    with torch.no_grad():
        x = images().to(dtype)
        assert torch.equal(run(x), model(x))


def test_inputs_that_do_not_fit(tmp_path: Path) -> None:
    for write in (export_onnx, export_program):
        with pytest.raises(DataError, match="no tensor with a batch axis"):
            write(slim("plain"), tmp_path / "net", ())
        with pytest.raises(ExportError, match="VGG"):
            write(slim("plain"), tmp_path / "net", torch.zeros(1, 7, 8, 8))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [export_onnx, export_program])
def test_a_fixed_batch_size(write: Any, tmp_path: Path) -> None:
    report = write(slim("plain"), tmp_path / "net", images(4), dynamic_batch=False)
    assert report.batch_sizes == (4, 4)
    assert list(report.inputs.values()) == [(4, 3, 8, 8)]


class ByName(nn.Module):
    """Two inputs, one by keyword, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor, *, shift: Tensor) -> dict[str, Tensor]:
        y = self.layer(x) + shift[:, :, None, None]
        return {"mean": y.mean((2, 3)), "all": y}


@pytest.mark.parametrize("write", [export_onnx, export_program])
def test_several_inputs_and_outputs(write: Any, tmp_path: Path) -> None:
    inputs = {"x": images(1), "shift": torch.ones(1, 4)}
    report = write(ByName(), tmp_path / "net", inputs)
    assert report.inputs == {"x": ("batch", 3, 8, 8), "shift": ("batch", 4)}
    assert report.max_relative_difference <= 1e-6
