"""The pipeline axis: each rank holds some of a model's layers, and micro-batches pass from rank to rank.

PyTorch's `torch.distributed.pipelining` runs the schedules; `schedules.py` names them, `stages.py` cuts the model.
Micro-batches may differ in shape (samples come without padding): a stage makes room for what it receives when it
receives it, since both sides know the shapes from the batch that every rank of a pipeline has.
A stage may lie on the data and tensor axes beneath: FSDP2 then reduces gradients once, when the schedule says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from twofold.errors import UserError
from twofold.mesh.mesh import Mesh
from twofold.parallel import context, expert, shard, stages, tensor
from twofold.parallel.placed import Placed
from twofold.parallel.schedules import find_schedule
from twofold.parallel.strategy import REDUCED_AXES, Parallel

Inputs = Sequence[dict[str, Any]]


def place(model: Any, mesh: Mesh, layout: Parallel) -> Placed:
    """Cuts the model, in place: on each rank the parts of its stages stay. Raises UserError if it cannot be cut."""
    schedule, ranks, here = find_schedule(layout.schedule), layout.pipeline, mesh.coordinate("pipeline")
    parts = stages.units(model)
    plan = stages.assign(model, parts, ranks * schedule.stages)
    mine = schedule.stages_of(here, ranks)
    if hasattr(model, "check_stages"):
        model.check_stages(plan)
    chain = stages.Chain(model, plan) if not hasattr(model, "run_stage") else None
    if layout.context > 1:
        context.spread(model, mesh, layout)
    if layout.expert > 1:
        expert.split(model, mesh)
    if layout.tensor > 1:
        tensor.split(model, mesh, layout.sequence)
    twins = stages.twins(model, plan)
    stages.untie(model, twins)
    trees = {i: stages.structure(model, plan[i], plan) for i in mine}
    stages.prune(model, plan, mine)
    modules = [Stage(trees[i], i, i == len(plan) - 1, chain) for i in mine]
    for module in modules:
        if not any(p.requires_grad for p in module.parameters()):
            raise UserError(
                f"strategy 'pp': stage {module.index} of {len(plan)} has nothing to train: use fewer ranks."
            )
        shard.spread(module, mesh, layout, reshard=False)
    pipeline = Pipeline(model, modules, mesh, layout, len(plan), twins)
    return Placed(
        model,
        model,
        float(mesh.size(*REDUCED_AXES)),
        counts=mesh.coordinate("context", "tensor") == 0,
        pipeline=pipeline,
    )


class Stage(nn.Module):
    """One stage as PyTorch's schedules call it. model: the structure with this stage's parts; chain: runs it, where
    the model has no `run_stage`. `batches` and the functions are the pipeline's for the step that runs."""

    def __init__(self, model: Any, index: int, last: bool, chain: stages.Chain | None) -> None:
        super().__init__()
        self.model, self.index, self.last, self.chain = model, index, last, chain
        self.batches: Inputs = ()
        self.autocast: Callable[[], AbstractContextManager[Any]]
        self.loss_of: Callable[[Any, int], Tensor] | None = None

    def forward(self, *received: Tensor, number: int) -> Any:
        """received: the activation, unless this is the first stage; number: of the micro-batch. Returns the next
        activation; on the last stage the loss, or without `loss_of` the model's output."""
        inputs, x = self.batches[number], received[0] if received else None
        with self.autocast():
            if self.chain is not None:
                output = self.chain.run(self.model, self.index, x, inputs)
            else:
                output = self.model.run_stage(x, **inputs)
            if self.last:
                return output if self.loss_of is None else self.loss_of(output, number)
        output = output.to(self.receives(self.index + 1, number).dtype)
        return output.clone() if output._is_view() else output  # schedules detach it in place

    def receives(self, index: int, number: int) -> Tensor:
        """A meta tensor like the activation of a micro-batch that stage `index` receives."""
        inputs = self.batches[number]
        return self.chain.activation(index, inputs) if self.chain else self.model.stage_activation(**inputs)


