"""STAMPPruner: meta-fit once on a reference, then prune for any data set in seconds."""

from __future__ import annotations

import copy
import json
import logging
import math
import warnings
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner import objective
from stamppruner.budget import Budget, Chooser
from stamppruner.channels import ChannelGraph
from stamppruner.config import STAMPConfig
from stamppruner.encoders import SetEncoder, SetTransformer
from stamppruner.errors import CheckpointError, DataError, StampError, UnsupportedModelError
from stamppruner.gated import GatedNet
from stamppruner.heads import find_head, with_classes
from stamppruner.history import History
from stamppruner.inputs import Inputs
from stamppruner.io import PathLike, check_writable, read_safetensors, write_safetensors
from stamppruner.meta import Callback, MetaLearner
from stamppruner.progress import bar
from stamppruner.posteriors import BetaBernoulli, Posterior
from stamppruner.result import PruneResult, finish, fit_head_
from stamppruner.target import Target, first_images, sample_target
from stamppruner.tasks import LoaderTasks, TaskSource, as_sampler
from stamppruner.taylor import taylor_scores
from stamppruner.trace import trace_channels

logger = logging.getLogger(__name__)

FORMAT = "stamppruner.pruner"
VERSION = 1

_SAMPLE = 2000
"""Target images that ridge heads and batch norms are fitted on."""


