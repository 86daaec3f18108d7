"""generate.py as people and scripts use it: text and JSON on stdout, one sentence for bad input, clean endings."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from tiny_checkpoint import tiny_checkpoint

import generate
from fastdecode.options import run_command

ROOT = Path(__file__).resolve().parents[1]
KEYS = ["prompt", "text", "token_ids", "finish_reason", "prompt_tokens", "new_tokens", "ttft_s"]
KEYS += ["decode_tokens_per_s", "rounds", "tau", "seed", "accept_by_depth", "draft_ms", "verify_ms", "rest_ms"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder)
    return folder


@pytest.fixture
def run(folder, capsys, monkeypatch):
    """Runs the command in this process; returns exit code, stdout and stderr."""

    def run(*arguments, stdin="", model=folder):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        options = ["--model", str(model), "--dtype", "float32", "--no-compile", "--max-new-tokens", "12"]
        code = run_command(generate.main, [*options, *arguments])
        return code, *capsys.readouterr()

    return run


def command(folder, *arguments):
    options = ["--model", str(folder), "--dtype", "float32", "--no-compile"]
    return [sys.executable, str(ROOT / "generate.py"), *options, *arguments]


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_text_goes_to_stdout_and_one_line_of_figures_to_stderr(run):
    code, out, err = run("hello")
    assert code == 0 and out.endswith("\n") and len(out) > 1
    figures = err.strip().splitlines()[-1]
    for part in ("prompt ", "first token ", "12 new tokens", "tokens/s", "peak memory ", "GB/s"):
        assert part in figures


def test_json_has_the_contract_s_keys_and_nothing_else_is_on_stdout(run):
    _, text, _ = run("hello")
    code, out, _ = run("hello", "--json")
    (record,) = json_lines(out)
    assert code == 0 and list(record) == KEYS
    assert record["prompt"] == "hello" and record["text"] + "\n" == text
    assert record["new_tokens"] == len(record["token_ids"]) == record["rounds"] == 12
    assert record["tau"] == 1 and record["finish_reason"] == "length"
    assert record["decode_tokens_per_s"] > 0 and record["ttft_s"] > 0


def test_a_profile_is_a_chrome_trace_and_a_sorted_table_and_leaves_the_answer_alone(run, tmp_path):
    file = tmp_path / "trace.json"
    plain = run("hello")
    code, out, err = run("hello", "--profile", str(file))
    assert (code, out) == (0, plain[1])
    events = json.loads(file.read_text())["traceEvents"]
    rounds = [event for event in events if event.get("name") == "aten::embedding"]
    assert len(rounds) == 11  # of 12 rounds the first is not traced: it comes with the prompt
    assert list(tmp_path.iterdir()) == [file]
    percents = [float(x) for x in re.findall(r"^ *(?:aten|fastdecode)::\S+ +([0-9.]+)%", err, re.MULTILINE)]
    assert len(percents) > 5 and percents == sorted(percents, reverse=True)
    assert f"{file}: the trace" in err


def test_a_profile_of_a_single_round_says_that_there_is_none(run, tmp_path):
    file = tmp_path / "trace.json"
    code, _, err = run("hello", "--profile", str(file), "--max-new-tokens", "1")
    assert code == 0 and "not written" in err and not file.exists()


def test_a_rate_without_later_tokens_is_null(run):
    assert json_lines(run("hello", "--json", "--max-new-tokens", "1")[1])[0]["decode_tokens_per_s"] is None


def test_prompts_come_from_files_and_stdin_in_order_whatever_the_batch(run, tmp_path):
    prompts = ["one", "two and a longer one", "three", "four"]
    lines, records = tmp_path / "lines.txt", tmp_path / "records.jsonl"
    lines.write_text("\n\n".join(prompts) + "\n")
    records.write_text("".join(json.dumps({"turns": [p, "later"]}) + "\n" for p in prompts))
    expected = json_lines(run("--prompts", str(lines), "--json")[1])
    assert [r["prompt"] for r in expected] == prompts
    ways = (
        run("--prompts", str(records), "--json"),
        run("--prompts", "-", "--json", stdin=lines.read_text()),
        run("--json", stdin=lines.read_text()),
        run("--prompts", str(lines), "--json", "--batch", "3"),
    )
    for code, out, _ in ways:
        assert code == 0
        assert [(r["prompt"], r["token_ids"]) for r in json_lines(out)] == [
            (r["prompt"], r["token_ids"]) for r in expected
        ]
    assert "together" not in run("--prompts", str(lines))[2]
    _, text, figures = run("--prompts", str(lines), "--batch", "3")
    assert re.search(r"[\d.]+ together with their prompts", " ".join(figures.split()))
    assert text == "\n\n".join(r["text"] for r in expected) + "\n"


def test_the_seed_of_a_prompt_gives_its_text_alone(run):
    options = ("--json", "--temperature", "1.2")
    together = json_lines(run(*options, "--seed", "7", stdin="one\ntwo\nthree\n")[1])
    assert [r["seed"] for r in together] == [7, 8, 9]
    alone = json_lines(run("three", *options, "--seed", "9")[1])[0]
    assert alone["token_ids"] == together[2]["token_ids"]


def test_a_random_seed_is_printed_and_gives_the_text_again(run):
    _, out, err = run("hello", "--temperature", "1")
    seed = next(line.split()[1] for line in err.splitlines() if line.startswith("seed "))
    assert run("hello", "--temperature", "1", "--seed", seed)[1] == out


def test_chat_turns_equal_the_conversation_given_at_once(run, folder):
    code, out, _ = run("--chat", "--json", stdin="hello\n\nand then?\n")
    first, second = json_lines(out)
    assert code == 0 and (first["prompt"], second["prompt"]) == ("hello", "and then?")
    from fastdecode import load

    decoder = load(str(folder), dtype="float32", compile=False)
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "and then?"},
    ]
    assert decoder.generate(messages, max_new_tokens=12).text == second["text"]


def test_sampling_values_of_the_checkpoint_apply_only_when_asked_for(run, tmp_path):
    tiny_checkpoint(tmp_path)
    greedy = run("hello", model=tmp_path)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 1.5, "top_k": 50}')
    noted = run("hello", "--seed", "1", model=tmp_path)
    assert noted[1] == greedy[1] and "temperature 1.5" in noted[2] and "not applied" in noted[2]
    asked = run("hello", "--seed", "1", "--temperature", "model", model=tmp_path)
    assert asked[1] == run("hello", "--seed", "1", "--temperature", "1.5", "--top-k", "50", model=tmp_path)[1]
    assert asked[1] != greedy[1]


def test_explain_predicts_memory_and_then_generates(run):
    code, out, err = run("hello", "--explain")
    assert code == 0 and out == run("hello")[1]
    assert "precision float32" in err and "predicted memory" in err and "cache float32" in err
    code, _, err = run("hello", "--explain", "--kv-cache", "int8")
    assert code == 0 and "cache int8" in err and "(0.1 kB a token)" in err  # 3 layers, 2 x 2 heads of 8 + 4 bytes


def test_a_draft_changes_the_figures_and_nothing_else(run):
    plain = run("hello hello hello", "--max-new-tokens", "60")
    drafted = run("hello hello hello", "--max-new-tokens", "60", "--draft", "ngram", "--tree", "chain:4")
    assert drafted[:2] == plain[:2] and "tokens per round" in drafted[2]


def test_a_model_drafts_for_itself_and_says_the_same(run, folder):
    arguments = ("hello", "--json", "--dtype", "float32", "--max-new-tokens", "24")
    plain = json.loads(run(*arguments)[1])
    code, out, _ = run(*arguments, "--draft", str(folder), "--tree", "chain:5")
    drafted = json.loads(out)
    assert code == 0 and drafted["token_ids"] == plain["token_ids"]
    assert drafted["rounds"] == 4 and drafted["tau"] == 6


def test_a_model_drafts_chains_only_and_of_its_own_tokenizer_only(run, folder, tmp_path):
    code, _, err = run("hello", "--draft", str(folder), "--tree", "static")
    assert code == 2 and "chains only" in err
    code, _, err = run("hello", "--draft", str(folder), "--draft-rope-theta", "10000")
    assert code == 2 and "whole model" in err
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    text = (other / "tokenizer.json").read_text()
    vocabulary = json.loads(text)
    tokens = vocabulary["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    code, _, err = run("hello", "--draft", str(other))
    assert code == 2 and "another tokenizer" in err and str(min(tokens["a"], tokens["b"])) in err


ANSI = re.compile("\x1b\\[[0-9;]*m")


def in_terminal(*arguments, **environment):
    """Stdout of generate.py as a terminal of 40 columns gets it."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 20, 40, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", **environment}
    command = [sys.executable, "generate.py", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=its, stderr=subprocess.PIPE, env=environment)
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error
        while data := os.read(ours, 4096):
            shown += data
    os.close(ours)
    errors = process.communicate()[1].decode()
    assert process.returncode == 0, errors
    return shown.decode().replace("\r\n", "\n"), errors


