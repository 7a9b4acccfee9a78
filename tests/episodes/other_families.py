"""Chat templates of DeepSeek, Kimi, GLM, Llama, Mistral and gpt-oss, written down from their documented behaviour.

Only what a conversation's tokens depend on is here; the texts that explain tools to a model are left out.
"""

from __future__ import annotations

from dataclasses import replace

from tests.episodes.families import Family

DEEPSEEK_SPECIAL = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", ""
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
# Arguments must be text; nothing opens the turn after results; only the first results of a conversation are opened.
DEEPSEEK_V3 = Family(
    "deepseek-v3",
    "{{ bos_token }}{% set at = namespace(outputs=false, called=false) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}{% if not at.outputs %}<｜tool▁outputs▁begin｜>{% set at.outputs = true %}{% endif %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% if loop.last %}<｜tool▁outputs▁end｜>"
    "{% endif %}"
    "{% elif m.tool_calls %}{{ '<｜Assistant｜>' + m.content + '<｜tool▁calls▁begin｜>' }}"
    "{% for call in m.tool_calls %}{{ '' if loop.first else '\n' }}"
    "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}"
    "{{ '' + call.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>"
    "<｜end▁of▁sentence｜>"
    "{% else %}{% if loop.index0 and messages[loop.index0 - 1].role == 'tool' %}<｜tool▁outputs▁end｜>"
    "{% else %}<｜Assistant｜>{% endif %}{{ m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜><think>\n{% endif %}",
    DEEPSEEK_SPECIAL,
    ("<｜end▁of▁sentence｜>",),
    calls="so</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
    '<｜tool▁sep｜>calc\n```json\n{"expression": "1+2"}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    one="<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>three<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    two="<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>three<｜tool▁output▁end｜>"
    "<｜tool▁output▁begin｜>four<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    user="<｜User｜>more?<｜Assistant｜><think>\n",
)
DEEPSEEK_V3_1 = Family(
    "deepseek-v3.1",
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{% else %}{% if messages[loop.index0 - 1].role == 'user' %}<｜Assistant｜></think>{% endif %}"
    "{{ m.content.split('</think>')[-1] }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}"
    "<｜tool▁call▁end｜>"
    "{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}<｜Assistant｜></think>{% endif %}",
    DEEPSEEK_SPECIAL,
    ("<｜end▁of▁sentence｜>",),
    calls='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calc<｜tool▁sep｜>{"expression": "1+2"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    one="<｜tool▁output▁begin｜>three<｜tool▁output▁end｜>",
    two="<｜tool▁output▁begin｜>three<｜tool▁output▁end｜><｜tool▁output▁begin｜>four<｜tool▁output▁end｜>",
    user="<｜User｜>more?<｜Assistant｜></think>",
)
# The id of a call is where the model writes its name, and its result repeats the id.
KIMI_K2 = Family(
    "kimi-k2",
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|im_user|>user<|im_middle|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{% else %}<|im_assistant|>assistant<|im_middle|>{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>"
    "{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
    ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
     "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
     "<|tool_call_argument_begin|>"),
    ("<|im_end|>", "[EOS]"),
    calls='<|tool_calls_section_begin|><|tool_call_begin|>functions.calc:7'
    '<|tool_call_argument_begin|>{"expression": "1+2"}'
    "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
    one="<|im_system|>tool<|im_middle|>## Return of functions.calc:7\nthree<|im_end|><|im_assistant|>assistant"
    "<|im_middle|>",
    two="<|im_system|>tool<|im_middle|>## Return of functions.calc:7\nthree<|im_end|>"
    "<|im_system|>tool<|im_middle|>## Return of functions.calc:8\nfour<|im_end|><|im_assistant|>assistant"
    "<|im_middle|>",
    user="<|im_user|>user<|im_middle|>more?<|im_end|><|im_assistant|>assistant<|im_middle|>",
)  # fmt: skip
# No token ends a message: the model stops with the token that opens the next.
GLM_4_5 = Family(
    "glm-4.5",
    "[gMASK]<sop>{% if tools %}<|system|>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% set at = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set at.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% elif m.role == 'assistant' %}<|assistant|>"
    "{{ '\n<think>' + (m.reasoning_content | trim if m.reasoning_content and loop.index0 > at.user else '') + '"
    "</think>' }}"
    "{{ '\n' + m.content.split('</think>')[-1].strip() if m.content.strip() }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '\n' }}"
    "{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<tool_call>",
     "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ("<|user|>", "<|observation|>", "<|endoftext|>"),
    calls="\n<think>so</think>\n<tool_call>calc\n<arg_key>expression</arg_key>\n<arg_value>1+2</arg_value>\n"
    "</tool_call>"
    "<|observation|>",
    one="\n<tool_response>\nthree\n</tool_response><|assistant|>",
    two="\n<tool_response>\nthree\n</tool_response>\n<tool_response>\nfour\n</tool_response><|assistant|>",
    user="\nmore?<|assistant|>",
)  # fmt: skip
LLAMA_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|start_header_id|>",
)
LLAMA_SPECIAL += ("<|end_header_id|>", "<|python_tag|>")
LLAMA_STOPS = ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
_LLAMA_TURN = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_LLAMA_OTHERS = (
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + _LLAMA_TURN + "{% endif %}"
)
# One call a turn, whose content is not written; a result is written as JSON.
LLAMA_3_1 = Family(
    "llama-3.1",
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}{% endif %}"
    + _LLAMA_TURN
    + '{"name": '
    '"{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot_id|>"
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}" + _LLAMA_OTHERS,
    LLAMA_SPECIAL,
    LLAMA_STOPS,
    calls='{"name": "calc", "parameters": {"expression": "1+2"}}<|eot_id|>',
    one='<|start_header_id|>ipython<|end_header_id|>\n\n"three"<|eot_id|>' + _LLAMA_TURN,
    two=None,
    user="<|start_header_id|>user<|end_header_id|>\n\nmore?<|eot_id|>" + _LLAMA_TURN,
)
# Llama 3 knows no tools: it leaves the calls out.
LLAMA_3 = replace(
    LLAMA_3_1,
    name="llama-3",
    template="{{ bos_token }}{% for m in messages %}{% if true %}" + _LLAMA_OTHERS,
    calls=None,
    one=None,
)
# The tools stand before the last user's message; ids have nine characters; a result is JSON with its call's id.
MISTRAL = Family(
    "mistral",
    "{{ bos_token }}{% set at = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set at.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == at.user %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}"
    "{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]</s>"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}",
    ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
     "[TOOL_CALLS]"),
    ("</s>",),
    calls='[TOOL_CALLS] [{"name": "calc", "arguments": {"expression": "1+2"}, "id": "abcdefgh7"}]</s>',
    one='[TOOL_RESULTS] {"content": "three", "call_id": "abcdefgh7"}[/TOOL_RESULTS]',
    two='[TOOL_RESULTS] {"content": "three", "call_id": "abcdefgh7"}[/TOOL_RESULTS]'
    '[TOOL_RESULTS] {"content": "four", "call_id": "abcdefgh8"}[/TOOL_RESULTS]',
    user="[INST] more?[/INST]",
)  # fmt: skip
# Only the first call is written; a final message ends with another token in the history than it was sampled with.
GPT_OSS = Family(
    "gpt-oss",
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.content }}<|end|>{% endif %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    (
        "<|endoftext|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|return|>",
        "<|call|>",
    ),
    ("<|return|>", "<|call|>", "<|endoftext|>"),
    calls=' to=functions.calc<|channel|>commentary json<|message|>{"expression": "1+2"}<|call|>',
    one='<|start|>functions.calc to=assistant<|channel|>commentary<|message|>"three"<|end|><|start|>assistant',
    two=None,
    user=None,
)
OTHER_FAMILIES = DEEPSEEK_V3, DEEPSEEK_V3_1, KIMI_K2, GLM_4_5, LLAMA_3_1, LLAMA_3, MISTRAL, GPT_OSS
