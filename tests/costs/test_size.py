"""The bound on a slim file, against files."""

import pytest
import torch
import torchvision
from torch import nn

from stamppruner import Budget, ChannelPlan, trace_channels
from stamppruner.baselines import Magnitude
from stamppruner.costs import SizeBytes
from stamppruner.models import resnet18, vgg19

NETS = {
    "resnet18": lambda: resnet18(10, width=0.25),
    "vgg19": lambda: vgg19(10, width=0.25),
    "mobilenet_v2": lambda: torchvision.models.mobilenet_v2(num_classes=10),
    "shufflenet_v2": lambda: torchvision.models.shufflenet_v2_x1_0(num_classes=10),
    "densenet121": lambda: torchvision.models.densenet121(num_classes=10),
}


def widths(plan: ChannelPlan) -> torch.Tensor:
    return torch.tensor([float(plan.keep[g.channels].sum()) for g in plan.graph.groups])


@pytest.mark.parametrize("name", NETS)
def test_files_are_no_larger_and_hardly_smaller(name, tmp_path):
    torch.manual_seed(0)
    model: nn.Module = NETS[name]().eval()
    graph = trace_channels(model, torch.zeros(1, 3, 32, 32))
    images = torch.randn(20, 3, 32, 32)
    loader = torch.utils.data.TensorDataset(images, torch.arange(20) % 10)
    result = Magnitude(measure_latency=False).prune(model, loader, Budget(macs=0.5), graph=graph)
    result.save(tmp_path / "slim.safetensors")
    size = (tmp_path / "slim.safetensors").stat().st_size
    bound = float(SizeBytes(model, graph)(widths(result.plan)))
    assert 0.96 * bound <= size <= bound
