"""Observed forward passes: what is noted, and that nothing stays behind."""

from dataclasses import dataclass

import pytest
import torch
from nets import aux_head, depthwise, plain, seeded, unet
from torch import nn

from stamppruner.calls import evaluating, floating_tensors, patched_forwards, record_calls, run
from stamppruner.errors import UnsupportedModelError
from stamppruner.inputs import Inputs


def recorded(model, *shape):
    inputs = Inputs.of(torch.zeros(1, *shape), model)
    with evaluating(model):
        return record_calls(model, inputs), inputs


def test_shapes_and_places_of_every_layer():
    calls, _ = recorded(seeded(plain), 3, 8, 8)
    assert calls.passes == (False,)
    assert list(calls.outputs) == ["0.0", "2.0", "4", "5.2"]
    assert [tuple(shape) for shape in calls.outputs["2.0"]] == [(1, 12, 8, 8)]
    assert calls.applied == {"0.0": 64, "2.0": 64, "4": 64, "5.2": 1}
    assert calls.channelwise == {"0.1": 8, "2.1": 12}


def test_transposed_convolutions_are_applied_at_their_inputs():
    assert recorded(seeded(unet), 3, 8, 8)[0].applied["up"] == 16


def test_depthwise_layers_are_noted():
    assert "2.0" in recorded(seeded(depthwise), 3, 8, 8)[0].outputs


def test_layers_of_training_mode_only_are_seen_in_a_second_pass():
    model = seeded(aux_head)
    calls, inputs = recorded(model, 3, 8, 8)
    assert calls.passes == (False, True)
    assert "aux.2" in calls.outputs
    assert "aux.2" not in calls.applied
    with evaluating(model):
        plain_output, (output, _) = run(model, inputs, calls.passes)
        assert torch.equal(plain_output, output)  # norms stay in evaluation mode
    assert not any(module.training for module in model.modules())


def test_layers_inside_attention_ask_for_no_second_pass():
    class Attentive(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attend = nn.Linear(3, 8), nn.MultiheadAttention(8, 2)
            self.ran = 0

        def forward(self, x):
            self.ran += 1
            x = self.embed(x)
            return self.attend(x, x, x)[0]

    model = Attentive()
    calls, _ = recorded(model, 4, 3)
    assert model.ran == 1
    assert calls.passes == (False,)
    assert calls.opaque == {"attend": 8}


def test_a_failing_forward_names_the_shapes():
    with pytest.raises(UnsupportedModelError, match=r"Sequential fails .*\(1, 4, 8, 8\)"):
        recorded(seeded(plain), 4, 8, 8)


def test_modes_and_random_state_come_back():
    model = seeded(plain).train()
    model[0].eval()
    before, state = [m.training for m in model.modules()], torch.get_rng_state()
    with evaluating(model):
        assert not any(m.training for m in model.modules())
        assert not model(torch.rand(1, 3, 8, 8)).requires_grad
    with pytest.raises(RuntimeError, match="channels"), evaluating(model):
        model(torch.rand(1, 4, 8, 8))
    assert [m.training for m in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)


def test_patched_forwards_come_back_also_where_the_user_had_patched():
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    mine = model[1].forward = lambda x: x + 1
    with patched_forwards({model[0]: lambda x: x * 2, model[1]: lambda x: x}):
        assert float(model(torch.tensor(3.0))) == 6
    assert "forward" not in vars(model[0])
    assert model[1].forward is mine


@dataclass
class Answer:
    scores: torch.Tensor
    other: dict


def test_floating_tensors_of_any_nesting():
    x, ids = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    assert floating_tensors([x, {"a": (x, ids)}, None, "text"]) == [x, x]
    assert len(floating_tensors(Answer(x, {"a": x, "b": ids}))) == 2
