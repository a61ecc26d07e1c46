"""What a model cannot do, and what a run cannot go on from: one line that names the remedy."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import reference
from ranks import run_ranks
from test_layouts import Net, fit
from torch import nn
from transformers import AutoConfig

from twofold.errors import UserError
from twofold.mesh.mesh import Mesh
from twofold.models.causal_lm import CausalLM, examine
from twofold.models.layout_check import check_layout
from twofold.models.load import load_shape
from twofold.parallel import Parallel, parse
from twofold.parallel.place import place


def test_another_layout_is_not_resumed_in_silence(tmp_path: Path) -> None:
    run_ranks(2, fit, tmp_path, "run", devices=2, strategy="fsdp", max_steps=2)

    def other() -> str:
        with pytest.raises(UserError) as error:
            fit(tmp_path, "run", devices=2, strategy="tp", resume=True)
        return str(error.value)

    for message in run_ranks(2, other):
        assert "layout=shard 2 × zero 3 and this run has tensor 2" in message


def test_without_a_plan_the_tensor_axis_is_refused() -> None:
    def refused(plan: Any) -> str:
        mesh = Mesh.join("cpu")
        mesh.arrange({"tensor": 2})
        model = Net()
        model.tensor_plan = plan
        with pytest.raises(UserError) as error:
            place(model, mesh, parse("tp", 2))
        return str(error.value)

    assert "Net declares no tensor_plan" in run_ranks(2, refused, {})[0]
    assert "'blocks.*.upp' is no module of Net" in run_ranks(2, refused, {"blocks.*.upp": "colwise"})[1]
    assert "unknown style 'colwize'. Did you mean 'colwise'" in run_ranks(2, refused, {"out": "colwize"})[0]


def refusal(strategy: str, ranks: int, model: Any, adapt: bool = False) -> str:
    from twofold.config.schema import LoraConfig
    from twofold.models.lora import add_lora

    mesh = Mesh.join("cpu")
    layout = parse(strategy, ranks)
    mesh.arrange(layout.sizes)
    if isinstance(model, str):
        hf, packed = reference.tiny_model(model), model != "mistral"
        abilities = examine(hf)
        model = CausalLM(add_lora(hf, LoraConfig(r=4)) if adapt else hf, abilities, packed)
    with pytest.raises(UserError) as error:
        place(model, mesh, layout)
    return str(error.value)


@pytest.mark.parametrize(
    ("strategy", "ranks", "model", "message"),
    [
        ("pp", 2, nn.Linear(3, 3), "Linear declares no pipeline_plan. Give it one that names its parts"),
        ("pp,zbv", 3, Net(), "Net has 4 parts in a row, too few for 6 stages: give pp fewer ranks"),
        ("tp,sequence", 2, Net(), "'sequence' is for language models: in the tensor_plan of Net, use torch's"),
        ("cp", 2, Net(), "Net has no method split_context"),
        ("cp", 2, "mistral", "needs samples without padding, and model.attention is padded"),
        ("ep", 2, "llama", "CausalLM has no experts: use fsdp or tp"),
        ("ep", 3, "mixtral", "4 experts do not divide by 3 ranks: use ep:2"),
    ],
)
def test_what_a_model_cannot_do_is_refused(strategy: str, ranks: int, model: Any, message: str) -> None:
    assert all(message in found for found in run_ranks(ranks, refusal, strategy, ranks, model))


@pytest.mark.parametrize(
    ("family", "layout", "message"),
    [
        ("bloom", Parallel(tensor=2), "neither transformers nor Twofold has a tensor plan for BloomForCausalLM"),
        ("bloom", Parallel(pipeline=2), "neither transformers nor Twofold has a pipeline plan for BloomForCausalLM"),
        ("llama", Parallel(pipeline=5), "has 4 parts in a row, too few for 5 stages: give pp fewer ranks"),
        ("llama", Parallel(pipeline=3, schedule="zbv"), "too few for 6 stages"),
        ("qwen3_moe", Parallel(expert=3), "4 experts do not divide by 3 ranks: use ep:2"),
        ("gpt2", Parallel(tensor=2, pipeline=4), ""),
        ("mixtral", Parallel(expert=2, pipeline=2, schedule="zbv"), ""),
    ],
)
def test_layouts_are_checked_without_weights(tmp_path: Path, family: str, layout: Parallel, message: str) -> None:
    if family == "bloom":
        config = AutoConfig.for_model("bloom", hidden_size=16, n_head=2, n_layer=2, vocab_size=97)
    else:
        config = reference.tiny_model(family).config
    config.save_pretrained(tmp_path)
    shape = load_shape(str(tmp_path))
    assert all(p.is_meta for p in shape.parameters())
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_layout(shape, layout)


def test_a_plan_that_leaves_something_out_is_refused() -> None:
    model = Net()
    model.pipeline_plan = ["blocks"]
    assert "the pipeline_plan of Net leaves out out.weight, out.bias" in run_ranks(2, refusal, "pp", 2, model)[0]
    model.pipeline_plan = ["blocks", "outt"]
    assert "'outt' is no submodule of Net" in run_ranks(2, refusal, "pp", 2, model)[0]


def test_a_model_that_does_more_than_its_modules_is_not_cut() -> None:
    """Granite multiplies embeddings outside of its embedding: on a second stage it would do so again."""
    from transformers import GraniteConfig, GraniteForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    hf = GraniteForCausalLM(GraniteConfig(vocab_size=97, embedding_multiplier=3.0, **shape))
    message = "GraniteForCausalLM does more than run its modules one after the other"
    assert message in run_ranks(2, refusal, "pp", 2, CausalLM(hf, examine(hf)))[0]


def test_adapted_experts_are_not_split() -> None:
    assert "experts with an adapter cannot be split" in run_ranks(2, refusal, "ep", 2, "mixtral", True)[0]
