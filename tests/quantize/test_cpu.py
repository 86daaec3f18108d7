"""The CPU operator: right on every instruction set, each row on its own, and there however its library was found."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fastdecode.program_cache import program_key
from operators import native
from quantize import cpu
from quantize.storage import Quantized, pack_nibbles

ROWS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64)
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (288, 50), (64, 16), (11008, 64))  # (K, N)
KINDS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]
FITTING = [(k, n, bits, group) for k, n in SHAPES for bits, group in KINDS if k % group == 0]
FITTING += [(1024, 40, bits, group) for bits, group in KINDS]
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2.5e-3}  # by norm; bf16 results are rounded to 8 bits


@pytest.fixture(scope="module", autouse=True)
def operators():
    if cpu.operators() is None:
        pytest.skip("no C++ compiler")


@pytest.fixture(params=cpu.PATHS)
def path(request):
    number = cpu.PATHS.index(request.param)
    if number >= torch.ops.fastdecode.cpu_paths():
        pytest.skip(f"this CPU lacks {request.param}")
    return number


def random_weight(n, k, bits, group, dtype=torch.float16) -> Quantized:
    scale = (torch.rand(n, k // group) * 0.02 + 0.001).to(dtype)
    if bits == 8:
        return Quantized(8, group, torch.randint(-128, 128, (n, k), dtype=torch.int8), scale)
    minimum = (-torch.rand(n, k // group) * 0.2).to(dtype)
    return Quantized(4, group, pack_nibbles(torch.randint(0, 16, (n, k), dtype=torch.uint8)), scale, minimum)


def by_path(x, packed, path):
    operator = torch.ops.fastdecode.linear_int4 if packed.bits == 4 else torch.ops.fastdecode.linear_int8
    return operator(x, packed.data, path=path)[..., : packed.out_features]


def relative_error(y, x, weight):
    exact = x.double() @ weight.dequantize().double().T
    return ((y.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("k", "n", "bits", "group"), FITTING)
def test_packing_loses_nothing(k, n, bits, group, scale_dtype):
    weight = random_weight(n, k, bits, group, scale_dtype)
    assert torch.equal(cpu.unpack(cpu.pack(weight)), weight.dequantize())


@pytest.mark.parametrize(("k", "n", "bits", "group"), FITTING)
def test_it_multiplies_and_each_row_stands_alone(k, n, bits, group, path):
    torch.manual_seed(0)
    weight = random_weight(n, k, bits, group)
    packed = cpu.pack(weight)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(max(ROWS), k).to(dtype)
        y = by_path(x, packed, path)
        assert y.dtype == dtype and y.shape == (max(ROWS), n)
        assert relative_error(y, x, weight) < ERROR[dtype]
        for rows in ROWS:
            assert torch.equal(by_path(x[:rows], packed, path), y[:rows]), rows
            assert torch.equal(by_path(x[-rows:], packed, path), y[-rows:]), rows
        order = torch.randperm(17)
        assert torch.equal(by_path(x[order], packed, path), y[order])
        x[1:] = torch.randn(max(ROWS) - 1, k).to(dtype) * 1e4
        assert torch.equal(by_path(x, packed, path)[0], y[0])


@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_scales_in_fp32_are_used_as_they_are(bits, group, path):
    weight = random_weight(48, 256, bits, group, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 256).to(dtype)
        assert relative_error(by_path(x, cpu.pack(weight), path), x, weight) < ERROR[dtype]


def test_scales_of_every_fp16_size(path):
    """Subnormal scales are fp16's smallest numbers, and neither they nor the largest may be lost."""
    weight = random_weight(32, 32, 8, 32)
    for size in (6e-8, 5e-7, 6.1e-5, 1.0, 60000.0, -0.5):
        weight.scale.fill_(size)
        x = torch.randn(2, 32)
        assert relative_error(by_path(x, cpu.pack(weight), path), x, weight) < ERROR[torch.float32]


