"""Chat templates: rendered as transformers does, in a sandbox, with one BOS, refusing what they cannot render."""

import datetime

import pytest
import tokenizer_fixtures as make

from fastdecode.chat import ChatTemplate, read_chat_template
from fastdecode.tokenizer import load_tokenizer
from models.errors import InputError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Written over lines, as templates of later models are: needs trim_blocks, lstrip_blocks, namespace and loop controls.
LINES = """\
{%- set state = namespace(turns=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {%- set state.turns = state.turns + 1 %}
    {% if message.role == 'user' %}
[INST] {{ message.content | trim }} [/INST]
    {% else %}
{% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}
    {% endif %}
{%- endfor %}
turns: {{ state.turns }}{{ ' tools' if tools else '' }}
"""
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
TALK = [
    {"role": "system", "content": "hello <b> & 'you'"},
    {"role": "user", "content": "  what is this?  "},
    {"role": "assistant", "content": "삼겹살 🙂"},
    {"role": "user", "content": "ďábelské\r\n\tcode"},
]


def render(template: str, messages=TALK, add_generation_prompt=True, **special) -> str:
    return ChatTemplate(template).render(messages, add_generation_prompt, special)


@pytest.mark.parametrize("template", [CHATML, LINES, "{{ messages | tojson }}", "{{ messages | tojson(indent=2) }}"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_render_and_tokenize_as_transformers_does(tmp_path, template, add_generation_prompt):
    transformers = pytest.importorskip("transformers")
    folder = make.byte_level_folder(tmp_path, chat_template=template)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    options = {"add_generation_prompt": add_generation_prompt}
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert render(template, **options, **special) == reference.apply_chat_template(TALK, tokenize=False, **options)
    ids = reference.apply_chat_template(TALK, return_dict=False, **options)
    assert load_tokenizer(folder).encode_chat(TALK, **options) == ids


def test_vicunas_template_is_vicunas():
    template = read_chat_template("vicuna")
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "How are you?"},
    ]
    assert render(template, talk[:1], eos_token="</s>") == f"{VICUNA_SYSTEM} USER: Hi ASSISTANT:"
    expected = f"{VICUNA_SYSTEM} USER: Hi ASSISTANT: Hello!</s>USER: How are you? ASSISTANT:"
    assert render(template, talk, eos_token="</s>") == expected
    own = [{"role": "system", "content": "Be brief."}, *talk[:2]]
    assert render(template, own, False, eos_token="</s>") == "Be brief. USER: Hi ASSISTANT: Hello!</s>"
    with pytest.raises(InputError, match="roles must alternate"):
        render(template, talk[1:], eos_token="</s>")


