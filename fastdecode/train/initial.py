"""The head that training begins with: random beside the target's own parts, or one that exists already."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from checkpoints.head_checkpoint import load_head, read_head_config
from fastdecode.train.options import TrainOptions
from models.config import ModelConfig
from models.eagle import DraftHead, Eagle3Head, EagleHead, TiedHead
from models.errors import InputError
from models.head_config import HeadConfig
from models.layers import Linear
from models.transformer import Transformer

if TYPE_CHECKING:
    from fastdecode.train.store import Conversation

STD = 0.02  # of random matrices, as in Llama


def draft_vocabulary(
    conversations: "Iterable[Conversation]", n_drafted: int, vocab_size: int
) -> tuple[Tensor, float]:
    """The `n_drafted` ids that answers use most, int64 ascending, and the share of answer tokens that they cover.

    Ids used equally often rank by id, so that ids that are never used, lowest first, fill up what is missing.
    """
    counts = np.zeros(vocab_size, np.int64)
    for conversation in conversations:
        counts += np.bincount(conversation.token_ids[conversation.answer], minlength=vocab_size)
    best = np.sort(np.argsort(-counts, kind="stable")[:n_drafted])
    return torch.from_numpy(best), float(counts[best].sum() / max(counts.sum(), 1))


def head_config(target: ModelConfig, options: TrainOptions, n_drafted: int) -> HeadConfig:
    """A head for `target` with one Llama layer of the target's sizes. Raises InputError for layers it has not."""
    layer = replace(
        target,
        model_type="llama",
        n_layers=1,
        rope=replace(target.rope, freq_factors=()),  # what config.json cannot say
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        sliding_layers=(),
        n_experts=0,
        n_experts_per_token=0,
        moe_intermediate_size=0,
        moe_layers=(False,),
        quantization=None,
    )
    if options.kind == "eagle1":
        return HeadConfig("eagle1", layer, target.vocab_size, target.hidden_size, True, ())
    layers = options.feature_layers or default_layers(target.n_layers)
    if list(layers) != sorted(set(layers)) or not 0 < layers[0] <= layers[-1] < target.n_layers:
        raise InputError(
            f"--layers should be different, ascending layers from 1 to {target.n_layers - 1}, "
            f"found {','.join(map(str, layers))}."
        )
    return HeadConfig(
        "eagle3", layer, n_drafted, target.hidden_size, False, layers,
        fc_norm=options.fc_norm, norm_output=options.norm_output,
    )  # fmt: skip


def default_layers(n_layers: int) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high layers, by the states that enter them; fewer in a target of few layers."""
    if n_layers < 2:
        raise InputError("An EAGLE-3 head needs a target of two layers or more; give --kind eagle1.")
    return tuple(sorted({min(2, n_layers - 1), n_layers // 2, max(n_layers - 3, 1)}))


def new_head(config: HeadConfig, target: Transformer, drafted: Tensor | None, seed: int) -> DraftHead:
    """A head in fp32 beside `target`: its layer random, the target's final norm and lm_head rows as EAGLE-3's own.

    `drafted`: the target's ids of an EAGLE-3 head's vocabulary; None for all.
    """
    place = target.norm.weight.device
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        head = (Eagle3Head if config.kind == "eagle3" else EagleHead)(config)
    borrow(head, target)
    if config.kind == "eagle3":
        head.lm_head = None
    for module in head.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            values = torch.empty(parameter.shape)
            if isinstance(module, nn.RMSNorm):
                values.fill_(1.0)
            elif name == "bias":
                values.zero_()
            else:
                values.normal_(0, STD, generator=generator)
            setattr(module, name, nn.Parameter(values.to(place)))
    if config.kind == "eagle3":
        head.drafted = None if drafted is None else drafted.to(place)
        head.lm_head = own_lm_head(target, head.drafted)
        head.norm.weight = nn.Parameter(target.norm.weight.detach().float().clone())
    return trainable(head)


def warm_head(folder: Path, target: Transformer, kind: str) -> DraftHead:
    """The head in `folder`, of either layout, in fp32 and ready to train on.

    Raises InputError when it is of another kind or does not fit the target.
    """
    config = read_head_config(folder).fitted_to(target.config, str(folder))
    if config.kind != kind:
        raise InputError(f"--init {folder}: holds an {config.kind} head; give --kind {config.kind}.")
    head = load_head(folder, config, target, torch.float32)
    own = head.embed_tokens.weight
    embedding = target.embed_tokens.weight
    if own is not embedding and torch.equal(own.to(embedding.dtype), embedding):
        head.embed_tokens = target.embed_tokens
    if kind == "eagle3" and (isinstance(head.lm_head, TiedHead) or head.lm_head is getattr(target, "lm_head", None)):
        head.lm_head = own_lm_head(target, head.drafted)
    return trainable(head)


def borrow(head: DraftHead, target: Transformer) -> None:
    """Put the target's embedding, and as EAGLE-1's lm_head the target's, into `head`."""
    head.embed_tokens = target.embed_tokens
    if isinstance(head, EagleHead):
        tied = target.config.tie_word_embeddings
        head.lm_head = TiedHead(target.embed_tokens) if tied else target.lm_head


def own_lm_head(target: Transformer, drafted: Tensor | None) -> Linear:
    """An fp32 copy of the target's lm_head, or of its `drafted` rows."""
    weight = (target.embed_tokens if target.config.tie_word_embeddings else target.lm_head).weight.detach()
    rows = weight if drafted is None else weight[drafted]
    lm_head = Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    lm_head.weight = nn.Parameter(rows.float().clone())
    return lm_head


def trainable(head: DraftHead) -> DraftHead:
    """`head` with gradients wanted for what training changes: all but the embedding, and all but EAGLE-1's lm_head."""
    frozen = ("embed_tokens",) if isinstance(head, Eagle3Head) else ("embed_tokens", "lm_head")
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name.partition(".")[0] not in frozen)
    return head.train()


def trained_parameters(head: DraftHead) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: p for name, p in head.named_parameters() if p.requires_grad}


def feature_layers_from(text: str | None) -> Sequence[int] | None:
    """What `--layers` says: "2,15,27"."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--layers should be layers such as 2,15,27, found {text!r}.") from None
