"""Fine-tuning a slim network with Hugging Face accelerate: one GPU, several, or none.

    pip install accelerate
    python examples/accelerate_finetune.py --tiny
    accelerate launch examples/accelerate_finetune.py

Every process prunes for itself: from one seed, all come to the same network.
"""

import torch
from accelerate import Accelerator
from common import options
from torch.nn import functional as F
from torch.utils.data import DataLoader

from stamppruner import Budget, evaluate
from stamppruner.baselines import Taylor
from stamppruner.data import digits
from stamppruner.models import resnet18


def main() -> None:
    parser = options(__doc__, "accelerate-out")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=args.device == "cpu")
    train, test = digits(5 if args.tiny else 50)
    torch.manual_seed(args.seed)
    model = resnet18(10, width=0.125 if args.tiny else 0.5)
    result = Taylor(seed=args.seed).prune(model, train, Budget(macs=0.3))
    accelerator.print(f"accuracy after the cut         {result.evaluate(test):.3f}")

    net = result.model  # new parameters, so the optimizer comes after the cut
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _ in range(1 if args.tiny else args.epochs):
        net.train()
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(net(images), labels))
            optimizer.step()

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        result.model = accelerator.unwrap_model(net)
        accelerator.print(f"accuracy after fine-tuning     {evaluate(result.model, test):.3f}")
        args.out.mkdir(parents=True, exist_ok=True)
        result.save(args.out / "slim.safetensors")


if __name__ == "__main__":
    main()
