"""Fine-tuning a slim network with PyTorch Lightning: it is an ordinary module.

    pip install lightning
    python examples/lightning_finetune.py --tiny
    python examples/lightning_finetune.py --devices 2      # two GPUs, or processes without one

The optimizer is made in ``configure_optimizers``, so after the cut, as it must be. Every process
prunes for itself: from one seed, all come to the same network.
"""

import lightning
import torch
from common import options
from torch.nn import functional as F
from torch.utils.data import DataLoader

from stamppruner import Budget, PruneResult, evaluate
from stamppruner.baselines import Taylor
from stamppruner.data import digits
from stamppruner.models import resnet18


class FineTune(lightning.LightningModule):
    def __init__(self, result: PruneResult, lr: float) -> None:
        super().__init__()
        self.net, self.lr = result.model.train(), lr  # Lightning leaves the mode as it is

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), self.lr)


def main() -> None:
    parser = options(__doc__, "lightning-out")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--devices", default="auto", help="how many; the default is all")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    train, test = digits(5 if args.tiny else 50)
    model = resnet18(10, width=0.125 if args.tiny else 0.5)
    result = Taylor(seed=args.seed).prune(model, train, Budget(macs=0.3))
    cut = result.evaluate(test)

    trainer = lightning.Trainer(
        max_epochs=1 if args.tiny else args.epochs,
        default_root_dir=args.out,
        accelerator="cpu" if args.device == "cpu" else "auto",
        devices=args.devices,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    loader = DataLoader(train, batch_size=32, shuffle=True)
    trainer.fit(FineTune(result, lr=2e-3), loader)
    if trainer.is_global_zero:
        print(f"accuracy after the cut         {cut:.3f}")
        print(f"accuracy after fine-tuning     {evaluate(result.model, test):.3f}")
        args.out.mkdir(parents=True, exist_ok=True)
        result.save(args.out / "slim.safetensors")  # the trained weights: the module is the same


if __name__ == "__main__":
    main()
