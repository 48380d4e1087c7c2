"""Functions of uniform tensors: the same values, at the price of one place."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stamppruner.uniform import UniformTensors, narrowed, uniform_axes

PLACES = (5, 4)


def image(*channels: float) -> Tensor:
    """One value a channel, seen at every place."""
    return torch.tensor([channels]).view(1, -1, 1, 1).expand(1, -1, *PLACES)


FUNCTIONS = {
    "relu": F.relu,
    "relu module": nn.ReLU(inplace=True),
    "hardswish": nn.Hardswish(inplace=True),
    "gelu": F.gelu,
    "sum": lambda x: x + 2 * x,
    "sum with a constant on the left": lambda x: 1 - x,
    "power": lambda x: x**2,
    "gate": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "bias": lambda x: x + torch.arange(3.0).view(3, 1, 1),
    "concatenation": lambda x: torch.cat([x, x.neg()], 1),
    "rows concatenated": lambda x: torch.cat([x, x], dim=-2),
    "batch norm": nn.BatchNorm2d(3).eval(),
    "max pool": nn.MaxPool2d(2),
    "max pool with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "mean": nn.AdaptiveAvgPool2d(2),
    "upsampling": lambda x: F.interpolate(x, scale_factor=2),
    "padding": lambda x: F.pad(x, (1, 1)),
    "halves": lambda x: x.chunk(3, 1)[1] * x[:, :1],
}
STAYS = set(FUNCTIONS) - {"max pool with indices", "padding"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_ordinary_tensors(name: str) -> None:
    function = FUNCTIONS[name]
    expected = function(image(1.0, -2.0, 0.5).contiguous())
    with UniformTensors(), torch.no_grad():
        found = function(image(1.0, -2.0, 0.5))
    assert torch.equal(found, expected)
    assert (narrowed(found).numel() < found.numel()) == (name in STAYS)


def test_writing_reaches_all_that_see_the_memory() -> None:
    x = image(1.0, 2.0).clone().narrow(2, 0, 1).narrow(3, 0, 1).expand(1, 2, *PLACES)
    alias = x
    with UniformTensors():
        x += image(1.0, 1.0)
        x.mul_(2)
    assert torch.equal(alias, image(4.0, 6.0))


def test_nan_written_at_one_place_is_nan_at_all() -> None:
    x = torch.zeros(1, 2, 1, 1).expand(1, 2, *PLACES)
    other = torch.zeros(1, 2, *PLACES)
    other[0, 1, 3, 2] = torch.nan
    with UniformTensors():
        x += other
    assert x.isnan().all((2, 3)).tolist() == [[False, True]]


def index_put(x: Tensor) -> None:
    x[:, :, torch.tensor([0])] = 1.0


@pytest.mark.parametrize("write", [index_put, Tensor.zero_, lambda x: x.index_fill_(2, IDX, 1.0)])
def test_other_writes_are_refused(write: object) -> None:
    x = torch.zeros(1, 2, 1, 1).expand(1, 2, *PLACES)
    with UniformTensors(), pytest.raises(RuntimeError, match="writes into a uniform tensor"):
        write(x)  # type: ignore[operator]
    assert not x.any()


IDX = torch.tensor([0])


def test_uniform_axes() -> None:
    assert uniform_axes(image(1.0, 2.0)) == (False, False, True, True)
    assert uniform_axes(torch.zeros(2, 3)) == (False, False)
    assert narrowed(image(1.0, 2.0), 3).shape == (1, 2, 5, 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1, 3]), min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.sampled_from([torch.add, torch.mul, torch.maximum, Tensor.sub, Tensor.add_]),
)
def test_broadcasting(ones: list[int], a: list[bool], b: list[bool], function: object) -> None:
    """Any mix of uniform, broadcast and ordinary axes."""
    x = torch.randn([1 if u else 3 for u in a]).expand(3, 3, 3)
    y = torch.randn([1 if u else n for u, n in zip(b, ones, strict=True)]).expand(ones)
    expected = function(x.contiguous(), y)  # type: ignore[operator]
    merged = function is Tensor.add_ and any(
        u and not v and n == 3 for u, v, n in zip(a, b, ones, strict=True)
    )
    with UniformTensors() as used:
        found = function(x, y)  # type: ignore[operator]
    assert found.shape == expected.shape
    assert used.largest > 0
    if not merged:
        assert torch.equal(found, expected)
