"""Steps of a meta-fit through torch.compile: the same figures, no breaks, a named error."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from stripes import dataset, loader, resnet, vgg
from torch import Tensor, nn

from stamppruner import STAMPPruner
from stamppruner.batchnorm import frozen_statistics
from stamppruner.errors import ConfigError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
ONCE = dataclasses.replace(runs.CONFIG, iterations=2, tasks_per_iteration=2)


@pytest.fixture(scope="module", autouse=True)
def one_compiler() -> Iterator[None]:
    """Without worker processes, and no graphs of other tests."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


def rows(pruner: STAMPPruner) -> Tensor:
    return runs.state(pruner)["history"]


@pytest.fixture(scope="module")
def compiled() -> tuple[STAMPPruner, dict[str, Any]]:
    counters = torch._dynamo.utils.counters
    counters.clear()
    return runs.fitted(ONCE, compile=True), {k: dict(v) for k, v in counters.items()}


def test_the_figures_are_those_without(compiled: Any) -> None:
    plain, pruner = runs.fitted(ONCE), compiled[0]
    assert torch.allclose(rows(plain), rows(pruner), rtol=1e-3, atol=1e-4)
    one, two = (p._gated().model.state_dict() for p in (plain, pruner))
    weights = [name for name in one if name.endswith("weight")]
    for name in weights:
        assert torch.allclose(one[name], two[name], rtol=1e-2, atol=5e-3), name


@pytest.mark.parametrize("make", [vgg, resnet])
@pytest.mark.parametrize("protected", [0, 1, 2])
def test_every_mask_counts(make: Any, protected: int) -> None:
    """Of every network: graphs of one are in memory when the next, with other gates, comes."""
    first = STAMPPruner(make(), torch.zeros(1, 3, 8, 8)).graph
    protect = [group.writers[0] for group in first.groups[:protected]]
    model = make(seed=protected)
    net = STAMPPruner(model, torch.zeros(1, 3, 8, 8), protect=protect, config=ONCE)._gated()
    x = dataset(4).tensors[0]
    size = net.graph.num_channels
    drawn = torch.rand(4, size, generator=torch.Generator().manual_seed(protected))
    masks = [None, *(drawn[:3] > 0.6).float(), drawn[3].requires_grad_(), None]
    found = []
    for wanted in (False, True):
        with net.compiled(wanted), frozen_statistics(net.model.train()):
            for mask in masks:
                with net.masked(mask, by_weight=True) as model:
                    found.append(model(x))
                found[-1].sum().backward()
                found[-1] = found[-1].detach(), [p.grad for p in net.weights()]
                for p in net.weights():
                    p.grad = None
    for one, two in zip(found[: len(masks)], found[len(masks) :], strict=True):
        assert torch.allclose(one[0], two[0], rtol=1e-3, atol=1e-4)
        for a, b in zip(one[1], two[1], strict=True):
            assert torch.allclose(a, b, rtol=1e-2, atol=1e-3)
    outputs = [one[0] for one in found]
    assert all(not torch.allclose(outputs[0], other, atol=1e-2) for other in outputs[1:5])


def test_hooks_do_not_break_the_graph(compiled: Any) -> None:
    counters = compiled[1]
    assert counters.get("graph_break", {}) == {}
    # relaxed and hard masks alike; the full network; minibatches of tasks and of steps on W
    assert 1 <= counters["stats"]["unique_graphs"] <= 6


def test_the_pruner_is_an_ordinary_one(compiled: Any, tmp_path: Path) -> None:
    pruner = compiled[0]
    net = pruner._gated()
    assert net._compiled is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.model.modules())
    pruner.save(tmp_path / "p.stamp.safetensors")
    images, labels = dataset(4).tensors
    result = pruner.prune([(images, labels)], progress=False)
    assert result.report.metrics["target_accuracy_after"] > 0


def test_a_resumed_run_goes_on_bit_for_bit(compiled: Any, tmp_path: Path) -> None:
    def stop(iteration: int, _figures: dict[str, float]) -> None:
        raise InterruptedError

    given: dict[str, Any] = {"compile": True, "checkpoint_dir": tmp_path, "checkpoint_minutes": 0}
    with pytest.raises(InterruptedError):
        runs.fitted(ONCE, **given, callback=lambda i, f: stop(i, f) if i == 1 else None)
    assert sorted(tmp_path.iterdir())[-1].name.endswith("1.safetensors")
    torch._dynamo.reset()
    assert runs.same(runs.state(runs.fitted(ONCE, **given)), runs.state(compiled[0]))


def test_heads_of_their_own() -> None:
    def fitted(**settings: Any) -> STAMPPruner:
        model = runs.model()
        made = STAMPPruner(model, torch.zeros(1, 3, 8, 8), config=ONCE)
        return made.meta_fit([loader(8, seed=s) for s in range(3)], progress=False, **settings)

    assert torch.allclose(rows(fitted()), rows(fitted(compile=True)), rtol=1e-3, atol=1e-4)


def test_without_a_compiler_the_remedy_is_named() -> None:
    torch._dynamo.reset()
    model: nn.Module = runs.model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    pruner = STAMPPruner(model, torch.zeros(1, 3, 8, 8), config=ONCE)
    missing = torch._inductor.config.patch(
        {"cpp.cxx": ("no-compiler-here",), "force_disable_caches": True}
    )
    with missing, pytest.raises(ConfigError, match=r"compile=True.*C\+\+ compiler"):
        pruner.meta_fit(runs.sampler(), progress=False, compile=True)
    assert not pruner.meta_fitted
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize("value", [1, "yes", None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="compile="):
        runs.fitted(ONCE, compile=value)
