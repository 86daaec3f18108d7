"""Trees, prompts and conversations in files of the user's own: read, or refused by file and line."""

import json

from hypothesis import given
from hypothesis import strategies as st
from mutations import Tally, damaged, inputs, tally, texts_of  # noqa: F401 - a fixture

from fastdecode.prompts import read_prompts
from fastdecode.train.data import read_conversations
from fastdecode.tree_options import parse_tree

RECORDS = (
    {"turns": ["one", "two"], "category": "x"},
    {"prompt": "one"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
)
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)


def test_a_tree(tmp_path, tally):  # noqa: F811
    file = tmp_path / "tree.json"

    @inputs(600)
    @given(texts_of([[0], [1], [0, 0], [0, 1], [0, 0, 0]]))
    def run(text):
        file.write_bytes(text)
        tally.check(lambda: parse_tree(f"static:{file}"))

    run()


@inputs(400)
@given(st.text("chainstaticdynamic:,0123456789-+. \u0663", max_size=24), st.integers(), st.integers(), st.integers())
def test_a_trees_name(text, a, b, c):
    for name in (text, f"chain:{a}", f"dynamic:{a},{b},{c}", f"dynamic:{abs(a)},{abs(b) % 70},{abs(c) % 1100}"):
        Tally().check(lambda name=name: parse_tree(name))


def records() -> st.SearchStrategy[bytes]:
    some = st.lists(st.one_of(*(texts_of(record) for record in RECORDS)), max_size=3).map(b"\n".join)
    return st.one_of(some, damaged(LINES), st.binary(max_size=40))


def test_prompts(tmp_path, tally):  # noqa: F811
    file = tmp_path / "prompts"

    @inputs(500)
    @given(records())
    def run(content):
        file.write_bytes(content)
        tally.check(lambda: [line.text.strip() for line in read_prompts(str(file))])

    run()


def test_conversations(tmp_path, tally):  # noqa: F811
    file = tmp_path / "conversations"

    @inputs(500)
    @given(records())
    def run(content):
        file.write_bytes(content)
        tally.check(lambda: list(read_conversations(file)))

    run()
