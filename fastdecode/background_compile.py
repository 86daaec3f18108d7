"""A first answer that need not wait for the compiler: another process compiles its round, for the answers after it.

Only where a round's results are the same bits, compiled or not: greedy ones on packed weights, whose every sum is
computed by operators of our own. A program is never exchanged inside an answer. The process takes idle time
alone, ends by itself, and goes on when this one ends, so that the next start finds what it made.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fastdecode.decoder import Decoder
from fastdecode.memory import free_bytes
from fastdecode.sampling import SamplingOptions
from models.transformer import Transformer
from quantize.linear import Norm

LOWEST_PRIORITY = 19
SHARE_OF_MEMORY = 0.5  # of what is free, that the other process's copy of the weights may take


class BackgroundCompiler:
    """The process that compiles `program` of `decoder`, which was built by `load` with these `arguments`."""

    def __init__(self, decoder: Decoder, program: str, arguments: dict[str, Any]):
        import torch

        self.decoder, self.program = decoder, program
        lock = decoder.runner.stored_file(program).with_suffix(".lock")
        task = {"arguments": arguments, "program": program, "lock": str(lock), "threads": torch.get_num_threads()}
        package_path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fastdecode.background_compile", json.dumps(task)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": package_path},
            process_group=0,  # Ctrl-C is for the answer; a session of its own would get half of the processor's time
        )

    def postpones(self, program: str) -> bool:
        """Whether `program` is to run as it is, for now: its compiled form is not there, and comes or cannot come."""
        if program != self.program:
            return False
        return self.process.poll() is None or self.decoder.runner.readiness(program) == "missing"

    def wait(self) -> bool:
        """Wait for the end; whether the compiled program is there."""
        self.process.wait()
        return not self.postpones(self.program)


def compile_in_background(
    decoder: Decoder, options: SamplingOptions, arguments: dict[str, Any]
) -> BackgroundCompiler | None:
    """Start compiling what `decoder` needs for `options` in another process, and let `decoder` run uncompiled rounds
    until an answer finds it done. None, and nothing is changed, where it is compiled already, or is to be compiled
    first: rounds would say something else, nothing is stored, or memory is short."""
    program, runner = decoder.program_for(options), decoder.runner
    weights = sum(parameter.numel() * parameter.itemsize for parameter in decoder.model.parameters())
    if os.name != "posix" or runner.readiness(program) != "missing" or runner.program_folder is None:
        return None
    if program != "greedy" or not same_bits(decoder.model):
        return None
    if weights > SHARE_OF_MEMORY * free_bytes(decoder.model.norm.weight.device):
        return None
    compiler = BackgroundCompiler(decoder, program, arguments)
    decoder.postpones = compiler.postpones
    return compiler


def same_bits(model: Transformer) -> bool:
    """Whether few rows through `model` have the same bits, compiled or not."""
    return isinstance(model.norm, Norm) and all(layer.by_operators for layer in model.layers)


def main() -> None:
    """Compile and store one program, unless another process is at it."""
    import fcntl

    os.nice(LOWEST_PRIORITY)
    if hasattr(os, "SCHED_IDLE"):  # rounds wait for their slowest thread, so that a nice process would slow them, too
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    task = json.loads(sys.argv[1])
    lock = Path(task["lock"])
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        import torch

        from fastdecode.loading import load

        torch.set_num_threads(task["threads"])
        load(**task["arguments"]).runner.warm_up(task["program"])
        lock.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
