"""`--profile`: a trace of some rounds, for chrome://tracing or ui.perfetto.dev, and a table of where the time went."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fastdecode.decoder import Piece
from models.errors import InputError

PIECES = 16  # of text that are traced: a round each, but for rounds that complete no character
TABLE_LINES = 25


class RoundProfile:
    """Traces the rounds of the first answer, beside the first, which comes with the prompt, up to `PIECES` of them."""

    def __init__(self, file: Path):
        """Raises InputError for a file that cannot be written, before anything is loaded."""
        self.file, self.table = file, ""
        if file.is_dir() or not file.absolute().parent.is_dir():
            raise InputError(f"--profile {file}: cannot be written; give a file in a folder that exists.")

    def watch(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Hand `pieces` on, tracing what makes them; the trace is written and `table` set where it ends."""
        traced = 0
        running = None
        try:
            for piece in pieces:
                ended = piece.result is not None
                traced += running is not None
                if running is not None and (ended or traced == PIECES):
                    self._write(running)
                    running = None
                elif running is None and not traced and not ended and not self.table:
                    running = profile(activities=_activities())
                    running.start()
                yield piece
        finally:
            if running is not None:  # the reader went away
                self._write(running)

    def _write(self, running: profile) -> None:
        running.stop()
        on_cuda = torch.cuda.is_available() and ProfilerActivity.CUDA in _activities()
        order = "self_device_time_total" if on_cuda else "self_cpu_time_total"
        self.table = running.key_averages().table(sort_by=order, row_limit=TABLE_LINES, max_name_column_width=60)
        # The exporter writes to a name, and takes its format from the ending.
        handle, temporary = tempfile.mkstemp(dir=self.file.absolute().parent, prefix=".profile-", suffix=".json")
        os.close(handle)
        try:
            running.export_chrome_trace(temporary)
            os.chmod(temporary, 0o644)
            os.replace(temporary, self.file)
        except OSError as error:
            raise InputError(f"--profile {self.file}: cannot be written ({error.strerror or error}).") from error
        finally:
            with suppress(OSError):
                os.unlink(temporary)


def _activities() -> list[ProfilerActivity]:
    known = torch.profiler.supported_activities()
    return [a for a in (ProfilerActivity.CPU, ProfilerActivity.CUDA) if a in known]
