"""Small tokenizers with the special tokens of public ones: SentencePiece's, and byte-level BPE."""

import functools
import io

import sentencepiece
from tokenizer_fixtures import SENTENCES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

MARKS = "[INST] <<SYS>> <</SYS>> [/INST] USER: ASSISTANT: <|user|> <|system|>"  # plain text to these tokenizers


@functools.cache
def sentencepiece_model(*control: str) -> bytes:
    """unk/bos/eos 0/1/2, then `control` tokens, byte fallback, an artificial space before the text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*SENTENCES, MARKS] * 5),
        model_writer=model,
        model_type="bpe",
        vocab_size=500,
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        control_symbols=list(control),
        minloglevel=2,
    )
    return model.getvalue()


@functools.cache
def byte_level_json(
    special: tuple[str, ...], texts: tuple[str, ...] = (), bos: str | None = None, special_first: bool = False
) -> str:
    """tokenizer.json of a byte-level BPE. `special`: tokens that are no text, `texts`: added ones that are; both after
    the vocabulary, or before it. `bos`: the token that its post-processor puts before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in special]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=added if special_first else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 5, trainer)
    tokenizer.add_special_tokens(added)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in texts])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer.to_str()
