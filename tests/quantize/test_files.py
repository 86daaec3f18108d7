"""The portable file: what is written comes back bit for bit, and what is damaged is refused in a sentence."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from tiny import reference_model, save_checkpoint

from checkpoints.checkpoint import open_folder
from models.errors import InputError
from quantize import pipeline, writer
from quantize.files import quantization_config, read_quantized, stored_quantization
from quantize.methods import quantize_matrix
from quantize.pipeline import quantize_checkpoint
from quantize.plan import Options, plan_model
from quantize.writer import CheckpointWriter, Entry, new_folder

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
ROOT = Path(__file__).parents[2]
GPTQ_IDS = torch.randint(3, 199, (4, 24), generator=torch.Generator().manual_seed(0))


def save(folder, family="llama", **changes):
    save_checkpoint(reference_model(family, **{**SIZES, **changes}).bfloat16(), folder)
    return folder


def quantized(source, out, **options):
    options = Options(**options)
    token_ids = GPTQ_IDS if options.method == "gptq" else None
    return quantize_checkpoint(plan_model(source, options), out, options, token_ids=token_ids)


def read(out):
    """The quantized matrices and what else there is, by name."""
    stored = open_folder(out)
    return {name: source.read() for name, source in read_quantized(out, stored).items()}, stored


def same(ours, theirs):
    parts = [(ours.q, theirs.q), (ours.scale, theirs.scale), (ours.minimum, theirs.minimum)]
    assert (ours.bits, ours.group_size, ours.shape) == (theirs.bits, theirs.group_size, theirs.shape)
    for a, b in parts:
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def done(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("done") / "out"
    quantized(checkpoint, out)
    return out


@pytest.fixture
def out(done, tmp_path):
    """A quantized checkpoint to damage."""
    return shutil.copytree(done, tmp_path / "out")


@pytest.mark.parametrize("lm_head", ["8", "16", "same"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("method, bits", [("rtn", 4), ("rtn", 8), ("als", 4), ("als", 8), ("hqq", 4)])
def test_what_is_written_is_what_the_method_makes(checkpoint, method, bits, group_size, lm_head, tmp_path):
    quantized(checkpoint, tmp_path / "out", method=method, bits=bits, group_size=group_size, lm_head=lm_head)
    before = {n.removeprefix("model."): t for n, t in load_file(checkpoint / "model.safetensors").items()}
    matrices, rest = read(tmp_path / "out")
    vocabulary = {"embed_tokens.weight", "lm_head.weight"}
    expected = {n for n, t in before.items() if t.dim() == 2} - (vocabulary if lm_head == "16" else set())
    assert matrices.keys() == expected
    for name, matrix in matrices.items():
        how = (bits, group_size, method)
        if name in vocabulary and lm_head == "8":
            how = (8, 32, "als" if method == "hqq" else method)
        same(matrix, quantize_matrix(before[name], *how))
    assert rest.keys() == before.keys() - expected
    for name, tensor in rest.items():
        assert tensor.dtype == "BF16"
        assert tensor.equals(before[name])


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_round_trips_and_needs_no_more_to_be_read(checkpoint, bits, tmp_path):
    quantized(checkpoint, tmp_path / "out", bits=bits, method="gptq")
    weight = load_file(checkpoint / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    matrix = read(tmp_path / "out")[0]["layers.1.mlp.down_proj.weight"]
    nearest = quantize_matrix(weight, bits, 32)
    assert not torch.equal(matrix.q, nearest.q)
    assert (matrix.dequantize() - weight.float()).norm() < 3 * (nearest.dequantize() - weight.float()).norm()


def test_scales_that_fp16_cannot_hold_are_kept_in_fp32(tmp_path):
    folder = save(tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name] * 1e-9
    save_file(tensors, folder / "model.safetensors")
    quantized(folder, tmp_path / "out")
    matrices, _ = read(tmp_path / "out")
    assert matrices["layers.0.self_attn.q_proj.weight"].scale.dtype == torch.float32
    assert matrices["layers.1.self_attn.q_proj.weight"].scale.dtype == torch.float16
    same(matrices["layers.0.self_attn.q_proj.weight"], quantize_matrix(tensors[name], 4, 32))


def test_the_safetensors_library_reads_every_tensor(done):
    with safe_open(done / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert file.metadata()["format"] == "pt"
        assert file.get_tensor("model.layers.0.mlp.up_proj.weight").dtype == torch.uint8
        assert all(file.get_tensor(name).numel() for name in names)
    described = json.loads(header(done / "model.safetensors")[0]["__metadata__"]["fastdecode"])
    assert described["version"] == 1
    up = {"bits": 4, "group_size": 32, "shape": [256, 128]}
    assert described["tensors"]["model.layers.0.mlp.up_proj.weight"] == up
    assert "model.norm.weight" in names and "model.norm.weight" not in described["tensors"]
    assert "model.embed_tokens.weight_min" not in names  # 8 bits


@pytest.mark.parametrize("shard_bytes", [1, 30_000, 200_000])
def test_shards_hold_the_same_as_one_file(checkpoint, done, shard_bytes, tmp_path):
    quantized(checkpoint, tmp_path / "out", shard_bytes=shard_bytes)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    whole = load_file(done / "model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in whole.values())
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == whole.keys() and all(torch.equal(found[n], whole[n]) for n in whole)
    ours, theirs = read(tmp_path / "out")[0], read(done)[0]
    assert ours.keys() == theirs.keys()
    for name in ours:
        same(ours[name], theirs[name])


def test_names_alone_make_no_matrix_quantized(checkpoint):
    stored = open_folder(checkpoint)
    before = dict(stored)
    assert read_quantized(checkpoint, stored) == {} and stored == before


def test_the_config_says_whose_quantization_it_is(done, checkpoint):
    config = json.loads((done / "config.json").read_text())
    original = json.loads((checkpoint / "config.json").read_text())
    assert config.pop("quantization_config") == quantization_config(4, 32, "als") and config == original
    found = stored_quantization({"quantization_config": quantization_config(8, 64, "rtn")})
    assert (found.bits, found.group_size, found.method) == (8, 64, "rtn")
    for other in ({}, {"quantization_config": None}, {"quantization_config": {"quant_method": "gptq"}}):
        assert stored_quantization(other) is None
    for field, value in (("version", 2), ("version", True), ("bits", 3), ("group_size", "32"), ("method", None)):
        wrong = {"quantization_config": quantization_config(4, 32, "als") | {field: value}}
        with pytest.raises(InputError, match="c.json"):
            stored_quantization(wrong, "c.json")


# --- damage ---------------------------------------------------------------------------------------------------------


def header(file):
    """The header, and where the data begin."""
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), 8 + n


def rewrite(file, change):
    """Let `change` edit the header."""
    found, start = header(file)
    change(found)
    text = json.dumps(found).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + file.read_bytes()[start:])


def rewrite_description(file, change):
    def edit(found):
        description = json.loads(found["__metadata__"]["fastdecode"])
        change(description)
        found["__metadata__"]["fastdecode"] = json.dumps(description)

    rewrite(file, edit)


def refused(out, match):
    file = next(iter(sorted(out.glob("*.safetensors"))))
    with pytest.raises(InputError, match=match) as caught:
        read(out)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_files_cut_short_anywhere_are_refused(out):
    file = out / "model.safetensors"
    data = file.read_bytes()
    start = header(file)[1]
    cuts = {0, 1, 7, 8, 9, start // 2, start - 1, start, start + 1, len(data) - 1}
    for cut in cuts | set(range(0, len(data) - 1, len(data) // 23)):
        file.write_bytes(data[:cut])
        refused(out, "damaged or cut short|cannot be read")


def test_files_cut_short_after_their_header_was_read_are_refused(out):
    stored = open_folder(out)
    sources = read_quantized(out, stored)
    file = out / "model.safetensors"
    file.write_bytes(file.read_bytes()[: header(file)[1] + 10])
    with pytest.raises(InputError, match="ends inside tensor"):
        sources["layers.2.mlp.down_proj.weight"].read()


Q = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("part", ["", "_scale", "_min"])
def test_a_missing_part_is_refused(out, part):
    tensors = load_file(out / "model.safetensors")
    metadata = header(out / "model.safetensors")[0]["__metadata__"]
    del tensors[Q + part]
    save_file(tensors, out / "model.safetensors", metadata)
    refused(out, f"tensor {Q}{part} is missing")


@pytest.mark.parametrize("part", ["", "_scale", "_min"])
@pytest.mark.parametrize("damage", ["shape", "dtype"])
def test_a_part_of_another_shape_or_dtype_is_refused(out, part, damage):
    tensors = load_file(out / "model.safetensors")
    metadata = header(out / "model.safetensors")[0]["__metadata__"]
    tensor = tensors[Q + part]
    tensors[Q + part] = tensor.t().contiguous() if damage == "shape" else tensor.int()
    save_file(tensors, out / "model.safetensors", metadata)
    refused(out, f"tensor {Q}{part} is .* expected")


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda d: d.update(version=2), "version 2 of the quantized format"),
        (lambda d: d.update(version="1"), "version '1'"),
        (lambda d: d.pop("version"), "version None"),
        (lambda d: d.pop("tensors"), "has no tensors"),
        (lambda d: d.update(tensors=[1]), "has no tensors"),
        (lambda d: d["tensors"].update({Q: 4}), "has no tensors"),
        (lambda d: d["tensors"][Q].update(bits=3), "3 bits"),
        (lambda d: d["tensors"][Q].update(bits=True), "True bits"),
        (lambda d: d["tensors"][Q].update(bits=8), f"tensor {Q} is U8"),
        (lambda d: d["tensors"][Q].update(group_size=16), "groups of 16"),
        (lambda d: d["tensors"][Q].update(group_size=64), f"{Q}_scale is F16"),
        (lambda d: d["tensors"][Q].update(shape=[128, 256]), f"tensor {Q} is U8"),
        (lambda d: d["tensors"][Q].update(shape=[256, 120]), "no groups of 32"),
        (lambda d: d["tensors"][Q].update(shape=[256]), "expected .out, in."),
        (lambda d: d["tensors"][Q].update(shape=[256, -128]), "expected .out, in."),
        (lambda d: d["tensors"].update({"model.other.weight": d["tensors"][Q]}), "model.other.weight is missing"),
        (lambda d: d["tensors"].update({"model.norm.weight": d["tensors"][Q]}), "model.norm.weight is BF16"),
    ],
)
def test_a_description_that_contradicts_the_tensors_is_refused(out, change, match):
    rewrite_description(out / "model.safetensors", change)
    refused(out, match)


def test_8_bits_with_a_minimum_are_refused(out):
    tensors = load_file(out / "model.safetensors")
    metadata = header(out / "model.safetensors")[0]["__metadata__"]
    tensors["lm_head.weight_min"] = tensors["lm_head.weight_scale"].clone()
    save_file(tensors, out / "model.safetensors", metadata)
    refused(out, "lm_head.weight_min is there")


@pytest.mark.parametrize("text", ["{", "[]", "null", "1"])
def test_a_description_that_is_no_json_object_is_refused(out, text):
    rewrite(out / "model.safetensors", lambda found: found["__metadata__"].update(fastdecode=text))
    refused(out, "no JSON object")


def test_a_file_of_a_quantized_checkpoint_without_description_is_refused(out):
    rewrite(out / "model.safetensors", lambda found: found.pop("__metadata__"))
    refused(out, "no description")


@pytest.mark.parametrize("part", ["_scale", "_min"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_scales_that_are_no_numbers_are_refused(out, part, value):
    tensors = load_file(out / "model.safetensors")
    metadata = header(out / "model.safetensors")[0]["__metadata__"]
    tensors[Q + part][3, 1] = value
    save_file(tensors, out / "model.safetensors", metadata)
    refused(out, f"{Q}{part} has values that are no finite numbers")


# --- whole or not at all --------------------------------------------------------------------------------------------


def contents(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("before", ["absent", "empty", "ours"])
def test_a_failure_in_mid_write_leaves_out_as_it_was(checkpoint, done, before, error, tmp_path, monkeypatch):
    out = tmp_path / "out"
    if before == "empty":
        out.mkdir()
    if before == "ours":
        shutil.copytree(done, out)
    was = contents(tmp_path)
    write, n_written = writer.Shard.write, []

    def failing(self, name, value):
        n_written.append(name)
        if len(n_written) == 9:
            raise error
        write(self, name, value)

    monkeypatch.setattr(writer.Shard, "write", failing)
    expected = InputError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        quantized(checkpoint, out, bits=8)
    if isinstance(error, OSError):
        assert "No space left" in str(caught.value) and str(out) in str(caught.value)
    assert contents(tmp_path) == was and out.exists() == (before != "absent")
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if before != "absent" else [])


def test_a_failing_rename_puts_the_old_one_back(checkpoint, done, tmp_path, monkeypatch):
    out = shutil.copytree(done, tmp_path / "out")
    was, rename = contents(tmp_path), os.rename

    def failing(source, target):
        if str(source).endswith(".part"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(InputError, match="Input/output error"):
        quantized(checkpoint, out, bits=8)
    assert contents(tmp_path) == was


def test_an_older_checkpoint_of_ours_is_replaced(checkpoint, done, tmp_path):
    out = shutil.copytree(done, tmp_path / "out")
    (out / "left-over.txt").write_text("from before")
    quantized(checkpoint, out, bits=8)
    assert not (out / "left-over.txt").exists() and [p.name for p in tmp_path.iterdir()] == ["out"]
    assert {m.bits for m in read(out)[0].values()} == {8}


@pytest.mark.parametrize("what", ["file", "foreign", "checkpoint", "no parent"])
def test_other_peoples_files_are_not_overwritten(checkpoint, what, tmp_path):
    out = tmp_path / "out"
    if what == "file":
        out.write_text("mine")
    if what == "foreign":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    if what == "checkpoint":
        shutil.copytree(checkpoint, out)
    if what == "no parent":
        out = tmp_path / "a" / "out"
    was = contents(tmp_path)
    with pytest.raises(InputError, match="-o .*out"):
        quantized(checkpoint, out)
    assert contents(tmp_path) == was


def test_a_killed_run_leaves_out_as_it_was_and_the_next_one_cleans_up(checkpoint, done, tmp_path):
    out = shutil.copytree(done, tmp_path / "out")
    was = contents(out)
    code = f"""
