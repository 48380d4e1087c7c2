"""A small training loop and an evaluation, for models that map images to logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stamppruner import ranks
from stamppruner.errors import ConfigError, DataError, StampError
from stamppruner.evidence import running_statistics
from stamppruner.history import History
from stamppruner.layers import first_floating
from stamppruner.progress import bar
from stamppruner.target import Batch, as_loader, checked_batches, reread

_BATCH = 64


@torch.inference_mode(False)
@torch.enable_grad()
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
    label_smoothing: float = 0.0,
    amp: bool = False,
    progress: bool = True,
    callback: Callable[[int, dict[str, float]], None] | None = None,
) -> History:
    """Train in place with SGD (Nesterov), linear warm-up and a cosine to zero.

    The optimizer is a new one on the model's own parameters. In a training loop of your own, build
    it after pruning: an optimizer of the dense model trains parameters that no longer matter.

    Where ``torch.distributed`` is initialised, all ranks call this, each with its own part of the
    data: the network is that of rank 0, a step is one over the batches of all ranks, ranks with
    fewer batches wait for the others, and running statistics are averaged after every epoch.

    Args:
        model: images ``(B, C, H, W)`` to logits ``(B, classes)``; left in its train or eval mode.
        loader: yields (images, labels), once an epoch; a data set is read in batches of 64, in a
            new order every epoch.
        epochs: passes over the loader; 0 does nothing.
        lr: largest learning rate.
        momentum: of SGD.
        weight_decay: of SGD.
        warmup: share of the steps in which the rate rises.
        label_smoothing: of the cross-entropy.
        amp: bfloat16 autocast, on the model's device.
        progress: show a bar where the output is a terminal.
        callback: called with the epoch's number and figures.

    Returns:
        ``loss`` and ``accuracy`` on the training batches, a row an epoch.

    Raises:
        ConfigError: epochs or lr out of range.
        DataError: unusable batches, labels beyond the model's outputs, or a loss that is not
            finite.
        RankError: ranks of a distributed job disagree, or another one failed.
    """
    if epochs < 0 or not 0 < lr < math.inf:
        raise ConfigError(f"finetune(epochs={epochs}, lr={lr}): epochs from 0 and a finite lr > 0")
    history = History()
    batches = as_loader(reread(loader), batch_size=_BATCH, shuffle=True)
    length = max(ranks.gathered("length", _length(batches)))
    steps = epochs * length
    ranks.copy_from_first_(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(
        parameters, lr, momentum=momentum, weight_decay=weight_decay, nesterov=momentum > 0
    )
    device = first_floating(model).device
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    done = 0
    shown = bar(total=steps, description="fine-tune", shown=progress)
    try:
        for epoch in range(epochs):
            totals = torch.zeros(3, dtype=torch.float64)  # loss, correct, images
            stream = checked_batches(batches)
            for _ in range(length):
                for group in optimizer.param_groups:
                    group["lr"] = lr * warm_cosine(done / steps, warmup)
                optimizer.zero_grad()
                with ranks.all_ready("fine-tuning"):
                    batch = next(stream, None)
                    if batch is not None:
                        found = _backward(model, batch, device, amp, label_smoothing)
                        if not torch.isfinite(found[0]):
                            raise DataError(
                                f"fine-tuning diverged at step {done} (loss {float(found[0])}): "
                                f"lower lr={lr}"
                            )
                        totals += found * torch.tensor([found[2], 1, 1])
                number = 0 if batch is None else len(batch[1])
                ranks.average_gradients_(parameters, number)
                optimizer.step()
                done += 1
                shown.update()
            ranks.average_statistics_(model)
            ranks.sum_([totals])
            loss_sum, correct, count = totals.tolist()
            figures = history.add(
                epoch=epoch, loss=loss_sum / max(1, count), accuracy=correct / max(1, count)
            )
            shown.set_postfix(loss=f"{figures['loss']:.3g}", accuracy=f"{figures['accuracy']:.3g}")
            if callback is not None:
                callback(epoch, figures)
    finally:
        shown.close()
        for module, mode in modes:
            module.training = mode
    return history


def _backward(
    model: nn.Module, batch: Batch, device: torch.device, amp: bool, label_smoothing: float
) -> torch.Tensor:
    """Gradients of one batch; returns its loss, correct answers and images, in float64."""
    images, labels = (part.to(device) for part in batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=amp):
        logits = _forward(model, images)
    _check_logits(model, logits, labels)
    loss = F.cross_entropy(logits.float(), labels.long(), label_smoothing=label_smoothing)
    if torch.isfinite(loss.detach()):
        loss.backward()
    correct = float((logits.argmax(1) == labels).sum())
    return torch.tensor([float(loss.detach()), correct, len(labels)], dtype=torch.float64)


def evaluate(model: nn.Module, loader: Any) -> float:
    """Share of images whose largest logit is their label, in evaluation mode.

    Raises:
        DataError: unusable batches, or none.
    """
    device = first_floating(model).device
    correct = count = 0
    with running_statistics(model), torch.no_grad():
        for images, labels in checked_batches(loader):
            logits = model(images.to(device))
            _check_logits(model, logits, labels)
            correct += int((logits.argmax(1).cpu() == labels.cpu()).sum())
            count += len(labels)
    if not count:
        raise DataError("the loader is empty: there is nothing to evaluate on")
    return correct / count


def _forward(model: nn.Module, images: torch.Tensor) -> Any:
    try:
        return model(images)
    except ValueError as error:
        if len(images) > 1:
            raise
        raise DataError(
            f"{type(model).__name__} cannot train on a batch of one image ({error}): pass a loader "
            "with drop_last=True, or another batch size"
        ) from error


def warm_cosine(share: float, warmup: float) -> float:
    """Factor of the learning rate after a share of all steps: linear warm-up, then a cosine."""
    if share < warmup:
        return (share + 0.01) / (warmup + 0.01)
    return 0.5 * (1 + math.cos(math.pi * (share - warmup) / (1 - warmup)))


def _length(batches: Iterable[Any]) -> int:
    try:
        length = len(batches)  # type: ignore[arg-type]
    except TypeError:
        length = sum(1 for _ in batches)
    if not length:
        raise DataError("the loader is empty: there is nothing to train on")
    return length


def _check_logits(model: nn.Module, logits: Any, labels: torch.Tensor) -> None:
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2:
        raise StampError(
            f"{type(model).__name__} returns {type(logits).__name__}, not logits (B, classes): "
            "train it with a loop of your own"
        )
    if int(labels.max()) >= logits.shape[1]:
        raise DataError(
            f"label {int(labels.max())} needs {int(labels.max()) + 1} outputs and "
            f"{type(model).__name__} has {logits.shape[1]}: give the head more outputs"
        )
