"""`python -m quantize`: a checkpoint in, a smaller one out.

The command line alone: what becomes of each tensor is in plan.py, the work in pipeline.py, the file format in files.py.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.options import Parser, run_command, whole_number
from models.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from models.config import ModelConfig
    from quantize.plan import Options, Plan
    from quantize.report import Report

OWN_TEXTS, OWN_LENGTH, OWN_BATCH = 64, 256, 16  # calibration without a file: texts, tokens of each, at a time

DESCRIPTION = """\
Writes a checkpoint whose matrices have 4 or 8 bits a weight: a folder in the Hugging Face layout, which generate.py
takes as its --model. Prints the error of every layer and what was saved; progress goes to stderr.

  python -m quantize smollm2-135m -o small
  python -m quantize path/to/model -o small --group-size 64 --method gptq --calibration text.txt
  python -m quantize path/to/model -o small --draft path/to/head --evaluate
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    usage = "python -m quantize MODEL -o OUT [options]"
    parser = Parser(prog="python -m quantize", usage=usage, description=DESCRIPTION)
    add = parser.add_argument_group("what").add_argument
    add("model", metavar="MODEL", help=(
        "smollm2-135m (the demo model), a folder in the Hugging Face layout, a .gguf file, or a hub id"))
    add("-o", "--output", required=True, metavar="OUT", help=(
        "the folder to write: new, empty, or one that this script wrote before"))
    add("--draft", metavar="HEAD", help=(
        "quantize this draft head, too, into OUT/draft, where generate.py finds it: a folder or a hub id"))
    add = parser.add_argument_group("how small").add_argument
    add("--bits", type=whole_number, default=4, metavar="4|8", help="bits a weight (default: 4)")
    add("--group-size", type=whole_number, default=32, metavar="32|64|128", help=(
        "weights that share a scale; a matrix's columns must be a multiple of it (default: 32)"))
    add("--lm-head", default="8", metavar="8|16|same", help=(
        "embedding and lm_head: int8 in groups of 32 (8, default), as they are (16), or like the others (same)"))
    add("--skip", action="append", default=[], metavar="PATTERN", help=(
        "leave tensors of this name as they are, such as 'layers.0.*' or '*.down_proj.weight'; the head's begin with "
        "draft/; may be repeated"))
    add = parser.add_argument_group("how well").add_argument
    add("--method", default="als", metavar="NAME", help=(
        "als (default: alternating least squares), rtn (nearest), hqq, or gptq, which needs texts and time"))
    add("--calibration", metavar="FILE", help=(
        "texts for gptq: plain text, or JSONL prompts with \"turns\" (default: the model makes up "
        f"{OWN_TEXTS} texts of {OWN_LENGTH} tokens, for which all of it must fit in memory)"))
    add("--evaluate", nargs="?", const="", metavar="FILE", help=(
        "print the perplexity before and after on this text (default: one that comes with the package)"))
    add("-h", "--help", action="help", help="show this help and exit")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> "Options":
    """Refuse what can be refused before a model is looked for: InputError."""
    from quantize.plan import Options
    from quantize.writer import check_out

    options = Options(args.bits, args.group_size, args.method, tuple(args.skip), args.lm_head)
    if args.calibration is not None and args.method != "gptq":
        raise InputError(f"--calibration is for --method gptq, found --method {args.method}; leave one of them out.")
    check_out(Path(args.output).expanduser().resolve())
    return options


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    options = check(args)
    import torch  # only when there is work for it

    with torch.no_grad():
        run(args, options)


def run(args: argparse.Namespace, options: "Options") -> None:
    """Quantize what was asked for, and print the report."""
    from checkpoints.checkpoint import find_checkpoint
    from fastdecode.tokenizer import load_tokenizer
    from quantize.pipeline import quantize_checkpoint
    from quantize.plan import check_skip, plan_head, plan_model

    path = find_checkpoint(args.model)
    plan = plan_model(path, options)
    head = None
    if args.draft is not None:
        head = plan_head(find_checkpoint(args.draft, also_wanted=["pytorch_model.bin"]), plan, options)
    check_skip(options.skip, [plan, head] if head else [plan])
    tokenizer = load_tokenizer(path)
    files = None if path.is_dir() else gguf_tokenizer(path)
    evaluated = None if args.evaluate is None else evaluation_ids(args.evaluate, tokenizer, plan.config)
    token_ids = calibration_ids(args, tokenizer, plan.config) if args.method == "gptq" else None

    out = Path(args.output).expanduser()
    report = _with_progress(
        lambda progress: quantize_checkpoint(
            plan, out, options, token_ids=token_ids, head=head, files=files, progress=progress
        ),
        [plan, head] if head else [plan],
    )
    print(report.text(), flush=True)
    if evaluated is not None:
        evaluate(path, out, plan, evaluated)


