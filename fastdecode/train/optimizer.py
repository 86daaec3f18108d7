"""The optimizer of a run: AdamW for everything, or Muon for the matrices inside the head and AdamW for the rest."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

BETAS = (0.9, 0.95)
OUTSIDE = ("lm_head",)  # a matrix whose rows are tokens: Muon's step, the same in all directions, is not meant for it


class Optimizers:
    """One or two of torch's optimizers as one. Both take one learning rate: Muon's steps are scaled to the size that
    AdamW's have (arXiv 2502.16982)."""

    def __init__(self, kind: str, parameters: Mapping[str, nn.Parameter], lr: float):
        inside = {
            name: p for name, p in parameters.items() if p.ndim == 2 and name.partition(".")[0] not in OUTSIDE
        } if kind == "muon" else {}
        rest = [p for name, p in parameters.items() if name not in inside]
        self.parts: list[torch.optim.Optimizer] = []
        if inside:
            matrices = list(inside.values())
            self.parts.append(torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        if rest:
            self.parts.append(torch.optim.AdamW(rest, lr=lr, betas=BETAS, weight_decay=0.0))

    def step(self, lr: float) -> None:
        """Change the parameters by their gradients, which are then gone."""
        for part in self.parts:
            for settings in part.param_groups:
                settings["lr"] = lr
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """What `load_state_dict` takes."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on from where `state_dict` was asked for."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
