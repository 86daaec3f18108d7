"""Whole tiny checkpoints: random weights, a real tokenizer, a chat template."""

from pathlib import Path

import tokenizer_fixtures
from tiny import reference_model, save_checkpoint

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PADDING_ROWS = 7  # embedding rows beyond the tokenizer's ids


def tiny_checkpoint(folder: Path, family: str = "llama", **changes):
    """Write a checkpoint to `folder`; returns the reference model. Its eos token never ends a text unless asked to."""
    size = tokenizer_fixtures.byte_level_tokenizer().get_vocab_size() + PADDING_ROWS
    settings = {"vocab_size": size, "max_position_embeddings": 2048, "eos_token_id": None, **changes}
    reference = reference_model(family, **settings)
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(reference, folder)
    tokenizer_fixtures.byte_level_folder(folder, chat_template=TEMPLATE)
    return reference
