"""Streaming shows only whole characters and final text; stop strings end text and ids at the same place."""

import pytest
import tokenizer_fixtures as make
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastdecode.detokenizer import Detokenizer, StopStrings, TextStream
from fastdecode.tokenizer import load_tokenizer
from models.errors import InputError


class Bytes:
    """A tokenizer whose ids are places in a list of byte strings."""

    def __init__(self, *tokens: bytes, prefix_space: bool = False):
        self.tokens, self.prefix_space = tokens, prefix_space

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def texts_of(
    tokens: tuple[bytes, ...], stops: tuple[str, ...] = (), finish: bool = True
) -> tuple[list[str], TextStream]:
    """The pieces that a stream of these tokens shows, token by token, and the stream."""
    stream = TextStream(Bytes(*tokens), stops)
    pieces = [stream.push(index) for index in range(len(tokens))]
    return [*pieces, stream.finish()], stream


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_folder = make.byte_level_folder if request.param == "byte-level" else make.sentencepiece_folder
    return load_tokenizer(make_folder(folder))


@pytest.mark.parametrize("text", make.TEXTS)
def test_streaming_shows_the_whole_text_and_never_half_a_character(tokenizer, text):
    shown = make.stream(tokenizer, tokenizer.encode(text))
    assert shown[-1] == text
    assert all(text.startswith(part) for part in shown)


def test_a_character_appears_with_its_last_byte():
    smile = "🙂".encode()
    detokenizer = Detokenizer(Bytes(*(smile[index : index + 1] for index in range(4)), b"!"), continues=True)
    seen = [(detokenizer.push(index), detokenizer.n_pending) for index in range(5)]
    assert seen == [("", 1), ("", 2), ("", 3), ("🙂", 0), ("!", 0)]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_length_cut_in_mid_character_drops_the_half(tokenizer, cut):
    data = b"ab" + "🙂".encode()[:cut]
    detokenizer = Detokenizer(Bytes(data), continues=True)
    assert detokenizer.push(0) + detokenizer.finish() == "ab"
    assert detokenizer.n_pending == 0

    ids = tokenizer.encode("ab🙂")  # no training text had it: one token a byte
    assert tokenizer.decode(ids[: cut - 4]) == "ab"
    stream = TextStream(tokenizer)
    for token_id in ids[: cut - 4]:
        stream.push(token_id)
    stream.finish()
    assert (stream.text, stream.token_ids) == ("ab", ids[: cut - 4])


