"""Misfits of files and modules are told in one line, before anything is changed."""

import pytest
import torch
from torch import nn

from stamppruner.errors import CheckpointError
from stamppruner.models import resnet18, vgg19
from stamppruner.state_dicts import load_state_, misfit


def net(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width))


def test_what_fits_is_loaded():
    module, other = net(), net()
    load_state_(module, other.state_dict(), "f", "Remedy")
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )


def test_every_kind_of_misfit_is_named():
    own, given = net().state_dict(), net(5).state_dict()
    given["1.running_mean"] = given["1.running_mean"].long()
    given["more\n"] = given.pop("0.bias")
    text = misfit(own, given)
    assert text is not None
    assert "the file lacks 0.bias" in text
    assert "the model lacks 'more\\n'" in text
    assert "0.weight ((5, 3, 3, 3) in the file, (4, 3, 3, 3) in the model)" in text
    assert "1.running_mean (torch.int64 in the file, torch.float32 in the model)" in text


def test_widths_may_differ_but_axes_may_not():
    own, given = net().state_dict(), net(5).state_dict()
    assert misfit(own, given, widths_may_differ=True) is None
    given["0.weight"], given["0.bias"] = given["0.weight"][0], given["0.bias"][:0]
    text = misfit(own, given, widths_may_differ=True)
    assert text is not None
    assert "axes: 0.weight" in text
    assert "no values in the file: 0.bias" in text


def test_what_is_optional_may_be_there_or_not():
    own = net().state_dict()
    optional = {"extra": torch.zeros(2)}
    assert misfit(own, own, optional=optional) is None
    assert misfit(own, own | optional, optional=optional) is None
    assert misfit(own, own | optional) == "the model lacks extra"


def test_what_a_module_refuses_by_itself_is_told_in_a_line():
    class Strict(nn.Linear):
        def _load_from_state_dict(self, state, prefix, *others):
            others[-1].append("no such\nweights")

    with pytest.raises(
        CheckpointError, match=r"^f does not fit Strict: .*no such weights.*Remedy$"
    ):
        load_state_(Strict(2, 2), nn.Linear(2, 2).state_dict(), "f", "Remedy")


def test_a_wrong_model_is_told_in_a_line_and_stays():
    module = resnet18(10, width=0.125)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"^f does not fit ResNet: .* more.*Remedy$") as error:
        load_state_(module, vgg19(10, width=0.125).state_dict(), "f", "Remedy")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1500
    assert all(torch.equal(tensor, before[n]) for n, tensor in module.state_dict().items())
