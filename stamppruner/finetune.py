"""A small training loop and an evaluation, for classifiers and, with three functions, any task."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stamppruner import ranks
from stamppruner.batches import as_loader, reread
from stamppruner.batchnorm import reestimated_statistics
from stamppruner.errors import ConfigError, DataError, DivergedError, shown
from stamppruner.evidence import running_statistics
from stamppruner.heap import memory_kept
from stamppruner.history import History
from stamppruner.layers import first_floating, first_nan
from stamppruner.progress import bar
from stamppruner.supervision import (
    Distillation,
    ForwardFn,
    LossFn,
    MetricFn,
    Mixup,
    Supervision,
)
from stamppruner.training import check_settings
from stamppruner.undisturbed import undisturbed

_BATCH = 64

_FEW_STEPS = 50
"""In all: below, running averages still hold what they were before the training."""

Schedule = Callable[[float], float]
"""Share of all steps that are done, in [0, 1), to a factor of the learning rate."""

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


@undisturbed()
@ranks.together()
def finetune(
    model: nn.Module,
    loader: Any,
    *,
    epochs: int,
    lr: float = 0.02,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    warmup: float = 0.1,
    clip: float = 5.0,
    label_smoothing: float = 0.0,
    mixup: float = 0.0,
    teacher: nn.Module | None = None,
    distill: float = 0.5,
    temperature: float = 2.0,
    loss_fn: LossFn | None = None,
    forward_fn: ForwardFn | None = None,
    metric_fn: MetricFn | None = None,
    optimizer: MakeOptimizer | None = None,
    schedule: Schedule | None = None,
    evaluate_on: Any = None,
    patience: int | None = None,
    amp: bool = False,
    seed: int | None = None,
    progress: bool = True,
    callback: Callable[[int, dict[str, float]], None] | None = None,
) -> History:
    """Train in place with SGD (Nesterov), linear warm-up and a cosine to zero.

    The optimizer is a new one on the model's own parameters. In a training loop of your own, build
    it after pruning: an optimizer of the dense model trains parameters that no longer matter.

    Where ``torch.distributed`` is initialised, all ranks call this, each with its own part of the
    data: the network is that of rank 0, a step is one over the batches of all ranks, ranks with
    fewer batches wait for the others, and running statistics are averaged after every epoch.

    A training of fewer than 50 steps re-estimates them on its data after every epoch: running
    averages would still hold what they were before.

    Args:
        model: images ``(B, C, H, W)`` to logits ``(B, classes)``, or what the functions below make
            of it; left in its train or eval mode.
        loader: yields (images, labels), once an epoch; a data set is read in batches of 64, in a
            new order every epoch. With a ``loss_fn``, pairs of inputs and targets of any structure.
        epochs: passes over the loader; 0 does nothing.
        lr: largest learning rate.
        momentum: of SGD.
        weight_decay: of SGD.
        warmup: share of the steps in which the rate rises.
        clip: largest norm of a step's gradient, over all parameters; larger ones are scaled down
            to it. A network that was just cut, with a head that was just fitted, can have
            gradients a hundred times as large as they will be. ``math.inf`` clips nothing.
        label_smoothing: of the cross-entropy.
        mixup: alpha of the beta distribution that pairs of images are mixed by (Zhang et al. 2018,
            "mixup"); 0 mixes nothing.
        teacher: a network of the same classes whose logits are learned from, too (Hinton et al.
            2015): the full one, say.
        distill: weight of the teacher, in [0, 1].
        temperature: of both networks' softmax for the teacher's term.
        loss_fn: outputs and targets of a batch to a scalar; by default the cross-entropy.
        forward_fn: model and inputs to outputs; by default ``model(inputs)``.
        metric_fn: outputs and targets to a number, larger is better; by default the accuracy.
        optimizer: makes one of the parameters, in place of SGD; ``lr`` and the schedule still hold.
        schedule: factor of the rate over the share of the steps, in place of warm-up and cosine.
        evaluate_on: data that the figures of every epoch are measured on besides, as
            ``validation_...``; the weights of the best epoch are kept.
        patience: stop after so many epochs without a better figure on ``evaluate_on``.
        amp: bfloat16 autocast, on the model's device.
        seed: of dropout, mixup and the order of a data set; None leaves them to the global state.
        progress: show a bar where the output is a terminal.
        callback: called with the epoch's number and figures.

    Returns:
        ``loss`` and ``accuracy`` (or ``metric``) on the training batches, a row an epoch.

    Raises:
        ConfigError: a setting out of range, or two that do not go together.
        DataError: unusable batches, inputs that the model does not take, labels beyond its
            outputs; DivergedError, a kind of it: a loss, gradient or weight that is not finite.
        RankError: ranks of a distributed job disagree, or another one failed.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
        >>> data = [(torch.ones(2, 1, 2, 2), torch.ones(2, 1))]
        >>> history = finetune(net, data, epochs=9, lr=0.1, loss_fn=nn.functional.mse_loss)
        >>> history["loss"][-1] < history["loss"][0]
        True
    """
    check_settings({
        "epochs": epochs, "lr": lr, "momentum": momentum, "weight_decay": weight_decay,
        "warmup": warmup, "clip": clip, "label_smoothing": label_smoothing, "mixup": mixup,
        "teacher": teacher, "distill": distill, "temperature": temperature, "optimizer": optimizer,
        "schedule": schedule, "patience": patience, "amp": amp, "seed": seed, "loss_fn": loss_fn,
        "evaluate_on": evaluate_on,
    })  # fmt: skip
    task = Supervision(loss_fn, forward_fn, metric_fn, label_smoothing)
    taught = None if teacher is None else Distillation(teacher, distill, temperature)
    batches = as_loader(reread(loader), batch_size=_BATCH, shuffle=True, seed=seed or 0)
    evaluate_on = reread(evaluate_on)
    length = max(ranks.gathered("length", _length(batches)))
    steps = epochs * length
    ranks.copy_from_first_(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(
            f"{type(model).__name__} has no parameter that requires a gradient, so there is "
            "nothing to train: call model.requires_grad_() first"
        )
    if optimizer is not None:
        own = optimizer(parameters)
        if not isinstance(own, torch.optim.Optimizer):
            raise ConfigError(f"finetune(optimizer=...) made {shown(own)}, no torch optimizer")
    else:
        own = torch.optim.SGD(
            parameters, lr, momentum=momentum, weight_decay=weight_decay, nesterov=momentum > 0
        )
    factor = schedule or (lambda share: warm_cosine(share, warmup))
    device = first_floating(model).device
    learner = _Learner(model, task, taught, Mixup(mixup, seed or 0), amp, device)
    history, best, done = History(), _Best(model), 0
    steps_bar = bar(total=steps, description="fine-tune", shown=progress)
    try:
        with _training(model), _seeded(seed), memory_kept(device):
            for epoch in range(epochs):
                means, stream = _Means(), task.batches(batches, device)
                for _ in range(length):
                    for group in own.param_groups:
                        group["lr"] = lr * factor(done / steps)
                    own.zero_grad()
                    count = 0
                    with ranks.all_ready("fine-tuning"):
                        if (batch := next(stream, None)) is not None:
                            inputs, targets, count = batch
                            loss, outputs = learner(inputs, targets)
                            _check_finite(loss, done, lr, "loss")
                            loss.backward()
                            means.add(count, _figures(model, task, outputs, targets, loss))
                    ranks.average_gradients_(parameters, count)
                    norm = nn.utils.clip_grad_norm_(parameters, clip)
                    _check_finite(norm, done, lr, "norm of the gradient")
                    own.step()
                    done += 1
                    steps_bar.update()
                if steps < _FEW_STEPS and done:
                    _reestimate_(model, task, batches, device)
                ranks.average_statistics_(model)
                if (lost := first_nan(model)) is not None:
                    raise DivergedError(
                        f"fine-tuning diverged in epoch {epoch} ({lost!r} is NaN): lower lr={lr}"
                    )
                found = means.pooled().of()
                if evaluate_on is not None:
                    with ranks.all_ready("validation"):
                        own_part = _measured(model, evaluate_on, task)
                    measured = own_part.pooled().of()
                    found |= {f"validation_{name}": value for name, value in measured.items()}
                    best.see(epoch, measured)
                row = history.add(epoch=epoch, **found)
                steps_bar.set_postfix({name: f"{value:.3g}" for name, value in found.items()})
                if callback is not None:
                    callback(epoch, row)
                if patience is not None and epoch - best.epoch >= patience:
                    break
    finally:
        steps_bar.close()
    best.restore()
    return history


def evaluate(
    model: nn.Module,
    loader: Any,
    *,
    loss_fn: LossFn | None = None,
    forward_fn: ForwardFn | None = None,
    metric_fn: MetricFn | None = None,
) -> float:
    """Share of images whose largest logit is their label, in evaluation mode.

    Args:
        model: images ``(B, C, H, W)`` to logits ``(B, classes)``, left in its mode.
        loader: yields (images, labels); with one of the functions pairs of inputs and targets of
            any structure.
        loss_fn: outputs and targets of a batch to a scalar, of which the mean over all samples is
            given where there is no ``metric_fn``.
        forward_fn: model and inputs to outputs; by default ``model(inputs)``.
        metric_fn: the same in place of the accuracy; larger is better.

    Raises:
        DataError: unusable batches, none, or inputs that the model does not take; DivergedError, a
            kind of it: outputs that are NaN.

    Example:
        >>> evaluate(nn.Flatten(), [(torch.eye(2).view(2, 1, 1, 2), torch.tensor([0, 0]))])
        0.5
    """
    if metric_fn is not None:
        loss_fn = loss_fn or (lambda *_: torch.zeros(()))  # not asked for
    task = Supervision(loss_fn, forward_fn, metric_fn)
    return _measured(model, loader, task).of()[task.metric or "loss"]


def checked_settings(settings: Any) -> dict[str, Any]:
    """Settings of :func:`finetune`, with ``epochs``, that are known before there is any network.

    Raises:
        ConfigError: no dict, one without epochs, an unknown name, or a value out of range.
    """
    known = [*inspect.signature(finetune).parameters][2:]  # behind the model and the loader
    given = set(settings) if isinstance(settings, Mapping) else set()
    if "epochs" not in given or given - set(known):
        raise ConfigError(
            f"finetune={shown(settings)}: pass a dict such as {{'epochs': 20}}, with any of "
            f"{', '.join(known)}"
        )
    check_settings(settings)
    return dict(settings)


def warm_cosine(share: float, warmup: float) -> float:
    """Factor of the learning rate after a share of all steps: linear warm-up, then a cosine."""
    if share < warmup:
        return (share + 0.01) / (warmup + 0.01)
    return 0.5 * (1 + math.cos(math.pi * (share - warmup) / (1 - warmup)))


def _reestimate_(
    model: nn.Module, task: Supervision, batches: Iterable[Any], device: torch.device
) -> None:
    """Running statistics of the batch norms that train, as plain averages over the data."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    frozen = [norm for norm in norms if norm.momentum == 0]
    if len(frozen) == len(norms):
        return
    kept = [copy.deepcopy(norm.state_dict()) for norm in frozen]
    with reestimated_statistics(model), torch.no_grad():
        for inputs, _, _ in task.batches(batches, device):
            task.outputs(model, inputs)
    for norm, state in zip(frozen, kept, strict=True):
        norm.load_state_dict(state)


