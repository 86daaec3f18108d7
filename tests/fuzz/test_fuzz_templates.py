"""Chat templates are strangers' code: endless loops, growing texts and any other text end in one sentence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import inputs, tally  # noqa: F401 - a fixture
from tiny_checkpoint import TEMPLATE

from fastdecode import template_sandbox
from fastdecode.chat import VICUNA, ChatTemplate
from models.errors import InputError

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "é"}]
PARTS = (
    "{% for m in messages %}", "{% endfor %}", "{{ m['content'] }}", "{{ messages[0].role }}", "{% if loop.first %}",
    "{% endif %}", "{% else %}", "{% break %}", "{% set x = namespace(y=[]) %}", "{% set x.y = x.y + [x.y] %}",
    "{{ x.y|length }}", "{% macro f(a) %}", "{% endmacro %}", "{{ f(f) }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%Y') }}", "{{ messages|tojson(indent=4) }}", "{{ 1 / 0 }}", "{{ 'a' * 3 ** 2 }}", "{{ -",
    "{% generation %}", "{% endgeneration %}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}",
    "{{ eos_token }}",
    "{% include 'x' %}", "{% extends 'x' %}", "{{ range(9)|batch(2)|list }}", "{{ none.x }}", "{{ a.b.c }}", "{# ",
    "#}",
    "{% filter upper %}", "{% endfilter %}", "{{ lipsum(n=2) }}", "{{ cycler(1).next() }}", "{{ '%d' % 'x' }}",
    "{% block a %}", "{% endblock %}", "{{ self.a() }}", "{% call f() %}", "{% endcall %}", "{{ caller() }}",
)  # fmt: skip


def render(text):
    return ChatTemplate(text).render(MESSAGES, True, {"eos_token": "</s>"})


def test_any_parts_in_any_order(tally):  # noqa: F811
    @inputs(700)
    @given(st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=8).map("".join))
    def run(text):
        tally.check(lambda: render(text))

    run()


def test_templates_with_a_part_taken_out_or_put_in(tally):  # noqa: F811
    @inputs(300)
    @given(st.sampled_from((TEMPLATE, VICUNA)), st.integers(0, 900), st.integers(0, 9), st.sampled_from(("", *PARTS)))
    def run(text, at, n, part):
        at %= len(text)
        tally.check(lambda: render(text[:at] + part + text[at + n :]))

    run()


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% for a in range(99999) %}{% set b = range(99999)|map('string')|list %}{% endfor %}",
    ],
    ids=["loops", "calls", "filters"],
)
def test_an_enormous_loop_is_ended(template, monkeypatch):
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.3)
    with pytest.raises(InputError, match="takes longer than 0.3 s"):
        render(template)


def test_a_text_that_doubles_and_doubles_is_ended(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MEMORY", 50 << 20)
    doubled = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    with pytest.raises(InputError, match="takes more than 50 MB"):
        render(doubled)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'a' * 99999999999 }}", "too large"),
        ("{{ 99999999999 * ['a'] }}", "too large"),
        ("{{ 9 ** (9 ** 9) }}", "too large"),
        ("{{ 'a'.ljust(99999999999) }}", "beyond 1,000,000"),
        ("{{ 'a'|center(99999999999) }}", "beyond 1,000,000"),
        ("{{ messages|tojson(indent=99999999999) }}", "beyond 1,000,000"),
        ("{% for i in range(999999) %}abcdefghij{% endfor %}", "Range too big|characters"),
        ("{% for i in range(99999) %}" + "abcdefghij" * 20 + "{% endfor %}", "characters"),
    ],
)
def test_one_enormous_operation_is_refused(template, words):
    with pytest.raises(InputError, match=words):
        render(template)


@pytest.mark.parametrize("template", ["{{ [" * 5000, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
                                      "{% for a in messages %}" * 30 + "{% endfor %}" * 30])  # fmt: skip
def test_a_template_nested_too_deep_for_python_is_refused(template):
    with pytest.raises(InputError, match="not valid Jinja"):
        render(template)


def test_limits_leave_no_trace_and_change_no_text():
    import sys

    before = sys.gettrace()
    assert render("{{ 'ab' * 3 ~ messages[0].content|center(9) ~ 2 ** 10 }}") == "ababab  hello  1024"
    assert sys.gettrace() is before
