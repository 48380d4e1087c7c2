"""MobileNetV3 for a latency budget: how many milliseconds a pass may take, here, measured.

    python examples/mobilenet_latency.py --latency 0.5 --data birds     # half of the full time
    python examples/mobilenet_latency.py --latency 12 --threads 1       # 12 milliseconds
    python examples/mobilenet_latency.py --tiny

Multiply-adds are not time: small layers cost a call, and kernels like some widths more than
others. The candidate is timed end to end, in turns with the full network, and its widths are moved
until the measured time lies just under the bound. Run it on the device that will serve.
"""

import warnings

import torch
import torchvision
from common import images_or_letters, options

from stamppruner import Budget, STAMPConfig, STAMPPruner
from stamppruner.report.format import share


def main() -> None:
    parser = options(__doc__, "mobilenet_latency-out")
    parser.add_argument("--data", help="folder of images (default: rendered letters)")
    parser.add_argument("--latency", type=float, default=0.6, help="milliseconds, or a share")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", type=int, default=224)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    size, per_class = (64, 4) if args.tiny else (args.size, 20)
    target = images_or_letters(args.data, "ABCDE", per_class=per_class, size=size)

    # Weights of your own backbone go here; the time does not depend on them.
    torch.manual_seed(args.seed)
    models = torchvision.models
    make = models.mobilenet_v3_small if args.tiny else models.mobilenet_v3_large
    model = make(num_classes=10).to(args.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not meta-fitted: this is about time
        pruner = STAMPPruner(model, config=STAMPConfig(seed=args.seed))
        latency, batch = (0.85, 8) if args.tiny else (args.latency, args.batch_size)
        budget = Budget(latency_ms=latency, batch_size=batch, threads=args.threads)
        result = pruner.prune(target, budget)

    report = result.report
    before, after = report.before, report.after
    print(report)
    print(
        f"\nmeasured {before['latency_ms']:.2f} -> {after['latency_ms']:.2f} ms "
        f"({share(after['latency_ms'] / before['latency_ms'])}), "
        f"predicted {report.settings['latency_ms_predicted']:.2f} ms, "
        f"{share(after['macs'] / before['macs'])} of the multiply-adds"
    )
    result.save(args.out / "slim.safetensors")
    report.to_html(args.out / "report.html")


if __name__ == "__main__":
    main()
