"""The full suite: lookup beside plain, dequantized weights beside stored ones, long contexts; and the picture."""

import importlib.util
import json

import pytest
from test_benchmark import ROW_KEYS, benchmarked, checkpoint  # noqa: F401  (a fixture)
from tiny_checkpoint import tiny_checkpoint
from tokenizer_fixtures import byte_level_tokenizer

from fastdecode import benchmark, benchmark_context, load
from fastdecode.benchmark_context import context_rates
from fastdecode.benchmark_plot import chart
from fastdecode.benchmark_report import Row, as_report
from fastdecode.options import run_command
from quantize.__main__ import main as quantize


@pytest.fixture(scope="module")
def full(checkpoint, tmp_path_factory):  # noqa: F811
    """The full suite of a model in 8 bits, its own copy as the draft."""
    folder = tmp_path_factory.mktemp("small")
    source = tmp_path_factory.mktemp("source")
    vocab = byte_level_tokenizer().get_vocab_size()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny_checkpoint(source, **sizes, max_position_embeddings=600, vocab_size=vocab)
    quantize([str(source), "-o", str(folder / "q"), "--bits", "8", "--group-size", "32", "--method", "rtn"])
    return benchmarked(folder / "q", "--suite=full", f"--draft={folder / 'q'}", "--tree=chain:2")


def test_full_has_plain_lookup_and_the_draft_in_both_precisions(full):
    rows = full[0]["rows"]
    assert [list(row) for row in rows] == [ROW_KEYS] * 6
    assert [row["weights"] for row in rows] == ["int8-g32"] * 3 + ["fp32"] * 3
    assert [row["draft"].rpartition("/")[2] for row in rows] == ["none", "ngram", "q"] * 2
    assert [row["tree"] for row in rows] == [None, "chain:3", "chain:2"] * 2
    assert [row["matched"] for row in rows] == [3] * 6
    assert rows[0]["speedup"] == rows[3]["speedup"] == 1.0
    assert rows[4]["speedup"] == rows[4]["decode_tokens_per_s"] / rows[3]["decode_tokens_per_s"]
    assert rows[0]["peak_memory_mb"] > 0 and rows[3]["peak_memory_mb"] is None


def test_full_measures_long_contexts_with_both_caches_and_says_so(full):
    report, before = full
    found = report["context"]
    assert [(c["weights"], c["kv_cache"]) for c in found] == [
        (weights, cache) for weights in ("int8-g32", "fp32") for cache in ("fp32", "int8")
    ]
    for entry in found:  # the context of this model holds 600 tokens
        assert entry["ms_per_token"]["200"] > 0 and entry["ms_per_token"]["2000"] is None
        assert entry["decode_tokens_per_s"]["200"] == pytest.approx(1e3 / entry["ms_per_token"]["200"])
        assert entry["ms_per_1000_rows"] is None
    assert sum("behind 200 tokens" in line for line in before) == 4


def test_a_cached_row_costs_what_lies_between_the_lengths(checkpoint, monkeypatch):  # noqa: F811
    decoder = load(str(checkpoint), dtype="float32", compile=False)
    seconds = {"a": 0.002, "b": 0.005}
    monkeypatch.setattr(benchmark_context, "_rate", lambda decoder, text, n: 1 / seconds[text])
    plain, int8 = context_rates(decoder, {100: "a", 400: "b", 2000: None})
    assert plain["ms_per_token"] == {"100": pytest.approx(2.0), "400": pytest.approx(5.0), "2000": None}
    assert plain["ms_per_1000_rows"] == pytest.approx(10.0)  # 3 ms for 300 rows
    assert (plain["kv_cache"], int8["kv_cache"]) == ("fp32", "int8")


def test_no_stop_token_ends_a_timed_run(tmp_path, monkeypatch):
    vocab = byte_level_tokenizer().get_vocab_size()
    tiny_checkpoint(tmp_path, vocab_size=vocab, eos_token_id=list(range(vocab)))
    decoder = load(str(tmp_path), dtype="float32", max_seq_len=128, compile=False)
    decoder.tokenizer.stop_token_ids = decoder.stop_ids  # it may know some, too
    assert decoder.generate("hello", raw=True, max_new_tokens=8).stats["new_tokens"] == 0
    seen = []
    generate = type(decoder).generate

    def spy(self, text, **options):
        seen.append(generate(self, text, **options))
        return seen[-1]

    monkeypatch.setattr(type(decoder), "generate", spy)
    context_rates(decoder, {2: "hello"}, new_tokens=8)
    assert {result.stats["new_tokens"] for result in seen} == {8}
    assert decoder.state.stop_ids[0] >= 0  # the decoder that was given is left as it was


def test_full_takes_20_prompts_and_quick_8():
    for suite, count in (("full", 20), ("quick", 8)):
        args = benchmark.parse([f"--suite={suite}"])
        benchmark.check(args)
        assert args.limit == count
    args = benchmark.parse(["--suite=full", "--limit=3"])
    benchmark.check(args)
    assert args.limit == 3


needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="skipped: matplotlib is not installed"
)


@needs_matplotlib
def test_a_plot_is_a_png_beside_the_same_json(checkpoint, tmp_path):  # noqa: F811
    file = tmp_path / "chart.png"
    report, _ = benchmarked(checkpoint, "--draft=ngram", f"--plot={file}", f"--output={tmp_path / 'r.json'}")
    assert file.read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "r.json").read_text()) == report


@needs_matplotlib
def test_bars_are_medians_with_whiskers_and_a_row_without_a_rate_says_why(monkeypatch):
    from matplotlib.axes import Axes

    bars, texts = [], []
    barh, text = Axes.barh, Axes.text

    def watched_barh(self, y, width, **more):
        bars.append((y, width, more["xerr"]))
        return barh(self, y, width, **more)

    def watched_text(self, x, y, s, **more):
        texts.append((y, s))
        return text(self, x, y, s, **more)

    monkeypatch.setattr(Axes, "barh", watched_barh)
    monkeypatch.setattr(Axes, "text", watched_text)
    rates = {"decode_tokens_per_s": 10.0, "decode_tokens_per_s_min": 8.0, "decode_tokens_per_s_max": 13.0}
    rows = [Row("fastdecode", "bf16", "bf16", **rates), Row("transformers", "bf16", "bf16", note="not measured: why")]
    assert chart(as_report({"device": "cpu", "cpu": "a CPU"}, "a model", rows)).startswith(b"\x89PNG")
    assert bars == [(0, 10.0, [[2.0], [3.0]])]
    assert texts == [(0, "10.0"), (1, " not measured: why")]


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(capsys, tmp_path):
    assert run_command(benchmark.main, [f"--plot={tmp_path}"]) == 2
    assert "--plot" in capsys.readouterr().err


