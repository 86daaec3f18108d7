"""Damaged inputs: valid ones with a field of another kind or size, or with other bytes; and what may come of them."""

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from models.errors import InputError

CPU_SECONDS = 20  # of one input; a hang, not a slow machine
SUPPRESSED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def inputs(count: int) -> settings:
    """Settings for `count` inputs, the same ones in every run, however slow the machine is."""
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=SUPPRESSED
    )


class Hang(BaseException):  # no Exception: code that turns any of those into an InputError must not hide it
    """One input took longer than CPU_SECONDS."""


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    """Raises Hang when what is inside works longer than CPU_SECONDS."""

    def hang(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Tally:
    """Counts what was accepted and what refused. `check` lets nothing but an InputError of one sentence through."""

    def __init__(self) -> None:
        self.accepted = self.refused = 0

    def check(self, function: Callable[[], Any]) -> bool:
        """Whether `function` accepted its input."""
        try:
            with no_hang():
                function()
        except InputError as error:
            assert 10 < len(str(error)) < 4000
            self.refused += 1
            return False
        self.accepted += 1
        return True

    def saw_both(self) -> None:
        """Fails where only one of the two was ever met: then the inputs were too wild, or not wild enough."""
        assert self.accepted and self.refused, (self.accepted, self.refused)


@pytest.fixture
def tally() -> Iterator[Tally]:
    """A tally that must have seen both ends."""
    counted = Tally()
    yield counted
    counted.saw_both()


NUMBERS = (
    0, 1, -1, 2, 3, 7, 64, 255, 256, 65535, 10**6, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, 2**63,
    -(2**63) - 1, 2**64 - 1, 2**64, 10**30, 10**400, 0.5, 1.0, -0.0, 1e-320, 1e-30, 1e30, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = ("", " ", "\0", "a", "0", "-1", "nan", "../x", "\ud800", "é", "{{", "{% for %}", "a" * 300, "llama", "default")


def nested(depth: int, inner: Any) -> Any:
    """`inner` in `depth` lists."""
    for _ in range(depth):
        inner = [inner]
    return inner


def odd_values() -> st.SearchStrategy[Any]:
    """Values of every JSON type, and of sizes that nobody expects."""
    plain = st.one_of(
        st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.sampled_from((None, True, False, [], {})),
        st.integers(-(10**6), 10**6), st.text(max_size=6),
    )  # fmt: skip
    return st.one_of(
        plain,
        plain,
        st.lists(plain, max_size=3),
        st.dictionaries(st.sampled_from(("type", "content", "id", "factor", "x")), plain, max_size=2),
        st.builds(nested, st.sampled_from((1, 2, 100, 900, 960, 980, 990)), plain),
    )


def places(document: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all values below `document`."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    found = []
    for key, value in items:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += places(value, (*path, key))
    return found


class Repeated(dict):
    """An object one of whose keys is written twice."""

    def __init__(self, document: dict, key: str, value: Any):
        super().__init__(document)
        self.key, self.value = key, value


def as_text(document: Any) -> str:
    """JSON of a document; deep ones too, which json.dumps refuses."""
    if isinstance(document, Repeated):
        text = as_text(dict(document))
        again = f"{json.dumps(document.key)}: {as_text(document.value)}"
        return f"{text[:-1]}, {again}}}" if document else f"{{{again}}}"
    if isinstance(document, list) and len(document) == 1:
        depth = 0
        while isinstance(document, list) and len(document) == 1:
            document, depth = document[0], depth + 1
        return "[" * depth + as_text(document) + "]" * depth
    if isinstance(document, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {as_text(value)}" for key, value in document.items()) + "}"
    if isinstance(document, list):
        return "[" + ", ".join(map(as_text, document)) + "]"
    return json.dumps(document)


@st.composite
def documents(draw: st.DrawFn, document: Any, most: int = 3) -> Any:
    """`document` (a JSON object or list) with one to `most` of its values replaced, taken out, or given twice."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, most))):
        known = places(document)
        if not known:
            break
        path = draw(st.sampled_from(known))
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        what = draw(st.sampled_from(("replace", "replace", "replace", "remove", "borrow", "add")))
        if what == "replace":
            parent[path[-1]] = draw(odd_values())
        elif what == "remove":
            del parent[path[-1]]
        elif what == "borrow":
            other = document
            for key in draw(st.sampled_from(known)):
                other = other[key]
            parent[path[-1]] = json.loads(json.dumps(other)) if len(json.dumps(other)) < 5000 else None
        elif isinstance(parent, list):
            parent.append(draw(odd_values()))
        else:
            parent[draw(st.sampled_from(("", "x", "weight", "rope_scaling", "__metadata__")))] = draw(odd_values())
    if isinstance(document, dict) and document and draw(st.integers(0, 9)) == 0:
        return Repeated(document, draw(st.sampled_from(sorted(document))), draw(odd_values()))
    return document


@st.composite
def damaged(draw: st.DrawFn, data: bytes, header: int | None = None, most: int = 3) -> bytes:
    """`data` with one to `most` changes within its first `header` bytes: other bytes, some less, some more, an end."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, max(0, min(len(data), header or len(data)) - 1)))
        what = draw(st.sampled_from(("flip", "flip", "number", "cut", "remove", "insert", "repeat")))
        if what == "flip":
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif what == "number":
            size = draw(st.sampled_from((1, 2, 4, 8)))
            value = draw(st.sampled_from([n for n in NUMBERS if isinstance(n, int)]))
            data[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
        elif what == "cut":
            del data[at:]
        elif what == "remove":
            del data[at : at + draw(st.integers(1, 64))]
        elif what == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=16))
        else:
            data[at:at] = data[at : at + draw(st.integers(1, 64))]
    return bytes(data)


def texts_of(document: Any) -> st.SearchStrategy[bytes]:
    """JSON files that were `document` once: another structure mostly, other bytes sometimes."""
    whole = json.dumps(document).encode()
    structured = documents(document).map(lambda d: as_text(d).encode())
    return st.one_of(structured, structured, structured, damaged(whole))
