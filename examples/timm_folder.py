"""A timm backbone on folders of your images, to a slim network, a report and an ONNX file.

    python examples/timm_folder.py --reference photos --data birds --test birds-test --pretrained
    python examples/timm_folder.py --tiny

Folders hold one sub-folder of images a class. Without them, rendered letters stand in. Needs timm
and the extras ``demo`` and ``onnx``.
"""

import timm
import torch
from common import config, images_or_letters, options

from stamppruner import Budget, STAMPPruner, TaskSampler, evaluate, export_onnx, finetune
from stamppruner.data import BatchLoader, CropFlip


def main() -> None:
    parser = options(__doc__, "timm_folder-out")
    parser.add_argument("--model", default="mobilenetv3_small_100", help="name in timm")
    parser.add_argument("--pretrained", action="store_true", help="fetch timm's weights")
    parser.add_argument("--reference", help="folder; its classes may be others than the target's")
    parser.add_argument("--data", help="folder of the target")
    parser.add_argument("--test", help="folder with other images of the target")
    parser.add_argument("--size", type=int, default=96, help="side of the images")
    parser.add_argument("--macs", type=float, default=0.4, help="share to keep")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    size, few = (32, 8) if args.tiny else (args.size, 60)
    epochs = 1 if args.tiny else args.epochs
    reference = images_or_letters(args.reference, "ABCDEFGHIJKLMNOPQRST", per_class=few, size=size)
    target = images_or_letters(args.data, "ΔΞΣΦΨΩ", per_class=few, size=size)
    test = images_or_letters(args.test, "ΔΞΣΦΨΩ", per_class=few, size=size, seed=1)

    # A backbone with a head of the reference's classes.
    torch.manual_seed(args.seed)
    model = timm.create_model(
        args.model, pretrained=args.pretrained, num_classes=reference.num_classes
    ).to(args.device)
    augment = CropFlip(padding=size // 8, flip=args.data is not None)
    finetune(model, BatchLoader(reference, 64, augment=augment), epochs=epochs, lr=0.05)

    # Once: the pruner. Its file is all that later data sets need.
    pruner = STAMPPruner(model, config=config(args.tiny, seed=args.seed))
    pruner.meta_fit(TaskSampler(reference, ways=5, shots=min(16, few)))
    pruner.save(args.out / "backbone.stamp.safetensors")

    # For every data set: its own network.
    result = pruner.prune(target, Budget(macs=args.macs))
    result.evaluate(test)
    result.finetune(BatchLoader(target, 32, augment=augment), epochs=epochs)
    accuracy = result.evaluate(test)
    result.save(args.out / "slim.safetensors")
    result.report.to_html(args.out / "report.html")
    print(result.report)

    net = result.model.cpu()
    print(export_onnx(net, args.out / "slim.onnx", test.tensors()[0][:1]))
    assert evaluate(net, test) == accuracy


if __name__ == "__main__":
    main()
