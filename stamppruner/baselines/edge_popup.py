"""Edge-popup: a subnetwork of a network whose weights are random and stay so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from stamppruner.baselines._learn import check_finite, epochs, training
from stamppruner.baselines._unstructured import Masks, WeightBaseline, top
from stamppruner.layers import first_floating
from stamppruner.reinitialise import reinitialise_
from stamppruner.target import Target
from stamppruner.zeros import weights_of

Weights = Literal["signed_constant", "kaiming_normal"]


class EdgePopup(WeightBaseline):
    """A subnetwork of random weights, "What's hidden in a randomly weighted neural network?".

    Ramanujan et al. 2020. All weights are drawn once and never trained; every weight has a score
    ``s``. A forward pass uses the weights with the largest ``|s|``, the same share of every layer;
    the backward pass takes that choice for the identity (straight-through), so ``s`` moves by
    ``-lr w dL/dw`` of the masked weight ``w`` (their eq. 5), here by SGD with momentum under a
    cosine. What is found needs no fine-tuning: its accuracy is the method's. Norms scale by 1 and
    shift by 0, and biases are 0.

    The authors' settings for a ResNet-18 on CIFAR-10 are the defaults, but for ``epochs`` (100) and
    ``minibatch_size`` (256); they train on all images, here on the ``sample``.

    Args:
        epochs: passes over the sample of the target.
        lr: of the scores, at the start.
        momentum: of SGD.
        weight_decay: of the scores.
        minibatch_size: images a step.
        weights: ``"signed_constant"``, plus or minus Kaiming's standard deviation, or
            ``"kaiming_normal"``.
        scaled: weights are drawn larger by one over the root of the share that stays, their
            "scaled" variant.
        skip_1x1: leave 1x1 convolutions whole.
        skip_linear: leave linear layers whole.
        settings: see :class:`~stamppruner.baselines.Baseline`.

    Raises:
        ConfigError: a value is outside its range.
    """

    name = "Edge-popup"

    def __init__(
        self,
        *,
        epochs: int = 20,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        minibatch_size: int = 64,
        weights: Weights = "signed_constant",
        scaled: bool = False,
        skip_1x1: bool = False,
        skip_linear: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(skip_1x1=skip_1x1, skip_linear=skip_linear, **settings)
        self.epochs, self.minibatch_size = epochs, minibatch_size
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.weights, self.scaled = weights, scaled
        for name in ("epochs", "minibatch_size"):
            value = getattr(self, name)
            self._require(isinstance(value, int) and value >= 1, name, "a whole number from 1")
        for name in ("lr", "weight_decay"):
            self._require(0 <= getattr(self, name) < math.inf, name, "a finite number from 0")
        self._require(0 <= momentum < 1, "momentum", "a number in [0, 1)")
        self._require(weights in get_args(Weights), "weights", f"one of {get_args(Weights)}")

    @torch.no_grad()
    def draw_(self, model: nn.Module) -> None:
        """Kaiming's weights over fan-in, for ReLU; no biases."""
        reinitialise_(model, self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        for layer in weights_of(model).values():
            weight = cast(Tensor, layer.weight)
            drawn = nn.init.kaiming_normal_(
                torch.empty(weight.shape), nonlinearity="relu", generator=generator
            )
            if self.weights == "signed_constant":
                fan = nn.init._calculate_correct_fan(drawn, "fan_in")
                drawn = drawn.sign() * nn.init.calculate_gain("relu") / math.sqrt(fan)
            weight.copy_(drawn)
            if layer.bias is not None:
                cast(Tensor, layer.bias).zero_()

    def choose_(
        self, model: nn.Module, layers: Mapping[str, nn.Module], target: Target, count: int
    ) -> Masks:
        """The weights with the largest scores of every layer, after learning the scores."""
        counts = shares({n: cast(Tensor, m.weight).numel() for n, m in layers.items()}, count)
        if self.scaled:
            with torch.no_grad():
                for name, layer in layers.items():
                    weight = cast(Tensor, layer.weight)
                    weight *= math.sqrt(weight.numel() / counts[name])
        scores = self.learn(model, layers, target, counts)
        return {n: top({n: s.abs()}, counts[n])[n] for n, s in scores.items()}

    def learn(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        target: Target,
        counts: Mapping[str, int],
    ) -> dict[str, Tensor]:
        """Scores of the weights, in their shapes; running statistics of norms are updated.

        Args:
            model: its weights are random, and are left.
            layers: of it, whose weights have scores.
            target: a sample of the data.
            counts: weights of each layer that are used.
        """
        device = first_floating(model).device
        generator = torch.Generator().manual_seed(self.seed)
        frozen = {name: cast(Tensor, layer.weight).detach() for name, layer in layers.items()}
        scores = {name: _scores(weight, generator) for name, weight in frozen.items()}
        optimizer = torch.optim.SGD(
            scores.values(), self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
        batches = epochs(target, self.minibatch_size, self.epochs, generator, device)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
        with training(model, self.seed):
            for x, y in batches:
                masked = {
                    f"{n}.weight" if n else "weight": w * straight_through(scores[n], counts[n])
                    for n, w in frozen.items()
                }
                loss = F.cross_entropy(functional_call(model, masked, x).float(), y)
                check_finite(loss, self.name, lr=self.lr)
                gradients = torch.autograd.grad(loss, list(scores.values()))
                for score, gradient in zip(scores.values(), gradients, strict=True):
                    score.grad = gradient
                optimizer.step()
                schedule.step()
        return {name: score.detach() for name, score in scores.items()}


def straight_through(scores: Tensor, count: int) -> Tensor:
    """1 at the ``count`` largest ``|s|``, else 0; its gradient is that of ``|s|``."""
    size = scores.abs()
    hard = torch.zeros_like(scores).view(-1)
    hard[size.detach().flatten().topk(count).indices] = 1
    return hard.view_as(scores) + (size - size.detach())


def shares(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """The same share of every layer, at least one weight and together at most ``count``."""
    spare, rest = count - len(sizes), sum(sizes.values()) - len(sizes)
    return {name: 1 + (size - 1) * spare // max(1, rest) for name, size in sizes.items()}


def _scores(weight: Tensor, generator: torch.Generator) -> Tensor:
    """As PyTorch draws weights, which is how the authors draw scores."""
    drawn = torch.empty(weight.shape)
    nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
    return drawn.to(weight).requires_grad_()