@pytest.mark.parametrize(
    ("template", "opening", "closing"),
    [
        (CHATML, "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
        ("{{ 'Be brief.' }}" + CHATML, "Be brief.<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
        ("{{ bos_token + '[INST] ' + messages[0]['content'] | trim + ' [/INST]' }}", "<|im_start|>[INST]", " [/INST]"),
        (read_chat_template("vicuna"), VICUNA_SYSTEM + " USER:", " ASSISTANT:"),
    ],
    ids=["chatml", "chatml with a system message", "llama-2", "vicuna"],
)
def test_a_chats_opening_and_closing_stand_around_the_users_message(tmp_path, template, opening, closing):
    tokenizer = load_tokenizer(make.byte_level_folder(tmp_path, chat_template=template))
    assert (tokenizer.chat_opening(), tokenizer.chat_closing()) == (opening, closing)


def test_no_opening_without_a_template_or_with_one_that_writes_no_message(tmp_path):
    folder = make.byte_level_folder(tmp_path)
    with pytest.raises(InputError, match="no chat template"):
        load_tokenizer(folder).chat_opening()
    with pytest.raises(InputError, match="as it is"):
        load_tokenizer(folder, chat_template="{{ bos_token }}").chat_opening()


@pytest.mark.parametrize("writes_bos", [True, False])
@pytest.mark.parametrize("kind", ["tokenizer.model", "tokenizer.json", "gguf"])
def test_there_is_one_bos_whether_the_template_writes_it_or_not(tmp_path, kind, writes_bos):
    template = "{{ bos_token }}" * writes_bos + "{{ messages[0]['content'] }}"
    if kind == "tokenizer.model":
        source = make.sentencepiece_folder(tmp_path, chat_template=template, add_bos_token=True)
    elif kind == "tokenizer.json":
        source = make.byte_level_folder(tmp_path, chat_template=template, add_bos_token=True)
    else:
        fields = make.byte_level_fields() | {"add_bos_token": True, "chat_template": template}
        source = make.write_gguf(tmp_path / "model.gguf", **fields)
    tokenizer = load_tokenizer(source)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids) == "hello"


def test_no_bos_is_added_for_a_tokenizer_that_adds_none(tmp_path):
    folder = make.byte_level_folder(tmp_path, chat_template="{{ messages[0]['content'] }}")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == tokenizer.encode("hello")
    assert tokenizer.bos_token_id not in tokenizer.encode("hello")


def test_the_template_is_found_wherever_a_checkpoint_keeps_it(tmp_path):
    folder = make.byte_level_folder(tmp_path, chat_template="in config")
    assert load_tokenizer(folder).chat_template == "in config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    make.byte_level_folder(tmp_path, chat_template=named)
    assert load_tokenizer(folder).chat_template == "named"
    (folder / "chat_template.jinja").write_text("own file 삼", encoding="utf-8")
    assert load_tokenizer(folder).chat_template == "own file 삼"
    assert load_tokenizer(folder, chat_template="mine").chat_template == "mine"
    path = make.write_gguf(tmp_path / "model.gguf", **make.byte_level_fields(), chat_template="in gguf")
    assert load_tokenizer(path).chat_template == "in gguf"
    assert load_tokenizer(path, chat_template="mine").chat_template == "mine"


def test_without_a_template_a_chat_is_refused_and_says_what_to_do(tmp_path):
    tokenizer = load_tokenizer(make.sentencepiece_folder(tmp_path))
    assert tokenizer.chat_template is None
    with pytest.raises(InputError, match=r"--raw.*--chat-template"):
        tokenizer.encode_chat(TALK)


def test_a_template_is_given_by_name_by_file_or_as_text(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(CHATML, encoding="utf-8")
    assert read_chat_template(str(path)) == read_chat_template(CHATML) == CHATML
    assert "USER: " in read_chat_template("vicuna")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("no-such-name", str(tmp_path / "binary"), str(tmp_path), "a\0b"):
        with pytest.raises(InputError, match="neither built in"):
            read_chat_template(name)
    with pytest.raises(InputError, match="not valid Jinja"):
        read_chat_template("{{ broken")


def test_a_template_that_refuses_says_why_in_its_own_words():
    template = "{{ raise_exception('Conversation roles\n  must alternate') }}"
    with pytest.raises(InputError, match="Conversation roles must alternate$"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_the_sandbox_lets_nothing_out(template):
    with pytest.raises(InputError, match="refused these messages"):
        render(template)


@pytest.mark.parametrize("template", ["{{ strftime_now.__code__ }}", "{{ ().__class__ | attr('__subclasses__') }}"])
def test_forbidden_attributes_read_as_nothing(template):
    assert render(template) == ""


def test_a_template_cannot_change_the_callers_messages():
    messages = [dict(message) for message in TALK]
    render("{% set _ = messages %}{{ messages[0].content }}", messages)
    assert messages == TALK


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ 'a' ", "{% endif %}", "{% unknown %}", "{% generation %}", "{{ x | no_such_filter }}"]
)
def test_a_template_that_is_no_jinja_is_refused(tmp_path, template):
    with pytest.raises(InputError, match="not valid Jinja"):
        load_tokenizer(make.byte_level_folder(tmp_path), chat_template=template).encode_chat(TALK)


@pytest.mark.parametrize(
    "template", ["{{ messages[99].content.x }}", "{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ no_such() }}"]
)
def test_a_template_that_fails_while_it_runs_is_refused(template):
    with pytest.raises(InputError, match="refused these messages"):
        render(template)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": None}, "'content' is NoneType"),
        ({"role": "user", "content": [{"type": "image"}]}, "'content' is list"),
        ({"role": "user"}, "'content' is missing"),
        ({"content": "hi"}, "'role' is missing"),
        ("hi", "message 0 is str"),
    ],
)
def test_content_that_is_not_text_is_refused(message, reason):
    with pytest.raises(InputError, match=reason):
        render(CHATML, [message])


def test_templates_can_tell_the_date():
    assert render("{{ strftime_now('%Y') }}") in (str(datetime.date.today().year), str(datetime.date.today().year - 1))
