"""The C++ compiler that torch.compile and our own operators call: whether it is there, and what it can do early."""

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


def prepare_operators() -> Thread:
    """Start building what the C++ compiler has to do before the first round, where that was not done before. Join the
    thread before a round; what it waits for need not come after the weights."""

    def build() -> None:
        native.built(attention.SOURCES)
        if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):  # elsewhere nothing uses it unasked
            native.built(a8.SOURCES)

    thread = Thread(target=build, daemon=True)
    thread.start()
    return thread
