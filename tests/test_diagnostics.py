"""Gates that listen to the set, and gates that do not."""

import json

import pytest
import torch
from stripes import dataset, loader, resnet, vgg
from torch.utils.data import TensorDataset

from stamppruner import Budget, STAMPConfig, STAMPPruner, diagnose, finetune
from stamppruner.errors import ConfigError, DataError

HALF = Budget(macs=0.5)


@pytest.fixture(scope="module")
def backbone():
    model = vgg()
    finetune(model, loader(), epochs=3, lr=0.1, progress=False)
    return model


@pytest.fixture(scope="module")
def sets():
    images, labels = dataset(32, seed=4).tensors
    return {"stripes": dataset(32, seed=2), "pairs": TensorDataset(-images, labels % 2)}


def fitted(backbone, **settings):
    config = STAMPConfig(
        iterations=1, tasks_per_iteration=1, ways=3, shots=8, minibatch_size=12, **settings
    )
    return STAMPPruner(backbone, config=config).meta_fit(dataset(16), progress=False)


def test_evidence_of_the_target_moves_the_gates(backbone, sets):
    found = diagnose(fitted(backbone, target_evidence=1.0), sets, HALF)
    assert found.moved > 1.1 * found.moved_resampled > 0
    assert found.overlap <= found.overlap_resampled
    assert found.warnings == ()
    assert found.names == ("stripes", "pairs")
    assert sum(found.histogram) == vgg_channels()
    assert all(0 < share <= 1 for share in (*found.live, *found.expected_macs))
    assert "moves by" in str(found)
    json.dumps(found.to_json())


def vgg_channels():
    return 8 + 12 + 12


def test_a_set_that_is_ignored_is_warned_about(backbone, sets):
    pruner = fitted(backbone, target_evidence=0.0)
    with torch.no_grad():
        for parameter in pruner._gated().posterior.theta_parameters():
            parameter.zero_()  # gamma = beta = 0: psi is the same for all
    found = diagnose(pruner, sets, HALF)
    assert found.moved == found.moved_resampled == 0
    assert found.overlap == 1
    assert any("ignored" in text and "target_evidence" in text for text in found.warnings)
    assert any("only 0.0% of the gates are live" in text for text in found.warnings)


def test_the_pruner_is_not_changed(backbone, sets):
    pruner = fitted(backbone)
    before = pruner.keep_probability().copy()
    diagnose(pruner, sets, HALF)
    assert (pruner.keep_probability() == before).all()
    assert pruner.config.reconstruct


def test_bad_input_is_refused(backbone, sets):
    pruner = fitted(backbone)
    with pytest.raises(ConfigError, match="pass a dict"):
        diagnose(pruner, list(sets.values()), HALF)
    with pytest.raises(ConfigError, match="at least two"):
        diagnose(pruner, {"stripes": sets["stripes"]}, HALF)
    images = torch.zeros(3, 3, 8, 8)
    small = TensorDataset(images, torch.tensor([0, 1, 1]))
    with pytest.raises(DataError, match="half of set 'small' has a single class"):
        diagnose(pruner, {"stripes": sets["stripes"], "small": small}, HALF)


def test_a_network_with_projected_shortcuts_is_diagnosed(sets):
    config = STAMPConfig(iterations=1, tasks_per_iteration=1, ways=3, shots=8, minibatch_size=12)
    pruner = STAMPPruner(resnet(), config=config, shortcuts="project")
    pruner.meta_fit(dataset(16), progress=False)
    found = diagnose(pruner, sets, HALF)
    assert all(0 < share <= 1.5 for share in found.expected_macs)  # of the net without projections
