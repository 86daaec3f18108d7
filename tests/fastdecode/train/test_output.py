"""A written head is, in every public layout, the same head to its last bit, and what other programs expect to find."""

import json
import os
from dataclasses import replace

import eagle_fixtures
import pytest
import torch
from golden_files import load, teacher_forced
from safetensors.torch import load_file

from fastdecode.train.output import write_head
from models.config import ModelConfig, RopeConfig
from models.eagle import Eagle3Head, TiedHead
from models.errors import InputError
from models.transformer import Hidden, Transformer

VOCAB, WIDTH, DRAFTED = 90, 32, 40
FLAGS = [
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"fc_norm": True, "norm_before_residual": True},
]


def target(width=WIDTH, **changes):
    sizes = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": width, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    torch.manual_seed(9)
    return Transformer(ModelConfig.from_hf(sizes | changes)).requires_grad_(False).eval()


def head_of(kind, network, layer=None, **flags):
    """A random head whose weights bf16 holds, norms included; what is the target's is the target's."""
    head = eagle_fixtures.random_head(kind, VOCAB, WIDTH, DRAFTED)
    changed = replace(head.config.layer, **(layer or {}))
    if kind == "eagle3":
        flags = {"feature_layers": (2, 3, 5), **flags}
        drafted, head = head.drafted, Eagle3Head(replace(head.config, layer=changed, **flags))
        head.drafted = drafted if head.config.draft_vocab_size == DRAFTED else None
    torch.manual_seed(4)
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(False)
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, 0.3)
        parameter.copy_(parameter.bfloat16())
    if head.config.target_hidden_size == WIDTH:
        head.embed_tokens = network.embed_tokens
    if kind == "eagle1":
        tied = network.config.tie_word_embeddings
        head.lm_head = TiedHead(network.embed_tokens) if tied else network.lm_head
    return head


def logits(head):
    """Two steps: what the first feeds back is the second's feature."""
    torch.manual_seed(1)
    states = [torch.randn(1, 5, head.config.target_hidden_size) for _ in range(4)]
    hidden = Hidden(states[0], tuple(states[1 : 1 + len(head.feature_layers)]))
    ids = torch.tensor([[3, 80, 7, 11, 2]])
    with torch.inference_mode():
        fed_back, first = teacher_forced(head, ids, head.fuse(hidden))[:2]
        return torch.stack((first, teacher_forced(head, ids, fed_back)[1]))


def assert_same_after_writing(head, network, folder, layout, **options):
    write_head(head, folder, layout, **options)
    again = load(folder, network)
    assert torch.equal(logits(again), logits(head)) and logits(head).std() > 0.1
    assert again.feature_layers == head.feature_layers
    assert torch.equal(again.target_ids(torch.arange(DRAFTED)), head.target_ids(torch.arange(DRAFTED)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "layout"), [("eagle1", "safeai"), ("eagle3", "safeai"), ("eagle3", "speculators")])
def test_a_written_head_comes_back_to_the_last_bit(tmp_path, kind, layout, tied):
    network = target(tie_word_embeddings=tied)
    assert_same_after_writing(head_of(kind, network), network, tmp_path / "head", layout)


@pytest.mark.parametrize("layout", ["safeai", "speculators"])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags))
def test_flags_come_back_in_both_layouts(tmp_path, layout, flags):
    network = target()
    head, plain = head_of("eagle3", network, **flags), head_of("eagle3", network)
    assert_same_after_writing(head, network, tmp_path / "head", layout)
    assert not torch.equal(logits(head), logits(plain))


def test_feeding_back_the_normed_state_is_for_speculators_alone(tmp_path):
    network = target()
    head = head_of("eagle3", network, norm_output=True)
    assert_same_after_writing(head, network, tmp_path / "head", "speculators")
    with pytest.raises(InputError, match="norm_output True"):
        write_head(head, tmp_path / "flat", "safeai")
    assert not (tmp_path / "flat").exists()


def test_layers_beyond_the_first_and_qwen3s_norms_are_for_speculators_alone(tmp_path):
    network = target()
    layer = {"n_layers": 2, "sliding_layers": (False,) * 2, "moe_layers": (False,) * 2}
    for name, changes in (("one layer", layer), ("qk_norm", {"qk_norm": True, "model_type": "qwen3"})):
        head = head_of("eagle3", network, changes)
        assert_same_after_writing(head, network, tmp_path / name, "speculators")
        with pytest.raises(InputError, match=name):
            write_head(head, tmp_path / "flat", "safeai")


