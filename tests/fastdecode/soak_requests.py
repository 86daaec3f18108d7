"""Two thousand requests, and decoders to serve them: in the test's own process, and as a script in a fresh one.

As a script: `python soak_requests.py MODEL HEAD N [N ...]` prints the answers of those requests as one JSON list.
"""

import json
import random
import sys
from pathlib import Path

import torch

WORDS = ("the", "sky", "is", "blue", "light", "of", "short", "waves", "scatters", "more", "than", "red", "one")
LIMIT = 320
DRAFTS = {"none": "auto", "ngram": "chain:4", "head": "chain:3"}  # and their trees


def requests(count: int) -> list[dict]:
    """Requests of mixed drafts, lengths, samplings, penalties and stops; the same ones every time."""
    rng = random.Random(0)
    made = []
    for number in range(count):
        prompt = " ".join(rng.choices(WORDS, k=rng.choice((1, 3, 10, 40))))
        options = {"max_new_tokens": rng.choice((1, 3, 7, 12)), "raw": True, "first_index": number}
        if rng.random() < 0.5:
            options |= {"temperature": rng.choice((0.5, 1.0, 1.4)), "seed": rng.randrange(1000)}
            options |= rng.choice(({}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}))
        if rng.random() < 0.3:
            options |= rng.choice(({"repetition_penalty": 1.3}, {"presence_penalty": 0.4}))
        if rng.random() < 0.2:
            options["stop"] = rng.choice((["e"], [" a", "o"]))
        prompts = [prompt] if rng.random() < 0.9 else [prompt, prompt + " and", "so " + prompt, prompt]
        made.append({"draft": rng.choice(tuple(DRAFTS)), "prompts": prompts, "options": options})
    return made


def decoders(model: str, head: str, compile: bool = False) -> dict:
    """A decoder for each of DRAFTS."""
    from fastdecode import load

    fixed = {"dtype": "float32", "device": "cpu", "batch": 2, "max_seq_len": LIMIT, "compile_cache": False}
    return {
        name: load(model, draft=head if name == "head" else name, tree=tree, compile=compile, **fixed)
        for name, tree in DRAFTS.items()
    }


def answers(request: dict, served_by: dict) -> list:
    """What a request is answered: tokens, text and why each answer ended."""
    results = served_by[request["draft"]].generate(request["prompts"], **request["options"])
    return [[result.token_ids, result.text, result.finish_reason] for result in results]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    torch.set_num_threads(1)
    model, head, *numbers = sys.argv[1:]
    wanted, served_by = requests(max(map(int, numbers)) + 1), decoders(model, head)
    print(json.dumps([answers(wanted[int(number)], served_by) for number in numbers]))
