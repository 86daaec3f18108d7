"""`--quantize int4`, `int8`, `w4a8`, `w8a8`: a checkpoint that is stored otherwise is quantized once, and kept in the
user's cache."""

import hashlib
from pathlib import Path

import torch

from checkpoints.checkpoint import open_tensors, read_config
from checkpoints.download import cache_folder
from checkpoints.json_text import parse_json
from models.config import ModelConfig
from models.errors import InputError
from models.transformer import Transformer
from quantize import a8
from quantize.files import stored_quantization
from quantize.importers import GGUF_TYPES, read_quantization
from quantize.linear import round_inputs
from quantize.network import Note, has_quantized_matrices, load_network
from quantize.pipeline import quantize_checkpoint
from quantize.plan import Options, plan_model

BITS = {"int4": 4, "int8": 8, "w4a8": 4, "w8a8": 8}
ROUNDING_INPUTS = ("w4a8", "w8a8")
GGUF_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}


def load_as(
    path: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    quantize: str,
    note: Note = lambda sentence: None,
) -> Transformer:
    """`load_network` of the checkpoint `path` as `--quantize` says: auto (as stored), none, int4 or int8; or w4a8 or
    w8a8, which round activations to 8 bits as well, on a CPU alone (elsewhere InputError)."""
    if quantize in ROUNDING_INPUTS and device.type != "cpu":
        raise InputError(f"--quantize {quantize} is for CPUs; give int{BITS[quantize]} on this device.")
    if quantize in BITS:
        path = quantized_copy(path, config, quantize, note)
        config = read_config(path)
    network = load_network(path, config, device, dtype, quantize != "none", note)
    if quantize in ROUNDING_INPUTS and has_quantized_matrices(network):  # else a note has said why there are none
        if not a8.fast():
            note("This CPU lacks AVX512-VNNI, which multiplies bytes, so 8-bit activations are slow here.")
        round_inputs(network)
    return network


def quantized_copy(path: Path, config: ModelConfig, how: str, note: Note) -> Path:
    """The checkpoint `path` in the bits that `how` (a key of BITS) says: itself, where it is stored so, else a copy in
    the cache, made now if it is not there yet. Nothing is left of one that was interrupted.

    Raises InputError for a checkpoint that is quantized otherwise, and where no group size fits.
    """
    bits = BITS[how]
    if config.quantization is not None:
        if quantized_bits(path) != bits:
            raise InputError(f"--quantize {how}: {path} is quantized already, otherwise; leave it out, or give none.")
        return path
    if stored_bits(path, config) == bits:
        return path
    options = Options(bits, 32, "als", (), "8")
    copy = cache_folder() / "quantized" / f"{path.stem}-int{bits}-{fingerprint(path, options)}"
    if not (copy / "config.json").is_file():
        plan = plan_model(path, options)
        note(f"Quantizing to {how}, once: {copy} keeps the result.")
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{copy.parent}: cannot be made ({error.strerror}); set XDG_CACHE_HOME, or use python -m quantize."
            ) from error
        quantize_checkpoint(plan, copy, options, files=None if path.is_dir() else {})
    return copy


def stored_bits(path: Path, config: ModelConfig) -> int | None:
    """Bits of all matrices in the layers of a GGUF file, where they are the same and can be used as they are."""
    if path.is_dir():
        return None
    kinds = {t.dtype for name, t in open_tensors(path, config).items() if "layers." in name and len(t.shape) >= 2}
    bits = {GGUF_BITS.get(kind) for kind in kinds}
    return bits.pop() if len(bits) == 1 and kinds <= set(GGUF_TYPES) else None


def quantized_bits(path: Path) -> int | None:
    """Bits of the layers of a folder that is quantized already, as its config.json says."""
    file = path / "config.json"
    config = parse_json(file.read_text(encoding="utf-8"))
    ours = stored_quantization(config, str(file))
    return (read_quantization(config, str(file)) if ours is None else ours).bits


def fingerprint(path: Path, options: Options) -> str:
    """Which checkpoint this is, without reading it whole: the place, size and time of its files, and the options."""
    files = [path] if path.is_file() else sorted((*path.glob("*.safetensors"), path / "config.json"))
    if not files:
        raise InputError(f"{path}: has no safetensors files to quantize.")
    seen = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((seen, options)).encode()).hexdigest()[:24]
