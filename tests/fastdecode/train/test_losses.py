"""Losses and reports are what their definitions say, token by token."""

import pytest
import torch
from eagle_fixtures import random_head
from golden_files import target_for
from train_fixtures import all_rows, random_eagle3

from fastdecode.train.cross_entropy import cross_entropy_of_states, soft_cross_entropy
from fastdecode.train.features import Batch, target_choices, target_states
from fastdecode.train.losses import _report, eagle1_loss, eagle3_loss, expected_tau

VOCAB, WIDTH, LENGTH = 40, 24, 12
LAYOUT = {"vocab_size": VOCAB, "hidden_size": WIDTH}


@pytest.fixture(scope="module")
def target():
    return target_for(LAYOUT, n_layers=4)


def head_of(kind):
    head = random_eagle3() if kind == "eagle3" else random_head("eagle1", VOCAB, WIDTH, VOCAB)
    head.requires_grad_(True)
    head.embed_tokens.requires_grad_(False)
    if kind == "eagle1":
        head.lm_head.requires_grad_(False)
    return head


def some_batch(seed=0):
    """Two conversations: a question, an answer, a second question and answer; then one answer and padding."""
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (2, LENGTH), generator=numbers)
    answer, real = torch.zeros(2, LENGTH, dtype=torch.bool), torch.ones(2, LENGTH, dtype=torch.bool)
    answer[0, 3:6] = answer[0, 9:] = answer[1, 2:8] = True
    real[1, 9:] = False
    return Batch(ids * real, answer, real)


def states_of(head, target, batch):
    return target_states(target, batch, head.feature_layers or (0, 1, 2))


def compute(kind, head, target, hidden, batch, n_steps=3, **more):
    if kind == "eagle3":
        return eagle3_loss(head, target, hidden, batch, n_steps, **more)
    return eagle1_loss(head, target, hidden, batch, n_report_steps=n_steps, **more)


def by_hand(kind, head, target, hidden, batch, n_steps, decay=0.8, ce_ids=None):
    """From the definition, one guess at a time: loss, and (correct, counted, survived) per depth."""
    steps = all_rows(head, batch.token_ids.roll(-1, 1), head.fuse(hidden), n_steps)
    n, length = batch.token_ids.shape
    drafted = head.drafted.tolist() if kind == "eagle3" else (ce_ids if ce_ids is not None else torch.arange(VOCAB))
    drafted = list(map(int, drafted))
    total, weights, counts = 0.0, 0.0, [[0, 0, 0] for _ in range(n_steps)]

    def is_answer(b, i):
        return i < length and bool(batch.answer[b, i]) and bool(batch.real[b, i])

    for b in range(n):
        for row in range(length):
            alive = True
            for depth in range(n_steps):
                if row + 2 + depth >= length:
                    break
                wanted = hidden.last[b, row + 1 + depth]
                given = target.logits(wanted[None, None])[0, 0]
                choice = int(given.argmax())
                log_p = given[drafted].log_softmax(-1)
                state = steps[depth][b, row]
                logits = head.logits(state[None, None])[0, 0] if kind == "eagle3" else target.logits(state)[drafted]
                entropy = -(log_p.exp() * logits.log_softmax(-1)).sum()
                right = drafted[int(logits.argmax())] == (choice if kind == "eagle3" else drafted[int(log_p.argmax())])
                if is_answer(b, row + 2 + depth):
                    if kind == "eagle3" and choice in drafted:
                        total, weights = total + decay**depth * entropy, weights + decay**depth
                    if kind == "eagle1" and depth == 0:
                        error = (state - wanted).abs()
                        smooth = torch.where(error < 1, error**2 / 2, error - 0.5).mean()
                        total, weights = total + smooth + 0.1 * entropy, weights + 1
                if all(is_answer(b, row + 2 + d) for d in range(depth + 1)):
                    alive = alive and right
                    for k, value in enumerate((right, True, alive)):
                        counts[depth][k] += value
    return total / weights, torch.tensor(counts).float().T


