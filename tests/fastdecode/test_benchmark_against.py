"""Other programs take turns with ours, and a row says what each is, even where it does not run."""

import contextlib
import importlib.util
import io
import json
import sys
import time
from types import ModuleType

import pytest
import torch
from test_benchmark import ROW_KEYS, benchmarked, checkpoint  # noqa: F401  (a fixture)

from fastdecode import benchmark, benchmark_against, benchmark_measure, load
from fastdecode.benchmark_against import contender_row, contenders, time_limit
from fastdecode.decoder import Decoder
from models.errors import InputError

PROMPT = list(range(10, 26))


@pytest.fixture(scope="module")
def decoder(checkpoint) -> Decoder:  # noqa: F811
    return load(str(checkpoint), dtype="float32", max_seq_len=128, compile=False)


class FakeLlama:
    """Stands for llama_cpp.Llama: gives the tokens that `answers` holds for a prompt, else counts upwards."""

    answers: dict[tuple[int, ...], list[int]] = {}

    def __init__(self, model_path, **settings):
        if "broken" in model_path:
            raise ValueError("Failed to load model from file")
        self.settings, self.resets = settings, 0

    def reset(self):
        self.resets += 1

    def generate(self, tokens, temp, repeat_penalty):
        assert (temp, repeat_penalty) == (0.0, 1.0)
        yield from self.answers.get(tuple(tokens), range(30, 1000))


@pytest.fixture
def llama_cpp(monkeypatch):
    """A module of that name, whether or not the real one is installed."""
    module = ModuleType("llama_cpp")
    module.Llama = type("Llama", (FakeLlama,), {"answers": {}})
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.delitem(sys.modules, "fastdecode.benchmark_llama", raising=False)
    yield module.Llama
    sys.modules.pop("fastdecode.benchmark_llama", None)


def llama_peer(decoder, checkpoint):  # noqa: F811
    return contenders(["llama.cpp"], decoder, checkpoint, "auto", PROMPT, 64, 100)[0].peer


def test_llama_cpp_gets_our_threads_room_for_the_longest_text_and_forgets_the_last_prompt(
    llama_cpp, decoder, checkpoint  # noqa: F811
):
    peer = llama_peer(decoder, checkpoint)
    assert peer.llama.settings["n_ctx"] == 100 and peer.llama.settings["n_gpu_layers"] == 0
    assert peer.llama.settings["n_threads"] == peer.llama.settings["n_threads_batch"] == torch.get_num_threads()
    before = peer.llama.resets
    assert peer.generate(PROMPT, 3).token_ids == [30, 31, 32]
    assert peer.llama.resets == before + 1


def test_llama_cpp_stops_at_a_stop_token_and_its_rate_leaves_out_the_prompt(llama_cpp, decoder, checkpoint):  # noqa: F811
    def slowly(self, tokens, temp, repeat_penalty):
        time.sleep(0.2)  # the prompt
        for token in (30, 31, 2, 33):
            yield token
            time.sleep(0.01)

    peer = llama_peer(decoder, checkpoint)
    peer.stop_ids = frozenset([2])
    llama_cpp.generate = slowly
    answer = peer.generate(PROMPT, 10)
    assert answer.token_ids == [30, 31, 2] and answer.rounds == 3
    assert answer.ttft_s >= 0.2 and answer.decode_tokens_per_s == pytest.approx(2 / 0.02, rel=0.5)
    assert peer.generate(PROMPT, 1).decode_tokens_per_s is None


def test_llama_cpps_row_names_what_the_file_holds_and_counts_matches(llama_cpp, decoder, checkpoint):  # noqa: F811
    texts = ["hello there", "it's what", "def square"]
    prompts = [decoder.encode(text) for text in texts]
    results = decoder.generate(texts, max_new_tokens=8)
    for ids, result in zip(prompts, results, strict=True):
        llama_cpp.answers[tuple(ids)] = list(result.token_ids)
    llama_cpp.answers[tuple(prompts[1])][5] ^= 1
    other = contenders(["llama.cpp"], decoder, checkpoint, "auto", prompts[0], 64, 100)[0]
    for ids in prompts:
        other.answer(ids, 8)
    first_tokens = {16: (PROMPT, 3), 2000: ([], 0)}
    row = contender_row(other, decoder, prompts, results, first_tokens, 1e9, comparable=True)
    assert (row["program"], row["weights"], row["kv_cache"], row["tau"]) == ("llama.cpp", "f32", "fp16", 1.0)
    assert (row["prompts"], row["matched"], row["new_tokens"]) == (3, 2, 24)
    assert len(row["first_difference_margins"]) == 1 and row["first_difference_margins"][0] > 0
    assert row["ttft_s"]["16"] > 0 and row["ttft_s"]["2000"] is None
    config, length = decoder.model.config, sum(r.stats["prompt_tokens"] + 4 for r in results) / 3
    weights = 4 * sum(p.numel() for name, p in decoder.model.named_parameters() if "embed_tokens" not in name)
    assert row["bytes_per_round"] == round(weights + length * 2 * 2 * config.n_layers * config.n_kv_heads * 8)


def test_a_file_that_llama_cpp_cannot_load_is_an_input_error(llama_cpp, decoder, tmp_path):
    with pytest.raises(InputError, match="it cannot load .*broken.gguf"):
        contenders(["llama.cpp"], decoder, tmp_path / "broken.gguf", "auto", PROMPT, 64, 100)


