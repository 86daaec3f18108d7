"""What --draft and --tree ask for, checked before weights are read, and the drafter that comes of it."""

from dataclasses import dataclass, replace
from pathlib import Path

from checkpoints.checkpoint import find_checkpoint, read_config
from checkpoints.head_checkpoint import holds_head, read_head_config
from fastdecode.drafters import Drafter, cache_rows_for
from fastdecode.drafters.eagle import EagleDrafter, Noise
from fastdecode.drafters.model import ModelDrafter
from fastdecode.drafters.ngram import NgramDrafter
from fastdecode.drafters.root import RootOnly
from fastdecode.shipped_heads import find_shipped_head, shipped_heads
from fastdecode.tokenizer import Tokenizer, load_tokenizer
from fastdecode.tree_options import TreeBuilder, chain, parse_tree
from models.config import ModelConfig
from models.errors import InputError
from models.head_config import HeadConfig
from models.transformer import Transformer
from quantize import a8
from quantize.linear import round_inputs
from quantize.network import has_quantized_matrices, load_draft_head
from quantize.on_the_fly import load_as

DEFAULT_CHAIN = 3
LOOKUP = 2  # tokens that must have stood before, for a head's chain to take what followed them
MOST_LOOKED_UP = 16
HEAD_BITS = 8  # of a float head, for a target whose matrices are quantized
DEFAULT_TREE = f"chain:{DEFAULT_CHAIN}"


@dataclass(frozen=True)
class DraftOptions:
    """`--draft`, `--tree`, `--lookup` and `--draft-rope-theta`, as far as they can be checked without any file."""

    draft: str
    tree: TreeBuilder
    rope_theta: float | None
    tree_name: str = "auto"
    quantize: str = "auto"  # of a model that drafts: the target's, so that a target's own copy is the target
    lookup: int | None = None  # EagleDrafter's; None: LOOKUP

    @staticmethod
    def parse(
        draft: str, tree: str, rope_theta: str | float | None, quantize: str = "auto", lookup: int | None = None
    ) -> "DraftOptions":
        """Raises InputError for a tree that is none, or that the named draft cannot grow."""
        builder = chain(DEFAULT_CHAIN) if tree == "auto" else parse_tree(tree)
        if draft == "none" and tree != "auto":
            raise _needs_draft(f"--tree {tree}")
        if draft == "ngram" and not builder.chain:
            raise InputError(f"--draft ngram takes chains only, found --tree {tree}; give chain:K.")
        if lookup is not None:
            _check_lookup(lookup, draft, builder, tree)
        if rope_theta is None:
            return DraftOptions(draft, builder, None, tree, quantize, lookup)
        if draft in ("auto", "none", "ngram"):
            raise InputError("--draft-rope-theta is for draft heads; give the folder of one as --draft.")
        try:
            return DraftOptions(draft, builder, float(rope_theta), tree, quantize, lookup)
        except ValueError:
            raise InputError(f"--draft-rope-theta should be a number, found {rope_theta!r}.") from None

    def plan(
        self, target: ModelConfig, tokenizer: Tokenizer, folder: Path, heads: Path | None = None
    ) -> "DraftPlan":
        """Find the head or model that is named, if one is, and check it against the target; reads no matrices.

        `auto` is the head in `draft/` inside the target's own `folder` (or GGUF file's path, which has none), else the
        one in `heads` (None: those that ship) that was trained for this target, else nothing.

        Raises InputError: for a head with both numbers where they differ, for a model of another tokenizer, and for a
        tree that it cannot grow.
        """
        if self.draft == "auto" and (folder / "draft" / "config.json").is_file() and holds_head(folder / "draft"):
            own = folder / "draft"
            return DraftPlan(self, folder, own, head=read_head_config(own).fitted_to(target, str(own)))
        shipped = find_shipped_head(folder, target, heads or shipped_heads()) if self.draft == "auto" else None
        if shipped is not None:
            return DraftPlan(self, folder, shipped[0], head=shipped[1])
        if self.draft == "auto" and self.tree_name != "auto":
            raise _needs_draft(f"--tree {self.tree_name}")
        if self.draft == "auto" and self.lookup:
            raise _needs_draft(f"--lookup {self.lookup}")
        if self.draft in ("auto", "none", "ngram"):
            return DraftPlan(self, folder)
        path = find_checkpoint(self.draft, also_wanted=["pytorch_model.bin"])  # most EAGLE-1 heads are pickles
        if holds_head(path):
            config = read_head_config(path).with_rope_theta(self.rope_theta).fitted_to(target, str(path))
            return DraftPlan(self, folder, path, head=config)
        if self.lookup:
            raise InputError(f"--lookup is for draft heads, and --draft {self.draft} is a whole model.")
        if not self.tree.chain:
            raise InputError(f"--draft {self.draft}: a model takes chains only as its tree; give chain:K.")
        if self.rope_theta is not None:
            raise InputError(f"--draft-rope-theta is for draft heads, and --draft {self.draft} is a whole model.")
        model = read_config(path)
        other = load_tokenizer(path).first_difference(tokenizer)
        if other is not None:
            raise InputError(
                f"--draft {self.draft}: has another tokenizer than the model that it should draft for: "
                f"token {other} differs; give a model of the same family."
            )
        return DraftPlan(self, folder, path, model=model)


