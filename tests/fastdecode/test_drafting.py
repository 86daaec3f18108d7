"""Drafting never changes output: the same tokens with and without a draft, greedy and sampled, whatever is drafted."""

import copy
import dataclasses
import json
from collections import Counter

import eagle_fixtures
import pytest
import torch
from safetensors.torch import save_file
from stub_drafters import Oracle
from test_decoder import forget_stop_tokens, plain_decoder, text_of
from test_runner import NoHostCalls, NoHostReads
from tiny_checkpoint import tiny_checkpoint

from fastdecode import load
from fastdecode.decoder import Decoder
from fastdecode.drafters import cache_rows_for
from fastdecode.drafters.eagle import EagleDrafter
from fastdecode.drafters.model import ModelDrafter
from fastdecode.drafters.ngram import NgramDrafter
from fastdecode.tree import DynamicTree
from fastdecode.tree_options import chain, eagle1_tree
from models.errors import InputError
from models.transformer import Transformer

LIMIT = 700
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3}
TREES = {
    "chain:1": lambda: chain(1),
    "chain:4": lambda: chain(4),
    "chain:8": lambda: chain(8),
    "static": eagle1_tree,
    "dynamic:1,2,4": lambda: DynamicTree(1, 2, 4),
    "dynamic:3,4,16": lambda: DynamicTree(3, 4, 16),
    "dynamic:2,3,8": lambda: DynamicTree(2, 3, 8),
    "dynamic:5,10,64": lambda: DynamicTree(5, 10, 64),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder, hidden_size=48)
    return plain_decoder(folder, max_seq_len=LIMIT)


def drafting(plain, drafter, batch=1, compile=False, limit=LIMIT):
    """A decoder of the same model and kind of cache with `drafter`."""
    options = {"batch": batch, "compile": compile, "drafter": drafter, "int8_cache": plain.cache.quantized}
    decoder = Decoder(plain.model, plain.tokenizer, stop_ids=(), max_seq_len=limit, **options)
    forget_stop_tokens(decoder)
    return decoder


def random_head(plain, kind):
    config = plain.model.config
    return eagle_fixtures.random_head(kind, config.vocab_size, config.hidden_size, n_drafted=60)


def eagle(plain, kind, tree, batch=1, limit=LIMIT):
    builder = TREES[tree]()
    return EagleDrafter(random_head(plain, kind), builder, batch, cache_rows_for(limit, builder.n_nodes))


