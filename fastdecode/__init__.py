"""How tokens come out: drafting, verifying, sampling, streaming.

    from fastdecode import load
    decoder = load("smollm2-135m")
"""

from typing import Any

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """`load` is imported on first use, so that a command line can answer --help without importing torch."""
    if name == "load":
        from fastdecode.loading import load

        return load
    raise AttributeError(f"module 'fastdecode' has no attribute {name!r}")
