"""The target's states, computed once and kept on disk: later epochs, and later runs on the same data, only read them.

On a CPU the target's forward pass costs about as much as the training of a head. Two files of fixed size are mapped
into memory: `states.bin`, the tapped states and the last one of every token side by side in bfloat16, and
`choices.bin`, the target's argmax. Space is reserved when they are made, so that a full disk is met there and not in
the middle of an epoch.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from checkpoints.json_text import parse_json
from fastdecode.train.checkpoint import write_atomically
from fastdecode.train.features import Batch, target_choices, target_states
from fastdecode.train.parallel import Group
from models.errors import InputError
from models.transformer import Hidden, Transformer

if TYPE_CHECKING:
    from fastdecode.train.store import Conversation

CHOICE_BYTES, STATE_BYTES = 4, 2
SHARE_OF_DISK = 0.5  # of what is free, where nobody says how much

Note = Callable[[str], None]


class KeptFeatures:
    """What `target` says of `conversations` (each cut at `max_length`), tapped at `tap_layers`, kept in `folder`.

    At most `gigabytes` are kept, the first conversations' (None: half of the free disk); the others' states are
    computed every time, and rounded to bfloat16 as well, so that it does not show. Files of another target, other data
    or other taps are made anew, and so are incomplete ones that `restore` does not take up.
    Raises InputError when the disk has no room.
    """

    def __init__(
        self,
        folder: Path,
        target: Transformer,
        fingerprint: str,
        conversations: "Sequence[Conversation]",
        max_length: int,
        tap_layers: Sequence[int],
        gigabytes: float | None = None,
        group: Group = Group(),  # noqa: B008 - frozen
        note: Note = lambda sentence: None,
    ):
        self.target, self.tap_layers, self.folder, self.group = target, tuple(tap_layers), folder, group
        self.width = (len(self.tap_layers) + 1) * target.config.hidden_size
        self.bytes_per_token = STATE_BYTES * self.width + CHOICE_BYTES
        self.lengths = [min(len(c.token_ids), max_length) for c in conversations]
        self.key = {
            "target": fingerprint,
            "dtype": str(target.norm.weight.dtype),
            "data": _digest(conversations, max_length),
            "layers": list(self.tap_layers),
        }
        self.starts = np.concatenate(([0], np.cumsum(self.lengths)))  # rows of the files
        self.made_anew = False
        if group.rank == 0:
            self._prepare(gigabytes, note)
        group.wait()
        stored = json.loads((folder / "key.json").read_text(encoding="utf-8"))
        self.n_kept: int = stored["conversations"]
        n_rows = int(self.starts[self.n_kept])
        self.known = torch.full((len(self.lengths),), stored["complete"], dtype=torch.bool)
        self.known[self.n_kept :] = False
        self.states = _mapped(folder / "states.bin", np.int16, (n_rows, self.width)).view(torch.bfloat16)
        self.choices = _mapped(folder / "choices.bin", np.int32, (n_rows,))

    def read(self, indices: Sequence[int], batch: Batch) -> tuple[Hidden, Tensor]:
        """The states and the choices `[B, T]` int64 of `batch`, which are conversations `indices`; computes and keeps
        those that are not known yet."""
        device, dtype = batch.token_ids.device, self.target.norm.weight.dtype
        shape = tuple(batch.token_ids.shape)
        states = torch.zeros(*shape, self.width, dtype=torch.bfloat16)
        choices = torch.zeros(shape, dtype=torch.int32)
        missing = [row for row, i in enumerate(indices) if not self.known[i]]
        if missing:
            part = Batch(*(values[missing] for values in batch))
            hidden = target_states(self.target, part, self.tap_layers)
            choices[missing] = target_choices(self.target, hidden.last).int().cpu()
            states[missing] = torch.cat((*hidden.entering, hidden.last), dim=-1).to("cpu", torch.bfloat16)
        for row, i in enumerate(indices):
            mine, n = slice(*self.starts[i : i + 2]), self.lengths[i]
            if self.known[i]:
                states[row, :n], choices[row, :n] = self.states[mine], self.choices[mine]
            elif i < self.n_kept:
                self.states[mine], self.choices[mine] = states[row, :n], choices[row, :n]
                self.known[i] = True
        *entering, last = states.to(device).to(dtype).split(self.target.config.hidden_size, dim=-1)
        return Hidden(last, tuple(entering)), choices.to(device).long()

    def flush(self) -> Tensor:
        """Bring what is known to disk; returns which conversations are, bool `[n]`, for `restore`. Raises OSError."""
        known = self.group.max(self.known.to(self.target.norm.weight.device, torch.int32)).cpu().bool()
        self.known.copy_(known)
        if self.group.rank == 0:
            for name in ("states.bin", "choices.bin"):
                with open(self.folder / name, "rb+") as file:
                    os.fsync(file.fileno())
            if bool(known[: self.n_kept].all()):
                self._write_key(True)
        return known

    def restore(self, known: Tensor) -> None:
        """Take up what an interrupted run had flushed, unless the files had to be made anew since."""
        anew = bool(self.group.max(torch.tensor(int(self.made_anew), device=self.target.norm.weight.device)))
        if not anew and len(known) == len(self.known):
            self.known.copy_(known)

    def _prepare(self, gigabytes: float | None, note: Note) -> None:
        """Make the files, unless they are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stored = _stored_key(self.folder)
        found = {name: stored.get(name) for name in self.key} == self.key and self._sizes_fit(stored)
        if found:
            self.n_kept = stored["conversations"]
        else:
            self.made_anew = True
            for name in ("key.json", "states.bin", "choices.bin"):
                (self.folder / name).unlink(missing_ok=True)
            free = shutil.disk_usage(self.folder).free
            limit = gigabytes * 1e9 if gigabytes is not None else SHARE_OF_DISK * free
            self.n_kept = int(np.searchsorted(self.starts * self.bytes_per_token, limit, side="right")) - 1
            n_rows = int(self.starts[self.n_kept])
            try:
                _reserve(self.folder / "states.bin", n_rows * self.width * STATE_BYTES)
                _reserve(self.folder / "choices.bin", n_rows * CHOICE_BYTES)
            except OSError as error:
                raise InputError(
                    f"--keep-features needs {n_rows * self.bytes_per_token / 1e9:,.1f} GB in {self.folder} "
                    f"({error.strerror or error}); make room, or give fewer GB."
                ) from error
            self._write_key(False)
        size = int(self.starts[self.n_kept]) * self.bytes_per_token / 1e9
        note(
            f"Keeping the target's states of {self.n_kept} of {len(self.lengths)} conversations: "
            f"{self.bytes_per_token:,} bytes a token, {size:,.2f} GB."
        )

    def _sizes_fit(self, stored: Mapping[str, Any]) -> bool:
        n = stored.get("conversations", -1)
        if not 0 <= n <= len(self.lengths):
            return False
        n_rows = int(self.starts[n])
        sizes = {"states.bin": n_rows * self.width * STATE_BYTES, "choices.bin": n_rows * CHOICE_BYTES}
        files = {name: self.folder / name for name in sizes}
        return all(files[name].is_file() and files[name].stat().st_size == size for name, size in sizes.items())

    def _write_key(self, complete: bool) -> None:
        text = json.dumps({**self.key, "conversations": self.n_kept, "complete": complete})
        write_atomically(self.folder / "key.json", lambda file: file.write(text.encode()))


def _stored_key(folder: Path) -> dict[str, Any]:
    try:
        stored = parse_json((folder / "key.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _digest(conversations: "Sequence[Conversation]", max_length: int) -> str:
    digest = hashlib.sha256(str((len(conversations), max_length)).encode())
    for conversation in conversations:
        digest.update(len(conversation.token_ids).to_bytes(8))
        digest.update(np.ascontiguousarray(conversation.token_ids).tobytes())
    return digest.hexdigest()


def _reserve(path: Path, size: int) -> None:
    """A file of `size` zero bytes whose room on the disk is sure. Raises OSError."""
    with open(path, "wb") as file:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(size)


def _mapped(path: Path, dtype: type, shape: tuple[int, ...]) -> Tensor:
    """A file as a tensor; writing to it writes to the file."""
    if 0 in shape:
        return torch.from_numpy(np.zeros(shape, dtype))
    return torch.from_numpy(np.memmap(path, dtype, "r+", shape=shape))