def another_model(plain, seed=5):
    """A model of the same tokenizer, of other sizes and weights."""
    changes = {"hidden_size": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "moe_layers": (False,)}
    torch.manual_seed(seed)
    model = Transformer(dataclasses.replace(plain.model.config, **changes, sliding_layers=(False,)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if "norm" not in name:
            parameter.normal_(0, 0.3)
    return model


def drafter_of(kind, plain, tree="dynamic:3,4,16", batch=1, limit=LIMIT):
    """A drafter of any kind; the tree is for heads, others draft chains of 4."""
    if kind == "ngram":
        return NgramDrafter(4)
    if kind in ("model", "copy"):
        model = another_model(plain) if kind == "model" else copy.deepcopy(plain.model)
        return ModelDrafter(model, 4, batch, cache_rows_for(limit, 5), plain.runner.round.vocab_size)
    return eagle(plain, kind, tree, batch, limit)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("options", [{}, SAMPLED, {**SAMPLED, "repetition_penalty": 1.3, "presence_penalty": 0.3}])
def test_a_head_never_changes_output(tiny, kind, tree, options):
    drafted = drafting(tiny, eagle(tiny, kind, tree))
    for n in (1, 2, 33, 257):
        arguments = {"raw": True, "max_new_tokens": 24, **options}
        assert drafted.generate(text_of(n), **arguments).token_ids == tiny.generate(text_of(n), **arguments).token_ids


@pytest.mark.parametrize("n_tokens", [1, 3, 8])
@pytest.mark.parametrize("options", [{}, SAMPLED, {"repetition_penalty": 1.2}])
def test_lookup_never_changes_output_and_finds_what_repeats(tiny, n_tokens, options):
    drafted = drafting(tiny, NgramDrafter(n_tokens))
    taus = []
    for prompt in (text_of(1), text_of(40), "12 34 12 34 12 34 12", "hello hello hello"):
        arguments = {"raw": True, "max_new_tokens": 60, **options}
        result = drafted.generate(prompt, **arguments)
        assert result.token_ids == tiny.generate(prompt, **arguments).token_ids
        taus.append(result.stats["tau"])
    assert max(taus) > 1 or options  # a random model left alone soon repeats itself


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4}


@pytest.mark.parametrize("n_tokens", [1, 3, 8])
@pytest.mark.parametrize("options", [{}, SAMPLED, {**SAMPLED, **PENALTIES}, PENALTIES, {"temperature": 1.5}])
def test_the_target_as_its_own_draft_model_accepts_everything(tiny, n_tokens, options):
    rows = cache_rows_for(LIMIT, n_tokens + 1)
    drafter = ModelDrafter(copy.deepcopy(tiny.model), n_tokens, 1, rows, tiny.runner.round.vocab_size)
    drafted = drafting(tiny, drafter)
    for prompt in (text_of(1), text_of(2), text_of(33), text_of(300)):
        arguments = {"raw": True, "max_new_tokens": 36, **options}
        result = drafted.generate(prompt, **arguments)
        assert result.token_ids == tiny.generate(prompt, **arguments).token_ids
        assert result.stats["rounds"] == 36 // (n_tokens + 1) and result.stats["tau"] == n_tokens + 1


@pytest.mark.parametrize("n_tokens", [1, 4])
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_a_smaller_model_never_changes_output_and_sometimes_guesses_right(tiny, n_tokens, options):
    rows = cache_rows_for(LIMIT, n_tokens + 1)
    drafted = drafting(tiny, ModelDrafter(another_model(tiny), n_tokens, 1, rows, tiny.runner.round.vocab_size))
    for n in (1, 2, 33, 257):
        arguments = {"raw": True, "max_new_tokens": 40, **options}
        assert drafted.generate(text_of(n), **arguments).token_ids == tiny.generate(text_of(n), **arguments).token_ids


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "ngram", "model", "copy"])
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_rows_of_a_batch_accept_different_lengths_and_are_refilled(tiny, kind, options):
    batch, prompts = 3, [text_of(n, seed=n) for n in (5, 33, 1, 60, 300, 2, 18)]
    decoder = drafting(tiny, drafter_of(kind, tiny, batch=batch), batch)
    together = decoder.generate(prompts, raw=True, max_new_tokens=24, **options)
    for i, result in enumerate(together):
        alone = {**options, "seed": options["seed"] + i} if options else {}
        assert result.token_ids == tiny.generate(prompts[i], raw=True, max_new_tokens=24, **alone).token_ids


@pytest.mark.parametrize("options", [{}, SAMPLED])
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_the_oracle_accepts_everything_the_liar_nothing_and_tau_says_so(tiny, n_tokens, options):
    arguments = {"raw": True, "max_new_tokens": 60, **options}
    expected = tiny.generate("hello", **arguments).token_ids
    answers = torch.tensor([tiny.encode("hello", raw=True) + expected])

    def run(spoil):
        decoder = drafting(tiny, Oracle(n_tokens, answers, spoil))
        result = decoder.generate("hello", **arguments)
        assert result.token_ids == expected
        return result.stats

    always, never = run(torch.zeros_like), run(torch.ones_like)
    assert always["rounds"] == 60 // (n_tokens + 1) and always["tau"] == n_tokens + 1
    assert never["rounds"] == 60 and never["tau"] == 1
    sometimes = run(lambda positions: positions % 5 == 0)
    assert 1 < sometimes["tau"] < n_tokens + 1


