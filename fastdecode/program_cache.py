"""Compiled rounds on disk, so that a second start neither traces nor compiles.

torch keeps compiled kernels between processes but traces Python anew each time, which takes longer than everything
else at a warm start. `aot_compile` stores the traced program too. Its guards are left out: what they would check is
in the key instead, so that a stored program is used only for the same code, tensors, torch, CPU and thread count.
Files are pickles in the user's own compile cache, as torch's are; nothing is ever loaded from elsewhere.
"""

import hashlib
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch._functorch.config
from torch import nn

Program = Callable[..., torch.Tensor]


def program_key(module: nn.Module, name: str, example: torch.Tensor) -> str:
    """A name for `module`'s program `name`: a SHA-256 over everything that the compiled code depends on."""
    digest = hashlib.sha256()
    add = lambda *parts: digest.update(repr(parts).encode())  # noqa: E731
    add(torch.__version__, platform.python_version(), platform.machine(), torch.backends.cpu.get_cpu_capability())
    add(_cpu_flags(), os.environ.get("CXX"), torch.get_num_threads(), name, tuple(example.shape[1:]), example.dtype)
    for tensor_name, tensor in (*module.named_parameters(), *module.named_buffers()):
        add(tensor_name, tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))
    for part in module.modules():
        add(type(part).__qualname__, part.extra_repr())
        for attribute, value in sorted(vars(part).items()):
            add(attribute, repr(value) if _plain(value) else type(value).__qualname__)
    root = Path(__file__).parents[1]
    for package in ("operators", "models", "checkpoints", "quantize", "fastdecode"):
        for file in sorted(p for p in (root / package).rglob("*") if p.suffix in (".py", ".cpp", ".h")):
            add(str(file.relative_to(root)), hashlib.sha256(file.read_bytes()).hexdigest())
    return f"{name}-{digest.hexdigest()[:32]}"


def stored_programs() -> Path:
    """The folder of stored programs, inside torch's compile cache (TORCHINDUCTOR_CACHE_DIR), which they belong to."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "fastdecode"


def _cpu_flags() -> str:
    """What this CPU can do, in its own words: kernels are compiled for exactly that."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()


def _plain(value: object) -> bool:
    """Whether a module's attribute is a value that tracing may have burnt in, and whose repr says all about it."""
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return isinstance(value, bool | int | float | str | type(None)) or hasattr(value, "__dataclass_fields__")


def compile_or_load(method: Program, example: torch.Tensor, folder: Path) -> Program:
    """The compiled form of `method`, a bound method of a module that takes one tensor: from `folder` if it is there,
    else compiled now and stored there.

    A file that cannot be used (damaged, from elsewhere) is replaced. The folder may be shared by several processes.
    """
    module = method.__self__
    file = stored_file(method, example, folder)
    program = _load(file)
    if program is None:
        # Shapes are those of the example, always; to check them again takes a fifth of a small model's round.
        options = {"guard_filter_fn": _no_guards, "size_asserts": False, "alignment_asserts": False}
        compiled = torch.compile(method, fullgraph=True, dynamic=False, options=options)
        # Operators of our own take any strides; held to exact ones, each call copies what a kernel has just made.
        with torch._functorch.config.patch(custom_op_default_layout_constraint="flexible_layout"):
            program = compiled.aot_compile(((example,), {}))
        _store(program, file)
    return lambda argument: program(module, argument)


def stored_file(method: Program, example: torch.Tensor, folder: Path) -> Path:
    """Where in `folder` the compiled form of `method` is, or would be."""
    return folder / program_key(method.__self__, method.__name__, example)


def available() -> bool:
    """Whether this torch can store compiled programs."""
    has_loader = hasattr(torch.compiler, "load_compiled_function")
    return has_loader and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def _no_guards(guards: list) -> list[bool]:
    return [False] * len(guards)


def _load(file: Path) -> Program | None:
    try:
        with open(file, "rb") as stored:
            return torch.compiler.load_compiled_function(stored)
    except FileNotFoundError:
        return None
    except Exception:  # a damaged pickle can raise anything; the program is compiled again
        return None


def _store(program: Program, file: Path) -> None:
    """Write whole or not at all; a cache that cannot be written is only a slower next start."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            draft = os.path.join(scratch, file.name)
            program.save_compiled_function(draft)
            os.replace(draft, file)
    except Exception:  # a full disk, or something in the program that cannot be pickled
        pass
