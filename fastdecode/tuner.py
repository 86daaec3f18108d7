"""Which tree pays: the tokens that a round is expected to commit, over the seconds that it is expected to take.

Arithmetic on measured numbers alone; tuning.py measures them. The model of acceptance is the one of Sequoia (arXiv
2402.12374): whether a draft is right depends on its depth and its rank among its siblings, and on nothing else.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fastdecode.tree import DynamicTree
from fastdecode.tree_options import TreeBuilder, parse_tree

PLAIN = "plain"
CHAINS = tuple(f"chain:{n}" for n in range(1, 9))
TREES = ("static", "dynamic:3,4,8", "dynamic:4,4,16", "dynamic:5,4,32")

Acceptance = Sequence[Sequence[float]]  # [d][k]: how often the draft of rank k is right below d right ones of rank 0


class Costs(NamedTuple):
    """Seconds of a round's two parts. `draft`: by drafted tokens in a chain, 0 among them; `verify`: by nodes, 1 among
    them, everything that is not drafting included. Between measured points lines are drawn, beyond them the last two
    points' line."""

    draft: Mapping[int, float]
    verify: Mapping[int, float]


class Expectation(NamedTuple):
    """What a round with one tree should do: `tokens` committed, seconds in drafting and in all the rest."""

    tree: str
    nodes: int
    tokens: float
    draft_s: float
    verify_s: float

    @property
    def round_s(self) -> float:
        """Seconds a round."""
        return self.draft_s + self.verify_s

    @property
    def tokens_per_s(self) -> float:
        """Expected rate."""
        return self.tokens / self.round_s


def expect(names: Sequence[str], costs: Costs, acceptance: Acceptance) -> tuple[Expectation, ...]:
    """What to expect of plain decoding, and of each tree in `names` as `--tree` would name it."""
    rows = [Expectation(PLAIN, 1, 1.0, 0.0, between(costs.verify, 1))]
    for name in names:
        tree = parse_tree(name)
        verify = between(costs.verify, tree.n_nodes)
        rows.append(Expectation(name, tree.n_nodes, expected_tokens(tree, acceptance), draft_cost(tree, costs), verify))
    return tuple(rows)


def best(rows: Sequence[Expectation]) -> Expectation:
    """The fastest; of equals the one with the fewest nodes, so that plain stays where drafting wins nothing."""
    return max(rows, key=lambda row: (row.tokens_per_s, -row.nodes))


def expected_tokens(tree: TreeBuilder, acceptance: Acceptance) -> float:
    """Tokens that a round with `tree` commits: 1 and, for every node, the chance that it is accepted.

    A dynamic tree is taken to rank its nodes by these same chances; the true one looks at each text's own, so that this
    is rather too low.
    """
    if isinstance(tree, DynamicTree):
        frontier, recorded = [1.0], []
        for depth in range(tree.max_depth):
            children = [above * _chance(acceptance, depth, k) for above in frontier for k in range(tree.top_k)]
            recorded += children
            frontier = sorted(children, reverse=True)[: tree.top_k]
        return 1.0 + sum(sorted(recorded, reverse=True)[: tree.n_nodes - 1])
    chances = [1.0]  # by node number
    for depth in range(tree.max_depth):
        parents, picked = (getattr(tree, f"{name}{depth + 1}").tolist() for name in ("parents", "picked"))
        ranks = [place % tree.top_k for place in picked]
        chances += [chances[p] * _chance(acceptance, depth, k) for p, k in zip(parents, ranks, strict=True)]
    return sum(chances)


def draft_cost(tree: TreeBuilder, costs: Costs) -> float:
    """Seconds to draft `tree`: a chain of its depth, and more where levels are wider than one node; a pass of the head
    is taken to grow with its rows as the target's does."""
    levels = sorted(costs.draft)
    one_level = (costs.draft[levels[-1]] - costs.draft[levels[0]]) / (levels[-1] - levels[0])
    alone = between(costs.verify, 1)
    wider = sum(max(0.0, between(costs.verify, width) / alone - 1.0) for width in tree.widths if width > 1)
    return max(0.0, between(costs.draft, tree.max_depth)) + one_level * wider


def between(points: Mapping[int, float], at: int) -> float:
    """The value at `at` on the lines through `points`, of which there is at least one."""
    if at in points:
        return points[at]
    known = sorted(points)
    if len(known) == 1:
        return points[known[0]]
    after = next((i for i, x in enumerate(known) if x > at), len(known) - 1)
    low, high = known[max(after, 1) - 1], known[max(after, 1)]
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)


def chain_acceptance(accepted: Sequence[int], n_tokens: int) -> tuple[tuple[float], ...]:
    """Acceptance per depth, from how many drafts each round of a chain of `n_tokens` accepted."""
    reached = [sum(n >= depth for n in accepted) for depth in range(n_tokens + 1)]
    return tuple((reached[d + 1] / reached[d] if reached[d] else 0.0,) for d in range(n_tokens))


def _chance(acceptance: Acceptance, depth: int, rank: int) -> float:
    """Depths beyond the measured ones are like the last one; ranks beyond them are never right."""
    ranks = acceptance[min(depth, len(acceptance) - 1)]
    return ranks[rank] if rank < len(ranks) else 0.0
