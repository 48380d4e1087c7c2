"""Own networks against those of other targets."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stripes import dataset, loader, same_state, snapshot, vgg
from torch.utils.data import TensorDataset

from stamppruner import Budget, STAMPConfig, STAMPPruner, evaluate, finetune, swap_test
from stamppruner.baselines import Random
from stamppruner.errors import CheckpointError, ConfigError, DataError, StampError
from stamppruner.swap import SwapTest, iou, mean_interval

HALF = Budget(macs=0.5)


@pytest.fixture(scope="module")
def pruner():
    model = vgg()
    finetune(model, loader(), epochs=3, lr=0.1, progress=False)
    config = STAMPConfig(iterations=1, tasks_per_iteration=1, ways=3, shots=8, minibatch_size=12)
    return STAMPPruner(model, config=config).meta_fit(dataset(16), progress=False)


@pytest.fixture(scope="module")
def targets():
    images, labels = dataset(8, seed=4).tensors
    return {
        "stripes": (dataset(8, seed=2), dataset(8, seed=3)),
        "negative": (TensorDataset(1 - images, labels % 3), TensorDataset(1 - images, labels % 3)),
    }


class Recorded:
    """Gives the results it has, in order."""

    def __init__(self, results):
        self.results = iter(results)

    def prune(self, target_loader, budget=None, *, progress=True):
        return next(self.results)


def test_the_diagonal_is_what_each_target_gets_by_itself(pruner, targets):
    results = [pruner.prune(train, HALF, progress=False) for train, _ in targets.values()]
    states = [snapshot(result.model) for result in results]
    found = swap_test(Recorded(results), targets, HALF, epochs=2, lr=0.05, progress=False)
    assert all(same_state(r.model, s) for r, s in zip(results, states, strict=True))
    for i, (result, (_, test)) in enumerate(zip(results, targets.values(), strict=True)):
        assert found.before[i, i] == evaluate(result.model, test)
    keeps = [result.plan.keep for result in results]
    assert found.iou[0, 1] == found.iou[1, 0] == iou(*keeps)
    assert np.diag(found.iou).tolist() == [1, 1]
    assert found.after is not None
    assert found.after.shape == (2, 2)


def test_equal_networks_differ_by_nothing_before_training(pruner, targets):
    """Moving a network to the data it came from changes nothing."""
    train, test = targets["stripes"]
    result = pruner.prune(train, HALF, progress=False)
    twins = {"a": (train, test), "b": (train, test)}
    found = swap_test(Recorded([result, result]), twins, HALF, epochs=0)
    assert found.iou.min() == 1
    assert found.after is None
    assert np.abs(found.differences("before")).max() <= 0.05
    with pytest.raises(StampError, match="without fine-tuning"):
        found.differences()


def test_a_network_moves_to_a_target_of_other_classes(pruner, targets):
    found = swap_test(pruner, targets, HALF, epochs=0, progress=False)
    assert ((found.before >= 0) & (found.before <= 1)).all()
    assert found.before[0, 1] > 0.4  # three classes


def test_differences_are_own_minus_other():
    after = np.array([[0.9, 0.5], [0.7, 0.8]])
    found = SwapTest(("a", "b"), after - 0.1, after, np.eye(2))
    assert found.differences().tolist() == pytest.approx([0.3, 0.2])
    record = json.loads(json.dumps(found.to_json()))
    assert record["own_minus_other_after"]["mean"] == pytest.approx(0.25)
    assert record["after"][0] == [0.9, 0.5]
    again = SwapTest.from_json(record)
    assert again.to_json() == record
    assert again.overlap == 0
    assert "own minus other after fine-tuning: +25.0 points" in str(found)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20))
def test_the_interval_holds_the_mean(values):
    mean, low, high = mean_interval(np.array(values))
    assert low - 1e-9 <= mean <= high + 1e-9
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


def test_the_interval_narrows_with_more_values():
    values = np.random.default_rng(0).normal(size=400)
    few, many = mean_interval(values[:20]), mean_interval(values)
    assert many[2] - many[1] < 0.5 * (few[2] - few[1])
    assert mean_interval(np.array([2.0])) == (2, 2, 2)


def test_overlap():
    a, b = np.array([True, True, False]), np.array([True, False, True])
    assert iou(a, b) == pytest.approx(1 / 3)
    assert iou(a & ~a, b & ~b) == 1


def test_bad_input_is_refused(pruner, targets):
    with pytest.raises(ConfigError, match="at least two"):
        swap_test(pruner, {"stripes": targets["stripes"]}, HALF)
    with pytest.raises(DataError, match="no values"):
        mean_interval(np.array([]))


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"names": ["a", "b"], "before": [[1, 2]], "iou": [[1, 1], [1, 1]]},
        {"names": ["a"], "before": [["x"]], "iou": [[1]]},
        {"names": ["a"], "before": [[1]]},
        {"names": 3, "before": [[1]], "iou": [[1]]},
    ],
)
def test_damaged_records_are_refused(record):
    with pytest.raises(CheckpointError, match="damaged"):
        SwapTest.from_json(record)


def test_baselines_can_be_tested_as_well(pruner, targets):
    class Pruner:
        def prune(self, target_loader, budget=None, *, progress=True):
            return Random(seed=0).prune(pruner.model, target_loader, budget)

    found = swap_test(Pruner(), targets, HALF, epochs=0)
    assert found.iou.min() == 1  # one seed, one mask: it does not depend on the data
