"""A trainer in a process of its own: makes an update group as trainers of this family do, and broadcasts weights.

Arguments: port, group name, a safetensors file of the weights, number of tensors to send (-1: all).
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed import distributed_c10d


def main(port: int, name: str, file: str, count: int) -> None:
    tensors = dict(sorted(load_file(file).items()))
    limit = timedelta(seconds=60)
    store, rank, size = next(
        distributed_c10d.rendezvous(f"tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout=limit)
    )
    store = distributed_c10d.PrefixStore(name, store)
    group, _ = distributed_c10d._new_process_group_helper(
        size, rank, [], distributed.Backend("gloo"), store, group_name=name, timeout=limit
    )
    distributed_c10d._world.pg_group_ranks[group] = {at: at for at in range(size)}
    for tensor in list(tensors.values())[: count if count >= 0 else None]:
        distributed.broadcast(tensor.to(torch.float32), src=0, group=group)
    if count >= 0:
        return  # gone in the middle of an update
    distributed.barrier(group=group)


if __name__ == "__main__":
    main(*(int(arg) if arg.lstrip("-").isdigit() else arg for arg in sys.argv[1:]))  # type: ignore[arg-type]
