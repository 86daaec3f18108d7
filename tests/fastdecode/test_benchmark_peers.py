"""Other programs compute with our weights, and their answers are compared to the last token."""

import pytest
import torch
from tiny_checkpoint import tiny_checkpoint

from fastdecode import load
from fastdecode.benchmark_peers import TransformersPeer
from fastdecode.benchmark_rows import first_difference
from fastdecode.request import Result


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3-moe", "mixtral"])
def test_transformers_computes_with_views_of_our_weights(family, tmp_path):
    reference = tiny_checkpoint(tmp_path, family)
    model = load(str(tmp_path), dtype="float32", max_seq_len=64, compile=False).model
    peer = TransformersPeer(model, tmp_path)
    ours, theirs = model.layers[1].self_attn, peer.model.model.layers[1].self_attn
    assert theirs.q_proj.weight.data_ptr() == ours.qkv_proj.weight.data_ptr()
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(peer.model(ids).logits, reference(ids).logits)


def test_transformers_decodes_exactly_as_many_tokens_as_asked(tmp_path):
    reference = tiny_checkpoint(tmp_path)
    decoder = load(str(tmp_path), dtype="float32", max_seq_len=64, compile=False)
    peer = TransformersPeer(decoder.model, tmp_path)
    prompt = list(range(10, 20))
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, 10:].tolist()
    answer = peer.generate(prompt, 12)
    assert answer.token_ids == expected
    assert answer.ttft_s > 0 and answer.decode_tokens_per_s > 0
    assert peer.generate(prompt, 1)._replace(ttft_s=0) == (expected[:1], 0, None, 1)


def test_the_margin_is_what_the_likeliest_token_leads_by(tmp_path):
    reference = tiny_checkpoint(tmp_path)
    peer = TransformersPeer(load(str(tmp_path), dtype="float32", max_seq_len=64, compile=False).model, tmp_path)
    ids = list(range(10, 20))
    with torch.inference_mode():
        first, second = reference(torch.tensor([ids])).logits[0, -1].sort(descending=True).values[:2].tolist()
    assert peer.margin(ids) == pytest.approx(first - second, abs=1e-5)


@pytest.mark.parametrize(
    "ours, reason, theirs, expected",
    [
        ([5, 6], "length", [5, 6], None),
        ([5, 6], "length", [5, 7], 1),
        ([4, 6], "length", [5, 6], 0),
        ([5, 6], "stop", [5, 6, 2], None),
        ([5, 6], "stop", [5, 6, 9], 2),
        ([], "stop", [2], None),
        ([], "stop", [3], 0),
    ],
)
def test_answers_part_where_the_first_token_differs_stop_tokens_included(ours, reason, theirs, expected):
    assert first_difference(Result("", "", ours, reason), theirs, stop_ids=(2,)) == expected