class _TorchStage(PipelineStage):
    """PyTorch's stage with room for activations and gradients of each micro-batch's own shape, made when needed."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make_room(self.args_recv_info[fwd_chunk_id], self.stage_index, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._make_room(self.grad_recv_info[bwd_chunk_id], self.stage_index + 1, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _make_room(self, infos: Sequence[Any], receiver: int, number: int) -> None:
        stage: Any = self.submod
        for info in infos:
            if not info.is_root_arg:
                info.buffer = _room(stage.receives(receiver, number), self.device)

    # Shapes are given: there is nothing to find out by trial runs, and nothing to vote about.
    def _warmup_forward_vote(self, has_backward: bool, received_acc: Any = None) -> Any:
        return None

    def _warmup_backward_result(self, received_result: Any = None) -> Any:
        return _Yes()


class _Yes:
    def item(self) -> int:
        return 1


def _room(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


class Pipeline:
    """The stages of this rank, and their neighbours. ends_here: whether the last stage is among them."""

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[Stage],
        mesh: Mesh,
        layout: Parallel,
        count: int,
        twins: Sequence[stages.Twin],
    ) -> None:
        self.model, self.modules, self.device, self.count = model, modules, mesh.device, count
        self.ends_here = any(module.last for module in modules)
        self.schedule, self.ranks = find_schedule(layout.schedule), layout.pipeline
        self.here, self.group = mesh.coordinate("pipeline"), mesh.group("pipeline")
        self.twins = [self._twin(twin, mesh) for twin in twins]
        self._schedules: dict[int, Any] = {}
        logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # it prints whole plans

    def _twin(self, twin: stages.Twin, mesh: Mesh) -> tuple[list[tuple[str, bool]], Any]:
        """((name here, whether it is the one that counts) …, the ranks that share it or None if there is no other)."""
        first = min(twin.names)
        own = {m.index for m in self.modules}
        names = [(names[0], stage == first) for stage, names in sorted(twin.names.items()) if stage in own]
        holders = sorted({self.schedule.rank_of(stage, self.ranks) for stage in twin.names})
        return names, mesh.part_of("pipeline", holders)

    def run(
        self,
        batches: Inputs,
        loss_of: Callable[[Any, int], Tensor],
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Forward and backward passes of a step's micro-batches; gradients of the losses add up in the parameters.

        loss_of(output, number) is called where the last stage is.
        """
        self._prepare(batches, loss_of, autocast)
        schedule, n = self._schedule(len(batches)), len(batches)
        for stage in schedule.twofold_stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        numbers = [{"number": i} for i in range(n)]
        try:
            schedule._step_microbatches([()] * n, numbers, list(range(n)), return_outputs=False)
        except RuntimeError as error:
            raise (error.__cause__ if isinstance(error.__cause__, UserError) else error) from error.__cause__
        self._sum_twins()

    def _prepare(self, batches: Inputs, loss_of: Any, autocast: Any) -> None:
        for module in self.modules:
            module.batches, module.loss_of, module.autocast = batches, loss_of, autocast
            if module.training != self.model.training:
                module.train(self.model.training)

    def _schedule(self, n: int) -> Any:
        """The schedule for n micro-batches; stages over the same modules cost little."""
        if n not in self._schedules:
            made = [self._stage(module) for module in self.modules]
            schedule: Any = self.schedule.torch_class()
            several = self.schedule.stages > 1
            built = schedule(made if several else made[0], n, loss_fn=lambda loss, number: loss, scale_grads=False)
            built.twofold_stages = made
            self._schedules[n] = built
        return self._schedules[n]

    def _stage(self, module: Stage) -> PipelineStage:
        i = module.index
        received = () if i == 0 else (_like(module.receives(i, 0)),)
        sent = (torch.empty((), device="meta"),) if module.last else (_like(module.receives(i + 1, 0)),)
        return _TorchStage(module, i, self.count, self.device, input_args=received, output_args=sent, group=self.group)

    @torch.no_grad()
    def _sum_twins(self) -> None:
        for names, group in self.twins:
            mine = [g for name, _ in names if (g := _gradient(self.model.get_parameter(name))) is not None]
            if not mine:
                continue
            total = mine[0] if len(mine) == 1 else mine[0].add_(mine[1])
            if group is not None:
                dist.all_reduce(total, group=group)
            for other in mine[1:]:
                other.copy_(total)

    def counted_elsewhere(self) -> set[int]:
        """ids of the parameters whose gradient another stage's copy stands for in a norm."""
        return {id(self.model.get_parameter(name)) for names, _ in self.twins for name, counts in names if not counts}

    @torch.no_grad()
    def evaluate(self, inputs: dict[str, Any], autocast: Callable[[], AbstractContextManager[Any]]) -> Any:
        """The model's output for one micro-batch where the last stage is, None elsewhere."""
        self._prepare([inputs], None, autocast)
        x: Any = None
        for module in self.modules:
            before = self.schedule.rank_of(module.index - 1, self.ranks) if module.index else self.here
            if before != self.here:
                x = _room(module.receives(module.index, 0), self.device)
                dist.recv(x, group=self.group, group_src=before)
            x = module(*([] if module.index == 0 else [x]), number=0)
            after = self.here if module.last else self.schedule.rank_of(module.index + 1, self.ranks)
            if after != self.here:
                dist.send(x.contiguous(), group=self.group, group_dst=after)
        return x if self.ends_here else None


def _gradient(p: nn.Parameter) -> Tensor | None:
    """What this rank holds of a parameter's gradient, laid out as the parameter is."""
    grad: Any = p.grad
    if not isinstance(p, DTensor) or grad is None:
        return grad
    if grad.placements != p.placements:
        p.grad = grad = grad.redistribute(placements=p.placements)
    return grad._local_tensor


def _like(meta: Tensor) -> Tensor:
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta", requires_grad=True)
