"""Heads of every public layout load, and heads that cannot be used are refused in a sentence that says why."""

import os
import pickle
import re

import pytest
import torch
from golden_files import (
    assert_close,
    carried,
    golden_head,
    load,
    parametrize_golden,
    target_for,
    teacher_forced,
    write_head,
)
from tiny import FAMILIES, reference_model, save_checkpoint

from checkpoints.checkpoint import read_config
from checkpoints.head_checkpoint import holds_head, read_head_config
from models.eagle import Eagle3Head, EagleHead
from models.errors import InputError
from models.head_config import HeadConfig

TOLERANCE = 1e-5


def pytest_generate_tests(metafunc):
    both_layouts = "both_layouts" in metafunc.function.__name__  # only EAGLE-3 has two
    parametrize_golden(metafunc, *(("eagle3",) if both_layouts else ("eagle1", "eagle3", "speculators")))


@pytest.fixture
def eagle1():
    return carried("eagle1")


@pytest.fixture
def eagle3():
    """It has a draft vocabulary of 96 among 320 ids."""
    return carried("eagle3")


@pytest.fixture
def speculators():
    return carried("speculators")


@torch.inference_mode()
def golden_logits(golden, head):
    return teacher_forced(head, golden.next_ids, head.fuse(golden.hidden))[1]


def expected_logits(golden):
    return golden.tensors["step0.logits" if golden.kind == "speculators" else "logits"]


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_golden_heads_come_back_from_every_file_format(golden, form, prefix, tmp_path):
    weights = {prefix + name: tensor for name, tensor in golden.weights.items()}
    target = golden_head(golden, tmp_path / "first")[1]
    head = load(write_head(tmp_path / "second", golden.config, weights, form), target)
    assert isinstance(head, EagleHead if golden.kind == "eagle1" else Eagle3Head)
    assert_close(golden_logits(golden, head), expected_logits(golden), TOLERANCE)
    assert not any(p.requires_grad or p.is_meta for p in head.parameters())


def as_speculators(config):
    """The same EAGLE-3 head as vLLM speculators writes it: nested config, ids of the layers that states enter."""
    own = ("draft_vocab_size", "target_hidden_size", "eagle_config")
    layer = {name: value for name, value in config.items() if name not in own} | {"model_type": "llama"}
    top = {name: config[name] for name in own[:2] if name in config}
    return top | {"speculators_model_type": "eagle3", "transformer_layer_config": layer}


def test_golden_heads_mean_the_same_in_both_layouts(golden, tmp_path):
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in golden.weights.items()}
    flat = load(write_head(tmp_path / "a", golden.config, golden.weights), target_for(golden.config))
    nested = load(write_head(tmp_path / "b", as_speculators(golden.config), weights), target_for(golden.config))
    assert torch.equal(golden_logits(golden, flat), golden_logits(golden, nested))
    assert flat.feature_layers == nested.feature_layers


def test_eagle1_bias_is_there_when_the_config_leaves_it_out(eagle1, tmp_path):
    weights = eagle1.weights | {"fc.bias": torch.linspace(-1, 1, 64)}
    config = {name: value for name, value in eagle1.config.items() if name != "bias"}
    absent = load(write_head(tmp_path / "absent", config, weights), target_for(config))
    given = load(write_head(tmp_path / "given", config | {"bias": True}, weights), target_for(config))
    assert torch.equal(absent.fc.bias, weights["fc.bias"])
    assert torch.equal(golden_logits(eagle1, absent), golden_logits(eagle1, given))
    del weights["fc.bias"]
    without = load(write_head(tmp_path / "false", config | {"bias": False}, weights), target_for(config))
    assert without.fc.bias is None
    assert not torch.allclose(golden_logits(eagle1, without), golden_logits(eagle1, given))
    with pytest.raises(InputError, match="fc.bias is missing"):
        load(write_head(tmp_path / "missing", config, weights), target_for(config))


def test_eagle1_bias_in_the_file_but_not_in_the_config_is_refused(eagle1, tmp_path):
    weights = eagle1.weights | {"fc.bias": torch.zeros(64)}
    with pytest.raises(InputError, match="tensor fc.bias is not part"):
        load(write_head(tmp_path, eagle1.config | {"bias": False}, weights), target_for(eagle1.config))