def test_prompt_lookup_has_a_row_of_its_own_with_the_same_tokens(checkpoint):  # noqa: F811
    report, before = benchmarked(checkpoint, "--against=transformers,transformers-lookup")
    plain, eager, lookup = report["rows"]
    assert list(lookup) == ROW_KEYS
    assert (eager["program"], eager["draft"], eager["mode"], eager["tau"]) == ("transformers", "none", "eager", 1.0)
    assert (lookup["program"], lookup["draft"], lookup["tree"]) == ("transformers", "prompt-lookup", "chain:10")
    assert lookup["matched"] == eager["matched"] == 3 and lookup["tau"] >= 1.0
    assert lookup["new_tokens"] == plain["new_tokens"]
    assert set(lookup["ttft_s"]) == {"16", "512", "2000"} and lookup["ttft_s"]["512"] > 0
    assert any("prompt-lookup chain:10" in " ".join(line.split()) for line in before) or len(before) > 5


def test_lookup_commits_several_tokens_a_round_where_the_text_repeats(decoder, checkpoint):  # noqa: F811
    from fastdecode.benchmark_peers import TransformersPeer

    eager = TransformersPeer(decoder.model, checkpoint)
    continuation = eager.generate(PROMPT, 24).token_ids
    lookup = TransformersPeer(decoder.model, checkpoint, "lookup")
    answer = lookup.generate(PROMPT + continuation + PROMPT, 24)
    same = eager.generate(PROMPT + continuation + PROMPT, 24)
    assert answer.token_ids == same.token_ids and same.rounds == 24 and answer.rounds <= 24


def test_every_program_has_its_turn_at_every_prompt_before_the_next(checkpoint, monkeypatch):  # noqa: F811
    turns = []
    generate, answer = Decoder.generate, benchmark_against.Contender.answer

    def ours(self, prompts, **options):
        if options.get("max_new_tokens") == 8:
            turns.append(("ours", options["first_index"]))
        return generate(self, prompts, **options)

    def theirs(self, prompt_ids, n_tokens):
        turns.append(("theirs", n_tokens))
        return answer(self, prompt_ids, n_tokens)

    monkeypatch.setattr(Decoder, "generate", ours)
    monkeypatch.setattr(benchmark_against.Contender, "answer", theirs)
    benchmarked(checkpoint, "--draft=ngram", "--against=transformers,transformers-lookup")
    per_prompt = [[("ours", i), ("ours", i), ("theirs", 8), ("theirs", 8)] for i in range(3)]
    assert turns == [turn for turns_of_one in per_prompt for turn in turns_of_one]


@pytest.mark.parametrize("error, said", [(RuntimeError("no\ncompiler"), "failed (no)"), (TimeoutError(), "more than")])
def test_a_program_that_cannot_compile_keeps_its_row_and_says_why(checkpoint, monkeypatch, error, said):  # noqa: F811
    from fastdecode.benchmark_peers import TransformersPeer

    def fails(self, prompt_ids, n_tokens):
        raise error

    monkeypatch.setattr(TransformersPeer, "generate", fails)
    report, before = benchmarked(checkpoint, "--against=transformers-compiled")
    plain, row = report["rows"]
    assert list(row) == ROW_KEYS
    assert (row["program"], row["mode"], row["decode_tokens_per_s"]) == ("transformers", "compiled", None)
    assert row["note"].startswith("not measured: compiling") and said in row["note"]
    assert row["ttft_s"] == {"16": None, "512": None, "2000": None} and row["matched"] is None
    assert any(said in line for line in before)


def test_an_eager_program_that_fails_is_no_silent_row(decoder, checkpoint, monkeypatch):  # noqa: F811
    from fastdecode.benchmark_peers import TransformersPeer

    monkeypatch.setattr(TransformersPeer, "generate", lambda self, ids, n: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        contenders(["transformers"], decoder, checkpoint, "auto", PROMPT, 64, 100)


def test_a_time_limit_interrupts_and_goes_away():
    with pytest.raises(TimeoutError), time_limit(0.05):
        time.sleep(10)
    with time_limit(0.05):
        pass
    time.sleep(0.1)


@pytest.mark.slow
def test_the_compiled_static_cache_says_the_same_and_does_not_compile_again(checkpoint):  # noqa: F811
    row = benchmarked(checkpoint, "--against=transformers-compiled")[0]["rows"][1]
    assert (row["mode"], row["draft"], row["matched"]) == ("compiled", "none", 3)
    assert "with compiling, took" in row["note"]
    assert row["decode_tokens_per_s_min"] > 5  # a compilation in between would take seconds


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="skipped: llama-cpp-python is not installed")
def test_llama_cpp_reads_the_demo_model_and_answers_as_we_do(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_measure, "FIRST_TOKEN_LENGTHS", (16, 128))  # 2,000 tokens take it long
    file, out = tmp_path / "result.json", io.StringIO()
    options = ["--against=llama.cpp", "--limit=2", "--max-new-tokens=12", "--no-startup", "--no-compile"]
    with contextlib.redirect_stdout(out):
        benchmark.main([*options, "--dtype=float32", f"--output={file}"])
    row = json.loads(file.read_text())["rows"][1]
    assert (row["program"], row["weights"], row["prompts"]) == ("llama.cpp", "q4_1", 2)
    assert row["decode_tokens_per_s"] > 0 and row["ttft_s"]["128"] > row["ttft_s"]["16"]
    # It rounds activations to 8 bits, so answers may part: where two tokens are nearly as likely.
    assert row["matched"] + len(row["first_difference_margins"]) == 2
    assert all(margin < 1.0 for margin in row["first_difference_margins"])
