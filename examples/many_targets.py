"""Many customers from one pruner: ten data sets in a loop, a table of sizes and accuracies.

    python examples/many_targets.py            # minutes on two cores
    python examples/many_targets.py --tiny

One backbone is trained and meta-fitted on 55 characters. Nine alphabets of five other characters
and the handwritten digits then get a network each, in seconds. Needs the extra ``demo``.
"""

import torch
from common import config, options

from stamppruner import Budget, STAMPPruner, TaskSampler, finetune
from stamppruner.data import CHARACTERS, BatchLoader, CropFlip, digits, render_characters
from stamppruner.models import ResNet
from stamppruner.report import compare

TARGETS = 9
CLASSES = 5


def main() -> None:
    parser = options(__doc__, "many_targets-out")
    parser.add_argument("--macs", type=float, default=0.15)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    size, per_class, epochs = (16, 6, 1) if args.tiny else (24, 60, args.epochs)
    known = CHARACTERS[TARGETS * CLASSES :]
    reference = render_characters(per_class, size=size, classes=known, seed=args.seed)
    augment = CropFlip(padding=2, flip=False)

    # Once.
    torch.manual_seed(args.seed)
    model = ResNet((1, 1, 1), (8, 16, 32) if args.tiny else (16, 32, 64), len(known))
    loader = BatchLoader(reference, 64, augment=augment)
    finetune(model.to(args.device), loader, epochs=1 if args.tiny else 10, lr=0.1)
    pruner = STAMPPruner(model, config=config(args.tiny, iterations=20, seed=args.seed))
    pruner.meta_fit(TaskSampler(reference, ways=5, shots=min(16, per_class)))
    pruner.save(args.out / "backbone.stamp.safetensors")

    # For every customer.
    targets = {}
    for i in range(TARGETS):
        letters = "".join(CHARACTERS[CLASSES * i : CLASSES * (i + 1)])
        train, test = (
            render_characters(count, size=size, classes=letters, seed=seed)
            for count, seed in ((min(20, per_class), 1), (min(40, per_class), 2))
        )
        targets[letters] = train, test
    targets["digits"] = digits(4 if args.tiny else 20, size=size)
    results = {}
    for number, (name, (train, test)) in enumerate(targets.items()):
        result = pruner.prune(train, Budget(macs=args.macs), progress=False)
        result.evaluate(test)
        result.finetune(BatchLoader(train, 32, augment=augment), epochs=epochs, progress=False)
        result.evaluate(test)
        result.save(args.out / f"slim-{number}.safetensors")
        results[name] = result
    comparison = compare(results)
    print(comparison)
    comparison.to_html(args.out / "customers.html")


if __name__ == "__main__":
    main()
