"""What `python -m fastdecode.train` does: data, target, head, training, and the files that come of it."""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from checkpoints.checkpoint import find_checkpoint, read_config
from checkpoints.fingerprint import target_fingerprint
from fastdecode.loading import choose_device, choose_dtype, load
from fastdecode.train.checkpoint import STATE
from fastdecode.train.curves import draw
from fastdecode.train.data import DataOptions, answer_file, make_conversations, read_beginnings
from fastdecode.train.initial import draft_vocabulary, feature_layers_from, head_config, new_head, warm_head
from fastdecode.train.kept import KeptFeatures
from fastdecode.train.loop import Trainer
from fastdecode.train.options import TrainOptions
from fastdecode.train.output import write_head
from fastdecode.train.parallel import Group, join_group, leave_group, local_device
from fastdecode.train.progress import data_bar, training_bar
from fastdecode.train.store import Conversation, ConversationStore
from models.eagle import DraftHead
from models.errors import InputError
from models.transformer import Transformer
from quantize.network import load_network

CONVERSATIONS = 20_000


def train(args: argparse.Namespace) -> None:
    """Run the command line's request; progress and notes to stderr, figures at the end to stdout.

    Raises InputError for bad input, before anything heavy is done where that can be known.
    """
    options = options_of(args)
    started = time.monotonic()
    out = Path(args.output).expanduser()
    folder = out / "training"
    check_out(out, folder, args.resume)
    device = choose_device(local_device(args.device))
    dtype = torch.float32 if args.no_autocast else choose_dtype(args.dtype, device)
    options = options_of(args, autocast=not args.no_autocast and dtype == torch.bfloat16)
    path = find_checkpoint(args.target)
    config = read_config(path)
    if options.kind == "eagle3":
        head_config(config, options, min(options.draft_vocab or config.vocab_size, config.vocab_size))
    init = None if args.init is None else find_checkpoint(args.init, also_wanted=["pytorch_model.bin"])

    group = join_group(device)
    note = noter(group)
    try:
        store = conversations(args, path, folder / "data", group, note)
        target = load_network(path, config, device, dtype, quantized=False, note=note).requires_grad_(False)
        chosen = [*store.conversations[: args.conversations], *others(args.also, store.fingerprint)]
        head, extra = first_head(target, init, chosen, options, note)
        kept = kept_features(args, head, target, store.fingerprint, chosen, folder / "features", group, note)
        ce_ids = frequent_ids(target, chosen, options)
        trainer = Trainer(head, target, chosen, options, folder, group, note, kept, ce_ids)
        if args.resume and trainer.resume():
            note(f"Going on from step {trainer.step} of {trainer.n_steps}, after {trainer.seconds / 60:.0f} minutes.")
        note(f"{len(trainer.indices)} conversations to train on in {trainer.n_steps} steps; "
             f"{sum(map(len, trainer.held_out))} held out.")
        resumed_at = trainer.tokens, trainer.seconds
        with training_bar(trainer, quiet=group.rank > 0) as progress, stop_signals() as stop:
            finished = trainer.run(progress, stop)
        if not finished:
            raise KeyboardInterrupt
        if group.rank == 0:
            extra["target_fingerprint"] = store.fingerprint
            write_head(head, out, options.layout, extra, verifier=args.target)
            if (why_not := draw(folder / "curve.png", trainer.rows)) is not None:
                note(why_not)
            report(trainer, resumed_at, started)
    finally:
        leave_group(group)


def options_of(args: argparse.Namespace, autocast: bool = True) -> TrainOptions:
    """The options of the command line, checked."""
    names = (
        "kind", "draft_vocab", "ttt_steps", "epochs", "hours", "layout", "batch_tokens", "accumulate", "max_length",
        "lr", "optimizer", "warmup", "seed", "eval_share", "eval_steps", "save_minutes", "fc_norm", "norm_output",
    )  # fmt: skip
    if args.conversations is not None and args.conversations < 2:
        raise InputError(f"--conversations should be 2 or more, found {args.conversations}.")
    data_options(args)
    if args.batch < 1:
        raise InputError(f"--batch should be 1 or more, found {args.batch}.")
    if args.keep_features not in (None, "auto"):
        positive(args.keep_features)
    given: dict[str, Any] = {name: getattr(args, name) for name in names}
    return TrainOptions(**given, autocast=autocast, feature_layers=feature_layers_from(args.layers))


def data_options(args: argparse.Namespace) -> DataOptions:
    """How answers are made, checked."""
    if args.answer_tokens < 1:
        raise InputError(f"--answer-tokens should be 1 or more, found {args.answer_tokens}.")
    if not 0 <= args.greedy_share <= 1:
        raise InputError(f"--greedy-share should be from 0 to 1, found {args.greedy_share}.")
    if not 0 < args.answer_temperature < 100:
        raise InputError(f"--answer-temperature should be above 0, found {args.answer_temperature}.")
    if args.keep_answers and args.data == "self":
        raise InputError("--keep-answers is for the answers of a file; give --data FILE.")
    if args.beginnings is not None and args.data != "self":
        raise InputError("--beginnings is for prompts that the target makes up; leave --data out.")
    return DataOptions(
        beginnings=("",) if args.beginnings is None else read_beginnings(Path(args.beginnings).expanduser()),
        answer_tokens=args.answer_tokens,
        greedy_share=args.greedy_share,
        temperature=args.answer_temperature,
        seed=args.seed,
        keep_answers=args.keep_answers,
    )


def others(folders: list[str], fingerprint: str) -> list[Conversation]:
    """The conversations of other runs, as --also names them."""
    found: list[Conversation] = []
    for folder in map(Path, folders):
        stored = ConversationStore(folder, fingerprint).conversations if folder.is_dir() else []
        if not stored:
            raise InputError(f"--also {folder}: holds no conversations; give the training/data of another run.")
        found += stored
    return found


