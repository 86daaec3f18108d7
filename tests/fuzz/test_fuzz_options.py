"""Options of the four commands: any of them with any value ends in an exit code of 0 or 2, and then in one sentence."""

import importlib
import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import inputs, no_hang
from tiny_checkpoint import tiny_checkpoint

from fastdecode.options import run_command

VALUES = st.one_of(
    st.sampled_from((
        "0", "1", "-1", "2", "64", "65", "1.5", "-0.0", "1e400", "nan", "inf", "1e-320", "9" * 30, "9" * 5000, "0x10",
        "", " ", "auto", "none", "cpu", "cuda:0", "cuda:\u0663", "int8", "int4", "float32", "ngram", "chain:3",
        "chain:0",
        "static", "static:", "static:/", "static:/dev/null", "dynamic:1,2,3", "dynamic:63,1024,1024", "vicuna", "{{",
        "{{ messages }}", "/", "/dev/null", "/nowhere", "x/y/z", "model", "same", "als", "gptq", "rtn", "eagle1",
        "speculators", "1,2,3", "1,x", "3,2", "self", "--", "\u0661", "é", "\udcff", "[/red]",
    )),
    st.integers(-(2**70), 2**70).map(str), st.floats().map(str),
    st.text(st.characters(exclude_characters="\0"), max_size=5),
)  # fmt: skip
GENERATE = [
    "--chat-template", "--dtype", "--quantize", "--device", "--max-seq-len", "--kv-cache", "--draft", "--tree",
    "--draft-rope-theta", "--lookup", "--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty",
    "--presence-penalty", "--seed", "--max-new-tokens", "--stop", "--batch", "--system", "--prompts", "--json=",
    "--raw=", "--chat=", "--show-draft=", "--explain=", "--nothing",
]  # fmt: skip
QUANTIZE = [
    "--bits", "--group-size", "--lm-head", "--skip", "--method", "--calibration", "--evaluate", "--draft", "-o",
    "--nothing",
]  # fmt: skip
TRAIN = [
    "--kind", "--layout", "--init", "--resume=", "--data", "--beginnings", "--conversations", "--batch", "--max-length",
    "--eval-share", "--keep-features", "--draft-vocab", "--layers", "--fc-norm=", "--norm-output=", "--epochs",
    "--hours", "--save-minutes", "--ttt-steps", "--lr", "--warmup", "--batch-tokens", "--accumulate",
    "--eval-steps", "--seed", "--device", "--dtype", "--no-autocast=",
]  # fmt: skip
BENCHMARK = [*GENERATE, *["--limit", "--against", "--suite", "--part", "--startup=", "--output", "--plot", "--threads"]]
COMMANDS = {  # module, options, and arguments that end it before anything heavy: a model that is not there
    "generate": ("generate", GENERATE, ["hi", "--model", "/nowhere/model"]),
    "quantize": ("quantize.__main__", QUANTIZE, ["/nowhere/model", "-o", "/nowhere/out"]),
    "train": ("fastdecode.train.__main__", TRAIN, ["--target", "/nowhere/model", "-o", "/dev/null/out"]),
    "benchmark": ("fastdecode.benchmark", BENCHMARK, ["--model", "/nowhere/model"]),
}


def arguments(names) -> st.SearchStrategy[list[str]]:
    """Up to three options; a name that ends with = is a flag."""
    one = st.tuples(st.sampled_from(names), VALUES).map(lambda p: [p[0][:-1]] if p[0].endswith("=") else [*p])
    joined = st.tuples(st.sampled_from([n for n in names if n[-1] != "="]), VALUES).map(lambda p: ["=".join(p)])
    return st.lists(st.one_of(one, joined), min_size=1, max_size=3).map(lambda parts: sum(parts, []))


def ending(main, argv, capsys, monkeypatch):
    """Exit code and stderr of a command that is run in this process; anything but an exit code is a traceback."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    with no_hang():
        code = run_command(main, argv)
    return code, capsys.readouterr().err


def assert_clean(code, errors):
    lines = errors.strip().splitlines()
    assert code in (0, 2) and "Traceback" not in errors
    assert code == 0 or sum(line.startswith("error: ") for line in lines) == 1 and lines[-1].startswith("error: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_options_with_any_value(command, capsys, monkeypatch):
    module, names, fixed = COMMANDS[command]
    main = importlib.import_module(module).main

    @inputs(250)
    @given(arguments(names))
    def run(given):
        argv = [*fixed, *given]
        assert_clean(*ending(main, argv, capsys, monkeypatch))

    run()


def test_generate_on_a_model_that_is_there(tmp_path, capsys, monkeypatch):
    main = importlib.import_module("generate").main
    tiny_checkpoint(tmp_path)
    fixed = ["hi", "--model", str(tmp_path), "--no-compile", "--dtype", "float32", "--max-seq-len", "64"]
    names = [name for name in GENERATE if name not in ("--explain=", "--device", "--quantize", "--max-seq-len")]
    codes = set()

    @inputs(120)
    @given(arguments(names))
    def run(given):
        code, errors = ending(main, [*fixed, "--max-new-tokens", "4", *given], capsys, monkeypatch)
        assert_clean(code, errors)
        codes.add(code)

    run()
    assert codes == {0, 2}
