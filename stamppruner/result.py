"""What pruning gives back, and the steps from a plan to it that every method shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import nn

from stamppruner import ranks
from stamppruner.batchnorm import recalibrate_
from stamppruner.budget import Budget, Chooser
from stamppruner.certificate import shrink
from stamppruner.channels import ChannelGraph, ChannelPlan, FloatArray
from stamppruner.errors import DivergedError, UnsupportedModelError
from stamppruner.evidence import running_statistics
from stamppruner.factory import Structure, recognise
from stamppruner.files import PathLike, check_writable
from stamppruner.finetune import evaluate, finetune
from stamppruner.heads import find_head, fit_ridge_, head_inputs
from stamppruner.history import History
from stamppruner.layers import check_no_nan, first_floating, first_nan
from stamppruner.meet import Met
from stamppruner.reconstruct import reconstruct_
from stamppruner.report import Report
from stamppruner.slim import save_slim
from stamppruner.summary import make_report
from stamppruner.supervision import CLASSIFICATION, Supervision
from stamppruner.target import Target
from stamppruner.zeros import num_held, released

BATCH = 128
"""Target images a pass."""

_RECONSTRUCT = 512
"""Most target images, in one batch, that weights are re-solved on."""

_RECONSTRUCT_PIXELS = 2**21
"""The same for their pixels, which bounds the memory: 512 images of 64x64, 41 of 224x224."""


@dataclass
class PruneResult:
    """A slim network and everything known about how it came to be.

    Its parameters are new objects: build a new optimizer on ``result.model.parameters()``. One
    that was built before pruning goes on training the dense model and never sees the slim one.

    Attributes:
        model: a plain module of the model's own class. Only the layers in ``report.rewired`` have
            hooks, which gather and scatter channels where the model's code fixes a width. Of an
            unstructured method it has the full widths, and weights that are held at zero, also
            while it is trained (:mod:`~stamppruner.zeros`).
        plan: which channels were kept.
        report: printable, and savable as HTML or JSON.
        history: of :meth:`finetune`.
        keep_probability: ``E[m]`` of every channel for the target, ``(num_channels,)``, by which
            they were ranked; None of a baseline.
        structure: of the whole network, by which a file names the function that makes it.
        facts: what the data set said of its images (names of classes, mean, std).
        task: what it was pruned to do, by which it is fine-tuned and evaluated.

    Example:
        >>> from stamppruner.baselines import Magnitude
        >>> from stamppruner.models import ResNet
        >>> data = [(torch.randn(6, 3, 8, 8), torch.arange(6) % 3)]
        >>> result = Magnitude().prune(ResNet((1, 1), (8, 8), 3), data, Budget(macs=0.5))
        >>> result.report.reached["macs"] <= 0.5, type(result.model).__name__
        (True, 'ResNet')
    """

    model: nn.Module
    plan: ChannelPlan
    report: Report
    history: History = field(default_factory=History)
    keep_probability: FloatArray | None = None
    structure: Structure | None = None
    facts: Mapping[str, list[Any]] = field(default_factory=dict)
    task: Supervision = CLASSIFICATION

    def finetune(self, loader: Any, epochs: int, **settings: Any) -> History:
        """Train the slim model; see :func:`stamppruner.finetune` for the settings.

        It builds a new optimizer, as a training loop of your own must: one that was built on the
        dense model does not know the slim parameters.
        """
        start = perf_counter()
        settings = {**self._functions, **settings}
        self.history = finetune(self.model, loader, epochs=epochs, **settings)
        self._add(timings={"finetune": perf_counter() - start})
        return self.history

    def evaluate(self, loader: Any) -> float:
        """Accuracy of the slim model in [0, 1], which the report notes.

        As ``accuracy_after_cut`` before fine-tuning, as ``accuracy_after_finetune`` after it. Of a
        task of one's own it is the ``metric_fn``, or else the loss, under such names.
        """
        found = evaluate(self.model, loader, **self._functions)
        stage = "after_finetune" if len(self.history) else "after_cut"
        self._add(metrics={f"{self.task.metric or 'loss'}_{stage}": found})
        return found

    @property
    def _functions(self) -> dict[str, Any]:
        return {name: getattr(self.task, name) for name in ("loss_fn", "forward_fn", "metric_fn")}

    def save(self, path: PathLike) -> None:
        """Write the slim model; :func:`stamppruner.load_slim` reads it.

        Weights that are held at zero are zeros in the file; the network that is loaded has the
        same outputs, and holds none of them if it is trained on.

        The file records the function that makes the full model, if it is one of torchvision's or
        timm's classifiers or one of this package's: then it loads without the model's class.

        Raises:
            CheckpointError: the path cannot be written.
        """
        check_writable(path)
        graph, plain = self.plan.graph, released(self.model)
        factory = recognise(self.structure) if self.structure else None
        save_slim(
            path,
            plain,
            {
                "kept": self.plan.record(),
                "factory": factory.to_json() if factory else None,
                "input_shape": graph.example.sample_shape if graph.example else None,
                "images": dict(self.facts),
                "budget": self.report.budget,
                "reached": self.report.reached,
                **({"held_at_zero": zeros} if (zeros := num_held(self.model)) else {}),
                "settings": self.report.settings,
            },
        )

    def _add(self, **changes: Mapping[str, float]) -> None:
        merged: dict[str, Any] = {
            name: {**getattr(self.report, name), **new} for name, new in changes.items()
        }
        self.report = dataclasses.replace(self.report, **merged)


def check_prunable(graph: ChannelGraph) -> None:
    """Raise UnsupportedModelError, with all reasons, if no channel can be removed."""
    if not graph.groups:
        reasons = "; ".join(f"{name}: {why}" for name, why in graph.protected.items())
        raise UnsupportedModelError(
            f"no channel of the model can be removed: {reasons or 'it has no layers to cut'}"
        )


def finish(
    dense: nn.Module,
    met: Met,
    target: Target,
    chooser: Chooser,
    *,
    title: str,
    budget: Budget | None,
    fit_head: bool,
    recalibrate: bool,
    reconstruct: bool,
    warnings: list[str],
    timings: dict[str, float],
    settings: Mapping[str, Any],
    measure_latency: bool = True,
) -> PruneResult:
    """Cut with proof, fit weights and batch norms to the target in closed form, and report.

    On several ranks the plan is that of all of them, and the slim network that of the first.

    Args:
        dense: full network with a head of the target's classes; not changed.
        met: what to keep of it, and what was measured on the way.
        target: sample of the target.
        chooser: of ``dense``, for its costs.
        title: of the report.
        budget: as asked.
        fit_head: fit a ridge head on the slim network's features.
        recalibrate: re-estimate batch-norm statistics on the target.
        reconstruct: re-solve weights by least squares on the target, which re-estimates too.
        warnings: for the report.
        timings: seconds of the steps before; this one's are added.
        settings: for the report.
        measure_latency: time both networks for the report.

    Raises:
        UnsupportedModelError: a weight of the full network is NaN.
        EquivalenceError: the slim network differs from the masked one.
        DivergedError: a weight of the slim network became NaN.
        RankError: other ranks have another plan.
    """
    plan = met.plan
    check_no_nan(dense)
    ranks.check_plan(plan)
    start = perf_counter()
    slim = shrink(dense, plan, target.images[:1])  # proved at the target's own size
    timings["cut_and_prove"] = perf_counter() - start
    start = perf_counter()
    device = first_floating(slim).device
    batches = target.image_batches(BATCH, device)
    if reconstruct:
        reconstruct_(slim, dense, plan, target.images[: _few(target)].to(device))
    elif recalibrate:
        recalibrate_(slim, batches)
    fit_head = fit_head and target.task.classifies
    if fit_head and (head := find_head(slim, plan.graph)) is not None:
        fit_head_(slim, head, target)
    if (lost := first_nan(slim)) is not None:
        raise DivergedError(
            f"{lost!r} became NaN when weights were fitted to the target: scale its images, pass "
            f"the model as float32 (it is {first_floating(slim).dtype}), or switch off reconstruct "
            "and fit_head"
        )
    ranks.copy_from_first_(slim)
    timings["fit_weights"] = perf_counter() - start
    metrics = {**sample_merit(dense, target, "before"), **sample_merit(slim, target, "after")}
    report = make_report(
        dense,
        slim,
        plan,
        chooser,
        title=title,
        budget=budget,
        warnings=warnings,
        metrics=metrics,
        timings=timings,
        settings={**settings, **({"ranks": ranks.count()} if ranks.count() > 1 else {})},
        measure_latency=measure_latency,
        times=met.times,
    )
    return PruneResult(
        slim, plan, report, structure=Structure.of(dense), facts=target.facts, task=target.task
    )


def _few(target: Target) -> int:
    """Images that fit into the memory of one batch."""
    return max(2, min(_RECONSTRUCT, _RECONSTRUCT_PIXELS // target.images[0, 0].numel()))


def sample_merit(model: nn.Module, target: Target, stage: str) -> dict[str, float]:
    """The figure of merit on some target images, by its name in a report; empty if there is none.

    Args:
        model: full or slim.
        target: the sample.
        stage: ``"before"`` or ``"after"`` the cut.
    """
    images, targets = (x[: _few(target)] for x in (target.images, target.labels))
    device, task = first_floating(model).device, target.task
    with running_statistics(model), torch.no_grad():
        outputs = task.outputs(model, images.to(device))
    if task.classifies and (not isinstance(outputs, torch.Tensor) or outputs.dim() != 2):
        return {}
    merit = task.merit(model, outputs, targets.to(device))
    return {} if merit is None else {f"target_{task.metric}_{stage}": merit}


def fit_head_(model: nn.Module, head: str, target: Target) -> None:
    """Fit the head by ridge regression on the target, with batch norms on running statistics."""
    device = first_floating(model).device
    with running_statistics(model):
        features = head_inputs(model, head, target.image_batches(BATCH, device))
    layer = model.get_submodule(head)
    if features is not None and isinstance(layer, nn.Linear):
        fit_ridge_(layer, features, target.labels.to(device))