def test_rotary_buffers_in_the_file_are_ignored(eagle1, eagle3, tmp_path):
    for golden, layer in ((eagle1, "layers.0"), (eagle3, "midlayer")):
        for form in ("safetensors", "bin"):
            weights = golden.weights | {f"{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8)}
            target = golden_head(golden, tmp_path / "plain")[1]
            head = load(write_head(tmp_path / golden.kind / form, golden.config, weights, form), target)
            assert_close(golden_logits(golden, head), expected_logits(golden), TOLERANCE)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "speculators"])
def test_a_head_without_embedding_takes_the_targets(kind, request, tmp_path):
    golden = request.getfixturevalue(kind)
    weights = golden.weights
    embedding = weights.pop("embed_tokens.weight")
    target = golden_head(golden, tmp_path / "whole")[1]
    target.embed_tokens.weight.copy_(embedding)
    head = load(write_head(tmp_path, golden.config, weights), target)
    assert head.embed_tokens.weight is target.embed_tokens.weight
    assert_close(golden_logits(golden, head), expected_logits(golden), TOLERANCE)


def test_an_embedding_equal_to_the_targets_is_held_once(eagle3, tmp_path):
    target = target_for(eagle3.config)
    folder = write_head(tmp_path, eagle3.config, eagle3.weights)
    assert load(folder, target).embed_tokens.weight is not target.embed_tokens.weight
    target.embed_tokens.weight.copy_(eagle3.weights["embed_tokens.weight"])
    assert load(folder, target).embed_tokens.weight is target.embed_tokens.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_without_lm_head_takes_the_drafted_rows_of_the_targets(eagle3, tied, tmp_path):
    weights = eagle3.weights
    own, ids = weights.pop("lm_head.weight"), torch.arange(96) + weights["d2t"]
    weights.pop("embed_tokens.weight")
    target = target_for(eagle3.config, tie_word_embeddings=tied)
    target.embed_tokens.weight.copy_(eagle3.weights["embed_tokens.weight"])
    rows = (target.embed_tokens if tied else target.lm_head).weight
    if not tied:
        rows[ids] = own
    head = load(write_head(tmp_path, eagle3.config, weights), target)
    assert torch.equal(head.lm_head.weight, rows[ids])
    if not tied:
        assert_close(golden_logits(eagle3, head), expected_logits(eagle3), TOLERANCE)


def test_eagle1_shares_the_lm_head_of_a_tied_target(eagle1, tmp_path):
    target = target_for(eagle1.config, tie_word_embeddings=True)
    head = load(write_head(tmp_path, eagle1.config, eagle1.weights), target)
    assert head.lm_head.embedding is target.embed_tokens
    state = torch.randn(1, 3, 64)
    assert torch.equal(head.logits(state), target.logits(state))


def test_a_head_of_another_width_brings_its_own_embedding_and_lm_head(eagle3, tmp_path):
    config = eagle3.config | {"target_hidden_size": 96}
    weights = eagle3.weights | {"fc.weight": torch.randn(64, 288)}
    target = target_for(config)
    head = load(write_head(tmp_path / "whole", config, weights), target)
    assert target.config.hidden_size == 96 and head.config.feature_size == 288
    for name in ("embed_tokens.weight", "lm_head.weight"):
        rest = {n: t for n, t in weights.items() if n != name}
        with pytest.raises(InputError, match=f"has no {name}, and the target's is 96 wide where the head is 64"):
            load(write_head(tmp_path / name, config, rest), target)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "speculators"])
def test_a_head_for_another_target_is_refused_with_both_numbers(kind, request, tmp_path):
    golden = request.getfixturevalue(kind)
    folder = write_head(tmp_path, golden.config, golden.weights)
    fit = read_head_config(folder).fitted_to
    with pytest.raises(InputError, match=r"320 ids, but the target's has 321"):
        fit(target_for(golden.config, vocab_size=321).config, "head")
    with pytest.raises(InputError, match=r"width 64, but the target's are 96 wide"):
        fit(target_for(golden.config, hidden_size=96).config, "head")
    if kind == "eagle1":  # needs no layer of the target
        assert fit(target_for(golden.config, n_layers=1).config, "head").feature_layers == ()
        return
    with pytest.raises(InputError, match=r"enters layer \d+, but the target's 2 layers are 0 to 1"):
        fit(target_for(golden.config, n_layers=2).config, "head")


