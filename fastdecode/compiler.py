"""The C++ compiler that torch.compile calls: whether it is there, and what it can do while weights are read."""

from threading import Thread

import torch

from operators import attention, native
from quantize import a8


def can_compile() -> bool:
    """Whether the C++ compiler that torch.compile would call is there (Triton's launcher needs it, too)."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except (exc.InvalidCxxCompiler, RuntimeError, OSError):
        return False


def prepare_compiler() -> Thread:
    """Import the compiler, and start what the C++ compiler has to do first: operators, and which vector instructions it
    knows. Seconds of waiting for other processes, which need not come after the weights. Join the thread before
    compiling."""
    from torch._inductor import compile_fx, cpu_vec_isa  # noqa: F401  (here, since imports in two threads collide)

    def ask() -> None:
        native.built(attention.SOURCES)
        if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):  # elsewhere nothing uses it unasked
            native.built(a8.SOURCES)
        cpu_vec_isa.pick_vec_isa()

    thread = Thread(target=ask, daemon=True)
    thread.start()
    return thread
