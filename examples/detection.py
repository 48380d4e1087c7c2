"""The backbone of a detector: Faster R-CNN keeps its heads and gets a smaller network to look with.

    python examples/detection.py               # minutes on two cores
    python examples/detection.py --tiny

A detector maps images to lists of boxes, which no certificate can compare. Its backbone maps an
image to feature maps, and is most of the cost: that is cut. The maps keep their width, since they
are the backbone's outputs, so the heads need not change. Scores come from a baseline, which are
usable on any graph. The images are bright squares on a noisy ground, made here.
"""

import torch
import torchvision
from common import options
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.ops import box_iou

from stamppruner import Budget, check_equivalence, shrink, trace_channels
from stamppruner.baselines import Magnitude
from stamppruner.budget import Chooser


def squares(count: int, size: int, generator: torch.Generator) -> list[tuple[Tensor, dict]]:
    """Images ``(3, H, W)`` with one square each, and torchvision's targets."""
    made = []
    for _ in range(count):
        side = int(torch.randint(size // 6, size // 3, (), generator=generator))
        x, y = torch.randint(0, size - side, (2,), generator=generator).tolist()
        image = 0.2 * torch.rand(3, size, size, generator=generator)
        image[:, y : y + side, x : x + side] += 0.7
        box = torch.tensor([[x, y, x + side, y + side]], dtype=torch.float32)
        made.append((image, {"boxes": box, "labels": torch.ones(1, dtype=torch.int64)}))
    return made


def train(detector: nn.Module, data: list[tuple[Tensor, dict]], epochs: int) -> float:
    """The last epoch's mean loss. The optimizer is made anew: the backbone has new parameters."""
    optimizer = torch.optim.SGD(detector.parameters(), lr=5e-3, momentum=0.9)
    detector.train()
    mean = 0.0
    for _ in range(epochs):
        losses = []
        for start in range(0, len(data), 4):
            images, targets = zip(*data[start : start + 4], strict=True)
            loss = sum(detector(list(images), [dict(t) for t in targets]).values())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(detector.parameters(), 5.0)
            optimizer.step()
            losses.append(float(loss.detach()))
        mean = sum(losses) / len(losses)
    detector.eval()
    return mean


@torch.no_grad()
def hits(detector: nn.Module, data: list[tuple[Tensor, dict]]) -> str:
    """On how many images the surest box covers the square: by half of their union."""
    good = 0
    for image, target in data:
        (found,) = detector([image])
        good += bool((box_iou(found["boxes"][:1], target["boxes"]) >= 0.5).any())
    return f"{good} of {len(data)} squares are found"


def main() -> None:
    parser = options(__doc__, "detection-out")
    parser.add_argument("--macs", type=float, default=0.5, help="share of the backbone's to keep")
    parser.add_argument("--epochs", type=int, default=10, help="before the cut, and after it")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    count, size, epochs = (4, 64, 1) if args.tiny else (64, 160, args.epochs)
    torch.manual_seed(args.seed)
    detector = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=2, min_size=size, max_size=size,
        box_batch_size_per_image=32,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(args.seed)
    data, held_out = squares(count, size, generator), squares(count, size, generator)
    print(f"loss of the full detector  {train(detector, data, epochs):.3f}")
    print(f"on new images, {hits(detector, held_out)}")

    backbone = detector.backbone
    graph = trace_channels(backbone, torch.zeros(1, 3, size, size))
    print(graph)
    scores = Magnitude().scores(backbone, graph, None)
    chooser = Chooser(backbone, graph, round_to=8)
    plan = chooser.choose(scores, Budget(macs=args.macs))
    print(check_equivalence(backbone, plan))
    detector.backbone = shrink(backbone, plan)
    macs = chooser.costs["macs"]
    print(f"{float(macs(chooser.widths(plan))) / macs.full:.1%} of the backbone's MACs are left")
    print(f"loss of the slim detector  {train(detector, data, epochs):.3f}")
    print(f"on new images, {hits(detector, held_out)}")
    save_file(detector.state_dict(), args.out / "detector.safetensors")


if __name__ == "__main__":
    main()
