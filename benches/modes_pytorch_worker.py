#!/usr/bin/env python3
"""One PyTorch process of benches/modes_pytorch.py. Reads a number of steps per line from standard input, and makes as many.

Started by benches/modes_pytorch.py in its virtual environment, not by hand. Every answer is one line of JSON.
"""
import argparse
import datetime
import json
import os
import sys
import threading
import time
import warnings

import torch
import torch.distributed as distributed
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import pytorch_worker


class LocalSgd(pytorch_worker.Training):
    """DDP whose ranks average their parameters at the end of each round."""

    def __init__(self, options):
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        super().__init__(options)
        alone, _ = distributed.new_subgroups(group_size=1)
        state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=0,
                                  post_local_gradient_allreduce=options.variant == "stock")
        self.model.register_comm_hook(state, post_localSGD_hook)
        self.optimizer = PostLocalSGDOptimizer(self.optimizer, PeriodicModelAverager(period=options.every, warmup_steps=0))


class Server:
    """The parameters and the optimizer's state. Updates once enough workers have pushed."""

    def __init__(self, case, variant, pushes):
        self.model = pytorch_worker.build(case["model"], 1)[0]
        self.variant, self.pushes, self.lock = variant, pushes, threading.Lock()
        fused = True if variant == "flat" else None
        kind, more = optimizer_of(case)
        self.optimizer = kind(self.model.parameters(), **more, fused=fused)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.arrived, self.updated = 0, torch.futures.Future()

    def parameters(self):
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]

    def state(self):
        """What workers pull: the module, or all parameters in one tensor."""
        return self.model if self.variant == "batch" else parameters_to_vector(self.model.parameters()).detach()

    def forward(self, inputs):
        return self.model(inputs)

    def add(self, gradients):
        if self.variant == "flat":
            parameters = list(self.model.parameters())
            gradients = [part.view_as(one) for part, one in zip(gradients.split([one.numel() for one in parameters]), parameters)]
        for parameter, gradient in zip(self.model.parameters(), gradients):
            parameter.grad += gradient

    def push(self, gradients):
        with self.lock:
            self.add(gradients)
            self.arrived += 1
            updated = self.updated
            if self.arrived == self.pushes:
                for parameter in self.model.parameters():
                    parameter.grad /= self.pushes
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.arrived, self.updated = 0, torch.futures.Future()
                updated.set_result(self.state())
        return updated


def optimizer_of(case):
    """The optimizer's class and options, as in pytorch_worker.Training."""
    if case["optimizer"] == "adamw":
        return torch.optim.AdamW, {"lr": 1e-4, "weight_decay": 0.0}
    return torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}


# Set in the server's process.
SERVER = None


def call(name, *arguments):
    return getattr(SERVER, name)(*arguments)


@rpc.functions.async_execution
def push(gradients):
    return SERVER.push(gradients)


class Worker:
    """A worker that pushes its gradients, and gets the parameters with the answer."""

    def __init__(self, options, case):
        self.model, self.inputs, self.labels, _ = pytorch_worker.build(case["model"], case["batch"] // options.workers)
        self.flat = options.variant == "flat"
        self.take(rpc.rpc_sync("server", call, args=("state",)))

    def take(self, state):
        if self.flat:
            vector_to_parameters(state, self.model.parameters())
        else:
            self.model = state

    def step(self):
        self.model.zero_grad()
        loss = functional.cross_entropy(self.model(self.inputs), self.labels)
        loss.backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        self.take(rpc.rpc_sync("server", push, args=(parameters_to_vector(gradients) if self.flat else gradients,)))
        return loss.item()


class AutogradWorker:
    """A worker that has samples and losses; the server runs the model."""

    def __init__(self, options, case):
        _, self.inputs, self.labels, _ = pytorch_worker.build(case["model"], case["batch"] // options.workers)
        kind, more = optimizer_of(case)
        self.optimizer = DistributedOptimizer(kind, rpc.rpc_sync("server", call, args=("parameters",)), **more)

    def step(self):
        with autograd.context() as context:
            loss = functional.cross_entropy(rpc.rpc_sync("server", call, args=("forward", self.inputs)), self.labels)
            autograd.backward(context, [loss])
            self.optimizer.step(context)
            return loss.item()


def timed(work, count):
    start = time.perf_counter()
    for _ in range(count):
        loss = work.step()
    return {"seconds": time.perf_counter() - start, "loss": loss}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, help="JSON")
    parser.add_argument("--variant", choices=["stock", "tuned", "batch", "flat", "autograd"], required=True)
    parser.add_argument("--rank", type=int, required=True, help="a server has rank 0")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--pushes", type=int, required=True, help="pushes of an update")
    parser.add_argument("--every", type=int, required=True, help="steps of a round")
    parser.add_argument("--meeting", required=True, help="file through which the processes find each other")
    options = parser.parse_args()
    options.ranks, options.precision = options.workers, "fp32"
    case = json.loads(options.case)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(options.rank)
    meeting, work = f"file://{options.meeting}", None
    if options.variant in ("stock", "tuned"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[options.rank]})
        distributed.init_process_group("gloo", init_method=meeting, rank=options.rank, world_size=options.workers,
                                       timeout=datetime.timedelta(minutes=10))
        work = LocalSgd(options)
    else:
        if options.rank == 0:
            global SERVER
            SERVER = Server(case, options.variant, options.pushes)
        name = f"worker{options.rank}" if options.rank else "server"
        rpc.init_rpc(name, rank=options.rank, world_size=options.workers + 1,
                     rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=meeting, rpc_timeout=600))
        if options.rank:
            work = (AutogradWorker if options.variant == "autograd" else Worker)(options, case)
    if work:
        timed(work, options.every)
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(work, int(line)) if work else {"seconds": 0.0}), flush=True)
    if options.variant in ("batch", "flat", "autograd"):
        rpc.shutdown()


if __name__ == "__main__":
    main()
