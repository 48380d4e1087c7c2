"""Sources of tasks: disjoint, balanced, fixed by the seed, resumable; bad data refused."""

import json
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from stamppruner.errors import DataError
from stamppruner.tasks import LoaderTasks, Task, TaskSampler, as_sampler, check_batch


class Marked(Dataset):
    """Image ``i`` is filled with ``i``; no ``targets``, no ``fetch``."""

    def __init__(self, labels):
        self.marks = list(labels)
        self.reads = 0

    def __len__(self):
        return len(self.marks)

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)
        self.reads += 1
        return torch.full((1, 2, 2), float(index)), self.marks[index]


class Fetching(Marked):
    """The same with ``targets`` and ``fetch``; items must not be read."""

    @property
    def targets(self):
        return torch.tensor(self.marks)

    def fetch(self, indices):
        return torch.as_tensor(indices).float().view(-1, 1, 1, 1).expand(-1, 1, 2, 2)

    def __getitem__(self, index):
        raise AssertionError("items were read although there is fetch")


def labels_of(classes, per_class):
    return np.tile(np.arange(classes), per_class) + 3  # ids need not begin at 0


def same(left, right):
    return all(
        a.classes == b.classes
        and torch.equal(a.images, b.images)
        and torch.equal(a.labels, b.labels)
        for a, b in zip(left, right, strict=True)
    )


sizes = st.tuples(st.integers(2, 9), st.integers(1, 5)).flatmap(
    lambda size: st.fixed_dictionaries(
        {
            "classes": st.just(size[0]),
            "per_class": st.just(size[1]),
            "ways": st.integers(2, size[0]),
            "shots": st.integers(1, size[1]),
            "seed": st.integers(0, 1000),
            "n": st.integers(1, 6),
        }
    )
)


def sampler_of(size, kind=Fetching):
    data = kind(labels_of(size["classes"], size["per_class"]))
    return TaskSampler(data, size["ways"], size["shots"], seed=size["seed"])


@given(sizes)
@settings(deadline=None)
def test_tasks_are_disjoint_and_balanced_without_repeats(size):
    sampler = sampler_of(size)
    tasks = sampler.tasks(size["n"])
    assert len(tasks) == size["n"]
    whole = size["classes"] // size["ways"]
    for start in range(0, len(tasks), whole):
        used = [c for task in tasks[start : start + whole] for c in task.classes]
        assert len(set(used)) == len(used)
    for task in tasks:
        assert task.images.shape == (size["ways"] * size["shots"], 1, 2, 2)
        assert task.labels.dtype == torch.int64
        assert task.labels.bincount().tolist() == [size["shots"]] * size["ways"]
        indices = task.images[:, 0, 0, 0].long().tolist()
        assert len(set(indices)) == len(indices)
        ids = [sampler.dataset.marks[i] for i in indices]
        assert ids == [task.classes[label] for label in task.labels.tolist()]


@given(sizes, st.integers(0, 3))
@settings(deadline=None)
def test_tasks_follow_from_seed_and_call_and_resume(size, calls):
    first, second = sampler_of(size), sampler_of(size)
    for _ in range(calls):
        assert same(first.tasks(size["n"]), second.tasks(size["n"]))
    state = json.loads(json.dumps(first.state_dict()))
    expected = first.tasks(size["n"])
    resumed = sampler_of(size)
    resumed.load_state_dict(state)
    assert same(resumed.tasks(size["n"]), expected)
    assert same(resumed.sample(calls, size["n"]), expected)
    assert resumed.iteration == calls + 1


@given(sizes)
@settings(deadline=None)
def test_scanned_and_fetched_datasets_give_the_same_tasks(size):
    assert same(sampler_of(size, Marked).tasks(2), sampler_of(size).tasks(2))


def test_calls_seeds_and_orders_differ():
    data = Fetching(labels_of(12, 6))
    sampler = TaskSampler(data, 5, 4, seed=0)
    first, second = sampler.tasks(1), sampler.tasks(1)
    other = TaskSampler(data, 5, 4, seed=1).tasks(1)
    assert not same(first, second)
    assert not same(first, other)
    drawn = [task for _ in range(5) for task in sampler.tasks(2)]
    assert any(list(task.classes) != sorted(task.classes) for task in drawn)
    assert any(task.labels.tolist() != sorted(task.labels.tolist()) for task in drawn)


