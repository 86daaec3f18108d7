"""Bounds for every test here: no input may make the process grow by gigabytes."""

import resource

import pytest

HEADROOM = 3 << 30  # bytes of address space, the threads and arenas of the libraries included


@pytest.fixture(autouse=True)
def bounded_memory():
    """What asks for more than HEADROOM fails with MemoryError (RuntimeError from torch), which no test forgives."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + HEADROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
