"""Residual sums that a module writes in its own ``forward``: found, and given a layer on one side.

``torch.fx`` traces one module at a time, its children as leaves, so a sum is found in the smallest
module that holds it. A sum ``s + f(s)`` is residual where a mixing layer behind one operand reads
what the other operand carries. A module is taken only if its trace tells all of it: the same in
training and in evaluation mode, without constants of its own, and with every parameter in it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx, nn

from stamppruner import layers
from stamppruner.calls import FORWARD_ERRORS

_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")

_MIXING = (
    "linear", "bilinear", "matmul", "mm", "bmm", "baddbmm", "addmm", "einsum", "tensordot",
    "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
)  # fmt: skip
"""Functions and tensor methods that mix channels."""

Place = tuple[int, int]
"""Number of a sum among those of a module, in call order; and the operand, 0 or 1."""


class SpliceError(Exception):
    """Why a module cannot be rewritten; callers leave it as it is and say so."""


def residual_sums(block: nn.Module) -> dict[int, int]:
    """Residual sums of a module by number: which operand is the shortcut, 0 or 1.

    A chain ``x + f(x) + g(x)`` has one: with a mixing layer on ``x``, nothing ties ``g`` to it.

    Raises:
        SpliceError: the module cannot be rewritten.
    """
    graph, found = _traced(block), {}
    cut: set[tuple[fx.Node, int]] = set()
    mixing = {node for node in graph.nodes if _mixes(block, node)}
    for number, node in enumerate(_sums(graph)):
        for side in (0, 1):
            if _reads(node.args[1 - side], _carried(node.args[side], mixing, cut), mixing):
                found[number] = side
                cut.add((node, side))
                break
    return found


def splice(block: nn.Module, inserted: Mapping[Place, tuple[str, nn.Module]]) -> fx.GraphModule:
    """A module of the same computation, with modules on operands of its sums.

    It shares the children, parameters and mode of ``block``, and their names.

    Args:
        block: it is not changed.
        inserted: name and module for each place.

    Raises:
        SpliceError: the module cannot be rewritten, or has no such sum.
    """
    graph = _traced(block)
    sums = list(_sums(graph))
    names: dict[str, object] = {
        **dict(block.named_modules()),
        **dict(block.named_parameters()),
        **dict(block.named_buffers()),
    }
    for (number, side), (name, module) in inserted.items():
        if number >= len(sums) or hasattr(block, name):
            raise SpliceError(f"it has no sum number {number}, or has {name!r} already")
        names[name] = module
        node = sums[number]
        with graph.inserting_before(node):
            node.update_arg(side, graph.call_module(name, (node.args[side],)))
    spliced = fx.GraphModule(names, graph, type(block).__name__)  # type: ignore[arg-type]
    spliced.training = block.training
    new = {f"{name}.{key}" for name, module in inserted.values() for key in module.state_dict()}
    if spliced.state_dict().keys() != block.state_dict().keys() | new:
        raise SpliceError("its trace has other parameters or buffers than it has itself")
    return spliced


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _traced(block: nn.Module) -> fx.Graph:
    """The module's own code as a graph, children as leaves.

    Raises:
        SpliceError: it cannot be traced, or the trace does not tell all of it.
    """
    hooks = (block._forward_hooks, block._forward_pre_hooks, block._backward_hooks)
    if any(hooks):
        raise SpliceError("it has hooks")
    training, state, graphs = block.training, dict(block.__dict__), []
    try:
        for mode in (False, True):
            block.training = mode
            graphs.append(_Tracer().trace(block))
    except FORWARD_ERRORS as error:
        raise SpliceError(f"torch.fx cannot trace it ({error})") from error
    finally:
        block.training = training
        changed = [k for k in block.__dict__ if block.__dict__[k] is not state.get(k)]
        for key in changed:
            del block.__dict__[key]
        block.__dict__.update({k: state[k] for k in state if k not in block.__dict__})
    if changed:
        raise SpliceError(f"its forward changes its attributes ({', '.join(changed)})")
    if str(graphs[0]) != str(graphs[1]):
        raise SpliceError("its code differs between training and evaluation mode")
    return graphs[0]


def _sums(graph: fx.Graph) -> Iterator[fx.Node]:
    """Sums of two computed values, in call order."""
    for node in graph.nodes:
        called = node.op in ("call_function", "call_method") and node.target in _SUMS
        computed = [isinstance(operand, fx.Node) for operand in node.args]
        if called and computed == [True, True] and not node.kwargs:
            yield node


def _mixes(block: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return has_mixing(block.get_submodule(str(node.target)))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_function", "call_method") and name in _MIXING


def has_mixing(module: nn.Module) -> bool:
    """Whether something in a module mixes channels: a layer, or a weight of its own."""
    return any(
        layers.is_mixing(m)
        or (not layers.is_depthwise(m) and any(map(_is_matrix, m.parameters(False))))
        for m in module.modules()
    )


def _is_matrix(tensor: Tensor) -> bool:
    return sum(length > 1 for length in tensor.shape) > 1


def _carried(node: object, mixing: set[fx.Node], cut: set[tuple[fx.Node, int]]) -> set[fx.Node]:
    """Nodes whose channels a node carries: back to, and with, the mixing layers before it."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        at = todo.pop()
        if isinstance(at, fx.Node) and at not in found:
            found.add(at)
            if at not in mixing:
                skipped = [at.args[side] for other, side in cut if other is at]
                todo += [before for before in at.all_input_nodes if before not in skipped]
    return found


def _reads(node: object, carried: set[fx.Node], mixing: set[fx.Node]) -> bool:
    """Whether a mixing layer at or before a node reads one of the nodes, however indirectly."""
    seen: set[tuple[fx.Node, bool]] = set()
    todo = [(node, False)]
    while todo:
        at, mixed = todo.pop()
        if not isinstance(at, fx.Node) or (at, mixed) in seen:
            continue
        if mixed and at in carried:
            return True
        seen.add((at, mixed))
        todo += [(before, mixed or at in mixing) for before in at.all_input_nodes]
    return False