def test_all_classes_come_round():
    sampler = TaskSampler(Fetching(labels_of(7, 2)), 3, 1)
    seen = {c for _ in range(20) for task in sampler.tasks(1) for c in task.classes}
    assert seen == set(range(3, 10))
    assert sampler.num_classes == 7


def test_global_generators_are_left_alone():
    before = torch.get_rng_state()
    TaskSampler(Fetching(labels_of(4, 4)), 2, 2).tasks(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_labels_are_scanned_once():
    data = Marked(labels_of(4, 5))
    sampler = TaskSampler(data, 2, 1)
    assert data.reads == 20
    sampler.tasks(3)
    assert data.reads == 20 + 3 * 2


def test_transform_gets_the_batch_and_a_seeded_generator():
    def noise(images, generator):
        assert images.shape == (4, 1, 2, 2)
        return images + torch.rand(images.shape, generator=generator)

    data = Fetching(labels_of(4, 5))
    first, again, plain = (
        TaskSampler(data, 2, 2, transform=t).tasks(2) for t in (noise, noise, None)
    )
    assert same(first, again)
    assert not torch.equal(first[0].images, plain[0].images)
    assert first[0].classes == plain[0].classes


def test_subset_of_a_fetching_dataset_is_fetched():
    data = Fetching(labels_of(4, 5))
    part = Subset(data, [i for i in range(20) if data.marks[i] != 4])
    sampler = TaskSampler(part, 3, 5)
    (task,) = sampler.tasks(1)
    assert sorted(task.classes) == [3, 5, 6]
    assert {data.marks[int(i)] for i in task.images[:, 0, 0, 0]} == {3, 5, 6}


def test_target_transform_is_honoured():
    data = Marked([5, 6] * 3)
    data.targets = [0, 1] * 3  # before the transform, as torchvision keeps them
    data.target_transform = lambda label: label + 5
    assert sorted(TaskSampler(data, 2, 1).tasks(1)[0].classes) == [5, 6]


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1, 0, 1],
        (0, 1, 0, 1),
        np.array([0, 1, 0, 1], dtype=np.uint8),
        torch.tensor([0, 1, 0, 1]),
    ],
)
def test_labels_of_every_container(labels):
    data = Marked([9, 9, 9, 9])
    data.labels = labels
    assert TaskSampler(data, 2, 2).num_classes == 2


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "options", "named"),
    [
        ([], {}, "empty"),
        ([0.0, 1.0], {}, "labels are float"),
        (["a", "b"], {}, "labels are <U1"),
        ([True, False], {}, "labels are bool"),
        ([[0, 1], [1, 0]], {}, r"shape \(2, 2\)"),
        ([0, [1, 0]], {}, "cannot be read"),
        ([0, 1, -1], {}, "label -1 at position 2"),
        ([4, 4, 4], {}, "all labels are 4"),
        ([0, 1], {"ways": 3, "shots": 1}, "ways is 3 and the dataset has 2 classes"),
        ([0, 1], {"ways": 1, "shots": 1}, "ways 1"),
        ([0, 1], {"ways": 2, "shots": 0}, "shots 0"),
        ([0, 1], {"ways": 2, "shots": 1, "seed": -1}, "seed -1"),
        ([0, 0, 7], {"ways": 2, "shots": 2}, "class 7 has 1 images and shots is 2; use shots up"),
    ],
)
def test_sampler_refuses_at_once(labels, options, named):
    with pytest.raises(DataError, match=named):
        TaskSampler(Marked(labels), **options)


def test_sampler_refuses_what_is_not_a_dataset():
    with pytest.raises(DataError, match="list is not a map-style dataset"):
        TaskSampler([1, 2])
    with pytest.raises(DataError, match=r"give \(image, label\) pairs"):
        TaskSampler(TensorDataset(torch.zeros(3, 1)))


