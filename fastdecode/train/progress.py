"""Progress bars on stderr: of the data that is made, and of training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from fastdecode.train.loop import Trainer


def _bar(*columns: ProgressColumn) -> Progress:
    return Progress(*columns, BarColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)


@contextmanager
def data_bar(wanted: int | None, done: int) -> Iterator[Callable[[int, int], None]]:
    """Counts conversations; gives the function that adds some, with their tokens."""
    with _bar(TextColumn("{task.completed} conversations, {task.fields[tokens]:,} answer tokens")) as bar:
        task = bar.add_task("", total=wanted, completed=done, tokens=0)

        def advance(n_conversations: int, n_tokens: int) -> None:
            bar.update(task, advance=n_conversations, tokens=bar.tasks[0].fields["tokens"] + n_tokens)

        yield advance


@contextmanager
def training_bar(trainer: "Trainer", quiet: bool = False) -> Iterator[Callable[["Trainer"], None]]:
    """Step, loss, accuracy of the first guess, tokens a second, time left; gives the function to call after a step."""
    text = TextColumn(
        "step {task.fields[step]}/{task.fields[steps]}  loss {task.fields[loss]:.3f}  "
        "first guess {task.fields[accuracy]:.1%}  {task.fields[rate]:,.0f} tokens/s"
    )
    tokens, seconds = trainer.tokens, trainer.seconds
    with _bar(text) as bar:
        fields = {"step": trainer.step, "steps": trainer.n_steps, "loss": 0.0, "accuracy": 0.0, "rate": 0.0}
        task = bar.add_task("", total=1.0, completed=trainer.share(), visible=not quiet, **fields)

        def progress(now: "Trainer") -> None:
            score = now.tally.score()
            rate = (now.tokens - tokens) / max(now.seconds - seconds, 1e-9)
            bar.update(
                task, completed=now.share(), step=now.step, loss=score.loss, accuracy=score.accuracy[0], rate=rate
            )

        yield progress
