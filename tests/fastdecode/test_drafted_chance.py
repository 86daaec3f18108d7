"""Sampling with drafts: the target's distribution, whatever is drafted, and drafts that are right as often as the
coupling of noise makes them."""

import copy
from collections import Counter

import eagle_fixtures
import pytest
import scipy.stats
import torch
from test_decoder import plain_decoder, text_of
from test_drafting import drafting
from tiny_checkpoint import tiny_checkpoint

from fastdecode.drafters import cache_rows_for
from fastdecode.drafters.eagle import EagleDrafter
from fastdecode.drafters.model import ModelDrafter
from fastdecode.tree_options import chain


@pytest.fixture(scope="module")
def soft(tmp_path_factory):
    """A tiny model that is sure of little, as the reference's and as a plain decoder."""
    folder = tmp_path_factory.mktemp("soft")
    reference = tiny_checkpoint(folder, hidden_size=48, initializer_range=0.12)
    return reference, plain_decoder(folder, max_seq_len=128)


def similar_model(plain, spread):
    """The target with noise of `spread` times each weight's deviation: a drafter that is sometimes right."""
    model = copy.deepcopy(plain.model)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.add_(torch.randn_like(parameter) * parameter.std() * spread)
    return model


def drafter_of(kind, plain, batch, n_tokens, limit):
    rows = cache_rows_for(limit, n_tokens + 1)
    if kind == "model":
        return ModelDrafter(similar_model(plain, 0.4), n_tokens, batch, rows, plain.runner.round.vocab_size)
    config = plain.model.config
    head = eagle_fixtures.random_head("eagle1", config.vocab_size, config.hidden_size, n_drafted=0)
    head.lm_head.weight.mul_(0.3)
    return EagleDrafter(head, chain(n_tokens), batch, rows)


def test_two_token_continuations_of_drafted_decoding_have_the_targets_distribution(soft):
    """20,000 seeds at temperature 0.7 with top-p 0.9; the draft is right in part of the rounds."""
    reference, plain = soft
    n, batch = 20_000, 500
    decoder = drafting(plain, drafter_of("model", plain, batch, 2, 16), batch, limit=16)
    options = {"temperature": 0.7, "top_p": 0.9, "seed": 11}
    counts, rounds = Counter(), 0
    for start in range(0, n, batch):
        results = decoder.generate(["a"] * batch, raw=True, max_new_tokens=2, first_index=start, **options)
        counts.update(tuple(r.token_ids) for r in results)
        rounds += sum(r.stats["rounds"] for r in results)
    assert counts.total() == n and 1.1 * n < rounds < 1.9 * n  # 2 n without a draft, n with a perfect one

    @torch.inference_mode()
    def distribution(ids):
        logits = reference(torch.tensor([ids])).logits[0, -1, : plain.tokenizer.vocab_size].double() / 0.7
        p, order = logits.softmax(-1).sort(descending=True)
        kept = p.cumsum(-1) - p < 0.9
        p = p[kept] / p[kept].sum()
        return dict(zip(order[kept].tolist(), p.tolist(), strict=True))

    prompt = plain.encode("a", raw=True)
    expected = {
        (a, b): n * p * q for a, p in distribution(prompt).items() for b, q in distribution([*prompt, a]).items()
    }
    assert set(counts) <= set(expected)
    cells = {pair: mean for pair, mean in expected.items() if mean >= 5}
    statistic = sum((counts[pair] - mean) ** 2 / mean for pair, mean in cells.items())
    rest = n - sum(cells.values())
    statistic += (n - sum(counts[pair] for pair in cells) - rest) ** 2 / rest
    assert len(cells) > 200
    assert scipy.stats.chi2.sf(statistic, len(cells)) > 0.001


class Spy:
    """Notes, round by round, the target's logits at the root and the drafter's that its first draft comes from."""

    def __init__(self, decoder, monkeypatch):
        self.p, self.q, self.right = [], [], []
        round_, drafter = decoder.runner.round, decoder.runner.round.drafter
        choose, commit = round_.choose, round_.commit

        def spy_choose(logits, tree, family, context):
            self.p.append(logits[:, 0, : round_.vocab_size].double().softmax(-1))
            return choose(logits, tree, family, context)

        def spy_commit(tree, chosen, path, n_accepted):
            self.right.append((n_accepted > 0) & ~round_.state.done)
            self.live.append(tree.valid[:, 1] & ~round_.state.done)
            return commit(tree, chosen, path, n_accepted)

        self.live = []
        monkeypatch.setattr(round_, "choose", spy_choose)
        monkeypatch.setattr(round_, "commit", spy_commit)
        if isinstance(drafter, EagleDrafter):
            candidates = drafter._candidates

            def spy_candidates(for_logits, depth, context):
                self.q += [] if depth else [drafter.head.logits(for_logits)[:, 0, :].double().softmax(-1)]
                return candidates(for_logits, depth, self.shown(context))

            monkeypatch.setattr(drafter, "_candidates", spy_candidates)
        else:
            choose_draft = drafter._choose

            def spy_draft(logits, depth, drafted, context):
                self.q += [] if depth else [logits[:, 0, : round_.vocab_size].double().softmax(-1)]
                return choose_draft(logits, depth, drafted, self.shown(context))

            monkeypatch.setattr(drafter, "_choose", spy_draft)

    quiet = False

    def shown(self, context):
        return None if self.quiet else context


def coupled(p, q):
    """Σ_v 1 / Σ_w max(p_w / p_v, q_w / q_v): how often two choices by one noise coincide."""
    p = torch.nn.functional.pad(p, (0, q.shape[-1] - p.shape[-1])).clamp_min(1e-200)  # the drafter may name padding
    p, q = p[:, :, None], q[:, :, None]
    return (1 / torch.maximum(p.transpose(1, 2) / p, q.transpose(1, 2) / q).sum(-1)).sum(-1)


@pytest.mark.parametrize("kind", ["model", "eagle1"])
def test_first_drafts_at_temperature_1_are_right_as_often_as_the_coupling_says(soft, monkeypatch, kind):
    batch, limit = 40, 64
    decoder = drafting(soft[1], drafter_of(kind, soft[1], batch, 1, limit), batch, limit=limit)
    decoder.sizes.sizes = [batch]  # the round that is looked into serves all texts to the end
    prompts = [text_of(4, seed=i) for i in range(batch)]
    shares = {}
    for quiet in (False, True):
        with monkeypatch.context() as patch:
            spy = Spy(decoder, patch)
            spy.quiet = quiet
            decoder.generate(prompts, raw=True, max_new_tokens=58, temperature=1.0, seed=3)
        live, right = torch.cat(spy.live), torch.cat(spy.right)
        shares[quiet] = right[live].double().mean().item()
        if not quiet:
            expected = torch.cat([coupled(p, q) for p, q in zip(spy.p, spy.q, strict=True)])[live]
            error = (expected * (1 - expected)).sum().sqrt().item() / len(expected)
            assert len(expected) > 1000 and error < 0.02
            assert abs(shares[False] - expected.mean().item()) < 3 * error
    assert shares[False] > shares[True] + 3 * error
