"""Round after round, an EAGLE drafter proposes what it would propose for the same text seen at once."""

import eagle_fixtures
import pytest
import torch
from eagle_fixtures import commit, draft, prefill, states_at, texts, token_paths

from fastdecode.drafters import Chunk
from fastdecode.drafters.eagle import EagleDrafter
from fastdecode.sampling import SamplingContext, SamplingState
from fastdecode.tree import DynamicTree, StaticTree
from fastdecode.tree_options import chain, eagle1_tree
from models.errors import InputError
from models.transformer import Hidden

VOCAB, DRAFTED, WIDTH, ROWS, LENGTH = 90, 40, 32, 70, 40
TREES = {"chain": lambda: chain(3), "static": eagle1_tree, "dynamic": lambda: DynamicTree(3, 4, 16)}


def random_head(kind, seed=0):
    return eagle_fixtures.random_head(kind, VOCAB, WIDTH, DRAFTED, seed)


def random_text(seed=0, batch=1):
    """Token ids `[B, LENGTH]` and the target's states at them."""
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (batch, LENGTH), generator=numbers)
    return ids, Hidden(*(lambda s: (s[0], s))(tuple(torch.randn(3, batch, LENGTH, WIDTH, generator=numbers))))


def new_drafter(kind, tree="dynamic", batch=1):
    return EagleDrafter(random_head(kind), TREES[tree](), batch, ROWS)


def fresh_tree(kind, tree, ids, hidden, length, chunk=64, **options):
    drafter, text = new_drafter(kind, tree), texts(ids, ROWS)
    prefill(drafter, text, hidden, length, chunk)
    return draft(drafter, text, **options)