class NotMetaFittedWarning(UserWarning):
    """Pruning without :meth:`STAMPPruner.meta_fit`: masks come from the target alone."""


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

    Raises:
        UnsupportedModelError: nothing can be pruned; raised when the model is traced.

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
    ) -> None:
        self.model = model
        self.config = config or STAMPConfig()
        self.protect = tuple(protect)
        self.history = History()
        self.meta_fitted = False
        self._posterior, self._encoder = posterior, encoder
        self._net: GatedNet | None = None
        if example_inputs is not None:
            self._trace(example_inputs)

    @property
    def graph(self) -> ChannelGraph:
        """The model's removable channels. Raises StampError before the model was traced."""
        return self._gated().graph

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
        if not fitted:
            _check_outputs(net, [c for task in probe_tasks for c in task.classes])
        if config.warm_start and not fitted:
            self._warm_start(source)
        learner = MetaLearner(net, source, config, head, fitted)
        self.history = learner.run(progress=progress, callback=callback)
        net.model.train(self.model.training)
        self.meta_fitted = True
        self._warn_dead(self.history)
        return self

    def prune(
        self,
        target_loader: Any,
        budget: Budget | None = None,
        *,
        progress: bool = True,
    ) -> PruneResult:
        """Give a data set its own small network (Algorithm 1, lines 11 and 12).

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
        """
        start = perf_counter()
        if self._net is None:
            self._trace(first_images(target_loader)[:1])
        traced = self._gated()
        config, shape = self.config, _image_shape(traced.graph)
        target = sample_target(target_loader, _SAMPLE, channels=shape[0], seed=config.seed)
        notes: list[str] = []
        dense, graph = with_classes(traced.model, traced.graph, target.num_classes)
        net = GatedNet(
            dense, graph, copy.deepcopy(traced.posterior), copy.deepcopy(traced.encoder)
        )
        chooser = Chooser(dense, graph, floor=config.floor, round_to=config.round_to)
        head = find_head(dense, graph)
        timings = {"read_target": perf_counter() - start}
        start = perf_counter()
        images = target.images[: config.set_size].to(net.device)
        if not self.meta_fitted:
            notes.append("not meta-fitted: channels are ranked by Taylor scores on the target")
            warnings.warn(f"{notes[-1]}; call meta_fit first", NotMetaFittedWarning, stacklevel=2)
            if head is not None:
                fit_head_(dense, head, target)
            self._warm_start_on(net, target)
        if config.prune_epochs > 0:
            self._adapt(net, chooser, target, budget, progress)  # line 11
        with torch.no_grad():
            scores = net.keep_probability(images).cpu().numpy()
        plan = (
            chooser.choose(scores, budget)
            if budget is not None
            else chooser.threshold(scores, config.threshold)
        )
        timings["choose_channels"] = perf_counter() - start
        return finish(
            dense,
            plan,
            target,
            chooser,
            title="STAMP",
            budget=budget,
            fit_head=config.fit_head or target.num_classes != _outputs(traced.model, head),
            recalibrate=config.recalibrate,
            warnings=notes,
            timings=timings,
            settings={"config": config.to_dict(), "meta_fitted": self.meta_fitted},
        )

    def keep_probability(self, images: Tensor) -> np.ndarray:
        """``E[m]`` of every channel, ``(num_channels,)``, for a set of images ``(B, C, H, W)``."""
        net = self._gated()
        with torch.no_grad():
            return net.keep_probability(images.to(net.device)).cpu().numpy()

    def save(self, path: PathLike) -> None:
        """Write the pruner to one safetensors file: W, gates, encoder, settings, history.

        Raises:
            CheckpointError: the path cannot be written.
            StampError: the model was never traced.
        """
        check_writable(path)
        net = self._gated()
        parts = {"model": net.model, "posterior": net.posterior, "encoder": net.encoder}
        tensors = {
            f"{part}.{name}": tensor
            for part, module in parts.items()
            for name, tensor in module.state_dict().items()
        }
        record = {
            "format": FORMAT,
            "version": VERSION,
            "model_class": f"{type(self.model).__module__}.{type(self.model).__qualname__}",
            "image_shape": _image_shape(net.graph),
            "groups": [[g.name, g.size, g.blocks] for g in net.graph.groups],
            "config": self.config.to_dict(),
            "protect": list(self.protect),
            "meta_fitted": self.meta_fitted,
            "history": self.history.rows,
        }
        write_safetensors(path, tensors, {FORMAT: json.dumps(record)})

    @classmethod
    def load(
        cls,
        path: PathLike,
        model: nn.Module,
        *,
        posterior: Posterior | None = None,
        encoder: SetEncoder | None = None,
    ) -> STAMPPruner:
        """Read a pruner that :meth:`save` wrote.

        Args:
            path: the file.
            model: a model of the class that was pruned; its weights do not matter, and it is not
                changed.
            posterior: as given to the saved pruner, if it was not the default.
            encoder: as given to the saved pruner, if it was not the default.

        Raises:
            CheckpointError: the file cannot be read, or does not fit the model; the message names
                what differs.
        """
        tensors, metadata = read_safetensors(path)
        try:
            record = json.loads(metadata[FORMAT])
            version, shape = record["version"], tuple(record["image_shape"])
            config = STAMPConfig.from_dict(record["config"])
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{path} is not a pruner of this package: it has no readable {FORMAT!r} metadata"
            ) from error
        if version != VERSION:
            raise CheckpointError(f"{path} has pruner format {version!r}, this package {VERSION}")
        own = copy.deepcopy(model)
        _load_part(own, "model", tensors, path)
        pruner = cls(
            own,
            torch.zeros(1, *shape),
            config=config,
            posterior=posterior,
            encoder=encoder,
            protect=record.get("protect", ()),
        )
        groups = [[g.name, g.size, g.blocks] for g in pruner.graph.groups]
        if groups != record["groups"]:
            changed = [g[0] for g in record["groups"] if g not in groups]
            raise CheckpointError(
                f"{path}: the model's channel groups are not those that were saved (first: "
                f"{(changed or ['new groups'])[0]!r}): its code has changed since"
            )
        _load_part(pruner._gated().posterior, "posterior", tensors, path)
        _load_part(pruner._gated().encoder, "encoder", tensors, path)
        pruner.meta_fitted = bool(record["meta_fitted"])
        pruner.history = History(record["history"])
        return pruner

    def _trace(self, example_inputs: Any) -> None:
        graph = trace_channels(self.model, example_inputs, protect=self.protect)
        if not graph.groups:
            reasons = "; ".join(f"{name}: {why}" for name, why in graph.protected.items())
            raise UnsupportedModelError(f"no channel of the model can be removed: {reasons}")
        config = self.config
        posterior = self._posterior or BetaBernoulli(
            graph.num_channels, alpha=config.alpha, gamma=config.gamma, beta=config.beta
        )
        encoder = self._encoder or SetTransformer(_image_shape(graph)[0], seed=config.seed)
        self._net = GatedNet(copy.deepcopy(self.model), graph, posterior, encoder)

    def _gated(self) -> GatedNet:
        if self._net is None:
            raise StampError(
                "the model has not been traced: pass example_inputs, or call meta_fit or prune"
            )
        return self._net

    def _warm_start(self, source: TaskSource) -> None:
        """Set pi from Taylor scores on reference tasks, each with the head's rows of its classes."""
        net, scores = self._gated(), []
        for task in _peek(source, 8):
            task = task.to(net.device)
            rows = torch.tensor(task.classes, device=net.device)
            batches = task.minibatches(_WARM_BATCH)
            scores.append(
                taylor_scores(
                    net.model,
                    net.graph,
                    batches,
                    lambda logits, y, rows=rows: F.cross_entropy(
                        logits.index_select(1, rows), y, reduction="none"
                    ),
                )
            )
        mean = torch.stack(scores).square().mean(0).sqrt()
        net.posterior.warm_start(_keep_from(mean, net.graph))

    def _warm_start_on(self, net: GatedNet, target: Target) -> None:
        batches = list(target.batches(_WARM_BATCH, net.device))
        scores = taylor_scores(
            net.model, net.graph, batches, lambda z, y: F.cross_entropy(z, y, reduction="none")
        )
        net.posterior.warm_start(_keep_from(scores, net.graph))

    def _adapt(
        self,
        net: GatedNet,
        chooser: Chooser,
        target: Target,
        budget: Budget | None,
        progress: bool,
    ) -> None:
        """K steps of gate and weight learning on the target (line 11)."""
        config = self.config
        size = config.minibatch_size
        generator = torch.Generator().manual_seed(config.seed)
        mask = (
            objective.Budgeted(net, chooser, budget)
            if budget is not None
            else objective.Relaxed(net, config.temperature, generator)
        )
        head = find_head(net.model, net.graph)
        if head is not None:
            fit_head_(net.model, head, target)
        optimizer = torch.optim.Adam(
            [
                {"params": net.weights(), "lr": config.weights_lr},
                {"params": net.posterior.pi_parameters(), "lr": config.pi_lr},
                {"params": net.theta(), "lr": config.theta_lr},
            ]
        )
        images = target.images[: config.set_size].to(net.device)
        steps = math.ceil(config.prune_epochs * len(target.labels) / size)
        net.model.train()
        for _ in bar(range(steps), description="prune", shown=progress):
            chosen = torch.randint(len(target.labels), (size,), generator=generator)
            x, y = target.images[chosen].to(net.device), target.labels[chosen].to(net.device)
            with net.masked(mask(images)) as model:
                logits = model(x)
            optimizer.zero_grad()
            objective.loss(logits, y, net, config.kl_scale / target.num_images).backward()
            optimizer.step()
        net.model.train(self.model.training)

    def _warn_dead(self, history: History) -> None:
        live = history["live"][-1] if len(history) else 1.0
        if live < 0.01:
            logger.warning(
                "only %.1f%% of the gates are live after meta-fitting: lower kl_scale", 100 * live
            )