@dataclass
class _Learner:
    """Loss and outputs of a training batch."""

    model: nn.Module
    task: Supervision
    taught: Distillation | None
    mixup: Mixup
    amp: bool
    device: torch.device

    def __call__(self, inputs: Any, targets: Any) -> tuple[Tensor, Any]:
        inputs, other, share = self.mixup(inputs, targets)
        outputs = self._outputs(self.model, inputs)
        loss = self.task.loss(self.model, outputs, targets)
        if other is not None:
            loss = share * loss + (1 - share) * self.task.loss(self.model, outputs, other)
        if self.taught is not None:
            with torch.no_grad(), running_statistics(self.taught.teacher):
                theirs = self._outputs(self.taught.teacher, inputs)
            loss = self.taught.mixed(loss, outputs, theirs)
        return loss, outputs

    def _outputs(self, model: nn.Module, inputs: Any) -> Any:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            return self.task.outputs(model, inputs)


def _figures(
    model: nn.Module, task: Supervision, outputs: Any, targets: Any, loss: Tensor
) -> dict[str, float]:
    with torch.no_grad():
        merit = task.merit(model, outputs, targets)
    return {"loss": float(loss.detach())} | ({} if merit is None else {str(task.metric): merit})


def _check_finite(value: Tensor, step: int, lr: float, what: str) -> None:
    if not torch.isfinite(value):
        raise DivergedError(
            f"fine-tuning diverged at step {step} ({what} {float(value.detach())}): lower lr={lr}"
        )


