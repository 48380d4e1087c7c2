"""Forward passes that answer which of some output channels reach which input positions.

The mixing layers of a copy of the model answer at once with a constant, which is stored once for
all places (:mod:`~stamppruner.uniform`), so a forward pass costs only what lies between them. NaN
goes into chosen output channels, and every layer reports which of its input positions turn NaN.
Rows of one batch carry independent questions. Nothing is assumed about the code in between: concat,
split, slice, pad, shuffle, reshape, broadcasting, gating and any Python control flow give their
exact index maps.

Norms over channels let NaN pass channel by channel, because the gates mask their statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from stamppruner import layers
from stamppruner.calls import (
    FORWARD_ERRORS,
    Calls,
    FunctionalLayers,
    floating_tensors,
    patched_forwards,
    run,
)
from stamppruner.channels import BoolArray
from stamppruner.errors import UnsupportedModelError
from stamppruner.inputs import Inputs
from stamppruner.progress import Tick
from stamppruner.uniform import UniformTensors, narrowed

_CHUNK_BYTES = 8 * 2**20
"""Memory that the largest tensor of one probing forward may take."""

Row = dict[int, BoolArray]
"""One question: for some producers, which of their output channels are NaN."""

Question = Sequence[tuple[Tensor, int, BoolArray]]
"""Parameters and buffers, their axes, and the marked slices that are NaN."""


class Probe:
    """Runs batches of questions through the patched model, which is left as it was.

    Args:
        model: in evaluation mode.
        inputs: one sample.
        calls: from :func:`~stamppruner.calls.record_calls` on the same inputs.
        tick: called before every forward pass.
    """

    def __init__(
        self, model: nn.Module, inputs: Inputs, calls: Calls, tick: Tick = lambda: None
    ) -> None:
        self.model, self.inputs, self.calls, self.tick = model, inputs, calls, tick
        modules = dict(model.named_modules())
        self.layers = {name: modules[name] for name in calls.outputs}
        self.norms = {name: modules[name] for name in calls.norms}
        self.channelwise = {name: modules[name] for name in calls.channelwise}
        self.functional = {name: modules[name] for name in calls.functional}
        self.opaque = {n: modules[n] for n in calls.opaque if n not in calls.functional}
        self.depthwise = {
            name: layers.output_width(m) // layers.input_width(m)
            for name, m in self.layers.items()
            if layers.is_depthwise(m)
        }
        self.widths = {
            name: layers.output_width(m)
            for name, m in self.layers.items()
            if name not in self.depthwise
        }
        self.number = {name: producer for producer, name in enumerate(self.widths)}
        self.readers = {name: layers.input_width(m) for name, m in self.layers.items()}
        self.readers |= {name: width for name, (_, width) in calls.norms.items()}
        self.readers |= calls.channelwise | calls.opaque
        starts = np.cumsum([0, *self.readers.values()])
        self.start = dict(zip(self.readers, starts[:-1].tolist(), strict=True))
        self.positions = int(starts[-1])
        self.whole = False  # whether some output has no batch axis
        self.shared: set[int] = set()  # producers with one answer to all rows (tables of biases)
        self.uniform = True  # whether the model runs with answers stored once for all places
        self.rows = 0  # that are asked at once; 0: to be found
        self._parameters = [
            (module, dict(module._parameters), {n: _half(p) for n, p in module._parameters.items()})
            for module in model.modules()
            if module._parameters
        ]
        self._marked: dict[int, Tensor] = {}  # what stands in for parameters with NaN
        self._made: dict[Any, Any] = {}  # what opaque modules return

    def ask(self, rows: Sequence[Row | None]) -> tuple[BoolArray, BoolArray]:
        """Answer the questions; in a None row, which comes last, the model's inputs are NaN.

        Returns:
            ``(rows, positions)``: which positions turn NaN; ``(rows,)``: whether the model's
            output does. Outputs without a batch axis count only for a single row.

        Raises:
            UnsupportedModelError: the forward pass fails when layers answer with constants.
        """
        if not self.rows:
            self.rows = self._fitting_rows()
        asked = [row for row in rows if row is not None]
        alone: dict[int, Row] = {}
        if self.rows > 1 and self.shared:
            parts = [{p: m for p, m in r.items() if p in self.shared and m.any()} for r in asked]
            alone = {i: part for i, part in enumerate(parts) if part}
            asked = [{p: m for p, m in r.items() if p not in self.shared} for r in asked]
        starts = range(0, len(asked), self.rows)
        answers = [self._forward(asked[i : i + self.rows]) for i in starts]
        answers += [self._forward([None]) for _ in rows[len(asked) :]]
        hits, outputs = (np.concatenate(found) for found in zip(*answers, strict=True))
        for i, part in alone.items():
            own_hits, own_outputs = self._forward([part])
            hits[i] |= own_hits[0]
            outputs[i] |= own_outputs[0]
        return hits, outputs

    def _fitting_rows(self) -> int:
        """How many rows a forward pass takes within the memory it may use."""
        try:
            for _ in range(2 if self.opaque or self.functional else 1):  # these compute once
                with UniformTensors() as used, self._constants():
                    self._answers([{}, {}])
            largest = used.largest // 2
        except UnsupportedModelError:  # it writes into one place, or its views need memory
            self.uniform, largest = False, self.calls.peak * 4
        return max(1, _CHUNK_BYTES // largest)

    def _forward(self, rows: Sequence[Row | None]) -> tuple[BoolArray, BoolArray]:
        self.tick()
        if not self.uniform:
            return self._answers(rows)
        with UniformTensors(), self._constants():
            return self._answers(rows)

    @contextmanager
    def poisoned(self, question: Question) -> Iterator[None]:
        """NaN in the marked slices of parameters and buffers."""
        before = [tensor.detach().clone() for tensor, _, _ in question]
        try:
            for tensor, axis, marked in question:
                index = torch.from_numpy(np.flatnonzero(marked)).to(tensor.device)
                tensor.detach().index_fill_(axis, index, torch.nan)
                values = torch.where(torch.from_numpy(marked), torch.nan, 0.5).to(tensor)
                view = values.view(-1, *[1] * (tensor.dim() - axis - 1))
                self._marked[id(tensor)] = view.expand(tensor.shape)
            yield
        finally:
            self._marked.clear()
            for (tensor, _, _), values in zip(question, before, strict=True):
                tensor.detach().copy_(values)

    @contextmanager
    def _constants(self) -> Iterator[None]:
        """Parameters that are uniform: their values do not matter."""
        try:
            for module, own, constants in self._parameters:
                module._parameters.update(constants)
                for name, parameter in own.items() if self._marked else ():
                    if id(parameter) in self._marked:
                        module._parameters[name] = self._marked[id(parameter)]  # type: ignore[assignment]
            yield
        finally:
            for module, own, _ in self._parameters:
                module._parameters.update(own)

    def _answers(self, rows: Sequence[Row | None]) -> tuple[BoolArray, BoolArray]:
        count = len(rows)
        hits = np.zeros((count, self.positions), dtype=bool)

        def note(name: str, x: Tensor, axis: int) -> Tensor:
            with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
                nan = _nan_channels(x, axis % x.dim(), count)
            hits[:, self.start[name] : self.start[name] + self.readers[name]] |= nan.numpy()
            return nan.expand(count, self.readers[name])

        forwards: dict[nn.Module, Callable[..., Any]] = {}
        for name, producer in self.number.items():
            nan = np.zeros((count, self.widths[name]), dtype=bool)
            for r, row in enumerate(rows):
                if row is not None and producer in row:
                    nan[r] = row[producer]
            forwards[self.layers[name]] = self._answer(name, note, torch.from_numpy(nan))
        for name in self.depthwise:
            forwards[self.layers[name]] = self._answer(name, note, None)
        for name, module in self.norms.items():
            forwards[module] = partial(_pass_on, note, name, self.calls.norms[name][0].axis)
        hooks = [
            m.register_forward_hook(partial(_note_output, note, name))
            for name, m in self.channelwise.items()
        ]
        # what comes out of an opaque module counts as an input
        fill = 0.5 if rows[0] is not None else torch.nan
        for name, module in self.opaque.items():
            forwards[module] = self._opaque(name, note, fill)
        poisoned = [r for r, row in enumerate(rows) if row is None]
        make = self.inputs.blank if self.uniform else self.inputs.repeat
        batch = make(count, poisoned)
        used = FunctionalLayers(self.functional, self._functional(note, fill))
        try:
            with patched_forwards(forwards), used if self.functional else nullcontext():
                outputs = run(self.model, batch, self.calls.passes)
        except FORWARD_ERRORS as error:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot be probed with a batch of {count}: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        self.whole |= not all(_batched(leaf, count) for leaf in floating_tensors(outputs))
        return hits, _nan_rows(outputs, count)

    def _answer(
        self, name: str, note: Callable[[str, Tensor, int], Tensor], nan: Tensor | None
    ) -> Callable[..., Tensor]:
        """A forward that reports its input, and returns NaN in some channels.

        In those of ``nan``, ``(rows, C)``; of a depthwise layer (None) in those that arrived.
        """
        module, shapes = self.layers[name], iter(self.calls.outputs[name])
        last = self.calls.outputs[name][-1]

        def forward(x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            arrived = note(name, x, layers.channel_axis(module, x.dim()))
            recorded = next(shapes, last)
            if isinstance(module, nn.Linear):
                shape = (*x.shape[:-1], recorded[-1])
            elif layers.channel_axis(module, x.dim()) == 0:
                shape = tuple(recorded)
            else:
                shape = (x.shape[0], *recorded[1:])
            mask = arrived.repeat_interleave(self.depthwise[name], 1) if nan is None else nan
            axis = layers.channel_axis(module, len(shape))
            if shape[0] % len(mask) and name in self.number:
                self.shared.add(self.number[name])
            with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
                answer = _constant(mask.to(x.device), shape, axis, x.dtype)
            return answer if self.uniform else answer.contiguous()

        return forward

    def _opaque(self, name: str, note: Note, fill: float) -> Callable[..., Any]:
        """A forward that reports its input, and returns ``fill`` whatever arrives."""
        forward = self.opaque[name].forward

        def answer(*args: Any, **kwargs: Any) -> Any:
            note(name, args[0], -1)

            def compute() -> Any:
                constant = tree_map(partial(self._filling, 0.5), (args, kwargs))
                return forward(*constant[0], **constant[1])

            return self._filled(name, (args, kwargs), compute, fill)

        return answer

    def _functional(self, note: Note, fill: float) -> Callable[..., Tensor]:
        """The same for layers that are used but not called."""

        def answer(name: str, module: nn.Module, x: Tensor, compute: Callable[[], Tensor]) -> Any:
            note(name, x, layers.channel_axis(module, x.dim()))
            return self._filled(name, x, compute, fill)

        return answer

    def _filled(self, name: str, inputs: Any, compute: Callable[[], Any], fill: float) -> Any:
        """What a module makes of inputs of these shapes, with other values; computed once."""
        key = name, tuple(x.shape for x in tree_leaves(inputs) if isinstance(x, Tensor))
        if key not in self._made:
            self._made[key] = tree_map(_outline, compute())
        return tree_map(partial(self._filling, fill), self._made[key])

    def _filling(self, value: float, x: Any) -> Any:
        """A floating tensor of one value, of the shape of ``x``."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        full = x.new_full((), value).expand(x.shape)
        return full if self.uniform else full.contiguous()