_WARM_BATCH = 50


def _keep_from(scores: Tensor, graph: ChannelGraph) -> Tensor:
    """Keep probabilities ``(num_channels,)`` that are uniform in the rank of a channel's score.

    Scores are taken relative to the root mean square of their group, so that no group dies for
    the scale of its gradients.
    """
    groups = torch.from_numpy(graph.group_of).to(scores.device)
    size = torch.bincount(groups, minlength=len(graph.groups)).to(scores.dtype)
    square = scores.new_zeros(len(graph.groups)).index_add(0, groups, scores.square()) / size
    relative = scores / (square[groups] + 1e-20).sqrt()
    rank = relative.argsort().argsort().to(scores.dtype)
    return 0.02 + 0.96 * rank / max(1, len(rank) - 1)


def _peek(source: TaskSource, n: int = 1) -> list[Any]:
    """Tasks that are drawn without moving the source on."""
    state = source.state_dict()
    tasks = source.tasks(n)
    source.load_state_dict(state)
    return tasks


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
    return None if head is None else int(model.get_submodule(head).out_features)


def _image_shape(graph: ChannelGraph) -> tuple[int, ...]:
    shape = graph.example.sample_shape if graph.example else None
    if shape is None or len(shape) != 3:
        raise UnsupportedModelError(
            f"the set encoder needs a model of one image tensor (B, C, H, W), not {shape}: use "
            "trace_channels, mask and shrink for other models"
        )
    return shape


def _load_part(module: nn.Module, part: str, tensors: dict[str, Tensor], path: PathLike) -> None:
    prefix = part + "."
    state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the {part}: {error}") from error
