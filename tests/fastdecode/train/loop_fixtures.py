"""A tiny random target and conversations for the training loop, and trainers on them."""

from pathlib import Path

import numpy as np
import torch

from fastdecode.train.initial import head_config, new_head
from fastdecode.train.loop import Trainer
from fastdecode.train.options import TrainOptions
from fastdecode.train.store import Conversation
from models.config import ModelConfig
from models.transformer import Transformer

VOCAB = 50


def tiny_target(seed: int = 0, n_layers: int = 4, width: int = 32) -> Transformer:
    """A Llama of random weights, in fp32."""
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": width,
        "intermediate_size": 48,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }
    torch.manual_seed(seed)
    target = Transformer(ModelConfig.from_hf(config)).eval().requires_grad_(False)
    for name, parameter in target.named_parameters():
        if "norm" not in name:
            parameter.normal_(0, 0.3)
    return target


def conversations(n: int, seed: int = 0, shortest: int = 8, longest: int = 40) -> list[Conversation]:
    """Random tokens; the answer begins after a prompt of 3 to 6 tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        length = int(rng.integers(shortest, longest + 1))
        answer = np.arange(length) >= rng.integers(3, 7)
        made.append(Conversation(rng.integers(0, VOCAB, length).astype(np.int32), answer))
    return made


def tiny_options(**changes) -> TrainOptions:
    settings = {
        "draft_vocab": 30, "ttt_steps": 3, "epochs": 2, "batch_tokens": 120, "lr": 1e-3, "warmup": 2,
        "autocast": False, "eval_share": 0.2, "eval_steps": 7, "log_steps": 2, "report_steps": 3,
    }  # fmt: skip
    return TrainOptions(**{**settings, **changes})


def tiny_trainer(folder: Path, n: int = 40, target: Transformer | None = None, **changes) -> Trainer:
    """A trainer on a new head; `changes` to the options, or `group`, `note`, `kept` for the trainer."""
    given = {name: changes.pop(name) for name in ("group", "note", "kept") if name in changes}
    target, options = target or tiny_target(), tiny_options(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    drafted = torch.arange(0, VOCAB)[: options.draft_vocab] if options.kind == "eagle3" else None
    head = new_head(head_config(target.config, options, options.draft_vocab), target, drafted, options.seed)
    return Trainer(head, target, conversations(n), options, folder, **given)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