@pytest.mark.parametrize("kind, subset", [("eagle3", False), ("eagle1", False), ("eagle1", True)])
def test_loss_and_report_follow_the_definition(kind, subset, target):
    head, batch = head_of(kind), some_batch()
    hidden = states_of(head, target, batch)
    more = {"ce_ids": torch.arange(5, 30, 2)} if subset else {}
    loss, counts = by_hand(kind, head, target, hidden, batch, 3, **more)
    report = compute(kind, head, target, hidden, batch, **more)
    torch.testing.assert_close(report.loss, loss, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.stack((report.correct, report.counted, report.survived)), counts)
    # Answers of 3, 3 and 6 tokens: a chain of depth d fits so often. (The last answer runs to the end.)
    assert report.counted.tolist() == [12, 9, 6]
    loss.backward()
    expected = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()
    report.loss.backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(dict(head.named_parameters())[name].grad, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_gradients_reach_all_that_is_trained_and_nothing_else(kind, target):
    head, batch = head_of(kind), some_batch()
    target = target.requires_grad_(True)
    report = compute(kind, head, target, states_of(head, target, batch), batch)
    report.loss.backward()
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        else:
            assert parameter.grad is None, name
    assert all(parameter.grad is None for parameter in target.parameters())
    target.requires_grad_(False)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_what_follows_the_answers_changes_nothing(kind, target):
    """Tokens after the last answer token, and what the target says there, do not count."""
    head, batch = head_of(kind), some_batch()
    batch.answer[0, 9:] = False
    hidden = states_of(head, target, batch)
    before = compute(kind, head, target, hidden, batch)
    ids, last = batch.token_ids.clone(), hidden.last.clone()
    ids[0, 6:], ids[1, 8:] = 7, 7
    last[0, 6:], last[1, 8:] = 3.0, 3.0  # the state at position 5 chooses token 6
    entering = tuple(states.clone().index_fill(1, torch.arange(8, LENGTH), 3.0) for states in hidden.entering)
    after = compute(kind, head, target, hidden._replace(last=last, entering=entering), batch._replace(token_ids=ids))
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b)


def test_the_mask_moves_with_the_inputs(target):
    """With one token m in the answer, depth d trains row m-2-d alone, on the target's state at m-1."""
    head, batch = head_of("eagle3"), some_batch()
    m, n_steps = 7, 3
    answer = torch.zeros_like(batch.answer)
    answer[0, m] = True
    batch = batch._replace(answer=answer)
    hidden = states_of(head, target, batch)
    choices = torch.full((2, LENGTH), int(head.drafted[3]))
    steps = all_rows(head, batch.token_ids.roll(-1, 1), head.fuse(hidden), n_steps)
    p = target.logits(hidden.last)[0, m - 1, head.drafted].softmax(-1)
    losses = [-(p * head.logits(x[0, m - 2 - d]).log_softmax(-1)).sum() for d, x in enumerate(steps)]
    report = eagle3_loss(head, target, hidden, batch, n_steps, decay=0.5, choices=choices)
    torch.testing.assert_close(report.loss, (losses[0] + losses[1] / 2 + losses[2] / 4) / 1.75)
    # Only a guess whose whole chain is in the answer is one that drafting would make.
    assert report.counted.tolist() == [1, 0, 0]


def test_a_choice_outside_the_draft_vocabulary_is_counted_but_not_trained_on(target):
    head, batch = head_of("eagle3"), some_batch()
    hidden = states_of(head, target, batch)
    outside = next(i for i in range(VOCAB) if i not in head.drafted.tolist())
    report = eagle3_loss(head, target, hidden, batch, 2, choices=torch.full((2, LENGTH), outside))
    report.loss.backward()
    assert report.loss == 0 and report.correct.tolist() == [0, 0] and report.counted.tolist() == [12, 9]
    assert head.lm_head.weight.grad.abs().max() == 0


def test_choices_given_are_those_computed(target):
    head, batch = head_of("eagle3"), some_batch()
    hidden = states_of(head, target, batch)
    choices = target_choices(target, hidden.last, chunk=5)
    assert torch.equal(choices, target.logits(hidden.last).argmax(-1))
    given, found = (eagle3_loss(head, target, hidden, batch, 3, choices=c) for c in (choices, None))
    assert all(torch.equal(a, b) for a, b in zip(given, found, strict=True))


