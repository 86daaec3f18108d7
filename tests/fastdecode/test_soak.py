"""Two thousand requests in one process: memory stays flat, nothing compiles again, no answer hangs on the others."""

import gc
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import soak_requests
import torch
from eagle_fixtures import random_head
from soak_requests import answers, decoders, requests
from tiny_checkpoint import tiny_checkpoint

from checkpoints.checkpoint import read_config
from fastdecode.train.output import write_head

pytestmark = pytest.mark.slow

COUNT, COMPILED = 2000, 300
WARM = 400  # requests until every buffer and cache of Python's and torch's has its size
GROWTH = 6  # MB: a leak of 4 kB a request would be 6.4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder)
    config = read_config(folder)
    write_head(random_head("eagle1", config.vocab_size, config.hidden_size, 0), folder / "head", "safeai")
    return str(folder), str(folder / "head")


def resident_mb() -> float:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


@pytest.fixture(scope="module")
def served(model):
    """All requests, their answers in order, and how much memory was held on the way."""
    torch.set_num_threads(1)
    wanted, served_by = requests(COUNT), decoders(*model)
    found, held = [], []
    for number, request in enumerate(wanted, 1):
        found.append(answers(request, served_by))
        if number % 200 == 0:
            held.append(resident_mb())
    return wanted, found, held


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="skipped: this system does not say what is resident")
def test_memory_is_flat(served):
    *_, held = served
    assert max(held[WARM // 200 :]) - held[WARM // 200 - 1] < GROWTH, held


def test_answers_are_those_of_fresh_decoders_in_another_order(model, served):
    wanted, found, _ = served
    assert sum(len(answer) > 1 for answer in found) > 100 and len({json.dumps(a) for a in found}) > 1000
    served_by = decoders(*model)
    order = list(range(COUNT))
    random.Random(1).shuffle(order)
    assert [n for n in order if answers(wanted[n], served_by) != found[n]] == []


def test_sampled_answers_are_those_of_a_fresh_process(model, served):
    wanted, found, _ = served
    numbers = [n for n, request in enumerate(wanted) if "temperature" in request["options"]][::20][:50]
    assert len(numbers) == 50
    command = [sys.executable, soak_requests.__file__, *model, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [found[n] for n in numbers]


def test_compiled_decoders_say_the_same_and_compile_once(model, served):
    wanted, found, _ = served
    served_by = decoders(*model, compile=True)
    for decoder in served_by.values():
        for temperature in (0.0, 1.0):
            decoder.generate(["warm", "up", "now"], raw=True, max_new_tokens=3, temperature=temperature)
    with torch.compiler.set_stance("fail_on_recompile"):
        for request, answer in zip(wanted[:COMPILED], found, strict=False):
            assert answers(request, served_by) == answer
