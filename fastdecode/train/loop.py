"""The training loop: batches, gradients, steps, and a state on disk from which a killed run goes on.

Nothing is drawn from a generator that lives on: order and noise are functions of (seed, epoch, batch), so that the
state is the weights, the optimizer and three counters, and a resumed run is the run that was interrupted, to the bit
on a CPU.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastdecode.train.batches import collate, plan_epoch, split
from fastdecode.train.checkpoint import load_state, save_state
from fastdecode.train.curves import Row, curve_row, write_csv
from fastdecode.train.features import target_states
from fastdecode.train.initial import trained_parameters
from fastdecode.train.kept import KeptFeatures
from fastdecode.train.losses import StepReport, eagle1_loss, eagle3_loss
from fastdecode.train.optimizer import Optimizers
from fastdecode.train.options import TrainOptions
from fastdecode.train.parallel import Group
from fastdecode.train.tally import Score, Tally
from fastdecode.train.validate import validate
from models.eagle import DraftHead
from models.errors import InputError
from models.transformer import Transformer

if TYPE_CHECKING:
    from fastdecode.train.store import Conversation

Note = Callable[[str], None]


class Trainer:
    """One run: `head` learns from `conversations` what `target` says; `folder` holds its state and its curve.

    `kept`: the target's states, where they are kept. `ce_ids [n]` int64: the ids among which an EAGLE-1 head learns to
    tell the target's token apart; None: all. Raises InputError when there is nothing to train on.
    """

    def __init__(
        self,
        head: DraftHead,
        target: Transformer,
        conversations: "Sequence[Conversation]",
        options: TrainOptions,
        folder: Path,
        group: Group = Group(),  # noqa: B008 - frozen
        note: Note = lambda sentence: None,
        kept: KeptFeatures | None = None,
        ce_ids: Tensor | None = None,
    ):
        self.kept, self.ce_ids = kept, ce_ids
        self.head, self.target, self.conversations, self.options = head, target, conversations, options
        self.folder, self.group, self.note = folder, group, note
        self.device = target.norm.weight.device
        self.indices, held_out = split(conversations, options.max_length, options.eval_share, options.seed)
        if not self.indices:
            raise InputError(
                f"None of the {len(conversations)} conversations has an answer within {options.max_length} tokens to "
                "train on; give more --conversations or a larger --max-length."
            )
        self.held_out = plan_epoch(held_out, self._lengths(held_out), options.batch_tokens, 0, 0)
        self.epochs = [self._plan(epoch) for epoch in range(options.epochs)]
        per_step = options.accumulate * group.size
        self.n_steps = sum(-(-len(plan) // per_step) for plan in self.epochs)
        self.parameters = trained_parameters(head)
        self.optimizer = Optimizers(options.optimizer, self.parameters, options.lr)
        self.epoch = self.position = self.step = self.tokens = 0  # position: batches of this epoch that are done
        self.seconds = 0.0  # of work, over all runs that led here
        self.rows: list[Row] = []
        self.tally = Tally(options.depths, self.device)  # since the last row
        self.score: Score | None = None  # of the last validation

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(
        self, progress: Callable[["Trainer"], None] = lambda trainer: None, stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Train to the end of the epochs or of the hours, validating and saving on the way; `progress` after each step.

        Once `stop()` is true, the step is finished and saved, and the run ends early: False.
        """
        started, before = time.monotonic(), self.seconds
        saved = started
        while self.epoch < len(self.epochs):
            plan = self.epochs[self.epoch]
            while self.position < len(plan):
                self.seconds, stopped = self._agree(before + time.monotonic() - started, stop())
                if stopped or self.share() >= 1:
                    break
                self._step(plan)
                self.seconds = before + time.monotonic() - started
                progress(self)
                if self.step % self.options.log_steps == 0:
                    self._log()
                if self.step % self.options.eval_steps == 0:
                    self._validate()
                if self._agree(time.monotonic() - saved, False)[0] >= 60 * self.options.save_minutes:
                    self.save()
                    saved = time.monotonic()
            if self.position < len(plan):
                break
            self.epoch, self.position = self.epoch + 1, 0
        finished = self.epoch == len(self.epochs) or self.share() >= 1
        if finished and (not self.rows or self.rows[-1]["split"] != "validation" or self.rows[-1]["step"] != self.step):
            self._log()
            self._validate()
        self.save()
        return finished

    def share(self) -> float:
        """How much of the run is done, 0 to 1: of its steps or of its hours, whichever is further."""
        hours = self.options.hours
        return max(self.step / self.n_steps, self.seconds / (3600 * hours) if hours else 0.0)

    def lr(self) -> float:
        """The rate of the next step: a linear warm-up times a cosine."""
        warmup = min(self.options.warmup, self.n_steps // 10)
        rise = min(1.0, (self.step + 1) / (warmup + 1))
        return self.options.lr * rise * 0.5 * (1 + math.cos(math.pi * min(self.share(), 1.0)))

    def _step(self, plan: list[list[int]]) -> None:
        """One step of the optimizer: `accumulate` batches in each process (fewer at an epoch's end)."""
        lr = self.lr()
        batches = plan[self.position : self.position + self.options.accumulate * self.group.size]
        step = Tally(self.options.depths, self.device)
        for offset in range(self.group.rank, len(batches), self.group.size):
            report = self.report(batches[offset], noise_of=(self.epoch, self.position + offset))
            if report.counted[0] > 0:
                # A batch counts by its positions, so that it does not matter how a step is cut into batches.
                (report.loss * report.counted[0]).backward()
                step.add(*report)
        self._average(step)
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.options.clip)
        self.optimizer.step(lr)
        self.tally.values += step.values
        self.tokens += sum(self._lengths([i for batch in batches for i in batch]))
        self.position += len(batches)
        self.step += 1

    def _average(self, step: Tally) -> None:
        """Turn the sums of gradients of all processes into the mean over counted positions; add up `step`, too."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.group.sum(step.values)
        weight = step.values[1].clamp_min(1).float()
        gradients = [parameter.grad for parameter in self.parameters.values()]
        if self.group.size > 1:
            together = self.group.sum(torch.cat([g.flatten() for g in gradients]))
            for gradient, part in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        torch._foreach_div_(gradients, weight)

    def report(self, indices: list[int], noise_of: tuple[int, int] | None = None) -> StepReport:
        """The head's loss and counts on one batch; `noise_of` (epoch, batch) is what EAGLE-1's noise hangs on."""
        options = self.options
        batch = collate([self.conversations[i] for i in indices], options.max_length, self.device)
        if self.kept is not None:
            hidden, choices = self.kept.read(indices, batch)
        else:  # in the target's own precision, as it decodes
            hidden, choices = target_states(self.target, batch, self.head.feature_layers), None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=options.autocast):
            if options.kind == "eagle3":
                return eagle3_loss(self.head, self.target, hidden, batch, options.ttt_steps, choices=choices)
            return eagle1_loss(
                self.head,
                self.target,
                hidden,
                batch,
                noise=None if noise_of is None or not options.noise else self._noise(hidden.last, noise_of),
                ce_ids=self.ce_ids,
                n_report_steps=options.report_steps,
                choices=choices,
            )

    def _noise(self, features: Tensor, noise_of: tuple[int, int]) -> Tensor:
        epoch, position = noise_of
        seed = (self.options.seed * 1_000_003 + epoch) * 1_000_003 + position
        generator = torch.Generator().manual_seed(seed % 2**63)
        drawn = torch.rand(features.shape, generator=generator)
        return ((2 * drawn - 1) * self.options.noise).to(features)

    def _agree(self, seconds: float, stopped: bool) -> tuple[float, bool]:
        """The same clock and the same decision in every process."""
        if self.group.size == 1:
            return seconds, stopped
        values = self.group.max(torch.tensor([seconds, float(stopped)], dtype=torch.float64, device=self.device))
        return float(values[0]), bool(values[1])

    # -- what is written down -----------------------------------------------------------------------------------------

    def _log(self) -> None:
        if self.tally.values[1] > 0:
            row = curve_row("train", self.step, self.seconds, self.tokens, self.lr(), self.tally.score())
            self.rows.append(row)
            self.tally.clear()

    def _validate(self) -> None:
        self.score = validate(self.held_out, self.report, self.options.depths, self.group, self.device)
        self.rows.append(curve_row("validation", self.step, self.seconds, self.tokens, self.lr(), self.score))

    def settings(self) -> dict[str, Any]:
        """What a run that goes on from the state must have in common with this one."""
        data = {"conversations": len(self.conversations), "processes": self.group.size}
        return self.options.settings() | data

    def save(self) -> None:
        """Write state and curve. A disk that is full or fails is reported, and the last good state stays."""
        known = None if self.kept is None else self.kept.flush()
        if self.group.rank == 0:
            drafted = {} if self.head.drafted is None else {"drafted": self.head.drafted.cpu()}
            state = {
                "settings": self.settings(),
                "head": {name: p.detach() for name, p in self.parameters.items()} | drafted,
                "optimizer": self.optimizer.state_dict(),
                "at": {name: getattr(self, name) for name in ("epoch", "position", "step", "tokens", "seconds")},
                "rows": self.rows,
                "tally": self.tally.values,
                "kept": known,
                "score": None if self.score is None else asdict(self.score),
            }
            try:
                save_state(self.folder, state)
                write_csv(self.folder / "curve.csv", self.rows)
            except OSError as error:
                self.note(f"The state could not be saved ({error}); the one before it stays. Make room on the disk.")
        self.group.wait()

    def resume(self) -> bool:
        """Go on from the state in the folder; False when there is none. Raises InputError when it is another run's."""
        state = load_state(self.folder, self.settings())
        if state is None:
            return False
        stored = state["head"]
        drafted = stored.pop("drafted", None)
        mine = {name: tuple(p.shape) for name, p in self.parameters.items()}
        if mine != {name: tuple(values.shape) for name, values in stored.items()}:
            raise InputError(f"{self.folder}: holds the state of another head; give the same options, or another -o.")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(stored[name])
        if drafted is not None:
            self.head.drafted = drafted.to(self.device)
        self.optimizer.load_state_dict(state["optimizer"])
        for name, value in state["at"].items():
            setattr(self, name, value)
        self.rows = state["rows"]
        self.tally.values.copy_(state["tally"])
        if self.kept is not None and state["kept"] is not None:
            self.kept.restore(state["kept"])
        score = state["score"]
        self.score = None if score is None else Score(**{**score, "accuracy": tuple(score["accuracy"])})
        return True

    # -- data ----------------------------------------------------------------------------------------------------------

    def _lengths(self, indices: Sequence[int]) -> list[int]:
        return [min(len(self.conversations[i].token_ids), self.options.max_length) for i in indices]

    def _plan(self, epoch: int) -> list[list[int]]:
        options = self.options
        return plan_epoch(self.indices, self._lengths(self.indices), options.batch_tokens, options.seed, epoch)
