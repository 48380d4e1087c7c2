"""Find out by experiment which output channels reach which input positions.

The mixing layers of a copy of the model answer at once with a constant, so a forward pass costs
only what lies between them. NaN goes into chosen output channels, and every layer reports which
of its input positions turn NaN. Rows of one batch carry independent questions:

* one row a producer, all its channels NaN: does anything of it arrive here?
* ``2 * ceil(log2 C)`` rows that spell the channel's own number in bits and complemented bits,
  for all producers at once: which channel arrives here?

A position where a bit and its complement both arrive is read by several channels, or by channels
of different numbers; it is asked again with rows of its producers' own, and where that is not
enough, with a row a channel (unless every bit arrives both ways: then all channels are mixed).
Nothing is assumed about the code in between: concat, split, slice, pad, shuffle, reshape,
broadcasting, gating and any Python control flow give their exact index maps.

Norms over channels let NaN pass channel by channel, because the gates mask their statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stamppruner import codes, layers
from stamppruner.calls import FORWARD_ERRORS, Calls, floating_tensors, patched_forwards, run
from stamppruner.channels import BoolArray, IntArray
from stamppruner.errors import UnsupportedModelError
from stamppruner.inputs import Inputs

_CHUNK_BYTES = 64 * 2**20
"""Memory that the largest activation of one probing forward may take."""

_MAX_ELEMENTS = 2**26
"""Elements of the largest activation, over all rows, up to which a row a channel is asked; the
ambiguous channels of a producer that needs more are tied together."""

Row = dict[int, BoolArray]
"""One question: for some producers, which of their output channels are NaN."""


@dataclass
class Reach:
    """What the probe found.

    Attributes:
        widths: output width of each producer (mixing layer), by name, in call order.
        depthwise: channel multiplier of each depthwise layer, by name.
        readers: number of input positions of each layer that is watched, by name.
        pairs: ``(K, 3)`` rows: producer number, its channel, position number; positions are
            numbered over all readers in order.
        ties: ``(K, 3)`` rows like ``pairs``: channels that must stay together because the probe
            cannot tell which of them arrives.
        input_positions: positions that something of the model's own input reaches.
        silent: positions that are NaN whatever is asked.
        output_producers: producers that reach the model's output.
    """

    widths: dict[str, int]
    depthwise: dict[str, int]
    readers: dict[str, int]
    pairs: IntArray
    ties: IntArray
    input_positions: IntArray
    silent: IntArray
    output_producers: tuple[str, ...]


class Probe:
    """Runs batches of questions through the patched model, which is left as it was.

    Args:
        model: in evaluation mode.
        inputs: one sample.
        calls: from :func:`~stamppruner.calls.record_calls` on the same inputs.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, calls: Calls) -> None:
        self.model, self.inputs, self.calls = model, inputs, calls
        self.rows = max(1, _CHUNK_BYTES // (calls.peak * 4))  # that are asked at once
        modules = dict(model.named_modules())
        self.layers = {name: modules[name] for name in calls.outputs}
        self.norms = {name: modules[name] for name in calls.norms}
        self.channelwise = {name: modules[name] for name in calls.channelwise}
        self.opaque = {name: modules[name] for name in calls.opaque}
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
        self.readers = {name: layers.input_width(m) for name, m in self.layers.items()}
        self.readers |= {name: width for name, (_, width) in calls.norms.items()}
        self.readers |= calls.channelwise | calls.opaque
        starts = np.cumsum([0, *self.readers.values()])
        self.start = dict(zip(self.readers, starts[:-1].tolist(), strict=True))
        self.positions = int(starts[-1])
        self.whole = False  # whether some output has no batch axis

    def ask(self, rows: Sequence[Row | None]) -> tuple[BoolArray, BoolArray]:
        """Answer the questions; in a None row, which comes last, the model's inputs are NaN.

        Returns:
            ``(rows, positions)``: which positions turn NaN; ``(rows,)``: whether the model's
            output does. Outputs without a batch axis count only for a single row.

        Raises:
            UnsupportedModelError: the forward pass fails when layers answer with constants.
        """
        asked = [row for row in rows if row is not None]
        starts = range(0, len(asked), self.rows)
        answers = [self._forward(asked[i : i + self.rows]) for i in starts]
        answers += [self._forward([None])] * (len(rows) - len(asked))
        return np.concatenate([a for a, _ in answers]), np.concatenate([o for _, o in answers])

    def _forward(self, rows: Sequence[Row | None]) -> tuple[BoolArray, BoolArray]:
        count = len(rows)
        hits = np.zeros((count, self.positions), dtype=bool)

        def note(name: str, x: Tensor, axis: int) -> Tensor:
            nan = _nan_channels(x, axis % x.dim(), count)
            hits[:, self.start[name] : self.start[name] + self.readers[name]] |= nan.numpy()
            return nan

        forwards: dict[nn.Module, Callable[..., Any]] = {}
        for producer, name in enumerate(self.widths):
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
        stop = rows[0] is not None  # what comes out of an opaque module counts as an input
        hooks += [
            m.register_forward_pre_hook(partial(_note_input, note, name, stop), with_kwargs=True)
            for name, m in self.opaque.items()
        ]
        batch = self.inputs.repeat(count, [r for r, row in enumerate(rows) if row is None])
        try:
            with patched_forwards(forwards):
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
            return _constant(mask.to(x.device), shape, axis, x.dtype)

        return forward


def probe(asker: Probe) -> Reach:
    """Find the reach of every output channel.

    Raises:
        UnsupportedModelError: the forward pass fails when layers answer with constants.
    """
    widths = list(asker.widths.values())
    bits = codes.bits_for(max(widths, default=2))
    everything: list[Row] = [{p: np.ones(w, dtype=bool)} for p, w in enumerate(widths)]
    spelled = zip(*(codes.spelling(w, bits) for w in widths), strict=True)
    rows = [{}, *everything, *(dict(enumerate(row)) for row in spelled), None]
    hits, outputs = asker.ask(rows)
    if hits[0].any():  # rows leak into others (a mean over the batch, say)
        asker.rows = 1
        hits, outputs = asker.ask(rows)

    silent, arrives, code = hits[0], hits[1 : 1 + len(widths)], hits[1 + len(widths) : -1]
    producer, position = np.nonzero(arrives & ~silent)
    channel, sure = codes.decode(code[:, position])
    pairs = [np.stack([producer, channel, position], axis=1)[sure]]
    unsure = np.stack([producer, position], axis=1)[~sure]
    found, ties = _ask_again(asker, arrives, unsure)
    reached = outputs[1 : 1 + len(widths)]
    if asker.whole:
        reached = np.concatenate([asker.ask([row])[1] for row in everything])
    return Reach(
        widths=asker.widths,
        depthwise=asker.depthwise,
        readers=asker.readers,
        pairs=np.concatenate([*pairs, *found]),
        ties=np.concatenate([np.empty((0, 3), dtype=np.int64), *ties]),
        input_positions=np.flatnonzero(hits[-1] | silent),
        silent=np.flatnonzero(silent),
        output_producers=tuple(n for n, r in zip(asker.widths, reached, strict=True) if r),
    )


def _ask_again(
    asker: Probe, arrives: BoolArray, unsure: IntArray
) -> tuple[list[IntArray], list[IntArray]]:
    """Pairs and ties of the (producer, position) that common rows leave open."""
    pairs: list[IntArray] = []
    ties: list[IntArray] = []
    wide: list[IntArray] = []
    widths = list(asker.widths.values())
    bits = {p: list(codes.spelling(widths[p])) for p in np.unique(unsure[:, 0]).tolist()}
    for p, positions, own in _own_answers(asker, arrives, unsure, bits):
        channel, sure = codes.decode(own)
        pairs.append(_rows(p, channel[sure], positions[sure]))
        mixed = own.all(axis=0) | (widths[p] * asker.calls.peak > _MAX_ELEMENTS)
        channel, where = codes.allowed(own[:, mixed & ~sure], widths[p])
        ties.append(_rows(p, channel, positions[mixed & ~sure][where]))
        rest = positions[~mixed & ~sure]
        wide.append(np.stack([np.full_like(rest, p), rest], axis=1))
    open_ = np.concatenate(wide) if wide else unsure
    singles = {p: list(np.eye(widths[p], dtype=bool)) for p in np.unique(open_[:, 0]).tolist()}
    for p, positions, own in _own_answers(asker, arrives, open_, singles):
        channel, where = np.nonzero(own)
        pairs.append(_rows(p, channel, positions[where]))
    return pairs, ties


def _own_answers(
    asker: Probe, arrives: BoolArray, unsure: IntArray, questions: Mapping[int, Sequence[BoolArray]]
) -> Iterator[tuple[int, IntArray, BoolArray]]:
    """Producer, its open positions, and the answers there to questions about it alone."""
    for batch in _apart(arrives, unsure):
        longest = max(len(questions[p]) for p in batch)
        asked = [
            {p: questions[p][i] for p in batch if i < len(questions[p])} for i in range(longest)
        ]
        hits, _ = asker.ask(asked)
        for p in batch:
            positions = unsure[unsure[:, 0] == p, 1]
            yield p, positions, hits[: len(questions[p]), positions]


def _apart(arrives: BoolArray, unsure: IntArray) -> list[list[int]]:
    """Producers in batches within which none arrives where another's answer is open."""
    open_ = np.zeros_like(arrives)
    open_[unsure[:, 0], unsure[:, 1]] = True
    batches: list[tuple[list[int], BoolArray, BoolArray]] = []
    for p in np.flatnonzero(open_.any(axis=1)).tolist():
        for members, reached, asked in batches:
            if not ((arrives[p] & asked).any() or (open_[p] & reached).any()):
                members.append(p)
                reached |= arrives[p]
                asked |= open_[p]
                break
        else:
            batches.append(([p], arrives[p].copy(), open_[p].copy()))
    return [members for members, _, _ in batches]


def _rows(producer: int, channel: IntArray, position: IntArray) -> IntArray:
    return np.stack([np.full_like(position, producer), channel, position], axis=1)


Note = Callable[[str, Tensor, int], Tensor]


def _pass_on(note: Note, name: str, axis: int, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    note(name, x, axis)
    return x


def _note_output(note: Note, name: str, _module: nn.Module, _args: Any, out: Tensor) -> None:
    note(name, out, 1)


def _note_input(
    note: Note, name: str, stop: bool, _module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Report what a module that is never cut reads; with ``stop``, no NaN goes further."""
    note(name, args[0], -1)
    if not stop:
        return None
    return tree_map(
        lambda x: x.nan_to_num() if isinstance(x, Tensor) and x.is_floating_point() else x,
        (args, kwargs),
    )


def _nan_channels(x: Tensor, axis: int, count: int) -> Tensor:
    """Whether each channel holds a NaN anywhere in each row's samples: ``(count, C)`` on CPU.

    A batch axis of ``count * t`` holds ``t`` samples a row (frames, windows).
    """
    nan = torch.isnan(x.detach())
    if axis == 0 or x.shape[0] % count:  # no batch axis of ours: every row may be meant
        flat = nan.movedim(axis, 0).flatten(1).any(1)
        return flat.expand(count, -1).cpu()
    nan = nan.movedim(axis, 1)
    nan = nan.reshape(*nan.shape[:2], -1).any(2)
    return nan.reshape(count, -1, nan.shape[1]).any(1).cpu()


def _constant(nan: Tensor, shape: Sequence[int], axis: int, dtype: torch.dtype) -> Tensor:
    """A tensor of 0.5 with NaN in the channels that ``nan`` (rows, C) marks."""
    values = torch.where(nan, torch.nan, 0.5).to(dtype)
    if axis == 0:
        values = values.amax(0, keepdim=True)  # NaN wins
        return values.view(-1, *[1] * (len(shape) - 1)).expand(*shape).contiguous()
    values = values.repeat_interleave(shape[0] // values.shape[0], dim=0)
    view = [1] * len(shape)
    view[0], view[axis] = values.shape
    return values.view(view).expand(*shape).contiguous()


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
