"""Random EAGLE-3 heads of every variant, and states for them."""

from dataclasses import replace

import torch
from torch import nn

from fastdecode.train.unroll import unroll
from models.config import ModelConfig
from models.eagle import Eagle3Head
from models.head_config import HeadConfig
from models.transformer import Hidden


def random_eagle3(n_layers=1, qk_norm=False, width=24, vocab_size=40, n_drafted=24, **flags) -> Eagle3Head:
    """A head with 6 query heads on 2, all weights random."""
    layer = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": width,
            "intermediate_size": 32,
            "num_hidden_layers": n_layers,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
        }
    )
    torch.manual_seed(0)
    head = Eagle3Head(
        HeadConfig("eagle3", replace(layer, qk_norm=qk_norm), n_drafted, width, False, (0, 1, 2), **flags)
    )
    for name, parameter in head.named_parameters():
        nn.init.uniform_(parameter, 0.5, 1.5) if "norm" in name else nn.init.normal_(parameter, 0, 0.3)
    head.drafted = torch.randperm(vocab_size)[:n_drafted].sort().values
    return head


def random_hidden(batch, length, width=24, seed=1) -> Hidden:
    numbers = torch.Generator().manual_seed(seed)
    states = [torch.randn(batch, length, width, generator=numbers) for _ in range(4)]
    return Hidden(states[0], tuple(states[1:]))


def all_rows(head, next_ids, features, n_steps) -> list[torch.Tensor]:
    """The states of every row at each step, `[B, T, h]`."""
    steps = unroll(head, next_ids, features, n_steps, torch.arange(next_ids.numel()))
    return [for_logits.view(*next_ids.shape, -1) for for_logits in steps]
