"""JSON from files that others wrote."""

import json
from typing import Any

DEEPEST = 100  # levels; no file here means anything by more than ten


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises ValueError where it is none, and where it is nested so deep that whoever handles it, if only to show it in a
    message, would run out of stack.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [value]
    for _ in range(DEEPEST):
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [below for item in inner for below in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return value
    raise ValueError("nested too deep")