def test_weights_that_contradict_the_config_are_refused(eagle3, tmp_path):
    for name, value in (("vocab_size", 319), ("draft_vocab_size", 95), ("intermediate_size", 127)):
        config = eagle3.config | {name: value}
        folder = write_head(tmp_path / name, config, eagle3.weights)
        with pytest.raises(InputError, match=str(value)):
            load(folder, target_for(config))


def flat(**changes):
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "draft_vocab_size": 96,
    } | changes


def eagle1_config(**changes):
    config = flat(architectures=["LlamaForCausalLM"])
    del config["draft_vocab_size"]
    return config | changes


def nested(**changes):
    layer = {name: value for name, value in flat().items() if name not in ("draft_vocab_size", "architectures")}
    return {"speculators_model_type": "eagle3", "draft_vocab_size": 96, "transformer_layer_config": layer} | changes


def test_layer_ids_of_the_two_layouts_are_off_by_one():
    """SpecForge names the layers that states leave, speculators those that they enter."""
    target = target_for(flat(), n_layers=32).config
    left = flat(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 15, 28], "use_aux_hidden_state": True})
    entered = nested(eagle_aux_hidden_state_layer_ids=[2, 16, 29])
    for config in (left, entered, flat(), nested(), flat(eagle_config={"eagle_aux_hidden_state_layer_ids": []})):
        assert HeadConfig.from_json(config).fitted_to(target, "head").feature_layers == (2, 16, 29)
    with pytest.raises(InputError, match="enters layer 32, but the target's 32 layers are 0 to 31"):
        HeadConfig.from_json(nested(eagle_aux_hidden_state_layer_ids=[2, 16, 32])).fitted_to(target, "head")
    with pytest.raises(InputError, match="enters layer 32"):
        last = flat(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 15, 31]})
        HeadConfig.from_json(last).fitted_to(target, "head")


def test_a_mixtral_targets_head_is_a_dense_llama_layer():
    config = eagle1_config(model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=8)
    head = HeadConfig.from_json(config | {"num_key_value_heads": 2})
    assert head.kind == "eagle1" and head.fc_bias
    assert (head.layer.moe_layers, head.layer.n_kv_heads, head.layer.sliding_window) == ((False,), 2, None)


def test_qkv_bias_is_of_q_k_and_v_only():
    layer = HeadConfig.from_json(flat(qkv_bias=True)).layer
    assert layer.qkv_bias and not layer.o_bias
    layer = HeadConfig.from_json(flat(attention_bias=True)).layer
    assert layer.qkv_bias and layer.o_bias


def test_speculators_layers_are_qwen3s_unless_the_config_says_llama():
    config = nested()
    assert not HeadConfig.from_json(config).layer.qk_norm
    del config["transformer_layer_config"]["model_type"]
    layer = HeadConfig.from_json(config).layer
    assert layer.qk_norm and layer.head_dim == 128


@pytest.mark.parametrize(
    "config, words",
    [
        (flat(model_type="gpt_oss"), "model_type should be one of"),
        (flat(num_hidden_layers=2), "num_hidden_layers should be 1"),
        (flat(draft_vocab_size=321), "draft_vocab_size should be a whole number from 1 to 320, found 321"),
        (flat(norm_output=False), "norm_output should be true"),
        (flat(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state should be true"),
        (flat(eagle_config=[1]), "eagle_config should be a JSON object"),
        (flat(eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 2]}), "ascending layer numbers"),
        (flat(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 1.5]}), "ascending layer numbers"),
        (flat(rope_scaling={"rope_type": "fancy", "factor": 2.0}), "fancy"),
        (eagle1_config(bias="yes"), "bias should be true or false"),
        (flat(hidden_size=0), "hidden_size"),
        (nested(speculators_model_type="mlp"), "speculators_model_type should be eagle3"),
        (nested(transformer_layer_config=None), "transformer_layer_config should be a JSON object"),
        (nested(transformer_layer_config={"model_type": "gemma"}), "model_type should be one of llama, qwen3"),
        (nested(norm_before_fc=True, fc_norm=True), "fc_norm should be false where norm_before_fc is true"),
        (nested(norm_output="no"), "norm_output should be true or false"),
        (nested(eagle_aux_hidden_state_layer_ids="2,3"), "ascending layer numbers"),
        ([], "expected a JSON object"),
    ],
)
def test_configs_that_cannot_be_honoured_are_refused(config, words):
    with pytest.raises(InputError, match=words) as raised:
        HeadConfig.from_json(config, "head/config.json")
    assert "head/config.json" in str(raised.value)


