"""Successive rounds of dynamic-tree drafting propose what the public implementation proposes."""

import pytest
import torch
from eagle_fixtures import commit, draft, prefill, texts
from golden_files import golden_head, parametrize_golden

from fastdecode.drafters.eagle import EagleDrafter
from fastdecode.tree import DynamicTree, lineage, path_to

ROWS = 64


def pytest_generate_tests(metafunc):
    parametrize_golden(metafunc, "eagle1", "eagle3")


def golden_rounds(golden):
    """The tensors of round 0, 1, … without their prefix."""
    for index in range(len(golden.facts["rounds"])):
        prefix = f"round{index}."
        yield {n.removeprefix(prefix): t for n, t in golden.tensors.items() if n.startswith(prefix)}


def drafted_rounds(golden, tmp_path):
    """Draft a tree after each number of accepted pairs that the reference drafted after, round after round."""
    head, _ = golden_head(golden, tmp_path)
    tree = DynamicTree(golden.facts["depth"], golden.facts["top_k"], golden.facts["total_tokens"])
    drafter = EagleDrafter(head, tree, batch=1, rows=ROWS)
    ids = torch.cat((golden.tensors["input_ids"][:, :1], golden.next_ids), dim=1)
    text = texts(ids, ROWS)
    for index, expected in enumerate(golden_rounds(golden)):
        accepted = int(expected["accepted"])
        if index == 0:
            prefill(drafter, text, golden.hidden, accepted + 1)
        while index and accepted > drafter.max_depth + 1:  # more than a round of ours accepts: as of several rounds
            commit(drafter, text, golden.hidden, drafter.max_depth + 1)
            draft(drafter, text)
            accepted -= drafter.max_depth + 1
        if index:
            commit(drafter, text, golden.hidden, accepted)
        yield draft(drafter, text), expected


def leaf_paths(parents, max_depth):
    """Node paths from the root to each leaf."""
    family = lineage(parents, max_depth)
    leaves = set(range(parents.shape[1])) - set(parents[0, 1:].tolist())
    paths = [path_to(torch.tensor([leaf]), family, max_depth)[0, : family.depth[0, leaf] + 1] for leaf in leaves]
    return {tuple(path.tolist()) for path in paths}


@torch.inference_mode()
def test_golden_rounds_draft_the_same_trees(golden, tmp_path):
    n_rounds = 0
    for tree, expected in drafted_rounds(golden, tmp_path):
        max_depth = min(golden.facts["depth"] + 1, golden.facts["total_tokens"] - 1)
        family = lineage(tree.parents, max_depth)
        assert tree.valid.all()
        assert tree.tokens[0].tolist() == expected["draft_tokens"].tolist()
        assert torch.equal(family.ancestors[0], expected["tree_mask"].bool())
        assert torch.equal(family.depth[0], expected["tree_position_ids"])
        paths = {tuple(n for n in path if n >= 0) for path in expected["retrieve_indices"].tolist()}
        assert leaf_paths(tree.parents, max_depth) == paths
        n_rounds += 1
    assert n_rounds == len(golden.facts["rounds"])


@torch.inference_mode()
def test_golden_rounds_notice_another_feature(golden, tmp_path):
    """The comparison above would see a wrong pair: with the features one position late, trees differ."""
    late = golden.tensors | {"features": golden.tensors["features"].roll(1, dims=1)}
    shifted = type(golden)(golden.name, golden.facts, late)
    rounds = drafted_rounds(shifted, tmp_path)
    assert any(tree.tokens[0].tolist() != expected["draft_tokens"].tolist() for tree, expected in rounds)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of a few hundred numbers
    yield
    torch.set_num_threads(threads)
