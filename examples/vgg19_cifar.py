"""The paper's VGG-19 (16 convolutions, one linear layer): CIFAR-100 to CIFAR-10.

    python examples/vgg19_cifar.py                                     # paper size, wants a GPU
    python examples/vgg19_cifar.py --data DIR --reference DIR --width 0.25 --subset 1000 \
        --epochs 20 --iterations 60 --tasks 4 --shots 16 --finetune-epochs 20

Without --data the sets are downloaded; DIR may be a tree of image folders (train/<class>/*,
test/<class>/*).
"""

from cifar import run

from stamppruner.models import vgg19

if __name__ == "__main__":
    run("vgg19_cifar", vgg19)
