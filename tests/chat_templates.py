"""Templates in the manner of the families, each with what makes it awkward, and a vocabulary with the control tokens of all."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np

from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.reference.text import byte_characters

NOW = datetime(2025, 3, 4, 5, 6)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- if tools is not none and tools %}{{- 'Tools: ' + (tools | tojson(indent=2)) }}{%- endif %}"
    "{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
QWEN3 = (  # cuts the reasoning out of earlier answers, and looks at what messages begin with
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if message.role == 'user' and content.startswith('<tool_response>') %}{% set ns = namespace(tool=true) %}{% endif %}"
    "{{ '<|im_start|>' ~ message.role ~ '\n' ~ content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GLM = "[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{% endfor %}<|assistant|>"
XML_TOOLS = (  # writes the client's names between angle brackets
    CHATML + "{% for tool in tools or [] %}<{{ tool.function.name }}>{% for key, value in tool.function.parameters.properties | items %}"
    "<{{ key }}>{{ value.description }}</{{ key }}>{% endfor %}{% endfor %}"
)
UPPER = "<|im_start|>{{ messages[0].content | upper }}<|im_end|>"
JOINS_FIELDS = "<|im_start|>{% for message in messages %}{{ message.name }}{{ message.content }}{% endfor %}<|im_end|>"
STRIPS_INSIDE = "<|im_start|>{{ messages[0].content | replace('*', '') }}<|im_end|>"
LOOKS_INSIDE = "{% if 'secret' in messages[0].content %}<|eot_id|>{% endif %}<|im_start|>{{ messages[0].content }}<|im_end|>"

CONTROL = [
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>", "<s>", "</s>", "<bos>",
    "[INST]", "[/INST]", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<start_of_turn>", "<end_of_turn>",
]  # fmt: skip


def tokenizer_with(template: str, bos: str = "<|begin_of_text|>") -> Tokenizer:
    """All bytes as tokens, a few merges across what templates put side by side, and the control tokens of all families."""
    merges = ["Ċ Ċ", "ĊĊ Ċ", "Ġ h", "> a"]
    tokens = [byte_characters(bytes([i])) for i in range(256)] + [merge.replace(" ", "") for merge in merges] + CONTROL
    return load_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.token_type": np.array([1] * 260 + [3] * len(CONTROL), np.int32),
            "tokenizer.ggml.bos_token_id": tokens.index(bos),
            "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": template,
        }
    )


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


FAMILIES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "mistral": MISTRAL, "gemma": GEMMA, "glm": GLM, "xml": XML_TOOLS}
