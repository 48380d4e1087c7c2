"""Answering requests with ONNX Runtime: a slim file becomes a service without PyTorch.

    python examples/onnx_serving.py                          # makes a slim file, then serves it
    python examples/onnx_serving.py --slim slim.safetensors
    python examples/onnx_serving.py --tiny

``Classifier`` needs numpy and onnxruntime alone. The names of the classes and the statistics of
the images are in the slim file, and travel beside the ONNX file as JSON.
"""

import json
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from common import options

from stamppruner import Budget, describe, export_onnx, load_slim
from stamppruner.baselines import Taylor
from stamppruner.data import digits
from stamppruner.models import resnet18


class Classifier:
    """Pictures in, names and probabilities out."""

    def __init__(self, onnx: Path, facts: Path, threads: int = 1) -> None:
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(
            onnx, settings, providers=["CPUExecutionProvider"]
        )
        known = json.loads(facts.read_text())
        self.classes = known["classes"]
        self.mean, self.std = (
            np.array(known[name], np.float32)[:, None, None] for name in ("mean", "std")
        )

    def __call__(self, pictures: np.ndarray) -> list[tuple[str, float]]:
        """Of ``(B, H, W, 3)`` uint8, any B."""
        images = pictures.transpose(0, 3, 1, 2).astype(np.float32) / 255
        (logits,) = self.session.run(["logits"], {"images": (images - self.mean) / self.std})
        odds = np.exp(logits - logits.max(1, keepdims=True))
        shares = odds / odds.sum(1, keepdims=True)
        best = shares.argmax(1)
        return [(self.classes[i], float(s[i])) for i, s in zip(best, shares, strict=True)]


def main() -> None:
    parser = options(__doc__, "onnx_serving-out")
    parser.add_argument("--slim", type=Path, help="slim file of a classifier of RGB images")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.slim is None:
        train, test = digits(5 if args.tiny else 50, seed=args.seed)
        torch.manual_seed(args.seed)
        model = resnet18(10, width=0.125 if args.tiny else 0.5)
        result = Taylor(seed=args.seed).prune(model, train, Budget(macs=0.3))
        result.finetune(train, epochs=1 if args.tiny else 10)
        args.slim = args.out / "slim.safetensors"
        result.save(args.slim)
        pictures = test.images[:64].permute(0, 2, 3, 1).numpy()  # uint8
    record = describe(args.slim)
    channels, height, width = record["input_shape"]
    if "pictures" not in locals():
        rng = np.random.default_rng(args.seed)
        pictures = rng.integers(0, 256, (64, height, width, channels), np.uint8)

    # Where PyTorch is.
    onnx, facts = args.out / "slim.onnx", args.out / "slim.json"
    net = load_slim(args.slim)
    print(export_onnx(net, onnx, torch.zeros(1, channels, height, width)))
    facts.write_text(json.dumps(record["images"]))

    # Where it need not be.
    classify = Classifier(onnx, facts, args.threads)
    print(classify(pictures[:3]))
    for batch in (1, 8, 64):
        start, passes = time.perf_counter(), 3 if args.tiny else 50
        for _ in range(passes):
            classify(pictures[:batch])
        rate = passes * batch / (time.perf_counter() - start)
        print(f"{rate:8.0f} images a second in batches of {batch}")


if __name__ == "__main__":
    main()
