"""Builders grow the trees that they promise, and impossible trees are refused."""

import json
import math
import random
from collections import Counter

import pytest
import torch
from eagle_fixtures import token_paths
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code

from fastdecode.tree import Candidates, DynamicTree, StaticTree, lineage, path_to, plant
from fastdecode.tree_options import chain, eagle1_tree, parse_tree
from models.errors import InputError

VOCAB = 31


def grow(tree, root, children):
    """Grow with a stand-in for a drafter: `children(path)` gives ranked (token, score) pairs below a token path."""
    batch, growth = root.shape[0], plant(root)
    paths = [[(int(token),)] for token in root]
    for depth in range(tree.max_depth):
        if depth:
            paths = [
                [paths[b][parent] + (token,) for token, parent in zip(*frontier, strict=True)]
                for b, frontier in enumerate(zip(growth.tokens.tolist(), growth.parents.tolist(), strict=True))
            ]
            assert growth.tokens.shape == (batch, tree.widths[depth - 1])
        found = [[children(path)[: tree.top_k] for path in row] for row in paths]
        tokens = torch.tensor([[[token for token, _ in ranked] for ranked in row] for row in found])
        scores = torch.tensor([[[score for _, score in ranked] for ranked in row] for row in found])
        growth = tree.extend(growth, Candidates(tokens, scores))
    return tree.finish(growth, torch.ones(batch, dtype=torch.bool))


def random_children(seed, spread=3.0):
    """A fixed random distribution below every path: VOCAB (token, log-probability) pairs, best first."""

    def children(path):
        numbers = random.Random(f"{seed}{path}")
        weights = [numbers.gauss(0, spread) for _ in range(VOCAB)]
        total = math.log(sum(math.exp(w) for w in weights))
        tokens = numbers.sample(range(100, 100 + VOCAB), VOCAB)
        return sorted(((t, w - total) for t, w in zip(tokens, weights, strict=True)), key=lambda pair: -pair[1])

    return children


def assert_well_formed(tree, n_nodes):
    assert tree.tokens.shape == tree.parents.shape == tree.valid.shape == (tree.tokens.shape[0], n_nodes)
    assert tree.parents.dtype == torch.int64 and tree.tokens.dtype == torch.int64
    assert (tree.parents[:, 0] == 0).all()
    assert (tree.parents[:, 1:] < torch.arange(1, n_nodes)).all()  # parents stand before their children


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_a_chain_follows_the_best_child_of_the_best_child(k):
    tree, children = chain(k), random_children("chain")
    assert (tree.n_nodes, tree.max_depth, tree.chain, tree.top_k) == (k + 1, k, True, 1)
    grown = grow(tree, torch.tensor([7, 9]), children)
    for b, root in enumerate((7, 9)):
        path = (root,)
        for _ in range(k):
            path += (children(path)[0][0],)
        assert tuple(grown.tokens[b].tolist()) == path
        assert grown.parents[b].tolist() == [0, *range(k)]


def test_eagle1s_tree_has_25_drafts_on_five_levels():
    tree = eagle1_tree()
    assert (tree.n_nodes, tree.max_depth, tree.chain, tree.top_k) == (26, 5, False, 4)
    grown = grow(tree, torch.tensor([3]), random_children("eagle"))
    assert_well_formed(grown, 26)
    depths = Counter(lineage(grown.parents, 5).depth[0].tolist())
    assert depths == {0: 1, 1: 4, 2: 8, 3: 8, 4: 3, 5: 2}


@st.composite
def path_sets(draw):
    paths = [()]
    for _ in range(draw(st.integers(1, 14))):
        child = draw(st.sampled_from(paths)) + (draw(st.integers(0, 4)),)
        paths += [child] if child not in paths else []
    return draw(st.permutations(paths[1:]))


@settings(max_examples=40, deadline=None)
@given(path_sets(), st.integers(0, 100))
def test_a_static_tree_has_the_paths_of_its_ranks(paths, seed):
    tree, children = StaticTree(paths), random_children(seed)
    grown = grow(tree, torch.tensor([1, 2]), children)
    assert_well_formed(grown, len(paths) + 1)
    assert tree.chain == (sorted(map(len, paths)) == list(range(1, len(paths) + 1)))
    for b, root in enumerate((1, 2)):
        expected = {(root,)}
        for ranks in paths:
            path = (root,)
            for rank in ranks:
                path += (children(path)[rank][0],)
            expected.add(path)
        assert token_paths(grown, tree.max_depth, b) == expected


