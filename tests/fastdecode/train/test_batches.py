"""How conversations become batches."""

import numpy as np
import pytest
import torch
from loop_fixtures import conversations

from fastdecode.train.batches import collate, plan_epoch, split
from fastdecode.train.initial import draft_vocabulary
from fastdecode.train.store import Conversation


def test_every_conversation_is_in_exactly_one_batch_of_an_epoch_within_the_budget():
    lengths = np.random.default_rng(0).integers(5, 300, 500).tolist()
    indices = list(range(1000, 1500))
    for epoch in range(3):
        plan = plan_epoch(indices, lengths, 1000, 7, epoch)
        assert sorted(i for batch in plan for i in batch) == indices
        assert max(len(batch) * max(lengths[i - 1000] for i in batch) for batch in plan) <= 1000


def test_a_conversation_longer_than_the_budget_is_a_batch_of_its_own():
    assert sorted(plan_epoch([0, 1, 2], [10, 500, 10], 100, 0, 0), key=len) == [[1], [0, 2]] or sorted(
        plan_epoch([0, 1, 2], [10, 500, 10], 100, 0, 0), key=len
    ) == [[1], [2, 0]]


def test_little_of_a_batch_is_padding():
    lengths = np.random.default_rng(0).integers(5, 500, 2000).tolist()
    plan = plan_epoch(range(2000), lengths, 4096, 0, 0)
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in plan)
    assert sum(lengths) / padded > 0.9


def test_the_order_is_a_function_of_seed_and_epoch_and_not_sorted_by_length():
    lengths = np.random.default_rng(0).integers(5, 300, 200).tolist()

    def plan(seed, epoch):
        return plan_epoch(range(200), lengths, 1000, seed, epoch)

    assert plan(0, 0) == plan(0, 0)
    assert plan(0, 0) != plan(0, 1) and plan(0, 0) != plan(1, 0)
    longest = [max(lengths[i] for i in batch) for batch in plan(0, 0)]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


def test_more_data_moves_no_conversation_from_training_to_validation():
    data = conversations(300)
    train, held_out = split(data[:200], 100, 0.1, 0)
    more_train, more_held_out = split(data, 100, 0.1, 0)
    assert set(train) < set(more_train) and set(held_out) < set(more_held_out)
    assert len(held_out) == pytest.approx(20, abs=12)


def test_something_is_always_held_out_and_conversations_without_an_answer_to_learn_count_for_nothing():
    data = [*conversations(3), Conversation(np.arange(9, dtype=np.int32), np.arange(9) < 2)]
    train, held_out = split(data, 100, 0.001, 0)
    assert len(held_out) == 1 and sorted(train + held_out) == [0, 1, 2]


def test_a_batch_is_cut_and_padded_and_says_so():
    data = [
        Conversation(np.array([4, 5, 6, 7], np.int32), np.array([False, False, True, True])),
        Conversation(np.array([8, 9], np.int32), np.array([False, True])),
    ]
    batch = collate(data, 3)
    assert batch.token_ids.tolist() == [[4, 5, 6], [8, 9, 0]] and batch.token_ids.dtype == torch.int64
    assert batch.answer.tolist() == [[False, False, True], [False, True, False]]
    assert batch.real.tolist() == [[True, True, True], [True, True, False]]


def test_the_draft_vocabulary_is_what_answers_use_topped_up_with_the_lowest_ids():
    ids = np.array([9, 9, 9, 7, 7, 7, 7, 5, 5, 3], np.int32)
    answer = np.array([False, True, True, True, True, True, False, True, False, False])
    data = [Conversation(ids, answer)]  # answers say 7 three times, 9 twice, 5 once; 3 only stands in a prompt
    drafted, coverage = draft_vocabulary(data, 2, 12)
    assert drafted.tolist() == [7, 9] and coverage == pytest.approx(5 / 6)
    drafted, coverage = draft_vocabulary(data, 6, 12)
    assert drafted.tolist() == [0, 1, 2, 5, 7, 9] and coverage == 1.0