def assert_same(ours, expected, b=0):
    for tensor, other in zip(ours, expected, strict=True):
        assert tensor[b].tolist() == other[0].tolist()


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("tree", TREES)
def test_a_text_grown_in_rounds_drafts_like_the_text_at_once(kind, tree):
    ids, hidden = random_text()
    drafter, text = new_drafter(kind, tree), texts(ids, ROWS)
    prefill(drafter, text, hidden, 9, chunk=4)
    assert_same(draft(drafter, text), fresh_tree(kind, tree, ids, hidden, 9))
    seen = set()
    for accepted in (1, 4, 2, 1, 3, 4, 4):
        commit(drafter, text, hidden, accepted)
        ours = draft(drafter, text)
        assert_same(ours, fresh_tree(kind, tree, ids, hidden, int(text.length)))
        seen.add(tuple(ours.tokens[0, 1:].tolist()))
    assert len(seen) > 3  # a head that says one thing would show nothing


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("length", [2, 3, 8, 9, 10, 17])
def test_prompts_of_any_length_around_a_chunk_draft_alike(kind, length):
    ids, hidden = random_text(1)
    for chunk in (1, 3, 8):
        assert_same(
            fresh_tree(kind, "dynamic", ids, hidden, length, chunk), fresh_tree(kind, "dynamic", ids, hidden, length)
        )


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_text_of_one_token_proposes_nothing_and_then_drafts(kind):
    ids, hidden = random_text(2)
    drafter, text = new_drafter(kind), texts(ids, ROWS)
    prefill(drafter, text, hidden, 20)  # an earlier text in the same slot
    commit(drafter, text, hidden, 3)
    text.length.fill_(1)
    prefill(drafter, text, hidden, 1)
    tree = draft(drafter, text)
    assert tree.valid.tolist() == [[True] + [False] * 15]
    assert tree.tokens[0, 0] == ids[0, 0]
    commit(drafter, text, hidden, 1)
    ours = draft(drafter, text)
    assert ours.valid.all()
    assert_same(ours, fresh_tree(kind, "dynamic", ids, hidden, 2))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_rows_of_a_batch_draft_as_they_would_alone(kind):
    ids, hidden = random_text(3, batch=3)
    drafter, text = new_drafter(kind, batch=3), texts(ids, ROWS)
    rows = [Hidden(hidden.last[b : b + 1], tuple(s[b : b + 1] for s in hidden.entering)) for b in range(3)]
    for b, length in enumerate((5, 12, 1)):
        prefill(drafter, text, rows[b], length, slot=b)
    lengths = [5, 12, 1]
    for counts in ((0, 0, 0), (2, 4, 1), (1, 1, 3)):
        if any(counts):
            parts = [slice(n - 1, n - 1 + count) for n, count in zip(lengths, counts, strict=True)]
            nodes = [states_at(row, part, drafter.n_nodes) for row, part in zip(rows, parts, strict=True)]
            entering = zip(*(n.entering for n in nodes), strict=True)
            states = Hidden(torch.cat([n.last for n in nodes]), tuple(map(torch.cat, entering)))
            drafter.keep(text, states, torch.arange(drafter.max_depth + 1).expand(3, -1))
            text.length += torch.tensor(counts)
            lengths = text.length.tolist()
        ours = draft(drafter, text)
        for b in range(3):
            if lengths[b] > 1:
                assert_same(ours, fresh_tree(kind, "dynamic", ids[b : b + 1], rows[b], lengths[b]), b)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_chain_takes_what_stood_after_the_last_tokens_and_the_head_drafts_on_from_there(kind):
    ids, hidden = random_text(6)
    head = random_head(kind)
    first, second = head.target_ids(torch.tensor([3, 7])).tolist()
    ids[0, 10:14] = torch.tensor([first, second, first, second])  # after one pair stands the other, and no more

    def drafted_by(tree, lookup=0):
        drafter, text = EagleDrafter(head, tree, 1, ROWS, lookup=lookup), texts(ids, ROWS)
        prefill(drafter, text, hidden, 14)
        return draft(drafter, text).tokens[0, 1:].tolist()

    every = range(head.config.draft_vocab_size)
    rank = drafted_by(StaticTree([[r] for r in every])).index(first)
    below = drafted_by(StaticTree([[rank], *([rank, r] for r in every)]))[1:].index(second)
    third = drafted_by(StaticTree([[rank], [rank, below], [rank, below, 0]]))[2]  # the head's own choice after both
    for lookup in (1, 2):
        assert drafted_by(chain(3), lookup) == [first, second, third]
    assert drafted_by(chain(3), 3) == drafted_by(chain(3)) != [first, second, third]  # three tokens never stood before
    assert drafted_by(chain(1), 2) == [first]


