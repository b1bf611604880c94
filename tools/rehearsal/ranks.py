# SPDX-License-Identifier: Apache-2.0
"""One rank of a distributed run, alone: its peers are imagined.

torch's own fake process group answers every collective at once and moves
nothing, so shards have their true shapes. vLLM's channels between processes
(shared-memory queues, objects sent from rank to rank) have nobody at the
other end; they are answered here.
"""

import os
from typing import Any


def set_rank(rank: int, world_size: int) -> None:
    """Variables that vLLM's external launcher reads. Every rank has a card 0."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # never opened: the fake group has its own store
    )


def imagine_peers(rank: int, world_size: int) -> None:
    """Replace process groups and channels. Call before vLLM makes any."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    real_init, real_new_group = dist.init_process_group, dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        real_init(backend="fake", store=FakeStore(), rank=rank, world_size=world_size)

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real_new_group(ranks=ranks, backend="fake")

    for module in (dist, distributed_c10d):
        module.init_process_group = init_process_group
        module.new_group = new_group

    import vllm.distributed.parallel_state as parallel_state
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    def no_queue(*args: Any, **kwargs: Any) -> None:
        return None

    def same_object(self: Any, obj: Any = None, src: int = 0) -> Any:
        return obj

    def one_node(group: Any, source_rank: int = 0) -> list[bool]:
        return [True] * world_size

    MessageQueue.create_from_process_group = staticmethod(no_queue)
    parallel_state.GroupCoordinator.broadcast_object = same_object
    parallel_state.in_the_same_node_as = one_node
