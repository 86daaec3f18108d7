"""Chat templates: from messages to the text that a model was trained to answer.

A template is a Jinja text that the checkpoint brings along, so it is a stranger's code and runs in a sandbox, with a
limit on its time (template_sandbox.py). The names and filters that it may use are those of Hugging Face's convention
(`apply_chat_template`).
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols

from fastdecode.template_sandbox import BoundedEnvironment, bounded_filter, within_limits
from models.errors import InputError

# Vicuna v1.1 (FastChat): plain text, one space after a question, the end-of-text token after an answer.
VICUNA = """\
{%- if messages and messages[0]['role'] == 'system' -%}
    {%- set system, turns = messages[0]['content'], messages[1:] -%}
{%- else -%}
    {%- set system = "A chat between a curious user and an artificial intelligence assistant. The assistant gives \
helpful, detailed, and polite answers to the user's questions." -%}
    {%- set turns = messages -%}
{%- endif -%}
{{- system + ' ' if system else '' -}}
{%- for message in turns -%}
    {%- if message['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
        {{- raise_exception('roles must alternate user, assistant, user, ... after an optional system message') -}}
    {%- endif -%}
    {{- 'USER: ' + message['content'] + ' ' if message['role'] == 'user' else 'ASSISTANT: ' + message['content'] -}}
    {{- eos_token if message['role'] == 'assistant' else '' -}}
{%- endfor -%}
{{- 'ASSISTANT:' if add_generation_prompt else '' -}}
"""

BUILT_IN_TEMPLATES = {"vicuna": VICUNA}

# What the expressions of a template can raise while it runs; anything else is a fault of ours and should be seen.
TEMPLATE_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError,
    MemoryError, AssertionError,
)  # fmt: skip
# And what compiling one can: Jinja makes Python of it, which has limits of its own.
COMPILER_FAULTS = (*TEMPLATE_FAULTS, SyntaxError)

LONGEST_OVER_MESSAGES = 1_000_000  # characters that a template may add to its messages, ten times repeated


class GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the answer for training; for decoding it is its body."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template.

    Raises `InputError` where the text is no valid Jinja, or takes too long to compile.
    """

    def __init__(self, text: str):
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
        )
        environment.filters["tojson"] = bounded_filter(_tojson)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = within_limits(lambda: environment.from_string(text))
        except COMPILER_FAULTS as error:
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise InputError(
                f"the chat template is not valid Jinja ({line}{_one_line(error)}); "
                "give another with --chat-template, or use --raw"
            ) from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, special_tokens: Mapping[str, str]
    ) -> str:
        """The text of a conversation.

        `messages` are `{"role": ..., "content": text}`; `special_tokens` maps names such as `bos_token` to their
        text. Raises `InputError` for a message that is not of that form, and where the template refuses, fails, or
        takes too long (5 s) or too much (1 GB, or a text out of proportion).
        """
        check_messages(messages)
        variables = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            **special_tokens,
        }
        try:
            text = within_limits(lambda: self._template.render(variables))
        except TEMPLATE_FAULTS as error:
            raise InputError(f"the chat template refused these messages: {_one_line(error)}") from None
        longest = 10 * sum(len(message["content"]) for message in messages) + LONGEST_OVER_MESSAGES
        if len(text) > longest:
            raise InputError(f"the chat template makes {len(text):,} characters of these messages; give another")
        return text


def read_chat_template(name_or_path: str) -> str:
    """The text of a template: a built-in name (`vicuna`), a Jinja file, or a template's text itself.

    Raises `InputError` where it is none of these, or is no valid Jinja.
    """
    if name_or_path in BUILT_IN_TEMPLATES:
        return BUILT_IN_TEMPLATES[name_or_path]
    if "{{" in name_or_path or "{%" in name_or_path:
        text = name_or_path
    else:
        try:
            text = Path(name_or_path).read_text(encoding="utf-8")
        except (OSError, ValueError):  # ValueError: not UTF-8, or a name with a NUL
            raise InputError(
                f"chat template {name_or_path!r} is neither built in ({', '.join(BUILT_IN_TEMPLATES)}) nor a readable "
                "text file; give one of these or the template's text"
            ) from None
    ChatTemplate(text)  # what the user gave should fail here, not after the weights are loaded
    return text


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises `InputError` unless every message is a mapping whose `role` and `content` are text."""
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"message {index} is {type(message).__name__}, not a mapping with 'role' and 'content'")
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                given = type(message[field]).__name__ if field in message else "missing"
                raise InputError(f"message {index}: {field!r} is {given}, but must be text")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(message) -> str:
    text = " ".join(str(getattr(message, "message", None) or message)[:300].split())
    return text or type(message).__name__