@pytest.mark.parametrize("lookup", [0, 1])
def test_rows_of_a_batch_look_up_their_own_text(lookup):
    ids, hidden = random_text(8, batch=2)
    ids[0, 4:8] = torch.tensor([50, 51, 50, 51])
    drafter, text = EagleDrafter(random_head("eagle3"), chain(2), 2, ROWS, lookup=lookup), texts(ids, ROWS)
    rows = [Hidden(hidden.last[b : b + 1], tuple(s[b : b + 1] for s in hidden.entering)) for b in range(2)]
    for b, length in enumerate((7, 9)):
        prefill(drafter, text, rows[b], length, slot=b)
    ours = draft(drafter, text).tokens[:, 1:].tolist()
    assert (ours[0] == [51, 50]) == bool(lookup)
    assert ids[1, 8] not in ids[1, :8]  # so that there is nothing to look up
    assert ours[1] == fresh_tree("eagle3", "chain", ids[1:], rows[1], 9).tokens[0, 1:3].tolist()


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_round_on_a_finished_text_changes_nothing(kind):
    ids, hidden = random_text(4)
    drafter, text = new_drafter(kind), texts(ids, ROWS)
    prefill(drafter, text, hidden, 9)
    draft(drafter, text)
    commit(drafter, text, hidden, 3)
    text.done.fill_(True)
    before = {name: buffer.clone() for name, buffer in drafter.state.named_buffers()}
    draft(drafter, text)
    drafter.keep(text, states_at(hidden, slice(0, 1), 16), torch.zeros(1, 5, dtype=torch.int64))
    for name, buffer in drafter.state.named_buffers():
        if name.startswith("cache"):  # the tree's own rows and the bin are free to change
            assert torch.equal(buffer[:, :, drafter.scratch : -1], before[name][:, :, drafter.scratch : -1])
        else:
            assert torch.equal(buffer, before[name])
    text.done.fill_(False)
    assert_same(draft(drafter, text), fresh_tree(kind, "dynamic", ids, hidden, 12))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_features_are_those_of_the_accepted_nodes(kind):
    """Accepted nodes of a tree stand anywhere among its nodes; padding of the path is ignored."""
    ids, hidden = random_text(5)
    drafter, text = new_drafter(kind), texts(ids, ROWS)
    prefill(drafter, text, hidden, 9)
    draft(drafter, text)
    order = torch.tensor([[0, 3, 11, 0, 0]])

    def scattered(states):
        nodes = torch.randn(1, drafter.n_nodes, WIDTH)
        nodes[:, order[0, :3]] = states[:, 8:11]
        return nodes

    drafter.keep(text, Hidden(scattered(hidden.last), tuple(map(scattered, hidden.entering))), order)
    text.length += 3
    assert_same(draft(drafter, text), fresh_tree(kind, "dynamic", ids, hidden, 12))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_prompt_that_shares_a_prefix_prefills_only_what_reusable_leaves(kind):
    ids, hidden = random_text(6)
    other_ids, other_hidden = random_text(7)
    for common in (1, 2, 9, 14, 19):
        drafter, text = new_drafter(kind), texts(ids, ROWS)
        prefill(drafter, text, hidden, 9)
        for accepted in (4, 2, 5):
            draft(drafter, text)
            commit(drafter, text, hidden, accepted)
        kept = drafter.reusable(common, int(text.length))
        assert 0 <= kept < common
        mixed = torch.cat((ids[:, :common], other_ids[:, common:]), dim=1)

        def join(a, b, at=common):
            return torch.cat((a[:, :at], b[:, at:]), dim=1)

        states = Hidden(join(hidden.last, other_hidden.last), tuple(map(join, hidden.entering, other_hidden.entering)))
        text.tokens[:, :LENGTH] = mixed
        n_real = 29 - kept
        rest = states_at(states, slice(kept, 29), n_real)
        scalars = (torch.tensor(value) for value in (kept, n_real, n_real - 1))
        chunk = Chunk(mixed[:, kept:29], mixed[:, kept + 1 : 30], *scalars, torch.arange(ROWS - 1))
        drafter.prefill(0, rest, chunk)
        text.length.fill_(30)
        assert_same(draft(drafter, text), fresh_tree(kind, "dynamic", mixed, states, 30))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_drafts_do_not_depend_on_the_bucket(kind):
    ids, hidden = random_text(8)
    for bucket in (30, 33, 64):
        ours = fresh_tree(kind, "dynamic", ids, hidden, 30, bucket=bucket)
        assert_same(ours, fresh_tree(kind, "dynamic", ids, hidden, 30))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_the_last_token_of_the_context_is_drafted_from_like_any_other(kind):
    ids, hidden = random_text(8)
    drafter = EagleDrafter(random_head(kind), TREES["dynamic"](), 1, LENGTH + 16 + 1)  # a full cache of 16 nodes
    text = texts(ids, LENGTH + 16 + 1)
    prefill(drafter, text, hidden, LENGTH)
    assert_same(draft(drafter, text), fresh_tree(kind, "dynamic", ids, hidden, LENGTH))


def ranking(noise, *temperatures):
    options = SamplingState.allocate(len(temperatures), "cpu")
    options.temperature.copy_(torch.tensor(temperatures))
    return {"context": SamplingContext(noise, options, None, None)}


