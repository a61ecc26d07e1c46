"""A decoder that gives scores for whole sequences: a reward, or one for each class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twofold.errors import UserError
from twofold.models.causal_lm import Abilities, CausalLM, bare, decoder, decoder_name, head, why_not_packed
from twofold.models.lora import is_classifier


class Scorer(CausalLM):
    """Around a Hugging Face model for sequence classification (or a PEFT model around one), on every axis that a
    `CausalLM` is on. Its forward gives (scores, None), fp32 [n, labels], at the positions `predict_at`."""

    def _logps(self, hidden: Tensor, predict_at: Tensor, targets: Tensor, with_mean: bool) -> tuple[Tensor, None]:
        return head(bare(self.hf))(hidden.flatten(0, 1).index_select(0, predict_at)).float(), None


@torch.no_grad()
def examine_scorer(hf: Any) -> Abilities:
    """Tries the model on two short samples, alone and one after the other. Raises UserError if it gives no scores."""
    name = type(hf).__name__
    if not is_classifier(hf) or head(hf) is None or not hasattr(hf, decoder_name(hf)):
        raise UserError(
            f"model.path: {name} gives no scores: give a folder or a name, or a model ForSequenceClassification whose "
            "head is called score."
        )
    was_training = hf.training
    hf.eval()
    device = hf.get_input_embeddings().weight.device
    vocabulary = hf.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (2, 6), generator=torch.Generator().manual_seed(0)).to(device)
    alone = decoder(hf)(input_ids=ids, use_cache=False).last_hidden_state
    why = why_not_packed(hf, ids, (6, 4), torch.cat([alone[0], alone[1, :4]]))
    hf.train(was_training)
    return Abilities(packed=not why, plain_head=False, why=why)
