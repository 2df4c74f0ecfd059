"""The files of a tokenizer with DeepSeek's chat form, as checkpoints carry them."""

import json
from pathlib import Path

from tokenizers import Tokenizer

BEGIN, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"

# System text follows the begin token without a marker. A turn ends with the end of sequence, so that the next prompt
# extends this one. Earlier answers are written without their thinking.
_MESSAGES = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{- message['content'] -}}
{%- elif message['role'] == 'user' -%}
{{- '<｜User｜>' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<｜Assistant｜></think>' + message['content'].split('</think>')[-1] + eos_token -}}
{%- else -%}
{{- raise_exception('unknown role: ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
"""
_END = """
{%- endif -%}
"""
# With thinking, the answer begins with reasoning. Without it, the prompt closes the reasoning at once.
_IF_ASKED = "('<think>' if thinking is defined and thinking else '</think>')"
_UNLESS_TOLD = "('</think>' if thinking is defined and not thinking else '<think>')"
THINKS_IF_ASKED = _MESSAGES + "{{- '<｜Assistant｜>' + " + _IF_ASKED + " -}}" + _END
THINKS_UNLESS_TOLD = _MESSAGES + "{{- '<｜Assistant｜>' + " + _UNLESS_TOLD + " -}}" + _END


def write_tokenizer_files(tokenizer: Tokenizer, directory: Path, context_tokens: int, chat_template: str) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": chat_template,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
