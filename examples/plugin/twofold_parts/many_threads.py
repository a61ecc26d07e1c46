"""A backend: gloo with more threads to copy and add with. `run: {backend: many-threads}`.

A function without arguments that registers a backend with PyTorch (once) and returns its name.
"""

import torch.distributed as dist

NAME = "many_threads"


def register():
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _group, devices=["cpu"])
    return NAME


def _group(store, rank, ranks, timeout):
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._timeout, options._threads = timeout, 8
    return dist.ProcessGroupGloo(store, rank, ranks, options)
