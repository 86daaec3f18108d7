"""What `--suite gpu` measures with: networks of random weights in known shapes, drafters that cost nothing, and rounds
of one text without a tokenizer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastdecode.drafters import Drafter, cache_rows_for
from fastdecode.drafters.root import RootOnly
from fastdecode.noise import random_bits
from fastdecode.prefill import Prefill
from fastdecode.round import Round
from fastdecode.runner import Runner
from fastdecode.sampling import SamplingContext, SamplingOptions
from fastdecode.state import TextState
from fastdecode.tree import Candidates, DraftTree, Lineage, chain_of, plant
from fastdecode.tree_options import TreeBuilder
from models.config import ModelConfig
from models.layers import Embedding, Linear
from models.transformer import Transformer
from quantize.linear import QuantizedEmbedding, QuantizedLinear, round_inputs
from quantize.storage import Quantized

BITS = {"int4": 4, "int8": 8, "w4a8": 4, "w8a8": 8}
GROUP = 32  # what python -m quantize takes by default
WEIGHT_SPREAD = 0.02  # standard deviation of random weights


def llama(**changes: Any) -> dict[str, Any]:
    """A config.json of the Llama family."""
    return {"model_type": "llama", "rms_norm_eps": 1e-5, **changes}


LLAMA_2_7B = llama(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
    vocab_size=32000, max_position_embeddings=4096,
)  # fmt: skip
LLAMA_3_1_8B = llama(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
)  # fmt: skip
TINY = llama(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
    vocab_size=4096, max_position_embeddings=2048,
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How large everything is; tests make it small. `shapes`: (outputs, columns) of matrices; `models`, `tiny`:
    config.json; `text_lengths`: tokens of a text, by model; `context`: cached tokens when rounds are timed;
    `new_tokens`: of each answer that is compared; `group`: columns that share a scale, in 4 and 8 bits."""

    shapes: tuple[tuple[int, int], ...] = ((4096, 4096), (4096, 11008), (11008, 4096))
    row_counts: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    models: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {"llama-2-7b": LLAMA_2_7B, "llama-3.1-8b": LLAMA_3_1_8B}
    )
    text_lengths: Mapping[str, int] = field(default_factory=lambda: {"llama-2-7b": 4096, "llama-3.1-8b": 8192})
    tiny: Mapping[str, Any] = field(default_factory=lambda: TINY)
    context: int = 512
    rounds: int = 48
    new_tokens: int = 64
    group: int = GROUP
    compile: bool = True


