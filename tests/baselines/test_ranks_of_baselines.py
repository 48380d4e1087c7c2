"""Methods that choose weights or search, on two ranks: one result for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from stripes import stripes, vgg
from torch import distributed as dist
from torch import multiprocessing

from stamppruner import Budget
from stamppruner.baselines import SNIP, EdgePopup, MetaPruning, RandomWidths
from stamppruner.zeros import released

QUICK: dict[str, Any] = {"measure_latency": False}
METHODS = {
    "SNIP": (SNIP(**QUICK), Budget(params=0.4)),
    "EdgePopup": (EdgePopup(epochs=1, **QUICK), Budget(params=0.4)),
    "RandomWidths": (RandomWidths(**QUICK), Budget(macs=0.5)),
    "MetaPruning": (
        MetaPruning(epochs=1, population=3, generations=2, reinitialise=False, **QUICK),
        Budget(macs=0.5),
    ),
}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    images, labels = stripes(10 + 6 * rank, seed=rank)
    found = {}
    for name, (method, budget) in METHODS.items():
        result = method.prune(vgg(), [(images, labels)], budget)
        found[name] = (result.plan.record(), released(result.model).state_dict())
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_all_ranks_get_the_same_network(tmp_path: Path) -> None:
    multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name in METHODS:
        assert one[name][0] == two[name][0], name
        states = one[name][1], two[name][1]
        assert all(torch.equal(states[0][k], states[1][k]) for k in states[0]), name
