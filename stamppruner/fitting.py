"""A whole meta-fit: what it starts from, checkpoints, logs, and how it ends."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from stamppruner import pruner_file, ranks
from stamppruner.checkpoints import Checkpoint, Checkpoints, digest
from stamppruner.config import STAMPConfig
from stamppruner.errors import ConfigError, PreemptedError
from stamppruner.files import PathLike
from stamppruner.gated import GatedNet
from stamppruner.heads import find_head
from stamppruner.heap import memory_kept
from stamppruner.history import History
from stamppruner.kinds import is_int, is_real
from stamppruner.logs import RunLog
from stamppruner.meta import Callback, MetaLearner
from stamppruner.meta_state import restore_, restored_keep, state_of
from stamppruner.offload import Offload
from stamppruner.preemption import Preemption, sigterm_noted
from stamppruner.randomness import deterministic_algorithms, numbered_streams
from stamppruner.reading import Draws, Reader
from stamppruner.tasks import LoaderTasks, Task, TaskSampler, TaskSource
from stamppruner.warmstart import keep_by_rank, task_scores, warm_start_on_tasks
from stamppruner.workers import Piece

logger = logging.getLogger(__name__)

_WARM_TASKS = 16
"""Reference tasks whose scores pi starts from, and whose masks W is trained under."""

_DEAD, _DEAF = 0.01, 1e-3
"""Share of live gates, and movement of E[m] between two tasks, below which is warned."""


@dataclass(frozen=True)
class RunSettings:
    """How a meta-fit is run; nothing here changes what it learns, but for its last digits.

    Attributes:
        checkpoint_dir: where checkpoints go; None writes none, and leaves SIGTERM alone.
        checkpoint_minutes: between two checkpoints; 0 writes one after every iteration.
        keep: so many of the last checkpoints stay.
        resume: go on from the last checkpoint there, if there is one.
        log_dir: where ``meta-fit.csv`` and TensorBoard's files go; None writes none.
        deterministic: torch's deterministic algorithms alone.
        max_skipped: steps in a row that may be left out because they are not finite.
        loader_timeout: most seconds to wait for images; None waits for ever.
        num_workers: processes that read images ahead of their use.
        offload: where what rests between steps lies: a folder, ``"cpu"``, or None.
        compile: steps run through ``torch.compile``.

    Raises:
        ConfigError: a value outside its range.
    """

    checkpoint_dir: PathLike | None = None
    checkpoint_minutes: float = 10.0
    keep: int = 3
    resume: bool = True
    log_dir: PathLike | None = None
    deterministic: bool = False
    max_skipped: int = 10
    loader_timeout: float | None = None
    num_workers: int = 0
    offload: PathLike | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        minutes, limit, number = (
            self.checkpoint_minutes,
            self.loader_timeout,
            "a whole number from 1",
        )
        for name, holds, rule in (
            ("checkpoint_minutes", is_real(minutes) and 0 <= minutes < math.inf, "finite, from 0"),
            ("compile", isinstance(self.compile, bool), "True or False"),
            ("keep", is_int(self.keep, 1), number),
            ("max_skipped", is_int(self.max_skipped, 1), number),
            ("num_workers", is_int(self.num_workers, 0), "a whole number from 0"),
            (
                "loader_timeout",
                limit is None or (is_real(limit) and 0 < limit < math.inf),
                "seconds above 0, or None",
            ),
        ):
            if not holds:
                raise ConfigError(f"meta_fit({name}={getattr(self, name)!r}): it must be {rule}")


def fit(
    net: GatedNet,
    given: nn.Module,
    source: TaskSource,
    config: STAMPConfig,
    settings: RunSettings,
    *,
    again: bool,
    progress: bool,
    callback: Callback | None,
) -> History:
    """Learn W, pi and theta, from the start or from a checkpoint; all ranks call it.

    Args:
        net: changed in place.
        given: the model as the user gave it, whose modes ``net.model`` ends in.
        source: of the tasks.
        config: what is learned.
        settings: how.
        again: whether the net was meta-fitted before.
        progress: show a bar where the output is a terminal.
        callback: called with every iteration's figures.

    Raises:
        CheckpointError: checkpoints cannot be written, read, or are of another run.
        PreemptedError: SIGTERM came; the last checkpoint is of the iteration that it came in.
        StampError: see :class:`~stamppruner.meta.MetaLearner`.
    """
    places = Offload(settings.offload, net.device)
    ranks.check_same("settings", [config.to_dict(), source.num_images, source.num_classes])
    for module in (net.model, net.posterior, net.encoder):
        ranks.copy_from_first_(module)
    identity = _identity(net, given, source, config, again) if settings.checkpoint_dir else {}
    checkpoints, found = _opened(settings, identity)
    workers, timeout = settings.num_workers, settings.loader_timeout
    try:
        with Reader(source, config.seed, workers=workers, timeout=timeout) as reader:
            learner = _learner(net, reader, config, settings, places, found)
            if found is not None:
                with learner.whole(changed=True):
                    restore_(learner, found)
            del found
            with (
                memory_kept(net.device) if settings.offload is None else nullcontext(),
                deterministic_algorithms(settings.deterministic),
                _preemption(settings.checkpoint_dir is not None) as term,
                _log(settings, learner) as log,
            ):
                after = _After(learner, settings, checkpoints, log, term, callback)
                return learner.run(progress=progress and ranks.own() == 0, callback=after)
    finally:
        modes_like(net.model, given)


class _After:
    """What happens after every iteration: log, callback, checkpoint, stop."""

    def __init__(
        self,
        learner: MetaLearner,
        settings: RunSettings,
        checkpoints: Checkpoints | None,
        log: RunLog | None,
        term: Preemption,
        callback: Callback | None,
    ) -> None:
        self._learner, self._settings, self._checkpoints = learner, settings, checkpoints
        self._log, self._term, self._callback = log, term, callback
        self._written = self._before = perf_counter()
        self._images = learner.images

    def __call__(self, iteration: int, figures: dict[str, float]) -> None:
        now, images = perf_counter(), self._learner.images
        with ranks.all_ready("callback"):
            if self._log is not None:
                row = {"iteration": iteration, **figures}
                number = (images - self._images) * ranks.count()
                self._log.add(row, now - self._before, number)
            if self._callback is not None:
                self._callback(iteration, figures)
        self._before, self._images = perf_counter(), images
        if self._settings.checkpoint_dir is None:
            return
        last = iteration + 1 == self._learner.config.iterations
        minutes = (perf_counter() - self._written) / 60
        due = ranks.any_of(minutes >= self._settings.checkpoint_minutes and ranks.own() == 0)
        stop = ranks.any_of(self._term.came) and not last
        if last or due or stop:
            self._write(iteration + 1)
        if stop:
            raise PreemptedError(
                f"SIGTERM came: meta-fitting stopped after {iteration + 1} of "
                f"{self._learner.config.iterations} iterations, with a checkpoint in "
                f"{str(self._settings.checkpoint_dir)!r}; call it again with resume=True (--resume)"
            )

    def _write(self, done: int) -> None:
        with ranks.all_ready("checkpoint"):
            if self._checkpoints is not None:
                with self._learner.whole(changed=False):
                    self._checkpoints.write(done, *state_of(self._learner))
        self._written = perf_counter()


def _opened(
    settings: RunSettings, identity: dict[str, Any]
) -> tuple[Checkpoints | None, Checkpoint | None]:
    """The folder, on rank 0, and on all ranks the checkpoint to go on from, if there is one."""
    checkpoints: Checkpoints | None = None
    found: Checkpoint | None = None
    if settings.checkpoint_dir is None:
        return None, None
    with ranks.all_ready("checkpoints"):
        if ranks.own() == 0:
            checkpoints = Checkpoints(settings.checkpoint_dir, settings.keep, identity)
            if settings.resume:
                found = checkpoints.latest()
            else:
                checkpoints.check_empty()
    found = ranks.sent_from_first(found)
    if found is not None:
        logger.info("going on from %s", found.path)
    return checkpoints, found


def _learner(
    net: GatedNet,
    reader: Reader,
    config: STAMPConfig,
    settings: RunSettings,
    places: Offload,
    found: Checkpoint | None,
) -> MetaLearner:
    """Algorithm 1, line 1: what is known before the first iteration."""
    fitted_heads = isinstance(reader.source, LoaderTasks) and net.task.classifies
    keep = restored_keep(found)
    if found is None and not fitted_heads and (config.warm_start or config.weight_steps):
        scores = _scores(net, reader)
        keep = torch.stack([keep_by_rank(one, net) for one in scores])
        if config.warm_start:
            warm_start_on_tasks(net, scores)
    if config.weight_steps and not net.weights():
        logger.warning(
            "every weight of the model is frozen (requires_grad is False), so W is not trained: "
            "call model.requires_grad_() before it is traced"
        )
    return MetaLearner(
        net,
        reader,
        config,
        find_head(net.model, net.graph),
        fitted_heads,
        keep,
        max_skipped=settings.max_skipped,
        places=places,
        compile=settings.compile,
    )


def _scores(net: GatedNet, reader: Reader) -> Tensor:
    """Taylor scores ``(T, C)`` of tasks, each on the rank whose share it is."""
    with numbered_streams(reader.seed, net.device):
        drawn = Draws(reader, _WARM_TASKS, 0).of(0)
        mine = ranks.mine(len(drawn))
        pieces = (Piece((i, 7), drawn[i].read) for i in mine)
        tasks = reader.stream(pieces, "the images of a task")
        own = {i: task_scores(net, [task])[0].cpu() for i, task in zip(mine, tasks, strict=True)}
    merged = {i: scores for part in ranks.gathered("scores", own) for i, scores in part.items()}
    return torch.stack([merged[i] for i in range(len(drawn))]).to(net.device)


def _identity(
    net: GatedNet, given: nn.Module, source: TaskSource, config: STAMPConfig, again: bool
) -> dict[str, Any]:
    """What a checkpoint must have been written under."""
    groups = json.dumps(pruner_file.group_record(net.graph)).encode()
    identity = {f"config.{name}": value for name, value in config.to_dict().items()}
    identity |= {
        "weights of the model": digest(given),
        "channel groups": f"{len(net.graph.groups)}, {hashlib.sha256(groups).hexdigest()[:16]}",
        "posterior": type(net.posterior).__qualname__,
        "encoder": type(net.encoder).__qualname__,
        "meta-fitted before": again,
        "reference images": source.num_images,
        "reference classes": source.num_classes,
    }
    if isinstance(source, TaskSampler | LoaderTasks):
        places = ("iteration", "position")
        state = source.state_dict().items()
        identity |= {f"reference {name}": value for name, value in state if name not in places}
    return identity


@contextmanager
def _preemption(wanted: bool) -> Iterator[Preemption]:
    if not wanted:
        yield Preemption()
        return
    with sigterm_noted() as term:
        yield term


@contextmanager
def _log(settings: RunSettings, learner: MetaLearner) -> Iterator[RunLog | None]:
    """The log, on rank 0."""
    log: RunLog | None = None
    with ranks.all_ready("log"):
        if settings.log_dir is not None and ranks.own() == 0:
            log = RunLog(settings.log_dir, learner.history)
    try:
        yield log
    finally:
        if log is not None:
            log.close()


def peek(source: TaskSource, n: int = 1) -> list[Task]:
    """Tasks that are drawn without moving the source on."""
    state = source.state_dict()
    tasks = source.tasks(n)
    source.load_state_dict(state)
    return tasks


def warn_of_gates(net: GatedNet, source: TaskSource, history: History) -> None:
    """Warn, on rank 0, where gates are dead, or do not listen to the set."""
    if ranks.own() != 0:
        return
    live = history["live"][-1] if len(history) else 1.0
    if live < _DEAD:
        logger.warning(
            "only %.1f%% of the gates are live after meta-fitting: lower kl_scale", 100 * live
        )
    with torch.no_grad():
        one, two = (net.keep_probability(t.images.to(net.device)) for t in peek(source, 2))
    moved = float((one - two).abs().mean())
    if moved < _DEAF:
        logger.warning(
            "the set is ignored: two tasks move E[m] by %.2g: raise gamma=, or meta-fit on tasks "
            "that differ more",
            moved,
        )


def modes_like(model: nn.Module, given: nn.Module) -> None:
    """Set the modes of the given model; of a layer that it lacks, that of the module around it."""
    modes = {name: module.training for name, module in given.named_modules()}
    for name, module in model.named_modules():
        module.training = modes.setdefault(name, modes.get(name.rpartition(".")[0], given.training))