def dynamic_tree_by_hand(root, children, depth, top_k, total):
    """EAGLE-2's tree with lists and loops: the token paths of the nodes that stay, and the order of their numbers."""
    recorded, frontier = [], [((root,), 0.0)]
    for _ in range(depth + 1):
        level = [
            (path + (token,), score + min(step, -1e-4))
            for path, score in frontier
            for token, step in children(path)[:top_k]
        ]
        recorded += level
        frontier = sorted(level, key=lambda node: -node[1])[:top_k]
    best = sorted(range(len(recorded)), key=lambda i: -recorded[i][1])[: total - 1]
    return [(root,)] + [recorded[i][0] for i in sorted(best)]


SHAPES = [(0, 4, 4), (1, 3, 8), (3, 1, 5), (7, 1, 4), (5, 10, 60), (4, 4, 20), (7, 10, 60), (3, 6, 26), (6, 2, 2)]


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_dynamic_tree_is_the_one_built_by_hand(shape, spread):
    tree, children = DynamicTree(*shape), random_children(shape, spread)
    assert tree.n_nodes == shape[2] and tree.chain == (shape[1] == 1)
    roots = [1, 2, 3]
    grown = grow(tree, torch.tensor(roots), children)
    assert_well_formed(grown, shape[2])
    family = lineage(grown.parents, tree.max_depth)
    for b, root in enumerate(roots):
        expected = dynamic_tree_by_hand(root, children, *shape)
        assert grown.tokens[b].tolist() == [path[-1] for path in expected]
        assert family.depth[b].tolist() == [len(path) - 1 for path in expected]
        assert token_paths(grown, tree.max_depth, b) == set(expected)


