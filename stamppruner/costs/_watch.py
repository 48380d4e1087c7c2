"""Which tensors are alive at one time, as functions of the group widths.

Every tensor that is allocated is watched, from its birth to its death. Its size is taken as affine
in the group widths: what a layer writes follows the layer's map, and any other tensor follows what
it was computed from. A peak is then the largest of some affine functions, one for each moment at
which most is alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stamppruner.channels import KEPT, ChannelGraph
from stamppruner.costs._base import positions

BATCHES = 2, 3
"""Samples of the two watched runs: the size of a tensor is affine in them."""

_MIXING = {"mm", "bmm", "addmm", "baddbmm", "convolution", "_cudnn_rnn", "mkldnn_rnn_layer"}
"""Operations whose output need not have the channels of any input."""


class Origin(NamedTuple):
    """What the size of a tensor follows.

    Attributes:
        share: of its size that is fixed, and that each kept channel of a group adds, ``(1 + G,)``.
        layer: number of the layer that wrote it; one behind the last if none did.
        width: channels along the axis that follows them; 0 where that is not known.
    """

    share: Tensor
    layer: int
    width: int = 0


@dataclass
class _Storage:
    """Memory of one or several tensors."""

    nbytes: int
    origin: Origin


class Watch(TorchDispatchMode):
    """Notes the storages that are born, and which of them are alive at one time.

    Args:
        elsewhere: origin of what follows no layer.

    Attributes:
        storages: in the order of their births.
        moments: numbers of those alive together, whenever the next event is a death.
    """

    def __init__(self, elsewhere: Origin) -> None:
        super().__init__()
        self.storages: list[_Storage] = []
        self.moments: list[frozenset[int]] = []
        self._elsewhere = elsewhere
        self._numbers: dict[int, int] = {}  # of those alive, by their address
        self._rising = self._open = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        read = _strided((args, kwargs))
        given = {_address(x) for x in read}
        for y in _strided(outputs):
            if _address(y) not in given | self._numbers.keys() and y.untyped_storage().nbytes():
                operation = func.overloadpacket.__name__
                self._bear(y, self._inherited(operation, y, read), _accumulates(operation))
        return outputs

    def close(self, gradients: Collection[Tensor]) -> None:
        """Stop watching; storages of the gradients do not count."""
        self._note()
        self._open = False
        left_out = {self._numbers.get(_address(gradient)) for gradient in gradients}
        self.moments = [moment - left_out for moment in self.moments]

    def origin(self, x: Tensor) -> Origin:
        """What the size of a tensor follows."""
        number = self._numbers.get(_address(x))
        return self._elsewhere if number is None else self.storages[number].origin

    def assign(self, x: Tensor, origin: Origin) -> None:
        """State what the size of a tensor follows; of one that fills a storage of this run."""
        number = self._numbers.get(_address(x))
        if number is not None and _fills(x):
            self.storages[number].origin = origin

    def see(self, origin: Origin, _module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A forward hook: note what a layer wrote, and of what size the gradients will be."""
        if not isinstance(output, Tensor):
            return
        self.assign(output, origin)
        for x in (*args[:1], output):
            if isinstance(x, Tensor) and x.requires_grad and x.grad_fn is not None:
                x.register_hook(partial(self.assign, origin=self.origin(x)))

    def _inherited(self, operation: str, y: Tensor, read: list[Tensor]) -> Origin:
        """The origin of an operation's output: that of the input most like it."""
        if operation == "cat":
            share = torch.stack([x.numel() * self.origin(x).share for x in read]).sum(0)
            largest = max(read, key=Tensor.numel)
            return Origin(share / sum(x.numel() for x in read), self.origin(largest).layer)
        own = [x for x in read if _address(x) in self._numbers]
        if not own or operation in _MIXING:
            return self._elsewhere

        def likeness(x: Tensor) -> tuple[bool, bool, int]:
            return x.shape == y.shape, _fills(x), x.numel()

        # backward formulas take the gradient first and then the tensor whose gradient they give
        x = max(reversed(own), key=likeness)
        origin = self.origin(x)
        over_channels = origin.width in x.shape and origin.width not in y.shape
        return self._elsewhere if over_channels and y.numel() < x.numel() else origin

    def _bear(self, y: Tensor, origin: Origin, in_place: bool) -> None:
        storage, address = y.untyped_storage(), _address(y)
        if in_place:
            self._note()
        self._numbers[address] = len(self.storages)
        self.storages.append(_Storage(storage.nbytes(), origin))
        self._rising = not in_place
        weakref.finalize(storage, self._bury, address).atexit = False

    def _bury(self, address: int) -> None:
        if self._open:
            self._note()
            del self._numbers[address]

    def _note(self) -> None:
        if self._rising:
            self.moments.append(frozenset(self._numbers.values()))
        self._rising = False