def _with_progress(work: Any, plans: "list[Plan]") -> "Report":
    """Run `work` with a progress bar on stderr, counted in weights."""
    from math import prod

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("quantizing", total=sum(prod(p.shape) for plan in plans for p in plan.pieces))

        def progress(name: str, n_weights: int) -> None:
            bar.update(task, advance=n_weights, description=name.removeprefix("model."))

        return work(progress)


def evaluation_ids(file: str, tokenizer: Any, config: "ModelConfig") -> list[int]:
    """Token ids of the text of --evaluate; "" is the one that is shipped."""
    from quantize.text import SHIPPED, read_text

    ids = tokenizer.encode(read_text(Path(file) if file else SHIPPED, "--evaluate"))
    if len(ids) < 2:
        raise InputError(f"--evaluate {file}: has only {len(ids)} tokens; give a longer text.")
    if max(ids) >= config.vocab_size:
        raise InputError(f"--evaluate: the text has token {max(ids)}, beyond the model's {config.vocab_size}.")
    return ids


def calibration_ids(args: argparse.Namespace, tokenizer: Any, config: "ModelConfig") -> "Tensor":
    """Rows of token ids for gptq: of the file that was given, or of texts that the model makes up."""
    from fastdecode.prompts import parse_prompts
    from quantize.text import MOST_CHARACTERS, ROW, own_texts, read_text, rows_of

    if args.calibration is not None:
        source, row = f"--calibration {args.calibration}", min(ROW, config.max_position_embeddings)
        text = read_text(Path(args.calibration), "--calibration", MOST_CHARACTERS)
        texts = [text]
        if text.lstrip().startswith("{"):
            whole = text if len(text) < MOST_CHARACTERS else text.rpartition("\n")[0]  # no line cut short
            texts = [prompt.text for prompt in parse_prompts(whole, source)]
        return rows_of([i for text in texts for i in tokenizer.encode(text)], source, row)
    from fastdecode.loading import load

    def note(sentence: str) -> None:
        print(sentence, file=sys.stderr)

    started = time.perf_counter()
    note(f"The model makes up {OWN_TEXTS} texts to calibrate on, which takes minutes on a CPU …")
    # room for a chat template, the question and the answer; compiled, since rounds are many and sampling costs most
    length = min(4 * OWN_LENGTH, config.max_position_embeddings)
    decoder = load(args.model, batch=OWN_BATCH, max_seq_len=length, draft="none", note=note)
    ids = own_texts(decoder, OWN_TEXTS, OWN_LENGTH)
    note(f"{len(ids)} tokens in {time.perf_counter() - started:.0f} s.")
    return rows_of(ids, "the model's own text", row=OWN_LENGTH)


def evaluate(path: Path, out: Path, plan: "Plan", ids: list[int]) -> None:
    """Print `perplexity before X after Y`, and on a line before it what 8-bit activations make of Y, where they are
    fast."""
    from fastdecode.loading import choose_device, choose_dtype
    from quantize.text import perplexity_before_and_after, perplexity_with_8_bit_activations

    device = choose_device("auto")
    before, after = perplexity_before_and_after(path, out, plan.config, ids, device, choose_dtype("auto", device))
    rounded = perplexity_with_8_bit_activations(out, ids, device, choose_dtype("auto", device))
    if rounded is not None:
        print(f"perplexity with 8-bit activations {rounded:.4f}")
    print(f"perplexity before {before:.4f} after {after:.4f}")


def gguf_tokenizer(path: Path) -> dict[str, bytes]:
    """The vocabulary of a GGUF file as the files of a folder, by name. Raises InputError where it has none."""
    from checkpoints.gguf import read_gguf
    from fastdecode.gguf_vocab import CONTROL, USER_DEFINED, build_byte_level_bpe, build_sentencepiece, gguf_vocab

    vocab = gguf_vocab(read_gguf(path).metadata, path)
    ids = {
        "bos_token": vocab.bos_token_id,
        "eos_token": next(iter(vocab.stop_token_ids), None),
        "unk_token": vocab.unknown_token_id,
        "pad_token": vocab.padding_token_id,
    }
    config: dict[str, Any] = {name: vocab.tokens[index] for name, index in ids.items() if index is not None}
    config |= {"add_bos_token": vocab.add_bos, "chat_template": vocab.chat_template}
    if vocab.model == "gpt2":
        files = {"tokenizer.json": build_byte_level_bpe(vocab, path).to_str(pretty=True).encode()}
    else:
        config["legacy"] = True  # the space before every part between special tokens
        config["added_tokens_decoder"] = {
            str(index): {"content": token, "special": type_ == CONTROL}
            for index, (token, type_) in enumerate(zip(vocab.tokens, vocab.types, strict=True))
            if type_ in (CONTROL, USER_DEFINED) and token
        }
        files = {"tokenizer.model": build_sentencepiece(vocab)}
    return files | {"tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode()}


if __name__ == "__main__":
    sys.exit(run_command(main))
