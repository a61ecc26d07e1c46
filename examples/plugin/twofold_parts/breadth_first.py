"""A pipeline schedule: breadth-first (arXiv 2211.05953). `run: {strategy: "pp:2,breadth-first"}`.

All micro-batches pass a rank's first stage before its second; backward passes run in the order of the forward passes.
A schedule is a `Schedule` that names a class of torch.distributed.pipelining, here one of our own.
"""

from torch.distributed.pipelining.schedules import ScheduleLoopedBFS, _Action, _ComputationType

from twofold.parallel.schedules import Schedule


class BreadthFirst(ScheduleLoopedBFS):
    def _calculate_single_rank_operations(self, rank):
        stages = range(rank, self.pp_group_size * len(self._stages), self.pp_group_size)
        numbers = range(self._n_microbatches)
        forward = [_Action(stage, _ComputationType.FORWARD, n) for stage in stages for n in numbers]
        backward = [_Action(stage, _ComputationType.FULL_BACKWARD, n) for stage in reversed(stages) for n in numbers]
        waiting = [None] * (2 * (self.pp_group_size - 1 - rank))  # until the first gradient can be here
        return [None] * rank + forward + waiting + backward


SCHEDULE = Schedule("twofold_parts.breadth_first:BreadthFirst", stages=2)