def check_out(out: Path, folder: Path, resume: bool) -> None:
    """Raises InputError where writing to `out` would lose something, or cannot be done."""
    if not resume and (folder / STATE).exists():
        raise InputError(f"{folder}: holds a run already; go on with it with --resume, or give another -o.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"-o {out}: cannot be written ({error.strerror or error}).") from error


def conversations(
    args: argparse.Namespace, path: Path, folder: Path, group: Group, note: Callable[[str], None]
) -> ConversationStore:
    """The store in `folder`, filled by the first process up to what was asked for; `path`: the target."""
    config = read_config(path)
    fingerprint = target_fingerprint(path, config)
    if group.rank == 0:
        store = ConversationStore(folder, fingerprint)
        make_data(args, min(args.max_length, config.max_position_embeddings), store, note)
    group.wait()
    return store if group.rank == 0 else ConversationStore(folder, fingerprint)


def make_data(
    args: argparse.Namespace, max_seq_len: int, store: ConversationStore, note: Callable[[str], None]
) -> None:
    """Let the target answer until the store has as many conversations as were asked for."""
    own = args.data == "self"
    wanted = args.conversations or (CONVERSATIONS if own else None)
    if wanted is not None and len(store) >= wanted:
        return
    options = data_options(args)
    decoder = load(
        args.target,
        draft="none",
        batch=args.batch,
        dtype="float32" if args.no_autocast else args.dtype,
        device=local_device(args.device),
        max_seq_len=max_seq_len,
        note=note,
    )
    started, tokens = time.monotonic(), 0
    with data_bar(wanted, len(store)) as advance:
        def progress(n_conversations: int, n_tokens: int) -> None:
            nonlocal tokens
            tokens += n_tokens
            advance(n_conversations, n_tokens)

        if own:
            make_conversations(decoder, store, wanted, options, progress)
        else:
            answer_file(decoder, store, Path(args.data).expanduser(), wanted, options, progress)
    note(f"{len(store)} conversations, {store.n_answer_tokens:,} answer tokens; "
         f"{tokens / max(time.monotonic() - started, 1e-9):,.0f} of them a second.")


def first_head(
    target: Transformer,
    init: Path | None,
    chosen: list[Conversation],
    options: TrainOptions,
    note: Callable[[str], None],
) -> tuple[DraftHead, dict[str, Any]]:
    """The head to begin with, and what its config.json should say of it."""
    if init is not None:
        return warm_head(init, target, options.kind), {}
    config = target.config
    if options.kind == "eagle1" or not 0 < options.draft_vocab < config.vocab_size:
        return new_head(head_config(config, options, config.vocab_size), target, None, options.seed), {}
    drafted, coverage = draft_vocabulary(chosen, options.draft_vocab, config.vocab_size)
    note(f"The {len(drafted)} drafted ids cover {coverage:.2%} of the answers' tokens.")
    head = new_head(head_config(config, options, len(drafted)), target, drafted, options.seed)
    return head, {"draft_vocab_coverage": round(coverage, 5)}


def frequent_ids(target: Transformer, chosen: list[Conversation], options: TrainOptions) -> torch.Tensor | None:
    """EAGLE-1's logits cost as much as the rest of its training, so they are learnt among the frequent ids only."""
    vocab_size = target.config.vocab_size
    if options.kind != "eagle1" or not 0 < options.draft_vocab < vocab_size:
        return None
    return draft_vocabulary(chosen, options.draft_vocab, vocab_size)[0].to(target.norm.weight.device)


def kept_features(
    args: argparse.Namespace,
    head: DraftHead,
    target: Transformer,
    fingerprint: str,
    chosen: list[Conversation],
    folder: Path,
    group: Group,
    note: Callable[[str], None],
) -> KeptFeatures | None:
    """What --keep-features asks for."""
    if args.keep_features is None:
        return None
    limit = None if args.keep_features == "auto" else positive(args.keep_features)
    layers = head.feature_layers
    return KeptFeatures(folder, target, fingerprint, chosen, args.max_length, layers, limit, group, note)


def positive(text: str) -> float:
    """The GB of --keep-features."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise InputError(f"--keep-features should be a number of GB above 0, found {text!r}.")
    return value


def report(trainer: Trainer, resumed_at: tuple[int, float], started: float) -> None:
    """Throughput, and how the head did on what was held out, to stdout."""
    tokens, seconds = trainer.tokens - resumed_at[0], trainer.seconds - resumed_at[1]
    rate = tokens / max(seconds, 1e-9)
    print(f"{trainer.step} steps, {trainer.tokens:,} tokens, {trainer.seconds / 3600:.2f} h of training "
          f"({(time.monotonic() - started) / 3600:.2f} h in all this time).")
    if tokens:
        print(f"{rate:,.0f} tokens/s, {1e6 / rate:,.1f} s a million tokens.")
    if trainer.score is None:
        return
    table = Table("depth", *map(str, range(len(trainer.score.accuracy))), "expected tau")
    table.add_row("accuracy", *(f"{value:.3f}" for value in trainer.score.accuracy), f"{trainer.score.tau:.2f}")
    Console().print(table)


def noter(group: Group) -> Callable[[str], None]:
    """Sentences for the user to stderr, of the first process alone."""

    def note(sentence: str) -> None:
        if group.rank == 0:
            print(sentence, file=sys.stderr, flush=True)

    return note


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Within it, Ctrl-C and SIGTERM only make the function that it gives answer True; a second Ctrl-C interrupts."""
    caught: list[int] = []

    def catch(number: int, frame: Any) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