def random_matrix(bits: int, group: int, n_out: int, n_columns: int, device: torch.device) -> Quantized:
    """A random matrix `[n_out, n_columns]` in 4 or 8 bits on `device`, of `WEIGHT_SPREAD`."""
    scales = (n_out, n_columns // group)
    spread = (torch.rand(scales, device=device) + 0.5) * WEIGHT_SPREAD
    if bits == 8:
        q = torch.randint(-127, 128, (n_out, n_columns), dtype=torch.int8, device=device)
        return Quantized(8, group, q, (spread / 73).half())
    q = torch.randint(0, 256, (n_out, n_columns // 2), dtype=torch.uint8, device=device)
    scale = (spread / 4.6).half()
    return Quantized(4, group, q, scale, -7.5 * scale)


@torch.inference_mode(False)
def random_network(
    config: ModelConfig, precision: str, device: torch.device, dtype: torch.dtype, group: int = GROUP
) -> Transformer:
    """A network of random weights, made matrix by matrix on `device`: `precision` bf16 (that is, floats of `dtype`),
    int8 or int4 (embedding and lm_head in 8 bits, as `python -m quantize` leaves them), or w8a8 or w4a8."""
    with torch.device("meta"):
        network = Transformer(config)
    bits = BITS.get(precision)
    for name, module in list(network.named_modules()):
        parent, _, attribute = name.rpartition(".")
        if bits is not None and isinstance(module, Linear | Embedding):
            n_out, n_columns = module.weight.shape
            in_8_bits = isinstance(module, Embedding) or name == "lm_head"
            matrix = random_matrix(8 if in_8_bits else bits, group, n_out, n_columns, device)
            if isinstance(module, Embedding):
                new: nn.Module = QuantizedEmbedding(matrix, device, dtype)
            else:
                new = QuantizedLinear(matrix, device)
            setattr(network.get_submodule(parent), attribute, new)
            continue
        for part, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=dtype, device=device)
            values = values.normal_(std=WEIGHT_SPREAD) if parameter.dim() > 1 else values.fill_(1)
            setattr(module, part, nn.Parameter(values, requires_grad=False))
    if precision.endswith("a8"):
        round_inputs(network)
    return network.eval()


class StubDrafter(RootOnly):
    """A tree of any shape whose tokens follow from the root's by arithmetic: drafting costs next to nothing."""

    def __init__(self, tree: TreeBuilder, vocab_size: int):
        super().__init__()
        self.tree, self.vocab_size = tree, vocab_size
        self.n_nodes, self.max_depth, self.chain = tree.n_nodes, tree.max_depth, tree.chain

    def draft(self, text: Any, root: Tensor, cache_rows: Tensor, context: SamplingContext | None) -> DraftTree:
        """The tree below `root [B]`; children of a node differ."""
        growth, ranks = plant(root), torch.arange(1, self.tree.top_k + 1, device=root.device)
        for _ in range(self.max_depth):
            tokens = (growth.tokens[:, :, None] * 31 + ranks) % self.vocab_size
            growth = self.tree.extend(growth, Candidates(tokens, -ranks.float().expand(tokens.shape)))
        return self.tree.finish(growth, torch.ones_like(root, dtype=torch.bool))


class KnownDrafter(RootOnly):
    """A chain of what `answer [S]` says (a whole text, prompt included), wrong at every seventh position."""

    def __init__(self, n_tokens: int, answer: Tensor, vocab_size: int):
        super().__init__()
        self.n_nodes, self.max_depth, self.vocab_size = n_tokens + 1, n_tokens, vocab_size
        self.register_buffer("answer", answer, persistent=False)

    def draft(self, text: Any, root: Tensor, cache_rows: Tensor, context: SamplingContext | None) -> DraftTree:
        """A chain below `root [B]`."""
        positions = text.length[:, None] + torch.arange(self.max_depth, device=root.device)
        known = self.answer[positions.clamp_max(self.answer.shape[0] - 1)]
        known = torch.where(positions % 7 == 0, (known + 1) % self.vocab_size, known)
        return chain_of(root, known, torch.ones_like(known, dtype=torch.bool))


class GivenAcceptance(Round):
    """A round whose drafts are right with probability `share` each, whatever the network says: a node's choice is its
    first child's token so often, by a hash of the position. The network is run as ever; its weights are random, so that
    no draft could agree with it otherwise."""

    def __init__(self, *arguments: Any, share: float):
        super().__init__(*arguments)
        self.threshold = int(share * 2**32)

    def choose(
        self, logits: Tensor, tree: DraftTree, family: Lineage, context: SamplingContext | None
    ) -> Tensor:
        """The choice at every node, `[B, N]`."""
        chosen = super().choose(logits, tree, family, context)
        n = tree.tokens.shape[1]
        nodes = torch.arange(n, device=chosen.device)
        is_child = (tree.parents[:, None] == nodes[:, None]) & (nodes > 0)  # [B, parent, child]
        first_child = torch.where(is_child, nodes, n).amin(-1)
        positions = self.state.length[:, None] + family.depth
        agrees = random_bits(torch.zeros_like(positions), positions, torch.zeros_like(positions)) < self.threshold
        drafted = tree.tokens.gather(1, first_child.clamp_max(n - 1))
        return torch.where(agrees & (first_child < n), drafted, chosen)


class TextLoop:
    """Rounds of one text of token ids, compiled and captured as the decoder's are. `share`: see GivenAcceptance; None
    for real rounds."""

    def __init__(
        self,
        network: Transformer,
        drafter: Drafter,
        max_seq_len: int,
        compile: bool,
        share: float | None = None,
        int8_cache: bool = False,
    ):
        device = network.norm.weight.device
        network.set_rotary(max_seq_len)
        rows = cache_rows_for(max_seq_len, drafter.n_nodes)
        self.max_seq_len, self.drafter = max_seq_len, drafter.to(device)
        self.cache = network.new_cache(1, rows, int8_cache)
        self.state = TextState(1, max_seq_len, rows, (), device)
        parts = (network, self.cache, self.state, self.drafter, network.config.vocab_size)
        self.runner = Runner(Round(*parts) if share is None else GivenAcceptance(*parts, share=share), compile)
        self.prefill = Prefill(network, self.cache, self.drafter)

    @torch.inference_mode()
    def start(self, ids: Sequence[int], prefill: bool = True) -> None:
        """Begin a text. Without `prefill` its cache is all zeros, which attention reads as it would anything else."""
        if prefill and len(ids) > 1:
            self.prefill.run(0, list(ids), 0)
        self.state.start(0, list(ids), self.max_seq_len, SamplingOptions(), 0)

    @torch.inference_mode()
    def decode(self, ids: Sequence[int], n_tokens: int) -> list[int]:
        """The first `n_tokens` tokens of the answer to `ids`."""
        self.start(ids)
        length = len(ids)
        while length < len(ids) + n_tokens:
            report = self.runner.step("greedy", self.runner.bucket_for(length))
            length = length if report is None else report.length[0]
        self.drain()
        return self.state.tokens[0, len(ids) : len(ids) + n_tokens].tolist()

    def drain(self) -> None:
        """Wait for the rounds in flight."""
        while self.runner.oldest() is not None:
            pass


def prompt_ids(n: int, vocab_size: int, seed: int = 0) -> list[int]:
    """`n` token ids, the same each time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (n,), generator=generator).tolist()


def copies_beyond_cache(n_bytes: int, device: torch.device) -> int:
    """How many matrices of `n_bytes` do not fit into the device's cache together, twice over; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return max(1, math.ceil(2 * torch.cuda.get_device_properties(device).L2_cache_size / n_bytes))
