"""The tuner measures before anybody waits for it, remembers its choice, and forgets what is damaged or not its own."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from eagle_fixtures import random_head
from rich.console import Console
from tiny_checkpoint import tiny_checkpoint

import generate
from checkpoints.checkpoint import read_config
from fastdecode import benchmark, load, loading, sweep, tree_choice, tuning, tuning_report
from fastdecode.options import run_command
from fastdecode.train.output import write_head
from fastdecode.tree_choice import Choice, choice_key, read_choice, store_choice
from fastdecode.tuner import CHAINS, PLAIN, TREES, Acceptance, Costs, Expectation, expect
from fastdecode.tuning import Effort, RecordedTree, Timed, choose_tree, comb, known_choice, trees_to_choose_from
from quantize.__main__ import main as quantize_main

QUICK = Effort(prompts=2, new_tokens=12, seconds=0.01)
ROWS = (Expectation(PLAIN, 1, 1.0, 0.0, 0.01), Expectation("chain:2", 3, 2.5, 0.001, 0.011))
EAGER = {"dtype": "float32", "device": "cpu", "compile": False, "max_seq_len": 300}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of stored programs and choices, for one test."""
    monkeypatch.setattr(loading, "stored_programs", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def head_for(model: Path, folder: Path) -> None:
    """An EAGLE-1 head of random weights for the tiny model."""
    config = read_config(model)
    write_head(random_head("eagle1", config.vocab_size, config.hidden_size, 0), folder, "safeai")


def store(decoder, tree: str) -> None:
    store_choice(decoder.program_folder, tuning._key(decoder.plan, decoder), Choice(tree, ROWS))


def test_a_choice_is_read_as_it_was_stored(tmp_path):
    key, choice = {"model": "a", "draft": ["ngram"]}, Choice("chain:2", ROWS)
    store_choice(tmp_path / "new", key, choice)
    assert read_choice(tmp_path / "new", key) == choice
    assert [file.suffix for file in (tmp_path / "new").iterdir()] == [".json"]
    assert read_choice(tmp_path / "new", {**key, "model": "b"}) is None
    assert read_choice(tmp_path / "nowhere", key) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"tree": "chain:2"', '"tree": "bush"'),
        lambda text: text.replace('"tree": "chain:2"', '"tree": "chain:7"'),
        lambda text: text.replace('"tree": "chain:2"', '"tree": 2'),
        lambda text: text.replace("2.5", "null"),
        lambda text: text.replace("2.5", "NaN"),
        lambda text: text.replace('"model": "a"', '"model": "b"'),  # of another model, under this one's name
        lambda text: "[" * 100_000,
        lambda text: "\x00\xff",
    ],
)
def test_a_damaged_or_foreign_file_is_no_choice(tmp_path, damage):
    key = {"model": "a"}
    store_choice(tmp_path, key, Choice("chain:2", ROWS))
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    assert damage(whole) != whole
    file.write_text(damage(whole), encoding="latin-1")
    assert read_choice(tmp_path, key) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store_choice(tmp_path / "file", {"model": "a"}, Choice("chain:2", ROWS))
    assert read_choice(tmp_path / "file", {"model": "a"}) is None