@pytest.mark.parametrize("tree", TREES)
def test_noise_is_read_at_the_targets_ids_and_at_its_depth(tree):
    ids, hidden = random_text(9)
    depth = TREES[tree]().max_depth
    drafted = random_head("eagle3").drafted.tolist()
    undrafted = next(i for i in range(VOCAB) if i not in drafted)
    quiet = torch.zeros(1, depth + 1, VOCAB)
    plain = fresh_tree("eagle3", tree, ids, hidden, 12)
    assert_same(fresh_tree("eagle3", tree, ids, hidden, 12, **ranking(quiet, 1.0)), plain)
    for level, token in ((0, drafted[7]), (1, drafted[29])):
        loud = quiet.clone()
        loud[:, level, token] = 100.0
        assert_same(fresh_tree("eagle3", tree, ids, hidden, 12, **ranking(loud, 0.0)), plain)
        paths = token_paths(fresh_tree("eagle3", tree, ids, hidden, 12, **ranking(loud, 1.0)), depth)
        best = [path for path in paths if len(path) > level + 1 and path[level + 1] == token]
        assert best  # it is among the children there …
        deep = max(len(path) for path in paths)
        assert any(len(path) == deep for path in best)  # … and the deepest drafts go through it
    loud = quiet.clone()
    loud[:, :, undrafted] = 100.0
    assert_same(fresh_tree("eagle3", tree, ids, hidden, 12, **ranking(loud, 1.0)), plain)


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_the_first_draft_at_a_temperature_is_the_heads_own_noisy_choice(temperature):
    """argmax(log q / T + g), the rule by which the target chooses: checked over 40 draws."""
    ids, hidden = random_text(10)
    drafter, text = new_drafter("eagle3", "chain"), texts(ids, ROWS)
    prefill(drafter, text, hidden, 12)
    position = text.length - 1
    draft(drafter, text)
    state = drafter.state
    state.filled.fill_(10)  # the last pair is pending again
    for_logits = drafter._catch_up(text, position, torch.arange(ROWS - 1))[1]
    log_q = drafter.head.logits(for_logits)[0, 0].log_softmax(-1)
    chosen = set()
    for seed in range(40):
        numbers = torch.Generator().manual_seed(seed)
        noise = -torch.log(-torch.log(torch.rand(1, 4, VOCAB, generator=numbers)))
        best = int((log_q / temperature + noise[0, 0, drafter.head.drafted]).argmax())
        state.filled.fill_(10)
        tree = draft(drafter, text, **ranking(noise, temperature))
        assert tree.tokens[0, 1] == drafter.head.drafted[best]
        chosen.add(best)
    assert len(chosen) > 3


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("tree", TREES)
def test_drafting_is_one_graph_for_every_bucket(kind, tree):
    ids, hidden = random_text(11)
    drafter, text = new_drafter(kind, tree), texts(ids, ROWS)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    def advance(cache_rows, states, path):
        root = text.tokens.gather(1, text.length[:, None] - 1)[:, 0]
        grown = drafter.draft(text, root, cache_rows)
        drafter.keep(text, states, path)
        return grown

    compiled = torch.compile(advance, fullgraph=True, backend=count)
    prefill(drafter, text, hidden, 9)
    path = torch.zeros(1, drafter.max_depth + 1, dtype=torch.int64)
    for length, bucket in ((9, 40), (10, 40), (11, 48), (12, 69)):
        rows = torch.arange(bucket)
        torch._dynamo.mark_dynamic(rows, 0)
        ours = compiled(rows, states_at(hidden, slice(length - 1, length), drafter.n_nodes), path)
        text.length += 1
        assert_same(ours, fresh_tree(kind, tree, ids, hidden, length))
    assert len(graphs) == 1


def test_a_tree_wider_than_the_heads_vocabulary_is_refused():
    with pytest.raises(InputError, match="41 best children.*40 tokens"):
        EagleDrafter(random_head("eagle3"), DynamicTree(1, 41, 42), 1, ROWS)
