"""The benchmark reports what was measured, under the names that scripts rely on, and refuses what it cannot do."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
import torch
from tiny_checkpoint import tiny_checkpoint
from tokenizer_fixtures import byte_level_tokenizer, write_json

from fastdecode import benchmark, benchmark_measure, benchmark_report
from fastdecode.benchmark_measure import text_of_length
from fastdecode.benchmark_rows import accept_by_depth
from fastdecode.decoder import Decoder
from fastdecode.options import run_command
from fastdecode.request import Result
from models.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
REPORT_KEYS = ["machine", "model", "rows"]
MACHINE_KEYS = ["device", "power_limit_w", "cpu", "cores", "torch", "bandwidth_gb_s"]
ROW_KEYS = [
    *("program", "weights", "kv_cache", "draft", "tree", "batch", "prompts", "new_tokens"),
    *("decode_tokens_per_s", "decode_tokens_per_s_min", "decode_tokens_per_s_max", "ttft_s", "tau", "accept_by_depth"),
    *("speedup", "matched", "first_difference_margins", "draft_ms", "verify_ms", "rest_ms"),
    *("bytes_per_round", "bandwidth_share", "peak_memory_mb", "cold_compile_s", "warm_start_s", "tau_by_category"),
    *("mode", "note", "lookup"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    # The context holds 512 prompt tokens, but not 2000. No padding rows: only we know that they must not be chosen.
    tiny_checkpoint(folder, max_position_embeddings=600, vocab_size=byte_level_tokenizer().get_vocab_size())
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def benchmarked(checkpoint: Path, *more: str):
    """Runs the benchmark on the tiny model, quickly; returns its JSON object and the lines before it."""
    prompts = checkpoint / "prompts.jsonl"
    lines = [{"category": c, "turns": [t]} for c, t in (("a", "hello there"), ("b", "def square"), ("a", "it's what"))]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    options = ["--model", str(checkpoint), "--prompts", str(prompts), "--dtype=float32", "--max-new-tokens=8"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(benchmark.main, [*options, "--no-compile", "--no-startup", *more])
    assert code == 0, err.getvalue()
    *before, last = out.getvalue().splitlines()
    return json.loads(last), before


class Measured(NamedTuple):
    report: dict
    before: list[str]
    results: list[tuple[int, Result]]  # every (max_new_tokens, Result) that the decoder handed out

    @property
    def row(self) -> dict:
        return self.report["rows"][0]

    def stats(self, max_new_tokens: int) -> list[dict]:
        return [result.stats for limit, result in self.results if limit == max_new_tokens]


def watched(checkpoint: Path, *more: str) -> Measured:
    seen = []
    generate = Decoder.generate

    def spy(self, prompts, **options):
        found = generate(self, prompts, **options)
        seen.extend((options["max_new_tokens"], result) for result in (found if isinstance(found, list) else [found]))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "generate", spy)
        return Measured(*benchmarked(checkpoint, *more), seen)


@pytest.fixture(scope="module")
def plain(checkpoint) -> Measured:
    """One run with nothing special."""
    return watched(checkpoint)


def test_the_last_line_has_exactly_the_keys_of_the_contract_in_order(plain):
    assert list(plain.report) == REPORT_KEYS
    assert list(plain.report["machine"]) == MACHINE_KEYS
    assert [list(row) for row in plain.report["rows"]] == [ROW_KEYS]


def test_the_predicted_ceiling_comes_first_and_a_table_follows(plain):
    assert plain.before[0].startswith("predicted ceiling: ")
    assert any("decode tokens/s" in line and f"{plain.row['decode_tokens_per_s']:.1f}" in line for line in plain.before)


def test_the_plain_row_says_what_plain_decoding_is(plain, checkpoint):
    row = plain.row
    expected = {"program": "fastdecode", "weights": "fp32", "kv_cache": "fp32", "draft": "none", "tree": None}
    expected |= {"batch": 1, "prompts": 3}
    assert {key: row[key] for key in expected} == expected
    assert (row["tau"], row["accept_by_depth"], row["speedup"], row["matched"]) == (1.0, [], 1.0, 3)
    assert row["tau_by_category"] == {"a": 1.0, "b": 1.0}
    unmeasured = ["draft_ms", "verify_ms", "rest_ms", "cold_compile_s", "warm_start_s"]
    assert [row[key] for key in unmeasured] == [None] * len(unmeasured)
    assert plain.report["model"] == str(checkpoint)
    assert plain.report["machine"]["torch"] == torch.__version__


def test_counts_and_rates_are_those_of_the_decoder_without_the_warm_up(plain):
    row, stats = plain.row, plain.stats(max_new_tokens=8)
    rates = [s["decode_tokens_per_s"] for s in stats if s["decode_tokens_per_s"] is not None]
    assert len(stats) == 3
    assert row["new_tokens"] == sum(s["new_tokens"] for s in stats)
    assert row["decode_tokens_per_s"] == median(rates)
    assert (row["decode_tokens_per_s_min"], row["decode_tokens_per_s_max"]) == (min(rates), max(rates))


def test_first_token_times_are_medians_over_prompts_of_exactly_that_many_tokens(plain):
    by_length: dict[int, list[float]] = {}
    for stats in plain.stats(max_new_tokens=1):
        by_length.setdefault(stats["prompt_tokens"], []).append(stats["ttft_s"])
    assert {n: len(times) for n, times in by_length.items()} == {16: 3, 512: 3}
    assert plain.row["ttft_s"] == {"16": median(by_length[16]), "512": median(by_length[512]), "2000": None}


def test_the_bandwidth_share_is_rate_times_bytes_over_bandwidth(plain):
    row, bandwidth = plain.row, plain.report["machine"]["bandwidth_gb_s"] * 1e9
    expected = row["decode_tokens_per_s"] * row["bytes_per_round"] / bandwidth
    assert row["bandwidth_share"] == pytest.approx(expected, rel=0.02)  # the bandwidth is written with two decimals


def test_a_round_reads_all_weights_but_the_untied_embedding_and_the_cached_text(plain):
    hidden, intermediate, layers, kv_width = 48, 80, 3, 2 * 8
    vocab = byte_level_tokenizer().get_vocab_size()
    attention = hidden * (hidden + 2 * kv_width) + hidden * hidden
    weights = layers * (attention + 3 * hidden * intermediate + 2 * hidden) + hidden + vocab * hidden
    stats = plain.stats(max_new_tokens=8)
    cached = sum(s["prompt_tokens"] + s["new_tokens"] / 2 for s in stats) / len(stats)
    assert plain.row["bytes_per_round"] == round(4 * (weights + cached * 2 * layers * kv_width))


def test_an_int8_cache_is_named_and_its_bytes_counted_but_not_a_peers(checkpoint):
    measured = watched(checkpoint, "--kv-cache=int8", "--draft=ngram", "--tree=chain:3", "--against=transformers")
    ours, drafted, peer = measured.report["rows"]
    assert [row["kv_cache"] for row in measured.report["rows"]] == ["int8", "int8", "fp32"]
    assert any("int8" in line for line in measured.before)
    stats = measured.stats(max_new_tokens=8)
    cached = sum(s["prompt_tokens"] + s["new_tokens"] / 2 for s in stats) / len(stats)
    layers, heads, head_dim = 3, 2, 8
    saved = 2 * layers * heads * (4 * head_dim - (head_dim + 4))
    assert peer["bytes_per_round"] - ours["bytes_per_round"] == pytest.approx(cached * saved, abs=1)
    assert drafted["bytes_per_round"] == ours["bytes_per_round"] and drafted["matched"] == 3


def test_transformers_runs_on_the_same_prompts_and_gives_the_same_tokens(checkpoint):
    plain, peer = benchmarked(checkpoint, "--against=transformers")[0]["rows"]
    assert list(peer) == ROW_KEYS
    assert (peer["program"], peer["weights"], peer["prompts"]) == ("transformers", "fp32", 3)
    assert (peer["matched"], peer["first_difference_margins"]) == (3, [])
    assert peer["new_tokens"] == plain["new_tokens"]
    assert peer["speedup"] == peer["decode_tokens_per_s"] / plain["decode_tokens_per_s"]
    assert peer["ttft_s"]["512"] > 0 and peer["ttft_s"]["2000"] is None
    assert peer["peak_memory_mb"] is None and peer["warm_start_s"] is None


def test_a_peer_with_other_tokens_does_not_match(checkpoint, monkeypatch):
    from fastdecode.benchmark_peers import TransformersPeer

    generate = TransformersPeer.generate

    def off_by_one(self, prompt_ids, n_tokens):
        answer = generate(self, prompt_ids, n_tokens)
        return answer._replace(token_ids=[*answer.token_ids[:-1], answer.token_ids[-1] ^ 1])

    monkeypatch.setattr(TransformersPeer, "generate", off_by_one)
    peer = benchmarked(checkpoint, "--against=transformers")[0]["rows"][1]
    assert peer["matched"] == 0
    assert len(peer["first_difference_margins"]) == 3 and min(peer["first_difference_margins"]) > 0


def test_sampling_is_measured_too_and_not_compared(checkpoint):
    sampling = ("--temperature=0.8", "--top-p=0.9", "--seed=1")
    plain, peer = benchmarked(checkpoint, *sampling, "--against=transformers")[0]["rows"]
    assert plain["matched"] == 3 and plain["new_tokens"] > 0
    assert peer["matched"] is None and peer["decode_tokens_per_s"] > 0


def test_the_checkpoints_own_sampling_is_used_when_asked_for(checkpoint, monkeypatch):
    seen = []
    decode = Decoder.run

    def spy(self, prompts, **options):
        seen.append(options)
        return decode(self, prompts, **options)

    monkeypatch.setattr(Decoder, "run", spy)
    write_json(checkpoint / "generation_config.json", {"do_sample": True, "temperature": 0.6, "top_k": 5})
    try:
        benchmarked(checkpoint, "--temperature=model")
        assert {(options["temperature"], options["top_k"]) for options in seen} == {(0.6, 5)}
        seen.clear()
        benchmarked(checkpoint)
        assert {(float(options["temperature"]), options["top_k"]) for options in seen} == {(0.0, 0)}
    finally:
        (checkpoint / "generation_config.json").unlink()


def test_plain_and_drafted_decoding_are_measured_in_one_run(checkpoint):
    plain, drafted = benchmarked(checkpoint, f"--draft={checkpoint}", "--tree=chain:3")[0]["rows"]
    assert list(drafted) == ROW_KEYS
    assert (plain["draft"], plain["tree"], plain["tau"], plain["speedup"]) == ("none", None, 1.0, 1.0)
    assert (drafted["draft"], drafted["tree"], drafted["program"]) == (str(checkpoint), "chain:3", "fastdecode")
    assert (drafted["matched"], drafted["first_difference_margins"], drafted["prompts"]) == (3, [], 3)
    assert drafted["tau"] == 4.0 and drafted["tau_by_category"] == {"a": 4.0, "b": 4.0}  # 8 tokens, a perfect draft
    assert drafted["accept_by_depth"] == [1.0, 1.0, 1.0]
    assert drafted["new_tokens"] == plain["new_tokens"] == 24
    assert drafted["speedup"] == drafted["decode_tokens_per_s"] / plain["decode_tokens_per_s"]
    assert plain["draft_ms"] is None and min(drafted[key] for key in ("draft_ms", "verify_ms", "rest_ms")) > 0
    assert drafted["bytes_per_round"] > 3.5 * plain["bytes_per_round"]  # the draft model runs three times
    assert drafted["ttft_s"]["16"] > 0


def test_a_draft_that_does_not_fit_is_refused_before_weights_are_read(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(benchmark_measure, "load", None)
    for draft, tree, said in (("no-such-folder", "auto", "no-such-folder"), (str(checkpoint), "static", "chains only")):
        options = [f"--model={checkpoint}", f"--draft={draft}", f"--tree={tree}", "--no-startup"]
        assert run_command(benchmark.main, options) == 2
        assert said in capsys.readouterr().err


def test_a_draft_that_changes_the_output_is_found_out(checkpoint, monkeypatch):
    from fastdecode.round import Round

    choose = Round.choose

    def wrong(self, logits, tree, family, context):
        chosen = choose(self, logits, tree, family, context)
        return chosen if chosen.shape[1] == 1 else chosen.clamp_max(40)

    monkeypatch.setattr(Round, "choose", wrong)
    report, before = benchmarked(checkpoint, "--draft=ngram", "--tree=chain:3")
    drafted = report["rows"][1]
    assert drafted["matched"] == 0
    assert len(drafted["first_difference_margins"]) == 3 and min(drafted["first_difference_margins"]) > 0
    assert any(f"{min(drafted['first_difference_margins']):.3f}" in line for line in before)


def test_shares_by_depth_are_over_all_rounds():
    def result(rounds, shares):
        return Result("", "", [], "length", {"rounds": rounds, "accept_by_depth": shares})

    assert accept_by_depth([result(1, [1.0, 1.0]), result(3, [1 / 3]), result(4, [])]) == (2 / 8, 1 / 8)


def test_a_batch_gives_every_prompt_its_figures(checkpoint, plain):
    measured = watched(checkpoint, "--batch=2")
    assert (measured.row["batch"], measured.row["prompts"]) == (2, 3)
    together = [result.token_ids for limit, result in measured.results if limit == 8]
    assert together == [result.token_ids for limit, result in plain.results if limit == 8]
    assert measured.row["new_tokens"] == sum(map(len, together))


def test_output_gets_the_same_object_and_nothing_else_is_left(checkpoint, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    file = folder / "result.json"
    file.write_text("old")
    report, _ = benchmarked(checkpoint, f"--output={file}")
    assert json.loads(file.read_text()) == report
    assert list(folder.iterdir()) == [file]


def test_a_write_that_fails_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    file = tmp_path / "result.json"
    file.write_text("old")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="No space left"):
        benchmark_report.write_atomically(file, "new")
    assert [(path, path.read_text()) for path in tmp_path.iterdir()] == [(file, "old")]


@pytest.mark.parametrize(
    "options, said",
    [
        (["--suite=slow"], "--suite should be one of"),
        (["--part=kernels"], "--part is for --suite gpu"),
        (["--suite=gpu", "--part=fans"], "--part should be one of kernels, rounds, exact, memory"),
        (["--suite=gpu", "--against=transformers"], "--suite gpu measures no other programs"),
        (["--plot=missing-folder/chart.png"], "missing-folder/chart.png"),
        (["--against=transformers,vllm"], "--against vllm is not built yet"),
        (["--against=transformers", "--batch=2"], "--batch"),
        (["--against=transformers", "--stop=x"], "--stop"),
        (["--limit=0"], "--limit should be at least 1, found 0"),
        (["--limit=many"], "--limit"),
        (["--max-new-tokens=0"], "--max-new-tokens should be at least 1"),
        (["--threads=0"], "--threads should be at least 1"),
        (["--output=missing-folder/result.json"], "missing-folder/result.json"),
        (["--output=."], "--output ."),
        (["--prompts=no-such-file.txt"], "no-such-file.txt"),
        (["--raw", "--system=hi"], "--system needs the chat template"),
        (["--draft=ngram", "--tree=static"], "chains only"),
        (["--quantize=w9a9"], "--quantize should be auto,"),
        (["--temperature=-1"], "temperature"),
        (["--temperature=warm"], "temperature"),
        (["--top-p=2"], "top"),
        (["--speed=high"], "--speed=high"),
        (["a prompt"], "a prompt"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence_before_a_model_is_loaded(options, said, monkeypatch, capsys):
    def must_not_happen(*args, **kwargs):
        raise AssertionError("a model was loaded")

    for name in ("load", "find_checkpoint", "measure_startup"):
        monkeypatch.setattr(benchmark_measure, name, must_not_happen)
    assert run_command(benchmark.main, options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert said in captured.err


def test_a_peer_that_is_not_installed_is_refused_by_name(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, package in (("transformers", "transformers"), ("llama.cpp", "llama-cpp-python")):
        assert run_command(benchmark.main, [f"--against={name}"]) == 2
        assert f"pip install {package}`" in capsys.readouterr().err


def test_llama_cpp_is_refused_for_what_is_no_gguf_file(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    assert run_command(benchmark.main, ["--against=llama.cpp", "--model=some/folder"]) == 2
    assert "GGUF files only" in capsys.readouterr().err


def test_a_plot_needs_matplotlib_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run_command(benchmark.main, ["--plot=chart.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_suite_is_refused_in_a_sentence_without_a_card(capsys):
    assert run_command(benchmark.main, ["--suite=gpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --suite gpu needs a CUDA device") and said.count("\n") == 1


def test_the_command_ends_with_2_and_one_sentence_and_without_torch():
    program = (
        "import sys; from fastdecode import benchmark, options; "
        "code = options.run_command(benchmark.main, ['--suite=slow']); sys.exit(code + 10 * ('torch' in sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "error: --suite should be one of quick, full, gpu, found 'slow'.\n"


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 40, 999])
def test_a_text_of_any_number_of_tokens_is_cut_from_the_source(n_tokens):
    text = text_of_length(n_tokens, "five words of source text", lambda text: len(text.split()))
    assert len(text.split()) == n_tokens


def test_a_count_that_no_text_has_gives_none():
    assert text_of_length(3, "abcdef", lambda text: len(text) // 2 * 2) is None
    assert text_of_length(3, "abcdef", lambda text: 0) is None
