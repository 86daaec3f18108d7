"""Every command that the README shows is a command that works: run with a tiny model, or where it takes minutes, parsed
by the program that it calls."""

import io
import json
import re
import shlex
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from tiny_checkpoint import tiny_checkpoint

import fastdecode.train.templates
import generate
import quantize.__main__
from fastdecode import acceptance, benchmark, large_shapes, sweep
from fastdecode.options import run_command
from fastdecode.train import __main__ as trainer

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
LINES = [re.split(r"\s{2,}#", line)[0].strip() for block in BLOCKS for line in re.sub(r"\\\n", " ", block).splitlines()]
GENERATE = [line for line in LINES if line.startswith("python generate.py")]
QUANTIZE = [line for line in LINES if line.startswith("python -m quantize")]
TRAIN = [line for line in LINES if re.search(r"-m fastdecode\.train ", line)]
TEMPLATES = [line for line in LINES if "fastdecode.train.templates" in line]
PROGRAMS = {"benchmark": benchmark, "sweep": sweep, "acceptance": acceptance}
MEASURE = {name: [line for line in LINES if f"-m fastdecode.{name}" in line] for name in PROGRAMS}
SHAPES = [line for line in LINES if "-m fastdecode.large_shapes" in line]  # gigabytes and minutes


def test_no_command_is_left_out():
    known = [*GENERATE, *QUANTIZE, *TRAIN, *TEMPLATES, *SHAPES, *(line for lines in MEASURE.values() for line in lines)]
    others = [line for line in LINES if line and line not in known]
    assert len(known) > 30
    assert all(line.startswith("pip install -r ") for line in others), others


def test_large_shapes_are_asked_for_in_words_that_it_knows():
    """What it does with them, at a small shape: tests/fastdecode/test_large_shapes.py."""
    asked = [large_shapes.parse(shlex.split(line, comments=True)[3:]) for line in SHAPES]
    assert [args.model for args in asked] == ["llama-2-7b"]


def test_the_layout_names_every_file_and_no_other():
    """`_rows` after a file's name stands for another file that ends so."""
    layout = README.read_text(encoding="utf-8").partition("## Layout")[2].partition("Apache-2.0")[0]
    named = set(re.findall(r"[\w*]+\.(?:py|cpp|h)\b|(?<![\w*])_\w+", layout))
    packages = [README.parent / name for name in ("operators", "models", "checkpoints", "quantize", "fastdecode")]
    files = [f for p in packages for f in p.rglob("*") if f.suffix in (".py", ".cpp", ".h") and f.name[:2] != "__"]
    stands_for = lambda name, file: file.stem.endswith(name) if name[0] == "_" else fnmatch(file.name, name)  # noqa: E731
    assert [file.name for file in files if not any(stands_for(name, file) for name in named)] == []
    known = [*files, README.parent / "generate.py"]
    assert [name for name in named if not any(stands_for(name, file) for file in known)] == []


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with what the README's commands name: models, heads, prompts."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("path/to/checkpoint", "path/to/model", "TARGET", "SMALL", "small"):
        tiny_checkpoint(folder / name, hidden_size=96, intermediate_size=192)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Say {word}."}) + "\n" for word in ("one", "two", "three", "four")))
    (folder / "prompts.txt").write_text("a\nb\nc\n")
    options = ["--data", "prompts.jsonl", "--target", "TARGET", *QUICK]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_command(trainer.main, [*options, "-o", "HEAD"]) == 0
    for copy in ("head", "path/to/head"):
        shutil.copytree(folder / "HEAD", folder / copy)
    return folder


QUICK = ["--conversations", "4", "--epochs", "1", "--ttt-steps", "1", "--answer-tokens", "8", "--max-length", "128"]
QUICK += ["--draft-vocab", "64", "--batch", "4", "--device", "cpu", "--no-autocast", "--layers", "1"]


def arguments(line: str) -> list[str]:
    """What the shell would hand to the program."""
    words = shlex.split(line.partition(" > ")[0].partition("&&")[2] or line.partition(" > ")[0])
    programs = ("generate.py", "quantize", "fastdecode.")
    first = next(i for i, word in enumerate(words) if word.startswith(programs))
    return words[first + 1 :]


@pytest.mark.parametrize("line", GENERATE)
def test_generate(here, line, monkeypatch, capsys):
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one line\n"))
    given = arguments(line)
    if "--help" in given:
        with pytest.raises(SystemExit) as ended:
            generate.main(given)
        assert ended.value.code == 0
        return
    if "--model" not in given:
        given += ["--model", "TARGET"]
    if "--max-seq-len" in given:
        given[given.index("--max-seq-len") + 1] = "2048"  # as much as the tiny one has
    assert run_command(generate.main, [*given, "--no-compile", "--dtype", "float32", "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("line", QUANTIZE)
def test_quantize(here, line, monkeypatch, tmp_path):
    monkeypatch.chdir(here)
    given = [str(tmp_path / "small") if word == "small" else word for word in arguments(line)]
    if "--evaluate" in given:
        (tmp_path / "text.txt").write_text("a few words " * 100)
        given[given.index("--evaluate")] = f"--evaluate={tmp_path / 'text.txt'}"
    assert run_command(quantize.__main__.main, given) == 0
    assert (tmp_path / "small" / "config.json").is_file()


@pytest.mark.parametrize("line", TRAIN)
def test_train(here, line, monkeypatch, tmp_path):
    monkeypatch.chdir(here)
    given = arguments(line)
    if "--resume" not in given:
        given[given.index("-o") + 1] = str(tmp_path / "out")
    if "--beginnings" in given:
        assert trainer.parse(given).beginnings == "begun.jsonl"
        at = given.index("--beginnings")
        given = given[:at] + given[at + 2 :]
    if "--data" not in given:  # a tiny model of random weights makes up no prompts, nor finishes any
        given += ["--data", "prompts.jsonl"]
    if "--init" in given:
        given = [word for word in given if word != "head/training/data"]
        given.insert(given.index("--also") + 1, "head/training/data")
    assert run_command(trainer.main, [*given, "--target", "TARGET", *QUICK]) == 0


@pytest.mark.parametrize("line", TEMPLATES)
def test_templates(line, capsys):
    assert run_command(fastdecode.train.templates.main, arguments(line)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == int(arguments(line)[0]) and json.loads(printed[0])["prompt"]


@pytest.mark.parametrize("name, line", [(name, line) for name, lines in MEASURE.items() for line in lines])
def test_what_takes_minutes_is_parsed_by_its_program(name, line, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: module)  # as if every other program were installed
    args = PROGRAMS[name].parse(arguments(line))
    if hasattr(PROGRAMS[name], "check"):
        PROGRAMS[name].check(args)
