from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from nets import conv_bn
from stripes import dataset, hooks, same_state, stripes, vgg
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner import Budget, STAMPConfig, STAMPPruner, objective, trace_channels
from stamppruner.batchnorm import frozen_statistics
from stamppruner.budget import Chooser
from stamppruner.encoders import DeepSets
from stamppruner.errors import DataError
from stamppruner.gated import GatedNet
from stamppruner.heads import find_head
from stamppruner.meta import MetaLearner, _decay
from stamppruner.posteriors import BetaBernoulli
from stamppruner.reading import Reader
from stamppruner.tasks import LoaderTasks, Task, TaskSampler, TaskSource

SMALL = STAMPConfig(
    iterations=3, tasks_per_iteration=2, ways=3, shots=8, minibatch_size=12, budget_share=0.5
)
X = torch.zeros(1, 3, 8, 8)


def gated(model: nn.Module | None = None) -> GatedNet:
    model = model or vgg()
    graph = trace_channels(model, X)
    return GatedNet(
        copy.deepcopy(model), graph, BetaBernoulli(graph.num_channels), DeepSets(3, seed=0)
    )


def sampler(seed: int = 0) -> TaskSampler:
    return TaskSampler(dataset(16), 3, 8, seed=seed)


def learner(net: GatedNet, source: TaskSource, config: STAMPConfig = SMALL) -> MetaLearner:
    head = find_head(net.model, net.graph)
    return MetaLearner(
        net, Reader(source, config.seed), config, head, isinstance(source, LoaderTasks)
    )


class Fixed:
    """The same two tasks every time."""

    num_classes, num_images = 6, 96

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = tasks

    def tasks(self, n: int) -> list[Task]:
        return [self._tasks[i % len(self._tasks)] for i in range(n)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def by_hand(net: GatedNet, task: Task, config: STAMPConfig, mask: Any) -> list[Tensor]:
    """Gradient of the second minibatch at the parameters that the first one led to."""
    own = copy.deepcopy(net)
    for module in own.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    own.model.train()
    inner = torch.optim.Adam(
        [
            {"params": list(own.model.parameters()), "lr": config.weights_lr},
            {"params": own.posterior.pi_parameters(), "lr": config.pi_lr},
            {"params": own.theta(), "lr": config.theta_lr},
        ]
    )
    half = len(task) // 2
    for part in (slice(0, half), slice(half, None)):
        inner.zero_grad()
        with own.masked(mask(own, task.images)) as model:
            logits = model(task.images[part])[:, list(task.classes)]
        loss = F.cross_entropy(logits, task.labels[part])
        (loss + config.kl_scale / Fixed.num_images * own.posterior.kl()).backward()
        if part.start == 0:
            inner.step()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in own.parameters()]


@pytest.mark.parametrize("kind", ["relaxed", "budgeted"])
def test_outer_gradient_is_the_sum_of_last_gradients_at_the_adapted_parameters(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = STAMPConfig(
        iterations=1,
        tasks_per_iteration=2,
        minibatch_size=12,
        budget_share=float(kind == "budgeted"),
        budget_range=(0.5, 0.5),
        weights_lr=0.01,
        seed=5,
    )
    net, source = gated(), Fixed(sampler().tasks(2))
    generator = torch.Generator().manual_seed(config.seed)

    def mask(own: GatedNet, images: Tensor) -> Tensor:
        if kind == "relaxed":
            return own.sample(images, temperature=config.temperature, generator=generator)
        expected = own.keep_probability(images)
        chooser = Chooser(own.model, own.graph, floor=config.floor)
        keep = chooser.choose(expected.detach().numpy(), Budget(macs=0.5)).keep
        return torch.tensor(keep).float() - expected.detach() + expected

    gradients = [by_hand(net, task, config, mask) for task in source.tasks(2)]
    wanted = [a + b for a, b in zip(*gradients, strict=True)]

    made = objective.adam
    seen: list[list[Tensor]] = []

    def spying(net: GatedNet, config: STAMPConfig, rate: float = 1.0) -> torch.optim.Adam:
        optimizer = made(net, config, rate)
        if not seen:  # the first one is the outer one
            seen.append([])
            step = optimizer.step

            def noting(*args: Any) -> Any:
                seen[0].extend(p.grad.clone() for p in net.parameters())
                return step(*args)

            optimizer.step = noting
        return optimizer

    monkeypatch.setattr(objective, "adam", spying)
    learner(net, source, config).run(progress=False, callback=None)
    assert len(seen[0]) == len(wanted)
    for found, expected in zip(seen[0], wanted, strict=True):
        scale = float(expected.abs().max())
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * scale + 1e-8)
    assert sum(float(g.abs().sum()) > 0 for g in wanted) > len(wanted) / 2
    distance = sum(float((a - b).abs().sum()) for a, b in zip(wanted, gradients[0], strict=True))
    assert distance > 1e-2  # one task alone would not do


