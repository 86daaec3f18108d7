"""Chat templates that behave as those of public models do, in other words, and what they make of TALK.

A template's BOS, what it does with a system message, where it trims, and what follows an answer are the published
one's; the parts for tools are left out.
"""

TALK = [
    {"role": "user", "content": " hello there"},
    {"role": "assistant", "content": "hello "},
    {"role": "user", "content": "what now?"},
]
SYSTEM = {"role": "system", "content": "be brief"}

CHATML = """\
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nSYSTEM<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
SMOL_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def chatml(system: str) -> str:
    """A template that writes `system` where a conversation brings no system message."""
    return CHATML.replace("SYSTEM", system)


QWEN_2_5, SMOLLM2 = chatml(QWEN_SYSTEM), chatml(SMOL_SYSTEM)

# The newest question is found from the end, since thoughts before it are left out of the text.
QWEN_3 = """\
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(newest=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == "user" and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.newest = messages|length - 1 - loop.index0 %}{%- set ns.found = true %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content, thoughts = message.content, '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.newest and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA_3 = """\
{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' \
+ m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}\
{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# 3.1 and 3.2 always write a system turn, which begins with dates; today's where strftime_now is known.
LLAMA_3_1 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\nToday Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
LLAMA_3_2 = LLAMA_3_1.replace(
    '{%- set date_string = "26 Jul 2024" %}',
    '{%- if strftime_now is defined %}{%- set date_string = strftime_now("20%y")[:2] ~ "xx" %}{%- endif %}',
)

ALTERNATE = """\
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
"""
LLAMA_2 = (
    """\
{%- if messages[0]['role'] == 'system' %}
    {%- set turns, system = messages[1:], messages[0]['content'] %}
{%- else %}
    {%- set turns, system = messages, false %}
{%- endif %}
"""
    + ALTERNATE
    + """\
    {%- set content = message['content'] %}
    {%- if loop.index0 == 0 and system != false %}
        {%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' '  + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""
)
MISTRAL = (
    "{{- bos_token }}{% set turns = messages %}\n"
    + ALTERNATE
    + """\
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ANSWER }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""
)
MISTRAL_0_1 = MISTRAL.replace("ANSWER", "message['content'] + eos_token + ' '")
MISTRAL_0_2 = MISTRAL.replace("ANSWER", "' ' + message['content'] + eos_token")
MISTRAL_0_3 = MISTRAL.replace("ANSWER", "' ' + message['content'] | trim + eos_token")

ZEPHYR = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

R1 = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(system='') %}\
{%- for m in messages %}{%- if m['role'] == 'system' %}{% set ns.system = m['content'] %}{%- endif %}{%- endfor %}\
{{ bos_token }}{{ ns.system }}\
{%- for m in messages %}\
{%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{%- endif %}\
{%- if m['role'] == 'assistant' and m['content'] is not none %}\
{% set content = m['content'] %}{% if '</think>' in content %}\
{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}\
{%- endfor -%}\
{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""