@pytest.mark.parametrize("rows", [65, 128, 200])
def test_more_rows_than_share_one_unpacking(rows, path):
    packed = cpu.pack(random_weight(96, 128, 4, 32))
    x = torch.randn(rows, 128, dtype=torch.bfloat16)
    y = by_path(x, packed, path)
    assert torch.equal(y, torch.cat([by_path(row, packed, path) for row in x.split(1)]))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_thread_count_changes_nothing(bits, path):
    packed = cpu.pack(random_weight(960, 576, bits, 32))
    before = torch.get_num_threads()
    try:
        for x in (torch.randn(9, 576), torch.randn(9, 576, dtype=torch.bfloat16)):
            results = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                results.append(by_path(x, packed, path))
            assert all(torch.equal(results[0], y) for y in results)
    finally:
        torch.set_num_threads(before)


def test_bf16_results_are_rounded_as_torch_rounds(path):
    weight = Quantized(8, 32, torch.eye(32, dtype=torch.int8), torch.ones(32, 1, dtype=torch.float32))
    weight.scale.copy_(torch.rand(32, 1) * 3)
    x = torch.eye(32, dtype=torch.bfloat16)
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    y = by_path(x[2:], cpu.pack(weight), path)
    assert torch.equal(y, weight.dequantize().bfloat16()[2:])
    y = by_path(x, cpu.pack(weight), path)
    assert y[0].isnan().all() and y[1, 1] == float("inf")


def test_leading_dimensions_strides_and_no_rows():
    packed = cpu.pack(random_weight(50, 64, 4, 32))
    x = torch.randn(2, 64, 3).transpose(1, 2)
    y = cpu.linear(x, packed)
    assert y.shape == (2, 3, 50) and torch.equal(y[1, 2], cpu.linear(x[1, 2], packed))
    assert cpu.linear(x[:, :0], packed).shape == (2, 0, 50)


def test_the_best_path_is_the_last():
    packed, x = cpu.pack(random_weight(64, 64, 4, 32)), torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(cpu.linear(x, packed), by_path(x, packed, torch.ops.fastdecode.cpu_paths() - 1))


def test_what_does_not_fit_is_refused():
    packed = cpu.pack(random_weight(64, 64, 4, 32))
    for x in (torch.randn(1, 96), torch.randn(1, 128), torch.randn(1, 64).half(), torch.tensor(1.0)):
        with pytest.raises(RuntimeError):
            cpu.linear(x, packed)
    with pytest.raises(RuntimeError):
        torch.ops.fastdecode.linear_int4(torch.randn(1, 64), packed.data.view(torch.int8))
    weight = random_weight(64, 64, 4, 32)
    for damaged in (
        Quantized(4, 32, weight.q, weight.scale),
        Quantized(4, 16, weight.q, weight.scale, weight.minimum),
        Quantized(4, 32, weight.q, weight.scale.double(), weight.minimum),
        Quantized(8, 32, weight.values().view(torch.int8), weight.scale, weight.minimum),
    ):
        with pytest.raises(ValueError):
            cpu.pack(damaged)


