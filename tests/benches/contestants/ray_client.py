"""Client of `flower_app`, a module of its own so that Ray's actors keep its state."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from workload import ContestantWorkload

cache: dict[str, Any] = {}  # workload and network, reused for all clients of an actor
client = ClientApp()


@client.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    if not cache:
        torch.set_num_threads(1)
        cache["work"] = ContestantWorkload(os.environ["BENCH_FOLDER"])
        cache["model"] = cache["work"].network(initial_weights=False)
    work, model = cache["work"], cache["model"]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = work.client(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=work.spec["lr"])
    for rows in torch.randperm(len(y)).split(work.spec["batch"]):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(content), reply_to=message)