@pytest.mark.parametrize("score", [0.0, -1e-9, -5000.0, -1e30])
def test_a_dynamic_tree_stays_connected_where_scores_tie(score):
    """Certain steps (probability 1), and scores so low that adding a step changes nothing."""
    tree = DynamicTree(7, 10, 60)
    # A token tells its parent's, so a node moved to another parent would show.
    grown = grow(tree, torch.tensor([1]), lambda path: [(path[-1] * 11 + i, score) for i in range(10)])
    assert_well_formed(grown, 60)
    above = grown.tokens.gather(1, grown.parents)[0]
    assert torch.equal(grown.tokens[0, 1:] // 11, above[1:])


@pytest.mark.parametrize("step", [0.0, -1e-9, -0.5, -4000.0])
def test_a_child_scores_strictly_below_its_parent(step):
    tree, growth = DynamicTree(7, 2, 16), plant(torch.tensor([5]))
    for depth in range(1, tree.max_depth + 1):
        width = growth.tokens.shape[1]
        found = Candidates(torch.zeros(1, width, 2, dtype=torch.int64), torch.full((1, width, 2), step))
        grown = tree.extend(growth, found)
        scores = grown.levels[-1].scores.view(1, width, 2)
        assert scores.dtype == torch.float32
        assert (scores < growth.scores[:, :, None]).all()
        torch.testing.assert_close(scores, torch.full_like(scores, depth * min(step, -1e-4)))
        growth = grown
    low = growth._replace(scores=torch.full_like(growth.scores, -1e7))  # where one step less is the same number
    found = Candidates(torch.zeros(1, 2, 2, dtype=torch.int64), torch.zeros(1, 2, 2))
    assert (tree.extend(low, found).levels[-1].scores < -1e7).all()


@pytest.mark.parametrize("text", ["chain:3", "static", "dynamic:3,4,12", "dynamic:4,1,6"])
def test_growing_reads_nothing_back_to_the_host(text):
    tree = parse_tree(text)

    def grow_on_device(root, logits):
        growth = plant(root)
        for _ in range(tree.max_depth):
            scores = logits[growth.tokens].log_softmax(-1).topk(tree.top_k, dim=-1)
            growth = tree.extend(growth, Candidates(scores.indices, scores.values))
        return tree.finish(growth, root > 0)

    torch.manual_seed(0)
    root, logits = torch.tensor([3, 0]), torch.randn(VOCAB, VOCAB)
    compiled = torch.compile(grow_on_device, fullgraph=True, backend="eager", dynamic=False)(root, logits)
    for ours, eager in zip(compiled, grow_on_device(root, logits), strict=True):
        assert torch.equal(ours, eager)
    assert compiled.valid.tolist() == [[True] * tree.n_nodes, [True] + [False] * (tree.n_nodes - 1)]


def test_paths_and_depth_follow_from_the_parents():
    parents = torch.tensor([[0, 0, 0, 1, 3, 2]])
    family = lineage(parents, 3)
    assert family.depth.tolist() == [[0, 1, 1, 2, 3, 2]]
    assert family.ancestors[0, 4].tolist() == [True, True, False, True, True, False]
    assert path_to(torch.tensor([4]), family, 3).tolist() == [[0, 1, 3, 4]]
    assert path_to(torch.tensor([5]), family, 3).tolist() == [[0, 2, 5, 0]]


def test_what_is_compiled_does_not_grow_with_powers_of_the_depth():
    def size(depth: int) -> int:
        def accept(agrees):
            parents = (torch.arange(depth + 1) - 1).clamp_min(0)[None]
            family = lineage(parents, depth)
            accepted = (agrees[:, None] | ~family.ancestors).all(-1)
            return path_to(torch.where(accepted, family.depth, -1).amax(-1), family, depth)

        torch._dynamo.reset()
        _, code = run_and_get_code(torch.compile(accept, fullgraph=True), torch.ones(1, depth + 1, dtype=torch.bool))
        return sum(map(len, code))

    assert size(7) < 1.3 * size(3)


def test_options_name_trees(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text("[[0],[1],[0,0]]")
    assert parse_tree("chain:4").n_nodes == 5
    assert parse_tree("static").n_nodes == 26
    assert parse_tree(f"static:{file}").n_nodes == 4
    tree = parse_tree("dynamic:5,10,60")
    assert (tree.n_nodes, tree.max_depth, tree.top_k) == (60, 6, 10)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "chain:K"),
        ("bush", "'bush'"),
        ("chain", "chain:K"),
        ("chain:", "chain:K"),
        ("chain:0", "1 to 64"),
        ("chain:65", "1 to 64"),
        ("chain:-3", "chain:K"),
        ("chain:2,3", "chain:K"),
        ("chain:1e3", "chain:K"),
        ("dynamic", "DEPTH,TOPK,TOTAL"),
        ("dynamic:5,10", "DEPTH,TOPK,TOTAL"),
        ("dynamic:5,0,60", "TOPK should be a whole number from 1"),
        ("dynamic:64,2,60", "DEPTH should be a whole number from 0 to 63, found 64"),
        ("dynamic:5,10,1", "TOTAL should be a whole number from 2"),
        ("dynamic:1,2,60", "TOTAL 60 is more than the 7 nodes"),
        ("dynamic:3,1,6", "TOTAL 6 is more than the 5 nodes"),
        ("static:", "cannot be read"),
        ("static:/no/such/file.json", "cannot be read"),
    ],
)
def test_options_that_name_no_tree_are_refused(text, words):
    with pytest.raises(InputError, match=words.replace("(", r"\(")):
        parse_tree(text)


@pytest.mark.parametrize(
    "content, words",
    [
        ("[[0],[1,0]]", r"\[1, 0\] has no parent; add \[1\]"),
        ("[[0],[1],[0]]", r"\[0\] is given twice"),
        ("[[0],[]]", r"path \[\] should be"),
        ("[]", "list of 1 to"),
        ("{}", "list of 1 to"),
        ("3", "list of 1 to"),
        ("[0, 1]", "path 0 should be"),
        ("[[0],[-1]]", r"path \[-1\] should be"),
        ("[[0],[0.0]]", r"path \[0.0\] should be"),
        ("[[0],[true]]", r"path \[True\] should be"),
        ('[["0"]]', "should be a list of 1 to 64 child ranks"),
        ("[[0],[0,1", "is not JSON"),
        ("[" * 100000, "is not JSON"),
        (json.dumps([[0] * n for n in range(1, 70)]), "1 to 64 child ranks"),
        (json.dumps([[n] for n in range(1024)]), "list of 1 to 1023"),
    ],
)
def test_a_file_that_holds_no_tree_is_refused(content, words, tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(content)
    with pytest.raises(InputError, match=words) as raised:
        parse_tree(f"static:{file}")
    assert str(file) in str(raised.value)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "tree.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not JSON"):
        parse_tree(f"static:{tmp_path / 'tree.json'}")
    with pytest.raises(InputError, match="cannot be read"):
        parse_tree(f"static:{tmp_path}")
