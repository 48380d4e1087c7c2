"""Forward passes over tensors that are the same at every place, at the price of one place.

A layer under probing answers with one value a channel. As a view of stride 0 over the places (a
*uniform* axis) the answer takes no memory, and pointwise functions, pools and concatenations of
such views are computed once and seen everywhere; products of matrices and attention are computed
for one of several equal rows.
"""

from stamppruner.uniform._mode import UniformTensors
from stamppruner.uniform._views import narrowed, uniform_axes

__all__ = ["UniformTensors", "narrowed", "uniform_axes"]
