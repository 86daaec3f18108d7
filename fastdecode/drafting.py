"""What --draft and --tree ask for, checked before weights are read, and the drafter that comes of it."""

from dataclasses import dataclass
from pathlib import Path

from fastdecode.decoder import cache_rows_for
from fastdecode.drafters import Drafter
from fastdecode.drafters.eagle import EagleDrafter
from fastdecode.drafters.ngram import NgramDrafter
from fastdecode.drafters.root import RootOnly
from fastdecode.tree_options import TreeBuilder, chain, parse_tree
from models.checkpoint import find_checkpoint
from models.config import ModelConfig
from models.errors import InputError
from models.head_checkpoint import holds_head, load_head, read_head_config
from models.head_config import HeadConfig
from models.transformer import Transformer

DEFAULT_CHAIN = 3


@dataclass(frozen=True)
class DraftOptions:
    """`--draft`, `--tree` and `--draft-rope-theta`, as far as they can be checked without any file."""

    draft: str
    tree: TreeBuilder
    rope_theta: float | None

    @staticmethod
    def parse(draft: str, tree: str, rope_theta: str | float | None) -> "DraftOptions":
        """Raises InputError for a tree that is none, or that the named draft cannot grow."""
        builder = chain(DEFAULT_CHAIN) if tree == "auto" else parse_tree(tree)
        if draft in ("auto", "none") and tree != "auto":
            raise InputError(f"--tree {tree} needs a draft; give --draft ngram or a head's folder.")
        if draft == "ngram" and not builder.chain:
            raise InputError(f"--draft ngram takes chains only, found --tree {tree}; give chain:K.")
        if rope_theta is None:
            return DraftOptions(draft, builder, None)
        if draft in ("auto", "none", "ngram"):
            raise InputError("--draft-rope-theta is for draft heads; give the folder of one as --draft.")
        try:
            return DraftOptions(draft, builder, float(rope_theta))
        except ValueError:
            raise InputError(f"--draft-rope-theta should be a number, found {rope_theta!r}.") from None

    def plan(self, target: ModelConfig) -> "DraftPlan":
        """Find the head, if one is named, and check it against the target; reads no weights. Raises InputError."""
        if self.draft in ("auto", "none", "ngram"):
            return DraftPlan(self, None, None)
        folder = find_checkpoint(self.draft, also_wanted=["pytorch_model.bin"])  # most EAGLE-1 heads are pickles
        if not holds_head(folder):
            raise InputError(f"--draft {self.draft}: is no draft head; a small model as a draft is not built yet.")
        config = read_head_config(folder).with_rope_theta(self.rope_theta).fitted_to(target, str(folder))
        return DraftPlan(self, folder, config)


@dataclass(frozen=True)
class DraftPlan:
    """A drafter that is sure to fit its target, before either has weights."""

    options: DraftOptions
    folder: Path | None
    config: HeadConfig | None

    def build(self, target: Transformer, max_seq_len: int, batch: int) -> Drafter:
        """The drafter for `batch` texts of `max_seq_len` tokens. Raises InputError for damaged files of a head."""
        tree = self.options.tree
        if self.options.draft in ("auto", "none"):
            return RootOnly()
        if self.folder is None or self.config is None:
            return NgramDrafter(tree.n_nodes - 1)
        head = load_head(self.folder, self.config, target)
        return EagleDrafter(head, tree, batch, cache_rows_for(max_seq_len, tree.n_nodes))
