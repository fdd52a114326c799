"""One of two ranks that publish a module in parts; started by test_publishing.py.

python publishing_rank.py BRIDGE HOW DTYPE     with torchrun's environment variables
"""

import sys

import torch
from torch import nn

from shmbridge.consumers.learner.model.sharding import whole
from shmbridge.consumers.learner.train.publishing import WeightsPublisher
from shmbridge.consumers.learner.world import joined
from shmbridge.weights import WeightsPart, WeightsReader, WeightsWriter

SHAPES = {"even": (4, 6), "uneven": (7, 5), "one_row": (1, 3), "one": (1,), "many": (513, 2)}


def module() -> nn.Module:
    torch.manual_seed(3)
    made = nn.Module()
    for name, shape in SHAPES.items():
        made.register_parameter(name, nn.Parameter(torch.randn(shape)))
    made.register_parameter("tied", made.even)
    return made


def main(bridge: str, how: str, dtype: str) -> None:
    with joined("cpu", 60.0) as world:
        made = module()
        if how == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(made, mesh=init_device_mesh("cpu", (world.size,)))
        writer = WeightsWriter(bridge) if world.is_main else None
        part = None if world.is_main else WeightsPart(bridge)
        publisher = WeightsPublisher(made, getattr(torch, dtype), world, writer, part)
        for version in range(2):
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.add_(version)
            publisher.publish(version)
        gathered = {
            name: whole(parameter.detach()).to(getattr(torch, dtype))
            for name, parameter in made.named_parameters()
        }
        world.broadcast(0)
        if world.is_main:
            with WeightsReader(bridge) as reader, reader.lease() as lease:
                assert lease.version == 1
                assert lease.tensors.keys() == gathered.keys()
                for name, tensor in gathered.items():
                    expected = tensor.view(torch.uint16).numpy() if dtype == "bfloat16" else tensor.numpy()
                    assert lease.dtypes[name] == dtype
                    assert (lease.tensors[name] == expected).all(), name
            print("equal", flush=True)
        else:
            held = [name for name, _, index in publisher._own_parts() if index is not None or how == "ddp"]
            print(" ".join(held), flush=True)
        world.broadcast(0)
        for each in (writer, part):
            if each is not None:
                each.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
