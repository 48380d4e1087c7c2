"""STAMPPruner: meta-fit once on a reference, then prune for any data set in seconds."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from stamppruner import pruner_file, ranks
from stamppruner.adapt import adapt_
from stamppruner.budget import Budget, Chooser
from stamppruner.channels import ChannelGraph
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
from stamppruner.gated import GatedNet
from stamppruner.heads import find_head, with_classes
from stamppruner.history import History
from stamppruner.io import PathLike, check_writable
from stamppruner.meta import Callback, MetaLearner
from stamppruner.posteriors import BetaBernoulli, Posterior
from stamppruner.projection import projections, replay_
from stamppruner.result import PruneResult, check_prunable, finish, fit_head_
from stamppruner.shortcuts import projected
from stamppruner.statistics import ImageStatistics
from stamppruner.target import SAMPLE, check_fits, first_images
from stamppruner.tasks import LoaderTasks, Task, TaskSampler, TaskSource, as_sampler
from stamppruner.trace import trace_channels
from stamppruner.warmstart import blend_target, keep_by_rank, task_scores, warm_start_on_tasks

logger = logging.getLogger(__name__)

_FIT_BATCH = 50

SHORTCUTS = ("couple", "project")
"""Values of ``STAMPPruner(shortcuts=...)``."""

_WARM_TASKS = 16
"""Reference tasks whose scores pi starts from, and whose masks W is trained under."""


class NotMetaFittedWarning(UserWarning):
    """Pruning without :meth:`STAMPPruner.meta_fit`: masks come from the target alone."""


class UnlikeImagesWarning(UserWarning):
    """The target's images seem to be scaled in another way than the reference's."""


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
    ) -> None:
        if shortcuts not in SHORTCUTS:
            raise ConfigError(f"shortcuts={shortcuts!r}: pass one of {', '.join(SHORTCUTS)}")
        self.model = model
        self.shortcuts = shortcuts
        self.config = config or STAMPConfig()
        self.protect = tuple(protect)
        self.history = History()
        self.meta_fitted = False
        self._posterior, self._encoder = posterior, encoder
        self._net: GatedNet | None = None
        self._coupled: dict[str, str] = {}
        self._seen: ImageStatistics | None = None  # of the reference
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

    @torch.inference_mode(False)
    @torch.enable_grad()
    def meta_fit(
        self, ref_tasks: Any, *, progress: bool = True, callback: Callback | None = None
    ) -> STAMPPruner:
        """Learn W, pi and theta over tasks of the reference data (Algorithm 1, lines 1 to 10).

        Args:
            ref_tasks: a :class:`~stamppruner.TaskSampler` (labels are the model's outputs), a
                labelled data set, or a list of data sets or loaders, one a task.
            progress: show a bar where the output is a terminal.
            callback: called with the iteration and its figures.

        Returns:
            self; ``self.history`` has one row an iteration.

        Raises:
            DataError: tasks that cannot be used.
            UnsupportedModelError: see the class.
        """
        config = self.config
        source = as_sampler(ref_tasks, ways=config.ways, shots=config.shots, seed=config.seed)
        probe_tasks = _peek(source)
        if self._net is None:
            self._trace(probe_tasks[0].images[:1])
        net = self._gated()
        head = find_head(net.model, net.graph)
        fitted = isinstance(source, LoaderTasks)
        check_fits(net.model, probe_tasks[0].images[:1].to(net.device), int(not fitted))
        if not fitted:
            _check_outputs(net, _classes(source, probe_tasks))
        keep = None
        if not fitted and (config.warm_start or config.weight_steps):
            scores = task_scores(net, _peek(source, _WARM_TASKS))
            keep = torch.stack([keep_by_rank(one, net) for one in scores])
            if config.warm_start:
                warm_start_on_tasks(net, scores)
        learner = MetaLearner(net, source, config, head, fitted, keep)
        try:
            self.history = learner.run(progress=progress, callback=callback)
        finally:
            _modes_like(net.model, self.model)
        self.meta_fitted = True
        self._seen = ImageStatistics.of(probe_tasks[0].images)
        self._warn_dead(self.history)
        return self

    @torch.inference_mode(False)
    @torch.enable_grad()
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
        if budget is not None and not isinstance(budget, Budget):
            raise BudgetError(f"the budget is {budget!r}: pass Budget(macs=0.25), say")
        start = perf_counter()
        if self._net is None:
            self._trace(first_images(target_loader)[:1])
        traced = self._gated()
        config, shape = self.config, _image_shape(traced.graph)
        target = ranks.sample_target(target_loader, SAMPLE, channels=shape[0], seed=config.seed)
        notes: list[str] = []
        dense, graph = with_classes(traced.model, traced.graph, target.num_classes)
        net = GatedNet(dense, graph, copy.deepcopy(traced.posterior), copy.deepcopy(traced.encoder))
        chooser = Chooser(dense, graph, floor=config.floor, round_to=config.round_to)
        head = find_head(dense, graph)
        timings = {"read_target": perf_counter() - start}
        start = perf_counter()
        images = target.images[: config.set_size].to(net.device)
        check_fits(dense, images, target.num_classes)
        if target.images.shape[1:] != shape:
            notes.append(
                f"the target's images are {tuple(target.images.shape[1:])}: multiply-adds are "
                f"counted for {shape}, the size that the model was traced with"
            )
        found = self._seen.unlike(ImageStatistics.of(target.images)) if self._seen else None
        if found is not None:
            notes.append(found)
            warnings.warn(found, UnlikeImagesWarning, stacklevel=5)
        if head is None:
            notes.append(
                "the head was left as it is: the model's output is not that of one linear layer"
            )
        new_head = target.num_classes != _outputs(traced.model, head)
        if head is not None and (config.fit_head or new_head or not self.meta_fitted):
            fit_head_(dense, head, target)
        if self._coupled:
            name, why = next(iter(self._coupled.items()))
            notes.append(
                f"identity shortcuts left coupled: {', '.join(self._coupled)} ({name}: {why})"
            )
        weight = config.target_evidence
        if not self.meta_fitted:
            notes.append("not meta-fitted: channels are ranked by Taylor scores on the target")
            warnings.warn(f"{notes[-1]}; call meta_fit first", NotMetaFittedWarning, stacklevel=5)
            weight = 1.0
        if weight > 0:
            blend_target(net, target.batches(_FIT_BATCH, net.device), weight)
        if config.prune_epochs > 0:
            adapt_(net, chooser, target, budget, config, progress=progress)  # line 11
        with torch.no_grad():
            scores = ranks.mean(net.keep_probability(images).cpu().numpy())
        plan = (
            chooser.choose(scores, budget)
            if budget is not None
            else chooser.threshold(scores, config.threshold)
        )
        timings["choose_channels"] = perf_counter() - start
        result = finish(
            dense,
            plan,
            target,
            chooser,
            title="STAMP",
            budget=budget,
            fit_head=config.fit_head or new_head,
            recalibrate=config.recalibrate,
            reconstruct=config.reconstruct,
            warnings=notes,
            timings=timings,
            settings={
                "config": config.to_dict(),
                "meta_fitted": self.meta_fitted,
                "shortcuts": self.shortcuts,
            },
            measure_latency=config.measure_latency,
        )
        result.keep_probability = scores
        return result

    def keep_probability(self, images: Tensor | None = None) -> np.ndarray:
        """``E[m]`` of every channel, ``(num_channels,)``, for a set of images ``(B, C, H, W)``.

        Without images it is ``E[pi]``, what is known before any set is seen.
        """
        net = self._gated()
        with torch.no_grad():
            if images is None:
                return net.posterior.keep_probability().cpu().numpy()
            return net.keep_probability(images.to(net.device)).cpu().numpy()

    def save(self, path: PathLike) -> None:
        """Write the pruner to one safetensors file: W, gates, encoder, settings, history.

        Raises:
            CheckpointError: the path cannot be written.
            StampError: the model was never traced.
        """
        check_writable(path)
        net = self._gated()
        record = {
            "model_class": f"{type(self.model).__module__}.{type(self.model).__qualname__}",
            "image_shape": _image_shape(net.graph),
            "groups": pruner_file.group_record(net.graph),
            "config": self.config.to_dict(),
            "protect": list(self.protect),
            "shortcuts": self.shortcuts,
            "coupled": self._coupled,
            "projections": projections(net.model),
            "meta_fitted": self.meta_fitted,
            "image_statistics": self._seen.to_json() if self._seen else None,
            "history": self.history.rows,
        }
        pruner_file.write(path, self._parts(), record)

    @classmethod
    def load(
        cls,
        path: PathLike,
        model: nn.Module | Callable[[], nn.Module],
        *,
        posterior: Posterior | None = None,
        encoder: SetEncoder | None = None,
    ) -> STAMPPruner:
        """Read a pruner that :meth:`save` wrote.

        Args:
            path: the file.
            model: a model of the class that was pruned, or what makes one; its weights do not
                matter, and it is not changed.
            posterior: as given to the saved pruner, if it was not the default.
            encoder: as given to the saved pruner, if it was not the default.

        Raises:
            CheckpointError: the file cannot be read, or does not fit the model; the message names
                what differs.
        """
        tensors, record = pruner_file.read(path)
        try:
            shape, groups = [int(n) for n in record["image_shape"]], record["groups"]
            config = STAMPConfig.from_dict(record["config"])
            protect, history = tuple(record["protect"]), History(list(record["history"]))
            meta_fitted = bool(record["meta_fitted"])
            shortcuts, coupled = record.get("shortcuts", "couple"), dict(record.get("coupled", {}))
            seen = ImageStatistics.from_json(record.get("image_statistics"))
            if shortcuts not in SHORTCUTS:
                raise ValueError(f"shortcuts={shortcuts!r}")
        except (KeyError, ValueError, TypeError, ConfigError) as error:
            raise CheckpointError(f"{path}: its record is damaged ({error!r})") from error
        own = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        own = replay_(own, record.get("projections", []), path)
        pruner_file.load_part_(own, "model", tensors, path)
        example = torch.zeros(1, *shape)
        pruner = cls(
            own, example, config=config, posterior=posterior, encoder=encoder, protect=protect
        )
        pruner_file.check_groups(pruner.graph, groups, path)
        for part, module in pruner._parts().items():
            pruner_file.load_part_(module, part, tensors, path)
        pruner.history, pruner.meta_fitted = history, meta_fitted
        pruner.shortcuts, pruner._coupled, pruner._seen = shortcuts, coupled, seen
        return pruner

    def _parts(self) -> dict[str, nn.Module]:
        net = self._gated()
        return {"model": net.model, "posterior": net.posterior, "encoder": net.encoder}

    def _trace(self, example_inputs: Any) -> None:
        if self.shortcuts == "project":
            model, found = projected(self.model, example_inputs)
            self._coupled = dict(found.coupled)
        else:
            model = copy.deepcopy(self.model)
        graph = trace_channels(model, example_inputs, protect=self.protect)
        check_prunable(graph)
        config = self.config
        posterior = self._posterior or BetaBernoulli(
            graph.num_channels, alpha=config.alpha, gamma=config.gamma, beta=config.beta
        )
        encoder = self._encoder or SetTransformer(_image_shape(graph)[0], seed=config.seed)
        self._net = GatedNet(model, graph, posterior, encoder)

    def _gated(self) -> GatedNet:
        if self._net is None:
            raise StampError(
                "the model has not been traced: pass example_inputs, or call meta_fit or prune"
            )
        return self._net

    def _warn_dead(self, history: History) -> None:
        live = history["live"][-1] if len(history) else 1.0
        if live < 0.01:
            logger.warning(
                "only %.1f%% of the gates are live after meta-fitting: lower kl_scale", 100 * live
            )


def _modes_like(model: nn.Module, given: nn.Module) -> None:
    """Set the modes of the given model; of a layer that it lacks, that of the module around it."""
    modes = {name: module.training for name, module in given.named_modules()}
    for name, module in model.named_modules():
        module.training = modes.setdefault(name, modes.get(name.rpartition(".")[0], given.training))


def _peek(source: TaskSource, n: int = 1) -> list[Task]:
    """Tasks that are drawn without moving the source on."""
    state = source.state_dict()
    tasks = source.tasks(n)
    source.load_state_dict(state)
    return tasks


def _classes(source: TaskSource, tasks: Sequence[Task]) -> Sequence[int]:
    """All classes of a source that knows them, else those of some tasks."""
    if isinstance(source, TaskSampler):
        return list(source.by_class)
    return [c for task in tasks for c in task.classes]


def _check_outputs(net: GatedNet, classes: Sequence[int]) -> None:
    outputs = _outputs(net.model, find_head(net.model, net.graph))
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


def _outputs(model: nn.Module, head: str | None) -> int | None:
    return None if head is None else int(model.get_submodule(head).out_features)  # type: ignore[arg-type]


def _image_shape(graph: ChannelGraph) -> tuple[int, ...]:
    shape = graph.example.sample_shape if graph.example else None
    if shape is None or len(shape) != 3:
        raise UnsupportedModelError(
            f"the set encoder needs a model of one image tensor (B, C, H, W), not {shape}: use "
            "trace_channels, mask and shrink for other models"
        )
    return shape
