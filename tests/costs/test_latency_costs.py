"""Times from tables: what is predicted between measured points, and what the tables keep."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from nets import CASES, noise
from torch import Tensor, nn

from stamppruner import ChannelPlan, trace_channels
from stamppruner.costs import LatencyMs, Setting, TrainStepMs
from stamppruner.costs._clock import GRID, LayerClock, resized, widths_at
from stamppruner.costs._tables import CACHE, Tables
from stamppruner.costs.latency import _between
from stamppruner.errors import BudgetError

NETS = [case for case in CASES if case.name in ("plain", "residual", "depthwise", "grouped")]


@pytest.fixture(scope="module", params=NETS, ids=lambda case: case.name)
def traced(request):
    model = request.param.model(torch.float32)
    return model, trace_channels(model, noise(1, *request.param.shapes[0], dtype=torch.float32))


@pytest.fixture(params=[LatencyMs, TrainStepMs], ids=lambda kind: kind.name)
def cost(request, traced):
    return request.param(*traced, Setting(batch_size=2))


def full(graph) -> Tensor:
    return torch.tensor([float(group.size) for group in graph.groups])


def test_full_is_measured_and_predicted_alike(cost, traced):
    assert cost.full > 0
    assert float(cost(full(traced[1]))) == pytest.approx(cost.full)
    assert cost.per_layer(full(traced[1]).double()).shape == (len(traced[1].layers),)


@pytest.mark.parametrize("kind", [LatencyMs, TrainStepMs])
def test_never_falls_with_the_width_and_is_differentiable(kind, traced, monkeypatch):
    """On a clock without noise, which can hide in such small layers that wide ones take longer."""
    monkeypatch.setattr(LayerClock, "_time", lambda _clock, _module, _shape, i, o: 1e-3 * i * o + 1)
    monkeypatch.setenv(CACHE, "")
    cost, graph = kind(*traced, Setting(batch_size=2)), traced[1]
    w = (0.6 * full(graph)).requires_grad_()
    cost(w).backward()
    assert (w.grad >= 0).all()
    assert w.grad.any()
    rows = torch.stack([full(graph) * share for share in torch.linspace(0.05, 1, 12)])
    found = cost(rows)
    assert (found.diff() >= -1e-9).all()
    assert found.tolist() == [pytest.approx(float(cost(row))) for row in rows]


@pytest.mark.parametrize("kind", [LatencyMs, TrainStepMs])
@pytest.mark.parametrize(
    ("device", "reason"), [("cuda:77", "no such device"), ("meta", "nothing is computed there")]
)
def test_devices_that_are_not_there_are_named(kind, device, reason, traced):
    with pytest.raises(BudgetError, match=rf"device='{device}'.*{reason}"):
        kind(*traced, Setting(device=device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_autocast_that_would_do_nothing_is_refused(dtype, traced):
    model, graph = traced
    with pytest.raises(BudgetError, match="float32"):
        LatencyMs(copy.deepcopy(model).to(dtype), graph, Setting(amp=True))


@pytest.mark.parametrize("amp", [False, True])
def test_measures_networks_in_its_setting(traced, amp):
    seen = []
    model, graph = traced

    class Watched(LatencyMs):
        timed = staticmethod(
            lambda models, inputs, *, samples, seconds: [
                seen.append((samples, torch.get_num_threads(), model(torch.ones(1, 3, 8, 8)).dtype))
                or 1.0
                for model in models
            ]
        )

    before = torch.get_num_threads()
    cost = Watched(model, graph, Setting(batch_size=3, threads=1, amp=amp))
    assert cost.measure([model, model]) == [1.0, 1.0]
    dtype = torch.bfloat16 if amp else torch.float32
    assert seen == [(3, 1, dtype)] * 3 * 4  # places in memory
    assert torch.get_num_threads() == before
    assert not torch.is_autocast_enabled("cpu")


def test_layers_are_timed_under_autocast_on_their_own(traced, monkeypatch, tmp_path):
    monkeypatch.setenv("STAMPPRUNER_CACHE", str(tmp_path))
    autocast, measured = [], LayerClock._time
    monkeypatch.setattr(
        LayerClock,
        "_time",
        lambda *given: autocast.append(torch.is_autocast_enabled("cpu")) or measured(*given),
    )
    for amp in (False, True, True):
        LatencyMs(*traced, Setting(amp=amp))
    half = len(autocast) // 2
    assert autocast == [False] * half + [True] * half
    assert half
    assert len(list(tmp_path.iterdir())) == 2


def test_a_device_without_autocast_is_named(traced, monkeypatch):
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda _: False)
    with pytest.raises(BudgetError, match=r"amp=True\): there is no autocast on cpu"):
        LatencyMs(*traced, Setting(amp=True))


def test_a_short_pass_is_measured_at_several_places_in_memory(traced, monkeypatch):
    model, graph = traced
    cost = LatencyMs(model, graph, Setting(batch_size=3))
    places = []

    def timed(models, inputs, *, samples, seconds):
        places.append([next(m.parameters()).data_ptr() for m in models])
        return [10.0 * len(places), 1.0]

    monkeypatch.setattr(LatencyMs, "timed", staticmethod(timed))
    assert cost.measure([model, copy.deepcopy(model)]) == [25.0, 1.0]
    assert places[0][0] == next(model.parameters()).data_ptr()
    assert len({place for pair in places for place in pair}) == 8


def test_a_long_pass_is_measured_once(traced, monkeypatch):
    model, graph = traced
    cost = LatencyMs(model, graph, Setting(batch_size=3))
    monkeypatch.setattr("stamppruner.costs.latency._ALL_SECONDS", 0.0)
    counted = []
    monkeypatch.setattr(
        LatencyMs, "timed", staticmethod(lambda models, *_, **__: counted.append(1) or [1.0])
    )
    assert cost.measure([model]) == [1.0]
    assert len(counted) == 1


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(8, 16, 3, stride=2, bias=False), (2, 8, 9)),
        (nn.Conv2d(8, 16, (3, 1), padding=(1, 0), dilation=(2, 1), groups=4), (2, 8, 9, 9)),
        (nn.Conv2d(8, 16, 3, groups=8, padding="same", padding_mode="reflect"), (2, 8, 9, 9)),
        (nn.Conv3d(8, 16, 1), (2, 8, 3, 4, 5)),
        (nn.ConvTranspose2d(8, 16, 3, stride=2, output_padding=1), (2, 8, 5, 5)),
        (nn.Linear(8, 16), (2, 7, 8)),
    ],
    ids=str,
)
def test_a_resized_layer_differs_in_its_widths_alone(layer, shape):
    x = torch.zeros(shape)
    assert resized(layer, 8, 16)(x).shape == layer(x).shape
    assert str(resized(layer, 8, 16)) == str(layer)
    for share in GRID:
        inputs, outputs = widths_at(layer, share, share)
        axis = 2 if isinstance(layer, nn.Linear) else 1
        narrow = x.narrow(axis, 0, inputs)
        assert resized(layer, inputs, outputs)(narrow).shape[axis] == outputs


def test_interpolation():
    grid = torch.tensor(GRID)
    x = torch.tensor([0.0, 0.125, 0.3125, 0.5, 0.6, 1.0])
    weights = _between(x, grid)
    assert torch.allclose(weights.sum(-1), torch.ones(6))
    assert torch.allclose(weights @ grid, x.clamp(0.125, 1))


def test_a_graph_without_inputs_is_refused(traced):
    model, graph = traced
    bare = replace(graph, example=None)
    with pytest.raises(BudgetError, match="example inputs"):
        LatencyMs(model, bare)


def test_nothing_is_measured_twice(traced, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path))
    first = LatencyMs(*traced)
    (path,) = tmp_path.iterdir()
    monkeypatch.setattr(LayerClock, "_time", lambda *_: pytest.fail("measured again"))
    assert torch.equal(LatencyMs(*traced)._table, first._table)
    entries = json.loads(path.read_text())
    assert all("dtype" not in key and "torch.float32" in key for key in entries)


def test_tables_of_a_machine_are_merged(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "new"))
    one, other = Tables("cpu", 1), Tables("cpu", 1)
    one.put("a", [1.0, 2.0])
    other.put("b", [3.0])
    one.save()
    other.save()
    again = Tables("cpu", 1)
    assert (again.get("a", 2), again.get("b", 1)) == ([1.0, 2.0], [3.0])
    assert again.get("a", 3) is None
    assert Tables("cpu", 2).get("a", 2) is None


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": 1}', b'{"a": [-1, "x"]}', b"\xff\x00"])
def test_damaged_tables_are_empty(tmp_path, monkeypatch, content):
    monkeypatch.setenv(CACHE, str(tmp_path))
    tables = Tables("cpu", 1)
    tables.put("b", [1.0])
    tables.save()
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert Tables("cpu", 1).get("a", 2) is None
    assert Tables("cpu", 1).get("a", 1) is None


def test_tables_that_cannot_be_written_are_left_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (str(tmp_path / "file"), ""):
        monkeypatch.setenv(CACHE, folder)
        tables = Tables("cpu", 1)
        tables.put("a", [1.0])
        tables.save()
        assert tables.get("a", 1) == [1.0]
        assert Tables("cpu", 1).get("a", 1) is None
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_plans_of_random_halves_are_predicted_cheaper(cost, traced):
    _, graph = traced
    plan = ChannelPlan.random(graph, 0.5)
    kept = torch.tensor([float(plan.keep[g.channels].sum()) for g in graph.groups])
    assert float(cost(kept)) <= cost.full * (1 + 1e-12)  # where widths tell nothing, but rounding
