"""Losses of draft heads, and how often their guesses are the target's, depth by depth.

EAGLE-1: arXiv 2401.15077. EAGLE-3: arXiv 2503.01840. The guess of row i at depth d is for token i+2+d, which the target
chooses at position i+1+d.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode.train.features import Batch, lm_head_rows, target_choices
from fastdecode.train.unroll import shifted, unroll
from models.eagle import Eagle3Head
from models.transformer import Hidden, Transformer


class StepReport(NamedTuple):
    """`loss`: a scalar to be minimised. The others are `[n_steps]`, float, over the rows whose guesses at depths 0..d
    are all for tokens of the answer: `counted` how many rows there are, `correct` how many guess at depth d what the
    target chooses (a choice outside the draft vocabulary cannot be guessed), `survived` how many do at all depths 0..d.
    """

    loss: Tensor
    correct: Tensor
    counted: Tensor
    survived: Tensor


def expected_tau(survived: Tensor, counted: Tensor) -> float:
    """Mean tokens per round of a chain as deep as there are steps, from sums of StepReports' fields."""
    return 1 + float((survived / counted.clamp_min(1)).sum())


def eagle3_loss(
    head: Eagle3Head,
    target: Transformer,
    hidden: Hidden,
    batch: Batch,
    n_steps: int,
    decay: float = 0.8,
    choices: Tensor | None = None,
) -> StepReport:
    """EAGLE-3's loss over `n_steps` unrolled steps; `hidden`: the target's states, tapped at `head.feature_layers`.

    Cross-entropy of the head with the target's distribution over the draft vocabulary, averaged over the guesses for
    tokens of the answer whose choice is in the draft vocabulary; those of depth d weigh `decay ** d`.
    `choices [B, T]` int64: `target_choices(target, hidden.last)`, if the caller has them.
    """
    guessed = _guessed(batch)
    with torch.no_grad():
        places = guessed.flatten().nonzero()[:, 0]  # positions at which the target chooses a token that is guessed
        states = hidden.last.flatten(0, 1)
        chosen = target_choices(target, states[places]) if choices is None else choices.flatten()[places]
        draft_ids = _draft_ids(head)[chosen]
        places, draft_ids = places[draft_ids >= 0], draft_ids[draft_ids >= 0]
        probabilities = F.linear(states[places], lm_head_rows(target, head.drafted)).float().softmax(-1)
        column = places % guessed.shape[1]
    total, weight = 0.0, 0.0
    correct = []
    dtype = head.fc.weight.dtype
    features = head.fuse(Hidden(hidden.last, tuple(states.to(dtype) for states in hidden.entering)))
    for step, for_logits in enumerate(unroll(head, shifted(batch.token_ids, 1), features, n_steps)):
        inside = column >= step + 1  # the place of row i is i + 1 + step
        rows = places[inside] - (step + 1)
        logits = head.logits(for_logits.flatten(0, 1)[rows]).float()
        total = total + decay**step * F.cross_entropy(logits, probabilities[inside], reduction="sum")
        weight += decay**step * len(rows)
        right = torch.zeros(guessed.numel(), dtype=torch.bool, device=guessed.device)
        right[rows] = logits.detach().argmax(-1) == draft_ids[inside]
        correct.append(right.view_as(guessed))
    return _report(total / max(weight, 1e-6), correct, guessed)


def _guessed(batch: Batch) -> Tensor:
    """`[B, T]`: positions at which the target chooses a token of the answer, the next one."""
    return shifted(batch.answer & batch.real, 1)


def _draft_ids(head: Eagle3Head) -> Tensor:
    """`[V]`: the draft id of each of the target's ids, -1 where it has none."""
    n_ids = head.config.layer.vocab_size
    drafted = torch.arange(n_ids) if head.drafted is None else head.drafted
    ids = torch.full((n_ids,), -1, device=drafted.device)
    ids[drafted] = torch.arange(len(drafted), device=drafted.device)
    return ids


def _report(loss: Tensor, correct: list[Tensor], guessed: Tensor) -> StepReport:
    """`correct`: of every depth, `[B, T]` bool, the rows whose guess is the target's choice."""
    counts, chain, alive = [], torch.ones_like(guessed), torch.ones_like(guessed)
    for depth, right in enumerate(correct):
        chain = chain & shifted(guessed, depth + 1)
        alive = alive & right
        counts.append(torch.stack(((chain & right).sum(), chain.sum(), (chain & alive).sum())))
    return StepReport(loss, *torch.stack(counts, dim=1).float())
