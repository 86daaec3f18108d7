"""Where a chat template runs: Jinja's sandbox, with bounds on time and memory that Jinja itself has not.

A template is a stranger's code. The sandbox keeps it from reaching anything but what it is given; yet loops within
loops, or a text that is doubled again and again, would keep the machine busy for years. While a template is compiled
or run, a trace function sees each of its lines and every Python function that it calls, and ends it when this thread
has worked for SECONDS on it (not seconds of the clock: on a busy machine nothing else is refused), or when the
process has grown by MEMORY. One operation cannot be interrupted, so those that grow without a loop (`*`, `**`, and
whole numbers given to functions and filters, as in `ljust(10 ** 12)`) are bounded by their operands. What is left is
memory that one operation of Python's own takes, such as printing a list that holds itself many times over: only a
process of its own could bound that, at a tenth of a second for each start.
"""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 5.0
MEMORY = 1 << 30  # bytes
LARGEST = 1_000_000  # a whole number given to a function, a filter or `**`; items or bits that a product may have

Result = TypeVar("Result")


class OverLimit(jinja2.TemplateError):
    """A template that takes too long, or too much."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with operands bounded."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.filters = {name: bounded_filter(function) for name, function in self.filters.items()}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See Jinja's. Raises OverLimit."""
        size = _size(left) * abs(right) if operator == "**" and isinstance(right, int) else _size(left) + _size(right)
        if operator == "*" and (isinstance(left, int) != isinstance(right, int)):  # a text or a list, repeated
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            size = abs(count) * _size(repeated)
        if size > LARGEST:
            raise OverLimit(f"{operator} would make something too large")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __function: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja's
        """See Jinja's. Raises OverLimit."""
        _check_numbers((*args, *kwargs.values()))
        return super().call(__context, __function, *args, **kwargs)


def within_limits(function: Callable[[], Result]) -> Result:
    """What `function` returns. Raises OverLimit when it takes longer than SECONDS of CPU time, or more than MEMORY."""
    deadline, most = time.thread_time() + SECONDS, _peak_memory() + MEMORY

    def watch(frame: Any, event: str, argument: Any) -> Any:
        if time.thread_time() > deadline:
            raise OverLimit(f"it takes longer than {SECONDS:g} s")
        if _peak_memory() > most:
            raise OverLimit(f"it takes more than {MEMORY >> 20} MB")
        # Lines of the template alone: loops of Jinja's own end when the template's data do.
        return watch if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        return function()
    finally:
        sys.settrace(before)


def bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that raises OverLimit for numbers that are too large; the value that it is put to is not looked at."""

    @functools.wraps(function)  # with the marks by which Jinja knows what to pass
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args[1:], *kwargs.values()))
        return function(*args, **kwargs)

    return bounded


def _check_numbers(values: tuple[Any, ...]) -> None:
    if any(isinstance(value, int | float) and abs(value) > LARGEST for value in values):
        raise OverLimit(f"it gives a function a number beyond {LARGEST:,}")


def _size(value: Any) -> int:
    """Bits of a whole number; items of what has them."""
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if hasattr(value, "__len__") else 0


def _peak_memory() -> int:
    """Bytes that this process had at most, and 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
