"""Prompts from templates: all different, the same for a seed, no gap unfilled, none refused by the trainer."""

import json
import re

import numpy as np
import pytest

from fastdecode.options import run_command
from fastdecode.train import templates
from fastdecode.train.data import read_conversations
from models.errors import InputError


def test_prompts_differ_and_are_the_seeds_own(capsys, tmp_path):
    assert run_command(templates.main, ["300", "--seed", "4"]) == 0
    out = capsys.readouterr().out
    texts = [json.loads(line)["prompt"] for line in out.splitlines()]
    assert len(texts) == len(set(texts)) == 300
    assert texts == list(templates.prompts(300, seed=4)) != list(templates.prompts(300, seed=5))
    assert texts[:50] == list(templates.prompts(50, seed=4))
    file = tmp_path / "prompts.jsonl"
    file.write_text(out)
    assert [m[0]["content"] for m in read_conversations(file)] == texts


def test_every_template_can_be_filled_with_every_part():
    rng = np.random.default_rng(0)
    gaps = re.compile(r"{(\w+)(?::(\d+)-(\d+))?}")
    kinds, parts = templates.shipped()
    texts = [text for group in (*kinds, *parts.values()) for text in group]
    for text in texts:
        for name, low, high in gaps.findall(text):
            assert (name == "n" and int(low) < int(high)) or name in parts, text
        assert not set("{}") & set(templates.filled(text, parts, rng)), text


def test_first_words_of_prompts(capsys):
    assert run_command(templates.main, ["60", "--seed", "4", "--words", "2-5"]) == 0
    begun = [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()]
    whole = list(templates.prompts(60, seed=4))
    assert all(text.startswith(part + " ") for text, part in zip(whole, begun, strict=True))
    lengths = {len(part.split(" ")) for text, part in zip(whole, begun, strict=True) if text.count(" ") > 4}
    assert lengths == {2, 3, 4, 5}
    for nonsense in ("0-2", "5-2", "3", "a-b", "2-"):
        assert run_command(templates.main, ["1", "--words", nonsense]) == 2
        assert "--words: should be LOW-HIGH" in capsys.readouterr().err


def test_more_than_there_are_and_nonsense_are_refused(capsys):
    few = templates.Templates([["Say {n:1-2}, {word}."]], {"word": ["please"]})
    assert set(templates.prompts(2, templates=few)) == {"Say 1, please.", "Say 2, please."}
    with pytest.raises(InputError, match="no more than 2 different prompts"):
        list(templates.prompts(3, templates=few))
    assert run_command(templates.main, ["-1"]) == 2
    assert "at least 0" in capsys.readouterr().err
