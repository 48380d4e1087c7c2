"""The paper's ResNet-18 for 32x32 images: CIFAR-100 to CIFAR-10.

    python examples/resnet18_cifar.py                                  # paper size, wants a GPU
    python examples/resnet18_cifar.py --data DIR --reference DIR --width 0.25 --subset 1000 \
        --epochs 20 --iterations 60 --tasks 4 --shots 16 --finetune-epochs 20

Without --data the sets are downloaded; DIR may be a tree of image folders (train/<class>/*,
test/<class>/*).
"""

from cifar import run

from stamppruner.models import resnet18

if __name__ == "__main__":
    run("resnet18_cifar", resnet18)