def test_a_whole_vocabulary_has_no_maps(tmp_path):
    network = target()
    head = head_of("eagle3", network, draft_vocab_size=VOCAB)
    for layout in ("safeai", "speculators"):
        assert_same_after_writing(head, network, tmp_path / layout, layout)
        assert not {"d2t", "t2d"} & set(load_file(tmp_path / layout / "model.safetensors"))


def test_a_head_of_another_width_than_its_target_brings_its_embedding(tmp_path):
    network = target(width=48)
    head = head_of("eagle3", network, target_hidden_size=48)
    for layout in ("safeai", "speculators"):
        assert_same_after_writing(head, network, tmp_path / layout, layout)
        weights = load_file(tmp_path / layout / "model.safetensors")
        assert weights["embed_tokens.weight"].shape == (VOCAB, WIDTH) and weights["fc.weight"].shape == (WIDTH, 3 * 48)
        assert json.loads((tmp_path / layout / "config.json").read_text())["target_hidden_size"] == 48


def test_parts_of_its_own_are_saved_when_asked_for(tmp_path):
    network = target()
    head = eagle_fixtures.random_head("eagle1", VOCAB, WIDTH, DRAFTED)
    own = ("embed_tokens", "lm_head")
    assert_same_after_writing(head, network, tmp_path / "head", "safeai", own=own, dtype=torch.float32)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig("linear", 5e4, 2.0),
        RopeConfig("dynamic", 5e4, 2.0, 2048),
        RopeConfig("llama3", 5e4, 8.0, 64, 1.0, 3.0),
        RopeConfig("yarn", 5e4, 4.0, 64, beta_fast=16.0, beta_slow=2.0, truncate=False, attention_factor=1.25),
    ],
    ids=lambda rope: rope.kind,
)
def test_every_rope_is_written(tmp_path, rope):
    network = target()
    for layout in ("safeai", "speculators"):
        head = head_of("eagle3", network, {"rope": rope})
        assert_same_after_writing(head, network, tmp_path / layout, layout)
        assert load(tmp_path / layout, network).config.layer.rope == rope


def test_a_rope_that_no_config_can_say_is_refused(tmp_path):
    head = head_of("eagle3", target(), {"rope": RopeConfig(freq_factors=(1.0, 2.0, 1.0, 1.0))})
    with pytest.raises(InputError, match="cannot say rope"):
        write_head(head, tmp_path / "head", "safeai")


def shapes(folder):
    found = load_file(folder / "model.safetensors")
    return {name: (str(tensor.dtype).removeprefix("torch."), *tensor.shape) for name, tensor in found.items()}


# 4 heads of 8 on 2: q has 32 rows, k and v 16; the feed-forward network is 48 wide.
LAYER = {
    "self_attn.q_proj.weight": ("bfloat16", 32, 64),
    "self_attn.k_proj.weight": ("bfloat16", 16, 64),
    "self_attn.v_proj.weight": ("bfloat16", 16, 64),
    "self_attn.o_proj.weight": ("bfloat16", 32, 32),
    "mlp.gate_proj.weight": ("bfloat16", 48, 32),
    "mlp.up_proj.weight": ("bfloat16", 48, 32),
    "mlp.down_proj.weight": ("bfloat16", 32, 48),
    "hidden_norm.weight": ("bfloat16", 32),
    "input_layernorm.weight": ("bfloat16", 32),
    "post_attention_layernorm.weight": ("bfloat16", 32),
}
EAGLE3 = {
    "fc.weight": ("bfloat16", 32, 96),
    "norm.weight": ("bfloat16", 32),
    "lm_head.weight": ("bfloat16", 40, 32),
    "d2t": ("int64", 40),
    "t2d": ("bool", 90),
}


def test_an_eagle3_head_in_safeais_layout_is_what_its_readers_expect(tmp_path):
    head = head_of("eagle3", target())
    write_head(head, tmp_path / "head", "safeai", {"target_fingerprint": "abc"})
    assert shapes(tmp_path / "head") == EAGLE3 | {f"midlayer.{name}": shape for name, shape in LAYER.items()}
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    expected = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    expected |= {"vocab_size": 90, "draft_vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    expected |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    expected |= {"rope_theta": 10000.0, "target_fingerprint": "abc", "torch_dtype": "bfloat16"}
    assert {name: config[name] for name in expected} == expected
    # The head reads what enters layers 2, 3 and 5: what layers 1, 2 and 4 put out.
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}
    assert not {"norm_output", "transformer_layer_config", "bias"} & set(config)


