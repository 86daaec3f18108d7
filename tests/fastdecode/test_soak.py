"""Thousands of requests in one process: memory stays flat, nothing is compiled anew, every answer is a fresh one's."""

import ctypes
import gc
import json
import mmap
import random
import subprocess
import sys
from pathlib import Path

import eagle_fixtures
import pytest
import torch
from test_decoder import text_of
from tiny_checkpoint import tiny_checkpoint

from fastdecode import load
from fastdecode.decoder import Decoder
from fastdecode.drafters import cache_rows_for
from fastdecode.drafters.eagle import EagleDrafter
from fastdecode.drafters.ngram import NgramDrafter
from fastdecode.tree import DynamicTree
from fastdecode.tree_options import chain

REQUESTS, WARM_UP, SAMPLED = 2000, 500, 50
LIMIT = 300  # tokens of a text
MOST_GROWTH = 4_000_000  # bytes after the warm-up: 4 kB a request would be 6 MB
DECODERS = ("plain", "ngram", "eagle1", "plain x4", "eagle3 x4", "compiled ngram")
SHARE = (3, 3, 2, 2, 2, 8)  # of the requests


def decoder_of(kind, plain):
    """A decoder of `plain`'s model."""
    batch = 4 if kind.endswith("x4") else 1
    name = kind.removesuffix(" x4").removeprefix("compiled ")
    drafter = None
    if name == "ngram":
        drafter = NgramDrafter(3)
    elif name != "plain":
        tree = DynamicTree(2, 3, 8) if batch == 1 else chain(3)
        config = plain.model.config
        head = eagle_fixtures.random_head(name, config.vocab_size, config.hidden_size, n_drafted=60)
        drafter = EagleDrafter(head, tree, batch, cache_rows_for(LIMIT, tree.n_nodes))
    options = {"max_seq_len": LIMIT, "batch": batch, "compile": kind.startswith("compiled"), "drafter": drafter}
    return Decoder(plain.model, plain.tokenizer, stop_ids=plain.stop_ids, **options)


def load_plain(folder):
    return load(folder, dtype="float32", device="cpu", compile=False, max_seq_len=LIMIT, draft="none")


def make_requests(n, seed=0):
    """`(kind of decoder, prompts, options)`, whose prompts add up to `n`."""
    dice, made, left = random.Random(seed), [], n
    while left:
        kind = dice.choices(DECODERS, SHARE)[0]
        together = min(left, dice.randint(1, 7)) if kind.endswith("x4") else 1
        lengths = [dice.choice((1, 2, 5, 17, 31, 32, 33, 60, 129, 250, 257)) for _ in range(together)]
        prompts = [text_of(length, seed=dice.randrange(10**6)) for length in lengths]
        options = {"max_new_tokens": dice.randint(1, 9), "raw": dice.random() < 0.7}
        if dice.random() < 0.5:
            options |= {"temperature": dice.choice((0.5, 1.0, 1.5)), "seed": dice.randrange(10**6)}
            options |= dice.choice(({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}))
        if dice.random() < 0.3:
            options |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
        if dice.random() < 0.3:
            options |= {"stop": dice.sample(list("aeiou0123456789"), 2)}
        made.append((kind, prompts, options))
        left -= together
    return made


def answers(decoder, prompts, options, first_index=0):
    """Of each prompt, what a user sees."""
    found = {}
    for piece in decoder.run(prompts, first_index=first_index, **options):
        if piece.result is not None:
            result = piece.result
            found[piece.index] = (result.text, result.token_ids, result.finish_reason)
    return [found[i] for i in range(len(prompts))]


def one_by_one(decoder, requests):
    """The same by one decoder that takes each prompt for itself: where it stood in its list decides its noise."""
    found = []
    for _, prompts, options in requests:
        found.append([answers(decoder, [prompt], options, i)[0] for i, prompt in enumerate(prompts)])
    return found


def memory_in_use():
    """Resident bytes, without what is free already: the compiler leaves much of it, where a leak could hide."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read this process's memory from")
def test_thousands_of_requests_leave_nothing_behind(tmp_path):
    torch.set_num_threads(1)
    tiny_checkpoint(tmp_path)  # three layers, whose states the EAGLE-3 head reads
    plain = load_plain(str(tmp_path))
    decoders = {kind: decoder_of(kind, plain) for kind in DECODERS}
    for options in ({}, {"temperature": 0.9}):
        answers(decoders["compiled ngram"], ["hello"], {"max_new_tokens": 3, **options})
    requests = make_requests(REQUESTS)
    found, done, before = [], 0, None
    with torch.compiler.set_stance("fail_on_recompile"):
        for kind, prompts, options in requests:
            found.append(answers(decoders[kind], prompts, options))
            done += len(prompts)
            if before is None and done >= WARM_UP:
                before = memory_in_use()
    growth = memory_in_use() - before
    assert growth < MOST_GROWTH
    assert done == REQUESTS and {len(prompts) for _, prompts, _ in requests} == set(range(1, 8))
    assert {reason for group in found for _, _, reason in group} == {"stop", "length"}

    order = random.Random(1).sample(range(len(requests)), len(requests))
    again = one_by_one(load_plain(str(tmp_path)), [requests[i] for i in order])
    assert [found[i] for i in order] == again

    some = order[:SAMPLED]
    question = json.dumps([str(tmp_path), [requests[i] for i in some]])
    code = "import test_soak; test_soak.answer_stdin()"
    run = subprocess.run(
        [sys.executable, "-c", code], input=question, capture_output=True, text=True, timeout=600,
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == json.loads(json.dumps([found[i] for i in some]))


def answer_stdin():
    """What the fresh process does."""
    folder, requests = json.load(sys.stdin)
    torch.set_num_threads(1)
    print(json.dumps(one_by_one(load_plain(folder), requests)))
