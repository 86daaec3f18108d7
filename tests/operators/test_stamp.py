"""The clock inside a round, and what it writes."""

import time

import pytest
import torch

from operators import attention


@pytest.fixture(autouse=True)
def operators():
    if attention.operators() is None:
        pytest.skip("no C++ compiler")


def test_it_writes_what_python_s_clock_says_at_its_place():
    times, after = torch.zeros(2, dtype=torch.int64), torch.zeros(3)
    before = time.perf_counter_ns()
    torch.ops.fastdecode.stamp(times, 1, after)
    assert times[0] == 0 and before <= times[1] <= time.perf_counter_ns()


@pytest.mark.parametrize("times, index", [(torch.zeros(2, dtype=torch.int64), 2), (torch.zeros(2), 0)])
def test_it_writes_nowhere_else(times, index):
    with pytest.raises(RuntimeError, match="times is int64"):
        torch.ops.fastdecode.stamp(times, index, torch.zeros(1))
    assert not times.any()


def test_compiled_it_stands_where_it_was_called():
    times = torch.zeros(2, dtype=torch.int64)

    def program(x):
        y = x + 1
        torch.ops.fastdecode.stamp(times, 0, y)
        y = y @ y
        torch.ops.fastdecode.stamp(times, 1, y)
        return y

    torch.compile(program, fullgraph=True)(torch.ones(64, 64))
    assert 0 < times[0] < times[1]
