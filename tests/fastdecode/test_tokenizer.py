"""Text to ids and back: every kind of checkpoint, every kind of text, one BOS, faults that name the file."""

from pathlib import Path

import pytest
import sentencepiece
import tokenizer_fixtures as make
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from fastdecode.gguf_vocab import SPLITTERS, build_byte_level_bpe, gguf_vocab
from fastdecode.tokenizer import load_tokenizer
from models.errors import InputError

BACKENDS = ("tokenizer.json", "tokenizer.model", "gguf gpt2", "gguf llama")


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    sources = {
        "tokenizer.json": lambda: make.byte_level_folder(folder),
        "tokenizer.model": lambda: make.sentencepiece_folder(folder),
        "gguf gpt2": lambda: make.write_gguf(folder / "model.gguf", **make.byte_level_fields()),
        "gguf llama": lambda: make.write_gguf(folder / "model.gguf", **make.sentencepiece_fields()),
    }
    return load_tokenizer(sources[request.param]())


@pytest.mark.parametrize("text", make.TEXTS)
def test_every_text_comes_back_as_it_was(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", make.TEXTS)
def test_byte_level_ids_are_those_of_the_library(tmp_path, text):
    folder = make.byte_level_folder(tmp_path)
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = load_tokenizer(folder).encode(text)
    assert ids == reference.encode(text).ids
    assert load_tokenizer(folder).decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("text", make.TEXTS)
def test_sentencepiece_ids_are_bos_and_those_of_the_library(tmp_path, text):
    reference = sentencepiece.SentencePieceProcessor(model_proto=make.sentencepiece_model())
    tokenizer = load_tokenizer(make.sentencepiece_folder(tmp_path))
    assert tokenizer.encode(text) == [1] + reference.Encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == reference.Decode(reference.Encode(text))


@pytest.mark.parametrize("kind", ["gpt-2", "smollm"])
def test_a_gguf_of_a_byte_level_tokenizer_gives_its_ids(tmp_path, kind):
    source = make.byte_level_tokenizer(kind)
    tokenizer = load_tokenizer(make.write_gguf(tmp_path / "model.gguf", **make.byte_level_fields(kind)))
    for text in [*make.TEXTS, *make.SENTENCES, "<|im_start|>user\nhi<|im_end|>\n<think> so"]:
        assert tokenizer.encode(text) == source.encode(text).ids, text


def test_a_gguf_of_a_sentencepiece_model_gives_its_ids(tmp_path):
    tokenizer = load_tokenizer(make.write_gguf(tmp_path / "model.gguf", **make.sentencepiece_fields()))
    source = load_tokenizer(make.sentencepiece_folder(tmp_path, legacy=True))
    for text in [*make.TEXTS, *make.SENTENCES, "[INST] hello [/INST] there</s>[INST]again <unk> x"]:
        assert tokenizer.encode(text) == source.encode(text), text


@pytest.mark.parametrize("text", ["<s>[INST] hello [/INST] there</s>[INST]go", "hello</s>", "</s>hello", "a <unk> b"])
def test_sentencepiece_chats_are_split_at_special_tokens_as_transformers_does(tmp_path, text):
    pytest.importorskip("google.protobuf", reason="transformers reads SentencePiece models with protobuf")
    transformers = pytest.importorskip("transformers")
    folder = make.sentencepiece_folder(tmp_path, legacy=False, unk_token="<unk>", tokenizer_class="LlamaTokenizer")
    reference = transformers.LlamaTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)
    ids = load_tokenizer(folder).encode(text)
    assert ids == (reference if text.startswith("<s>") else [1] + reference)


def test_the_artificial_space_comes_first_only_or_before_every_part_where_the_checkpoint_says_so(tmp_path):
    pieces = sentencepiece.SentencePieceProcessor(model_proto=make.sentencepiece_model())
    (hello,), bare = pieces.Encode("hello"), pieces.PieceToId("▁hello")
    assert hello == bare
    once = load_tokenizer(make.sentencepiece_folder(tmp_path)).encode("hello</s>hello")
    always = load_tokenizer(make.sentencepiece_folder(tmp_path, legacy=True)).encode("hello</s>hello")
    assert always == [1, hello, 2, hello]
    assert once[:3] == [1, hello, 2] and hello not in once[3:]


def test_tokens_that_a_checkpoint_adds_to_sentencepiece_are_whole_and_take_their_white_space(tmp_path):
    size = sentencepiece.SentencePieceProcessor(model_proto=make.sentencepiece_model()).GetPieceSize()
    added = {
        str(size + 1): {"content": "<|end|>", "special": True, "rstrip": True},
        str(size + 2): {"content": "<|end|><|call|>", "special": False},
    }
    folder = make.sentencepiece_folder(tmp_path, added_tokens_decoder=added)
    make.write_json(folder / "added_tokens.json", {"<tool>": size})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == size + 3
    assert tokenizer.encode("<|end|> \n<tool><|end|><|call|>") == [1, size + 1, size, size + 2]
    assert tokenizer.decode([size + 1, size, size + 2]) == "<tool><|end|><|call|>"


