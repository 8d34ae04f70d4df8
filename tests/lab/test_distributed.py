"""Processes that train together, and how they part."""

import socket

from processes import start, succeed

# Between two lines the interpreter's lock is not passed on: to wait for a thread that waits for it is to wait forever.
VISIT = """
import os, sys
from temper_lab.distributed import ParallelModel, process_group
from temper_lab.model import GPT, ModelConfig

sys.setswitchinterval(100)
config = ModelConfig(depth=1, head_dim=32, context=32, vocab_size=64, preset="temper-cp", num_streams=2)


def visit():
    with process_group("cpu") as world:
        spread = ParallelModel(GPT(config), world)
        for value in range(3):
            assert world.on_rank0(lambda: value) == value
        spread.close()


for port in sys.argv[1:]:
    os.environ["MASTER_PORT"] = port
    visit()
"""


def free_ports(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def test_leaving_does_not_wait_for_itself():
    ports = free_ports(8)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = [start("-c", VISIT, *ports, RANK=rank, LOCAL_RANK=rank, **place) for rank in ("0", "1")]
    succeed(processes)