import time
from quantize import writer
from quantize.pipeline import quantize_checkpoint
from quantize.plan import Options, plan_model
from pathlib import Path
write = writer.Shard.write
def slow(self, name, value):
    write(self, name, value)
    self.file.flush()
    if "layers.1" in name:
        print("there", flush=True)
        time.sleep(60)
writer.Shard.write = slow
options = Options(bits=8)
quantize_checkpoint(plan_model(Path({str(checkpoint)!r}), options), Path({str(out)!r}), options)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout.readline() == "there\n"
    quantized(checkpoint, tmp_path / "out2")  # another OUT
    quantized(checkpoint, out)  # a second run beside a living one, which keeps its folder
    assert len(list(tmp_path.glob(".out.*.part"))) == 1
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert contents(out).keys() == was.keys() and len(list(tmp_path.glob(".out.*.part"))) == 1
    assert contents(out)["model.safetensors"] == was["model.safetensors"]
    quantized(checkpoint, out, bits=8)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out2"]


def test_killed_between_the_two_renames_the_old_one_comes_back(checkpoint, done, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(done, tmp_path / ".out.abc.old")
    shutil.copytree(done, tmp_path / ".out.abc.part")
    with pytest.raises(RuntimeError), new_folder(out):
        raise RuntimeError
    assert contents(out) == contents(done) and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_one_sentence(checkpoint, tmp_path):
    """A real one: the kernel's limit on a file's size."""
    code = f"""
import resource, signal, sys
from fastdecode.options import run_command
from pathlib import Path
from quantize.pipeline import quantize_checkpoint
from quantize.plan import Options, plan_model
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
options = Options()
plan = plan_model(Path({str(checkpoint)!r}), options)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(run_command(lambda argv: quantize_checkpoint(plan, Path({str(tmp_path / "out")!r}), options)))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 2 and len(ran.stderr.strip().splitlines()) == 1 and "cannot be written" in ran.stderr
    assert not list(tmp_path.iterdir())


# --- the writer -----------------------------------------------------------------------------------------------------


def test_tensors_must_come_as_planned(tmp_path):
    entries = [Entry("a", (2, 3), torch.float32), Entry("b", (4,), torch.int64)]
    a, b = torch.arange(6.0).view(2, 3), torch.arange(4)
    with CheckpointWriter(tmp_path, entries) as good:
        good.add("a", a)
        good.add("b", b)
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["a"], a) and torch.equal(found["b"], b)
    for steps in ([("b", b)], [("a", b)], [("a", a)]):
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ValueError, match="planned"), CheckpointWriter(tmp_path, entries) as bad:
            for name, value in steps:
                bad.add(name, value)
        (tmp_path / "model.safetensors").touch()


def test_the_work_is_done_one_matrix_at_a_time(checkpoint, tmp_path, monkeypatch):
    events = []
    quantize, write = pipeline.quantize_matrix, writer.Shard.write
    monkeypatch.setattr(pipeline, "quantize_matrix", lambda *a: events.append(("made", a[-1])) or quantize(*a))
    monkeypatch.setattr(
        writer.Shard, "write", lambda self, name, value: events.append(("wrote", name)) or write(self, name, value)
    )
    quantized(checkpoint, tmp_path / "out")
    made = [i for i, (kind, _) in enumerate(events) if kind == "made"]
    assert len(made) > 20 and all(events[i + 1] == ("wrote", events[i][1]) for i in made)