def test_the_key_tells_models_drafts_precisions_and_machines_apart(model, tmp_path, monkeypatch):
    other = tmp_path / "other"
    tiny_checkpoint(other, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    small = tmp_path / "small"
    assert run_command(quantize_main, [str(other), "-o", str(small), "--bits=8"]) == 0

    def key(path=model, draft="ngram", **changes):
        decoder = load(str(path), draft=draft, **{**EAGER, **changes})
        return choice_key(decoder.plan, decoder.model, decoder.batch, decoder.cache.quantized, decoder.compile)

    one = key()
    assert key() == one and json.loads(json.dumps(one)) == one
    assert key(tree="chain:5") == one  # a tree that was asked for is another question
    different = [key(path=other), key(draft=str(model)), key(dtype="bfloat16"), key(batch=2)]
    different += [key(kv_cache="int8"), key(path=small)]
    torch.set_num_threads(2)
    different.append(key())
    torch.set_num_threads(1)
    monkeypatch.setattr(tree_choice, "cpu_name", lambda: "another CPU")
    different.append(key())
    assert all(found != one for found in different)
    assert len({json.dumps(found) for found in different}) == len(different)


def test_a_head_that_was_written_anew_is_another_draft(model, tmp_path):
    head = tmp_path / "head"
    head_for(model, head)
    decoder = load(str(model), draft=str(head), **EAGER)
    before = tuning._key(decoder.plan, decoder)
    (head / "config.json").write_text((head / "config.json").read_text() + " ")
    assert tuning._key(decoder.plan, decoder)["draft"] != before["draft"]


def test_auto_takes_the_stored_choice_and_measures_nothing(model, cache, monkeypatch):
    def never(*args, **options):
        raise AssertionError("measured at load")

    monkeypatch.setattr(tuning, "measure", never)
    untuned = load(str(model), draft="ngram", **EAGER)
    assert untuned.runner.round.drafter.n_nodes == 4  # a chain of 3
    store(untuned, "chain:2")
    notes = []
    assert load(str(model), draft="ngram", note=notes.append, **EAGER).runner.round.drafter.n_nodes == 3
    assert load(str(model), draft="ngram", tree="chain:6", **EAGER).runner.round.drafter.n_nodes == 7
    assert load(str(model), draft="ngram", compile_cache=False, **EAGER).runner.round.drafter.n_nodes == 4
    assert load(str(model), draft="ngram", batch=2, **EAGER).runner.round.drafter.n_nodes == 4  # chosen for one text
    assert notes == []


def test_where_plain_was_chosen_nothing_is_drafted_and_a_note_says_so(model, cache):
    store(load(str(model), draft="ngram", **EAGER), PLAIN)
    notes = []
    decoder = load(str(model), draft="ngram", note=notes.append, **EAGER)
    assert decoder.runner.round.drafter.n_nodes == 1 and decoder.plan.drafts
    assert [note for note in notes if "Drafting does not pay" in note]
    notes.clear()
    assert load(str(model), draft="ngram", tree="chain:3", note=notes.append, **EAGER).runner.round.drafter.n_nodes == 4
    assert notes == []


def test_tuning_gives_a_row_for_each_tree_chooses_the_best_and_stores_it(model, cache):
    decoder = load(str(model), draft="ngram", **EAGER)
    text = decoder.generate("hello there", max_new_tokens=8).token_ids
    choice = choose_tree(decoder.plan, decoder, effort=QUICK)
    assert [row.tree for row in choice.rows] == [PLAIN, *CHAINS]
    assert choice.tree == max(choice.rows, key=lambda row: row.tokens_per_s).tree
    assert all(1 <= row.tokens <= row.nodes and row.round_s > 0 for row in choice.rows)
    assert known_choice(decoder.plan, decoder) == choice
    assert decoder.generate("hello there", max_new_tokens=8).token_ids == text  # and the decoder goes on as before


def test_with_a_head_trees_are_measured_in_fp32_and_are_no_choice_in_lower_precision(model, cache, tmp_path):
    head = tmp_path / "head"
    head_for(model, head)
    decoder = load(str(model), draft=str(head), **EAGER)
    choice = choose_tree(decoder.plan, decoder, effort=QUICK)
    assert [row.tree for row in choice.rows] == [PLAIN, *CHAINS, *TREES]
    for changes in ({"dtype": "bfloat16"}, {"kv_cache": "int8"}):
        low = load(str(model), draft=str(head), **{**EAGER, **changes})
        assert trees_to_choose_from(low.plan, low) == CHAINS


def test_a_tree_that_was_asked_for_is_shown_but_never_chosen_unless_it_is_plains_bit_for_bit(model, cache, monkeypatch):
    measured: tuple[Costs, Acceptance] = (Costs({0: 0.0, 8: 0.0}, {1: 1.0, 40: 1.0}), ((0.5, 0.3, 0.1, 0.1),) * 8)
    monkeypatch.setattr(tuning, "measure", lambda *given: measured)
    decoder = load(str(model), draft="ngram", **EAGER)
    choice = choose_tree(decoder.plan, decoder, also=["static"])
    assert max(choice.rows, key=lambda row: row.tokens_per_s).tree == "static"
    assert choice.tree == "chain:8"


def test_the_comb_counts_ranks_where_its_chain_was_right(model, monkeypatch):
    tree = RecordedTree(comb(), 1)
    assert (tree.n_nodes, tree.max_depth, tree.top_k, set(tree.widths)) == (32, 8, 4, {1})
    tree.drafted[0, 1:9] = torch.tensor([5, 6, 7, 8, 1, 2, 3, 4])  # depth 1: 5 6 7 8; depth 2: 1 2 3 4

    class Fake:
        class runner:
            class round:
                class drafter:
                    pass

        class state:
            tokens = torch.tensor([[9, 5, 3, 0, 7]])
            length = torch.tensor([5])

    Fake.runner.round.drafter.tree = tree
    # Rounds at lengths 1 (5 is rank 0, then 3 is rank 2), 3 (0 is none) and 4 (7 is rank 2).
    monkeypatch.setattr(tuning, "_decode", lambda *given: iter([(1, None), (3, None), (4, None)]))
    found = tuning._rank_acceptance(Fake, [[9]], 4)
    assert found[0] == (1 / 3, 0, 1 / 3, 0) and found[1] == (0, 0, 1, 0) and found[2] == (0, 0, 0, 0)


def test_the_comb_drafts_what_a_chain_drafts_and_loses_no_text(model, tmp_path):
    head = tmp_path / "head"
    head_for(model, head)
    decoder = load(str(model), draft=str(head), tree="chain:8", **EAGER)
    plan = decoder.plan
    tree = RecordedTree(comb(), 1)
    other = decoder.with_drafter(tuning.replace(plan, options=tuning.replace(plan.options, tree=tree)))
    ids = decoder.encode("hello there")
    for one in (decoder, other):
        list(tuning._decode(one, ids, 10))
    length = int(decoder.state.length[0])
    assert torch.equal(decoder.state.tokens[0, :length], other.state.tokens[0, :length])
    assert tree.drafted[0, 0] in other.state.tokens[0] and tree.drafted[0, 1:].any()


def test_choice_for_reads_measures_and_gives_up_in_a_sentence(model, cache, monkeypatch):
    decoder = load(str(model), draft="ngram", **EAGER)
    notes = []
    store(decoder, PLAIN)
    assert tuning_report.choice_for(decoder.plan, decoder, notes.append, print).rows == ROWS
    assert "does not pay" in notes.pop()

    def no_room(*given, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(tuning_report, "choose_tree", no_room)
    assert tuning_report.choice_for(decoder.plan, decoder, notes.append, print, "chain:5") is None
    assert "Memory" in notes.pop()


def test_the_table_marks_the_choice_and_what_was_asked_for():
    out = io.StringIO()
    rows = expect(CHAINS, Costs({0: 0.0, 8: 8e-3}, {1: 0.01, 9: 0.017}), ((0.5,),) * 8)
    Console(file=out, width=80).print(tuning_report.as_table(Choice("chain:1", rows), "chain:3"))
    lines = {line.split()[0]: line for line in out.getvalue().splitlines()}
    assert "chosen" in lines["chain:1"] and "asked for" in lines["chain:3"] and "chosen" not in lines["plain"]
    assert "100.0" in lines["plain"]


def quietly(main, *arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(main, [*map(str, arguments), "--dtype=float32", "--device=cpu", "--no-compile"])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(tuning.choose_tree, "__defaults__", (lambda sentence: None, (), QUICK))


def test_explain_shows_the_table_and_decodes_with_the_choice(model, cache, quick, monkeypatch):
    code, plain, _ = quietly(generate.main, "hello there", "--model", model, "--max-new-tokens=6")
    arguments = ("hello there", "--model", model, "--max-new-tokens=6", "--draft=ngram", "--explain")
    code, out, err = quietly(generate.main, *arguments)
    assert code == 0 and out == plain
    assert "chain:8" in err and "chosen" in err
    monkeypatch.setattr(tuning, "measure", None)  # the second time nothing is measured
    code, out, again = quietly(generate.main, *arguments)
    assert code == 0 and out == plain and "chain:8" in again
    assert "chain:8" not in quietly(generate.main, *arguments[:-2], "--explain")[2]


def test_the_benchmark_tunes_and_names_the_tree_that_it_ran(model, cache, quick):
    options = ("--model", model, "--draft=ngram", "--limit=1", "--max-new-tokens=6", "--no-startup")
    code, out, err = quietly(benchmark.main, *options)
    assert code == 0, err
    plain, drafted = json.loads(out.splitlines()[-1])["rows"]
    (file,) = cache.glob("tree-*.json")
    chosen = json.loads(file.read_text())["tree"]
    assert drafted["tree"] == chosen if chosen != PLAIN else "expected to lose least" in err
    assert drafted["matched"] == 1 and plain["tree"] is None


def test_the_sweep_shows_measured_beside_expected_and_ends_with_json(model, cache, quick):
    trees = ("--trees", "chain:1", "chain:4")
    options = ("--model", model, "--draft=ngram", "--limit=2", "--max-new-tokens=6", *trees)
    code, out, err = quietly(sweep.main, *options)
    assert code == 0, err
    report = json.loads(out.splitlines()[-1])
    assert [row["tree"] for row in report["rows"]] == [PLAIN, "chain:1", "chain:4"]
    assert all(row["matched"] == row["prompts"] == 2 and row["round_ms"] > 0 for row in report["rows"])
    assert {"machine", "model", "draft", "weights", "chosen", "best", "share_of_best"} < set(report)
    assert "chain:4" in out.splitlines()[5]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--draft=none"], "needs a draft"),
        (["--draft=ngram", "--tree=chain:2"], "--trees"),
        (["--draft=ngram", "--limit=0"], "--limit"),
        (["--draft=ngram", "--trees", "static"], "chains only"),
        (["--draft=ngram", "--trees", "bush"], "bush"),
        (["--draft=auto"], "No draft fits"),
    ],
)
def test_a_sweep_that_cannot_be_is_one_sentence_and_exit_code_2(model, cache, arguments, sentence):
    code, out, err = quietly(sweep.main, "--model", model, *arguments)
    assert (code, out) == (2, "") and sentence in err


def test_costs_add_up_to_what_was_timed_whether_or_not_the_device_tells_the_parts():
    told = {n: Timed(1.0 + n / 10, n / 20) for n in (1, 3, 5, 8)}
    costs = tuning._costs(told, Timed(3.0, 0.4), None, 10.0)
    assert costs.draft == pytest.approx({0: 0.0, 1: 0.5, 3: 1.5, 5: 2.5, 8: 4.0})
    assert costs.verify == pytest.approx({1: 10.0, 2: 10.5, 4: 11.5, 6: 12.5, 9: 14.0, 32: 26.0})
    untold = {n: timed._replace(draft=None) for n, timed in told.items()}
    found = tuning._costs(untold, Timed(3.0, None), Timed(1.4, None), 10.0)  # a draft of 8 for nothing: 1.4
    assert (found.draft, found.verify) == (pytest.approx(costs.draft), pytest.approx(costs.verify))
    chains_only = tuning._costs(untold, None, None, 10.0)
    rounds = [row.round_s for row in expect(("chain:1", "chain:8"), chains_only, ((0.5,),))]
    assert rounds == pytest.approx([10.0, 11.0, 18.0])
