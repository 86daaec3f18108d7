"""`--suite gpu`, part exact: chains of drafts say what plain decoding says, bit for bit, in every precision."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkpoints.download import DEMO, cache_folder
from fastdecode.benchmark_gpu_models import KnownDrafter, Sizes, TextLoop, prompt_ids, random_network
from fastdecode.benchmark_gpu_rounds import PRECISIONS, replays_without_sync
from fastdecode.drafters.ngram import NgramDrafter
from fastdecode.drafters.root import RootOnly
from fastdecode.loading import load
from fastdecode.prompts import SHIPPED, read_prompts
from models.config import ModelConfig
from models.transformer import Transformer

Entry = tuple[str, Callable[[], dict[str, Any]]]
CHAINS = (1, 3, 5, 7, 15)
PROMPT_LENGTHS = (1, 7, 33, 200)
DEMO_CHAINS = ("ngram chain:3", "ngram chain:7", "itself chain:5")
DEMO_PROMPTS = 10
LONGEST = 512  # tokens of a text


class Plain:
    """A tiny random network and what plain decoding says with it, made once for each precision."""

    def __init__(self, device: torch.device, sizes: Sizes):
        self.device, self.sizes = device, sizes
        self.known: dict[str, tuple[Transformer, list[list[int]], list[list[int]], bool | None]] = {}

    def get(self, precision: str) -> tuple[Transformer, list[list[int]], list[list[int]], bool | None]:
        """The network, prompts, plain decoding's answers, and whether its rounds were replayed without a
        synchronization (None where they are not captured)."""
        if precision not in self.known:
            torch.manual_seed(1)  # the same weights when an interrupted run goes on
            config = ModelConfig.from_hf(self.sizes.tiny, "tiny")
            network = random_network(config, precision, self.device, torch.bfloat16)
            prompts = [prompt_ids(n, config.vocab_size, seed=n) for n in PROMPT_LENGTHS]
            loop = TextLoop(network, RootOnly(), LONGEST, self.sizes.compile)
            answers = [loop.decode(ids, self.sizes.new_tokens) for ids in prompts]
            free_of_sync = replays_without_sync(loop, loop.runner.bucket_for(1))
            self.known = {precision: (network, prompts, answers, free_of_sync)}
        return self.known[precision]


def exact_entries(device: torch.device, sizes: Sizes) -> Iterator[Entry]:
    """A comparison for each precision and chain on a tiny random network, and for the demo model where its file is in
    the cache: nothing is fetched."""
    plain = Plain(device, sizes)
    for precision in PRECISIONS:
        for n in CHAINS:
            yield f"tiny {precision} chain:{n}", partial(compare_tiny, plain, precision, n)
    demo = cache_folder() / DEMO.name
    if demo.is_file():
        for quantize in ("auto", "none"):
            for chain in DEMO_CHAINS:
                yield f"demo {quantize} {chain}", partial(compare_demo, demo, device, sizes, quantize, chain)


def compare_tiny(plain: Plain, precision: str, n: int) -> dict[str, Any]:
    """Chains of `n` by lookup, and of what plain decoding said with a fault here and there: `matched` of `answers`, and
    `tau`, since a chain of which nothing is accepted would prove little."""
    network, prompts, answers, free_of_sync = plain.get(precision)
    sizes, vocab = plain.sizes, network.config.vocab_size
    found: dict[str, Any] = {"matched": 0, "answers": 0, "tau": {}, "plain_replays_without_sync": free_of_sync}
    texts = [torch.tensor(ids + answer) for ids, answer in zip(prompts, answers, strict=True)]
    answer = torch.zeros(max(map(len, texts)), dtype=torch.int64, device=plain.device)
    for name, drafter in (("lookup", NgramDrafter(n)), ("known", KnownDrafter(n, answer, vocab))):
        loop = TextLoop(network, drafter, LONGEST, sizes.compile)
        rounds, step = 0, loop.runner.step

        def counted(program: str, bucket: int, step=step) -> Any:
            nonlocal rounds
            rounds += 1
            return step(program, bucket)

        loop.runner.step = counted
        for ids, expected, text in zip(prompts, answers, texts, strict=True):
            answer[: len(text)] = text
            found["matched"] += loop.decode(ids, sizes.new_tokens) == expected
            found["answers"] += 1
        found["tau"][name] = len(answers) * sizes.new_tokens / rounds
    found["drafted_replays_without_sync"] = replays_without_sync(loop, loop.runner.bucket_for(1))
    return found


def compare_demo(file: Path, device: torch.device, sizes: Sizes, quantize: str, chain: str) -> dict[str, Any]:
    """The demo model's greedy answers to shipped prompts, plain and with a chain: `matched` of `answers`, and `tau`."""
    draft, tree = chain.split()
    options = {"device": str(device), "quantize": quantize, "max_seq_len": 2 * LONGEST, "compile": sizes.compile}
    lines = [line.text for line in read_prompts(str(SHIPPED))[:DEMO_PROMPTS]]
    draft = str(file) if draft == "itself" else draft
    answers = []
    for more in ({"draft": "none"}, {"draft": draft, "tree": tree}):
        decoder = load(str(file), **options, **more)
        answers.append(decoder.generate(lines, max_new_tokens=sizes.new_tokens))
    plain, drafted = answers
    pairs = zip(plain, drafted, strict=True)
    matched = sum((a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason) for a, b in pairs)
    rounds = sum(result.stats["rounds"] for result in drafted)
    tau = sum(result.stats["tau"] * result.stats["rounds"] for result in drafted) / rounds
    return {"matched": matched, "answers": len(lines), "tau": tau}