def _measured(model: nn.Module, loader: Any, task: Supervision) -> _Means:
    """Loss and figure of merit of all data, in evaluation mode."""
    device, means = first_floating(model).device, _Means()
    with running_statistics(model), torch.no_grad():
        for inputs, targets, count in task.batches(loader, device):
            outputs = task.outputs(model, inputs)
            loss = task.loss(model, outputs, targets)
            means.add(count, _figures(model, task, outputs, targets, loss))
    if not means.count:
        raise DataError("the loader is empty: there is nothing to evaluate on")
    return means


class _Means:
    """Means of figures over samples."""

    def __init__(self) -> None:
        self.count, self._sums = 0, dict[str, float]()

    def add(self, count: int, figures: Mapping[str, float]) -> None:
        self.count += count
        for name, value in figures.items():
            self._sums[name] = self._sums.get(name, 0.0) + count * value

    def pooled(self) -> _Means:
        """Those over the samples of all ranks, each of which has some."""
        totals = torch.tensor([self.count, *self._sums.values()], dtype=torch.float64)
        ranks.sum_([totals])
        all_of_them = _Means()
        all_of_them.count = int(totals[0])
        all_of_them._sums = dict(zip(self._sums, totals[1:].tolist(), strict=True))
        return all_of_them

    def of(self) -> dict[str, float]:
        return {name: value / self.count for name, value in self._sums.items()}


class _Best:
    """The weights of the epoch with the best figure: of merit, or else the loss.

    Attributes:
        epoch: its number; -1 before any.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.epoch, self._value = model, -1, -math.inf
        self._state: dict[str, Any] | None = None

    def see(self, epoch: int, figures: Mapping[str, float]) -> None:
        merits = [value for name, value in figures.items() if name != "loss"]
        value = merits[0] if merits else -figures["loss"]
        if value > self._value:
            self.epoch, self._value = epoch, value
            self._state = copy.deepcopy(self._model.state_dict())

    def restore(self) -> None:
        if self._state is not None:
            self._model.load_state_dict(self._state)


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """In training mode; afterwards every module is in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """The global random state of a seed, and afterwards the one before; None changes nothing."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _length(batches: Iterable[Any]) -> int:
    try:
        length = len(batches)  # type: ignore[arg-type]
    except TypeError:
        length = sum(1 for _ in batches)
    if not length:
        raise DataError("the loader is empty: there is nothing to train on")
    return length
