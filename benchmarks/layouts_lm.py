"""Language models on the axes that only they have: Twofold against the same layout written by hand with PyTorch.

`python benchmarks/layouts_lm.py SIDE cp:2|ep:2`. Two processes, 8 rows of `rows.synthetic` a step without padding,
logits only at labels on both sides, fused AdamW, clipping at 1, every step's loss logged.
  cp:2  a Llama of 4 layers, width 256: attention by all-to-all, the rest by DDP on each rank's half of the tokens;
  ep:2  a Qwen3-MoE of 4 layers, width 256, 8 experts of 512, 2 a token: experts by all-to-all, the rest by DDP.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import rows as data
from ablation import attention, joined
from ddp2 import _free_port, _shared_folder
from measure import Meter, main, quick, report
from sft import tokenizer

RANKS, STEPS = 2, 3 if quick() else 16


def model(strategy: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": data.VOCABULARY, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 1024}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "head_dim": 64}
    family, more = ("llama", {}) if strategy.startswith("cp") else ("qwen3_moe", experts)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **more), dtype=torch.float32)


def batches() -> list[list[data.Row]]:
    drawn = data.synthetic()
    return [[drawn[(step * data.BATCH + i) % len(drawn)] for i in range(data.BATCH)] for step in range(STEPS)]


def counted() -> dict[str, int]:
    return {"steps": STEPS - 1, "tokens": sum(data.tokens(batch) for batch in batches()[1:])}


def twofold(strategy: str) -> None:
    from twofold import Callback, SFTConfig, SFTTrainer

    class Watch(Callback):
        def on_start(self, info: dict[str, Any]) -> None:
            meter.reset_memory()

        def on_step(self, step: int) -> None:
            meter.step_done(step, STEPS)

        def on_log(self, row: dict[str, Any]) -> None:
            meter.losses.append(row["loss"])

    meter = Meter()
    SFTTrainer(
        model=model(strategy),
        tokenizer=tokenizer(),
        train_dataset=[row for batch in batches() for row in batch],
        args=SFTConfig(max_length=1024),
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=STEPS,
        schedule="constant",
        shuffle=False,
        progress="off",
        folder=_shared_folder(),
        callbacks=[Watch()],
        global_batch_size=data.BATCH,
        lr=1e-3,
        logging_steps=1,
    ).train()
    if os.environ.get("RANK", "0") == "0":
        report(meter, **counted())


def raw(strategy: str) -> None:
    import torch.multiprocessing as mp

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(_free_port())
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.start_processes(raw_rank, args=(strategy,), nprocs=RANKS, start_method="spawn")


def raw_rank(rank: int, strategy: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AttentionInterface

    torch.set_num_threads(max(1, (os.cpu_count() or 2) // RANKS))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    context = strategy.startswith("cp")
    net, experts = model(strategy).train(), []
    AttentionInterface.register("by_hand", across_ranks if context else attention)
    net.set_attn_implementation("by_hand")
    if not context:
        for layer in net.model.layers:
            layer.mlp.experts = Experts.of(layer.mlp.experts, rank)
            experts += list(layer.mlp.experts.parameters())

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, inputs: Any, labels: Any) -> Any:
            hidden, where = self.net.model(**inputs, use_cache=False).last_hidden_state, labels != -100
            return cross_entropy(self.net.lm_head(hidden[where]), labels[where], reduction="sum")

    summed: Any = Summed()
    own = {id(p) for p in experts}
    ignored = [name for name, p in summed.named_parameters() if id(p) in own]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(summed, ignored)
    ddp = DistributedDataParallel(summed)
    dense = [p for p in summed.parameters() if id(p) not in own]
    optimizer = torch.optim.AdamW(summed.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    meter = Meter()
    meter.reset_memory()
    for step, batch in enumerate(batches(), start=1):
        inputs, labels = half_of(batch, rank) if context else joined(batch[rank::RANKS])
        weight = data.targets(batch)
        total = ddp(inputs, labels)
        (total * RANKS / weight).backward()
        for p in experts:
            p.grad.div_(RANKS)
        square = torch.nn.utils.get_total_norm([p.grad for p in experts]).square() if experts else torch.zeros(())
        dist.all_reduce(square)
        norm = (torch.nn.utils.get_total_norm([p.grad for p in dense]).square() + square).sqrt()
        torch.nn.utils.clip_grads_with_norm_(summed.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        shown = total.detach().clone()
        dist.all_reduce(shown)
        meter.losses.append(shown.item() / weight)
        meter.step_done(step, STEPS)
    if rank == 0:
        report(meter, **counted())
    dist.barrier()
    dist.destroy_process_group()


def half_of(batch: list[data.Row], rank: int) -> tuple[dict[str, Any], Any]:
    """This rank's half of the tokens; an odd row gets a token of filler, as a sample of its own."""
    import torch
    from torch.nn.functional import pad

    inputs, labels = joined(batch)
    if labels.shape[1] % RANKS:
        inputs = {"input_ids": pad(inputs["input_ids"], (0, 1)), "position_ids": pad(inputs["position_ids"], (0, 1))}
        inputs["cuts"] = [*(len(row["input_ids"]) for row in batch), 1]
        labels = pad(labels, (0, 1), value=-100)
    part = {name: torch.chunk(inputs[name], RANKS, 1)[rank] for name in ("input_ids", "position_ids")}
    return part | {"cuts": inputs["cuts"]}, torch.chunk(labels, RANKS, 1)[rank]


