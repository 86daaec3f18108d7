"""The state of a training run on disk: one file, which appears whole or not at all."""

import contextlib
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from models.errors import InputError

VERSION = 2
STATE = "state.pt"


def write_atomically(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Let `write` fill a file beside `path`, and put it there once it is on disk.

    Whatever happens, `path` is the old file or the new one. Raises OSError when the disk is full or fails; nothing of
    the attempt stays then.
    """
    draft = path.with_name(path.name + ".tmp")
    try:
        with open(draft, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        if isinstance(error, RuntimeError):  # what torch.save makes of a write that failed
            raise OSError(f"{path} could not be written ({error})") from error
        raise
    with contextlib.suppress(OSError):  # a folder that cannot be opened (Windows) is synced by its system
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `state` (tensors, numbers, text, lists and dicts of them) to `folder`. Raises OSError; see above."""
    write_atomically(folder / STATE, lambda file: torch.save({"version": VERSION, **state}, file))


def load_state(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state in `folder`, on the CPU; None when there is none.

    Raises InputError when the file is damaged, of another version, or of a run with other `settings`, which it names.
    """
    path = folder / STATE
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        found, version = state["settings"], state["version"]
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read as the state of a training run ({type(error).__name__}); give another -o."
        ) from error
    if version != VERSION:
        raise InputError(f"{path}: is of version {version}, expected {VERSION}; give another -o.")
    different = sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name))
    if different:
        told = ", ".join(f"{name.replace('_', '-')} {found.get(name)}, now {settings.get(name)}" for name in different)
        raise InputError(f"{path}: was made with other settings: {told}; give the same ones, or another -o.")
    return state