def test_zero_tasks_are_refused():
    with pytest.raises(DataError, match="0 tasks"):
        TaskSampler(Marked([0, 1]), 2, 1).tasks(0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_images_that_are_not_finite_are_named(value):
    images = torch.zeros(8, 3, 4, 4)
    images[5, 2, 1, 0] = value
    sampler = TaskSampler(TensorDataset(images, torch.arange(8) % 2), 2, 4)
    with pytest.raises(DataError, match=r"class 1 at dataset indices \[5\]"):
        sampler.tasks(1)


def test_transform_that_breaks_images_is_named():
    sampler = TaskSampler(Marked([0, 1]), 2, 1, transform=lambda images, _: images / 0)
    with pytest.raises(DataError, match="after transform"):
        sampler.tasks(1)


class Ragged(Marked):
    def __getitem__(self, index):
        return torch.zeros(1, 2, 2 + index), self.marks[index]


class Pictures(Marked):
    def __getitem__(self, index):
        return np.zeros((2, 2)), self.marks[index]


class Bytes(Marked):
    def __getitem__(self, index):
        return torch.zeros(1, 2, 2, dtype=torch.uint8), self.marks[index]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Ragged, r"image \d has shape .* resize them"),
        (Pictures, r"image \d is ndarray; .*ToTensor"),
        (Bytes, "images are torch.uint8"),
    ],
)
def test_items_that_do_not_stack_are_named(kind, named):
    with pytest.raises(DataError, match=named):
        TaskSampler(kind([0, 1]), 2, 1).tasks(1)


def test_state_of_other_settings_is_refused():
    data = Marked([0, 1, 0, 1])
    state = TaskSampler(data, 2, 1).state_dict()
    with pytest.raises(DataError, match="has shots 1 and this source 2"):
        TaskSampler(data, 2, 2).load_state_dict(state)
    with pytest.raises(DataError, match="has kind 'TaskSampler'"):
        LoaderTasks([data]).load_state_dict(state)
    with pytest.raises(DataError, match="iteration -1"):
        TaskSampler(data, 2, 1).load_state_dict({**state, "iteration": -1})
    with pytest.raises(DataError, match="iteration None"):
        TaskSampler(data, 2, 1).load_state_dict(
            {k: v for k, v in state.items() if k != "iteration"}
        )


# -- minibatches ------------------------------------------------------------------------------


@given(count=st.integers(1, 60), size=st.integers(1, 70))
@settings(deadline=None)
def test_minibatches_cover_the_task_in_order(count, size):
    task = Task(torch.arange(count).view(-1, 1, 1, 1).float(), torch.arange(count), (0, 1))
    parts = list(task.minibatches(size))
    assert torch.equal(torch.cat([x for x, _ in parts]), task.images)
    assert torch.equal(torch.cat([y for _, y in parts]), task.labels)
    lengths = [len(y) for _, y in parts]
    assert all(length == size for length in lengths[:-1])
    if len(lengths) > 1:
        assert size / 2 <= lengths[-1] < 1.5 * size
    else:
        assert count < 1.5 * size


def test_minibatches_refuse_size_zero():
    task = TaskSampler(Marked([0, 1]), 2, 1).tasks(1)[0]
    with pytest.raises(DataError, match="size is 0"):
        next(task.minibatches(0))
    assert len(task) == task.ways == 2
    assert same([task.to("cpu")], [task])


# -- loaders ----------------------------------------------------------------------------------


def sources():
    """Three tasks of different classes: two datasets, and a loader with reversed order."""
    data = [Marked([10 * k, 10 * k + 1, 10 * k + 1, 10 * k]) for k in range(1, 4)]
    return [data[0], data[1], DataLoader(data[2], 3)]


