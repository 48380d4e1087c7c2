"""How much of the networks in use can be cut, and whether every cut is exact.

Traces stock networks of torchvision and timm (random weights, one core), cuts half of every group
at random, and compares the slim network with the masked dense one in double precision.

    python benchmarks/coverage.py                          # all, about an hour
    python benchmarks/coverage.py torchvision/resnet18     # some

Results are written to ``benchmarks/results/coverage.json`` after every network; those that are
there already are run again only when named.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import timm
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stamppruner import ChannelPlan, StampError, check_equivalence, shrink, trace_channels

RESULTS = Path(__file__).parent / "results" / "coverage.json"
KEEP = 0.5

TORCHVISION = """
alexnet convnext_small convnext_tiny densenet121 densenet161 densenet169 densenet201
efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_v2_s googlenet
inception_v3 mnasnet0_5 mnasnet0_75 mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large
mobilenet_v3_small regnet_x_16gf regnet_x_1_6gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf
regnet_x_8gf regnet_y_1_6gf regnet_y_3_2gf regnet_y_400mf regnet_y_800mf regnet_y_8gf resnet101
resnet152 resnet18 resnet34 resnet50 resnext101_32x8d resnext50_32x4d shufflenet_v2_x0_5
shufflenet_v2_x1_0 shufflenet_v2_x1_5 shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 vgg11 vgg11_bn
vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn wide_resnet50_2
"""

SEGMENTATION = """
deeplabv3_mobilenet_v3_large deeplabv3_resnet50 deeplabv3_resnet101 fcn_resnet50 fcn_resnet101
lraspp_mobilenet_v3_large
"""

TIMM = """
bat_resnext26ts convnext_atto convnextv2_atto cspdarknet53 cspresnet50 darknet53 densenetblur121d
dla34 dpn68 ecaresnet26t edgenext_xx_small efficientnet_lite0 fasternet_t0 fbnetc_100 gernet_s
ghostnet_100 hardcorenas_a hgnet_tiny hrnet_w18_small inception_next_atto inception_v4 lcnet_050
mixnet_s mobilenetv3_small_050 mobilenetv4_conv_small mobileone_s0 mobilevit_xxs nf_regnet_b0
poolformer_s12 regnety_002 repghostnet_050 repvgg_a0 res2net50_26w_4s resnest14d resnet26d
resnetv2_50 rexnet_100 selecsls42b seresnet50 skresnet18 spnasnet_100 starnet_s1 tinynet_e
vovnet39a xception41
"""

NETWORKS = [
    *(f"torchvision/{name}" for name in TORCHVISION.split()),
    *(f"segmentation/{name}" for name in SEGMENTATION.split()),
    *(f"timm/{name}" for name in TIMM.split()),
]


def make(network: str) -> tuple[nn.Module, int]:
    """A network with random weights, and the side of the images it takes, in pixels."""
    family, name = network.split("/")
    torch.manual_seed(0)
    if family == "timm":
        model = timm.create_model(name, pretrained=False)
        return model, model.default_cfg.get("input_size", (3, 224, 224))[-1]
    if family == "segmentation":
        maker = getattr(torchvision.models.segmentation, name)
        return maker(weights=None, weights_backbone=None), 224
    settings = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    maker = getattr(torchvision.models, name)
    return maker(weights=None, **settings), 299 if name == "inception_v3" else 224


def macs(model: nn.Module, x: torch.Tensor) -> float:
    """Multiply-adds, counted by PyTorch."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(x)
    return counter.get_total_flops() / 2


def measure(network: str) -> dict[str, object]:
    """Trace, cut and compare one network."""
    model, side = make(network)
    x = torch.zeros(1, 3, side, side)
    start = time.perf_counter()
    graph = trace_channels(model, x)
    seconds = time.perf_counter() - start
    plan = ChannelPlan.random(graph, KEEP)
    verdict = check_equivalence(model, plan)
    slim = shrink(model, plan, certify=False)
    writers = [layer for layer in graph.layers.values() if layer.kind == "mixing"]
    outputs = sum(len(layer.outputs) for layer in writers if layer.name not in graph.output_layers)
    fixed = sum(
        int((layer.outputs < 0).sum()) for layer in writers if layer.name not in graph.output_layers
    )
    inner = {n: why for n, why in graph.protected.items() if n not in graph.output_layers}
    return {
        "certified": verdict.passed,
        "max_rel": verdict.max_rel,
        "groups": len(graph.groups),
        "channels": graph.num_channels,
        "macs_left": round(macs(slim, x) / macs(model, x), 4),
        "trace_seconds": round(seconds, 2),
        "protected_share": round(fixed / max(1, outputs), 4),
        "reasons": dict(Counter(inner.values()).most_common()),
    }


def attempt(network: str) -> dict[str, object]:
    """The measurement, or the error that prevents it."""
    try:
        return measure(network)
    except StampError as error:
        return {"certified": False, "error": f"{type(error).__name__}: {error}"}
    except Exception:  # noqa: BLE001 - a crash is a result
        return {"certified": False, "crash": traceback.format_exc(limit=-3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", choices=[[], *NETWORKS], default=[])
    named = parser.parse_args().networks
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    found = json.loads(RESULTS.read_text())["networks"] if RESULTS.exists() else {}
    for network in named or [n for n in NETWORKS if n not in found]:
        found[network] = attempt(network)
        print(network, json.dumps(found[network]), flush=True)
        record = {
            "versions": {"torch": torch.__version__, "torchvision": torchvision.__version__,
                         "timm": timm.__version__, "python": platform.python_version()},
            "setting": {"keep": KEEP, "weights": "random", "threads": 1},
            "networks": {n: found[n] for n in NETWORKS if n in found},
        }  # fmt: skip
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