def test_a_stop_token_inside_a_draft_ends_text_and_counts(tiny):
    arguments = {"raw": True, "max_new_tokens": 60}
    full = tiny.generate("hello", **arguments).token_ids
    answers = torch.tensor([tiny.encode("hello", raw=True) + full])
    counted = Counter(full)
    stop = next(t for i, t in enumerate(full) if i > 6 and full.index(t) == i and i % 5 in (1, 2, 3))
    decoder = drafting(tiny, Oracle(4, answers))
    decoder.stop_ids = (stop,)
    decoder.state.stop_ids.fill_(stop)
    result = decoder.generate("hello", **arguments)
    cut = full.index(stop)
    assert counted[stop] and result.token_ids == full[:cut] and result.finish_reason == "stop"
    assert result.stats["rounds"] == -(-(cut + 1) // 5)
    assert result.stats["tau"] == (cut + 1) / result.stats["rounds"]
    assert decoder.state.length.item() == len(tiny.encode("hello", raw=True)) + cut + 1


def test_a_stop_string_inside_a_draft_ends_text_and_ids_before_it(tiny):
    full = tiny.generate("hello", raw=True, max_new_tokens=60)
    answers = torch.tensor([tiny.encode("hello", raw=True) + full.token_ids])
    letters = [i for i in range(10, len(full.text) - 2) if full.text[i : i + 2].isascii()]
    stop = full.text[letters[0] : letters[0] + 2]
    expected = tiny.generate("hello", raw=True, max_new_tokens=60, stop=[stop])
    result = drafting(tiny, Oracle(4, answers)).generate("hello", raw=True, max_new_tokens=60, stop=[stop])
    assert (result.text, result.token_ids, result.finish_reason) == (expected.text, expected.token_ids, "stop")


@pytest.mark.parametrize("budget", [20, 30, 40])
@pytest.mark.parametrize("tree", ["chain:8", "dynamic:5,10,64"])
def test_budgets_and_the_context_limit_are_met_exactly(tiny, budget, tree):
    limit = 60
    long = tiny.generate(text_of(30), raw=True, max_new_tokens=100).token_ids
    drafted = drafting(tiny, eagle(tiny, "eagle3", tree, limit=limit), limit=limit)
    result = drafted.generate(text_of(30), raw=True, max_new_tokens=budget)
    assert result.token_ids == long[: min(budget, 30)] and result.finish_reason == "length"
    answers = torch.tensor([tiny.encode(text_of(30), raw=True) + long])
    oracle = drafting(tiny, Oracle(7, answers), limit=limit)
    assert oracle.generate(text_of(30), raw=True, max_new_tokens=budget).token_ids == long[: min(budget, 30)]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "ngram", "copy"])
def test_turns_of_a_conversation_keep_their_prefix_with_a_draft_too(tiny, kind):
    chatting, messages = drafting(tiny, drafter_of(kind, tiny, "chain:4")), []
    for turn in ("hello there", "and then?", "why"):
        messages.append({"role": "user", "content": turn})
        kept = chatting.generate(list(messages), max_new_tokens=30, keep_prefix=True)
        assert kept.token_ids == tiny.generate(list(messages), max_new_tokens=30).token_ids
        assert kind != "copy" or kept.stats["tau"] == 5
        messages.append({"role": "assistant", "content": kept.text})


@pytest.mark.parametrize("options", [{}, SAMPLED])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "ngram", "model"])
def test_a_drafted_round_reads_nothing_back_and_is_one_graph(tiny, kind, options):
    decoder = drafting(tiny, drafter_of(kind, tiny))
    decoder.generate("hello", raw=True, max_new_tokens=2, **options)
    decoder.state.done.fill_(False)
    decoder.state.limit.fill_(100)
    round_, rows = decoder.runner.round, decoder.runner.cache_rows[256]
    method = round_.sampled if options else round_.greedy
    with torch.inference_mode(), NoHostCalls(), NoHostReads():
        method(rows)
    with torch.inference_mode():
        torch.compile(method, fullgraph=True, backend="eager", dynamic=False)(rows)


