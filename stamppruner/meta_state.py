"""All that a meta-fit remembers between two iterations, as tensors and a record, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stamppruner.checkpoints import Checkpoint
from stamppruner.errors import CheckpointError, DataError
from stamppruner.guards import Skips
from stamppruner.history import History
from stamppruner.meta import MetaLearner

TASK_KEEP = "task_keep"


def state_of(learner: MetaLearner) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that the next iteration follows from."""
    tensors = {"generator": learner.generator.get_state()}
    for part, module in _modules(learner).items():
        tensors |= {f"{part}.{name}": tensor for name, tensor in module.state_dict().items()}
    for part, optimizer in _optimizers(learner).items():
        tensors |= _optimizer_state(part, optimizer)
    record: dict[str, Any] = {
        "history": learner.history.rows,
        "source": dict(learner.source.state_dict()),
        "random": learner.random.bit_generator.state,
        "skips": _counts(learner.skips),
    }
    if learner.task_keep is not None:
        tensors[TASK_KEEP] = learner.task_keep
    if (inner := learner.slimmable) is not None:
        record["slimmable"] = {
            "done": inner.done,
            "random": inner.random.bit_generator.state,
            "skips": _counts(inner.skips),
        }
    return tensors, record


def restore_(learner: MetaLearner, found: Checkpoint) -> None:
    """Put a learner, made as the one that was saved, where that one was.

    Raises:
        CheckpointError: the file does not fit.
    """
    try:
        _restore(learner, found.tensors, found.record)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise CheckpointError(
            f"{found.path} does not fit this run ({text}): remove it to go on from the one before"
        ) from error
    except DataError as error:
        raise CheckpointError(f"{found.path} is of another run: {error}") from error


def _restore(
    learner: MetaLearner, tensors: Mapping[str, Tensor], record: Mapping[str, Any]
) -> None:
    history = History([dict(row) for row in record["history"]])
    learner.source.load_state_dict(record["source"])
    for part, module in _modules(learner).items():
        module.load_state_dict(_under(part, tensors))
    for part, optimizer in _optimizers(learner).items():
        _load_optimizer(optimizer, _under(part, tensors))
    learner.generator.set_state(tensors["generator"])
    learner.random.bit_generator.state = record["random"]
    _set_counts(learner.skips, record["skips"])
    if (inner := learner.slimmable) is not None:
        inner.done = int(record["slimmable"]["done"])
        inner.random.bit_generator.state = record["slimmable"]["random"]
        _set_counts(inner.skips, record["slimmable"]["skips"])
    learner.history = history


def _modules(learner: MetaLearner) -> dict[str, nn.Module]:
    net = learner.net
    found = {"model": net.model, "posterior": net.posterior, "encoder": net.encoder}
    return found | ({"teacher": learner.slimmable.teacher} if learner.slimmable else {})


def _optimizers(learner: MetaLearner) -> dict[str, Optimizer]:
    found: dict[str, Optimizer] = {"outer": learner.outer}
    return found | ({"under_masks": learner.slimmable.optimizer} if learner.slimmable else {})


def _under(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = part + "."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _optimizer_state(part: str, optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{part}.{number}.{name}": value
        for number, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if isinstance(value, Tensor)
    }


def _load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        if tensor.dim() and tensor.shape != parameters[int(number)].shape:
            raise ValueError(f"{key} has shape {tuple(tensor.shape)}")
        state.setdefault(int(number), {})[name] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _counts(skips: Skips) -> list[int]:
    return [skips.total, skips.row]


def _set_counts(skips: Skips, counts: Any) -> None:
    skips.total, skips.row = (int(count) for count in counts)


def restored_keep(found: Checkpoint | None) -> Tensor | None:
    """Keep probabilities of reference tasks that a run began with."""
    return None if found is None else found.tensors.get(TASK_KEEP)
