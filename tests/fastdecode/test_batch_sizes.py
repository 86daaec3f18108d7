"""A batch shrinks when prompts run out, and no answer changes; a program that is missing is not compiled for it."""

import pytest
from test_decoder import forget_stop_tokens, plain_decoder, text_of
from test_drafting import LIMIT, SAMPLED, drafter_of
from tiny_checkpoint import tiny_checkpoint

from fastdecode.batch_sizes import ROUNDS_WORTH, BatchSizes, smaller_sizes
from fastdecode.decoder import Decoder
from fastdecode.drafters.root import RootOnly
from fastdecode.runner import Runner

BATCH = 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder, hidden_size=48)
    return plain_decoder(folder, max_seq_len=LIMIT)


def batched(plain, kind, int8_cache=False):
    drafter = RootOnly() if kind == "none" else drafter_of(kind, plain, batch=BATCH)
    decoder = Decoder(
        plain.model, plain.tokenizer, stop_ids=(), max_seq_len=LIMIT, batch=BATCH, compile=False, drafter=drafter,
        int8_cache=int8_cache,
    )  # fmt: skip
    forget_stop_tokens(decoder)
    return decoder


@pytest.fixture
def sizes(monkeypatch):
    """How many texts each round was run for, in order, without repetitions."""
    seen = []
    step = Runner.step

    def watched(runner, program, bucket):
        size = len(runner.round.state.length)
        if seen[-1:] != [size]:
            seen.append(size)
        return step(runner, program, bucket)

    monkeypatch.setattr(Runner, "step", watched)
    return seen


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("none", {}),
        ("none", {**SAMPLED, "repetition_penalty": 1.3, "presence_penalty": 0.3}),
        ("ngram", {}),
        ("model", SAMPLED),
        ("eagle1", {}),
        ("eagle3", SAMPLED),
    ],
)
def test_what_is_left_moves_together_and_answers_stay(tiny, sizes, kind, options):
    # A text near the context's end gets a short answer, so that slots run empty one after another.
    lengths = (LIMIT - 9, 5, LIMIT - 25, LIMIT - 14, LIMIT - 33, LIMIT - 50, LIMIT - 5, LIMIT - 12)
    prompts = [text_of(n, seed=n) for n in lengths]
    decoder = batched(tiny, kind)
    for _ in range(2):  # the second time the whole batch begins again, in memory that was moved about
        sizes.clear()
        together = decoder.generate(prompts, raw=True, max_new_tokens=90, **options)
        assert sizes == [6, 4, 1]
        for i, result in enumerate(together):
            alone = {**options, "seed": options["seed"] + i} if "seed" in options else options
            assert result.token_ids == tiny.generate(prompts[i], raw=True, max_new_tokens=90, **alone).token_ids


def test_fewer_prompts_than_slots_begin_small_and_keep_their_prefix(tiny, sizes):
    decoder = batched(tiny, "eagle3")
    first = decoder.generate([text_of(40)], raw=True, max_new_tokens=20, keep_prefix=True)[0]
    assert sizes == [1]
    longer = text_of(40) + first.text + text_of(6, seed=2)
    kept = decoder.generate([longer], raw=True, max_new_tokens=20, keep_prefix=True)[0]
    assert kept.token_ids == tiny.generate(longer, raw=True, max_new_tokens=20).token_ids
    decoder.generate([text_of(n) for n in (3, 9)], raw=True, max_new_tokens=20)
    assert sizes == [1, 4]


def test_an_int8_cache_moves_with_its_scales(tiny, sizes):
    decoder = batched(tiny, "none", int8_cache=True)
    lengths = (LIMIT - 9, LIMIT - 20, LIMIT - 14, LIMIT - 17, LIMIT - 12, 5)
    together = decoder.generate([text_of(n) for n in lengths], raw=True, max_new_tokens=60)
    assert sizes == [6, 4, 1]
    alone = batched(tiny, "none", int8_cache=True).generate([text_of(5)], raw=True, max_new_tokens=60)
    assert together[-1].token_ids == alone[0].token_ids


def test_a_smaller_program_must_be_worth_its_start(tiny, monkeypatch):
    sizes = BatchSizes(batched(tiny, "none").runner, BATCH)
    assert [smaller_sizes(n) for n in (1, 2, 4, 5, 17)] == [[], [1], [1], [1, 4], [1, 4, 16]]
    for readiness, worth in ROUNDS_WORTH.items():
        monkeypatch.setattr(Runner, "readiness", lambda runner, program, answer=readiness: answer)
        assert sizes.best("greedy", 1, BATCH, worth) == 1
        assert sizes.best("greedy", 2, BATCH, worth) == 4
        assert sizes.best("greedy", 1, BATCH, worth - 1) == BATCH
        assert sizes.best("greedy", 5, BATCH, worth) == BATCH
        assert sizes.best("greedy", 1, 1, worth) == 1


def test_readiness_tells_what_a_program_would_take(tiny, tmp_path):
    part = tiny.runner.round
    assert Runner(part, compile=False).readiness("greedy") == "ready"
    compiling = Runner(part, compile=True, program_folder=tmp_path)
    assert compiling.readiness("greedy") == "missing"
    if compiling.program_folder is not None:
        from fastdecode.program_cache import stored_file

        rows = compiling.cache_rows[compiling.buckets[0]]
        stored_file(compiling.programs["greedy"], rows, tmp_path).touch()
        assert compiling.readiness("greedy") == "stored" and compiling.readiness("sampled") == "missing"
    compiling.warm.add("greedy")
    assert compiling.readiness("greedy") == "ready"
