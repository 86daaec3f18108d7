"""Prompts come from lines, JSONL and pipes alike, and the shipped set is what it says."""

import io
import json
from collections import Counter

import pytest

from fastdecode.prompts import SHIPPED, PromptLine, parse_prompts, read_prompts
from models.errors import InputError

CATEGORIES = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


@pytest.fixture(scope="module")
def shipped() -> list[dict]:
    return [json.loads(line) for line in SHIPPED.read_text(encoding="utf-8").splitlines()]


def test_the_shipped_set_has_five_prompts_in_each_of_eight_categories(shipped):
    assert Counter(record["category"] for record in shipped) == dict.fromkeys(CATEGORIES, 5)


def test_the_first_eight_shipped_prompts_cover_every_category(shipped):
    assert {record["category"] for record in shipped[:8]} == CATEGORIES


def test_no_shipped_prompt_comes_twice(shipped):
    turns = [turn for record in shipped for turn in record["turns"]]
    assert len(set(turns)) == len(turns)
    assert [record["question_id"] for record in shipped] == list(range(1, 41))


def test_shipped_records_have_one_or_two_turns_and_nothing_else(shipped):
    for record in shipped:
        assert list(record) == ["question_id", "category", "turns"]
        assert len(record["turns"]) in (1, 2)
        assert all(isinstance(turn, str) and turn.strip() == turn != "" for turn in record["turns"])


def test_shipped_prompts_are_short_and_long(shipped):
    words = [len(record["turns"][0].split()) for record in shipped]
    assert min(words) < 15
    assert sum(150 <= count <= 300 for count in words) >= 3


def test_the_shipped_set_is_read_with_its_categories(shipped):
    assert read_prompts(str(SHIPPED)) == [PromptLine(record["turns"][0], record["category"]) for record in shipped]


def test_the_shipped_set_shares_no_prompt_with_mt_bench(shipped, shared_data):
    theirs = {
        turn
        for line in (shared_data / "data" / "mt_bench.jsonl").read_text(encoding="utf-8").splitlines()
        for turn in json.loads(line)["turns"]
    }
    assert not theirs & {turn for record in shipped for turn in record["turns"]}


@pytest.mark.parametrize(
    "text, prompts",
    [
        ("one\ntwo", ["one", "two"]),
        ("one\n\n  \ntwo\n", ["one", "two"]),
        ("one\r\ntwo\r\n", ["one", "two"]),
        ("  spaces stay  \n", ["  spaces stay  "]),
        ("tab\there\fand\x0bthere\u2028too\n", ["tab\there\fand\x0bthere\u2028too"]),
        ('first line\n{"turns": ["not JSONL, since the first line is not"]}', None),
        ('[1, 2]\n"three"', ["[1, 2]", '"three"']),
    ],
)
def test_plain_text_is_one_prompt_a_line(text, prompts):
    expected = text.split("\n") if prompts is None else prompts
    assert parse_prompts(text, "stdin") == [PromptLine(prompt) for prompt in expected]


def test_jsonl_takes_the_first_turn_and_the_category():
    text = '\n \n  {"turns": ["a\\nb", "second"], "category": "math"}\n\n{"turns": ["c"], "category": 7, "x": {}}\r\n'
    assert parse_prompts(text, "file") == [PromptLine("a\nb", "math"), PromptLine("c")]


@pytest.mark.parametrize(
    "text, where",
    [
        ("", "file: holds no prompts"),
        (" \n\t\n", "file: holds no prompts"),
        ('{"turns": ["a"]}\n{"turns": ["b"]', "file, line 2"),
        ('{"turns": ["a"]}\n\nplain text', "file, line 3"),
        ('{"turns": []}', "file, line 1"),
        ('{"turns": "a"}', "file, line 1"),
        ('{"turns": [1]}', "file, line 1"),
        ('{"prompt": "a"}', "file, line 1"),
        ('{"turns": ["a"]}\n[1]', "file, line 2"),
        ('{"turns": ' + "[" * 100_000, "file, line 1"),
    ],
)
def test_what_is_no_prompt_is_refused_by_file_and_line(text, where):
    with pytest.raises(InputError) as error:
        parse_prompts(text, "file")
    assert str(error.value).startswith(where)


def test_a_dash_reads_stdin_the_same_way(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"turns": ["from a pipe"]}\n'))
    assert read_prompts("-") == [PromptLine("from a pipe")]


def test_stdin_that_is_not_utf8_is_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    with pytest.raises(InputError, match="stdin: is not UTF-8"):
        read_prompts("-")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9\n")
    for path in (latin, tmp_path / "missing.txt", tmp_path):
        with pytest.raises(InputError) as error:
            read_prompts(str(path))
        assert str(path) in str(error.value)
