"""TrainOptions: how a head is trained, in one frozen object, checked where it is built."""

from dataclasses import dataclass, fields
from typing import Any

from models.errors import InputError

KINDS = ("eagle3", "eagle1")
LAYOUTS = ("safeai", "speculators")
OPTIMIZERS = ("adamw", "muon")
CHANGEABLE = {"epochs", "hours", "layout", "save_minutes"}  # by a run that goes on where another stopped


@dataclass(frozen=True)
class TrainOptions:
    """What decides the weights that come out, and how often work is saved. Defaults are those of --help.

    Optimizer and schedule follow EAGLE-3 (arXiv 2503.01840) and SpecForge: AdamW, betas 0.9 and 0.95, gradients clipped
    to a norm of 0.5, a linear warm-up, then a cosine down to nothing.
    """

    kind: str = "eagle3"
    draft_vocab: int = 8192  # ids that an EAGLE-3 head drafts; 0: all of the target's
    ttt_steps: int = 7  # depths that an EAGLE-3 head is unrolled to while it learns
    epochs: int = 2
    hours: float | None = None
    layout: str = "safeai"
    batch_tokens: int = 4096  # padded tokens of a batch at most
    accumulate: int = 1  # batches of each process for a step of the optimizer
    max_length: int = 2048
    lr: float = 1e-4
    optimizer: str = "adamw"
    warmup: int = 100  # steps, a tenth of all at most
    clip: float = 0.5
    seed: int = 0
    autocast: bool = True
    eval_share: float = 0.02
    eval_steps: int = 500
    log_steps: int = 10
    save_minutes: float = 10.0
    report_steps: int = 5  # depths that an EAGLE-1 head is measured at
    noise: float = 0.1  # uniform noise on EAGLE-1's features, up to this in each direction
    feature_layers: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        """Raises InputError, naming the option, for a value that makes no sense."""
        if self.kind not in KINDS:
            raise InputError(f"--kind should be {' or '.join(KINDS)}, found {self.kind!r}.")
        if self.layout not in LAYOUTS:
            raise InputError(f"--layout should be {' or '.join(LAYOUTS)}, found {self.layout!r}.")
        if self.kind == "eagle1" and self.layout == "speculators":
            raise InputError("--layout speculators is for EAGLE-3 heads; give --layout safeai, or --kind eagle3.")
        if self.kind == "eagle1" and (self.fc_norm or self.norm_output or self.feature_layers is not None):
            raise InputError("--fc-norm, --norm-output and --layers are for EAGLE-3 heads; leave them out.")
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"--optimizer should be {' or '.join(OPTIMIZERS)}, found {self.optimizer!r}.")
        whole = {"ttt_steps": 1, "epochs": 1, "batch_tokens": 2, "accumulate": 1, "max_length": 3, "warmup": 0}
        whole |= {"draft_vocab": 0, "eval_steps": 1, "log_steps": 1, "report_steps": 1, "seed": 0}
        for name, low in whole.items():
            if getattr(self, name) < low:
                raise InputError(f"--{name.replace('_', '-')} should be {low} or more, found {getattr(self, name)}.")
        if self.seed > 2**62:
            raise InputError(f"--seed should be at most 2^62, found {self.seed}.")
        for name in ("lr", "clip", "save_minutes", "hours"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e6:
                raise InputError(f"--{name.replace('_', '-')} should be above 0, found {value}.")
        if not 0 < self.eval_share <= 0.5:
            raise InputError(f"--eval-share should be above 0 and at most 0.5, found {self.eval_share}.")

    @property
    def depths(self) -> int:
        """Depths that a report of a step tells apart."""
        return self.ttt_steps if self.kind == "eagle3" else self.report_steps

    def settings(self) -> dict[str, Any]:
        """What a resumed run must have in common with the run that it continues."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in CHANGEABLE}
        return values | {"feature_layers": None if self.feature_layers is None else list(self.feature_layers)}