def test_show_draft_colours_what_drafting_won_and_changes_no_letter(run, folder):
    options = ["ab ab ab", "--model", str(folder), "--no-compile", "--dtype", "float32", "--max-new-tokens", "48"]
    options += ["--device", "cpu", "--draft", str(folder), "--tree", "chain:3"]
    plain = run(*options[:1], *options[3:])[1]
    shown, errors = in_terminal(*options, "--show-draft")
    assert ANSI.sub("", shown) == plain
    parts = re.findall("\x1b\\[32m(.*?)\x1b\\[0m", shown, re.DOTALL)
    drafted = sum(map(len, parts))
    assert 0.5 * len(plain) < drafted < 0.9 * len(plain)  # 3 tokens of 4
    assert "green: won by drafting" in errors and "ms drafting" in errors and "4.00 tokens per round" in errors
    assert not ANSI.search(in_terminal(*options)[0])
    assert not ANSI.search(in_terminal(*options, "--show-draft", NO_COLOR="1")[0])


def test_show_draft_into_a_pipe_has_no_colours(run, folder):
    options = ["ab ab ab", "--draft", "ngram", "--max-new-tokens", "24"]
    assert run(*options, "--show-draft")[1] == run(*options)[1]


BAD = [
    (["hi", "--temperature", "-1"], "temperature"),
    (["hi", "--temperature", "hot"], "temperature"),
    (["hi", "--temperature", "nan"], "temperature"),
    (["hi", "--top-p", "1.5"], "top_p"),
    (["hi", "--top-k", "-3"], "top_k"),
    (["hi", "--top-k", "2.5"], "top_k"),
    (["hi", "--min-p", "-0.1"], "min_p"),
    (["hi", "--repetition-penalty", "0"], "repetition_penalty"),
    (["hi", "--max-new-tokens", "0"], "--max-new-tokens"),
    (["hi", "--max-new-tokens", "many"], "--max-new-tokens"),
    (["hi", "--max-seq-len", "1"], "--max-seq-len"),
    (["hi", "--max-seq-len", "999999"], "limit"),
    (["hi", "--batch", "0"], "--batch"),
    (["hi", "--seed", "x"], "--seed"),
    (["hi", "--seed", str(2**62 + 1)], "from -2^62 to 2^62"),
    (["hi", "--seed", str(-(2**62) - 1)], "from -2^62 to 2^62"),
    (["hi", "--stop", ""], "stop string"),
    (["hi", "--device", "tpu"], "--device"),
    (["hi", "--device", "cpu:"], "--device"),
    (["hi", "--batch", "100000000"], "--batch"),
    (["hi", "--model", "[/x]"], "[/x]"),
    (["hi", "--dtype", "int3"], "--dtype"),
    (["hi", "--draft", "/nowhere/head"], "/nowhere/head"),
    (["hi", "--tree", "chain:3"], "--tree"),
    (["hi", "--draft", "ngram", "--tree", "static"], "chains only"),
    (["hi", "--draft", "ngram", "--tree", "chain:0"], "chain:0"),
    (["hi", "--draft", "ngram", "--tree", "bush"], "bush"),
    (["hi", "--draft", "ngram", "--draft-rope-theta", "5"], "--draft-rope-theta"),
    (["hi", "--lookup", "2"], "--lookup 2 needs a draft"),
    (["hi", "--draft", "/x/y", "--lookup", "17"], "from 0 to 16"),
    (["hi", "--draft", "/x/y", "--lookup", "-1"], "from 0 to 16"),
    (["hi", "--draft", "ngram", "--lookup", "2"], "draft heads"),
    (["hi", "--draft", "none", "--lookup", "2"], "draft heads"),
    (["hi", "--draft", "/x/y", "--tree", "static", "--lookup", "1"], "--lookup takes chains only"),
    (["hi", "--draft", "/x/y", "--draft-rope-theta", "wide"], "--draft-rope-theta"),
    (["hi", "--quantize", "int3"], "--quantize should be auto, none, int4, int8, w4a8, w8a8, found 'int3'"),
    (["hi", "--kv-cache", "int4"], "--kv-cache should be auto or int8"),
    (["hi", "--show-draft", "--json"], "--show-draft"),
    (["hi", "--profile", "/nowhere/trace.json"], "--profile /nowhere/trace.json"),
    (["hi", "--raw", "--system", "x"], "--system"),
    (["hi", "--prompts", "file"], "--prompts"),
    (["--chat", "--raw"], "--chat"),
    (["--prompts", "/nowhere/prompts.txt"], "/nowhere/prompts.txt"),
    (["hi", "--model", "/nowhere/model"], "/nowhere/model"),
    (["hi", "--no-such-option"], "--no-such-option"),
    (["hi", "--temp", "0"], "--temp"),
    ([], "stdin"),
]


