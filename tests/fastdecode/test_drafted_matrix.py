"""Drafting never changes output, over everything that could matter at once: every pair of values of seven factors
occurs in some case, and a random part of all combinations is tried besides."""

import functools
import itertools
import random
from typing import NamedTuple

import eagle_fixtures
import pytest
import torch
from stub_drafters import Oracle
from test_decoder import plain_decoder, reference_tokens, text_of
from test_drafting import another_model, drafting
from tiny_checkpoint import tiny_checkpoint

from fastdecode.drafters import cache_rows_for
from fastdecode.drafters.eagle import EagleDrafter
from fastdecode.drafters.model import ModelDrafter
from fastdecode.drafters.ngram import NgramDrafter
from fastdecode.tree import DynamicTree, StaticTree
from fastdecode.tree_options import chain, eagle1_tree

LIMIT, NEW_TOKENS = 340, 64

FAMILIES = ["llama", "llama-tied", "llama-biased", "llama-9-heads-on-3", "rope-llama3", "rope-yarn"]
FAMILIES += ["mistral-window", "qwen2", "qwen3", "mixtral", "qwen3-moe"]
DRAFTERS = ["eagle1", "eagle3", "lookup", "model", "ngram", "oracle"]  # lookup: an EAGLE-3 head's chain with it
CHAINS = {f"chain:{k}": functools.partial(chain, k) for k in range(1, 9)}
TREES = CHAINS | {
    "static": eagle1_tree,
    "static:wide": lambda: StaticTree([[rank] for rank in range(40)]),
    "dynamic:0,1,2": lambda: DynamicTree(0, 1, 2),
    "dynamic:1,2,4": lambda: DynamicTree(1, 2, 4),
    "dynamic:3,4,16": lambda: DynamicTree(3, 4, 16),
    "dynamic:5,10,64": lambda: DynamicTree(5, 10, 64),
}
# A chunk, a bucket, one less, one more (the root is not prefilled); the last one runs into the context's limit.
PROMPTS = [1, 2, 32, 33, 34, 255, 256, 257, LIMIT - 40]
SAMPLING = {
    "greedy": {},
    "greedy with penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    "greedy with penalties that decide": {"presence_penalty": 60.0, "repetition_penalty": 1.1},
    "T 1, presence rewarded": {"temperature": 1.0, "presence_penalty": -8.0, "seed": 8},
    "T 0.5": {"temperature": 0.5, "seed": 5},
    "T 1, top-p": {"temperature": 1.0, "top_p": 0.9, "seed": 6},
    "T 1.5, penalties": {"temperature": 1.5, "repetition_penalty": 1.2, "seed": 7},
}


class Case(NamedTuple):
    family: str
    drafter: str
    tree: str
    batch: int
    prompt: int
    sampling: str
    compiled: bool


FACTORS = (FAMILIES, DRAFTERS, list(TREES), [1, 3], PROMPTS, list(SAMPLING))


def possible(case) -> bool:
    """Only heads draft trees that are no chains."""
    return case[1] in ("eagle1", "eagle3") or case[2] in CHAINS


def any_case(numbers: random.Random, fixed=()) -> Case:
    """A possible case with the `fixed` values, pairs of factor and value, and others by chance."""
    while True:
        values = [numbers.choice(factor) for factor in FACTORS]
        for i, value in fixed:
            values[i] = value
        if possible(values):
            return Case(*values, compiled=False)


def pairs_of(case: Case) -> set:
    return set(itertools.combinations(enumerate(case[:6]), 2))


def all_pairs() -> list:
    """Every pair of values of two factors that some case can have, in a fixed order."""
    pairs = []
    for i, j in itertools.combinations(range(6), 2):
        for a, b in itertools.product(FACTORS[i], FACTORS[j]):
            if (i, j) != (1, 2) or possible((None, a, b)):
                pairs.append(((i, a), (j, b)))
    return pairs


def covering() -> list[Case]:
    """Cases that cover all pairs: for each pair still missing, the case of 40 that brings the most missing ones."""
    numbers, missing, cases = random.Random(3), dict.fromkeys(all_pairs()), []
    while missing:
        pair = next(iter(missing))
        tries = [any_case(numbers, pair) for _ in range(40)]
        best = max(tries, key=lambda case: sum(pair in missing for pair in pairs_of(case)))
        cases.append(best)
        missing = {pair: None for pair in missing if pair not in pairs_of(best)}
    return cases


def sampled(count: int) -> list[Case]:
    numbers = random.Random(7)
    return [any_case(numbers) for _ in range(count)]


