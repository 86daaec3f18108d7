"""Unrolled steps compute what the reference, a dense mask and inference through a cache compute."""

import torch
from golden_files import assert_close, golden_head, parametrize_golden

from fastdecode.train.unroll import unroll

TOLERANCE, UNROLLED_TOLERANCE = 1e-5, 1e-4  # of a tensor's largest magnitude, in fp32


def pytest_generate_tests(metafunc):
    parametrize_golden(metafunc, "speculators")


@torch.no_grad()
def test_golden_unrolled_steps(golden, tmp_path):
    head, _ = golden_head(golden, tmp_path)
    n_steps = golden.facts["steps"]
    for step, for_logits in enumerate(unroll(head, golden.next_ids, head.fuse(golden.hidden), n_steps)):
        tolerance = UNROLLED_TOLERANCE if step else TOLERANCE
        assert_close(head.logits(for_logits), golden.tensors[f"step{step}.logits"], tolerance)
    assert step == n_steps - 1