@pytest.mark.parametrize(("arguments", "names"), BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else None)
def test_bad_input_is_one_sentence_and_exit_code_2(run, arguments, names):
    code, out, err = run(*arguments)
    assert code == 2 and out == ""
    lines = err.strip().splitlines()
    assert lines[-1].startswith("error: ") and names in lines[-1]
    assert "Traceback" not in err
    assert len(lines) == 1


def test_the_option_not_the_model_is_refused_first(run):
    assert "top_p" in run("hi", "--top-p", "7", "--model", "/nowhere")[2]


@pytest.mark.parametrize("value", ["0", "0.0", "1e-6"])
def test_tiny_temperatures_are_greedy_or_as_good_as(run, value):
    assert run("hello", "--temperature", value, "--seed", "3")[1] == run("hello")[1]


def test_help_names_every_group_and_default_without_loading_torch():
    script = (
        "import sys, generate\n"
        "try: generate.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    groups = ("input and output", "model:", "choosing tokens", "length and stops")
    for part in (*groups, "default: 256", "--repetition-penalty"):
        assert part in done.stdout


def test_a_reader_that_closes_the_pipe_ends_it_cleanly(folder):
    line = " ".join(command(folder, "--raw", "--max-new-tokens", "1500", "hello")) + " | head -c 20"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, timeout=120)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr and b"BrokenPipe" not in done.stderr


def test_ctrl_c_while_streaming_ends_cleanly(folder):
    process = subprocess.Popen(
        command(folder, "--raw", "--max-new-tokens", "2000", "hello"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    assert process.stdout.read(5)  # it streams
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err and b"interrupted" in err


def test_the_command_line_as_a_process_streams_json(folder):
    done = subprocess.run(
        command(folder, "--json", "--max-new-tokens", "3", "hello"), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and json_lines(done.stdout)[0]["new_tokens"] == 3
