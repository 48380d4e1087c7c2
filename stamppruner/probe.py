"""Find out by experiment which output channels reach which input positions.

The mixing layers of a copy of the model answer at once with a constant, so a forward pass costs
only what lies between them. NaN goes into chosen output channels, and every layer reports which
of its input positions turn NaN. Rows of one batch carry independent questions:

* one row a producer, all its channels NaN: does anything of it arrive here?
* ``2 * ceil(log2 C)`` rows that spell the channel's own number in bits and complemented bits,
  for all producers at once: which channel arrives here?

A position where a bit and its complement both arrive is read by several channels, or by channels
of different numbers; it is asked again with rows of its producers' own, and where that is not
enough, with a row a channel (unless every bit arrives both ways: then all channels are mixed). Nothing is assumed about the code in between: concat, split, slice,
pad, shuffle, reshape, broadcasting, gating and any Python control flow give their exact index maps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stamppruner import layers
from stamppruner.channels import BoolArray, IntArray
from stamppruner.errors import UnsupportedModelError
from stamppruner.inputs import Inputs

_CHUNK_BYTES = 192 * 2**20
"""Memory that the largest activation of one probing forward may take."""

_MAX_CHANNEL_ROWS = 4096
"""Above this many one-channel rows for a producer its ambiguous channels are tied together."""


@dataclass
class Reach:
    """What the probe found.

    Attributes:
        widths: output width of each producer (mixing layer), by name, in call order.
        readers: number of input positions of each mixing or depthwise layer, and of each
            channelwise module, by name, in call order.
        pairs: ``(K, 3)`` rows: producer number, its channel, position number; positions are
            numbered over all readers in order.
        ties: ``(K, 3)`` rows like ``pairs``: channels that must stay together because the probe
            cannot tell which of them arrives.
        input_positions: positions that something of the model's own input reaches.
        output_producers: producers that reach the model's output.
        depthwise: channel multiplier of each depthwise layer, by name.
    """

    widths: dict[str, int]
    readers: dict[str, int]
    pairs: IntArray
    ties: IntArray
    input_positions: IntArray
    output_producers: tuple[str, ...]
    depthwise: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Calls:
    """Shapes seen in one ordinary forward pass.

    Attributes:
        outputs: output shapes of every mixing or depthwise layer, one a call, by name, in the
            order of first calls.
        channelwise: width of every channelwise module that was called.
        peak: elements of the largest output of any module, per sample.
    """

    outputs: dict[str, list[torch.Size]]
    channelwise: dict[str, int]
    peak: int


@contextmanager
def patched_forwards(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the ``forward`` of some modules; restored on exit, also after an exception."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward  # type: ignore[method-assign]
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


def record_calls(model: nn.Module, inputs: Inputs) -> Calls:
    """Run the model once and note the output shapes of its layers.

    Raises:
        UnsupportedModelError: the forward pass fails.
    """
    outputs: dict[str, list[torch.Size]] = {}
    channelwise: dict[str, int] = {}
    peak = [1]

    def hook(name: str, module: nn.Module) -> Callable[..., None]:
        width = layers.channelwise_width(module)

        def note(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, Tensor):
                return
            peak[0] = max(peak[0], output.numel() // max(1, inputs.batch_size))
            if layers.is_mixing(module) or layers.is_depthwise(module):
                outputs.setdefault(name, []).append(output.shape)
            elif width is not None and width > 1 and output.dim() > 1 and output.shape[1] == width:
                channelwise[name] = width

        return note

    handles = [m.register_forward_hook(hook(n, m)) for n, m in model.named_modules()]
    try:
        inputs.call(model)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} fails on the example inputs {inputs.describe()} in "
            f"evaluation mode: {type(error).__name__}: {error}. Pass example_inputs that it takes"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return Calls(outputs, channelwise, peak[0])


def probe(model: nn.Module, inputs: Inputs, calls: Calls) -> Reach:
    """Find the reach of every output channel of ``model`` (which is left as it was).

    Args:
        model: in evaluation mode.
        inputs: one sample.
        calls: from :func:`record_calls` on the same inputs.

    Raises:
        UnsupportedModelError: the forward pass fails when layers answer with constants.
    """
    run = _Probe(model, inputs, calls)
    producers, widths = list(run.widths), list(run.widths.values())
    bits = max(1, math.ceil(math.log2(max(widths, default=2))))
    everything = [{p: np.ones(w, dtype=bool)} for p, w in enumerate(widths)]
    spelled = [_spelled(range(len(widths)), widths, bit, value) for bit, value in _bits(bits)]
    hits, outputs = run.ask([{}, *everything, *spelled], with_inputs=True)

    silent, arrives, code = hits[0], hits[1 : 1 + len(widths)], hits[1 + len(widths) : -1]
    from_input = hits[-1] | silent
    producer, position = np.nonzero(arrives)
    channel, sure = _decode(code, position)
    pairs = [np.stack([producer, channel, position], axis=1)[sure]]
    ties: list[IntArray] = []

    unsure = np.stack([producer, position], axis=1)[~sure]
    for wide in (False, True):  # rows of the producers' own: first bits, then single channels
        still = []
        for batch in _by_rows(unsure, widths, wide):
            rows = [row for p in batch for row in _own_rows(p, widths[p], wide)]
            answer, _ = run.ask(rows, with_inputs=False)
            for p, own in zip(batch, _split_rows(answer, batch, widths, wide), strict=True):
                positions = unsure[unsure[:, 0] == p, 1]
                if wide:
                    channel, where = np.nonzero(own[:, positions])
                    pairs.append(_triples(p, channel, positions[where]))
                    continue
                channel, sure = _decode(own, positions)
                pairs.append(_triples(p, channel[sure], positions[sure]))
                mixed = own[:, positions].all(axis=0) | (widths[p] > _MAX_CHANNEL_ROWS)
                ties.append(_subcubes(p, own, positions[mixed & ~sure], widths[p]))
                still.append(_pairs_of(p, positions[~mixed & ~sure]))
        unsure = np.concatenate(still) if still else np.empty((0, 2), dtype=np.int64)

    return Reach(
        widths=run.widths,
        readers=run.readers,
        pairs=np.concatenate(pairs),
        ties=np.concatenate(ties) if ties else np.empty((0, 3), dtype=np.int64),
        input_positions=np.flatnonzero(from_input),
        output_producers=tuple(producers[p] for p in np.flatnonzero(outputs[1 : 1 + len(widths)])),
        depthwise=run.depthwise,
    )


Row = dict[int, BoolArray]
"""One question: for some producers, which of their output channels are NaN."""


class _Probe:
    """Runs batches of questions through the patched model."""

    def __init__(self, model: nn.Module, inputs: Inputs, calls: Calls) -> None:
        self.model, self.inputs, self.calls = model, inputs, calls
        modules = dict(model.named_modules())
        self.modules = {name: modules[name] for name in calls.outputs}
        self.depthwise = {
            name: layers.output_width(m) // layers.input_width(m)
            for name, m in self.modules.items()
            if layers.is_depthwise(m)
        }
        self.widths = {
            name: layers.output_width(m)
            for name, m in self.modules.items()
            if name not in self.depthwise
        }
        self.readers = {name: layers.input_width(m) for name, m in self.modules.items()}
        self.readers |= calls.channelwise
        self.channelwise = {name: modules[name] for name in calls.channelwise}
        starts = np.cumsum([0, *self.readers.values()])
        self.start = dict(zip(self.readers, starts[:-1].tolist(), strict=True))
        self.positions = int(starts[-1])

    def ask(self, rows: Sequence[Row], *, with_inputs: bool) -> tuple[BoolArray, BoolArray]:
        """Answer the questions.

        Returns:
            ``(rows, positions)``: which positions turn NaN; ``(rows,)``: whether the model's
            output does. ``with_inputs`` adds a last row in which the model's inputs are NaN.
        """
        bytes_a_row = self.calls.peak * 4
        chunk = max(1, min(len(rows) + 1, _CHUNK_BYTES // bytes_a_row))
        todo: list[Row | None] = [*rows, None] if with_inputs else [*rows]
        answers = [self._forward(todo[i : i + chunk]) for i in range(0, len(todo), chunk)]
        return np.concatenate([a for a, _ in answers]), np.concatenate([o for _, o in answers])

    def _forward(self, rows: Sequence[Row | None]) -> tuple[BoolArray, BoolArray]:
        count = len(rows)
        hits = np.zeros((count, self.positions), dtype=bool)
        seen: dict[str, int] = {}

        def note(name: str, x: Tensor, axis: int) -> Tensor:
            nan = _nan_channels(x, axis, count)
            hits[:, self.start[name] : self.start[name] + self.readers[name]] |= nan.numpy()
            return nan

        def answer(name: str, module: nn.Module, nan: BoolArray | None) -> Callable[..., Tensor]:
            def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                arrived = note(name, x, layers.channel_axis(module, x.dim()))
                call = seen.get(name, 0)
                seen[name] = call + 1
                shapes = self.calls.outputs[name]
                recorded = shapes[min(call, len(shapes) - 1)]
                if isinstance(module, nn.Linear):
                    shape = (*x.shape[:-1], recorded[-1])
                elif layers.channel_axis(module, x.dim()) == 0:
                    shape = tuple(recorded)
                else:
                    shape = (x.shape[0], *recorded[1:])
                if nan is None:
                    mask = arrived.repeat_interleave(self.depthwise[name], dim=1)
                else:
                    mask = torch.from_numpy(nan)
                axis = layers.channel_axis(module, len(shape))
                return _constant(mask.to(x.device), shape, axis, x.dtype)

            return forward

        forwards: dict[nn.Module, Callable[..., Any]] = {}
        producers = {name: p for p, name in enumerate(self.widths)}
        for name, module in self.modules.items():
            nan = None
            if name not in self.depthwise:
                nan = np.zeros((count, self.widths[name]), dtype=bool)
                for r, row in enumerate(rows):
                    if row is not None and producers[name] in row:
                        nan[r] = row[producers[name]]
            forwards[module] = answer(name, module, nan)
        handles = [
            module.register_forward_hook(partial(_note_output, note, name))
            for name, module in self.channelwise.items()
        ]
        poisoned = [r for r, row in enumerate(rows) if row is None]
        batch = self.inputs.repeat(count, poisoned)
        try:
            with patched_forwards(forwards):
                out = batch.call(self.model)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot be probed with a batch of {count}: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
        return hits, _nan_rows(out, count)


def _note_output(
    note: Callable[[str, Tensor, int], Tensor], name: str, _module: nn.Module, _args: Any, out: Tensor
) -> None:
    note(name, out, 1)


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


def _nan_rows(output: Any, count: int) -> BoolArray:
    """Whether each row of any floating tensor in the output holds a NaN, ``(count,)``."""
    found = np.zeros(count, dtype=bool)
    for leaf in _tensors(output):
        nan = torch.isnan(leaf.detach())
        if leaf.dim() and leaf.shape[0] % count == 0 and leaf.shape[0]:
            found |= nan.reshape(count, -1).any(1).cpu().numpy()
        else:
            found |= bool(nan.any())
    return found


def _tensors(output: Any) -> list[Tensor]:
    """Floating tensors in an output of any nesting; of a dataclass, those in its fields."""
    leaves = tree_leaves(vars(output) if is_dataclass(output) else output)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _bits(bits: int) -> Iterator[tuple[int, int]]:
    yield from ((bit, value) for bit in range(bits) for value in (0, 1))


def _spelled(producers: Sequence[int], widths: Sequence[int], bit: int, value: int) -> Row:
    """The row in which the channels with the given bit are NaN."""
    return {p: (np.arange(widths[p]) >> bit & 1) == value for p in producers}


def _decode(code: BoolArray, positions: IntArray) -> tuple[IntArray, BoolArray]:
    """Channel spelled at each position, and whether exactly one of each bit pair arrived."""
    zeros, ones = code[0::2][:, positions], code[1::2][:, positions]
    weights = (1 << np.arange(len(zeros), dtype=np.int64))[:, None]
    return (ones * weights).sum(axis=0), (zeros != ones).all(axis=0)


def _own_rows(producer: int, width: int, wide: bool) -> list[Row]:
    if wide:
        return [{producer: np.arange(width) == c} for c in range(width)]
    bits = max(1, math.ceil(math.log2(width)))
    return [_spelled([producer], [width] * (producer + 1), b, v) for b, v in _bits(bits)]


def _by_rows(unsure: IntArray, widths: Sequence[int], wide: bool) -> Iterator[list[int]]:
    """Producers to ask again, in batches of a bounded number of rows."""
    batch: list[int] = []
    rows = 0
    for p in np.unique(unsure[:, 0]).tolist():
        batch.append(p)
        rows += widths[p] if wide else 2 * math.ceil(math.log2(max(2, widths[p])))
        if rows > 256:
            yield batch
            batch, rows = [], 0
    if batch:
        yield batch


def _split_rows(
    answer: BoolArray, batch: Sequence[int], widths: Sequence[int], wide: bool
) -> list[BoolArray]:
    counts = [len(_own_rows(p, widths[p], wide)) for p in batch]
    return np.split(answer, np.cumsum(counts)[:-1])


def _triples(producer: int, channel: IntArray, position: IntArray) -> IntArray:
    return np.stack([np.full_like(position, producer), channel, position], axis=1)


def _pairs_of(producer: int, position: IntArray) -> IntArray:
    return np.stack([np.full_like(position, producer), position], axis=1)


def _subcubes(producer: int, own: BoolArray, positions: IntArray, width: int) -> IntArray:
    """All channels that the arrived bits allow, at each position."""
    zeros, ones = own[0::2][:, positions], own[1::2][:, positions]
    channel = np.arange(width)
    bits = (channel[:, None] >> np.arange(len(zeros)) & 1).astype(bool)  # (C, bits)
    allowed = np.where(bits[:, :, None], ones[None], zeros[None]).all(axis=1)
    found, where = np.nonzero(allowed)
    return _triples(producer, found, positions[where])
