"""AdamW alone is torch's; with Muon, matrices inside the head take steps of one size in all directions."""

import copy

import pytest
import torch
from torch import nn

from fastdecode.train.optimizer import BETAS, Optimizers

LR = 1e-2


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"layer.qkv.weight": (24, 16), "layer.norm.weight": (16,), "lm_head.weight": (40, 16)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def with_gradients(given: dict[str, nn.Parameter], seed: int) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    for parameter in given.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return given


def values(given: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in given.items()}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_who_takes_adamws_steps_takes_exactly_those(kind):
    ours, theirs = parameters(), parameters()
    optimizer = Optimizers(kind, ours, LR)
    reference = torch.optim.AdamW(theirs.values(), lr=LR, betas=BETAS, weight_decay=0.0)
    for seed, lr in enumerate((LR, LR / 2)):
        with_gradients(ours, seed), with_gradients(theirs, seed)
        reference.param_groups[0]["lr"] = lr
        optimizer.step(lr)
        reference.step()
        assert all(parameter.grad is None for parameter in ours.values())
    same = {name for name in ours if torch.equal(ours[name], theirs[name])}
    assert same == (set(ours) if kind == "adamw" else {"layer.norm.weight", "lm_head.weight"})


def test_muons_step_has_one_size_in_all_directions_and_adamws_size_in_all():
    given = parameters()
    before = values(given)
    Optimizers("muon", with_gradients(given, 0), LR).step(LR)
    step = (before["layer.qkv.weight"] - given["layer.qkv.weight"].detach()) / LR
    sizes = torch.linalg.svdvals(step)
    assert sizes.max() / sizes.min() < 2  # five iterations bring them near each other; a gradient's are 1 to 7
    # A matrix of orthonormal columns times 0.2 sqrt(rows) has entries of 0.2 on average, as a step of AdamW's.
    assert step.square().mean().sqrt() == pytest.approx(0.2, rel=0.25)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_it_goes_on_from_a_stored_state_with_the_same_bits(kind):
    whole, again = parameters(), parameters()
    optimizer = Optimizers(kind, whole, LR)
    with_gradients(whole, 0)
    optimizer.step(LR)
    with torch.no_grad():
        for name, parameter in again.items():
            parameter.copy_(whole[name])
    resumed = Optimizers(kind, again, LR)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with_gradients(whole, 1), with_gradients(again, 1)
    optimizer.step(LR), resumed.step(LR)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
