"""Unrolled steps compute what the reference, a dense mask and inference through a cache compute."""

import pytest
import torch
from eagle_fixtures import random_head
from golden_files import assert_close, golden_head, parametrize_golden
from train_fixtures import all_rows, random_eagle3, random_hidden

from fastdecode.train.unroll import attend_steps, unroll
from models.transformer import Hidden

TOLERANCE, UNROLLED_TOLERANCE = 1e-5, 1e-4  # of a tensor's largest magnitude, in fp32
VARIANTS = {
    "plain": {},
    "two-layers-qk-norms": {"n_layers": 2, "qk_norm": True},
    "norm-output": {"norm_output": True, "fc_norm": True},
    "norm-before": {"norm_before_fc": True, "norm_before_residual": True, "n_layers": 2},
}


def pytest_generate_tests(metafunc):
    parametrize_golden(metafunc, "speculators")


def some_head(name):
    if name == "eagle1":
        return random_head("eagle1", 40, 24, 40)
    return random_eagle3(**VARIANTS[name])


@torch.no_grad()
def test_golden_unrolled_steps(golden, tmp_path):
    head, _ = golden_head(golden, tmp_path)
    n_steps = golden.facts["steps"]
    steps = all_rows(head, golden.next_ids, head.fuse(golden.hidden), n_steps)
    for step, for_logits in enumerate(steps):
        tolerance = UNROLLED_TOLERANCE if step else TOLERANCE
        assert_close(head.logits(for_logits), golden.tensors[f"step{step}.logits"], tolerance)
    assert len(steps) == n_steps


@pytest.mark.parametrize("n_heads, n_kv_heads", [(4, 4), (6, 2), (9, 3)])
def test_attention_over_steps_is_attention_with_a_dense_mask(n_heads, n_kv_heads):
    torch.manual_seed(0)
    length, n_steps = 7, 4
    q = torch.randn(2, n_heads, length, 8)
    keys, values = ([torch.randn(2, n_kv_heads, length, 8) for _ in range(n_steps)] for _ in range(2))
    columns = torch.arange(length)
    for step in range(n_steps):
        mask = torch.cat([columns <= columns[:, None]] + [torch.eye(length, dtype=torch.bool)] * step, dim=1)
        k, v = (torch.cat(x[: step + 1], dim=2).repeat_interleave(n_heads // n_kv_heads, 1) for x in (keys, values))
        scores = (q @ k.transpose(2, 3) / 8**0.5).masked_fill(~mask, float("-inf"))
        expected = scores.softmax(-1) @ v
        torch.testing.assert_close(attend_steps(q, keys[: step + 1], values[: step + 1]), expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", [*VARIANTS, "eagle1"])
def test_steps_are_the_heads_own_passes_under_a_dense_mask(name):
    head = some_head(name)
    batch, length, n_steps = 2, 9, 4
    next_ids = torch.randint(40, (batch, length))
    state = features = head.fuse(random_hidden(batch, length))
    head.set_rotary(length + n_steps)
    cache = head.new_cache(batch, length * n_steps + 1)
    columns = torch.arange(length)
    causal, own = columns <= columns[:, None], torch.eye(length, dtype=torch.bool)
    for step, for_logits in enumerate(all_rows(head, next_ids, features, n_steps)):
        ids = torch.cat((next_ids[:, step:], torch.zeros(batch, step, dtype=torch.int64)), dim=1)
        mask = torch.cat([causal] + [own] * step, dim=1).expand(batch, -1, -1)
        positions = (columns + step).expand(batch, -1)
        rows = (columns + step * length).expand(batch, -1)
        state, expected = head(ids, state, positions, rows, mask, cache)
        assert_close(for_logits, expected, UNROLLED_TOLERANCE if step else TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("name", [*VARIANTS, "eagle1"])
def test_a_row_of_step_j_is_what_j_drafts_after_its_pair_give(name):
    """As a drafter does it: committed pairs into the cache, then one forced token after another on its own states."""
    head = some_head(name)
    length, n_steps = 9, 4
    next_ids = torch.randint(40, (1, length))
    features = head.fuse(random_hidden(1, length))
    steps = [head.logits(for_logits) for for_logits in all_rows(head, next_ids, features, n_steps)]
    for row in range(length - n_steps + 1):
        cache = head.new_cache(1, length + n_steps + 1)
        positions = torch.arange(row + 1)[None]
        mask = torch.arange(row + 1) <= positions[:, :, None]
        state, for_logits = head(next_ids[:, : row + 1], features[:, : row + 1], positions, positions, mask, cache)
        for step in range(n_steps):
            tolerance = UNROLLED_TOLERANCE if step else TOLERANCE  # every pass enlarges what float32 rounds
            assert_close(head.logits(for_logits[:, -1]), steps[step][:, row], tolerance)
            at = torch.tensor([[row + 1 + step]])
            if step + 1 < n_steps:
                forced = next_ids[:, row + 1 + step, None]
                mask = torch.ones(1, 1, row + 2 + step, dtype=torch.bool)
                state, for_logits = head(forced, state[:, -1:], at, at, mask, cache)


@torch.no_grad()
@pytest.mark.parametrize("name", [*VARIANTS, "eagle1"])
def test_rows_left_out_change_nothing_for_the_others(name):
    head = some_head(name)
    next_ids = torch.randint(40, (2, 9))
    features, rows = head.fuse(random_hidden(2, 9)), torch.tensor([1, 2, 5, 12, 17])
    few, whole = unroll(head, next_ids, features, 3, rows), all_rows(head, next_ids, features, 3)
    for step, (ours, expected) in enumerate(zip(few, whole, strict=True)):
        assert_close(ours, expected.flatten(0, 1)[rows], UNROLLED_TOLERANCE if step else TOLERANCE)


def test_gradients_are_those_of_the_heads_own_passes():
    head = random_eagle3(n_layers=2, qk_norm=True)
    next_ids, hidden = torch.randint(40, (2, 6)), random_hidden(2, 6)
    weights = torch.randn(3, 2, 6, 24)
    sum((w * y).sum() for w, y in zip(weights, all_rows(head, next_ids, head.fuse(hidden), 3), strict=True)).backward()
    ours = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()
    head.double()
    # finite difference along one random direction, in double precision
    torch.manual_seed(3)
    direction = {name: torch.randn_like(p) for name, p in head.named_parameters() if name in ours}
    inputs = Hidden(hidden.last.double(), tuple(x.double() for x in hidden.entering))
    values = []
    for sign in (1e-5, -2e-5):
        with torch.no_grad():
            for name, p in head.named_parameters():
                if name in ours:
                    p += sign * direction[name]
            steps = all_rows(head, next_ids, head.fuse(inputs), 3)
            values.append(sum((w * y).sum() for w, y in zip(weights.double(), steps, strict=True)))
    slope = (values[0] - values[1]) / 2e-5
    predicted = sum((direction[name] * grad).sum() for name, grad in ours.items())
    torch.testing.assert_close(predicted.float(), slope.float(), rtol=1e-3, atol=1e-2)