@given(st.lists(st.binary(max_size=5), max_size=12))
@settings(deadline=None)
def test_any_bytes_stream_to_what_they_decode_to_as_a_whole(tokens):
    detokenizer = Detokenizer(Bytes(*tokens), continues=True)
    shown = "".join(detokenizer.push(index) for index in range(len(tokens)))
    whole = (b"".join(tokens) + b"!").decode(errors="replace").removesuffix("!")
    assert shown + detokenizer.decode(b"!", final=True).removesuffix("!") == whole


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_any_ids_stream_to_what_they_decode_to_as_a_whole(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert make.stream(tokenizer, ids)[-1] == tokenizer.decode(ids)


def test_bytes_that_can_never_become_a_character_do_not_hold_the_text_back():
    for broken in (b"\xff", b"\x80", b"\xc0\x80", b"\xe2\x82", b"\xed\xa0", b"\xf0\x9f\x99"):
        detokenizer = Detokenizer(Bytes(broken, b" go on"), continues=True)
        shown = detokenizer.push(0) + detokenizer.push(1)
        assert shown.startswith("\ufffd") and shown.endswith("\ufffd go on")
        assert detokenizer.n_pending == 0


def test_only_an_answer_loses_the_artificial_space_and_only_that_one():
    tokens = Bytes(b"", b" ", b" hello", prefix_space=True)
    assert make.stream(tokens, [0, 2, 2])[-1] == "hello hello"
    assert make.stream(tokens, [0, 1, 2])[-1] == " hello"
    assert make.stream(tokens, [0, 2, 2], continues=True)[-1] == " hello hello"
    assert make.stream(Bytes(b" hello"), [0])[-1] == " hello"


def test_a_raw_prompt_is_continued_with_its_space(tmp_path):
    tokenizer = load_tokenizer(make.sentencepiece_folder(tmp_path))
    (hello,) = tokenizer.encode("hello")[1:]
    assert make.stream(tokenizer, [hello], continues=True)[-1] == " hello"
    assert make.stream(tokenizer, [hello], continues=False)[-1] == "hello"


def test_without_stop_strings_nothing_is_held_back():
    pieces, stream = texts_of((b"a", b"</s>", b"b"))
    assert pieces == ["a", "</s>", "b", ""]
    assert not stream.stopped and stream.token_ids == [0, 1, 2]


@pytest.mark.parametrize(
    ("tokens", "stops", "text", "kept"),
    [
        ((b"one ", b"two STOP three", b"four"), ("STOP",), "one two ", 1),  # inside one token
        ((b"one ", b"ST", b"OP", b" two"), ("STOP",), "one ", 1),  # straddling two
        ((b"one S", b"T", b"O", b"P two"), ("STOP",), "one ", 0),  # straddling four, from inside the first
        ((b"one ", b"STOP"), ("STOP",), "one ", 1),
        ((b"STOP", b"x"), ("STOP",), "", 0),
        ((b"a", b"", b"STOP"), ("STOP",), "a", 2),  # a special token before it is kept
        ((b"a", b"ST", b"", b"OP"), ("STOP",), "a", 1),  # and inside it is not
        ((b"one\n", b"\ntwo"), ("\n\n",), "one", 0),
        ((b"aaa", b"ab"), ("aab",), "aa", 0),  # the beginning overlaps itself
        ((b"a b c",), ("c", "b"), "a ", 0),  # the earliest wins, not the first named
        ((b"abcd",), ("cd", "bcd"), "a", 0),
        ((b"one ", b"\xf0\x9f", b"\x99\x82", b"!"), ("🙂",), "one ", 1),  # a token with a part of its character
        ((b"one ", b"\xf0\x9f", b"\x99\x83", b"!"), ("🙂",), "one 🙃!", 4),
        (("삼겹".encode(), "살 먹".encode()), ("살",), "삼겹", 1),
        ((b"a\xe2\x82", b"STOP"), ("STOP",), "a\ufffd", 1),  # broken bytes before it stay what they are
    ],
)
def test_text_and_ids_end_before_the_stop_string(tokens, stops, text, kept):
    pieces, stream = texts_of(tokens, stops)
    assert "".join(pieces) == stream.text == text
    assert stream.token_ids == list(range(kept))
    assert stream.stopped == (kept < len(tokens))


def test_what_could_begin_a_stop_string_is_held_back_and_released():
    pieces, stream = texts_of((b"1 <", b"/", b"s", b" 2 </", b"s"), ("</s>",))
    assert pieces == ["1 ", "", "", "</s 2 ", "", "</s"]
    assert not stream.stopped and stream.token_ids == [0, 1, 2, 3, 4]


def test_nothing_counts_after_a_stop_string():
    stream = TextStream(Bytes(b"a", b"STOP", b"b"), ("STOP",))
    assert [stream.push(token_id) for token_id in (0, 1, 2, 0)] == ["a", "", "", ""]
    assert (stream.finish(), stream.text, stream.token_ids) == ("", "a", [0])


def test_finishing_twice_adds_nothing():
    stream = TextStream(Bytes(b"a ST"), ("STOP",))
    assert [stream.push(0), stream.finish(), stream.finish()] == ["a ", "ST", ""]


@given(
    st.lists(st.text("ab🙂", max_size=3), max_size=10).map("".join),
    st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
@settings(deadline=None, max_examples=300)
def test_any_cut_into_tokens_gives_the_same_text_and_the_ids_that_fit_it(text, stops, data):
    whole = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    tokens = tuple(whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True))

    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    pieces, stream = texts_of(tokens, tuple(stops))
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == bool(ends)

    limit, size, kept = len(expected.encode()), 0, 0
    for token in tokens:
        size += len(token)
        kept += size <= limit
    assert stream.token_ids == list(range(kept))


def test_stop_strings_work_on_a_real_tokenizer(tokenizer):
    ids = tokenizer.encode("hello there 🙂 and emoji 🙃 again")
    stream = TextStream(tokenizer, ("🙃",))
    shown = "".join(stream.push(token_id) for token_id in ids)
    assert stream.stopped and shown + stream.finish() == "hello there 🙂 and emoji "
    assert tokenizer.decode(stream.token_ids) == "hello there 🙂 and emoji "


def test_bad_stop_strings_are_refused():
    with pytest.raises(InputError, match="empty"):
        StopStrings(("a", ""))
    with pytest.raises(InputError, match="not valid Unicode"):
        TextStream(Bytes(), ("\udc80",))


@example([b"\xe2\x82", b"ST", b"OP", b"a"])  # a token after the stop string completes nothing
@given(st.lists(st.sampled_from([b"a", b"bc", b"", b"\xe2\x82", b"\xac", b"\xc3\xa9!", b"ST", b"OP"]), max_size=12))
@settings(deadline=None)
def test_every_part_of_the_text_belongs_to_the_token_that_completes_it(tokens):
    stream = TextStream(Bytes(*tokens), ("STOP",))
    owners = {}
    for index in (*range(len(tokens)), None):
        text = stream.finish() if index is None else stream.push(index)
        assert "".join(part for part, _ in stream.last_parts) == text
        for part, token in stream.last_parts:
            owners[token] = owners.get(token, "") + part
    if b"\xe2\x82" in tokens or b"\xac" in tokens or stream.stopped:
        return  # what is broken or cut has no owner to hold it against
    assert owners == {i: token.decode() for i, token in enumerate(tokens) if token}


def test_text_that_was_held_back_belongs_to_its_own_tokens():
    stream = TextStream(Bytes(b"x S", b"T", b"A\xe2\x82", b"\xac"), ("STOP",))
    assert [stream.push(i) for i in (0, 1)] == ["x ", ""]
    assert stream.push(2) == "STA" and stream.last_parts == [("S", 0), ("T", 1), ("A", 2)]
    assert stream.push(3) == "€" and stream.last_parts == [("€", 3)]