class Layers(nn.Module):
    """Layers as a model has them: one region, compiled once, over different weights."""

    def __init__(self, n_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(n_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = cpu.pack(random_weight(48, 64, 4, 32)), cpu.pack(random_weight(64, 64, 8, 64))
        self.register_buffer("up", up.data)
        self.register_buffer("down", down.data)
        self.up_form, self.down_form = up[1:], down[1:]

    @torch.compiler.nested_compile_region
    def forward(self, x):
        h = cpu.linear(x, cpu.PackedCPU(self.up, *self.up_form))
        return x + cpu.linear(torch.nn.functional.pad(h, (0, 16)), cpu.PackedCPU(self.down, *self.down_form))


def test_it_compiles_into_one_graph():
    torch._dynamo.reset()
    model, x = Layers(3), torch.randn(1, 4, 64, dtype=torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        expected, y = model(x), compiled(x)
    torch.testing.assert_close(y, expected)


def test_the_shape_that_is_told_to_the_compiler_is_right():
    packed, x = cpu.pack(random_weight(50, 64, 8, 32)), torch.randn(2, 3, 64)
    torch.library.opcheck(torch.ops.fastdecode.linear_int8.default, (x, packed.data))


@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_without_a_compiler_it_is_plain_torch(monkeypatch, bits, group):
    weight = random_weight(50, 384, bits, group)
    x = torch.randn(2, 3, 384)
    monkeypatch.setattr(cpu, "operators", lambda: None)
    monkeypatch.setattr(torch.ops.fastdecode, f"linear_int{bits}", None)
    y = cpu.linear(x, cpu.pack(weight))
    assert not cpu.available() and y.shape == (2, 3, 50) and relative_error(y, x, weight) < ERROR[torch.float32]


def test_a_change_in_any_source_is_another_library_and_another_stored_program(monkeypatch):
    included = {Path(name).name for file in cpu.SOURCES for name in re.findall(r'#include "(.*)"', file.read_text())}
    assert {cpu.SOURCES[0].name, *included} == {file.name for file in cpu.SOURCES}

    def names():
        return native.library_name(cpu.SOURCES, ["g++"]), program_key(nn.Linear(2, 2), "forward", torch.zeros(2))

    seen, read = [names()], Path.read_bytes
    assert seen == [names()]
    for file in cpu.SOURCES:
        monkeypatch.setattr(Path, "read_bytes", lambda path, file=file: read(path) + b"\n" * (path == file))
        seen.append(names())
    for kind in zip(*seen, strict=True):
        assert len(set(kind)) == len(seen)


@pytest.mark.parametrize("command", [None, ["/no/such/compiler"], ["false"], ["true"]])
def test_a_compiler_that_cannot_is_no_operator(monkeypatch, tmp_path, command):
    monkeypatch.setattr(native, "build_command", lambda source: command)
    assert native.load(cpu.SOURCES, tmp_path) is None
    assert not list(tmp_path.iterdir())


def start(folder: Path, compiler: str) -> subprocess.Popen:
    """A process that loads the operator from `folder` and multiplies by it. `compiler`: a shell command that writes the
    library to "$1"."""
    code = f"""
import torch
from pathlib import Path
from operators import native
from quantize import cpu
native.build_command = lambda source: ["sh", "-c", {compiler!r}]
assert native.load(cpu.SOURCES, Path({str(folder)!r})) is not None
x = torch.ops.fastdecode.linear_int8(torch.ones(1, 32), torch.ones(1, 1, 32 * 36, dtype=torch.uint8))
assert x.shape == (1, 32)
"""
    root = str(Path(cpu.__file__).parents[1])
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, cwd=folder)


def test_two_processes_build_at_once_and_a_third_builds_nothing(tmp_path):
    """Each compiler waits for the other's to have begun; the third run would wait for ever."""
    library, log = tmp_path / "library", tmp_path / "log"
    library.mkdir()
    compiler = f'''echo >> {log}; until [ $(wc -l < {log}) -eq 2 ]; do sleep 0.05; done; cp {cpu.operators()} "$1"'''
    both = [start(library, compiler), start(library, compiler)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    (file,) = library.iterdir()
    assert native.intact(file)
    assert start(library, compiler).wait(timeout=120) == 0


def test_a_damaged_library_is_built_again(tmp_path):
    whole = cpu.operators().read_bytes()
    compiler = f'cp {cpu.operators()} "$1"'
    assert start(tmp_path, compiler).wait(timeout=120) == 0
    (library,) = tmp_path.iterdir()
    for damaged in (b"", b"x" * 99, whole[: len(whole) // 2], whole[:-1], whole[:4096] + b"?" + whole[4097:]):
        library.write_bytes(damaged)
        assert not native.intact(library)
    assert start(tmp_path, compiler).wait(timeout=120) == 0
    assert native.intact(library)


def test_a_build_that_is_killed_leaves_nothing_to_be_loaded(tmp_path):
    library = tmp_path / "library.so"
    with pytest.raises(subprocess.CalledProcessError):
        native.build(["sh", "-c", 'echo half > "$1"; kill -9 $$'], library)
    assert not library.exists()
