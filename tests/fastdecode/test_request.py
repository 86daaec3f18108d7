"""Counts and clocks of one answer: what the rate leaves out, and what a round counts for."""

import pytest

from fastdecode import request as request_module
from fastdecode.request import Request

STOP = 99


class Letters:
    """A stand-in for a text stream: token 3 is "c"; text stops before "x"."""

    def __init__(self):
        self.token_ids, self.stopped, self.last_parts = [], False, []

    @property
    def text(self):
        return "".join(chr(96 + i) for i in self.token_ids)

    def push(self, token):
        if chr(96 + token) == "x":
            self.stopped = True
            return ""
        self.last_parts = [(chr(96 + token), len(self.token_ids))]
        self.token_ids.append(token)
        return chr(96 + token)

    def finish(self):
        return ""


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when told to."""
    now = [100.0]
    monkeypatch.setattr(request_module.time, "perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def new_request(prompt_tokens=5):
    return Request(0, 0, "prompt", list(range(prompt_tokens)), Letters(), seed=0)


@pytest.mark.parametrize("prompt_tokens", [5, 2000])
def test_the_rate_leaves_out_prompt_and_first_round(clock, prompt_tokens):
    request = new_request(prompt_tokens)
    clock(30.0)  # prefill, or a compiler
    for token in (1, 2, 3, 4):
        request.take([token], 0, done=token == 4, stop_ids=(STOP,))
        clock(0.5)
    stats = request.result().stats
    assert stats["ttft_s"] == 30.0
    assert stats["decode_tokens_per_s"] == 3 / 1.5
    assert stats["prompt_tokens"] == prompt_tokens and stats["new_tokens"] == 4


def test_rounds_that_commit_several_tokens_count_the_bonus_once(clock):
    request = new_request()
    request.take([1, 2, 3], 2, False, (STOP,))
    clock(1.0)
    request.take([], 0, False, (STOP,))
    request.take([4], 0, True, (STOP,))
    stats = request.result().stats
    assert stats["rounds"] == 2 and stats["tau"] == 2.0
    assert stats["decode_tokens_per_s"] == 1.0


def test_a_stop_token_counts_and_nothing_after_it_does(clock):
    request = new_request()
    request.take([1], 0, False, (STOP,))
    clock(1.0)
    request.take([2, STOP, 3], 2, True, (STOP,))
    result = request.result()
    assert result.token_ids == [1, 2] and result.finish_reason == "stop" and result.text == "ab"
    assert result.stats["tau"] == 3 / 2
    assert result.stats["new_tokens"] == 2


def test_a_stop_string_ends_the_answer_inside_a_block(clock):
    request = new_request()
    request.take([1, 24, 2], 2, False, (STOP,))
    assert request.finish_reason == "stop" and request.result().text == "a"


def test_an_answer_of_one_round_has_no_rate(clock):
    request = new_request()
    request.take([1], 0, True, (STOP,))
    assert request.result().stats["decode_tokens_per_s"] is None
    assert request.result().finish_reason == "length"


def test_what_was_drafted_is_told_apart_and_counted_by_depth(clock):
    request = new_request()
    assert request.take([1, 2, 3], 2, False, (STOP,)) == [("a", True), ("b", True), ("c", False)]
    request.take([4], 0, False, (STOP,))
    request.take([5, STOP], 2, True, (STOP,))  # the stop token itself was drafted
    request.spent.add((0.001, 0.003, 0.0005))
    request.spent.add((0.003, 0.005, 0.0005))
    stats = request.result().stats
    assert stats["accept_by_depth"] == [2 / 3, 2 / 3]
    assert (stats["draft_ms"], stats["verify_ms"], stats["rest_ms"]) == pytest.approx((2.0, 4.0, 0.5))
    assert new_request().result().stats["draft_ms"] is None