def test_each_cycle_gives_every_source_once():
    loaders = LoaderTasks(sources(), seed=1)
    assert loaders.num_classes == 6
    orders = set()
    for _ in range(6):
        cycle = loaders.tasks(3)
        tens = [task.classes[0] // 10 for task in cycle]
        assert sorted(tens) == [1, 2, 3]
        orders.add(tuple(tens))
        for task in cycle:
            assert sorted(task.labels.tolist()) == [0, 0, 1, 1]
            k = task.classes[0] // 10
            truth = [10 * k, 10 * k + 1, 10 * k + 1, 10 * k]
            ids = [truth[int(i)] for i in task.images[:, 0, 0, 0]]
            assert ids == [task.classes[label] for label in task.labels.tolist()]
    assert len(orders) > 1


@given(split=st.integers(1, 7), seed=st.integers(0, 50))
@settings(deadline=None, max_examples=25)
def test_loader_tasks_are_fixed_by_the_seed_and_resume(split, seed):
    first = LoaderTasks(sources(), 1, seed=seed)
    whole = first.tasks(9)
    second = LoaderTasks(sources(), 1, seed=seed)
    head = second.tasks(split)
    third = LoaderTasks(sources(), 1, seed=seed)
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    assert same(head + third.tasks(9 - split), whole)


def test_shots_limit_datasets_and_loaders_and_end_the_pass_early():
    data = Marked([0, 1] * 10)
    for source in (data, DataLoader(data, 4)):
        task = LoaderTasks([source], shots=2).tasks(1)[0]
        assert task.labels.bincount().tolist() == [2, 2]
    loaders = LoaderTasks([DataLoader(data, 4)], shots=2)
    before = data.reads
    loaders.tasks(1)
    assert data.reads - before == 4


def test_lists_of_batches_are_loaders():
    batch = (torch.rand(4, 1, 2, 2), torch.tensor([5, 5, 8, 8]))
    assert sorted(LoaderTasks([[batch, batch]]).tasks(1)[0].classes) == [5, 8]


@pytest.mark.parametrize(
    ("given_sources", "named"),
    [
        ([], "0 sources"),
        ([Marked([0, 1]), Marked([2, 2])], "source 1: all labels are 2"),
        ([Marked([0, 1]), Marked([])], "source 1: the dataset is empty"),
        ([Marked([0, 1]), 5], "source 1: int is neither"),
        ([[]], "source 0: the loader gives no batches"),
        ([[torch.zeros(2)]], r"source 0: an item is Tensor; give \(image, label\)"),
        ([[(torch.zeros(1, 1, 2, 2), torch.tensor([0.5]))]], "labels are float32"),
    ],
)
def test_loader_tasks_refuse(given_sources, named):
    with pytest.raises(DataError, match=named):
        LoaderTasks(given_sources)


def test_loader_images_are_checked():
    images = torch.zeros(4, 1, 2, 2)
    images[3] = float("nan")
    labels = torch.tensor([0, 1, 0, 1])
    with pytest.raises(DataError, match="source 0: 1 of 4 images hold NaN"):
        LoaderTasks([[(images, labels)]]).tasks(1)
    with pytest.raises(DataError, match=r"source 0.*class 1 at dataset indices \[3\]"):
        LoaderTasks([TensorDataset(images, labels)]).tasks(1)


class Drying:
    """A loader whose later passes give one class only."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        labels = [0, 1] if self.passes == 1 else [0, 0]
        yield torch.zeros(2, 1, 2, 2), torch.tensor(labels)


def test_loader_that_loses_its_classes_is_named():
    with pytest.raises(DataError, match="this pass of the loader gave fewer than two classes"):
        LoaderTasks([Drying()]).tasks(1)


# -- dispatch ---------------------------------------------------------------------------------


def test_dispatch_passes_sources_of_tasks_through():
    sampler = TaskSampler(Marked([0, 1]), 2, 1)
    loaders = LoaderTasks([Marked([0, 1])])
    assert as_sampler(sampler) is sampler
    assert as_sampler(loaders) is loaders


def test_dispatch_takes_datasets_and_lists():
    sampler = as_sampler(Fetching(labels_of(12, 2)), shots=2, seed=4)
    assert isinstance(sampler, TaskSampler)
    assert (sampler.ways, sampler.shots, sampler.seed) == (10, 2, 4)
    assert isinstance(as_sampler(sources()), LoaderTasks)
    assert isinstance(as_sampler(tuple(sources())), LoaderTasks)


def test_dispatch_lowers_ways_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="stamppruner"):
        sampler = as_sampler(Fetching(labels_of(4, 2)), shots=2)
    assert sampler.ways == 4
    assert "4 classes" in caplog.text


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    "wrong", [None, 3, "cifar", torch.zeros(3), {"a": 1}, Stream(), DataLoader(Marked([0, 1]))]
)
def test_dispatch_refuses_other_things(wrong):
    with pytest.raises(DataError, match=f"{type(wrong).__name__} is not a source of tasks"):
        as_sampler(wrong)


def test_dispatch_reports_a_single_class_and_an_empty_dataset():
    with pytest.raises(DataError, match="all labels are 1"):
        as_sampler(Marked([1, 1]))
    with pytest.raises(DataError, match="empty"):
        as_sampler(Marked([]))


# -- check_batch ------------------------------------------------------------------------------

IMAGES = torch.zeros(2, 3, 4, 4)
LABELS = torch.tensor([0, 4])


@pytest.mark.parametrize("images", [IMAGES, IMAGES.half(), IMAGES.double(), IMAGES.bfloat16()])
def test_good_batches_pass(images):
    check_batch(images)
    check_batch(images, LABELS, channels=3, num_classes=5)
    check_batch(images, LABELS.to(torch.uint8))


@pytest.mark.parametrize(
    ("images", "labels", "options", "named"),
    [
        (IMAGES.long(), None, {}, "images are torch.int64"),
        (np.zeros((2, 3, 4, 4)), None, {}, "images are ndarray"),
        (IMAGES[0], None, {}, r"shape \(3, 4, 4\)"),
        (IMAGES[:0], None, {}, r"shape \(0, 3, 4, 4\)"),
        (IMAGES, None, {"channels": 1}, "3 channels and the model reads 1"),
        (IMAGES.log(), None, {}, r"2 of 2 images hold NaN or Inf, first at positions \[0, 1\]"),
        (IMAGES.to_sparse(), None, {}, "images are a sparse_coo tensor"),
        (IMAGES.to("meta"), None, {}, "images are on the meta device"),
        (IMAGES, LABELS.to_sparse(), {}, "labels are a sparse_coo tensor"),
        (IMAGES, LABELS.to("meta"), {}, "labels are on the meta device"),
        (IMAGES, LABELS.float(), {}, "labels are torch.float32"),
        (IMAGES, LABELS.bool(), {}, "labels are torch.bool"),
        (IMAGES, [0, 1], {}, "labels are list"),
        (IMAGES, LABELS[:1], {}, r"labels have shape \(1,\)"),
        (IMAGES, LABELS[:, None], {}, r"labels have shape \(2, 1\)"),
        (IMAGES, -LABELS, {}, r"labels span -4\.\.0"),
        (IMAGES, LABELS, {"num_classes": 4}, r"labels span 0\.\.4; they must lie in 0\.\.3"),
    ],
)
def test_bad_batches_are_refused(images, labels, options, named):
    with pytest.raises(DataError, match=f"target loader: .*{named}"):
        check_batch(images, labels, where="target loader", **options)


def test_minibatches_of_all_classes_follow_from_seed_and_step() -> None:
    images = torch.arange(60.0).view(60, 1, 1, 1)
    labels = torch.arange(60) % 5 + 2  # classes 2 .. 6
    sampler = TaskSampler(TensorDataset(images, labels), 2, 4, seed=1)
    x, y = sampler.minibatch(0, 400)
    assert x.shape == (400, 1, 1, 1)
    assert torch.equal(labels[x.flatten().long()], y)
    assert sorted(set(y.tolist())) == [2, 3, 4, 5, 6]
    assert torch.bincount(y)[2:].min() > 50
    assert torch.equal(sampler.minibatch(0, 400)[0], x)
    assert not torch.equal(sampler.minibatch(1, 400)[0], x)
    assert sampler.iteration == 0


def test_minibatches_are_transformed_like_tasks() -> None:
    data = TensorDataset(torch.ones(20, 1, 2, 2), torch.arange(20) % 2)
    sampler = TaskSampler(data, 2, 4, transform=lambda x, _g: 3 * x)
    assert float(sampler.minibatch(0, 6)[0].min()) == 3
