"""Chat templates in the form of ChatML (Qwen, Hermes, Nemotron), written down from their documented behaviour.

Only what a conversation's tokens depend on is here; the texts that explain tools to a model are left out.
"""

from __future__ import annotations

from dataclasses import replace

from tests.episodes.families import Family

CHATML_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
# Qwen puts the results of one turn into one user message.
QWEN_RESULT = (
    "{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN_CALLS = (
    "{% for call in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}{{ '}\n</tool_call>' }}{% endfor %}"
)
CHATML_OTHERS = (
    "{% else %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
)
QWEN_STOPS = ("<|im_end|>", "<|endoftext|>")

CHATML = Family(
    "chatml",
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
    + CHATML_PROMPT,
    ("<|im_start|>", "<|im_end|>"),
    ("<|im_end|>",),
    calls=None,
    one=None,
    two=None,
    user="\n<|im_start|>user\nmore?<|im_end|>\n<|im_start|>assistant\n",
)
QWEN_2_5 = Family(
    "qwen2.5",
    CHATML_TOOLS
    + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    + QWEN_CALLS
    + "<|im_end|>\n"
    + QWEN_RESULT
    + CHATML_OTHERS
    + CHATML_PROMPT,
    QWEN_SPECIAL,
    QWEN_STOPS,
    calls='<tool_call>\n{"name": "calc", "arguments": {"expression": "1+2"}}\n</tool_call><|im_end|>',
    one="\n<|im_start|>user\n<tool_response>\nthree\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    two="\n<|im_start|>user\n<tool_response>\nthree\n</tool_response>\n<tool_response>\nfour\n</tool_response>"
    "<|im_end|>\n"
    "<|im_start|>assistant\n",
    user=CHATML.user,
)
# Reasoning is written after the last message of a user only; the last turn has an empty block where it has none.
QWEN_3 = replace(
    QWEN_2_5,
    name="qwen3",
    template=CHATML_TOOLS
    + "{% set at = namespace(user=-1) %}"
    + "{% for m in messages %}{% if m.role == 'user' %}{% set at.user = loop.index0 %}{% endif %}{% endfor %}"
    + "{% for m in messages %}{% if m.role == 'assistant' %}{% set words = m.content.split('"
    "</think>')[-1].lstrip('\n') %}"
    + "{% set thought = m.reasoning_content or ('</think>' in m.content and m.content.split('</think>')[0]"
    + ".split('<think>')[-1].strip('\n')) or '' %}<|im_start|>assistant\n"
    + "{% if loop.index0 > at.user and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ words }}" + QWEN_CALLS + "<|im_end|>\n" + QWEN_RESULT + CHATML_OTHERS + CHATML_PROMPT,
)
# The generation prompt opens the reasoning.
QWEN_3_THINKING = replace(
    QWEN_3,
    name="qwen3-thinking",
    template=QWEN_3.template.removesuffix("{% endif %}") + "<think>\n{% endif %}",
    calls="so\n</think>\n\n" + str(QWEN_2_5.calls),
    one=f"{QWEN_2_5.one}<think>\n",
    two=f"{QWEN_2_5.two}<think>\n",
    user=f"{QWEN_2_5.user}<think>\n",
)
XML_CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '\n' if not loop.first or m.content }}"
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}"
)
QWEN_3_CODER = replace(
    QWEN_2_5,
    name="qwen3-coder",
    template=QWEN_2_5.template.replace(QWEN_CALLS, XML_CALLS),
    calls="<tool_call>\n<function=calc>\n<parameter=expression>\n1+2\n</parameter>\n</function>\n</tool_call>"
    "<|im_end|>",
)
HERMES = replace(
    QWEN_2_5,
    name="hermes",
    template=QWEN_2_5.template.replace(
        QWEN_RESULT,
        "{% elif m.role == 'tool' %}<|im_start|>tool\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n",
    ),
    special=("<|im_start|>", "<|im_end|>"),  # the tags are plain text
    stops=("<|im_end|>",),
    one="\n<|im_start|>tool\n<tool_response>\nthree\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    two="\n<|im_start|>tool\n<tool_response>\nthree\n</tool_response><|im_end|>\n"
    "<|im_start|>tool\n<tool_response>\nfour\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
)
# White space around a turn's words is cut, and reasoning before the last user's message becomes an empty block.
NEMOTRON = Family(
    "nemotron",
    CHATML_TOOLS
    + "{% set at = namespace(user=-1) %}"
    + "{% for m in messages %}{% if m.role == 'user' %}{% set at.user = loop.index0 %}{% endif %}{% endfor %}"
    + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    + "{% if m.reasoning_content and loop.index0 > at.user %}<think>\n{{ m.reasoning_content | trim }}\n</think>\n"
    + "{% else %}<think></think>{% endif %}{{ m.content | trim }}"
    + XML_CALLS.replace("</tool_call>{% endfor %}", "</tool_call>\n{% endfor %}")
    + "<|im_end|>\n{% elif m.role == 'tool' %}"
    + "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user\n{% endif %}"
    + "<tool_response>\n{{ m.content }}\n</tool_response>\n"
    + "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    + CHATML_OTHERS
    + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    QWEN_SPECIAL,
    QWEN_STOPS,
    calls="so\n</think>\n<tool_call>\n<function=calc>\n<parameter=expression>\n1+2\n</parameter>\n</function>\n"
    "</tool_call>\n<|im_end|>",
    one="\n<|im_start|>user\n<tool_response>\nthree\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n<think>\n",
    two="\n<|im_start|>user\n<tool_response>\nthree\n</tool_response>\n<tool_response>\nfour\n</tool_response>\n"
    "<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n",
    user="\n<|im_start|>user\nmore?<|im_end|>\n<|im_start|>assistant\n<think>\n",
)
CHATML_FAMILIES = CHATML, QWEN_2_5, QWEN_3, QWEN_3_THINKING, QWEN_3_CODER, HERMES, NEMOTRON
