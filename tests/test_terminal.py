"""--show-draft in a terminal, as an emulator of one shows it: colours, wide characters, narrow and resized windows."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pyte
import pytest

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "猫と犬と鳥と猫と犬と鳥と猫と犬と鳥と猫と犬と鳥と"  # lookup copies it, and its letters are two columns wide
OPTIONS = ["--raw", "--draft", "ngram", "--tree", "chain:3", "--no-compile", "--device", "cpu"]
OPTIONS += ["--max-new-tokens", "60"]

pytestmark = pytest.mark.slow


def window(terminal: int, columns: int) -> None:
    """Tell the terminal, and by a signal whoever runs in it, how wide it is now."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 60, columns, 0, 0))


def screen_of(columns: int, then: int | None = None) -> pyte.Screen:
    """What a terminal shows at the end; its width becomes `then` once the answer has begun."""
    ours, its = pty.openpty()
    window(its, columns)
    command = [sys.executable, "generate.py", PROMPT, *OPTIONS, "--show-draft"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=its, stdout=its, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    os.close(its)
    screen = pyte.Screen(columns, 60)
    stream = pyte.ByteStream(screen)
    while True:
        try:
            data = os.read(ours, 64)
        except OSError:  # Linux reports the end of a terminal as an error
            break
        if not data:
            break
        stream.feed(data)
        if then is not None:
            window(ours, then)
            screen.resize(columns=then)
            then = None
    os.close(ours)
    assert process.wait() == 0
    return screen


def letters(screen: pyte.Screen) -> str:
    """The screen's text, lines joined where the width broke them. A wide letter takes two cells, the second empty."""
    return "".join(line.rstrip(" ") for line in screen.display).replace(" ", "")


def coloured(screen: pyte.Screen) -> str:
    """The green letters of it."""
    cells = [screen.buffer[y][x] for y in range(screen.lines) for x in range(screen.columns)]
    return "".join(cell.data for cell in cells if cell.fg == "green").replace(" ", "")


@pytest.fixture(scope="module")
def piped(demo_model_path):
    done = subprocess.run([sys.executable, "generate.py", PROMPT, *OPTIONS, "--show-draft"], cwd=ROOT,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    return "".join(done.stdout.split())


@pytest.mark.parametrize("columns, then", [(20, None), (33, None), (120, None), (80, 31)])
def test_a_terminal_shows_every_letter_and_colours_what_was_drafted(piped, columns, then):
    screen = screen_of(columns, then)
    shown, green = letters(screen), coloured(screen)
    assert shown == piped and len(piped) > 20
    assert any(ord(letter) > 0x3000 for letter in piped)  # wide ones among them
    assert 0.2 * len(piped) < len(green) < len(piped)
    assert set(green) <= set(piped)