def test_maps_between_the_vocabularies_must_agree(eagle3, tmp_path):
    d2t, t2d = eagle3.weights["d2t"], eagle3.weights["t2d"]
    moved = t2d.clone()
    moved[int(t2d.nonzero()[0])] = False
    moved[int((~t2d).nonzero()[-1])] = True
    fewer = t2d.clone()
    fewer[int(t2d.nonzero()[3])] = False
    jumbled, beyond = d2t.clone(), d2t.clone()
    jumbled[5], beyond[-1] = jumbled[5] - 200, 320
    cases = {
        "no_d2t": ({"d2t": None}, "drafts 96 of the target's 320 ids, but has no d2t"),
        "moved": ({"t2d": moved}, "t2d marks 96 target ids and d2t gives 96, of which 95 are the same"),
        "fewer": ({"t2d": fewer}, "t2d marks 95 target ids and d2t gives 96"),
        "short_t2d": ({"t2d": t2d[:300]}, r"t2d has shape \[300\], expected \[320\]"),
        "short_d2t": ({"d2t": d2t[:90]}, r"d2t is \S+ \[90\], expected 96 whole numbers"),
        "floats": ({"d2t": d2t.float()}, r"d2t is \S+ \[96\], expected 96 whole numbers"),
        "jumbled": ({"d2t": jumbled, "t2d": None}, "expected 96 ascending ids below the vocabulary of 320"),
        "beyond": ({"d2t": beyond, "t2d": None}, "to 415, expected 96 ascending ids below the vocabulary of 320"),
    }
    for name, (changes, words) in cases.items():
        weights = {n: t for n, t in (eagle3.weights | changes).items() if t is not None}
        for form in ("safetensors", "bin"):
            with pytest.raises(InputError, match=words):
                load(write_head(tmp_path / name / form, eagle3.config, weights, form), target_for(eagle3.config))
    weights = {n: t for n, t in eagle3.weights.items() if n != "t2d"}
    head = load(write_head(tmp_path / "no_t2d", eagle3.config, weights), target_for(eagle3.config))
    assert torch.equal(head.drafted, torch.arange(96) + d2t)


def test_a_full_draft_vocabulary_needs_no_map(eagle3, tmp_path):
    config = eagle3.config | {"draft_vocab_size": 320}
    weights = eagle3.weights | {"lm_head.weight": torch.randn(320, 64), "d2t": torch.zeros(320, dtype=torch.int64)}
    weights["t2d"] = torch.zeros(320, dtype=torch.bool)  # as published: never filled
    head = load(write_head(tmp_path, config, weights), target_for(config))
    assert head.drafted is None
    assert head.target_ids(torch.arange(320)).tolist() == list(range(320))


def test_rope_theta_can_be_overridden(eagle3, tmp_path):
    config = eagle3.config
    written = load(write_head(tmp_path / "a", config | {"rope_theta": 77.0}, eagle3.weights), target_for(config))
    folder = write_head(tmp_path / "b", config, eagle3.weights)
    assert torch.equal(
        golden_logits(eagle3, load(folder, target_for(config), rope_theta=77.0)), golden_logits(eagle3, written)
    )
    assert not torch.equal(golden_logits(eagle3, load(folder, target_for(config))), golden_logits(eagle3, written))
    for theta in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="rope theta should be a number above 0"):
            load(folder, target_for(config), rope_theta=theta)


def test_a_head_loads_in_the_targets_precision(eagle3, tmp_path):
    head = load(write_head(tmp_path, eagle3.config, eagle3.weights), target_for(eagle3.config).bfloat16())
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
    assert head.drafted.dtype == torch.int64