class Peak:
    """The largest sum of what is alive at one time, as a function of group widths.

    Args:
        short, long: runs over the two batch sizes of ``BATCHES``.
        batch_size: samples that count.
        sizes: of the groups, ``(G,)``.
        layers: their number ``L``.
    """

    def __init__(
        self, short: Watch, long: Watch, batch_size: int, sizes: Tensor, layers: int
    ) -> None:
        nbytes = torch.tensor([s.nbytes for s in short.storages], dtype=torch.float64)
        more = nbytes * BATCHES[1] / BATCHES[0]
        if len(long.storages) == len(nbytes):
            more = torch.tensor([s.nbytes for s in long.storages], dtype=torch.float64)
        slope = (more - nbytes) / (BATCHES[1] - BATCHES[0])
        nbytes = (nbytes + (batch_size - BATCHES[0]) * slope).clamp(min=0)
        shares = [s.origin.share for s in short.storages]
        self._parts = nbytes[:, None] * torch.stack(shares)
        self._layer = torch.tensor([s.origin.layer for s in short.storages])
        self._layers = layers
        alive = torch.zeros(len(short.moments), len(nbytes), dtype=torch.float64)
        for row, moment in zip(alive, short.moments, strict=True):
            row[list(moment)] = 1
        kept = _highest(alive @ self._parts, sizes)
        self._alive = alive[kept]
        self._moments = self._alive @ self._parts

    def __call__(self, widths: Tensor) -> Tensor:
        """Bytes, ``(...)``, for group widths ``(..., G)``."""
        return _affine(self._moments, widths).amax(-1)

    def per_layer(self, widths: Tensor) -> Tensor:
        """Bytes that each layer wrote, directly or through what followed it, ``(..., L)``."""
        moment = _affine(self._moments, widths).argmax(-1)
        parts = _affine(self._parts, widths) * self._alive[moment]
        totals = parts.new_zeros(*parts.shape[:-1], self._layers + 1)
        return totals.index_add(-1, self._layer, parts)[..., :-1]


@contextmanager
def watching(model: nn.Module, watch: Watch, origins: Mapping[str, Origin]) -> Iterator[None]:
    """Watch what runs inside; layers have the origins."""
    modules = dict(model.named_modules())
    handles = [
        # first of all hooks: before a rewired layer scatters
        modules[name].register_forward_hook(partial(watch.see, origin), prepend=True)
        for name, origin in origins.items()
    ]
    try:
        with watch:
            yield
        watch.close([p.grad for p in model.parameters() if p.grad is not None])
    finally:
        for handle in handles:
            handle.remove()


def origins_of(graph: ChannelGraph) -> dict[str, Origin]:
    """Origin of what each layer writes, and by ``""`` of what follows none."""
    sizes = np.array([group.size for group in graph.groups], dtype=np.float64)
    wide = np.append(graph.stays_wide, False)  # KEPT is the last
    found = {}
    for number, (name, layer) in enumerate(graph.layers.items()):
        outputs = np.where(wide[layer.outputs], KEPT, layer.outputs)
        each = [(outputs == KEPT).sum(), *(positions(outputs, graph) / sizes)]
        share = torch.tensor(np.array(each) / max(1, len(outputs)), dtype=torch.float64)
        found[name] = Origin(share, number, len(outputs))
    fixed = torch.zeros(1 + len(sizes), dtype=torch.float64)
    fixed[0] = 1
    return {**found, "": Origin(fixed, len(found))}


def _highest(moments: Tensor, sizes: Tensor) -> list[int]:
    """Rows of affine functions ``(S, 1 + G)`` that no other row exceeds at all widths."""
    reach = torch.cat([sizes.new_ones(1), sizes])
    kept: list[int] = []
    for row in (moments @ reach).argsort(descending=True, stable=True).tolist():
        ahead = (moments[row] - moments[kept]) * reach  # the most that it is ahead of each
        if not ((ahead[:, 0] + ahead[:, 1:].clamp(min=0).sum(1)) <= 0).any():
            kept.append(row)
    return kept


def _affine(functions: Tensor, widths: Tensor) -> Tensor:
    """Values, ``(..., N)``, of affine functions ``(N, 1 + G)`` at widths ``(..., G)``."""
    return functions[:, 0] + widths @ functions[:, 1:].T


def _accumulates(operation: str) -> bool:
    """Whether a backward pass adds up gradients; it does so in place unless someone watches."""
    return operation == "add" and torch._C._current_graph_task_id() != -1


def _strided(values: Any) -> list[Tensor]:
    """Tensors with a storage, in any nesting."""
    leaves = tree_leaves(values)
    return [x for x in leaves if isinstance(x, Tensor) and x.layout == torch.strided]


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _fills(x: Tensor) -> bool:
    """Whether the tensor is its whole storage."""
    return x.numel() * x.element_size() == x.untyped_storage().nbytes()