def test_history_has_a_row_an_iteration_and_the_callback_sees_it() -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    history = learner(gated(), sampler()).run(
        progress=False, callback=lambda i, figures: seen.append((i, figures))
    )
    assert history["iteration"] == [0, 1, 2] == [i for i, _ in seen]
    for row, (_, figures) in zip(history, seen, strict=True):
        assert {"loss", "accuracy", "macs", "live"} <= row.keys()
        assert {**figures, "iteration": row["iteration"]} == row
        assert all(math.isfinite(value) for value in row.values())
        assert 0 <= row["accuracy"] <= 1
        assert 0 < row["macs"] <= 1
        assert 0 <= row["live"] <= 1


def test_all_of_phi_moves_and_nothing_is_left_behind() -> None:
    net = gated()
    parts = {"W": net.weights(), "pi": net.posterior.pi_parameters(), "theta": net.theta()}
    before = {name: [p.detach().clone() for p in part] for name, part in parts.items()}
    learner(net, sampler()).run(progress=False, callback=None)
    for name, part in parts.items():
        moved = [not torch.equal(p, old) for p, old in zip(part, before[name], strict=True)]
        assert all(moved), name
    assert all(p.grad is None for p in net.parameters())
    assert hooks(net.model) == 0


def test_the_encoder_itself_learns() -> None:
    net = gated()
    before = copy.deepcopy(net.encoder.state_dict())
    learner(net, sampler()).run(progress=False, callback=None)
    assert not same_state(net.encoder, before)


def test_the_seed_decides() -> None:
    states = []
    for seed in (0, 0, 1):
        net = gated()
        config = STAMPConfig(**{**SMALL.to_dict(), "budget_range": (0.1, 0.6), "seed": seed})
        learner(net, sampler(), config).run(progress=False, callback=None)
        states.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_statistics_are_those_of_the_learned_network_and_not_of_masks() -> None:
    net, task = gated(), sampler().tasks(1)[0]
    learner(net, Fixed([task])).run(progress=False, callback=None)
    with torch.no_grad():
        y = [net.model.features[0](x) for x, _ in task.minibatches(12)]
    means = torch.stack([part.mean((0, 2, 3)) for part in y]).mean(0)
    assert torch.allclose(net.model.features[1].running_mean, means, atol=1e-4)


def test_heads_of_tasks_of_their_own_are_fitted_and_taken_away_again() -> None:
    net = gated()
    head = net.model.classifier
    before = copy.deepcopy(head.state_dict())
    images, labels = stripes(16)
    few = [
        [(images[labels < 3], labels[labels < 3])],
        [(images[labels > 3], labels[labels > 3] + 100)],  # labels that the head does not have
    ]
    history = learner(net, LoaderTasks(few, 8)).run(progress=False, callback=None)
    assert len(history) == 3
    assert history["accuracy"][0] > 0.5  # ridge heads on untrained features
    assert net.model.classifier is head
    assert same_state(head, before)


def test_heads_of_tasks_of_their_own_are_gated_and_read_as_the_references() -> None:
    net = gated()
    source = LoaderTasks([dataset(8), dataset(8)], 4)
    task = source.tasks(1)[0]
    maker = learner(net, source)
    with torch.no_grad(), frozen_statistics(net.model):
        evidence = net.evidence(task.images)
        with maker._task_head(task):
            assert torch.equal(net.evidence(task.images), evidence)
            with net.masked(torch.zeros(net.graph.num_channels)) as model:
                logits = model(task.images)
    assert len(logits.unique(dim=0)) == 1  # the bias alone


def test_running_statistics_stay_until_the_end_where_heads_are_fitted() -> None:
    net = gated()
    before = {name: buffer.clone() for name, buffer in net.model.named_buffers()}
    seen: list[bool] = []

    def look(_iteration: int, _figures: dict[str, float]) -> None:
        seen.append(all(torch.equal(b, before[n]) for n, b in net.model.named_buffers()))

    source = LoaderTasks([dataset(8), dataset(8)], 4)
    learner(net, source).run(progress=False, callback=look)
    assert seen == [True] * SMALL.iterations


def test_tasks_of_their_own_need_a_head() -> None:
    pooled = nn.Sequential(conv_bn(3, 8), nn.ReLU(), nn.Conv2d(8, 6, 8), nn.Flatten())
    source = LoaderTasks([dataset(8), dataset(8)], 4)
    with pytest.raises(DataError, match="not written by one linear layer"):
        learner(gated(pooled), source).run(progress=False, callback=None)


