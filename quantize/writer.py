"""Writing a checkpoint: tensors streamed into safetensors files, and a folder that appears whole or not at all.

A safetensors file is 8 bytes of length, a JSON header with every tensor's offsets, and the data. Sizes are known from
shapes before there is any data, up to scales (F16 or F32, as their values need): room is kept for the longest header,
the data are written one tensor after another, and the header last, padded with spaces as the format allows.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.download import folder_lock
from models.errors import InputError
from quantize.files import FORMAT, VERSION, is_ours
from quantize.storage import Quantized

SHARD_BYTES = 2_000_000_000  # about the size of a shard
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: a plain one of `dtype`, or a matrix `shape` `(out, in)` of `bits` (then `dtype` None)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    bits: int | None = None
    group_size: int = 0

    def largest(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The tensors in the file, by name, when they take the most bytes."""
        if self.bits is None:
            return {self.name: (self.dtype, self.shape)}
        out, n_columns = self.shape
        groups = (torch.float32, (out, n_columns // self.group_size))
        if self.bits == 8:
            return {self.name: (torch.int8, self.shape), f"{self.name}_scale": groups}
        q = (torch.uint8, (out, n_columns // 2))
        return {self.name: q, f"{self.name}_scale": groups, f"{self.name}_min": groups}


class Shard:
    """One safetensors file while it is written. `names`: what has been written, in order."""

    def __init__(self, path: Path, entries: Sequence[Entry]):
        self.path, self.entries, self.n_bytes = path, entries, 0
        described = {
            e.name: {"bits": e.bits, "group_size": e.group_size, "shape": list(e.shape)} for e in entries if e.bits
        }
        description = json.dumps({"version": VERSION, "tensors": described})
        self.header: dict[str, Any] = {"__metadata__": {"format": "pt", FORMAT: description}}
        longest, offset = dict(self.header), 0
        for entry in entries:
            for name, (dtype, shape) in entry.largest().items():
                end = offset + dtype.itemsize * torch.Size(shape).numel()
                longest[name] = _header_entry(dtype, shape, offset, end)
                offset = end
        self.room = -(-len(json.dumps(longest).encode()) // 8) * 8
        self.file = open(path, "xb")  # noqa: SIM115 - it stays open from tensor to tensor
        self.file.seek(8 + self.room)

    def write(self, name: str, value: Tensor) -> None:
        """Append one tensor."""
        value = value.detach().cpu().contiguous()
        data = value.reshape(-1).view(torch.uint8).numpy()
        self.file.write(memoryview(data))
        self.header[name] = _header_entry(value.dtype, value.shape, self.n_bytes, self.n_bytes + data.nbytes)
        self.n_bytes += data.nbytes

    def finish(self) -> None:
        header = json.dumps(self.header).encode().ljust(self.room)
        self.file.seek(0)
        self.file.write(len(header).to_bytes(8, "little") + header)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


class CheckpointWriter:
    """Writes planned tensors, in the planned order, into `model.safetensors` of `folder`, or shards and their index.

    Use it in a `with` statement: the last file is finished at its end, unless an exception ends it.
    """

    def __init__(self, folder: Path, entries: Sequence[Entry], shard_bytes: int = SHARD_BYTES):
        self.folder = folder
        self.groups = _grouped(entries, shard_bytes)
        self.waiting = [(i, entry) for i, group in enumerate(self.groups) for entry in group]
        self.shard: Shard | None = None
        self.at = -1
        self.weight_map: dict[str, str] = {}
        self.n_bytes = 0

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        if kind is not None:
            if self.shard is not None:
                with contextlib.suppress(OSError):  # a full disk complains once more
                    self.shard.file.close()
            return
        if self.waiting:
            raise ValueError(f"{self.waiting[0][1].name} was planned and has not been written")
        self._finish_shard()
        if len(self.groups) > 1:
            index = {"metadata": {"total_size": self.n_bytes}, "weight_map": self.weight_map}
            write_text(self.folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")

    def add(self, name: str, value: Tensor | Quantized) -> None:
        """Write the next planned tensor; ValueError if `name` is not it."""
        at, entry = self.waiting.pop(0)
        if entry.name != name or tuple(value.shape) != entry.shape:
            raise ValueError(f"{entry.name} {entry.shape} was planned, not {name} {tuple(value.shape)}")
        if at != self.at:
            self._finish_shard()
            self.at, self.shard = at, Shard(self.folder / self._file_name(at), self.groups[at])
        parts = {name: value}
        if isinstance(value, Quantized):
            parts = {name: value.q, f"{name}_scale": value.scale, f"{name}_min": value.minimum}
        for part, tensor in parts.items():
            if tensor is not None:
                self.shard.write(part, tensor)
                self.weight_map[part] = self.shard.path.name

    def _finish_shard(self) -> None:
        if self.shard is not None:
            self.shard.finish()
            self.n_bytes += self.shard.n_bytes

    def _file_name(self, at: int) -> str:
        n = len(self.groups)
        return "model.safetensors" if n == 1 else f"model-{at + 1:05}-of-{n:05}.safetensors"


def write_text(file: Path, text: str | bytes) -> None:
    """Write a small file and see it onto the disk."""
    with open(file, "wb") as opened:
        opened.write(text if isinstance(text, bytes) else text.encode())
        opened.flush()
        os.fsync(opened.fileno())


def check_out(out: Path) -> None:
    """Raise InputError unless `out` can be a new checkpoint: absent, empty, or one that was written here before."""
    if not out.parent.is_dir():
        raise InputError(f"-o {out}: there is no folder {out.parent}; give a folder whose parent exists.")
    if not os.access(out.parent, os.W_OK):
        raise InputError(f"-o {out}: {out.parent} cannot be written to; give another folder.")
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise InputError(f"-o {out}: is a file; give the name of a folder.")
    if any(out.iterdir()) and not is_ours(out):
        raise InputError(
            f"-o {out}: holds files that this script did not write; give a new or empty folder, or one that it wrote."
        )


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into; takes `out`'s place when all is well, and goes when it is not.

    However the process ends, `out` is what it was or the new folder, whole; where it is killed, the next run removes
    what it left. (Between the two renames that replace an older checkpoint there is no `out` for a moment; killed just
    then, the next run puts the old one back.) Raises InputError where `check_out` does, and when writing fails.
    """
    out = out.resolve()
    check_out(out)
    with _part_folder(out) as part:
        yield part
        check_out(out)
        _replace(part, out)


@contextlib.contextmanager
def new_files(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write a config.json and weights into; its files go into `out`, made if it is not there,
    when all is well. Other files in `out` stay.

    However the process ends, a config.json in `out` never stands beside files that do not belong to it: an older and
    different one goes before the first file moves, and the new one moves last. Raises InputError when writing fails.
    """
    out = out.resolve()
    if not out.parent.is_dir() or (out.exists() and not out.is_dir()):
        raise InputError(f"-o {out}: give the name of a folder whose parent exists.")
    with _part_folder(out) as part:
        yield part
        files = sorted(part.iterdir(), key=lambda file: (file.name == "config.json", file.name))
        for file in files:
            with open(file, "rb+") as opened:
                os.fsync(opened.fileno())
        out.mkdir(exist_ok=True)
        old, new = out / "config.json", part / "config.json"
        if old.exists() and old.read_bytes() != new.read_bytes():
            old.unlink()
        for file in files:
            os.replace(file, out / file.name)


@contextlib.contextmanager
def _part_folder(out: Path) -> Iterator[Path]:
    """A locked folder beside `out`, gone at the end unless it was renamed; what killed runs left is removed first.

    Raises InputError where it, or what is done in it, fails for the file system's reasons.
    """
    try:
        with folder_lock(out.parent, wait=True):
            _sweep(out)
            part = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.", suffix=".part"))
            lock = contextlib.ExitStack()
            lock.enter_context(folder_lock(part, wait=False))  # tells other runs that this folder is in use
        try:
            with lock:
                os.chmod(part, 0o755)  # mkdtemp's folders are for their owner alone
                yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(f"-o {out}: cannot be written ({error.strerror or error}); {out} is as it was.") from error


def _replace(part: Path, out: Path) -> None:
    if not out.exists():
        os.rename(part, out)
        return
    old = part.with_suffix(".old")
    os.rename(out, old)
    try:
        os.rename(part, out)
    except BaseException:
        os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sweep(out: Path) -> None:
    """Remove what killed runs left beside `out`; a living run holds a lock on its folder."""
    for old in out.parent.glob(f".{_literal(out.name)}.*.old"):
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, out)
    for part in out.parent.glob(f".{_literal(out.name)}.*.part"):
        if os.name == "nt" or not part.is_dir():  # no such locks there
            continue
        with folder_lock(part, wait=False) as held:
            if held:
                shutil.rmtree(part, ignore_errors=True)


def _literal(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _grouped(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    """Entries in order, in shards of at most `shard_bytes` where no single one is larger."""
    groups, size = [[]], 0
    for entry in entries:
        n_bytes = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in entry.largest().values())
        if groups[-1] and size + n_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += n_bytes
    return groups


def _header_entry(dtype: torch.dtype, shape: Sequence[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