def test_an_eagle3_head_in_speculators_layout_is_what_its_readers_expect(tmp_path):
    head = head_of("eagle3", target())
    write_head(head, tmp_path / "head", "speculators", verifier="org/model")
    assert shapes(tmp_path / "head") == EAGLE3 | {f"layers.0.{name}": shape for name, shape in LAYER.items()}
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    expected = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [2, 3, 5]}
    expected |= {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    expected |= {"draft_vocab_size": 40, "target_hidden_size": None}
    assert {name: config[name] for name in expected} == expected
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama" and layer["num_hidden_layers"] == 1 and layer["vocab_size"] == 90
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


def test_an_eagle1_head_is_what_its_readers_expect(tmp_path):
    head = head_of("eagle1", target())
    write_head(head, tmp_path / "head", "safeai")
    layer = {n: s for n, s in LAYER.items() if n not in ("hidden_norm.weight", "input_layernorm.weight")}
    layer |= {f"self_attn.{p}_proj.weight": ("bfloat16", n, 32) for p, n in (("q", 32), ("k", 16), ("v", 16))}
    fc = {"fc.weight": ("bfloat16", 32, 64), "fc.bias": ("bfloat16", 32)}
    assert shapes(tmp_path / "head") == fc | {f"layers.0.{name}": shape for name, shape in layer.items()}
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["bias"] is True and config["architectures"] == ["LlamaForCausalLM"]
    assert not {"draft_vocab_size", "target_hidden_size", "eagle_config"} & set(config)


def test_parts_are_split_where_readers_split_them(tmp_path):
    head = head_of("eagle3", target())
    write_head(head, tmp_path / "head", "safeai", dtype=torch.float32)
    found, layer = load_file(tmp_path / "head" / "model.safetensors"), head.layers[0]
    q, k, v = (found[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkv")
    assert torch.equal(torch.cat((q, k, v)), layer.self_attn.qkv_proj.weight) and q.dtype == torch.float32
    both = (found["midlayer.mlp.gate_proj.weight"], found["midlayer.mlp.up_proj.weight"])
    assert torch.equal(torch.cat(both), layer.mlp.gate_up_proj.weight)
    assert torch.equal(torch.arange(40) + found["d2t"], head.drafted)
    assert found["t2d"].nonzero()[:, 0].tolist() == head.drafted.tolist()


def test_eagle1_in_speculators_layout_and_unknown_layouts_are_refused(tmp_path):
    head = head_of("eagle1", target())
    with pytest.raises(InputError, match="no EAGLE-1 heads.*safeai"):
        write_head(head, tmp_path / "head", "speculators")
    with pytest.raises(InputError, match="safeai or speculators, found 'gguf'"):
        write_head(head, tmp_path / "head", "gguf")
    with pytest.raises(InputError, match="parent exists"):
        write_head(head, tmp_path / "no" / "head", "safeai")


class Killed(BaseException):
    """Nothing after it runs, as far as the code under test can tell."""


@pytest.mark.parametrize("layout", ["safeai", "speculators"])
@pytest.mark.parametrize("dies_at", ["save_file", "write_text", 0, 1])
def test_a_crash_leaves_a_whole_head_or_none(tmp_path, monkeypatch, layout, dies_at):
    """Over an older head in the first layout: in the same layout it is always one or the other."""
    network, folder = target(), tmp_path / "head"
    old, new = head_of("eagle3", network), head_of("eagle3", network)
    new.fc.weight.mul_(2)
    write_head(old, folder, "safeai")
    (folder / "log.txt").write_text("mine")
    moves, move = [], os.replace

    def dying(*args, **options):
        if len(moves) == dies_at or isinstance(dies_at, str):
            raise Killed
        moves.append(args)
        return move(*args, **options)

    place = f"fastdecode.train.output.{dies_at}" if isinstance(dies_at, str) else "quantize.writer.os.replace"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(place, dying)
        write_head(new, folder, layout)
    assert [file.name for file in tmp_path.iterdir()] == ["head"] and (folder / "log.txt").read_text() == "mine"
    if isinstance(dies_at, str) or layout == "safeai":
        assert torch.equal(logits(load(folder, network)), logits(new if dies_at == 1 else old))
    else:
        assert not (folder / "config.json").exists()  # an old config never stands beside new weights
    write_head(new, folder, layout)
    assert torch.equal(logits(load(folder, network)), logits(new))
