"""Meta-fitting on several ranks gives what one process gives; failures are those of all."""

from __future__ import annotations

import dataclasses
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from stripes import dataset, stripes, vgg
from test_ranks import failure
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F

from stamppruner import STAMPConfig, STAMPPruner, TaskSampler, finetune, ranks
from stamppruner.errors import DataError
from stamppruner.finetune import warm_cosine
from stamppruner.shared_batch import shared_batch

LONG = STAMPConfig(
    iterations=20, tasks_per_iteration=3, ways=3, shots=8, minibatch_size=8, budget_share=0.5,
    weight_steps=2, weight_batch=13, seed=3,
)  # fmt: skip
SHORT = dataclasses.replace(LONG, iterations=4)


CONFIGS = {
    "parts": dataclasses.replace(LONG, weight_parts=4),
    "shared": dataclasses.replace(LONG, theta_lr=0.0),
}


def learned(config: STAMPConfig, **settings: Any) -> dict[str, torch.Tensor]:
    pruner = STAMPPruner(vgg(), torch.zeros(1, 3, 8, 8), config=config)
    source = TaskSampler(dataset(16), 3, 8, seed=1)
    return runs.state(pruner.meta_fit(source, progress=False, **settings))


class Torn(torch.utils.data.Dataset):
    """Images that one rank cannot read, from some item on."""

    def __init__(self, rank: int, good: int) -> None:
        self.data, self.bad, self.left = dataset(16), rank == 1, good
        self.targets = self.data.tensors[1]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if self.bad and self.left < 0:
            raise DataError("the disk is gone")
        return self.data[index]


def torn(rank: int, good: int) -> None:
    config = dataclasses.replace(SHORT, warm_start=False)
    pruner = STAMPPruner(vgg(), torch.zeros(1, 3, 8, 8), config=config)
    pruner.meta_fit(TaskSampler(Torn(rank, good), 3, 8), progress=False)


def norms() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8, affine=False), nn.Flatten(), nn.Linear(128, 8), nn.BatchNorm1d(8),
    )  # fmt: skip
    return net.train(), 50 + 3 * torch.randn(13, 3, 8, 8), torch.randint(0, 8, (13,))


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def work(rank: int, number: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=number
    )
    found: dict[str, Any] = {name: learned(config) for name, config in CONFIGS.items()}
    if number == 2:
        found |= on_two(rank, folder)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def on_two(rank: int, folder: str) -> dict[str, Any]:
    points, terms = f"{folder}/points", f"{folder}/terms"
    bad = dataclasses.replace(SHORT, weight_lr=1e30)
    often = {"checkpoint_minutes": 0, "keep": 1}
    net, x, y = norms()
    own = ranks.part(len(y))
    with shared_batch(net):
        (F.cross_entropy(net(x[own]), y[own], reduction="sum") / len(y)).backward()
    ranks.sum_(gradients(net))
    return {
        "norms": gradients(net),
        "forwards": [name for name, m in net.named_modules() if "forward" in m.__dict__],
        "stopped": failure(lambda: parts(checkpoint_dir=points, callback=stop(1, rank), **often)),
        "files": sorted(path.name for path in Path(points).iterdir()),
        "resumed": runs.state(parts(checkpoint_dir=points)),
        "term": failure(lambda: parts(checkpoint_dir=terms, callback=term(1, rank))),
        "logs": runs.state(parts(log_dir=f"{folder}/logs")),
        "workers": runs.state(parts(num_workers=2)),
        "offload": runs.state(parts(offload=f"{folder}/rests{rank}")),
        "errors": {
            "tasks": failure(lambda: torn(rank, 20)),
            "minibatch": failure(lambda: torn(rank, 36)),
            "settings": failure(lambda: learned(dataclasses.replace(SHORT, seed=rank))),
            "checkpoints": failure(lambda: learned(SHORT, checkpoint_dir=points)),
            "nan": failure(lambda: learned(bad, max_skipped=3)),
        },
        "after": learned(SHORT),
        "tuned": tuned(rank),
    }


def parts(**settings: Any) -> STAMPPruner:
    return runs.fitted(dataclasses.replace(runs.CONFIG, weight_parts=2), **settings)


def stop(at: int, rank: int) -> Any:
    """Fails on one rank alone."""

    def callback(iteration: int, _figures: dict[str, float]) -> None:
        if iteration == at and rank == 1:
            raise DataError("enough")

    return callback


def term(at: int, rank: int) -> Any:
    """SIGTERM comes to one rank alone."""

    def callback(iteration: int, _figures: dict[str, float]) -> None:
        if iteration == at and rank == 1:
            signal.raise_signal(signal.SIGTERM)

    return callback


def tuned(rank: int) -> dict[str, Any]:
    """Fine-tuning with loaders of other lengths on other ranks."""
    images, labels = stripes(16)
    own = slice(0, 64) if rank == 0 else slice(64, 96)
    batches = list(zip(images[own].split(16), labels[own].split(16), strict=True))
    model = vgg(seed=rank)
    history = finetune(model, batches, epochs=3, lr=0.05, progress=False)
    return {"state": model.state_dict(), "history": history.rows}


