"""EAGLE heads compute what the public implementations compute."""

import pytest
import torch
from golden_files import (
    assert_close,
    carried,
    golden_head,
    load,
    parametrize_golden,
    target_for,
    teacher_forced,
    write_head,
)

from models.transformer import Hidden

TOLERANCE, UNROLLED_TOLERANCE = 1e-5, 1e-4  # of a tensor's largest magnitude, in fp32


def pytest_generate_tests(metafunc):
    kinds = ("speculators",) if "unrolled" in metafunc.function.__name__ else ("eagle1", "eagle3")
    parametrize_golden(metafunc, *kinds)


@torch.inference_mode()
def test_golden_states_and_logits(golden, tmp_path):
    head, _ = golden_head(golden, tmp_path)
    fed_back, logits = teacher_forced(head, golden.next_ids, head.fuse(golden.hidden))
    assert_close(fed_back, golden.tensors["hidden"], TOLERANCE)
    assert_close(logits, golden.tensors["logits"], TOLERANCE)


@torch.inference_mode()
def test_golden_states_in_chunks_and_pair_by_pair(golden, tmp_path):
    head, _ = golden_head(golden, tmp_path)
    n = golden.next_ids.shape[1]
    for chunks in ([n - 4, 3, 1], [1] * n):
        fed_back, logits = teacher_forced(head, golden.next_ids, head.fuse(golden.hidden), chunks)
        assert_close(fed_back, golden.tensors["hidden"], TOLERANCE)
        assert_close(logits, golden.tensors["logits"], TOLERANCE)


@torch.inference_mode()
def test_golden_unrolled_steps(golden, tmp_path):
    """Training-time test: step j's rows see step 0 causally, and of each later step their own column."""
    head, _ = golden_head(golden, tmp_path)
    n, n_steps = golden.next_ids.shape[1], golden.facts["steps"]
    head.set_rotary(n + n_steps)
    cache = head.new_cache(1, n * n_steps + 1)
    columns = torch.arange(n)
    causal, diagonal = columns <= columns[:, None], columns == columns[:, None]
    token_ids, state = golden.next_ids, head.fuse(golden.hidden)
    for step in range(n_steps):
        mask = torch.cat([causal] + [diagonal] * step, dim=1)[None]
        rows = (columns + step * n)[None]
        state, for_logits = head(token_ids, state, (columns + step)[None], rows, mask, cache)
        tolerance = UNROLLED_TOLERANCE if step else TOLERANCE
        assert_close(head.logits(for_logits), golden.tensors[f"step{step}.logits"], tolerance)
        token_ids = torch.cat((token_ids[:, 1:], torch.zeros_like(token_ids[:, :1])), dim=1)


@pytest.fixture(params=["eagle1", "eagle3", "speculators"])
def any_golden(request):
    return carried(request.param)


@torch.inference_mode()
def test_max_position_embeddings_of_a_head_is_no_limit(any_golden, tmp_path):
    """A head whose config says 2048 positions runs at position 3000 as one whose config says 4096."""
    outputs = []
    for trained in (2048, 4096):
        config = any_golden.config
        config.get("transformer_layer_config", config)["max_position_embeddings"] = trained
        head = load(write_head(tmp_path / str(trained), config, any_golden.weights), target_for(config))
        head.set_rotary(3100)
        cache, rows = head.new_cache(1, 33), torch.arange(17)[None]
        features, positions = head.fuse(any_golden.hidden), torch.arange(3000, 3017)[None]
        mask = torch.arange(32) <= rows[:, :, None]
        outputs.append(head(any_golden.next_ids, features, positions, rows, mask, cache)[1])
    assert torch.equal(*outputs)
    # Rotary positions are relative, so a distance of 3000 changes nothing either, but for rounding.
    assert_close(outputs[0], head_at_zero(head, any_golden), 1e-3)


def head_at_zero(head, golden):
    head.set_rotary(64)
    cache, rows = head.new_cache(1, 33), torch.arange(17)[None]
    return head(golden.next_ids, head.fuse(golden.hidden), rows, rows, torch.arange(32) <= rows[:, :, None], cache)[1]


@torch.inference_mode()
def test_features_come_from_the_layers_that_the_config_names(any_golden, tmp_path):
    """fuse() on what a real target returns for `feature_layers` equals fuse() on the same states picked by hand."""
    head = load(write_head(tmp_path, any_golden.config, any_golden.weights), target := target_for(any_golden.config))
    target.set_rotary(32)
    ids, rows = torch.arange(5, 15)[None], torch.arange(10)[None]
    mask = torch.arange(16) <= rows[:, :, None]
    states = target(ids, rows, rows, mask, torch.arange(16)[None], target.new_cache(1, 17), tuple(range(8)))
    tapped = target(ids, rows, rows, mask, torch.arange(16)[None], target.new_cache(1, 17), head.feature_layers)
    if any_golden.kind == "eagle1":
        assert head.feature_layers == () and torch.equal(head.fuse(tapped), states.last)
    else:
        assert head.feature_layers == (2, 4, 5)
        by_hand = Hidden(states.last, tuple(states.entering[i] for i in (2, 4, 5)))
        assert torch.equal(head.fuse(tapped), head.fuse(by_hand))
        wrong = Hidden(states.last, tuple(states.entering[i] for i in (1, 3, 4)))
        assert not torch.allclose(head.fuse(tapped), head.fuse(wrong))


