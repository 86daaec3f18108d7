"""Smaller batches in the same memory: when prompts run out, what is left is moved together, and fewer rows are run."""

from collections.abc import Sequence

from fastdecode.round import Round
from fastdecode.runner import Runner

STEP = 4  # sizes are powers of it, below the batch itself
# Rounds that must still be ahead before it pays to make a smaller program run: a switch moves caches, a stored program
# takes a second to load, and one that is not there takes the compiler longer than most answers are.
ROUNDS_WORTH = {"ready": 4, "stored": 100, "missing": 5000}


class BatchSizes:
    """The runners of one decoder: that of all `batch` slots, and those of its first 1, 4, 16, ... slots, made when they
    are first wanted."""

    def __init__(self, runner: Runner, batch: int):
        self.sizes = [*smaller_sizes(batch), batch]
        self.whole, self.runners = runner, {batch: runner}

    def runner(self, size: int) -> Runner:
        """The runner of the first `size` slots; `size` is one of `sizes`."""
        if size not in self.runners:
            whole = self.whole.round
            drafter = whole.drafter.first(size)
            part = Round(whole.model, whole.cache.slots(0, size), whole.state.first(size), drafter, whole.vocab_size)
            self.runners[size] = Runner(part, self.whole.compile, self.whole.program_folder)
        return self.runners[size]

    def best(self, program: str, n_texts: int, size: int, rounds_left: int) -> int:
        """The size to go on with, `size` or a smaller one, for `n_texts` texts of which the longest may go on for
        `rounds_left` rounds."""
        for smaller in self.sizes:
            if n_texts <= smaller < size and rounds_left >= ROUNDS_WORTH["ready"]:
                runner = self.runner(smaller)
                if rounds_left >= ROUNDS_WORTH[runner.readiness(program)]:
                    return smaller
        return size

    def warm_up(self, program: str) -> None:
        """Make `program` ready for every size, however long the compiler takes."""
        for size in self.sizes:
            self.runner(size).warm_up(program)

    def move(self, source: int, target: int) -> None:
        """Let slot `target` go on with the text of slot `source`, which is then stopped."""
        part = self.whole.round
        for kept in (part.cache, part.state, part.drafter):
            kept.copy_slot(source, target)
        part.state.stop(source)


def smaller_sizes(batch: int) -> Sequence[int]:
    """1, 4, 16, ... below `batch`."""
    sizes, size = [], 1
    while size < batch:
        sizes.append(size)
        size *= STEP
    return sizes
