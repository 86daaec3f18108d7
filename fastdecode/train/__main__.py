"""`python -m fastdecode.train`: a target in, a draft head out. The command line alone; the work is in command.py."""

import argparse
import sys
from collections.abc import Sequence

from fastdecode.options import Parser, run_command, whole_number

DESCRIPTION = """\
Trains an EAGLE head that drafts for a target: the target answers prompts, and the head learns to say what it says.
Writes OUT/config.json and OUT/model.safetensors, which generate.py takes as --draft OUT, and keeps data, state and
curves in OUT/training. A run that was killed goes on with --resume.

  python -m fastdecode.train --target smollm2-135m -o head
  python -m fastdecode.train --target path/to/model -o head --data sharegpt.jsonl --kind eagle1 --hours 8
  torchrun --nproc-per-node 4 -m fastdecode.train --target path/to/model -o head
"""


def number(text: str) -> float:
    """A float from the command line; argparse names the option when it is none."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"should be a number, found {text!r}") from None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    usage = "python -m fastdecode.train --target MODEL -o OUT [options]"
    parser = Parser(prog="python -m fastdecode.train", usage=usage, description=DESCRIPTION)
    add = parser.add_argument_group("what").add_argument
    add("--target", required=True, metavar="MODEL", help=(
        "the model to draft for: smollm2-135m, a folder in the Hugging Face layout, a .gguf file, or a hub id"))
    add("-o", "--output", required=True, metavar="OUT", help="the folder to write")
    add("--kind", default="eagle3", metavar="KIND", help="eagle3 (default) or eagle1, which serves EAGLE-2 as well")
    add("--layout", default="safeai", metavar="NAME", help="safeai (default) or speculators (vLLM's; EAGLE-3 only)")
    add("--init", metavar="HEAD", help="begin with this head, of either layout: a folder or a hub id (default: random)")
    add("--resume", action="store_true", help="go on from the state in OUT, if there is one")
    add("-h", "--help", action="help", help="show this help and exit")

    add = parser.add_argument_group("data").add_argument
    add("--data", default="self", metavar="FILE", help=(
        'self (default: the target makes up prompts and answers), or JSONL with {"turns": [...]}, {"prompt": ...} or '
        'ShareGPT\'s {"conversations": [...]}, whose answers the target makes anew'))
    add("--beginnings", metavar="FILE", help=(
        "JSONL of prompts that the target is to finish by itself, instead of making up whole ones"))
    add("--conversations", type=whole_number, metavar="N", help="how many (default: 20000, or all of FILE)")
    add("--batch", type=whole_number, default=16, metavar="N", help="texts decoded at a time while answers are made "
        "(default: 16)")
    add("--answer-tokens", type=whole_number, default=256, metavar="N", help=(
        "tokens of an answer at most (default: 256)"))
    add("--greedy-share", type=number, default=0.6, metavar="X", help=(
        "share of the answers that are greedy, in groups; the others are sampled (default: 0.6)"))
    add("--answer-temperature", type=number, default=0.7, metavar="T", help="of sampled answers (default: 0.7)")
    add("--keep-answers", action="store_true", help=(
        "keep the answers of FILE, though another model may have said them"))
    add("--also", nargs="+", default=[], metavar="DIR", help=(
        "train on the conversations of other runs for this target as well: their OUT/training/data"))
    add("--max-length", type=whole_number, default=2048, metavar="N", help=(
        "tokens of a conversation; what follows is cut off (default: 2048)"))
    add("--eval-share", type=number, default=0.02, metavar="X", help=(
        "share of the conversations that is never trained on and measured instead (default: 0.02)"))
    add("--keep-features", nargs="?", const="auto", metavar="GB", help=(
        "keep the target's states in OUT/training/features, at most GB of them (without GB: half of the free disk), so "
        "that later epochs need not compute them again; on a CPU that is half the work"))

    add = parser.add_argument_group("the head").add_argument
    add("--draft-vocab", type=whole_number, default=8192, metavar="N", help=(
        "ids that an EAGLE-3 head drafts, the most frequent ones in answers (default: 8192); 0: all. An EAGLE-1 head "
        "drafts all, and learns to tell these apart"))
    add("--layers", metavar="A,B,C", help=(
        "layers whose entering states an EAGLE-3 head reads (default: 2, the middle, the third from the end)"))
    add("--fc-norm", action="store_true", help="norm each of those states (EAGLE-3.1)")
    add("--norm-output", action="store_true", help="feed back the normed state (EAGLE-3.1)")

    add = parser.add_argument_group("how long").add_argument
    add("--epochs", type=whole_number, default=2, metavar="N", help="passes over the data (default: 2)")
    add("--hours", type=number, metavar="X", help=(
        "train no longer than this, resumed runs together; the learning rate ends with whichever ends first "
        "(default: no bound)"))
    add("--save-minutes", type=number, default=10.0, metavar="X", help="save the state this often (default: 10)")

    add = parser.add_argument_group("how").add_argument
    add("--ttt-steps", type=whole_number, default=7, metavar="N", help=(
        "depths that an EAGLE-3 head is unrolled to (default: 7)"))
    add("--lr", type=number, default=1e-4, metavar="X", help=(
        "learning rate (default: 1e-4, good for targets of 1B and more; small ones, about 100M, learn faster with "
        "5e-4, tiny ones with 2e-3)"))
    add("--optimizer", default="adamw", metavar="NAME", help=(
        "adamw (default), or muon for the matrices inside the head and adamw for the rest"))
    add("--warmup", type=whole_number, default=100, metavar="N", help=(
        "steps over which the rate rises, at most a tenth of all (default: 100)"))
    add("--batch-tokens", type=whole_number, default=4096, metavar="N", help=(
        "tokens of a batch in each process, padding included (default: 4096)"))
    add("--accumulate", type=whole_number, default=1, metavar="N", help="batches of each process per step (default: 1)")
    add("--eval-steps", type=whole_number, default=500, metavar="N", help="measure after so many steps (default: 500)")
    add("--seed", type=whole_number, default=0, metavar="N", help="of data, first weights and order (default: 0)")
    add("--device", default="auto", metavar="WHERE", help="auto (default), cpu, cuda, cuda:N")
    add("--dtype", default="auto", metavar="TYPE", help=(
        "of the target: auto (default: bfloat16 where the hardware has it), bfloat16, float32; the head's weights are "
        "float32 and saved as bfloat16"))
    add("--no-autocast", action="store_true", help="compute in float32 throughout, target included")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    from fastdecode.train.command import train  # torch is imported only when there is work for it

    train(args)


if __name__ == "__main__":
    sys.exit(run_command(main))