@dataclass(frozen=True)
class DraftPlan:
    """A drafter that is sure to fit its target, before either has weights. `target`: the target's checkpoint; `path`:
    the draft's own, where it has one."""

    options: DraftOptions
    target: Path
    path: Path | None = None
    head: HeadConfig | None = None
    model: ModelConfig | None = None

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted."""
        return self.head is not None or self.options.draft not in ("auto", "none")

    @property
    def lookup(self) -> int:
        """The drafter's `lookup`: chains alone take from the text."""
        asked = LOOKUP if self.options.lookup is None else self.options.lookup
        return asked if self.head is not None and self.options.tree.chain else 0

    def with_tree(self, name: str) -> "DraftPlan":
        """The same draft with the tree that `--tree` would name so; "plain" is no draft at all."""
        if name == "plain":
            return DraftPlan(replace(self.options, draft="none"), self.target)
        return replace(self, options=replace(self.options, tree=parse_tree(name), tree_name=name))

    def build(
        self, target: Transformer, max_seq_len: int, batch: int, vocab_size: int, noise: Noise = "scores"
    ) -> Drafter:
        """The drafter for `batch` texts of `max_seq_len` tokens with ids below `vocab_size`; `noise`: EagleDrafter's.
        Raises InputError for damaged files of a head or model."""
        tree = self.options.tree
        n_drafted, rows = tree.n_nodes - 1, cache_rows_for(max_seq_len, tree.n_nodes)
        if self.head is not None:
            # Beside a quantized target a float head would take much of a round.
            bits = HEAD_BITS if has_quantized_matrices(target) else None
            head = load_draft_head(self.path, self.head, target, bits)
            if bits is not None and target.norm.weight.device.type == "cpu" and a8.fast():
                round_inputs(head, target)  # drafts may be a little off; what is chosen is the target's
            return EagleDrafter(head, tree, batch, rows, noise, self.lookup)
        if self.model is not None:
            weight = target.norm.weight
            model = load_as(self.path, self.model, weight.device, weight.dtype, self.options.quantize)
            return ModelDrafter(model, n_drafted, batch, rows, vocab_size)
        return NgramDrafter(n_drafted) if self.options.draft == "ngram" else RootOnly()


def _check_lookup(lookup: int, draft: str, builder: TreeBuilder, tree: str) -> None:
    if isinstance(lookup, bool) or not isinstance(lookup, int) or not 0 <= lookup <= MOST_LOOKED_UP:
        raise InputError(f"--lookup should be a whole number from 0 to {MOST_LOOKED_UP}, found {lookup!r}.")
    if lookup and draft in ("none", "ngram"):
        raise InputError(f"--lookup is for draft heads, found --draft {draft}.")
    if lookup and not builder.chain:
        raise InputError(f"--lookup takes chains only, found --tree {tree}; give chain:K, or --lookup 0.")


def _needs_draft(what: str) -> InputError:
    return InputError(f"{what} needs a draft; give --draft ngram, or the folder of a head or model.")
