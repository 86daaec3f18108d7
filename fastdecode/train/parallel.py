"""The processes that train together: one, or as many as torchrun started."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(days=7)  # the first process may make data for long while the others wait


@dataclass(frozen=True)
class Group:
    """This process among `size`. Alone, every operation leaves its tensor as it is."""

    rank: int = 0
    size: int = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up `tensor` over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """The largest of every element over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def wait(self) -> None:
        """Go on when all processes have come here."""
        if self.size > 1:
            dist.barrier()


def join_group(device: torch.device) -> Group:
    """The group that torchrun describes in the environment (nccl on CUDA, gloo on the CPU), else this process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Group()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    return Group(dist.get_rank(), dist.get_world_size())


def leave_group(group: Group) -> None:
    """Close what join_group opened."""
    if group.size > 1:
        dist.destroy_process_group()


def local_device(device: str) -> str:
    """The device of this process: of several on one machine, each takes a CUDA device of its own."""
    local = os.environ.get("LOCAL_RANK")
    if local is not None and (device == "cuda" or (device == "auto" and torch.cuda.is_available())):
        return f"cuda:{local}"
    return device