def test_the_head_returns_after_an_error_inside_a_task() -> None:
    net = gated()
    head = net.model.classifier
    good = next(iter(LoaderTasks([dataset(8)], 4).tasks(1)))
    bad = Task(good.images[..., :1], good.labels, good.classes)  # too small to be pooled
    maker = learner(net, LoaderTasks([dataset(8)], 4))
    maker.reader = Reader(Fixed([bad]), 0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        maker.run(progress=False, callback=None)
    assert net.model.classifier is head
    assert hooks(net.model) == 0


def test_divergence_stops_with_the_remedy_and_keeps_the_last_good_parameters() -> None:
    net = gated()
    before = [p.detach().clone() for p in net.parameters()]
    images, labels = stripes(16)
    huge = TaskSampler(torch.utils.data.TensorDataset(1e38 * images, labels), 3, 8)
    with pytest.raises(DataError, match=r"diverged.*lower weights_lr"):
        learner(net, huge).run(progress=False, callback=None)
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


def test_learning_makes_the_classes_of_tasks_known() -> None:
    net = gated()
    config = STAMPConfig(
        iterations=25, tasks_per_iteration=1, minibatch_size=12, weights_lr=0.02, budget_share=0.0
    )
    history = learner(net, sampler(), config).run(progress=False, callback=None)
    assert np.mean(history["loss"][-5:]) < np.mean(history["loss"][:5])
    assert np.mean(history["accuracy"][-5:]) > np.mean(history["accuracy"][:5])


def test_autocast_gives_finite_and_other_figures() -> None:
    losses = []
    for amp in (False, True):
        config = STAMPConfig(**{**SMALL.to_dict(), "budget_range": (0.1, 0.6), "amp": amp})
        losses.append(
            learner(gated(), sampler(), config).run(progress=False, callback=None)["loss"]
        )
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def test_rates_fall_at_half_and_at_four_fifths() -> None:
    rates = [_decay(i, 10) for i in range(10)]
    assert rates == pytest.approx([1] * 5 + [0.1] * 3 + [0.01] * 2)
    assert _decay(0, 1) == 1


def test_budgeted_masks_are_hard_and_carry_the_gradient_of_the_expectation() -> None:
    net, images = gated(), stripes(2)[0]
    chooser = Chooser(net.model, net.graph)
    mask = objective.Budgeted(net, chooser, Budget(macs=0.5))(images)
    hard = mask.detach().round()
    assert torch.allclose(mask, hard, atol=1e-6)
    assert 0 < hard.sum() < len(hard)
    widths = torch.tensor([hard[g.channels].sum() for g in net.graph.groups]).double()
    assert chooser.costs["macs"](widths) <= 0.5 * chooser.costs["macs"].full
    weights = torch.linspace(-1, 1, len(mask))
    (mask * weights).sum().backward()
    found = net.posterior.pi_parameters()[0].grad.clone()
    net.posterior.zero_grad()
    (net.keep_probability(images) * weights).sum().backward()
    assert torch.allclose(found, net.posterior.pi_parameters()[0].grad, atol=1e-6)


def test_the_objective_is_cross_entropy_plus_weighted_kl() -> None:
    net = gated()
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    plain = F.cross_entropy(logits, labels)
    assert objective.loss(logits, labels, net, 0.0) == plain
    whole = objective.loss(logits, labels, net, 0.01).detach()
    assert torch.allclose(whole, plain + 0.01 * net.posterior.kl().detach(), rtol=1e-5)


def test_the_optimizer_has_the_three_rates() -> None:
    config = STAMPConfig(weights_lr=0.1, pi_lr=0.2, theta_lr=0.3)
    net = gated()
    groups = objective.adam(net, config, 0.5).param_groups
    assert [g["lr"] for g in groups] == pytest.approx([0.05, 0.1, 0.15])
    assert sum(len(g["params"]) for g in groups) == len(net.parameters())


def test_budgets_that_protected_layers_put_out_of_reach_are_not_drawn() -> None:
    model = vgg()
    writers = [group.name for group in trace_channels(model, X).groups]
    graph = trace_channels(model, X, protect=writers[1:])
    net = GatedNet(
        copy.deepcopy(model), graph, BetaBernoulli(graph.num_channels), DeepSets(3, seed=0)
    )
    chooser = Chooser(net.model, graph, floor=SMALL.floor)
    assert chooser.least(chooser.costs["macs"]) > 0.3 * chooser.costs["macs"].full
    config = STAMPConfig(**{**SMALL.to_dict(), "budget_range": (0.1, 0.3), "budget_share": 1.0})
    history = learner(net, sampler(), config).run(progress=False, callback=None)
    assert len(history) == SMALL.iterations


def test_a_backbone_that_is_frozen_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    model = vgg().requires_grad_(False)
    pruner = STAMPPruner(
        model,
        torch.zeros(1, 3, 8, 8),
        config=STAMPConfig(iterations=1, ways=3, shots=4, weight_steps=1),
    )
    before = {n: p.clone() for n, p in pruner.network.named_parameters()}
    pruner.meta_fit(TaskSampler(dataset(8), 3, 4), progress=False)
    assert "every weight of the model is frozen" in caplog.text
    assert all(torch.equal(p, before[n]) for n, p in pruner.network.named_parameters())
