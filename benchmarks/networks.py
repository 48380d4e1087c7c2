"""The networks that the coverage benchmark measures: names, makers, example inputs, losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torchvision import models

MOST_PARAMETERS = 700e6
"""Networks of torchvision with more are left out: a copy in double precision takes over 5 GiB."""

FAMILIES = {
    "torchvision": "torchvision: classification",
    "torchvision-attention": "torchvision: classification with attention",
    "segmentation": "torchvision: segmentation",
    "detection": "torchvision: detection",
    "video": "torchvision: video",
    "timm": "timm: convolutional networks",
    "timm-attention": "timm: networks with attention",
}

TIMM = """
convmixer_1024_20_ks9_p14 convnext_atto convnext_zepto_rms convnextv2_atto cs3darknet_focus_s
cs3darknet_s cs3sedarknet_l cspdarknet53 cspnext_tiny cspresnet50 darknet53 darknetaa53
densenetblur121d dla34 dla60_res2net dla60x_c dm_nfnet_f0 dpn48b dpn68 eca_nfnet_l0 eca_vovnet39b
ecaresnet26t efficientnet_b0_gn efficientnet_blur_b0 efficientnet_cc_b0_4e efficientnet_es
efficientnet_lite0 efficientnetv2_rw_t ese_vovnet19b_dw fasternet_t0 fbnetc_100 fbnetv3_b
focalnet_tiny_srf gcresnet33ts gernet_s ghostnet_100 ghostnetv2_100 ghostnetv3_050 hardcorenas_a
hgnet_tiny hgnetv2_b0 hrnet_w18_small hrnet_w18_small_v2 inception_next_atto inception_resnet_v2
inception_v4 lcnet_050 lcnetv2_small legacy_seresnet18 legacy_xception mambaout_femto mixnet_s
mnasnet_small mobilenet_edgetpu_v2_xs mobilenetv1_100 mobilenetv2_050 mobilenetv3_small_050
mobilenetv4_conv_small mobileone_s0 nf_ecaresnet26 nf_regnet_b0 nf_resnet26 nfnet_l0
poolformer_s12 poolformerv2_s12 rdnet_tiny regnetv_040 regnetx_002 regnety_002 regnetz_005
repghostnet_050 repvgg_a0 repvit_m0_9 res2net50_26w_4s res2next50 resnest14d resnest26d resnet10t
resnet26d resnet33ts resnet50_gn resnet51q resnetaa50 resnetblur50 resnetrs50 resnetv2_50
resnetv2_50d_evos resnetv2_50x1_bit resnext26ts rexnet_100 rexnetr_100 selecsls42b selecsls60
semnasnet_050 seresnet50 seresnext26ts skresnet18 skresnext50_32x4d spnasnet_100 starnet_s050
starnet_s1 tf_efficientnet_lite0 tf_mixnet_s tf_mobilenetv3_small_minimal_100 tinynet_e tresnet_m
vgg11 vovnet39a xception41 xception41p xception65
"""

TIMM_ATTENTION = """
bat_resnext26ts botnet26t_256 coat_lite_tiny coatnet_nano_rw_224 convformer_s18 csatv2 davit_tiny
eca_botnext26ts_256 edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientvit_b0
efficientvit_m0 fastvit_sa12 fastvit_t8 halonet26t haloregnetz_b iformer_t lambda_resnet26t
levit_conv_128s lowformer_b0 mobilenetv4_hybrid_medium mobilevit_xxs mobilevitv2_050 nextvit_small
resnet50_clip sebotnet33ts_256 sehalonet33ts shvit_s1 swiftformer_xs visformer_tiny
"""

_WITH_ATTENTION = ("vit_*", "swin*", "maxvit*")

_VIDEO_SIZES = {"s3d": (16, 224, 224), "mvit_*": (16, 224, 224), "*": (16, 112, 112)}
"""Frames, height and width: S3D ends in a pooling window, MViT in embeddings of this size."""


@dataclass(frozen=True)
class Network:
    """A stock network; ``key`` is ``family/name``, where families with attention are not apart."""

    family: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.family.removesuffix('-attention')}/{self.name}"

    def make(self) -> nn.Module:
        """The network as its library makes it, with random weights."""
        torch.manual_seed(0)
        if self.key.startswith("timm/"):
            return timm.create_model(self.name, pretrained=False)
        settings: dict[str, Any] = {"weights": None}
        if self.family in ("segmentation", "detection"):
            settings["weights_backbone"] = None
        if self.family == "detection" and not self.name.startswith("ssd"):
            settings |= {"min_size": 128, "max_size": 128}  # of the images of the training step
        if self.name in ("googlenet", "inception_v3"):
            settings["init_weights"] = False
        module = {"segmentation": models.segmentation, "detection": models.detection,
                  "video": models.video}.get(self.family, models)  # fmt: skip
        return getattr(module, self.name)(**settings)

    def view(self, model: nn.Module) -> nn.Module:
        """What is traced: it takes one tensor. Only a detector is not its own view."""
        return DetectorView(model) if self.family == "detection" else model

    def shape(self, model: nn.Module) -> tuple[int, ...]:
        """Of one sample, with the batch axis."""
        if self.family == "video":
            sizes = (s for pattern, s in _VIDEO_SIZES.items() if fnmatchcase(self.name, pattern))
            return (1, 3, *next(sizes))
        if self.key.startswith("timm/"):
            return (1, *model.default_cfg.get("input_size", (3, 224, 224)))
        sides = {"inception_v3": 299, "ssd300_vgg16": 300}
        side = sides.get(self.name, 320 if self.family == "detection" else 224)
        return (1, 3, side, side)

    def loss(self, model: nn.Module, shape: tuple[int, ...]) -> Tensor:
        """A loss of a model in training mode, on two samples of noise."""
        x = torch.rand(2, *shape[1:])
        if self.family != "detection":
            return sum((out.square().mean() for out in tensors(model(x))), torch.zeros(()))
        side = shape[-1]
        target = {
            "boxes": torch.tensor([[0.1, 0.2, 0.6, 0.7], [0.3, 0.3, 0.9, 0.8]]) * side,
            "labels": torch.tensor([1, 1]),
            "masks": torch.ones(2, side, side, dtype=torch.uint8),
            "keypoints": torch.tensor([[[0.4 * side, 0.5 * side, 1.0]] * 17] * 2),
        }
        return sum(model(list(x), [target, dict(target)]).values(), torch.zeros(()))


class DetectorView(nn.Module):
    """All layers of a detector in one pass without its choice of boxes.

    Which boxes a detector looks at depends on the values of its images, and images of which none
    is chosen drop out. Here the heads look at fixed boxes, so that every layer runs for every
    image. The detector itself is the attribute ``detector``, also of a slim copy.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: Tensor) -> list[Any]:
        features = self.detector.backbone(x)
        if not hasattr(self.detector, "rpn"):
            return [self.detector.head(list(features.values()))]
        heads, (h, w) = self.detector.roi_heads, x.shape[-2:]
        boxes = x.new_tensor([[0, 0, w / 2, h / 2], [w / 4, h / 4, w, h]])
        where = ([boxes] * len(x), [(h, w)] * len(x))
        pooled = heads.box_roi_pool(features, *where)
        found = [self.detector.rpn.head(list(features.values()))]
        found.append(heads.box_predictor(heads.box_head(pooled)))
        if heads.has_mask():
            pooled = heads.mask_roi_pool(features, *where)
            found.append(heads.mask_predictor(heads.mask_head(pooled)))
        if heads.has_keypoint():
            pooled = heads.keypoint_roi_pool(features, *where)
            found.append(heads.keypoint_predictor(heads.keypoint_head(pooled)))
        return found


def tensors(output: Any) -> list[Tensor]:
    """Floating tensors in an output of any nesting."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def parameters(name: str) -> int:
    """Number of parameters of a network of torchvision, from the facts on its weights."""
    return max(weights.meta["num_params"] for weights in models.get_model_weights(name))


def _all() -> Iterator[Network]:
    for name in models.list_models(module=models):
        attention = any(fnmatchcase(name, pattern) for pattern in _WITH_ATTENTION)
        yield Network("torchvision-attention" if attention else "torchvision", name)
    for family in ("segmentation", "detection", "video"):
        for name in models.list_models(module=getattr(models, family)):
            yield Network(family, name)
    for name in TIMM.split():
        yield Network("timm", name)
    for name in TIMM_ATTENTION.split():
        yield Network("timm-attention", name)


LEFT_OUT = {
    network.key: parameters(network.name)
    for network in _all()
    if not network.family.startswith("timm") and parameters(network.name) > MOST_PARAMETERS
}
NETWORKS = {n.key: n for n in _all() if n.key not in LEFT_OUT}
