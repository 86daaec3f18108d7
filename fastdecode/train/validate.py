"""How good a head is on conversations that it never trains on."""

from collections.abc import Callable, Sequence

import torch

from fastdecode.train.losses import StepReport
from fastdecode.train.parallel import Group
from fastdecode.train.tally import Score, Tally


@torch.no_grad()
def validate(
    batches: Sequence[list[int]],
    report: Callable[[list[int]], StepReport],
    n_depths: int,
    group: Group,
    device: torch.device,
) -> Score:
    """The score over `batches` of conversations' indices, each process taking its share; `report` runs one batch."""
    tally = Tally(n_depths, device)
    for indices in batches[group.rank :: group.size]:
        tally.add(*report(indices))
    group.sum(tally.values)
    return tally.score()