def test_correct_counted_survived_of_a_case_made_by_hand():
    # One answer at tokens 2..5 of 7, so chains start at rows 0..3 and the target chooses at positions 1..4.
    guessed = torch.tensor([[False, True, True, True, True, False, False]])
    first = torch.tensor([[True, True, False, True, True, False, False]])  # row 4 guesses no answer token
    second = torch.tensor([[True, False, True, True, False, False, False]])  # row 3's guess lies beyond the answer
    third = torch.tensor([[True, True, False, False, False, False, False]])
    report = _report(torch.tensor(0.0), [first, second, third], guessed)
    assert report.correct.tolist() == [3, 2, 2]
    assert report.counted.tolist() == [4, 3, 2]
    assert report.survived.tolist() == [3, 1, 1]
    assert expected_tau(report.survived, report.counted) == pytest.approx(1 + 3 / 4 + 1 / 3 + 1 / 2)


def test_target_states_are_those_of_each_conversation_alone(target):
    batch = some_batch()
    both = target_states(target, batch, (1, 2))
    alone = target_states(target, Batch(*(part[1:, :9] for part in batch)), (1, 2))
    torch.testing.assert_close(both.last[1:, :9], alone.last, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both.entering[1][1:, :9], alone.entering[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_bfloat16_is_close_to_float32(kind, target):
    head, batch = head_of(kind), some_batch()
    for name, parameter in head.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(0.3)
    hidden = states_of(head, target, batch)
    exact = compute(kind, head, target, hidden, batch)
    exact.loss.backward()
    gradients = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()
    rounded = type(hidden)(hidden.last.bfloat16(), tuple(states.bfloat16() for states in hidden.entering))
    with torch.autocast("cpu", torch.bfloat16):
        report = compute(kind, head, target, rounded, batch)
    report.loss.backward()
    torch.testing.assert_close(report.loss.float(), exact.loss, rtol=0.02, atol=0.02)
    for name, p in head.named_parameters():
        if p.grad is not None:
            assert p.grad.dtype == torch.float32
            similarity = torch.cosine_similarity(p.grad.flatten(), gradients[name].flatten(), dim=0)
            assert similarity > 0.98, (name, similarity)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_batch_without_answers_has_no_loss_and_no_gradient(kind, target):
    head, batch = head_of(kind), some_batch()
    batch = batch._replace(answer=torch.zeros_like(batch.answer))
    report = compute(kind, head, target, states_of(head, target, batch), batch)
    report.loss.backward()
    assert report.loss == 0 and report.counted.tolist() == [0, 0, 0]
    gradients = [p.grad for p in head.parameters() if p.grad is not None]
    assert gradients and all(g.abs().max() == 0 for g in gradients)


def test_noise_is_added_to_the_features(target):
    head, batch = head_of("eagle1"), some_batch()
    hidden = states_of(head, target, batch)
    noise = torch.rand(2, LENGTH, WIDTH) * 0.2 - 0.1
    noisy = eagle1_loss(head, target, hidden, batch, noise=noise)
    plain = eagle1_loss(head, target, hidden, batch, noise=torch.zeros_like(noise))
    assert noisy.loss != plain.loss
    assert torch.equal(plain.loss, eagle1_loss(head, target, hidden, batch).loss)
    assert noisy.counted.shape == (1,)


def test_cross_entropy_by_rows_has_the_value_and_gradient_of_the_plain_formula():
    torch.manual_seed(0)
    logits = (10 * torch.randn(150, 30)).requires_grad_()  # more rows than are taken at once
    probabilities, index = torch.randn(99, 30).softmax(-1), torch.randint(99, (150,))
    expected = -(probabilities[index] * logits.log_softmax(-1)).sum()
    (expected_gradient,) = torch.autograd.grad(3 * expected, logits)
    loss, best = soft_cross_entropy(logits, probabilities, index)
    (gradient,) = torch.autograd.grad(3 * loss, logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert torch.equal(best, logits.argmax(-1))


def test_cross_entropy_of_states_is_that_of_their_logits():
    torch.manual_seed(0)
    lm_head, wanted = torch.randn(30, 8), torch.randn(150, 8)
    states = torch.randn(150, 8, requires_grad=True)
    logits = states @ lm_head.T
    expected = -((wanted @ lm_head.T).softmax(-1) * logits.log_softmax(-1)).sum()
    (expected_gradient,) = torch.autograd.grad(expected, states)
    loss, best, choices = cross_entropy_of_states(states, wanted, lm_head)
    (gradient,) = torch.autograd.grad(loss, states)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-4)
    assert torch.equal(best, logits.argmax(-1)) and torch.equal(choices, (wanted @ lm_head.T).argmax(-1))