@torch.inference_mode()
def test_a_pair_attends_only_what_its_mask_shows(any_golden, tmp_path):
    head = load(write_head(tmp_path, any_golden.config, any_golden.weights), target_for(any_golden.config))
    features, ids = head.fuse(any_golden.hidden), any_golden.next_ids
    whole = teacher_forced(head, ids, features)[1]
    changed = features.clone()
    changed[:, 9] += 1
    after = teacher_forced(head, ids, changed)[1]
    assert torch.equal(after[:, :9], whole[:, :9])
    assert (after[:, 9:] - whole[:, 9:]).abs().amax((0, 2)).min() > 0


def test_drafted_ids_and_what_is_read_at_them(any_golden, tmp_path):
    head = load(write_head(tmp_path, any_golden.config, any_golden.weights), target_for(any_golden.config))
    n_drafted = head.config.draft_vocab_size
    ids = torch.arange(n_drafted)
    values = torch.rand(2, 320)
    expected = ids + any_golden.weights["d2t"] if n_drafted < 320 else ids
    assert torch.equal(head.target_ids(ids), expected)
    assert torch.equal(head.at_drafted(values), values[:, expected])


def speculators_head(folder, more=None, **flags):
    """The speculators golden's weights under other flags."""
    golden = carried("speculators")
    own = {name: golden.config.get(name) for name in ("norm_before_fc", "fc_norm", "norm_output")}
    head = load(
        write_head(folder, golden.config | dict.fromkeys(own, False) | flags, golden.weights | (more or {})),
        target_for(golden.config),
    )
    return head, golden


@torch.inference_mode()
def test_norm_before_residual_makes_the_first_layer_blind_to_scale(tmp_path):
    for flag in (False, True):
        head, golden = speculators_head(tmp_path / str(flag), norm_before_residual=flag)
        features = head.fuse(golden.hidden)
        plain, scaled = (teacher_forced(head, golden.next_ids, features * scale)[0] for scale in (1, 10))
        assert torch.allclose(plain, scaled, rtol=1e-3, atol=1e-3) == flag


@torch.inference_mode()
def test_features_are_normed_together_or_one_by_one(tmp_path):
    numbers = torch.Generator().manual_seed(0)
    one = {"input_norm.weight": torch.rand(192, generator=numbers)}
    each = {f"fc_norm.{i}.weight": torch.rand(64, generator=numbers) for i in range(3)}
    together, golden = speculators_head(tmp_path / "one", one, norm_before_fc=True)
    apart, _ = speculators_head(tmp_path / "each", each, fc_norm=True)
    states = [100 * state for state in golden.hidden.entering]  # large, so that eps does not count
    all_scaled = Hidden(states[0], tuple(5 * state for state in states))
    one_scaled = Hidden(states[0], (states[0], 5 * states[1], states[2]))
    states = Hidden(states[0], tuple(states))
    torch.testing.assert_close(together.fuse(all_scaled), together.fuse(states))
    assert not torch.allclose(together.fuse(one_scaled), together.fuse(states), rtol=0.01)
    torch.testing.assert_close(apart.fuse(one_scaled), apart.fuse(states))
    normed = [state / state.pow(2).mean(-1, keepdim=True).sqrt() for state in states.entering]
    parts = [state * each[f"fc_norm.{i}.weight"] for i, state in enumerate(normed)]
    torch.testing.assert_close(apart.fuse(states), torch.cat(parts, -1) @ apart.fc.weight.T, rtol=1e-4, atol=1e-4)
    mean_square = torch.cat(states.entering, -1).pow(2).mean(-1, keepdim=True)
    by_hand = torch.cat(states.entering, -1) / mean_square.sqrt() * one["input_norm.weight"]
    torch.testing.assert_close(together.fuse(states), by_hand @ together.fc.weight.T, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_the_state_fed_back_is_normed_only_where_the_config_says_so(tmp_path):
    for flag in (False, True):
        head, golden = speculators_head(tmp_path / str(flag), norm_output=flag)
        fed_back, logits = teacher_forced(head, golden.next_ids, head.fuse(golden.hidden))
        assert torch.equal(head.logits(fed_back), logits) == flag
        torch.testing.assert_close(head.logits(fed_back if flag else head.norm(fed_back)), logits)