@pytest.mark.parametrize("kind", ["eagle3", "ngram", "copy"])
def test_compiled_drafted_rounds_say_the_same_and_compile_nothing_new(tiny, kind):
    compiled = drafting(tiny, drafter_of(kind, tiny, "dynamic:2,3,8"), compile=True)
    compiled.generate("warm", raw=True, max_new_tokens=2)
    with torch.compiler.set_stance("fail_on_recompile"):
        for n in (1, 2, 5, 31, 33, 250, 257, 600):
            options = {"raw": True, "max_new_tokens": 20}
            assert compiled.generate(text_of(n), **options).token_ids == tiny.generate(text_of(n), **options).token_ids


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_prompt_beyond_the_heads_training_length_is_drafted_for(tmp_path, kind):
    tiny_checkpoint(tmp_path, hidden_size=48, max_position_embeddings=4096)
    plain = plain_decoder(tmp_path, max_seq_len=3100)
    builder = chain(3)
    head = random_head(plain, kind)
    trained = dataclasses.replace(head.config.layer, max_position_embeddings=2048)
    head.config = dataclasses.replace(head.config, layer=trained)
    drafted = drafting(plain, EagleDrafter(head, builder, 1, cache_rows_for(3100, 4)), limit=3100)
    options = {"raw": True, "max_new_tokens": 24}
    assert drafted.generate(text_of(3000), **options).token_ids == plain.generate(text_of(3000), **options).token_ids


def save_eagle1(head, folder):
    """Write a head as published EAGLE-1 heads are: parts by their own names, no lm_head."""
    attention, mlp = head.layers[0].self_attn, head.layers[0].mlp
    sizes = [attention.n_heads * attention.head_dim, *[attention.n_kv_heads * attention.head_dim] * 2]
    q, k, v = attention.qkv_proj.weight.split(sizes)
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    norm = head.layers[0].post_attention_layernorm.weight
    tensors = {"embed_tokens.weight": head.embed_tokens.weight, "fc.weight": head.fc.weight, "fc.bias": head.fc.bias}
    layer = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}
    layer |= {"self_attn.o_proj": attention.o_proj.weight, "mlp.gate_proj": gate, "mlp.up_proj": up}
    layer |= {"mlp.down_proj": mlp.down_proj.weight, "post_attention_layernorm": norm}
    tensors |= {f"layers.0.{name}.weight": value for name, value in layer.items()}
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "bias": True}
    sizes = head.config.layer
    config |= {"vocab_size": sizes.vocab_size, "hidden_size": sizes.hidden_size, "rms_norm_eps": sizes.rms_norm_eps}
    config |= {"intermediate_size": sizes.intermediate_size, "num_hidden_layers": 1}
    config |= {"num_attention_heads": sizes.n_heads, "num_key_value_heads": sizes.n_kv_heads}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("tree", ["auto", "static", "dynamic:2,3,8"])
def test_a_published_head_drafts_through_load_also_from_a_stored_program(tiny, tmp_path, monkeypatch, tree):
    model, folder = tmp_path / "model", tmp_path / "head"
    tiny_checkpoint(model, hidden_size=48)
    save_eagle1(random_head(tiny, "eagle1"), folder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    options = {"raw": True, "max_new_tokens": 20}
    expected = [tiny.generate(text_of(n), **options).token_ids for n in (1, 40)]
    for compile in (False, True, True) if tree == "auto" else (False,):
        decoder = load(str(model), dtype="float32", device="cpu", draft=str(folder), tree=tree, compile=compile)
        forget_stop_tokens(decoder)
        assert [decoder.generate(text_of(n), **options).token_ids for n in (1, 40)] == expected


def test_a_head_of_another_width_is_refused_with_both_numbers_before_weights_are_read(tiny, tmp_path, monkeypatch):
    tiny_checkpoint(tmp_path / "model", hidden_size=96)
    save_eagle1(random_head(tiny, "eagle1"), tmp_path / "head")
    monkeypatch.setattr("fastdecode.loading.load_as", None)
    with pytest.raises(InputError, match=r"48.*96|96.*48"):
        load(str(tmp_path / "model"), draft=str(tmp_path / "head"), device="cpu")