def test_numbers_that_float16_cannot_hold_are_refused(eagle3, tmp_path):
    weights = eagle3.weights | {"norm.weight": torch.full((64,), 1e6)}
    for form in ("safetensors", "bin"):
        folder = write_head(tmp_path / form, eagle3.config, weights, form)
        with pytest.raises(InputError, match="norm.weight has numbers that float16 cannot hold"):
            load(folder, target_for(eagle3.config).half())


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_pickle_that_would_run_code_is_refused_unopened(eagle1, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_head(tmp_path / "head", eagle1.config, eagle1.weights, "bin")
    torch.save(eagle1.weights | {"extra": RunsCode()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="holds more than tensors"):
        load(folder, target_for(eagle1.config))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(RunsCode(), protocol=2))
    with pytest.raises(InputError, match="pytorch_model.bin"):
        load(folder, target_for(eagle1.config))
    assert not (tmp_path / "ran").exists()


def test_damaged_and_odd_pickles(eagle1, tmp_path):
    folder = write_head(tmp_path, eagle1.config, eagle1.weights, "bin")
    file, target = folder / "pytorch_model.bin", golden_head(eagle1, tmp_path / "whole")[1]
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"not a pickle", whole[:4]):
        file.write_bytes(content)
        with pytest.raises(InputError, match="pytorch_model.bin"):
            load(folder, target)
    for value in ([torch.zeros(3)], {"fc.weight": 3}, torch.zeros(3)):
        torch.save(value, file)
        with pytest.raises(InputError, match="should hold names and tensors"):
            load(folder, target)
    torch.save(eagle1.weights, file, _use_new_zipfile_serialization=False)  # as torch before 1.6 wrote it
    assert_close(golden_logits(eagle1, load(folder, target)), expected_logits(eagle1), TOLERANCE)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"midlayer.self_attn.k_proj.weight": None}, "k_proj.weight is missing"),
        ({"fc.bias": torch.zeros(64)}, "fc.bias is not part"),
        ({"midlayer.mlp.up_proj.weight": torch.zeros(128, 63)}, r"up_proj.weight has shape \[128, 63\].*\[128, 64\]"),
        ({"layers.0.hidden_norm.weight": torch.zeros(64)}, "midlayer tensors and layers.0 tensors"),
        ({"norm.weight": torch.zeros(64, dtype=torch.int32)}, "norm.weight is stored as"),
    ],
)
def test_tensors_missing_or_too_many_are_named(eagle3, change, words, tmp_path):
    weights = {name: tensor for name, tensor in (eagle3.weights | change).items() if tensor is not None}
    for form in ("safetensors", "bin"):
        with pytest.raises(InputError, match=words):
            load(write_head(tmp_path / form, eagle3.config, weights, form), target_for(eagle3.config))


def test_eagle3_weights_under_an_eagle1_config_are_refused(eagle3, tmp_path):
    config = {name: value for name, value in eagle3.config.items() if name != "draft_vocab_size"}
    with pytest.raises(InputError, match="midlayer tensors make this an EAGLE-3 head"):
        load(write_head(tmp_path, config, eagle3.weights), target_for(config))


def test_a_folder_says_whether_it_holds_a_head(eagle1, eagle3, speculators, tmp_path):
    for golden in (eagle1, eagle3, speculators):
        for form in ("safetensors", "bin"):
            assert holds_head(write_head(tmp_path / golden.kind / form, golden.config, golden.weights, form))
    for family in FAMILIES:
        folder = save_checkpoint(reference_model(family), tmp_path / family)
        assert not holds_head(folder)
        assert read_config(folder).n_layers == 3
    assert not holds_head(tmp_path / "nowhere")


def test_a_folder_without_config_or_weights_is_refused(eagle3, tmp_path):
    with pytest.raises(InputError, match="has no config.json"):
        read_head_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=re.escape(str(tmp_path / "config.json"))):
        read_head_config(tmp_path)
    folder = write_head(tmp_path / "head", eagle3.config, eagle3.weights)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="has no weights"):
        load(folder, target_for(eagle3.config))
