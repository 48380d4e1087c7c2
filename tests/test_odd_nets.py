"""Code that networks rarely hold: every cut of it is exact, and what cannot be cut is named."""

import pytest
import torch
import torch.nn.functional as F
from nets import Net, conv_bn, difference, head, noise, seeded
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves

from stamppruner import ChannelPlan, mask, shrink, trace_channels


def between(function, width=8, **layers):
    """A function of the network and of eight channels, between two convolutions."""

    def wiring(net, x):
        return net.head(net.last(function(net, net.first(x).relu())))

    return Net(wiring, first=conv_bn(3, 8), **layers, last=conv_bn(width, 6), head=head(6))


def with_tensor(net, name, tensor, *, learned=True):
    if learned:
        setattr(net, name, nn.Parameter(tensor))
    else:
        net.register_buffer(name, tensor)
    return net


def folded(_, x):
    return F.fold(F.unfold(x, 3, padding=1) * 0.5, x.shape[-2:], 3, padding=1)


def unfolded(net, x):
    return net.linear(F.unfold(x, 3, padding=1).transpose(1, 2)).transpose(1, 2).view_as(x)


def warped(net, x):
    grid = F.affine_grid(net.theta(x.mean((2, 3))).view(-1, 2, 3), x.shape, align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def attended(net, x):
    keys = net.keys(x).flatten(2).softmax(-1)
    context = torch.einsum("bkn,bcn->bkc", keys, x.flatten(2))
    return x + torch.einsum("bkc,bkn->bcn", context, keys).view_as(x)


def filtered(net, x):
    spectrum = torch.fft.rfft2(x, norm="ortho") * torch.view_as_complex(net.filter)
    return x + torch.fft.irfft2(spectrum, s=x.shape[-2:], norm="ortho")


def added(net, x):
    return x.index_add(1, torch.tensor([1, 3, 5, 6]), net.extra(x))


def best_channels(_, x):
    best = x.mean((2, 3)).topk(4, 1).indices
    return x.gather(1, best[:, :, None, None].expand(-1, -1, *x.shape[2:]))


def best_experts(net, x):
    share, best = net.router(x.mean((2, 3))).softmax(1).topk(2, 1)
    outputs = torch.stack([expert(x) for expert in net.experts], 1)
    best = best[:, :, None, None, None].expand(-1, -1, *outputs.shape[2:])
    return (outputs.gather(1, best) * share[:, :, None, None, None]).sum(1)


def one_expert(net, x):
    best = net.router(x.mean((2, 3))).argmax(1).tolist()
    return torch.cat([net.experts[k](x[i : i + 1]) for i, k in enumerate(best)])


def experts():
    return {"router": nn.Linear(8, 3), "experts": nn.ModuleList(conv_bn(8, 8) for _ in range(3))}


def recurrent(net, x):
    return net.memory(x.flatten(2).transpose(1, 2))[0].transpose(1, 2).view_as(x)


def halves_and_pairs(_, x):
    batch, width, *size = x.shape
    pairs = x.view(batch, width // 2, 2, *size).sum(2)
    return torch.cat([pairs, x.view(batch, 2, width // 2, *size).amax(1)], 1)


def looped(net, x):
    for _ in range(3):
        if float(x.abs().max()) > 0.1:
            x = net.again(x) * 0.5
    return x


def written(net, x):
    y = net.more(x)
    y[:, 2:5] += x[:, :3]
    y[:, 0].mul_(2)
    return y


def predicted(net, x):
    kernels = net.kernels(x.mean((2, 3))).view(-1, 1, 3, 3)
    y = F.conv2d(x.flatten(0, 1)[None], kernels, padding=1, groups=len(kernels))
    return y.view_as(x)


def chosen(net, x):
    where = torch.tensor([True, False] * 4)
    return net.one(x[:, where]) + net.other(x[:, ~where])


def without_gradients(net, x):
    with torch.inference_mode():
        y = net.more(x).relu()
    return y.clone() + x


def tied(net, x):
    return x + F.conv_transpose2d(net.code(x).relu(), net.code.weight, padding=1)


ODD = {
    "fold": lambda: between(folded),
    "unfold": lambda: between(unfolded, linear=nn.Linear(72, 8)),
    "grid_sample": lambda: between(warped, theta=nn.Linear(8, 6)),
    "einsum": lambda: between(attended, keys=nn.Conv2d(8, 4, 1)),
    "fourier": lambda: with_tensor(between(filtered), "filter", torch.randn(8, 8, 5, 2)),
    "fourier over channels": lambda: between(lambda _, x: torch.fft.fft(x, dim=1).real),
    "index_add": lambda: between(added, extra=conv_bn(8, 4)),
    "roll": lambda: between(lambda net, x: x.roll(3, 1) + net.more(x), more=conv_bn(8, 8)),
    "roll of itself": lambda: between(lambda _, x: x + x.roll(1, 1)),
    "best channels": lambda: between(best_channels, 4),
    "best experts": lambda: between(best_experts, **experts()),
    "one expert": lambda: between(one_expert, **experts()),
    "lstm": lambda: between(recurrent, memory=nn.LSTM(8, 8, batch_first=True)),
    "transposed": lambda: between(
        lambda net, x: net.blocks(net.each(x)),
        each=nn.ConvTranspose2d(8, 16, 3, groups=8),
        blocks=nn.ConvTranspose2d(16, 8, 2, 2, groups=4),
    ),
    "parametrized": lambda: between(
        lambda net, x: net.spectral(net.normed(x).relu()),
        normed=parametrizations.weight_norm(nn.Conv2d(8, 8, 3)),
        spectral=parametrizations.spectral_norm(nn.Conv2d(8, 8, 1)),
    ),
    "views": lambda: between(halves_and_pairs),
    "maxout": lambda: between(lambda _, x: x.unflatten(1, (4, 2)).amax(2), 4),
    "loop": lambda: between(looped, again=conv_bn(8, 8)),
    "width in the code": lambda: between(lambda _, x: 2 * x if x.shape[1] == 8 else x),
    "written in place": lambda: between(written, more=conv_bn(8, 8)),
    "predicted kernels": lambda: between(predicted, kernels=nn.Linear(8, 72)),
    "chosen by truth": lambda: between(chosen, one=conv_bn(4, 8), other=conv_bn(4, 8)),
    "sorted by a buffer": lambda: with_tensor(
        between(lambda net, x: x[:, net.order.argsort()]), "order", torch.randn(8), learned=False
    ),
    "cumulated": lambda: between(lambda _, x: x.cumsum(1)),
    "no gradients": lambda: between(without_gradients, more=conv_bn(8, 8)),
    "tied": lambda: between(tied, code=nn.Conv2d(8, 6, 3, padding=1)),
}


@pytest.mark.parametrize("name", ODD)
def test_every_cut_is_exact_and_the_model_is_as_it_was(name):
    model, x = seeded(ODD[name]).double(), noise(2, 3, 8, 8)
    with torch.no_grad():
        before = model(x)
        graph = trace_channels(model, x)
        assert graph.groups
        for seed, keep in enumerate((0.5, 0.3, 0.7, 0.1)):
            plan = ChannelPlan.random(graph, keep, seed)
            assert difference(mask(model, plan)(x), shrink(model, plan)(x)) < 1e-10
        assert torch.equal(before, model(x))
    writers = {n for n, layer in graph.layers.items() if layer.kind == "mixing"}
    cut = {name for group in graph.groups for name in group.writers}
    assert writers - cut == graph.protected.keys()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model = seeded(lambda: between(lambda _, x: x)).to(dtype)
    x = noise(2, 3, 8, 8, dtype=dtype)
    plan = ChannelPlan.random(trace_channels(model, x))
    with torch.no_grad():
        assert difference(mask(model, plan)(x).float(), shrink(model, plan)(x).float()) < 2e-2


def test_keywords_in_and_a_nest_of_outputs_out():
    def wiring(net, image, scale=1.0):
        x = net.first(image)
        return {"logits": net.head(net.last(x)), "more": (x.mean((1, 2, 3)) * scale, [x.sum(1)])}

    model = seeded(lambda: Net(wiring, first=conv_bn(3, 8), last=conv_bn(8, 6), head=head(6)))
    x = {"image": noise(2, 3, 8, 8, dtype=torch.float32)}
    graph = trace_channels(model, x)
    plan = ChannelPlan.random(graph)
    with torch.no_grad():
        pairs = zip(
            tree_leaves(mask(model, plan)(**x)), tree_leaves(shrink(model, plan)(**x)), strict=True
        )
        assert all(difference(a, b) < 1e-5 for a, b in pairs)
    assert graph.protected.keys() == {"first.0", "head.2"}
