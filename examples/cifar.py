"""What the two CIFAR examples share: CIFAR-100 as reference, CIFAR-10 as target."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from stamppruner import (
    Budget,
    STAMPConfig,
    STAMPPruner,
    TaskSampler,
    evaluate,
    finetune,
    load_slim,
)
from stamppruner.data import (
    BatchLoader,
    CropFlip,
    balanced_subset,
    cifar10,
    cifar100,
    load_dataset,
)


def arguments(name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"{name}: CIFAR-100 to CIFAR-10, paper's nets")
    parser.add_argument("--data", default="data", help="target: download folder or image folders")
    parser.add_argument("--reference", default=None, help="the same for the reference data")
    parser.add_argument("--width", type=float, default=1.0, help="multiplies all channels")
    parser.add_argument("--subset", type=int, default=None, help="target images (default: all)")
    parser.add_argument("--reference-subset", type=int, default=None)
    parser.add_argument("--epochs", type=int, default=200, help="of training the backbone")
    parser.add_argument("--iterations", type=int, default=2000, help="of meta-fitting")
    parser.add_argument("--tasks", type=int, default=10, help="tasks an iteration")
    parser.add_argument("--shots", type=int, default=64, help="images a class in a task")
    parser.add_argument("--macs", type=float, default=0.27, help="share of the MACs to keep")
    parser.add_argument("--finetune-epochs", type=int, default=200)
    parser.add_argument("--backbone", default=None, help="state dict (safetensors) to start from")
    parser.add_argument("--out", default=f"{name}-out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def run(name: str, make: Callable[..., nn.Module]) -> None:
    args = arguments(name)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    reference, _ = load_dataset(cifar100, args.reference or args.data)
    train, test = load_dataset(cifar10, args.data)
    if args.reference_subset:
        reference = balanced_subset(reference, args.reference_subset, args.seed)
    if args.subset:
        train = balanced_subset(train, args.subset, args.seed)
    augment = CropFlip()

    torch.manual_seed(args.seed)
    model = make(reference.num_classes, width=args.width).to(args.device)
    figures: dict[str, object] = {"arguments": vars(args)}
    start = time.perf_counter()
    if args.backbone:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(args.backbone))
    else:
        loader = BatchLoader(reference, 128, seed=args.seed, augment=augment)
        finetune(model, loader, epochs=args.epochs, lr=0.1, amp=True)
    figures["backbone_seconds"] = time.perf_counter() - start

    start = time.perf_counter()
    config = STAMPConfig(
        iterations=args.iterations,
        tasks_per_iteration=args.tasks,
        shots=args.shots,
        minibatch_size=min(128, 2 * args.shots),
        amp=True,
        seed=args.seed,
    )
    pruner = STAMPPruner(model, config=config)
    pruner.meta_fit(TaskSampler(reference, 10, args.shots, seed=args.seed))
    pruner.save(out / "pruner.safetensors")
    figures["meta_fit_seconds"] = time.perf_counter() - start

    start = time.perf_counter()
    result = pruner.prune(train, Budget(macs=args.macs))
    figures["prune_seconds"] = time.perf_counter() - start
    figures["accuracy_after_cut"] = result.evaluate(test)
    start = time.perf_counter()
    loader = BatchLoader(train, 64, seed=args.seed, augment=augment)
    result.finetune(loader, epochs=args.finetune_epochs, amp=True)
    figures["finetune_seconds"] = time.perf_counter() - start
    figures["accuracy"] = result.evaluate(test)
    print(result.report)

    result.save(out / "slim.safetensors")
    result.report.to_html(out / "report.html")
    slim = load_slim(out / "slim.safetensors", make(reference.num_classes, width=args.width))
    assert evaluate(slim, test) == evaluate(result.model.cpu(), test)
    figures["report"] = result.report.to_json()
    (out / "figures.json").write_text(json.dumps(figures, indent=2))
    print(f"\naccuracy {figures['accuracy']:.4f}; wrote {out / 'slim.safetensors'}")
