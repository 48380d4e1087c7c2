"""Pruning on two ranks (27): one sample, one plan, one slim network, and failures for all."""

from __future__ import annotations

import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stripes import resnet, stripes, vgg
from torch import distributed as dist
from torch import multiprocessing
from torch.utils.data import DataLoader, TensorDataset

from stamppruner import Budget, STAMPConfig, STAMPPruner, evaluate, ranks
from stamppruner.baselines import Taylor
from stamppruner.errors import DataError

RANKS = 2
HALF = Budget(macs=0.5)
CONFIG = STAMPConfig(measure_latency=False)


def part(rank: int, number: int = 0) -> DataLoader:
    """This rank's images: classes and numbers of images differ from rank to rank."""
    images, labels = stripes(12 + 4 * rank, seed=rank + number)
    own = labels // 3 == rank  # 0, 1, 2 on rank 0, and 3, 4, 5 on rank 1
    return DataLoader(TensorDataset(images[own], labels[own]), batch_size=8)


def stamp(data: Any, budget: Budget = HALF, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return STAMPPruner(resnet(), config=CONFIG, **settings).prune(data, budget, progress=False)


def sweep(data: Any, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner = STAMPPruner(resnet(), config=CONFIG)
        return pruner.pareto(data, [HALF, 0.3], progress=False, **settings).results


def facts(result: Any) -> dict[str, Any]:
    model = result.model
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    return {
        "kept": result.plan.record(),
        "tensors": tensors,
        "ranks": result.report.settings.get("ranks"),
        "accuracy": evaluate(model, [stripes(8, seed=7)]),
    }


def failure(action: Any) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def work(rank: int, folder: str) -> None:
    """What each of the processes does."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    data = part(rank)
    target = ranks.sample_target(data, 60)
    whole = stripes(8, seed=2)
    halved = Budget(macs=0.5 - 0.2 * rank)
    protect = ["stages.0.0.conv1"] * rank
    ones = torch.ones(3, 3, 4, 4)
    wide = [(ones[:, :, : 4 - rank], torch.tensor([0, 1, 0]))]
    single = [(ones, torch.zeros(3, dtype=torch.int64))]
    found = {
        "target": (target.images, target.labels, target.num_classes, target.num_images),
        "mean": ranks.mean(np.array([1.0, 2.0]) * (rank + 1)).tolist(),
        "sums": summed(rank),
        "aliased": aliased(rank),
        "any": [ranks.any_of(flag) for flag in (False, rank == 1, True)],
        "stamp": facts(stamp(data)),
        "taylor": facts(Taylor(measure_latency=False, seed=rank).prune(vgg(seed=rank), data, HALF)),
        "timed": facts(stamp(data, Budget(latency_ms=1e4, macs=0.5))),
        "pareto": [facts(result) for result in sweep(data)],
        "tuned": failure(lambda: sweep(data, finetune={"epochs": 1})),
        "errors": {
            "empty": failure(lambda: stamp(data if rank == 0 else [])),
            "budgets": failure(lambda: stamp([whole], halved)),
            "models": failure(lambda: stamp([whole], protect=protect)),
            "shapes": failure(lambda: ranks.sample_target(wide, 9)),
            "single": failure(lambda: ranks.sample_target(single, 9)),
            "late": failure(lambda: late(rank)),
            "reach": failure(lambda: stamp(data, Budget(macs=1e-5))),
            "fast": failure(lambda: stamp(data, Budget(latency_ms=1e-9))),
        },
        "after": facts(stamp(data))["kept"],
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def numbers(rank: int) -> list[torch.Tensor]:
    """Few and many, of two types, and some that are large; one is not contiguous."""
    generator = torch.Generator().manual_seed(rank)
    shapes: list[tuple[int, ...]] = [(), (3, 4), (0,), (1000,), (2**9, 2**10), (2**19,), (5,)]
    kinds = (torch.float32, torch.float64)
    found = [torch.randn(s, generator=generator, dtype=k) for s in shapes for k in kinds]
    return [*found, found[8].clone().T]


def summed(rank: int) -> list[torch.Tensor]:
    found = numbers(rank)
    ranks.sum_(found)
    few = numbers(rank)[:1]
    ranks.sum_(few)
    return [*found, *few]


def aliased(rank: int) -> list[torch.Tensor]:
    """Large ones in one memory, and one that is read with the other sign."""
    large = numbers(rank)[8]
    twice, flat, negative = large.clone(), large.clone(), torch._neg_view(large.clone())
    tensors = [twice, twice, flat, flat.view(-1), negative]
    ranks.sum_(tensors)
    return [twice, flat, negative.resolve_neg()]


@ranks.together()
def late(rank: int) -> None:
    """Fails on rank 0 after the last message."""
    ranks.mean(np.ones(2))
    if rank == 0:
        raise DataError("too late")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(work, (str(folder),), nprocs=RANKS)
    return [read(folder / f"{rank}.pt") for rank in range(RANKS)]


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("method", ["stamp", "taylor", "timed"])
def test_27_all_ranks_get_the_same_plan_and_network(found: Any, method: str) -> None:
    one, two = (f[method] for f in found)
    assert one["kept"] == two["kept"]
    assert one["tensors"].keys() == two["tensors"].keys()
    for name, tensor in one["tensors"].items():
        assert torch.equal(tensor, two["tensors"][name]), name
    assert one["ranks"] == two["ranks"] == RANKS
    assert sum(len(kept) for kept in one["kept"].values()) > 8
    assert any(name.endswith("running_mean") for name in one["tensors"])


def test_27_several_networks_of_one_scoring_are_those_of_all_ranks(found: Any) -> None:
    one, two = (f["pareto"] for f in found)
    assert one[0]["kept"] == found[0]["stamp"]["kept"]
    assert one[1]["kept"] != one[0]["kept"]
    for mine, others in zip(one, two, strict=True):
        assert mine["kept"] == others["kept"]
        assert all(torch.equal(t, others["tensors"][name]) for name, t in mine["tensors"].items())
    for kind, text in (f["tuned"] for f in found):
        assert kind == "ConfigError"
        assert "in one process" in text


def test_27_the_network_knows_the_classes_of_all_ranks(found: Any) -> None:
    """No rank has seen more than half of them."""
    assert found[0]["stamp"]["accuracy"] == found[1]["stamp"]["accuracy"] > 0.6


def test_27_the_pooled_sample_is_a_fair_one_of_all_data(found: Any) -> None:
    (images, labels, classes, number), other = (f["target"] for f in found)
    assert torch.equal(images, other[0])
    assert torch.equal(labels, other[1])
    assert (classes, number) == (6, 36 + 48) == other[2:]
    counts = labels.bincount()
    assert counts[:3].sum() == round(60 * 36 / 84)
    assert counts[3:].sum() == round(60 * 48 / 84)
    assert 0 < int((labels[:30] < 3).sum()) < 26  # mixed
    own = torch.cat([torch.cat([x for x, _ in part(rank)]) for rank in range(RANKS)])
    assert all(any(torch.equal(image, x) for x in own) for image in images)


def test_27_scores_are_averaged(found: Any) -> None:
    assert [f["mean"] for f in found] == [[1.5, 3.0]] * RANKS


def test_sums_are_those_of_all_and_the_same_bits(found: Any) -> None:
    parts = [numbers(rank) for rank in range(RANKS)]
    for one in found:
        for got, first, *own in zip(one["sums"], found[0]["sums"], *parts, strict=False):
            assert torch.equal(got, first)
            assert torch.allclose(got, torch.stack(own).sum(0), atol=1e-5)
        assert torch.equal(one["sums"][-1], one["sums"][0])
        assert one["any"] == [False, True, True]


def test_sums_of_tensors_in_one_memory(found: Any) -> None:
    wanted = torch.stack([numbers(rank)[8] for rank in range(RANKS)]).sum(0)
    for one in found:
        twice, flat, negative = one["aliased"]
        assert torch.allclose(twice, wanted, atol=1e-5)
        assert torch.allclose(flat, wanted, atol=1e-5)
        assert torch.allclose(negative, -wanted, atol=1e-5)


def test_27_what_fails_on_one_rank_fails_on_all(found: Any) -> None:
    (first, second), (late, other) = (
        [f["errors"][name] for f in found] for name in ("empty", "late")
    )
    assert second[0] == "DataError"
    assert first[0] == "RankError"
    assert "rank 1: DataError: the target loader is empty" in first[1]
    assert late == ("DataError", "too late")
    assert other[0] == "RankError"
    assert "rank 0: DataError: too late" in other[1]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("budgets", "RankError", r"ranks \[1\] have other plans than rank 0"),
        ("models", "RankError", r"the ranks score \[\d+, \d+\] channels"),
        ("shapes", "RankError", r"\(3, 4, 4\), \(3, 3, 4\)"),
        ("single", "DataError", "single class 0"),
        ("reach", "BudgetError", "least reachable"),
    ],
)
def test_27_disagreement_is_an_error_on_all(found: Any, name: str, kind: str, text: str) -> None:
    for f in found:
        assert f["errors"][name][0] == kind
        assert re.search(text, f["errors"][name][1])


def test_27_ranks_go_on_together_after_errors(found: Any) -> None:
    assert found[0]["after"] == found[1]["after"] == found[0]["stamp"]["kept"]


def test_alone_nothing_is_exchanged() -> None:
    assert (ranks.count(), ranks.own()) == (1, 0)
    scores = np.ones(3)
    assert ranks.mean(scores) is scores
    with pytest.raises(DataError, match="mine"), ranks.together():
        raise DataError("mine")
    result = stamp([stripes(8)])
    assert "ranks" not in result.report.settings


def test_times_are_measured_by_the_first_rank_alone(found: Any) -> None:
    one, two = (f["errors"]["fast"] for f in found)
    assert one[0] == "BudgetError"
    assert "ms measured" in one[1]
    assert two[0] == "RankError"
    assert "rank 0: BudgetError" in two[1]