Note = Callable[[str, Tensor, int], Tensor]


def _half(parameter: Tensor | None) -> Any:
    return None if parameter is None else parameter.new_full((), 0.5).expand(parameter.shape)


def _pass_on(note: Note, name: str, axis: int, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    note(name, x, axis)
    return x


def _note_output(note: Note, name: str, _module: nn.Module, _args: Any, out: Tensor) -> None:
    note(name, out, 1)


def _outline(x: Any) -> Any:
    """Floating tensors without their values."""
    floating = isinstance(x, Tensor) and x.is_floating_point()
    return x.new_empty(()).expand(x.shape) if floating else x


def _nan_channels(x: Tensor, axis: int, count: int) -> Tensor:
    """Whether each channel holds a NaN anywhere in each row's samples: ``(count, C)`` on CPU.

    A batch axis of ``count * t`` holds ``t`` samples a row (frames, windows).
    """
    x = narrowed(x.detach(), 1)
    ours = axis != 0 and x.shape[0] % count == 0  # else every row may be meant
    if others := [a for a in range(x.dim()) if a != axis and (a != 0 or not ours)]:
        x = x.amax(others)  # NaN wins
    nan = torch.isnan(x)
    if not ours:
        return nan.expand(count, -1).cpu()
    return nan.reshape(count, -1, nan.shape[1]).any(1).cpu()


def _constant(nan: Tensor, shape: Sequence[int], axis: int, dtype: torch.dtype) -> Tensor:
    """A tensor of 0.5 with NaN in the channels that ``nan`` (rows, C) marks."""
    values = torch.where(nan, torch.nan, 0.5).to(dtype)
    if axis == 0 or shape[0] % len(values):  # no batch axis of ours
        values = values.amax(0, keepdim=True)  # NaN wins
    if axis == 0:
        return values.view(-1, *[1] * (len(shape) - 1)).expand(*shape)
    values = values.repeat_interleave(shape[0] // values.shape[0], dim=0)
    view = [1] * len(shape)
    view[0], view[axis] = values.shape
    return values.view(view).expand(*shape)


def _batched(leaf: Tensor, count: int) -> bool:
    return leaf.dim() > 0 and len(leaf) > 0 and len(leaf) % count == 0


def _nan_rows(outputs: Any, count: int) -> BoolArray:
    """Whether each row of any floating tensor in the outputs holds a NaN, ``(count,)``."""
    found = np.zeros(count, dtype=bool)
    for leaf in floating_tensors(outputs):
        nan = torch.isnan(leaf.detach())
        if _batched(leaf, count):
            found |= nan.reshape(count, -1).any(1).cpu().numpy()
        elif count == 1:
            found |= bool(nan.any())
    return found
