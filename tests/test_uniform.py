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
    "looked up": lambda x: x[0, 0][torch.tensor([[0, 3, 1]])],
    "sum of products": lambda x: torch.einsum("bchw,hk,dc->bdwk", x, PLACE, MATRIX),
    "means": lambda x: x.mean((1, -1), keepdim=True),
    "mean over channels": lambda x: x.mean(dim=1),
    "largest": lambda x: x.amax(dim=[0, 2]),
    "variance": lambda x: x + x.var((2, 3), unbiased=False, keepdim=True),
    "variance of a sample": lambda x: x + x.var(dim=(1, 2), keepdim=True),
    "tokens": lambda x: x.transpose(1, 3).contiguous().view(1, -1, 3),
    "rolled": lambda x: torch.roll(x, shifts=(1, 2), dims=(2, 3)),
    "windows": lambda x: F.pad(x, (0, 0)).view(3, 5, 2, 2).transpose(1, 2).reshape(6, 10),
    "bits": lambda x: x.relu().view(torch.int32).clone(),
    "one place more": lambda x: torch.cat([x[:, :, :1], x], dim=2),
    "batch norm": nn.BatchNorm2d(3).eval(),
    "max pool": nn.MaxPool2d(2),
    "max pool with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "mean": nn.AdaptiveAvgPool2d(2),
    "upsampling": lambda x: F.interpolate(x, scale_factor=2),
    "padding": lambda x: F.pad(x, (1, 1)),
    "linear": lambda x: F.linear(x.movedim(1, -1), MATRIX).movedim(-1, 1),
    "softmax over channels": lambda x: x.softmax(1),
    "softmax in another precision": lambda x: x.softmax(-1, dtype=torch.float64),
    "softmax over places": lambda x: F.softmax(x, dim=-1),
    "scores": lambda x: x.transpose(1, 3) @ x.transpose(1, 3).mT,
    "product with a matrix": lambda x: (x.movedim(1, -1) @ MATRIX).movedim(-1, 1),
    "product over places": lambda x: torch.matmul(x, x.mT.contiguous()),
    "batched product": lambda x: torch.bmm(x.flatten(2).mT, x[:, :, 0]),
    "attention": lambda x: F.scaled_dot_product_attention(x.mT, x.mT, x.mT + 1),
    "attention to some": lambda x: F.scaled_dot_product_attention(x, x + PLACE, x),
    "normalised": lambda x: F.normalize(x, dim=1),
    "halves": lambda x: x.chunk(3, 1)[1] * x[:, :1],
}
MATRIX = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
PLACE = torch.arange(5.0).view(5, 1)
MATERIAL = "max pool with indices|padding|normalised|bits|mean over channels|largest"
STAYS = set(FUNCTIONS) - set(MATERIAL.split("|"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_ordinary_tensors(name: str) -> None:
    function = FUNCTIONS[name]
    expected = function(image(1.0, -2.0, 0.5).contiguous())
    with UniformTensors(), torch.no_grad():
        found = function(image(1.0, -2.0, 0.5))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert (narrowed(found).numel() < found.numel()) == (name in STAYS)


def test_writing_reaches_all_that_see_the_memory() -> None:
    x = image(1.0, 2.0).clone().narrow(2, 0, 1).narrow(3, 0, 1).expand(1, 2, *PLACES)
    alias = x
    with UniformTensors():
        x += image(1.0, 1.0)
        x.mul_(2)
    assert torch.equal(alias, image(4.0, 6.0))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([(2, 3, 4), (4, 6), (1, 24, 1), (2, 1, 3, 2, 2), (24,)]),
    st.sampled_from([(24,), (4, 6), (6, 4), (2, 12), (3, 8), (2, 2, 6), (1, 24), (2, 3, 2, 2, 1)]),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_reshaping(before: tuple[int, ...], after: tuple[int, ...], uniform: list[bool]) -> None:
    x = torch.randn([1 if u else n for u, n in zip(uniform, before, strict=False)]).expand(before)
    with UniformTensors():
        found = x.reshape(after)
    assert torch.equal(found, x.contiguous().reshape(after))


def test_assignment_merges_the_places() -> None:
    x = torch.zeros(2, 3, 1, 1).expand(2, 3, *PLACES)
    other = torch.zeros(1, *PLACES)
    other[0, 3, 2] = torch.nan
    with UniformTensors():
        x[:, 1:2, 1:] = other[:, 1:]
        x[:, :, 1:, 1:] += 1
        x[0, 2] = 5.0
    assert x.isnan().all((2, 3)).tolist() == [[False, True, False]] * 2
    assert (x[0, 0, 0, 0], x[0, 2, 4, 0], x[1, 2, 0, 3]) == (1, 5, 1)


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
