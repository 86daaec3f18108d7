"""The tuner's arithmetic on made-up numbers: what trees win, what they cost, which one is chosen."""

import pytest

from fastdecode.tree_options import parse_tree
from fastdecode.tuner import (
    CHAINS,
    PLAIN,
    TREES,
    Costs,
    Expectation,
    best,
    between,
    chain_acceptance,
    draft_cost,
    expect,
    expected_tokens,
)

HALF = ((0.5,),) * 8


def test_a_chain_wins_the_sum_of_the_chances_to_get_that_far():
    assert expected_tokens(parse_tree("chain:3"), HALF) == 1 + 1 / 2 + 1 / 4 + 1 / 8
    assert expected_tokens(parse_tree("chain:2"), ((0.8,), (0.5,), (0.0,))) == pytest.approx(1 + 0.8 + 0.4)


def test_a_chain_beyond_what_was_measured_goes_on_as_it_ended():
    assert expected_tokens(parse_tree("chain:3"), ((1.0,), (0.5,))) == 1 + 1 + 1 / 2 + 1 / 4


def test_a_static_tree_adds_every_rank_at_its_depth(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text("[[0],[1],[0,0],[0,1],[1,0]]")
    acceptance = ((0.5, 0.25), (0.4, 0.1))
    expected = 1 + 0.5 + 0.25 + 0.5 * 0.4 + 0.5 * 0.1 + 0.25 * 0.4
    assert expected_tokens(parse_tree(f"static:{file}"), acceptance) == pytest.approx(expected)


def test_a_dynamic_tree_keeps_the_likeliest_nodes_only():
    # Recorded: 0.6, 0.3; below them 0.3, 0.12 and 0.15, 0.06. The four best stay beside the root.
    assert expected_tokens(parse_tree("dynamic:1,2,5"), ((0.6, 0.3), (0.5, 0.2))) == pytest.approx(1 + 0.6 + 0.6 + 0.15)


def test_ranks_that_were_not_measured_are_never_right(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text("[[0],[1],[2]]")
    assert expected_tokens(parse_tree(f"static:{file}"), ((0.5, 0.25),)) == 1.75


def test_costs_lie_on_lines_between_and_beyond_what_was_measured():
    points = {1: 10.0, 3: 14.0, 9: 20.0}
    assert [between(points, n) for n in (1, 2, 3, 6, 9, 12)] == [10, 12, 14, 17, 20, 23]
    assert between({4: 7.0}, 9) == 7.0


def test_a_wide_level_costs_as_much_more_as_verifying_so_many_nodes_does(tmp_path):
    costs = Costs({0: 0.0, 2: 4.0}, {1: 10.0, 3: 15.0})
    assert draft_cost(parse_tree("chain:2"), costs) == 4.0
    file = tmp_path / "tree.json"
    file.write_text("[[0],[1],[2],[0,0],[1,0],[2,0]]")  # three nodes wide: 1.5 times a pass over one
    assert draft_cost(parse_tree(f"static:{file}"), costs) == pytest.approx(4.0 + 2.0 * 0.5)


def test_the_choice_is_the_best_rate_and_not_the_most_tokens():
    # Plain 1 token in 10 ms; chain K drafts for K ms, verifies for 10 + K - 1: 1.5 in 11, 1.75 in 13, 1.875 in 15.
    costs = Costs({0: 0.0, 8: 8e-3}, {1: 10e-3, 2: 10e-3, 9: 17e-3})
    rows = expect(CHAINS, costs, HALF)
    assert [row.tree for row in rows] == [PLAIN, *CHAINS]
    assert rows[1].tokens_per_s == pytest.approx(1.5 / 11e-3) and rows[3].tokens_per_s == pytest.approx(1.875 / 15e-3)
    assert best(rows).tree == "chain:1"
    assert best(expect(CHAINS, costs, ((0.9,),) * 8)).tree == "chain:6"  # 5.217 in 21 ms; 4.686 in 19; 5.695 in 23
    assert best(expect(CHAINS, costs, ((1.0,),) * 8)).tree == "chain:8"


def test_plain_is_chosen_where_drafting_wins_nothing():
    costs = Costs({0: 0.0, 8: 0.0}, {1: 10e-3, 9: 10e-3})
    assert best(expect(CHAINS, costs, ((0.0,),) * 8)).tree == PLAIN
    dear = Costs({0: 0.0, 8: 80e-3}, {1: 10e-3, 9: 10e-3})
    assert best(expect((*CHAINS, *TREES), dear, ((0.6, 0.2, 0.1, 0.05),) * 8)).tree == PLAIN


def test_of_equals_the_smallest_tree_is_chosen():
    assert best([Expectation(f"chain:{n}", n + 1, 2.0, 0.0, 1.0) for n in (5, 2, 7)]).tree == "chain:2"


def test_acceptance_per_depth_is_among_the_rounds_that_came_so_far():
    assert chain_acceptance([0, 1, 3, 3], 4) == ((0.75,), (2 / 3,), (1.0,), (0.0,))
    assert chain_acceptance([0, 0], 2) == ((0.0,), (0.0,))


@pytest.mark.parametrize("n_tokens", [1, 2, 3])
def test_a_chains_expectation_is_the_mean_of_what_was_seen(n_tokens):
    accepted = [0, 1, 3, 3, 2, 0, 3]
    seen = sum(1 + min(n, n_tokens) for n in accepted) / len(accepted)
    assert expected_tokens(parse_tree(f"chain:{n_tokens}"), chain_acceptance(accepted, 3)) == pytest.approx(seen)
