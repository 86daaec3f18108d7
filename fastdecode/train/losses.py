"""Losses of draft heads, and how often their guesses are the target's, depth by depth.

EAGLE-1: arXiv 2401.15077. EAGLE-3: arXiv 2503.01840. The guess of row i at depth d is for token i+2+d, which the target
chooses at position i+1+d.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode.train.cross_entropy import cross_entropy_of_states, soft_cross_entropy
from fastdecode.train.features import Batch, lm_head_rows, target_choices
from fastdecode.train.unroll import shifted, unroll
from models.eagle import Eagle3Head, EagleHead
from models.transformer import Hidden, Transformer

CE_WEIGHT = 0.1  # of the cross-entropy in EAGLE-1's loss; SmoothL1 has 1


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
    dtype = head.fc.weight.dtype
    features = head.fuse(Hidden(hidden.last, tuple(states.to(dtype) for states in hidden.entering)))
    run, index = _rows_to_run(places, guessed, n_steps)
    total, weight, correct = 0.0, 0.0, []
    for step, for_logits in enumerate(unroll(head, shifted(batch.token_ids, 1), features, n_steps, run)):
        inside = (column > step).nonzero()[:, 0]  # the place of row i is i + 1 + step
        rows = places[inside] - (step + 1)
        logits = head.logits(for_logits.index_select(0, index[rows]))
        loss, best = soft_cross_entropy(logits, probabilities, inside)
        total = total + decay**step * loss
        weight += decay**step * len(rows)
        correct.append(_at_rows(best == draft_ids[inside], rows, guessed))
    return _report(total / max(weight, 1e-6), correct, guessed)


def eagle1_loss(
    head: EagleHead,
    target: Transformer,
    hidden: Hidden,
    batch: Batch,
    *,
    noise: Tensor | None = None,
    ce_ids: Tensor | None = None,
    n_report_steps: int = 1,
    choices: Tensor | None = None,
) -> StepReport:
    """EAGLE-1's loss: SmoothL1 of the head's states and the target's next ones, plus a tenth of their cross-entropy.

    Averaged over the guesses for tokens of the answer. `noise [B, T, h]` is added to the features; the paper's is
    uniform in +-0.1. `ce_ids [n]` int64: take the cross-entropy over these of the target's ids alone, which is much
    cheaper; guesses are then among them, too. `choices` as for `eagle3_loss`; without them `ce_ids` bounds the target's
    choices as well. Steps after the first are for the report and have no gradients.
    """
    guessed = _guessed(batch)
    places = guessed.flatten().nonzero()[:, 0]
    column = places % guessed.shape[1]
    lm_head = lm_head_rows(target, ce_ids)
    features = head.fuse(hidden).to(head.fc.weight.dtype)
    features = features if noise is None else features + noise
    run, index = _rows_to_run(places, guessed, n_report_steps)
    steps = unroll(head, shifted(batch.token_ids, 1), features, n_report_steps, run)
    loss, correct = torch.zeros((), device=features.device), []
    for step in range(n_report_steps):
        with torch.set_grad_enabled(torch.is_grad_enabled() and step == 0):
            inside = places[column > step]
            rows = inside - (step + 1)
            states = next(steps).index_select(0, index[rows])
            wanted = hidden.last.flatten(0, 1)[inside]
            cross_entropy, best, likeliest = cross_entropy_of_states(states, wanted, lm_head)
        if step == 0:
            distance = F.smooth_l1_loss(states.float(), wanted.float(), reduction="sum") / states.shape[-1]
            loss = (distance + CE_WEIGHT * cross_entropy) / max(len(rows), 1)
        if ce_ids is not None:
            best, likeliest = ce_ids[best], ce_ids[likeliest]
        chosen = likeliest if choices is None else choices.flatten()[inside]
        correct.append(_at_rows(best == chosen, rows, guessed))
    return _report(loss, correct, guessed)


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


def _rows_to_run(places: Tensor, like: Tensor, n_steps: int) -> tuple[Tensor, Tensor]:
    """The flat rows `[n]` that guess at any depth for one of the flat `places`; and `[B*T]`, each one's number."""
    is_place = torch.zeros_like(like).flatten().index_fill(0, places, True).view_as(like)
    needed = torch.stack([shifted(is_place, depth + 1) for depth in range(n_steps)]).any(0).flatten()
    return needed.nonzero()[:, 0], needed.cumsum(0) - 1


def _at_rows(values: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """`values [n]` bool at flat `rows [n]` of a tensor with the shape of `like`, False elsewhere."""
    return torch.zeros_like(like).flatten().index_copy(0, rows, values).view_as(like)


def _report(loss: Tensor, correct: list[Tensor], guessed: Tensor) -> StepReport:
    """`correct`: of every depth, `[B, T]` bool, the rows whose guess is the target's choice."""
    counts, chain, alive = [], torch.ones_like(guessed), torch.ones_like(guessed)
    for depth, right in enumerate(correct):
        chain = chain & shifted(guessed, depth + 1)
        alive = alive & right
        counts.append(torch.stack(((chain & right).sum(), chain.sum(), (chain & alive).sum())))
    return StepReport(loss, *torch.stack(counts, dim=1).float())