@pytest.fixture(scope="module", params=[2, 4])
def several(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(2, tmp_path_factory)


_SPAWNED: dict[int, list[dict[str, Any]]] = {}


def spawned(number: int, factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of so many processes found; they run once."""
    if number not in _SPAWNED:
        folder = factory.mktemp(f"ranks{number}")
        multiprocessing.spawn(work, (number, str(folder)), nprocs=number)
        found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(number)]
        _SPAWNED[number] = [{**one, "folder": str(folder)} for one in found]
    return _SPAWNED[number]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: learned(config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("which", CONFIGS)
def test_ranks_learn_what_one_process_learns(several: Any, alone: Any, which: str) -> None:
    """After 20 iterations: bit for bit where tasks and parts are spread, else but for rounding."""
    for found in several:
        assert runs.same(found[which], several[0][which])
    if which == "shared":
        assert runs.distance(several[0][which], alone[which]) < 1e-5
    else:
        assert runs.same(several[0][which], alone[which])
    start = runs.state(STAMPPruner(vgg(), torch.zeros(1, 3, 8, 8), config=LONG))
    weight = "model.features.0.weight"
    assert float((alone[which][weight] - start[weight]).abs().max()) > 1e-3


def test_batch_norms_of_a_shared_batch_are_those_of_the_whole(two: Any) -> None:
    net, x, y = norms()
    F.cross_entropy(net(x), y).backward()
    for found in two:
        assert found["forwards"] == []
        for mine, wanted in zip(found["norms"], gradients(net), strict=True):
            assert torch.allclose(mine, wanted, rtol=1e-4, atol=1e-5)
    assert sum(float(g.abs().max()) > 1e-2 for g in gradients(net)) > 4


def test_a_run_on_two_ranks_goes_on_there_and_in_one_process(two: Any, tmp_path: Path) -> None:
    wanted = runs.state(parts())
    for rank, found in enumerate(two):
        assert found["stopped"][0] == ("RankError", "DataError")[rank]
        assert "enough" in found["stopped"][1]
        assert found["files"] == ["meta-fit-00000001.safetensors"]
        assert runs.same(found["resumed"], wanted)
        assert found["term"][0] == "PreemptedError"
        assert "after 2 of 6 iterations" in found["term"][1]
    points = shutil.copytree(f"{two[0]['folder']}/terms", tmp_path / "terms")
    assert [path.name for path in points.iterdir()] == ["meta-fit-00000002.safetensors"]
    assert runs.same(runs.state(parts(checkpoint_dir=points)), wanted)


@pytest.mark.parametrize("how", ["workers", "offload"])
def test_workers_and_places_change_nothing_on_two_ranks(two: Any, how: str) -> None:
    wanted = runs.state(parts())
    for found in two:
        assert runs.same(found[how], wanted)


def test_rank_0_writes_the_log(two: Any) -> None:
    lines = Path(two[0]["folder"], "logs", "meta-fit.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["iteration", *map(str, range(6))]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("settings", "RankError", "rank 1 has settings"),
        ("nan", "DivergedError", "lower weight_lr"),
    ],
)
def test_what_all_ranks_see_is_an_error_on_all(two: Any, name: str, kind: str, text: str) -> None:
    for found in two:
        assert found["errors"][name][0] == kind
        assert text in found["errors"][name][1]


@pytest.mark.parametrize(
    ("name", "rank", "kind", "text"),
    [
        ("tasks", 1, "DataError", "the disk is gone"),
        ("minibatch", 1, "DataError", "the disk is gone"),
        ("checkpoints", 0, "CheckpointError", "is of another run"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(
    two: Any, name: str, rank: int, kind: str, text: str
) -> None:
    own, other = two[rank]["errors"][name], two[1 - rank]["errors"][name]
    assert own[0] == kind
    assert other[0] == "RankError"
    assert text in own[1]
    assert f"rank {rank}: {kind}" in other[1]


def test_ranks_go_on_together_after_errors(two: Any) -> None:
    assert runs.same(two[0]["after"], two[1]["after"])


def test_fine_tuning_is_one_over_the_batches_of_all_ranks(two: Any) -> None:
    """Rank 0 has four batches, rank 1 two."""
    one, other = (found["tuned"] for found in two)
    assert all(torch.equal(one["state"][name], t) for name, t in other["state"].items())
    assert one["history"] == other["history"]
    assert one["history"][-1]["accuracy"] > one["history"][0]["accuracy"]
    by_hand = vgg(seed=0)
    optimizer = torch.optim.SGD(
        by_hand.parameters(), 0.05, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    by_hand.train()
    images, labels = stripes(16)
    pairs = [[slice(16 * n, 16 * n + 16), slice(64 + 16 * n, 80 + 16 * n)] for n in range(4)]
    for step in range(12):
        optimizer.param_groups[0]["lr"] = 0.05 * warm_cosine(step / 12, 0.1)
        optimizer.zero_grad()
        own = pairs[step % 4][: 1 + (step % 4 < 2)]
        for rows in own:
            loss = F.cross_entropy(by_hand(images[rows]), labels[rows], reduction="sum")
            (loss / (16 * len(own))).backward()
        optimizer.step()
    for name, p in by_hand.named_parameters():
        assert torch.allclose(p, one["state"][name], atol=1e-5), name