def swap(x: Any, split: int, along: int) -> Any:
    """All-to-all with a gradient: pieces of one dimension sent, those received put together along another."""
    import torch
    from torch.distributed.nn.functional import all_to_all_single

    sent = torch.stack(x.chunk(RANKS, split)).contiguous()
    return torch.cat(all_to_all_single(torch.empty_like(sent), sent).unbind(0), along)


def across_ranks(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> tuple[Any, None]:
    query, key, value = (swap(x, 1, 2) for x in (query, key, value))
    out, _ = attention(module, query, key, value, *args, **kwargs)  # [1, tokens, heads, head_dim]
    return swap(out, 1, 2), None


class Experts:
    """Half of the experts on each rank, tokens sent to them and back."""

    @staticmethod
    def of(whole: Any, rank: int) -> Any:
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.nn.functional import all_to_all_single
        from torch.nn.functional import linear

        class Part(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.every = whole.num_experts
                self.gate_up = nn.Parameter(whole.gate_up_proj.detach().chunk(RANKS)[rank].clone())
                self.down = nn.Parameter(whole.down_proj.detach().chunk(RANKS)[rank].clone())

            def forward(self, hidden: Any, index: Any, weights: Any) -> Any:
                here, k = self.every // RANKS, index.shape[-1]
                flat = index.reshape(-1)
                order = flat.argsort(stable=True)
                sent = torch.bincount(flat, minlength=self.every).view(RANKS, here)
                received = torch.empty_like(sent)
                dist.all_to_all_single(received, sent)
                out, back = sent.sum(1).tolist(), received.sum(1).tolist()
                tokens = hidden[order // k]
                tokens = all_to_all_single(tokens.new_empty(sum(back), tokens.shape[1]), tokens, back, out)
                which = torch.arange(here).repeat(RANKS).repeat_interleave(received.reshape(-1))
                sorted_by = which.argsort(stable=True)
                done = self.run(tokens[sorted_by], torch.bincount(which, minlength=here).tolist())[sorted_by.argsort()]
                home = all_to_all_single(done.new_empty(sum(out), done.shape[1]), done, out, back)
                home = torch.zeros_like(home).index_copy(0, order, home).view(-1, k, home.shape[1])
                return (home * weights[..., None]).sum(1)

            def run(self, tokens: Any, sizes: Sequence[int]) -> Any:
                parts = []
                for e, x in enumerate(tokens.split(list(sizes))):
                    gate, up = linear(x, self.gate_up[e]).chunk(2, -1)
                    parts.append(linear(whole.act_fn(gate) * up, self.down[e]))
                return torch.cat(parts)

        return Part()


if __name__ == "__main__":
    main({"twofold": twofold, "raw": raw})
