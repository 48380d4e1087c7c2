"""Number of parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from stamppruner.costs._elements import Elements


class Params(Elements):
    """Elements of all parameters."""

    name, unit = "params", "parameters"

    def tensors(self, module: nn.Module, *, whole: bool) -> Iterator[tuple[str, Tensor]]:
        """Parameters."""
        yield from module.named_parameters(recurse=whole)

    def weight(self, tensor: Tensor) -> int:
        """One."""
        return 1
