"""Driving an EAGLE drafter by hand: a text, its prompt's pairs, the pairs of one round."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastdecode.drafters import Chunk
from fastdecode.drafters.eagle import EagleDrafter
from fastdecode.sampling import SamplingContext
from fastdecode.tree import DraftTree, lineage, path_to
from models.config import ModelConfig
from models.eagle import DraftHead, Eagle3Head, EagleHead
from models.head_config import HeadConfig
from models.transformer import Hidden


@dataclass
class Text:
    """What a drafter reads of a text."""

    tokens: Tensor
    length: Tensor
    done: Tensor


def random_head(kind: str, vocab_size: int, width: int, n_drafted: int, seed: int = 0) -> DraftHead:
    """An EAGLE-1 head, or an EAGLE-3 head of `n_drafted` tokens on the first three layers, of random weights."""
    layer = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": width,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
        }
    )
    torch.manual_seed(seed)
    if kind == "eagle1":
        head = EagleHead(HeadConfig("eagle1", layer, vocab_size, width, True, ()))
    else:
        head = Eagle3Head(HeadConfig("eagle3", layer, n_drafted, width, False, (0, 1, 2)))
        head.drafted = torch.randperm(vocab_size)[:n_drafted].sort().values
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(False)
        if "norm" not in name:
            parameter.normal_(0, 0.3)
    return head


def texts(ids: Tensor, columns: int) -> Text:
    """`ids [B, n]`, the first token committed."""
    tokens = torch.zeros(ids.shape[0], columns, dtype=torch.int64)
    tokens[:, : ids.shape[1]] = ids
    batch = ids.shape[0]
    return Text(tokens, torch.ones(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.bool))


def states_at(hidden: Hidden, part: slice, width: int) -> Hidden:
    """Columns `part` of the target's states, padded with noise to `width` columns."""

    def cut(states: Tensor) -> Tensor:
        found = states[:, part]
        padding = torch.full((found.shape[0], width - found.shape[1], found.shape[2]), 7.0)
        return torch.cat((found, padding), dim=1)

    return Hidden(cut(hidden.last), tuple(cut(states) for states in hidden.entering))


def prefill(drafter: EagleDrafter, text: Text, hidden: Hidden, n_tokens: int, chunk: int = 8, slot: int = 0) -> None:
    """Commit the first `n_tokens` of the text in `slot`, as a prompt in chunks does; its states are in row 0."""
    cache_rows = torch.arange(text.tokens.shape[1] - 1)
    for start in range(0, n_tokens - 1, chunk):
        n_real = min(chunk, n_tokens - 1 - start)
        n_pairs = n_real - (start + n_real == n_tokens - 1)
        states = states_at(hidden, slice(start, start + n_real), chunk)
        ids = torch.zeros(1, chunk + 1, dtype=torch.int64)
        ids[0, : n_real + 1] = text.tokens[slot, start : start + n_real + 1]
        scalars = (torch.tensor(value) for value in (start, n_real, n_pairs))
        drafter.prefill(slot, states, Chunk(ids[:, :-1], ids[:, 1:], *scalars, cache_rows))
    text.length[slot] = n_tokens


def commit(drafter: EagleDrafter, text: Text, hidden: Hidden, count: int) -> None:
    """Commit `count` more tokens of every text, whose states at the accepted nodes are the next columns of `hidden`."""
    root = int(text.length[0]) - 1
    nodes = states_at(hidden, slice(root, root + count), drafter.n_nodes)
    steps = torch.arange(drafter.max_depth + 1)
    path = torch.where(steps < count, steps, 0).expand(text.length.shape[0], -1)
    drafter.keep(text, nodes, path)
    text.length += count


def draft(
    drafter: EagleDrafter, text: Text, bucket: int | None = None, context: SamplingContext | None = None
) -> DraftTree:
    root = text.tokens.gather(1, text.length[:, None] - 1)[:, 0]
    return drafter.draft(text, root, torch.arange(bucket or text.tokens.shape[1] - 1), context)


def token_paths(tree: DraftTree, max_depth: int, b: int = 0) -> set[tuple[int, ...]]:
    """The token paths from the root to every node of one tree, valid nodes only."""
    family = lineage(tree.parents, max_depth)
    found = set()
    for node in range(tree.tokens.shape[1]):
        if tree.valid[b, node]:
            nodes = path_to(torch.full((tree.tokens.shape[0],), node), family, max_depth)[b]
            found.add(tuple(tree.tokens[b, nodes[: family.depth[b, node] + 1]].tolist()))
    return found
