"""Long runs: steps that are not finite, memory that is not there, data that hang."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import runs
import torch
from stripes import dataset, vgg
from torch import nn
from torch.utils.data import TensorDataset

from stamppruner import STAMPConfig, STAMPPruner, TaskSampler
from stamppruner.errors import DataError, DivergedError, LoaderTimeoutError, MemoryLimitError
from stamppruner.guards import Skips, finite, first_not_finite, memory_named, within
from stamppruner.tasks import LoaderTasks

CONFIG = STAMPConfig(
    iterations=6, tasks_per_iteration=1, ways=3, shots=8, minibatch_size=8, weight_steps=2,
    weight_batch=12,
)  # fmt: skip


def pruner(model: nn.Module | None = None, **changes: Any) -> STAMPPruner:
    config = STAMPConfig(**{**CONFIG.to_dict(), "budget_range": (0.1, 0.6), **changes})
    return STAMPPruner(model or vgg(), torch.zeros(1, 3, 8, 8), config=config)


class Spoilt(nn.Module):
    """Passes images on; on some calls in training mode, as NaN."""

    def __init__(self, calls: Any) -> None:
        super().__init__()
        self.calls, self.count = calls, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        self.count += 1
        return x * math.nan if self.count in self.calls else x


def spoilt(calls: Any, **changes: Any) -> STAMPPruner:
    made = pruner(nn.Sequential(vgg(), Spoilt(())), **changes)
    made.network[1].calls = calls
    return made


def test_a_step_that_is_not_finite_is_left_out_and_counted() -> None:
    made = spoilt({3}, weight_steps=0)  # the last of three minibatches of the first task
    before = runs.state(made)
    seen: list[dict[str, torch.Tensor]] = []
    made.meta_fit(
        TaskSampler(dataset(16), 3, 8), progress=False, callback=lambda *_: seen.append(
            {name: p.detach().clone() for name, p in made.network.named_parameters()}
        ),
    )  # fmt: skip
    assert made.history["skipped"] == [1.0, 0, 0, 0, 0, 0]
    assert math.isnan(made.history["loss"][0])
    assert all(math.isfinite(loss) for loss in made.history["loss"][1:])
    for name, p in seen[0].items():
        assert torch.equal(p, before[f"model.{name}"])
    assert not torch.equal(seen[1]["0.features.0.weight"], seen[0]["0.features.0.weight"])
    assert all(t.isfinite().all() for name, t in runs.state(made).items() if name != "history")


def test_a_step_under_masks_is_left_out_and_counted() -> None:
    made = spoilt({4}, iterations=2)
    made.meta_fit(TaskSampler(dataset(16), 3, 8), progress=False)
    assert made.history["skipped"] == [1.0, 0.0]
    assert all(math.isfinite(loss) for loss in made.history["weight_loss"])


def test_too_many_in_a_row_stop_with_the_first_layer_and_the_last_good_state(
    tmp_path: Any,
) -> None:
    made = spoilt(range(8, 10**6), weight_steps=0)
    good: list[dict[str, torch.Tensor]] = []
    pattern = r"3 steps in a row.*first layer '1' \(Spoilt\), in task 0 of iteration 2; lower weig"
    with pytest.raises(DivergedError, match=pattern):
        made.meta_fit(
            TaskSampler(dataset(16), 3, 8), progress=False, max_skipped=3,
            checkpoint_dir=tmp_path, checkpoint_minutes=0,
            callback=lambda i, _: good.append(runs.state(made)) if i == 1 else None,
        )  # fmt: skip
    found = runs.state(made)
    assert runs.same({**found, "history": good[0]["history"]}, good[0])
    assert (tmp_path / "meta-fit-00000002.safetensors").exists()


def test_single_bad_steps_are_no_row() -> None:
    made = spoilt(range(3, 10**6, 6), weight_steps=0)
    made.meta_fit(TaskSampler(dataset(16), 3, 8), progress=False, max_skipped=2)
    assert made.history["skipped"] == [1.0, 0, 1, 0, 1, 0]


def test_weights_that_are_not_finite_stop_at_once_and_are_taken_back() -> None:
    made = pruner(weight_lr=1e30, iterations=20)
    with pytest.raises(DivergedError, match=r"under masks at step .*lower weight_lr=1e\+30"):
        made.meta_fit(TaskSampler(dataset(16), 3, 8), progress=False)
    assert all(p.isfinite().all() for p in made.network.parameters())


def net() -> Any:
    return pruner()._gated()


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("images", "the images"),
        ("weight", "layer 'features.4' (its 'features.4.weight')"),
        ("pi", "gates 'a_uc'"),
        ("encoder", "encoder 'embed' (its 'embed.bias')"),
        ("mask", "gate 9 (of 'features.4')"),
        ("layer", "layer 'features.4' (Conv2d)"),
        ("nothing", "the gradient"),
    ],
)
def test_what_was_not_finite_first(where: str, text: str) -> None:
    own, images = net(), torch.randn(4, 3, 8, 8)
    mask = torch.ones(own.graph.num_channels)
    with torch.no_grad():
        if where == "images":
            images[2, 0, 1, 1] = math.inf
        elif where == "weight":
            own.model.features[4].weight[0, 0] = math.nan
        elif where == "pi":
            own.posterior.a_uc[3] = math.nan
        elif where == "encoder":
            own.encoder.embed.bias[0] = math.nan
        elif where == "mask":
            mask[9] = math.nan
        elif where == "layer":
            own.model.features[4].weight.fill_(3e38)
    found = first_not_finite(own, images, mask)
    assert found.startswith(text)
    assert not any(m._forward_hooks for m in own.model.modules())


def test_finite() -> None:
    assert finite([])
    assert finite([None, torch.ones(2), torch.full((3,), 3e38)])
    for bad in (math.nan, math.inf, -math.inf):
        assert not finite([torch.ones(2), torch.tensor([0.0, bad])])


def test_rows_begin_anew_after_a_good_step() -> None:
    skips = Skips(2, "lower it")
    for _ in range(3):
        skips.bad("here")
        skips.good()
    skips.bad("there")
    with pytest.raises(DivergedError, match=r"2 steps in a row not finite, first there; lower it"):
        skips.bad("elsewhere")
    assert skips.total == 5
    with pytest.raises(DivergedError, match="1 step in a row not finite, first here"):
        Skips(9, "lower it").bad("here", hopeless=True)


def test_running_out_of_memory_names_what_needs_less() -> None:
    made = pruner(nn.Sequential(vgg(), nn.Identity()), warm_start=False, weight_steps=0)
    last = made.network[1]
    last.forward = lambda x: torch.empty(2**50) if last.training else x
    pattern = r"out of memory .*lower minibatch_size=8, weight_batch=12 or shots=8.*amp=True"
    with pytest.raises(MemoryLimitError, match=pattern) as caught:
        made.meta_fit(TaskSampler(dataset(16), 3, 8), progress=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError()]
)
def test_all_kinds_of_no_memory(error: Exception) -> None:
    with pytest.raises(MemoryLimitError, match="less"), memory_named("use less"):
        raise error
    with pytest.raises(RuntimeError, match="other"), memory_named("use less"):
        raise RuntimeError("other")


class Slow(TensorDataset):
    """Hangs on one item, once it is told to."""

    def __init__(self, release: threading.Event) -> None:
        super().__init__(*dataset(16).tensors)
        self.release, self.hang = release, False
        self.targets = self.tensors[1]

    def fetch(self, indices: Any) -> torch.Tensor:
        if self.hang:
            self.release.wait(30)
        return self.tensors[0][torch.as_tensor(indices)]


def test_data_that_hang_are_an_error_in_time() -> None:
    release = threading.Event()
    data, made = Slow(release), pruner()

    def callback(iteration: int, _figures: dict[str, float]) -> None:
        data.hang = iteration == 1

    start = time.perf_counter()
    with pytest.raises(LoaderTimeoutError, match=r"did not come within 2 seconds.*loader_timeout"):
        made.meta_fit(TaskSampler(data, 3, 8), progress=False, callback=callback, loader_timeout=2)
    release.set()
    assert time.perf_counter() - start < 25
    assert len(made.history) == 0


def test_a_time_limit_changes_nothing() -> None:
    one, two = (pruner(iterations=2), pruner(iterations=2))
    one.meta_fit(TaskSampler(dataset(16), 3, 8), progress=False)
    two.meta_fit(TaskSampler(dataset(16), 3, 8), progress=False, loader_timeout=60)
    assert runs.same(runs.state(one), runs.state(two))


def test_errors_of_reading_pass_through() -> None:
    def fails() -> None:
        raise DataError("mine")

    for seconds in (None, 5.0):
        with pytest.raises(DataError, match="mine"):
            within(seconds, fails, "it")
    assert within(5.0, lambda: 3, "it") == 3


def test_dead_gates_and_gates_that_ignore_the_set_are_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = pruner(iterations=1, gamma=0.0, threshold=1.0, weight_steps=0)
    made.meta_fit(TaskSampler(dataset(16), 3, 8), progress=False)
    assert "only 0.0% of the gates are live" in caplog.text
    assert "the set is ignored" in caplog.text


def test_images_of_a_source_of_loaders_are_read_one_task_at_a_time() -> None:
    source = LoaderTasks([dataset(8), [dataset(12).tensors]], 10)
    drawn = source.draw(4)
    assert [one.length for one in drawn] == [len(one.read(source)) for one in drawn]
    source.load_state_dict({**source.state_dict(), "position": 0})
    for one, task in zip(drawn, source.tasks(4), strict=True):
        assert torch.equal(one.read(source).images, task.images)
