"""Batch norms over a shared batch, in all dtypes; on ranks see test_meta_ranks.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from stamppruner.shared_batch import _WholeBatchNorm

KINDS = {
    torch.float64: (torch.float64, 1e-11),
    torch.float32: (torch.float32, 1e-5),
    torch.bfloat16: (torch.float32, 1e-2),
}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean", [0.0, 50.0])
def test_outputs_and_gradients_are_those_of_batch_norm(
    kind: torch.dtype, own: bool, mean: float
) -> None:
    """With weights of the images' dtype, or of that of the statistics, as under autocast."""
    torch.manual_seed(0)
    statistics, error = KINDS[kind]
    like = kind if own else statistics
    x = (mean + 3 * torch.randn(13, 8, 4, 4)).to(kind)
    given = [x, torch.rand(8).to(like), torch.randn(8).to(like)]
    slopes = torch.randn(13, 8, 4, 4).to(kind)
    found = [t.clone().requires_grad_() for t in given]
    y = _WholeBatchNorm.apply(*found, 1e-5)
    y.backward(slopes)
    wanted = [t.double().requires_grad_() for t in given]
    z = F.batch_norm(wanted[0], None, None, wanted[1], wanted[2], True, 0.0, 1e-5)
    z.backward(slopes.double())
    assert y.dtype == kind
    pairs = [(y, z), *((a.grad, b.grad) for a, b in zip(found, wanted, strict=True))]
    for one, two in pairs:
        one, two = one.detach().double(), two.detach()
        assert float((one - two).abs().max()) < error * float(two.abs().max())
