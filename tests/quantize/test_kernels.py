"""The CUDA kernel for quantized layers: run by Triton's interpreter on the CPU, compiled for cards that are not there,
and, on a card, compared and timed.

The interpreter has to be chosen before Triton is first imported, so this file runs itself as a script for it.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from models.errors import InputError
from quantize import kernels
from quantize.kernels import linear, linear_reference, pack, unpack
from quantize.storage import Quantized, pack_nibbles

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="skipped: triton is not installed")
on_a_card = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROWS = (1, 3, 16, 17, 33, 64)
# bits, group, outputs, columns, dtype of x, of the scales, outputs of the whole matrix where a slice of it is enough:
# it is cut into as many splits as the whole one, and the interpreter's time grows with the slice.
CASES = {
    "int4 g64 576x576": (4, 64, 576, 576, torch.float16, torch.float16, None),
    "int4 g32 100x960, outputs no multiple of a block": (4, 32, 100, 960, torch.float16, torch.float16, None),
    "int4 g32 64x96 fp32 scales": (4, 32, 64, 96, torch.float16, torch.float32, None),
    "int4 g128 of 3072x1536 bf16": (4, 128, 64, 1536, torch.bfloat16, torch.float16, 3072),
    "int4 g128 of 4096x11008": (4, 128, 64, 11008, torch.float16, torch.float16, 4096),
    "int4 g128 of 32000x4096": (4, 128, 64, 4096, torch.float16, torch.float16, 32000),
    "int8 g64 192x576": (8, 64, 192, 576, torch.float16, torch.float16, None),
    "int8 g32 64x1536 bf16": (8, 32, 64, 1536, torch.bfloat16, torch.float32, None),
    "int8 g128 of 4096x11008": (8, 128, 64, 11008, torch.float16, torch.float16, 4096),
    "int8 per output 64x576": (8, 576, 64, 576, torch.float16, torch.float16, None),
}


ORDER_CASES = [(4, 128, 64, 2048), (4, 32, 64, 1024), (8, 128, 64, 2048), (8, 32, 64, 1024)]


def matrix(bits, group, n_out, n_columns, scale_dtype=torch.float16, device="cpu"):
    """A random quantized matrix whose weights lie around zero, of about 0.05."""
    generator = torch.Generator().manual_seed(n_out + n_columns)
    scale = (torch.rand(n_out, n_columns // group, generator=generator) + 0.5) * (0.2 / 2**bits)
    low = 0 if bits == 4 else -127
    q = torch.randint(low, low + 2**bits - (bits == 8), (n_out, n_columns), generator=generator)
    if bits == 8:
        return Quantized(8, group, q.to(torch.int8).to(device), scale.to(scale_dtype).to(device))
    minimum = -scale * (7 + torch.rand(scale.shape, generator=generator))
    q = pack_nibbles(q.to(torch.uint8)).to(device)
    return Quantized(4, group, q, scale.to(scale_dtype).to(device), minimum.to(scale_dtype).to(device))


def rows(n_rows, n_columns, dtype, device="cpu"):
    """`[n_rows, n_columns]`, random."""
    return torch.randn(n_rows, n_columns, generator=torch.Generator().manual_seed(n_rows)).to(dtype).to(device)


def cancelling(bits, group, n_out, n_columns, dtype, device="cpu"):
    """A matrix and 64 rows whose exact product is 0: the second half of the columns is the first, group by group
    backwards, and x there is negative. What is computed is the error of the order of summation and nothing else, so
    any other order shows, however coarse the result's dtype is."""
    half = matrix(bits, group, n_out, n_columns // 2)

    def mirrored(numbers):  # [rows, groups, any]
        return torch.cat((numbers, numbers.flip(1)), dim=1).flatten(1).to(device)

    q = mirrored(half.values().view(n_out, -1, group))
    scale = mirrored(half.scale[..., None])
    minimum = None if bits == 8 else mirrored(half.minimum[..., None])
    x = rows(64, n_columns // 2, dtype, device).view(64, -1, group)
    x = torch.cat((x, -x.flip(1)), dim=1).flatten(1)
    return Quantized(bits, group, q if bits == 8 else pack_nibbles(q), scale, minimum), x


def assert_is_the_product(out, x, quantized):
    """`out` equals x times the weights, but for its own rounding and that of a sum in fp32.

    3e-5 of the terms' sizes: a weight that is rounded to fp16 the other way makes a tenth of it, one number q that is
    off by one makes more.
    """
    weight = quantized.dequantize(x.dtype if quantized.bits == 4 else torch.float32).double()
    expected = x.double() @ weight.T
    rounding = torch.finfo(x.dtype).eps / 2 * expected.abs()
    slack = (3e-5 if x.dtype == torch.float16 else 1e-4) * (x.double().abs() @ weight.abs().T)
    worst = ((out.double() - expected).abs() / (rounding * 1.01 + slack)).max()
    assert worst <= 1, f"{worst:.3g} times what rounding allows"


# Packing and the plain-torch reference


@pytest.mark.parametrize("case", CASES)
def test_packing_keeps_every_weight(case):
    bits, group, n_out, n_columns, _, scale_dtype, _ = CASES[case]
    quantized = matrix(bits, group, n_out, n_columns, scale_dtype)
    assert torch.equal(unpack(pack(quantized), n_columns), quantized.dequantize())


def test_the_reference_multiplies_by_the_stored_matrix():
    for bits in (4, 8):
        quantized = matrix(bits, 64, 48, 576)
        x = rows(5, 576, torch.bfloat16)
        assert_is_the_product(linear_reference(x, pack(quantized)), x, quantized)


def test_groups_and_dtypes_that_the_kernel_does_not_take_are_named():
    with pytest.raises(InputError, match="groups of 16 columns"):
        pack(matrix(4, 16, 64, 128))
    with pytest.raises(InputError, match="float32"):
        linear(rows(1, 128, torch.float32), pack(matrix(4, 32, 64, 128)))


@pytest.mark.parametrize("shape", [(576, 576), (960, 576), (3072, 576), (576, 1536), (4096, 11008), (32000, 4096)])
def test_splits_cover_the_columns_and_leave_none_empty(shape):
    n_out, n_steps = shape[0], -(-shape[1] // kernels.STEP)
    splits = kernels.splits_for(n_out, n_steps)
    each = -(-n_steps // splits)
    assert (splits - 1) * each < n_steps <= splits * each


# The kernel in Triton's interpreter


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """`{case: {number of rows, or "moved": output}}` of all CASES, by the interpreter in a process of its own."""
    path = tmp_path_factory.mktemp("interpreter") / "outputs.pt"
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, __file__, path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(path)


def interpret_cases(path):
    """What the script does."""
    teach_the_interpreter_bf16()
    splits_for, outputs = kernels.splits_for, {}
    for case, (bits, group, n_out, n_columns, dtype, scale_dtype, whole) in CASES.items():
        kernels.splits_for = lambda n_out, n_steps, whole=whole: splits_for(whole or n_out, n_steps)
        packed = pack(matrix(bits, group, n_out, n_columns, scale_dtype))
        x = rows(max(ROWS), n_columns, dtype)
        outputs[case] = {n: linear(x[:n], packed) for n in (ROWS if n_columns < 4096 else (1, 17, 64))}
        outputs[case]["moved"] = linear(x[[40, 7]], packed)
    kernels.splits_for = splits_for
    for case in ORDER_CASES:
        quantized, x = cancelling(*case, torch.float16)
        packed = pack(quantized)
        outputs[case] = {n: linear(x[:n], packed) for n in ROWS} | {"moved": linear(x[[40, 7]], packed)}
    torch.save(outputs, path)


def teach_the_interpreter_bf16():
    """It keeps bf16 as 16-bit integers, multiplies those as they are, and does not round to the nearest even. And its
    products are BLAS's, which on some CPUs sums in another order for other numbers of rows: here they have one."""
    import numpy as np
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def fp32(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data.astype(np.float32)
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def dot(self, a, b, added, *rest):
        left, right = np.ascontiguousarray(fp32(a).T), np.ascontiguousarray(fp32(b))
        total = np.zeros(added.data.shape, np.float32)
        for column, row in zip(left, right, strict=True):
            total += column[:, None] * row
        return TensorHandle(total + added.data, added.dtype.scalar)

    def cast_impl(self, source, to):
        if to.scalar != tl.bfloat16 or source.dtype.scalar != tl.float32:
            return cast(self, source, to)
        data = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16).numpy()
        return TensorHandle(data.view(np.uint16), to.scalar)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = dot, cast_impl
    InterpreterBuilder.create_fp_trunc = cast_impl


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_computes_the_product(interpreted, case):
    bits, group, n_out, n_columns, dtype, scale_dtype, _ = CASES[case]
    x = rows(max(ROWS), n_columns, dtype)
    quantized = matrix(bits, group, n_out, n_columns, scale_dtype)
    for n, out in interpreted[case].items():
        assert out.dtype == dtype
        assert_is_the_product(out, x[[40, 7]] if n == "moved" else x[:n], quantized)


@needs_triton
@pytest.mark.parametrize("case", [*CASES, *ORDER_CASES], ids=str)
def test_a_row_depends_neither_on_the_rows_beside_it_nor_on_their_number(interpreted, case):
    outputs = dict(interpreted[case])
    moved, full = outputs.pop("moved"), outputs[max(ROWS)]
    assert full.any()
    assert torch.equal(moved, full[[40, 7]])
    for n, out in outputs.items():
        assert torch.equal(out, full[:n]), n


# Compiled for cards


@needs_triton
@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (9, 0)])
def test_the_kernel_compiles_without_spills(capability, tmp_path, monkeypatch):
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stages = kernels.STAGES.get(capability, kernels.STAGES_LARGE)
    int4, int8, fp32 = (4, "*i32"), (8, "*fp32"), (4, "*i64")
    int4, int8, fp32 = (4, "*i32"), (8, "*fp32"), (4, "*i64")
    for (bits, scales), group, n_rows in (
        (int4, 128, 1), (int4, 64, 64), (int4, 32, 64), (fp32, 32, 1), (int8, 128, 1), (int8, 64, 64), (int8, 32, 64),
    ):  # fmt: skip
        block = kernels.block_rows(n_rows, group)
        built = compile_for(capability, bits, scales, group, block, stages[block])
        ptx = tmp_path / "kernel.ptx"
        ptx.write_text(built.asm["ptx"])
        architecture = re.search(r"^\.target (\w+)", built.asm["ptx"], re.MULTILINE).group(1)
        command = [knobs.nvidia.ptxas.path, "-v", f"-arch={architecture}", ptx, "-o", tmp_path / "kernel.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers = int(re.search(r"Used (\d+) registers", log).group(1))
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
        shared = built.metadata.shared
        kind = f"{architecture} int{bits} g{group} scales {scales[1:]}, {block} rows"
        print(f"{kind}: {registers} registers, {sum(spilled)} bytes spilled, {shared} bytes of shared memory")
        assert spilled == [0, 0]
        assert shared <= (99 if capability[0] == 8 else 227) * 1024
        assert built.asm["ttgir"].count("async_copy_global_to_local") > 8, "the loads are not in the pipeline"
        if capability[0] == 8:
            # Weights go from the packed tile straight into the tensor core's registers. A change to the kernel can
            # stop that (a mask on them, a run-time constant): each field then goes through shared memory between two
            # barriers.
            assert built.asm["ptx"].count("bar.sync") < 10


def compile_for(capability, bits, scales, group, block, stages):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tensors = {"x": "*bf16", "weight": "*i32", "scales": scales, "out": "*fp32"}
    integers = dict.fromkeys(("M", "N", "n_padded", "n_steps", "steps_of_split"), "i32")
    constants = {"BITS": bits, "GROUP": group, "STEP": kernels.STEP, "BLOCK_M": block, "BLOCK_N": kernels.BLOCK_N}
    constants["STAGES"] = stages
    signature = tensors | integers | dict.fromkeys(constants, "constexpr")
    by_16 = {(list(signature).index(name),): [["tt.divisibility", 16]] for name in (*tensors, "N", "n_padded")}
    source = ASTSource(kernels.kernels()[0], signature, constants, by_16)
    return triton.compile(source, target=GPUTarget("cuda", capability[0] * 10 + capability[1], 32))


# Inside torch.compile


class Captured(Exception):
    """Ends a compilation once its graph is known."""


def graph_of(function, *arguments):
    """The graph that Inductor would make code from."""
    graphs = []

    def capture(graph):
        graphs.append(str(graph))
        raise Captured

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, options={"post_grad_custom_post_pass": capture})
    with torch.no_grad(), pytest.raises(Exception, match="Captured"):
        compiled(*arguments)
    return graphs[0]


def test_inductor_does_not_take_an_int8_layer_for_its_slow_cuda_operator():
    x, quantized = rows(3, 128, torch.bfloat16)[None], matrix(8, 128, 64, 128)
    packed = pack(quantized)
    trap = graph_of(lambda x, q, s: F.linear(x, q.to(x.dtype)) * s, x, quantized.q, quantized.scale[:, 0].bfloat16())
    assert "woq_int8" in trap or "int8pack" in trap, "the pattern has another name now: this test looks for nothing"
    graph = graph_of(lambda x: linear_reference(x, packed), x)
    assert "woq" not in graph and "int8pack" not in graph
    assert "aten.mm" in graph


@needs_triton
@pytest.mark.parametrize("bits", [4, 8])
def test_torch_compile_sees_both_kernels_and_what_they_write(bits, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class NoCard:
        def get_current_target(self):
            return GPUTarget("cuda", 86, 32)

    monkeypatch.setattr(driver, "_active", NoCard())
    packed = pack(matrix(bits, 64, 576, 1536))
    graph = graph_of(lambda x: linear(x * 2, packed) + 1, rows(3, 1536, torch.bfloat16))
    assert graph.count("tensors_to_clone: [out]") == 2  # the product and the sum over splits each write `out` alone
    assert "aten.mm" not in graph and "woq" not in graph and "int8pack" not in graph


# tinygemm


def test_tinygemm_says_by_how_much_its_bf16_scales_change_the_weights():
    quantized = matrix(4, 64, 64, 576)
    pair, error = kernels.tinygemm_scales(quantized)
    assert pair.shape == (64, 9, 2) and pair.dtype == torch.bfloat16
    assert 1e-4 < error < 1e-2
    exact = Quantized(4, 64, quantized.q, torch.full((64, 9), 0.25).half(), torch.full((64, 9), -2.0).half())
    assert kernels.tinygemm_scales(exact)[1] == 0


def test_tinygemm_gets_even_columns_in_the_high_nibble_and_zeros_at_eight(monkeypatch):
    given = {}
    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", lambda q, tiles: given.update(q=q, tiles=tiles))
    quantized = matrix(4, 64, 64, 576)
    scale, zero = kernels.pack_tinygemm(quantized).scales_and_zeros.float().unbind(-1)  # [K / group, N] each
    q = torch.stack((given["q"] >> 4, given["q"] & 15), dim=-1).view(64, 9, 64).float()
    w = (q - 8) * scale.T[..., None] + zero.T[..., None]
    torch.testing.assert_close(w.view(64, 576), quantized.dequantize(), rtol=0.01, atol=1e-3)
    assert given["tiles"] == 4  # 576 is a multiple of 64, not of 128


def test_tinygemm_refuses_what_it_cannot_take():
    for quantized in (matrix(8, 32, 64, 128), matrix(4, 32, 60, 128), matrix(4, 16, 64, 16)):
        with pytest.raises(InputError, match="Triton kernel"):
            kernels.pack_tinygemm(quantized)


# On a card


class TestOnACard:
    pytestmark = on_a_card

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        "case",
        [(4, 32, 576, 576), (4, 64, 960, 576), (4, 64, 3072, 576), (4, 128, 11008, 4096), (4, 128, 32000, 4096)]
        + [(8, 32, 576, 1536), (8, 64, 576, 576), (8, 128, 4096, 11008), (8, 4096, 1024, 4096)],
    )
    def test_the_product(self, case, dtype):
        quantized = matrix(*case, device="cuda")
        packed = pack(quantized)
        x = rows(64, case[3], dtype, "cuda")
        assert_is_the_product(linear(x, packed), x, quantized)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("case", [*ORDER_CASES, (4, 128, 4096, 11008), (4, 64, 32000, 4096), (8, 64, 3072, 4096)])
    def test_a_row_depends_neither_on_the_rows_beside_it_nor_on_their_number(self, case, dtype):
        quantized, x = cancelling(*case, dtype, "cuda")
        packed = pack(quantized)
        full = linear(x, packed)
        assert full.any()
        for n in ROWS:
            assert torch.equal(linear(x[:n], packed), full[:n]), n
        assert torch.equal(linear(x[[40, 7]], packed), full[[40, 7]])
        assert torch.equal(linear(x.repeat(3, 1), packed), full.repeat(3, 1))

    @pytest.mark.parametrize("bits", [4, 8])
    def test_compiled_and_captured_it_computes_the_same(self, bits):
        packed, x = pack(matrix(bits, 64, 576, 1536, device="cuda")), rows(5, 1536, torch.bfloat16, "cuda")
        expected = linear(x * 2, packed) + 1
        compiled = torch.compile(lambda x: linear(x * 2, packed) + 1, fullgraph=True)
        with torch.no_grad():
            assert torch.equal(compiled(x), expected)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = compiled(x)
            graph.replay()
        assert torch.equal(out, expected)

    def test_tinygemm_multiplies_by_the_same_matrix(self):
        quantized, x = matrix(4, 64, 960, 576, device="cuda"), rows(3, 576, torch.bfloat16, "cuda")
        out = kernels.tinygemm_linear(x, kernels.pack_tinygemm(quantized)).float()
        torch.testing.assert_close(out, x.float() @ quantized.dequantize().T, rtol=0.03, atol=0.05)

    def test_times(self):
        """Prints microseconds a call, weights rotated so that no cache holds them; shown by `pytest -rP`."""
        n_out, n_columns = 11008, 4096
        four, eight = matrix(4, 128, n_out, n_columns, device="cuda"), matrix(8, 128, n_out, n_columns, device="cuda")
        plain = four.dequantize(torch.bfloat16)
        copies = 8
        layers = {
            "bf16": (F.linear, [plain.clone() for _ in range(copies)]),
            "int4": (linear, [pack(four) for _ in range(copies)]),
            "int8": (linear, [pack(eight) for _ in range(copies)]),
            "tinygemm": (kernels.tinygemm_linear, [kernels.pack_tinygemm(four) for _ in range(copies)]),
        }
        print(f"{torch.cuda.get_device_name()}, {n_columns}x{n_out}, groups of 128, microseconds")
        for n_rows in (1, 4, 8, 16, 32, 64):
            x = rows(n_rows, n_columns, torch.bfloat16, "cuda")
            times = {name: microseconds(function, x, weights) for name, (function, weights) in layers.items()}
            print(f"{n_rows:3} rows: " + ", ".join(f"{name} {time:.1f}" for name, time in times.items()))


def microseconds(function, x, weights):
    """Time of one call inside a captured graph of `len(weights)` calls."""
    for weight in weights:
        function(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            function(x, weight)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(20):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / (20 * len(weights))


if __name__ == "__main__":
    interpret_cases(sys.argv[1])
