"""Every family and rope type computes what the reference library computes."""

import json

import pytest
import torch
from tiny import FAMILIES, old_spelling, reference_model, save_checkpoint

from checkpoints.checkpoint import load_weights, read_config
from models.transformer import Transformer

TOLERANCE = 1e-4  # of the logits' scale, in fp32
ROWS = 257


def our_model(folder, max_seq_len=256):
    config = read_config(folder)
    with torch.device("meta"):
        model = Transformer(config)
    load_weights(model, folder, config, "cpu", torch.float32)
    model.set_rotary(max_seq_len)
    return model


@torch.inference_mode()
def our_logits(model, ids, chunks, bucket=256, taps=()):
    """Logits `[1, n, V]` of `ids [1, n]`, run in `chunks` that add up to n."""
    cache = model.new_cache(1, ROWS)
    cache_rows = torch.arange(bucket)
    pieces, entering, start = [], [], 0
    for size in chunks:
        positions = torch.arange(start, start + size)[None]
        mask = cache_rows <= positions[:, :, None]
        hidden = model(ids[:, start : start + size], positions, positions, mask, cache_rows[None], cache, taps)
        pieces.append(model.logits(hidden.last))
        entering.append(hidden.entering)
        start += size
    assert start == ids.shape[1]
    return torch.cat(pieces, 1), [torch.cat(layer, 1) for layer in zip(*entering, strict=True)]


def random_ids(n, seed=1):
    return torch.randint(3, 199, (1, n), generator=torch.Generator().manual_seed(seed))


def assert_close(ours, reference):
    assert (ours - reference).abs().max() <= TOLERANCE * reference.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_reference_whole_in_chunks_and_token_by_token(family, tmp_path):
    reference = reference_model(family)
    model = our_model(save_checkpoint(reference, tmp_path))
    ids = random_ids(70)
    with torch.inference_mode():
        expected = reference(ids).logits
    for chunks in ([70], [32, 20, 18], [1] * 70, [64, 1, 1, 3, 1]):
        assert_close(our_logits(model, ids, chunks)[0], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_the_reference_over_64_tokens(family, tmp_path):
    reference = reference_model(family, seed=3)
    model = our_model(save_checkpoint(reference, tmp_path))
    ids = random_ids(9)
    with torch.inference_mode():
        expected = reference.generate(ids, max_new_tokens=64, do_sample=False)
        logits = our_logits(model, expected[:, :-1], [9] + [1] * 63)[0]
    assert logits[0, 8:].argmax(-1).tolist() == expected[0, 9:].tolist()
    assert len(set(expected[0, 9:].tolist())) >= 3  # a model that says one thing would show nothing


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "mixtral", "qwen3-moe"])
def test_sharded_checkpoints_equal_single_files(family, tmp_path):
    reference = reference_model(family)
    ids = random_ids(20)
    single = our_logits(our_model(save_checkpoint(reference, tmp_path / "single")), ids, [20])[0]
    sharded = save_checkpoint(reference, tmp_path / "sharded", "50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(our_logits(our_model(sharded), ids, [20])[0], single)


@pytest.mark.parametrize("family", ["llama", "rope-linear", "rope-dynamic", "rope-llama3", "rope-yarn"])
def test_old_and_new_spellings_of_rope_are_the_same(family, tmp_path):
    reference = reference_model(family)
    ids = random_ids(20)
    save_checkpoint(reference, tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    new = our_logits(our_model(tmp_path), ids, [20])[0]
    old_spelling(tmp_path)
    assert torch.equal(our_logits(our_model(tmp_path), ids, [20])[0], new)


def test_logits_do_not_depend_on_the_bucket(tmp_path):
    model = our_model(save_checkpoint(reference_model("llama-9-heads-on-3"), tmp_path))
    ids = random_ids(60)
    small = our_logits(model, ids, [50] + [1] * 10, bucket=64)[0]
    assert_close(our_logits(model, ids, [50] + [1] * 10, bucket=256)[0], small)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_hidden_states_entering_layers_equal_the_reference(family, tmp_path):
    reference = reference_model(family)
    model = our_model(save_checkpoint(reference, tmp_path))
    ids = random_ids(24)
    with torch.inference_mode():
        states = reference(ids, output_hidden_states=True).hidden_states
    _, entering = our_logits(model, ids, [16, 8], taps=(0, 2))
    assert_close(entering[0], states[0])
    assert_close(entering[1], states[2])


def test_the_rotary_base_of_a_dynamic_rope_grows_with_the_context(tmp_path):
    model = our_model(save_checkpoint(reference_model("rope-dynamic"), tmp_path), max_seq_len=512)
    from models.rope import inverse_frequencies

    # factor 2, twice the trained length: base * (2*2 - 1) ** (d / (d - 2))
    dim = model.config.head_dim
    expected = 1 / (10000.0 * 3 ** (dim / (dim - 2))) ** (torch.arange(0, dim, 2) / dim)
    torch.testing.assert_close(inverse_frequencies(model.config.rope, dim, 512), expected)


def test_a_query_that_may_look_nowhere_gets_zero():
    from models.layers import attend

    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)
    mask = torch.zeros(1, 2, 16, dtype=torch.bool)
    mask[0, 1, :5] = True
    out = attend(q, k, v, mask)
    assert out[:, :, 0].abs().max() == 0
    expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, 1:], k[:, :, :5], v[:, :, :5], enable_gqa=True)
    torch.testing.assert_close(out[:, :, 1:], expected)
