"""Whether a device is there."""

from __future__ import annotations

import torch


def why_not(device: str | torch.device) -> str | None:
    """Why nothing can be computed on a device; None if something can."""
    try:
        found = torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        return f"there is no such device here ({str(error).splitlines()[0]})"
    return "nothing is computed there: pass a real device" if found.is_meta else None
