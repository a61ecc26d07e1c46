"""Whether a causal model can be put on a layout, asked before any worker starts: of its shape alone, without weights.

What only weights can tell (whether a model is more than a row of modules) is asked where they are.
"""

from __future__ import annotations

from typing import Any

from twofold.models import tensor_plan
from twofold.models.causal_lm import Abilities, CausalLM
from twofold.parallel import Parallel, expert, stages
from twofold.parallel.schedules import find_schedule


def check_layout(hf: Any, layout: Parallel) -> None:
    """hf: a Hugging Face causal model, on any device (meta too). Raises UserError if an axis of the layout finds no
    plan in it, or cannot divide it."""
    model = CausalLM(hf, Abilities(packed=False, plain_head=False))
    if layout.tensor > 1:
        tensor_plan.plan(hf, layout.tensor)
    if layout.expert > 1:
        expert.check(model, layout.expert)
    if layout.pipeline > 1:
        stages.assign(model, stages.units(model), layout.pipeline * find_schedule(layout.schedule).stages)