def test_special_tokens_in_a_text_become_their_ids_and_are_left_out_of_the_text(tokenizer):
    end = tokenizer.stop_token_ids[0]
    name = "</s>" if tokenizer.prefix_space else "<|im_end|>"
    ids = tokenizer.encode(f"hello{name}{name}")
    assert ids[-2:] == [end, end]
    assert tokenizer.decode(ids) == "hello"


def test_added_tokens_that_are_not_special_are_text(tmp_path):
    tokenizer = load_tokenizer(make.byte_level_folder(tmp_path))
    ids = tokenizer.encode("<think>ok")
    assert ids[0] == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "<think>ok"


def test_empty_and_special_only_prompts(tokenizer):
    first = [1] if tokenizer.prefix_space else []
    assert tokenizer.encode("") == first
    bos = "<s>" if tokenizer.prefix_space else "<|im_start|>"
    assert tokenizer.encode(bos) == [1]
    assert tokenizer.decode([1]) == ""


def test_bos_is_added_once_and_only_where_the_files_say_so(tmp_path):
    def leading(name, **config):
        return load_tokenizer(make.byte_level_folder(tmp_path / name, bos_tokenizer, **config)).encode("hello")[:2]

    bos_tokenizer = make.byte_level_tokenizer()
    hello = bos_tokenizer.encode("hello").ids[0]
    assert leading("plain") == bos_tokenizer.encode("hello").ids[:2]
    assert leading("config", add_bos_token=True) == [1, hello]
    bos_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    assert leading("processor") == [1, hello]
    assert leading("overruled", add_bos_token=False) == bos_tokenizer.encode("hello", add_special_tokens=False).ids[:2]

    tokenizer = load_tokenizer(tmp_path / "processor")
    assert tokenizer.encode("hello")[-1] != 2, "a prompt must not be ended"
    assert tokenizer.encode("<|im_start|>hello") == tokenizer.encode("hello")


def test_settings_of_the_training_do_not_cut_or_pad_a_prompt(tmp_path):
    tokenizer = make.byte_level_tokenizer()
    text = make.SENTENCES[0]
    ids = tokenizer.encode(text).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=512)
    assert load_tokenizer(make.byte_level_folder(tmp_path, tokenizer)).encode(text) == ids


def test_the_names_of_special_tokens_are_read_from_either_file(tmp_path):
    folder = make.byte_level_folder(tmp_path)
    make.write_json(folder / "tokenizer_config.json", {"eos_token": {"content": "<|endoftext|>"}, "bos_token": None})
    make.write_json(folder / "special_tokens_map.json", {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.stop_token_ids) == (None, (0,))
    (folder / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.stop_token_ids) == (1, (2,))


def test_padding_rows_are_no_part_of_the_vocabulary(tmp_path):
    fields = make.byte_level_fields()
    size = len(fields["tokens"])
    fields["tokens"] += [f"[PAD{index}]" for index in range(5)]
    fields["token_type"] += [5] * 5
    tokenizer = load_tokenizer(make.write_gguf(tmp_path / "model.gguf", **fields))
    assert tokenizer.vocab_size == size
    assert load_tokenizer(make.byte_level_folder(tmp_path)).vocab_size == size
    for token_id in (size, -1):
        with pytest.raises(InputError, match=f"{token_id} is outside"):
            tokenizer.decode([token_id])


def test_a_gguf_names_every_token_that_ends_an_answer(tmp_path):
    fields = make.byte_level_fields() | {"eot_token_id": 0, "eom_token_id": 2}
    assert load_tokenizer(make.write_gguf(tmp_path / "model.gguf", **fields)).stop_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "It's 12345!\n\n  x", ["It", "'s", " 12345", "!", "\n\n ", " x"]),
        ("smollm", " 123 it's", [" ", "1", "2", "3", " it", "'s"]),
        ("llama-bpe", "IT'S 12345678\n\n  x(y", ["IT", "'S", " ", "123", "456", "78", "\n\n", " ", " x", "(y"]),
        ("qwen2", "it'll 123\n x\r\n", ["it", "'ll", " ", "1", "2", "3", "\n", " x", "\r\n"]),
        ("tekken", "camelCaseWORD don't 12/\n", ["camel", "Case", "WORD", " don", "'t", " ", "1", "2", "/\n"]),
        ("gpt-4o", "camelCase don't 1234", ["camel", "Case", " don't", " ", "123", "4"]),
        ("deepseek-v3", "漢字 ok 1234", ["漢字", " ok", " ", "123", "4"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    ],
)
def test_splitters_cut_as_their_names_say(pre, text, pieces):
    metadata = {f"tokenizer.ggml.{name}": value for name, value in (make.byte_level_fields() | {"pre": pre}).items()}
    tokenizer = build_byte_level_bpe(gguf_vocab(metadata, Path("model.gguf")), Path("model.gguf"))
    cut = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces


@pytest.mark.parametrize("pre", sorted(SPLITTERS))
def test_no_splitter_loses_text(pre, tmp_path):
    tokenizer = load_tokenizer(make.write_gguf(tmp_path / "model.gguf", **(make.byte_level_fields() | {"pre": pre})))
    for text in make.TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match="neither tokenizer.json nor tokenizer.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"])
def test_a_tokenizer_file_that_cannot_be_opened_is_refused_naming_the_folder(tmp_path, monkeypatch, name):
    make.sentencepiece_folder(tmp_path)
    (tmp_path / name).touch()
    for method in ("open", "read_text", "read_bytes"):
        opened = getattr(Path, method)

        def refused(path, *args, opened=opened, **options):  # as for another user's file; root may open any
            if path.name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return opened(path, *args, **options)

        monkeypatch.setattr(Path, method, refused)
    with pytest.raises(InputError, match="Permission denied") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{broken", b"[]", b"\xff\xfe"])
def test_a_damaged_file_is_named(tmp_path, name, content):
    folder = make.sentencepiece_folder(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough to hold a header"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match="model.gguf"):
        load_tokenizer(path)
    with pytest.raises(InputError, match="missing.gguf"):
        load_tokenizer(tmp_path / "missing.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"pre": "no-such"}, "tokenizer.ggml.pre is 'no-such'"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"merges": None}, "tokenizer.ggml.merges are needed"),
        ({"merges": ["no such"]}, "merges do not fit"),
        ({"tokens": None}, "needed and missing"),
        ({"token_type": [1, 1]}, "token_type has 2 entries"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000"),
    ],
)
def test_a_gguf_that_cannot_be_honoured_is_refused(tmp_path, change, message):
    fields = {name: value for name, value in (make.byte_level_fields() | change).items() if value is not None}
    with pytest.raises(InputError, match=message):
        load_tokenizer(make.write_gguf(tmp_path / "model.gguf", **fields))


def test_a_token_that_the_vocabulary_lacks_is_refused(tmp_path):
    with pytest.raises(InputError, match="eos_token is '<eos>'"):
        load_tokenizer(make.byte_level_folder(tmp_path, eos_token="<eos>"))


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path):
    for decoder in (decoders.WordPiece(), decoders.CTC(), None):
        tokenizer = make.byte_level_tokenizer()
        tokenizer.decoder = decoder
        with pytest.raises(InputError, match="tokenizer.json: its decoder"):
            load_tokenizer(make.byte_level_folder(tmp_path, tokenizer))


def test_what_is_not_text_is_refused(tokenizer):
    with pytest.raises(InputError, match="int, but must be text"):
        tokenizer.encode(5)
    with pytest.raises(InputError, match="not valid Unicode at character 2"):
        tokenizer.encode("ab\udc80")


def test_sentencepiece_spelled_as_tokenizer_json_comes_back_too(tmp_path):
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello"]:
        vocabulary[piece] = len(vocabulary)
    merges = [("▁", "h"), ("e", "l"), ("l", "o"), ("▁h", "el"), ("▁hel", "lo")]
    library = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    tokenizer = load_tokenizer(make.byte_level_folder(tmp_path, library, **config))
    assert tokenizer.encode("hello") == [1, vocabulary["▁hello"]]
    for text in ("hello ďábelské", "삼겹살\t\r\n\0 🙂", "hello</s>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.removesuffix("</s>") == library.decode(ids)


@pytest.mark.slow
def test_the_demo_models_tokenizer_is_the_reference_librarys(demo_model_path):
    transformers = pytest.importorskip("transformers")
    path = Path(demo_model_path)
    tokenizer = load_tokenizer(path)
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # That library does not know the splitter `smollm`; this is the one in the checkpoint's own tokenizer.json.
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = [*make.TEXTS, *make.SENTENCES, "<|im_start|>user\nhi<|im_end|>", Path(__file__).read_text(encoding="utf-8")]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "Why is the sky blue? 12345"}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(messages) == expected
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.stop_token_ids) == (49152, 1, (2,))


@pytest.mark.slow
def test_the_demo_model_splits_digits_and_says_hello_as_known(demo_model_path):
    tokenizer = load_tokenizer(demo_model_path)
    assert len(tokenizer.encode("12345")) == 5
    assert tokenizer.encode("Why is the sky blue?") == [4898, 314, 260, 6376, 4461, 47]


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": [{"x": 1}]},
        {"chat_template": 5},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"5": {}}},
        {"additional_special_tokens": [5, ["x"]]},
    ],
    ids=str,
)
def test_tokenizer_configs_of_another_layout_are_refused_naming_the_folder(tmp_path, config):
    with pytest.raises(InputError, match=str(tmp_path)):
        load_tokenizer(make.sentencepiece_folder(tmp_path, **config))
