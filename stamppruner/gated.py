"""A network with everything that decides over its channels: phi = {W, pi, theta}."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stamppruner.channels import ChannelGraph
from stamppruner.encoders import SetEncoder
from stamppruner.evidence import ChannelReader
from stamppruner.gates import Gates
from stamppruner.layers import first_floating
from stamppruner.posteriors import Posterior
from stamppruner.supervision import CLASSIFICATION, Supervision


class GatedNet:
    """The parameters of Algorithm 1, and the masks they give for a set of images.

    Attributes:
        model: W. Its gates are closed over only inside :meth:`masked`.
        graph: its channels.
        posterior: q(m | o), with pi, gamma and beta.
        encoder: e(X; theta).
        task: what W is to do with images.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        posterior: Posterior,
        encoder: SetEncoder,
        task: Supervision = CLASSIFICATION,
    ) -> None:
        like = first_floating(model)
        self.task = task
        self.model, self.graph = model, graph
        self.posterior = posterior.to(like.device, torch.float32)  # as evidence is
        self.encoder = encoder.to(like.device, torch.float32)  # as the images that it is given are
        self._gates = Gates(model, graph)
        self._reader = ChannelReader(model, graph)
        self._compiled: nn.Module | None = None

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return first_floating(self.model).device

    def evidence(self, images: Tensor) -> Tensor:
        """Standardised ``Pool(o)`` of every channel, ``(num_channels,)``, for a set of images."""
        pseudo = self.encoder(images.float())
        return self._reader.standardised(pseudo.to(first_floating(self.model).dtype)).float()

    def keep_probability(self, images: Tensor) -> Tensor:
        """``E[m]`` of every channel for a set of images ``(B, C, H, W)`` (Eq. 14)."""
        return self.posterior.keep_probability(self.evidence(images))

    def sample(
        self, images: Tensor, *, temperature: float, generator: torch.Generator | None
    ) -> Tensor:
        """A relaxed mask ``(num_channels,)`` for a set of images (Eq. 12)."""
        return self.posterior.sample(
            self.evidence(images), temperature=temperature, generator=generator
        )

    def evidence_of(self, images: Tensor) -> Callable[[], Tensor]:
        """Gives :meth:`evidence` of one set, again and again while parameters change.

        What no parameter enters is computed once.
        """
        encode, dtype = self.encoder.prepared(images.float()), first_floating(self.model).dtype
        return lambda: self._reader.standardised(encode().to(dtype)).float()

    @contextmanager
    def masked(self, mask: Tensor | None, *, by_weight: bool = False) -> Iterator[nn.Module]:
        """The model under a mask inside the block.

        Args:
            mask: ``(num_channels,)``; None leaves all as it is.
            by_weight: where only the outputs matter, see :meth:`~stamppruner.gates.Gates.inject`;
                inside :meth:`compiled`, the model is the compiled one.
        """
        compiled = self._compiled if by_weight else None
        with self._gates.injected(by_weight=by_weight and compiled is None) as gates:
            gates.values = mask
            try:
                yield self.model if compiled is None else compiled
            finally:
                gates.values = None

    @contextmanager
    def compiled(self, wanted: bool) -> Iterator[None]:
        """Masked passes are those of ``torch.compile`` inside the block, or are not.

        A product with a mask is fused there with what comes before it. Dropout draws what it draws
        without. Shapes are compiled each on their own, so that results follow from them alone.
        """
        before = self._compiled
        self._compiled = None
        if wanted:
            compiled = torch.compile(self.model, dynamic=False, options={"fallback_random": True})
            assert isinstance(compiled, nn.Module)
            self._compiled = compiled
        try:
            yield
        finally:
            self._compiled = before

    def weights(self) -> list[nn.Parameter]:
        """Trainable parameters of W."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def theta(self) -> list[nn.Parameter]:
        """Parameters of the set encoder, gamma and beta."""
        return [*self.encoder.parameters(), *self.posterior.theta_parameters()]

    def parameters(self) -> list[nn.Parameter]:
        """All of phi, in a fixed order."""
        return [*self.weights(), *self.posterior.pi_parameters(), *self.theta()]
