"""Example inputs: read, repeated, cropped, randomised."""

import pytest
import torch
from torch import nn

from stamppruner.errors import DataError
from stamppruner.inputs import Inputs

FLOAT = nn.Linear(2, 2)


class Tagged(torch.Tensor):
    """A subclass as some data pipelines hand out."""


def test_tensor_tuple_list_and_mapping():
    x = torch.zeros(2, 3, 4, 4)
    assert [t.shape for t in Inputs.of(x, FLOAT).args] == [x.shape]
    assert Inputs.of((x, 3), FLOAT).args[1] == 3
    assert len(Inputs.of([x, x], FLOAT).args) == 2
    assert list(Inputs.of({"image": x}, FLOAT).kwargs) == ["image"]
    assert Inputs.of(Inputs.of({"image": x}, FLOAT), FLOAT).kwargs["image"].shape == x.shape


def test_floating_tensors_follow_the_model_and_integers_stay():
    x, ids = torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.int32)
    inputs = Inputs.of((x, {"ids": ids}), FLOAT.double())
    assert inputs.args[0].dtype == torch.float64
    assert inputs.args[1]["ids"].dtype == torch.int32
    FLOAT.float()


def test_subclasses_and_gradients_are_dropped_and_the_original_stays():
    x = torch.zeros(1, 3, requires_grad=True).as_subclass(Tagged)
    inputs = Inputs.of(x, FLOAT)
    assert type(inputs.args[0]) is torch.Tensor
    assert not inputs.args[0].requires_grad
    inputs.args[0].fill_(1)
    assert float(x.sum()) == 0


def test_repeat_copies_the_first_sample_and_poisons_rows():
    inputs = Inputs.of((torch.arange(6.0).reshape(2, 3), torch.tensor([5, 6])), FLOAT)
    x, ids = inputs.repeat(3, poisoned=[1]).args
    assert x[0].tolist() == x[2].tolist() == [0, 1, 2]
    assert x[1].isnan().all()
    assert ids.tolist() == [5, 5, 5]


def test_tensors_without_the_batch_axis_are_left_alone():
    x, anchors = torch.zeros(2, 3), torch.ones(7, 4)
    assert torch.equal(Inputs.of((x, anchors), FLOAT).repeat(5).args[1], anchors)


def test_random_is_seeded_and_in_the_models_dtype():
    inputs = Inputs.of(torch.zeros(1, 3), FLOAT)
    a, b, c = (inputs.random(2, seed).args[0] for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert (a.shape, a.dtype) == ((2, 3), torch.float32)


def test_cropped_cuts_images_only():
    inputs = Inputs.of((torch.zeros(1, 3, 100, 90), torch.zeros(1, 200)), FLOAT)
    assert [tuple(x.shape) for x in inputs.cropped(64).args] == [(1, 3, 64, 64), (1, 200)]
    assert inputs.cropped(100) is None


def test_sizes():
    one = Inputs.of(torch.zeros(2, 3, 4, 4), FLOAT)
    assert (one.batch_size, one.sample_shape) == (2, (3, 4, 4))
    assert Inputs.of((torch.zeros(2, 3), torch.zeros(2)), FLOAT).sample_shape is None
    assert Inputs.of((torch.zeros(2, 3), torch.zeros(2)), FLOAT).describe() == "(2, 3), (2,)"


@pytest.mark.parametrize("nothing", [(), {}, ("a",), torch.tensor(1.0)])
def test_no_samples(nothing):
    with pytest.raises(DataError, match="no tensor with a batch axis"):
        Inputs.of(nothing, FLOAT)
