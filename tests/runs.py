"""Small meta-fits of all that has a state: dropout, transforms, both phases and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from stripes import dataset, vgg
from torch import Tensor, nn

from stamppruner import STAMPConfig, STAMPPruner, TaskSampler

CONFIG = STAMPConfig(
    iterations=6, tasks_per_iteration=3, ways=3, shots=8, minibatch_size=8, budget_share=0.5,
    weight_steps=2, weight_batch=12, seed=3,
)  # fmt: skip


def model() -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.1), vgg())


def noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    return images + 0.1 * torch.randn(images.shape, generator=generator)


def sampler() -> TaskSampler:
    return TaskSampler(dataset(16), 3, 8, seed=1, transform=noisy)


def fitted(config: STAMPConfig = CONFIG, **settings: Any) -> STAMPPruner:
    settings = {"progress": False} | settings
    return STAMPPruner(model(), torch.zeros(1, 3, 8, 8), config=config).meta_fit(
        sampler(), **settings
    )


def state(pruner: STAMPPruner) -> dict[str, Tensor]:
    """All that was learned, with the history."""
    net = pruner._gated()
    parts = {"model": net.model, "posterior": net.posterior, "encoder": net.encoder}
    found = {f"{p}.{n}": t.clone() for p, m in parts.items() for n, t in m.state_dict().items()}
    rows = [[row[name] for name in sorted(row)] for row in pruner.history]
    return found | {"history": torch.tensor(rows, dtype=torch.float64)}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def distance(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name].double() - two[name].double()).abs().max()) for name in one)
