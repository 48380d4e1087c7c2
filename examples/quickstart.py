"""The shortest whole job: a backbone, a meta-fit, a pruned network, a file.

    python examples/quickstart.py

Takes about a minute on two cores; needs ``pip install "stamppruner[demo]"``.
"""

import torch

from stamppruner import Budget, STAMPConfig, STAMPPruner, TaskSampler, finetune, load_slim
from stamppruner.data import BatchLoader, digits, render_characters
from stamppruner.models import ResNet


def make_model() -> torch.nn.Module:
    return ResNet(blocks=(1, 1, 1), widths=(16, 32, 64), num_classes=100)


# A backbone, trained once on reference data (here: rendered characters of 100 classes).
torch.manual_seed(0)
reference = render_characters(per_class=30, size=24)
model = make_model()
finetune(model, BatchLoader(reference, 64), epochs=3, lr=0.1, amp=True)

# Meta-fit once; the product is a file.
pruner = STAMPPruner(model, config=STAMPConfig(iterations=10, amp=True))
pruner.meta_fit(TaskSampler(reference, ways=10, shots=16))
pruner.save("backbone.stamp.safetensors")

# Every new data set gets its own small network in seconds (here: handwritten digits).
train, test = digits(train_per_class=20, size=24)
pruner = STAMPPruner.load("backbone.stamp.safetensors", make_model())
result = pruner.prune(train, budget=Budget(macs=0.25))
print(f"accuracy before any training {result.evaluate(test):.3f}")
result.finetune(BatchLoader(train, 32), epochs=15, amp=True)
print(f"accuracy after fine-tuning   {result.evaluate(test):.3f}\n")
print(result.report)
result.report.to_html("report.html")  # with a picture of the channels that are kept

# One safetensors file, no pickle, exactly the same outputs.
result.save("slim.safetensors")
net = load_slim("slim.safetensors", make_model)
images = test.tensors()[0]
with torch.no_grad():
    assert torch.equal(net(images), result.model.eval()(images))