COVERING = covering()
COMPILED = [
    Case("qwen3", "lookup", "chain:4", 3, 257, "T 0.5", True),
    Case("qwen3-moe", "eagle3", "dynamic:3,4,16", 3, 34, "T 1, top-p", True),
    Case("mistral-window", "eagle1", "static", 1, 256, "greedy", True),
    Case("qwen2", "model", "chain:3", 3, 33, "T 1.5, penalties", True),
    Case("llama-tied", "oracle", "chain:8", 1, LIMIT - 40, "greedy", True),
]


@pytest.fixture(scope="module")
def family_of(tmp_path_factory):
    """`family_of(name)`: a tiny model of the family as the reference's, and plain decoders of one text and of three."""

    @functools.cache
    def make(family):
        folder = tmp_path_factory.mktemp(family)
        sizes = {"hidden_size": 72} if family == "llama-9-heads-on-3" else {}
        reference = tiny_checkpoint(folder, family, **sizes)
        single = plain_decoder(folder, max_seq_len=LIMIT)
        return reference, {1: single, 3: drafting(single, None, batch=3, limit=LIMIT)}

    return make


@pytest.fixture(scope="module")
def plain_answers(family_of):
    """`plain_answers(family, batch, prompt, sampling)`: what decoding without a draft says."""

    @functools.cache
    def answer(family, batch, prompt, sampling):
        prompts = prompts_of(prompt, batch)
        options = {"raw": True, "max_new_tokens": NEW_TOKENS, **SAMPLING[sampling]}
        reference, decoders = family_of(family)
        answers = [result.token_ids for result in decoders[batch].generate(prompts, **options)]
        if sampling == "greedy":
            for text, tokens in zip(prompts, answers, strict=True):
                assert tokens == reference_tokens(reference, decoders[1], text, len(tokens))
        return answers

    return answer


def prompts_of(n_tokens: int, batch: int) -> list[str]:
    """Texts of `n_tokens` tokens, and others beside it."""
    return [text_of(n, seed=n) for n in (n_tokens, 5, 40)[:batch]]


def drafter_for(case: Case, plain, answers: list[list[int]]):
    builder = TREES[case.tree]()
    n_drafted, rows = builder.n_nodes - 1, cache_rows_for(LIMIT, builder.n_nodes)
    config = plain.model.config
    if case.drafter == "ngram":
        return NgramDrafter(n_drafted)
    if case.drafter == "model":
        vocab_size = plain.runner.round.vocab_size
        return ModelDrafter(another_model(plain), n_drafted, case.batch, rows, vocab_size)
    if case.drafter == "oracle":  # right four times of five
        texts = [plain.encode(p, raw=True) for p in prompts_of(case.prompt, case.batch)]
        known = torch.zeros(case.batch, LIMIT, dtype=torch.int64)
        for row, ids in enumerate(texts):
            text = torch.tensor(ids + answers[row])
            known[row, : len(text)] = text
        return Oracle(n_drafted, known, spoil=lambda positions: positions % 5 == 0)
    kind, lookup = ("eagle3", 1) if case.drafter == "lookup" else (case.drafter, 0)
    head = eagle_fixtures.random_head(kind, config.vocab_size, config.hidden_size, n_drafted=60)
    return EagleDrafter(head, builder, case.batch, rows, lookup=lookup)


def check(case: Case, family_of, plain_answers) -> None:
    plain = family_of(case.family)[1][1]
    answers = plain_answers(case.family, case.batch, case.prompt, case.sampling)
    drafter = drafter_for(case, plain, answers)
    drafted = drafting(plain, drafter, case.batch, compile=case.compiled, limit=LIMIT)
    options = {"raw": True, "max_new_tokens": NEW_TOKENS, **SAMPLING[case.sampling]}
    results = drafted.generate(prompts_of(case.prompt, case.batch), **options)
    assert [result.token_ids for result in results] == answers
    assert len(answers[0]) == min(NEW_TOKENS, LIMIT - case.prompt)
    if case.drafter == "oracle":
        assert results[0].stats["tau"] > min(case.prompt, 1.3)


def test_the_cases_cover_every_pair_of_values_that_can_meet():
    assert 150 < len(COVERING) < 220 and all(map(possible, COVERING))
    met = set().union(*map(pairs_of, COVERING))
    assert met == set(all_pairs())
    assert len({(family, tree) for (_, family), (_, tree) in met if family in FAMILIES and tree in TREES}) == 11 * 14


@pytest.mark.parametrize("case", COVERING, ids=lambda case: "-".join(map(str, case[:6])))
def test_drafted_equals_plain_equals_the_reference(case, family_of, plain_answers):
    check(case, family_of, plain_answers)


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: "-".join(map(str, case[:6])))
def test_compiled_drafted_equals_uncompiled_plain(case, family_of, plain_answers):
    check(case, family_of, plain_answers)


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(20), ids=lambda case: "-".join(map(str, case[:6])))
def test_a_random_part_of_all_combinations(case, family_of, plain_answers):
    check(case, family_of, plain_answers)
