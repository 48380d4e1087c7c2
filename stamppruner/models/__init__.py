"""The paper's networks for 32x32 images, and smaller ones of the same two families."""

from stamppruner.models.resnet import BasicBlock, ResNet, resnet18
from stamppruner.models.vgg import VGG, vgg19

__all__ = ["VGG", "BasicBlock", "ResNet", "resnet18", "vgg19"]
