"""A U-Net for segmentation, with a loss, scores and a training loop of its own.

    python examples/segmentation.py            # minutes on two cores
    python examples/segmentation.py --tiny

No classifier, so the tools underneath do it: ``trace_channels`` finds the channels of any network,
``taylor_scores`` scores them by any loss, ``Chooser`` meets a budget, ``shrink`` cuts and proves.
The images are bright discs on a noisy ground, made here; the mask is where the disc is.
"""

import torch
from common import options
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner import Budget, check_equivalence, load_slim, shrink, trace_channels
from stamppruner.budget import Chooser
from stamppruner.slim import save_slim
from stamppruner.taylor import relative_to_group, taylor_scores


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Two levels down, two up, with concatenated shortcuts: ``(B, 1, H, W)`` logits."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down1, self.down2 = block(3, width), block(width, 2 * width)
        self.middle = block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        deep = self.middle(F.max_pool2d(two, 2))
        two = self.up2(torch.cat([F.interpolate(deep, scale_factor=2), two], 1))
        return self.out(self.up1(torch.cat([F.interpolate(two, scale_factor=2), one], 1)))


def discs(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images ``(N, 3, H, W)`` and masks ``(N, 1, H, W)`` of zeros and ones."""
    place = torch.rand(count, 2, 1, 1, generator=generator) * 0.6 + 0.2
    radius = torch.rand(count, 1, 1, generator=generator) * 0.15 + 0.08
    grid = torch.stack(torch.meshgrid(*[torch.linspace(0, 1, size)] * 2, indexing="ij"))
    masks = ((grid - place).square().sum(1) < radius.square()).float()[:, None]
    colour = torch.rand(count, 3, 1, 1, generator=generator)
    noise = torch.randn(count, 3, size, size, generator=generator)
    return 0.4 * noise + masks * colour, masks


def loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Cross-entropy plus Dice, one number a sample ``(B,)``."""
    overlap = (logits.sigmoid() * masks).flatten(1).sum(1)
    total = (logits.sigmoid() + masks).flatten(1).sum(1)
    entropy = F.binary_cross_entropy_with_logits(logits, masks, reduction="none")
    return entropy.flatten(1).mean(1) + 1 - 2 * (overlap + 1) / (total + 2)


def train(net: nn.Module, images: Tensor, masks: Tensor, epochs: int, seed: int) -> None:
    """A loop of one's own. The optimizer is made on the network that is trained, after the cut."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    net.train()
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(seed + epoch)
        for batch in torch.randperm(len(images), generator=generator).split(16):
            optimizer.zero_grad()
            loss(net(images[batch]), masks[batch]).mean().backward()
            optimizer.step()
    net.eval()


@torch.no_grad()
def iou(net: nn.Module, images: Tensor, masks: Tensor) -> float:
    """Intersection over union of the pixels told to be disc."""
    told = torch.cat([net(part) for part in images.split(32)]) > 0
    true = masks > 0
    return float((told & true).sum() / (told | true).sum())


def main() -> None:
    parser = options(__doc__, "segmentation-out")
    parser.add_argument("--macs", type=float, default=0.25)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    count, size, width, epochs = (32, 32, 8, 2) if args.tiny else (400, 64, 32, 8)
    generator = torch.Generator().manual_seed(args.seed)
    images, masks = discs(count, size, generator)
    test = discs(count // 2, size, generator)

    torch.manual_seed(args.seed)
    net = UNet(width)
    train(net, images, masks, epochs, args.seed)
    print(f"IoU of the full network     {iou(net, *test):.3f}")

    graph = trace_channels(net, images[:1])
    batches = list(zip(images.split(16), masks.split(16), strict=True))
    scores = relative_to_group(taylor_scores(net, graph, batches, loss), graph)
    chooser = Chooser(net, graph, round_to=4)
    plan = chooser.choose(scores.numpy(), Budget(macs=args.macs))
    slim = shrink(net, plan)
    macs = chooser.costs["macs"]
    left = float(macs(chooser.widths(plan))) / macs.full
    print(graph)
    print(check_equivalence(net, plan))
    print(f"IoU right after the cut     {iou(slim.eval(), *test):.3f}, {left:.1%} of the MACs")
    train(slim, images, masks, epochs, args.seed)
    print(f"IoU after fine-tuning       {iou(slim, *test):.3f}")

    save_slim(args.out / "slim.safetensors", slim, {"kept": plan.record()})
    again = load_slim(args.out / "slim.safetensors", lambda: UNet(width))
    assert torch.equal(again(test[0][:4]), slim(test[0][:4]))


if __name__ == "__main__":
    main()
