"""STAMPPruner: meta-fit once on a reference, then prune for any data set in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from stamppruner import pruner_file, ranks
from stamppruner.budget import Budget
from stamppruner.calls import copied_module
from stamppruner.channels import ChannelGraph, ChannelPlan, FloatArray
from stamppruner.config import STAMPConfig
from stamppruner.encoders import SetEncoder, SetTransformer
from stamppruner.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    DataError,
    StampError,
    UnsupportedModelError,
)
from stamppruner.factory import Structure, full_model, recognise
from stamppruner.files import PathLike, check_writable
from stamppruner.fitting import RunSettings, fit, peek, warn_of_gates
from stamppruner.gated import GatedNet
from stamppruner.guards import within
from stamppruner.heads import find_head, num_outputs
from stamppruner.history import History
from stamppruner.meet import Met, meet
from stamppruner.meta import Callback
from stamppruner.pareto import AfterCut, Pareto, as_budgets
from stamppruner.posteriors import BetaBernoulli, Posterior
from stamppruner.progress import bar
from stamppruner.projection import projections, replay_
from stamppruner.pruner_record import SHORTCUTS, Saved
from stamppruner.randomness import streams_kept
from stamppruner.result import PruneResult, check_prunable, finish
from stamppruner.scoring import NotMetaFittedWarning as NotMetaFittedWarning
from stamppruner.scoring import Origin, Scoring, image_shape, score
from stamppruner.scoring import UnlikeImagesWarning as UnlikeImagesWarning
from stamppruner.shortcuts import projected
from stamppruner.statistics import ImageStatistics
from stamppruner.supervision import ForwardFn, LossFn, MetricFn, Supervision
from stamppruner.target import check_fits, facts_of, first_images
from stamppruner.tasks import (
    LoaderTasks,
    Task,
    TaskSampler,
    TaskSource,
    as_sampler,
    as_samples,
    check_batch,
)
from stamppruner.trace import trace_channels
from stamppruner.undisturbed import undisturbed


class STAMPPruner:
    """Set-based task-adaptive meta-pruning of a convolutional network.

    Args:
        model: any network of convolutions and linear layers; it is never changed.
        example_inputs: as for :func:`~stamppruner.trace_channels`; by default the first images
            that :meth:`meta_fit` or :meth:`prune` sees.
        config: settings.
        posterior: q(m, pi) over the channels; by default Beta-Bernoulli with the config's prior.
        encoder: of the set of images; by default a set transformer.
        protect: layers whose outputs stay whole, by qualified name or shell pattern.
        shortcuts: ``"couple"``: channels that meet in a residual sum share a mask; ``"project"``:
            identity shortcuts get a 1x1 layer, so that both sides are pruned on their own, see
            :func:`~stamppruner.project_shortcuts`. Budgets stay shares of the model as given.
        loss_fn: of the model's outputs and the targets ``(B, ...)``, for a task that is not
            classification (segmentation, regression, several labels); no head is fitted then, and
            W is not trained under masks before the cut. It is not saved.
        forward_fn: model and images to outputs; by default ``model(images)``.
        metric_fn: outputs and targets to a number for reports, larger is better.

    Attributes:
        normalisation: mean and standard deviation, a number a channel, that the reference data
            set says its pixels were normalised by; None where it does not say.

    Raises:
        UnsupportedModelError: nothing can be pruned, or no shortcut projected; raised when the
            model is traced.
        ConfigError: ``shortcuts`` is neither.

    Example:
        >>> from stamppruner.models import resnet18
        >>> pruner = STAMPPruner(resnet18(10, width=0.125), torch.zeros(1, 3, 32, 32))
        >>> len(pruner.graph.groups)
        12
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any = None,
        *,
        config: STAMPConfig | None = None,
        posterior: Posterior | None = None,
        encoder: SetEncoder | None = None,
        protect: Sequence[str] = (),
        shortcuts: Literal["couple", "project"] = "couple",
        loss_fn: LossFn | None = None,
        forward_fn: ForwardFn | None = None,
        metric_fn: MetricFn | None = None,
    ) -> None:
        if shortcuts not in SHORTCUTS:
            raise ConfigError(f"shortcuts={shortcuts!r}: pass one of {', '.join(SHORTCUTS)}")
        self.model = model
        self.shortcuts = shortcuts
        self.config = config or STAMPConfig()
        self.protect = tuple(protect)
        self.history = History()
        self.meta_fitted = False
        self.task = Supervision(loss_fn, forward_fn, metric_fn)
        self._posterior, self._encoder = posterior, encoder
        self._net: GatedNet | None = None
        self._coupled: dict[str, str] = {}
        self._seen: ImageStatistics | None = None  # of the reference
        self.normalisation: ImageStatistics | None = None
        if not isinstance(model, nn.Module):
            raise UnsupportedModelError(f"{model!r} is no module: pass a model, not its class")
        if example_inputs is not None:
            self._trace(example_inputs)

    @property
    def graph(self) -> ChannelGraph:
        """The model's removable channels. Raises StampError before the model was traced."""
        return self._gated().graph

    @property
    def network(self) -> nn.Module:
        """W, on which the graph stands: a copy of the model, with its projections if there are any.

        Raises StampError before the model was traced.
        """
        return self._gated().model

    @undisturbed()
    @streams_kept()
    @ranks.together()
    def meta_fit(
        self,
        ref_tasks: Any,
        *,
        progress: bool = True,
        callback: Callback | None = None,
        checkpoint_dir: PathLike | None = None,
        checkpoint_minutes: float = 10.0,
        keep: int = 3,
        resume: bool = True,
        log_dir: PathLike | None = None,
        deterministic: bool = False,
        max_skipped: int = 10,
        loader_timeout: float | None = None,
        num_workers: int = 0,
        offload: PathLike | None = None,
        compile: bool = False,
    ) -> STAMPPruner:
        """Learn W, pi and theta over tasks of the reference data (Algorithm 1, lines 1 to 10).

        Where ``torch.distributed`` is initialised, all ranks call this with the same reference;
        each does its share of the work, and all get the same pruner. Files are written by rank 0.

        Args:
            ref_tasks: a :class:`~stamppruner.TaskSampler` (labels are the model's outputs), a
                labelled data set, or a list of data sets or loaders, one a task; with a
                ``loss_fn``, data sets or loaders of (image, target) pairs.
            progress: show a bar where the output is a terminal.
            callback: called with the iteration and its figures.
            checkpoint_dir: folder for checkpoints, one a run. SIGTERM then ends the call after
                the iteration, with a checkpoint.
            checkpoint_minutes: between two of them; 0 writes one after every iteration.
            keep: so many of the last ones stay.
            resume: go on from the last one there, bit for bit; False refuses a folder with some.
            log_dir: folder for ``meta-fit.csv`` and, where it is installed, TensorBoard's files.
            deterministic: use torch's deterministic algorithms alone.
            max_skipped: steps are left out where the loss is not finite, but not more in a row.
            loader_timeout: most seconds to wait for the images of a task; None waits for ever.
            num_workers: processes that read images ahead of their use, on one thread each, for data
                sets that decode or augment them one by one; what is learned does not depend on it.
            offload: where averages of gradients, the teacher and the copies of parameters that an
                iteration needs lie between its steps: ``"cpu"`` for a model on a GPU, or a folder
                on a disk. It saves seven times the memory of the parameters.
            compile: run steps through ``torch.compile``: a minute to begin with, then often faster
                ones, of small networks above all, whose results differ in last digits.

        Returns:
            self; ``self.history`` has one row an iteration.

        Raises:
            DataError: tasks that cannot be used, that do not come in time, or losses that are
                not finite.
            UnsupportedModelError: see the class.
            ConfigError: a value outside its range.
            CheckpointError: checkpoints cannot be written or read, or are of another run.
            MemoryLimitError: the device has not enough memory.
            PreemptedError: SIGTERM came.
            RankError: ranks of a distributed job disagree, or another one failed.
        """
        config = self.config
        settings = RunSettings(
            checkpoint_dir,
            checkpoint_minutes,
            keep,
            resume,
            log_dir,
            deterministic,
            max_skipped,
            loader_timeout,
            num_workers,
            offload,
            compile,
        )
        source: TaskSource
        if self.task.classifies:
            source = as_sampler(ref_tasks, ways=config.ways, shots=config.shots, seed=config.seed)
        else:
            source = as_samples(ref_tasks, size=config.ways * config.shots, seed=config.seed)
        probe = within(loader_timeout, lambda: peek(source)[0], "the images of a task")
        if self._net is None:
            self._trace(probe.images[:1])
        net = self._gated()
        outputs = self.task.classifies and not isinstance(source, LoaderTasks)
        check_fits(net.model, probe.images[:1].to(net.device), int(outputs), self.task)
        if outputs:
            _check_outputs(net, _classes(source, probe))
        self.history = fit(
            net,
            self.model,
            source,
            config,
            settings,
            again=self.meta_fitted,
            progress=progress,
            callback=callback,
        )
        self.meta_fitted = True
        self._seen = ImageStatistics.of(probe.images)
        said = facts_of(ref_tasks)
        if {"mean", "std"} <= said.keys():
            self.normalisation = ImageStatistics(tuple(said["mean"]), tuple(said["std"]))
        warn_of_gates(net, source, self.history)
        return self

    @undisturbed()
    @ranks.together()
    def prune(
        self,
        target_loader: Any,
        budget: Budget | None = None,
        *,
        progress: bool = True,
    ) -> PruneResult:
        """Give a data set its own small network (Algorithm 1, lines 11 and 12).

        Where ``torch.distributed`` is initialised, all ranks call this, each with its own part of
        the target: the sample is pooled, scores are averaged, and all get the same network.

        Args:
            target_loader: yields (images, labels), labels ``0 .. classes - 1``; or a data set.
            budget: channels are ranked by E[m] to meet it; without one, those with
                ``E[m] >= config.threshold`` are kept, as the posterior decides.
            progress: show a bar where the output is a terminal.

        Returns:
            The slim network, proved equal to the masked dense one, with its plan and report.

        Raises:
            DataError: the target cannot be used.
            BudgetError: the budget cannot be met.
            EquivalenceError: the cut could not be proved.
            RankError: ranks of a distributed job disagree, or another one failed.
        """
        _check_budget(budget)
        scoring = self._score(target_loader).under(budget, self.config, progress=progress)
        return self._cut(scoring, self._choose(scoring, budget), budget)

    @undisturbed()
    @ranks.together()
    def choose(
        self, target_loader: Any, budget: Budget | None = None, *, progress: bool = True
    ) -> tuple[ChannelPlan, FloatArray]:
        """The channels that :meth:`prune` would keep, and ``E[m]``; nothing is cut.

        Args:
            target_loader: as for :meth:`prune`; so are ``budget`` and ``progress``.
            budget: what the kept channels must meet.
            progress: show a bar where the output is a terminal.

        Returns:
            The plan, and the scores ``(num_channels,)`` that channels were ranked by.

        Raises:
            DataError: the target cannot be used.
            BudgetError: the budget cannot be met.
            RankError: ranks of a distributed job disagree, or another one failed.
        """
        _check_budget(budget)
        scoring = self._score(target_loader).under(budget, self.config, progress=progress)
        met, _ = self._choose(scoring, budget)
        ranks.check_plan(met.plan)
        return met.plan, scoring.scores

    @undisturbed()
    @ranks.together()
    def pareto(
        self,
        target_loader: Any,
        budgets: Iterable[Budget | float],
        *,
        evaluate_on: Any = None,
        finetune: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> Pareto:
        """Networks of several sizes for one data set, which is scored once.

        Each is the network that :meth:`prune` gives for its budget. No network is cut before all
        budgets are known to be met; a larger budget of a kind never gives a smaller network (with
        ``config.prune_epochs``, where every budget has scores of its own, networks of budgets
        closer than a step of widths may trade places).

        Args:
            target_loader: as for :meth:`prune`.
            budgets: of each network; a plain number up to 1 is a share of the multiply-adds.
            evaluate_on: labelled data that accuracies are measured on as well; on several ranks,
                each measures on its own.
            finetune: settings of :meth:`PruneResult.finetune`, with ``epochs``; networks are then
                trained on the target.
            progress: show bars where the output is a terminal.

        Returns:
            The networks, their costs and accuracies, in the order of the budgets.

        Raises:
            BudgetError: no budgets, one twice, one that is none, or one that cannot be met; it is
                named.
            ConfigError: unknown settings of fine-tuning, or any on several ranks.
            DataError: the data cannot be used, or not read more than once where they must be.
            EquivalenceError: a cut could not be proved.
            RankError: ranks of a distributed job disagree, or another one failed.
        """
        asked = as_budgets(budgets)
        after = AfterCut(target_loader, evaluate_on, finetune, progress, self.task)
        scoring = self._score(target_loader)
        chosen = [self._choose(scoring, budget) for budget in asked]  # all, before any cut
        full = after.full(scoring.dense)
        results = []
        pairs = list(zip(asked, chosen, strict=True))
        for budget, choice in bar(pairs, description="networks", shown=progress):
            own = scoring.under(budget, self.config, progress=progress)
            if own is not scoring:
                choice = self._choose(own, budget)
            results.append(after(self._cut(own, choice, budget), scoring.target))
        return Pareto.of(results, full)

    def keep_probability(self, images: Tensor | None = None) -> np.ndarray:
        """``E[m]`` of every channel, ``(num_channels,)``, for a set of images ``(B, C, H, W)``.

        Without images it is ``E[pi]``, what is known before any set is seen.

        Raises:
            DataError: they are no finite floating-point images.
            StampError: the model was never traced.
        """
        net = self._gated()
        with torch.no_grad():
            if images is None:
                return net.posterior.keep_probability().cpu().numpy()
            check_batch(images, channels=image_shape(net.graph)[0], where="the set")
            return net.keep_probability(images.to(net.device)).cpu().numpy()

    def save(self, path: PathLike) -> None:
        """Write the pruner to one safetensors file: W, gates, encoder, settings, history.

        Raises:
            CheckpointError: the path cannot be written.
            StampError: the model was never traced.
        """
        check_writable(path)
        net = self._gated()
        factory = recognise(Structure.of(self.model))
        record = {
            "model_class": f"{type(self.model).__module__}.{type(self.model).__qualname__}",
            "factory": factory.to_json() if factory else None,
            "image_shape": image_shape(net.graph),
            "groups": pruner_file.group_record(net.graph),
            "config": self.config.to_dict(),
            "protect": list(self.protect),
            "shortcuts": self.shortcuts,
            "coupled": self._coupled,
            "projections": projections(net.model),
            "meta_fitted": self.meta_fitted,
            "classifies": self.task.classifies,
            "normalisation": self.normalisation.to_json() if self.normalisation else None,
            "image_statistics": self._seen.to_json() if self._seen else None,
            "history": self.history.rows,
        }
        pruner_file.write(path, self._parts(), record)

    @classmethod
    @undisturbed()
    def load(
        cls,
        path: PathLike,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        *,
        posterior: Posterior | None = None,
        encoder: SetEncoder | None = None,
        loss_fn: LossFn | None = None,
        forward_fn: ForwardFn | None = None,
        metric_fn: MetricFn | None = None,
    ) -> STAMPPruner:
        """Read a pruner that :meth:`save` wrote.

        Args:
            path: the file.
            model: a model of the class that was pruned, or what makes one; its weights do not
                matter, and it is not changed. By default what the file names, as for
                :func:`stamppruner.load_slim`.
            posterior: as given to the saved pruner, if it was not the default.
            encoder: as given to the saved pruner, if it was not the default.
            loss_fn, forward_fn, metric_fn: as given to the saved pruner, if it had any.

        Raises:
            CheckpointError: the file cannot be read, or does not fit the model; the message names
                what differs.
        """
        tensors, record = pruner_file.read(path)
        saved = Saved.of(record, path)
        if saved.classifies != (loss_fn is None):
            kind = "for classes: leave out" if saved.classifies else "with a loss of its own: pass"
            raise CheckpointError(f"{path} was made {kind} loss_fn=")
        own = replay_(full_model(model, record, path), saved.projections, path)
        pruner_file.load_part_(own, "model", tensors, path)
        example = torch.zeros(1, *saved.image_shape)
        try:
            pruner = cls(
                own,
                example,
                config=saved.config,
                posterior=posterior,
                encoder=encoder,
                protect=saved.protect,
                loss_fn=loss_fn,
                forward_fn=forward_fn,
                metric_fn=metric_fn,
            )
        except StampError as error:
            raise CheckpointError(f"{path} does not fit the model: {error}") from error
        pruner_file.check_groups(pruner.graph, saved.groups, path)
        parts = pruner._parts()
        pruner_file.check_parts(parts, tensors, path)
        for part, module in parts.items():
            pruner_file.load_part_(module, part, tensors, path)
        pruner.history, pruner.meta_fitted = saved.history, saved.meta_fitted
        pruner.shortcuts, pruner._coupled = saved.shortcuts, saved.coupled
        pruner._seen, pruner.normalisation = saved.seen, saved.normalisation
        return pruner

    def _score(self, target_loader: Any) -> Scoring:
        """Algorithm 1 up to line 11: the scores of every channel for a target."""
        start = perf_counter()
        if self._net is None:
            self._trace(first_images(target_loader, self.task)[:1])
        origin = Origin(self.meta_fitted, self._seen, self._coupled)
        return score(self._gated(), target_loader, self.config, origin, start=start)

    def _choose(self, scoring: Scoring, budget: Budget | None) -> tuple[Met, float]:
        """The channels to keep (line 12), and the seconds that choosing them took."""
        start = perf_counter()
        chooser, scores = scoring.chooser, scoring.scores
        met = (
            meet(scoring.dense, chooser, scores, budget)
            if budget is not None
            else Met(chooser.threshold(scores, self.config.threshold))
        )
        return met, perf_counter() - start

    def _cut(
        self, scoring: Scoring, choice: tuple[Met, float], budget: Budget | None
    ) -> PruneResult:
        """The slim network of a plan, with its report."""
        met, seconds = choice
        config, timings = self.config, dict(scoring.timings)
        timings["choose_channels"] += seconds
        result = finish(
            scoring.dense,
            met,
            scoring.target,
            scoring.chooser,
            title="STAMP",
            budget=budget,
            fit_head=config.fit_head or scoring.new_head,
            recalibrate=config.recalibrate,
            reconstruct=config.reconstruct,
            warnings=list(scoring.notes),
            timings=timings,
            settings={
                "config": config.to_dict(),
                "meta_fitted": self.meta_fitted,
                "shortcuts": self.shortcuts,
            },
            measure_latency=config.measure_latency,
        )
        result.keep_probability = scoring.scores
        return result

    def _parts(self) -> dict[str, nn.Module]:
        net = self._gated()
        return {"model": net.model, "posterior": net.posterior, "encoder": net.encoder}

    @undisturbed()
    def _trace(self, example_inputs: Any) -> None:
        if self.shortcuts == "project":
            model, found = projected(self.model, example_inputs)
            self._coupled = dict(found.coupled)
        else:
            model = copied_module(self.model)
        graph = trace_channels(model, example_inputs, protect=self.protect)
        check_prunable(graph)
        config = self.config
        posterior = self._posterior or BetaBernoulli(
            graph.num_channels, alpha=config.alpha, gamma=config.gamma, beta=config.beta
        )
        encoder = self._encoder or SetTransformer(image_shape(graph)[0], seed=config.seed)
        self._net = GatedNet(model, graph, posterior, encoder, self.task)

    def _gated(self) -> GatedNet:
        if self._net is None:
            raise StampError(
                "the model has not been traced: pass example_inputs, or call meta_fit or prune"
            )
        return self._net


def _classes(source: TaskSource, task: Task) -> Sequence[int]:
    """All classes of a source that knows them, else those of a task."""
    return list(source.by_class) if isinstance(source, TaskSampler) else task.classes


def _check_budget(budget: Any) -> None:
    if budget is not None and not isinstance(budget, Budget):
        raise BudgetError(f"the budget is {budget!r}: pass Budget(macs=0.25), say")


def _check_outputs(net: GatedNet, classes: Sequence[int]) -> None:
    outputs = num_outputs(net.model, find_head(net.model, net.graph))
    if outputs is None:
        raise UnsupportedModelError(
            "the model's output is not written by one linear layer, so the classes of a task "
            "cannot be picked: pass a list of data sets, one a task, or end the model in a Linear"
        )
    if max(classes) >= outputs:
        raise DataError(
            f"the reference data have class {max(classes)} and the model {outputs} outputs: "
            "relabel them, or give the model a head of their classes"
        )
