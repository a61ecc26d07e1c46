"""Chat templates in the shapes of well-known model families, and tiny tokenizers with their special tokens.

Written for these tests in the shape of the originals: what matters is how each lays out roles, turns and ends.
"""

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Llama 3: BOS in the template, contents trimmed, a header of two special tokens, <|eot_id|> ends every turn.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Mistral: the system text stands in the last question, so earlier turns change when a chat goes on.
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}{% for m in rest %}"
    "{% if m['role'] == 'user' %}{% if loop.last or (loop.index0 == rest | length - 2) %}"
    "{% if system is defined %}{{ '[INST] ' + system + '\n\n' + m['content'] + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}"
    "{% else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
)
# Gemma: the assistant is called model, there is no system role, turns end with <end_of_turn> and a new line.
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Qwen3: thinking is taken out of every assistant turn but those after the last question.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set content = m['content'] %}"
    "{% if m['role'] == 'assistant' and '</think>' in content and loop.index0 < ns.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As TRL's training templates: the markers hold the end of the turn, and the new line after it too.
MARKED_WIDELY = MARKED.replace("{% endgeneration %}{{ '<|im_end|>\n' }}", "{{ '<|im_end|>\n' }}{% endgeneration %}")
# Phi 3: the whole text ends with one more token.
PHI3 = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
# Qwen3.5, DeepSeek R1: inference begins with an opened <think>, which earlier turns have lost with their thinking.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% set parts = m['content'].split('</think>') %}{% if m['role'] != 'assistant' %}{{ m['content'] }}{% else %}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + (parts[0].split('<think>')[-1].strip() if parts | length > 1 else '')"
    " + '\n</think>\n\n' }}{% endif %}{{ parts[-1].lstrip('\n') }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# gpt-oss: the last answer ends with another token than those before it, and the turn begins with its channel.
TWO_ENDS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + (':final:' if m['role'] == 'assistant' else ':') }}"
    "{{ m['content'] + ('<|return|>' if loop.last and m['role'] == 'assistant' else '<|im_end|>') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
# Gemma 4: what a tool answers is written into the turn that called it, before what the assistant says.
ANSWER_IN_TURN = (
    "{% for m in messages %}{% if m['role'] != 'tool' %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}"
    "{% if not loop.last or messages[loop.index0 + 2] is defined %}{{ '<got>' + messages[2]['content'] + '</got>' }}"
    "{% endif %}{% endfor %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What a tool answers stands within the turn that follows, and inference does not give it.
ANSWER_IN_NEXT_TURN = (
    "{% for m in messages %}{% if m['role'] != 'tool' %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.previtem is defined and loop.previtem['role'] == 'tool' %}{{ loop.previtem['content'] }}{% endif %}"
    "{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What it writes depends on the letters of a content, so marks would change it; and nothing is a prefix of it.
COUNTING = (
    "{{ messages | length }}{% for m in messages %}{{ m['content'] | length }}{{ m['role'] + m['content'] + '<|im_end|>' }}"
    "{% endfor %}"
)
# DeepSeek V3: adds the arguments of a call to a text, so they must be text.
TEXT_ARGUMENTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + c.function.arguments + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] | upper + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
# Nothing tells where this one puts what: its start depends on what follows, and it turns letters around.
OPAQUE = "{{ messages | length }}{% for m in messages %}{{ m['role'] + m['content'][::-1] + '<|im_end|>' }}{% endfor %}"
TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] %}{{ m['content'] }}{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ '<call>' + c.function.name + ' ' + c.function.arguments | tojson"
    " + '</call>' }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "chatml, more ends": ["<|im_start|>", "<|im_end|>", "<|return|>", "<|endoftext|>"],
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]"],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
}


def byte_level(template: str | None, family: str = "chatml", bos: str | None = None, eos: str = "<|im_end|>") -> Any:
    """A byte-level tokenizer without merges. Its pad token equals its eos token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    return _wrapped(core, template, family, bos, eos)


def sentencepiece_like(template: str | None, family: str, bos: str, eos: str) -> Any:
    """Pieces with a leading ▁ for spaces and byte fallback, as Llama 2, Mistral and Gemma have them."""
    words = ["▁", *[chr(c) for c in range(33, 127)], *[f"▁{chr(c)}" for c in range(97, 123)]]
    merges = [("▁", chr(c)) for c in range(97, 123)]
    vocab = {w: i for i, w in enumerate(["<unk>", *words, *[f"<0x{b:02X}>" for b in range(256)]])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _wrapped(core, template, family, bos, eos)


def _wrapped(core: Tokenizer, template: str | None, family: str, bos: str | None, eos: str) -> Any:
    core.add_special_tokens(SPECIAL[family])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token=eos)
    if bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    tokenizer.chat_template = template
    return tokenizer
