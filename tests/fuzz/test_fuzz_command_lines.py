"""Whole command lines on damaged files: exit code 2 and one sentence on stderr, nothing on stdout, no traceback."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

from tiny_checkpoint import tiny_checkpoint

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def damaged_folders(whole: Path, folder: Path, count: int) -> list[Path]:
    """Copies of a checkpoint, each with one file cut, emptied, or with other bytes where that must be noticed."""
    rng = random.Random(0)
    found = []
    for i in range(count):
        copy = shutil.copytree(whole, folder / str(i))
        file = copy / ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")[i % 4]
        raw = bytearray(file.read_bytes())
        kind = i // 4 % 3
        if kind == 0:
            raw = raw[: rng.randrange(len(raw) - 1)]
        elif kind == 1:
            raw[rng.randrange(8) :][:4] = b"\xff\xfe\x00["
            raw[:3] = b"\xff[{"
        else:
            raw = bytearray(b"[" * 5000)
        file.write_bytes(raw)
        found.append(copy)
    return found


def test_fifty_command_lines_on_damaged_files(tmp_path):
    tiny_checkpoint(tmp_path / "whole")
    folders = damaged_folders(tmp_path / "whole", tmp_path / "damaged", 12)
    jobs = []
    for folder in folders:
        model, out = str(folder), str(tmp_path / "out" / folder.name)
        jobs.append(["generate", ["hi", "--model", model, "--no-compile", "--max-new-tokens", "2"]])
        jobs.append(["fastdecode.benchmark", ["--no-startup", "--no-compile", "--model", model]])
        jobs.append(["quantize", [model, "-o", out]])
        jobs.append(["fastdecode.train", ["--target", model, "-o", out, "--conversations", "2", "--data", "/dev/null"]])
    text = tmp_path / "text"
    text.write_bytes(b'{"turns": 1}\n\xff')
    good = str(tmp_path / "whole")
    jobs.append(["generate", ["--model", good, "--prompts", str(text)]])
    jobs.append(["generate", ["--model", good, "hi", "--draft", "ngram", "--tree", f"static:{text}"]])
    jobs.append(["generate", ["--model", good, "hi", "--no-compile", "--chat-template", "{{ 9 ** (9 ** 9) }}"]])
    jobs.append(["generate", ["--model", good, "hi", "--top-p=--"]])
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "zygote.py"), str(tmp_path / "jobs.json")]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    results = json.loads(ran.stdout)
    assert len(results) >= 50
    for (module, arguments), (code, out, err) in zip(jobs, results, strict=True):
        lines = err.strip().splitlines()
        where = f"{module} {arguments}: {code} {err}"
        assert code == 2 and out == "", where
        assert "Traceback" not in err and lines[-1].startswith("error: "), where
        assert sum(line.startswith("error: ") for line in lines) == 1, where
    assert not any((tmp_path / "out").rglob("*.safetensors"))
