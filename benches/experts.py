#!/usr/bin/env python3
"""Compares the planner's answers with the layouts that an expert would try first.

Draws random jobs: dense models and mixtures with odd numbers of layers, large vocabularies and windows, multi-token prediction,
encoder-decoders and vision models; clusters of 1 to 512 devices of one or two kinds, with NVLink or PCIe, networks of 10 to 400 Gbit/s,
oversubscribed trees, tori and odd numbers of nodes; tiny to huge batches, long sequences, several stacks, fine-tuning methods.

Writes layouts by rule for each job: data parallelism alone with ZeRO 0 to 3; `tensor` inside nodes; a pipeline over nodes, one inside
them, and both beside `tensor`; experts inside nodes, with a pipeline over them; `context` for long sequences; offloading last. Each with
micro-batches of one, two and four samples and the least recomputation that fits.

`simulate` runs each layout under the answer's own plan fields, with as much memory as the plan may use. Prints a line per job: the
answer's step over that of the best expert's layout, the gap, the time of the search and that of its first answer. Prints last how many
answers are worse by more than 2 %, the worst, how many jobs had no answer although a layout fits, and how many searches took more than
10 % and 0.3 s beyond the limit.

Usage: cargo build --release && benches/experts.py SEED JOBS [--only N,N] [--time-limit 10s] [--foretell PATH] [--out FILE] [--known FILE]
                                                              [--verbose] [--keep DIR]
Needs only Python 3. A job depends only on the seed and its number. `--known` takes the experts' times from an earlier `--out` file.
"""
import argparse
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Memory in GiB, rate in TFLOP/s, the link inside a node, devices of a usual node.
DEVICES = {
    "a100-sxm-40g": (40, 312, "nvswitch-300GB/s", (4, 8)), "a100-sxm-80g": (80, 312, "nvswitch-300GB/s", (8, 8, 4, 3)),
    "h100-sxm-80g": (80, 989, "nvswitch-450GB/s", (8, 8, 8, 7)), "h200-sxm-141g": (140, 989, "nvswitch-450GB/s", (8,)),
    "b200-sxm-180g": (180, 2250, "nvswitch-900GB/s", (8,)), "gb200": (186, 2450, "nvswitch-900GB/s", (72, 36)),
    "v100-sxm-32g": (32, 125, "nvlink-mesh-150GB/s", (4, 8)), "v100-sxm-16g": (16, 125, "nvlink-mesh-150GB/s", (4, 8)),
    "mi300x": (192, 1307, "nvlink-mesh-448GB/s", (8,)), "l40s": (44, 362, "pcie-31GB/s", (8, 4, 2)), "l4": (24, 121, "pcie-31GB/s", (8, 4)),
    "a10g": (24, 70, "pcie-16GB/s", (4, 8, 1)), "t4": (16, 65, "pcie-16GB/s", (1, 4)), "rtx-4090": (24, 165, "pcie-31GB/s", (8, 2, 1)),
    "rtx-a6000": (48, 155, "pcie-31GB/s", (4, 2)),
}
TPUS = {"tpu-v4": (32, 275, 3, "50GB/s"), "tpu-v5e": (16, 197, 2, "50GB/s"), "tpu-v5p": (95, 459, 3, "100GB/s")}
# The same as `simulator/src/gpu/profiles/stacks/`, as far as the drawn stacks need it.
SPLITS = {"fsdp": False, "deepspeed-zero": False, "ddp": False}
MOST_MESHES = 9
# Seconds after which no further layout of a job is tried.
SECONDS_OF_EXPERTS = 30


def divisors(number):
    return [one for one in range(1, number + 1) if number % one == 0]


def draw_cluster(rng):
    """Returns a topology, the number of devices, those of a node, and the memory and the rate of each node's devices."""
    if rng.random() < 0.08:
        kind = rng.choice(list(TPUS))
        memory, rate, dimensions, bandwidth = TPUS[kind]
        hosts = rng.choice([1, 2, 4, 8, 16, 32, 64])
        topology = {"name": "drawn", "nodes": [{"name": "host", "count": hosts, "devices": {"kind": kind, "count": 4}}],
                    "network": {"kind": "torus", "dimensions": dimensions, "bandwidth": bandwidth}}
        return topology, hosts * 4, 4, [(memory, rate)] * hosts
    is_mixed = rng.random() < 0.12
    pairs = [("h100-sxm-80g", "a100-sxm-80g"), ("a100-sxm-80g", "v100-sxm-32g"), ("v100-sxm-32g", "t4"), ("h200-sxm-141g", "h100-sxm-80g"),
             ("a100-sxm-80g", "a100-sxm-40g"), ("l40s", "l4")]
    kinds = rng.choice(pairs) if is_mixed else [rng.choice(list(DEVICES))]
    nodes, by_node = [], []
    nic = rng.choice(["10Gbit/s", "25Gbit/s", "100Gbit/s", "100Gbit/s", "200Gbit/s", "400Gbit/s", "400Gbit/s"])
    for index, kind in enumerate(kinds):
        memory, rate, link, counts = DEVICES[kind]
        per_node = rng.choice([one for one in counts if not is_mixed or one > 1] or [4])
        count = rng.choice([1, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64] if not is_mixed else [1, 2, 3, 4])
        while per_node * count > 512:
            count //= 2
        fast = per_node if nic in ("200Gbit/s", "400Gbit/s") and "pcie" not in link else 1
        node = {"name": f"n{index}", "count": count, "devices": {"kind": kind, "count": per_node}, "link": link,
                "nics": {"count": fast, "bandwidth": nic}}
        if rng.random() < 0.5:
            node["host_memory"] = f"{max(64, 2 * memory * per_node)}GB"
        nodes.append(node)
        by_node += [(memory, rate)] * count
    networks = [{"kind": "switch", "latency": "10us"}, {"kind": "switch", "transport": "tcp"},
                {"kind": "fat-tree", "oversubscription": 1, "latency": "5us"},
                {"kind": "fat-tree", "oversubscription": rng.choice([2, 4]), "nodes_per_leaf": rng.choice([2, 4, 8]), "latency": "5us"}]
    network = rng.choice(networks[:2] if nic in ("10Gbit/s", "25Gbit/s") else networks)
    per_node = min(node["devices"]["count"] for node in nodes)
    world = sum(node["count"] * node["devices"]["count"] for node in nodes)
    return {"name": "drawn", "nodes": nodes, "network": network}, world, per_node, by_node


def draw_model(rng):
    """Returns a model and about how many parameters it has."""
    kind = rng.choice(["llama", "llama", "llama", "gpt", "gpt", "decoder", "decoder", "moe", "moe", "moe", "t5", "bert", "vit", "resnet"])
    if kind == "resnet":
        return rng.choice(["resnet50", "vgg16"]), 5e7
    hidden = rng.choice([768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 12288])
    layers = rng.choice([6, 12, 17, 22, 24, 27, 31, 32, 36, 40, 42, 48, 60, 61, 80, 96, 126])
    heads = hidden // 128 if hidden >= 2048 else hidden // 64
    if kind == "vit":
        hidden = min(hidden, 3072)
        model = {"family": "vit", "layers": min(layers, 48), "hidden": hidden, "heads": hidden // (96 if hidden % 96 == 0 else 64),
                 "ffn": 4 * hidden, "patch": 14, "image": 224}
        return model, model["layers"] * 12 * hidden**2
    if kind in ("t5", "bert"):
        hidden, layers = min(hidden, 4096), min(layers, 36)
        heads = hidden // 64
        model = {"family": kind, "layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "vocab": 32128}
        if kind == "t5":
            model |= {"source_sequence": rng.choice([512, 1024]), "target_sequence": rng.choice([128, 512])}
        else:
            model["sequence"] = rng.choice([128, 512])
        return model, layers * (28 if kind == "t5" else 12) * hidden**2
    sequence = rng.choice([1024, 2048, 2048, 4096, 4096, 8192, 8192, 32768, 131072])
    vocab = rng.choice([32000, 50304, 64000, 102400, 128256, 151936, 256000])
    model = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "sequence": sequence}
    if kind == "gpt":
        return {"family": "gpt", **model, "ffn": 4 * hidden}, layers * 12 * hidden**2 + vocab * hidden
    kv_heads = rng.choice([heads, 8 if heads % 8 == 0 else heads, 4 if heads % 4 == 0 else heads])
    ffn = rng.choice([int(8 / 3 * hidden) // 256 * 256, 4 * hidden])
    model = {**model, "kv_heads": kv_heads, "ffn": ffn}
    attention = 2 * hidden**2 * (1 + kv_heads / heads)
    if kind == "llama":
        return {"family": "llama", **model}, layers * (attention + 3 * hidden * ffn) + 2 * vocab * hidden
    model = {"family": "decoder", **model}
    if rng.random() < 0.4:
        model |= {"window": rng.choice([1024, 4096]), "full_attention_every": rng.choice([2, 6])}
    if rng.random() < 0.3:
        model |= {"tied_embeddings": True}
    if rng.random() < 0.25:
        model |= {"prediction_modules": 1}
    if kind == "decoder":
        return model, layers * (attention + 3 * hidden * ffn) + vocab * hidden
    experts = rng.choice([8, 16, 32, 60, 64, 128, 160, 256])
    inner = rng.choice([hidden // 4, hidden // 2, hidden, 2 * hidden]) if experts < 128 else rng.choice([hidden // 4, hidden // 2])
    mixtures = {"experts": experts, "top_k": rng.choice([2, 4, 6, 8]) if experts > 8 else 2, "ffn": inner}
    if rng.random() < 0.4:
        mixtures |= {"shared_ffn": inner, "first": rng.choice([1, 3])}
    model |= {"mixtures": mixtures, "ffn": rng.choice([4 * hidden, inner]), "sequence": min(sequence, 8192)}
    return model, layers * (attention + 3 * hidden * inner * experts) + 2 * vocab * hidden


def draw_job(seed, number):
    """Draws a cluster, and a model that may fit on it."""
    rng = random.Random(f"{seed}/{number}")
    topology, world, per_node, by_node = draw_cluster(rng)
    total = sum(memory for memory, _ in by_node) * 2**30 * world / len(by_node)
    for _ in range(1000):
        model, parameters = draw_model(rng)
        if 0.01 <= parameters * 16 / total <= 0.75:
            break
    stack = rng.choice([None] * 6 + ["foretell", "foretell", "megatron-core", "deepspeed", "fsdp", "deepspeed-zero", "torchtitan"])
    family = model["family"] if isinstance(model, dict) else model
    is_transformer = family not in ("resnet50", "vgg16")
    method = None
    if family == "llama" and world <= 8 and rng.random() < 0.35:
        method, stack = rng.choice(["lora", "qlora", "full"]), None
    elif not is_transformer:
        stack = rng.choice([None, "foretell"])
    if "tpu" in json.dumps(topology):
        stack = None
    tokens = model.get("sequence", 512) if isinstance(model, dict) else 1
    batches = [world, 2 * world, 4 * world, 8 * world, 16 * world, max(1, world // 4), 96, 120, 256, 1000, 1024]
    if is_transformer:
        # Up to 16 million tokens: what large runs have.
        batches = [batch for batch in batches if batch * tokens <= 16e6] or [world]
        if rng.random() < 0.08:
            batches = [64 * world]
    else:
        batches = [32 * world, 128 * world, 256]
    batch = rng.choice(batches)
    headroom = 0.025 if stack == "foretell" or method or len(topology["nodes"]) > 1 else 0.06
    arguments = ["--global-batch", str(batch), "--headroom", f"{headroom * 100:g}%"]
    arguments += ["--stack", stack] if stack else []
    arguments += ["--method", method] if method else []
    if method and rng.random() < 0.5:
        arguments += ["--sequence", str(rng.choice([1024, 2048, 4096]))]
    return {"number": number, "model": model, "topology": topology, "arguments": arguments, "batch": batch, "world": world,
            "per_node": per_node, "by_node": by_node, "stack": stack, "method": method, "headroom": headroom}


class Foretell:
    def __init__(self, path, folder):
        self.path, self.folder = path, pathlib.Path(folder)

    def write(self, name, value):
        # JSON is valid YAML.
        (self.folder / name).write_text(json.dumps(value))
        return str(self.folder / name)

    def json(self, *arguments, seconds=60):
        """Returns the JSON document or None, the error and the seconds that it took."""
        start = time.time()
        try:
            run = subprocess.run([self.path, *arguments, "--json"], capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return None, f"it took more than {seconds} s", time.time() - start
        took = time.time() - start
        if "panicked" in run.stderr or run.returncode not in (0, 1, 2):
            return None, f"PANIC: {run.stderr.strip()[-400:]}", took
        return (json.loads(run.stdout), "", took) if run.returncode == 0 else (None, run.stderr.strip(), took)


def expert_meshes(job, rng, stack, plan):
    """Returns meshes that an expert would write down, as fields of layouts: those of each rule, then some at random."""
    model = job["model"] if isinstance(job["model"], dict) else {}
    world, per_node, batch = job["world"], job["per_node"], job["batch"]
    heads, kv_heads = model.get("heads", 1), model.get("kv_heads") or model.get("heads", 1)
    layers = model.get("layers", 1) * (2 if model.get("family") == "t5" else 1)
    experts = (model.get("mixtures") or {}).get("experts", 1)
    sequence = plan.get("sequence") or model.get("sequence", 1)
    splits = SPLITS.get(stack, True) and not job["method"]
    schedules = ["gpipe"] if (stack or "").startswith("maxtext") else ["1f1b"] if stack == "deepspeed" else ["1f1b", "interleaved"]
    largest = max([one for one in range(1, world + 1) if batch % one == 0])
    found = []

    def add(data, tensor=1, pipeline=1, expert=1, context=1, schedule=None, **more):
        ranks = data * tensor * pipeline * expert * context
        if ranks > world or ranks < 1 or batch % (data * expert) or pipeline > layers or heads % tensor or experts % expert:
            return
        if context > 1 and (sequence % (2 * context) or sequence // context < 1024) or tensor > 1 and sequence % tensor:
            return
        mesh = {"data": data, "tensor": tensor, "pipeline": pipeline, "expert": expert, "context": context, **more}
        if tensor > 1 and model.get("family") not in ("t5",):
            mesh["sequence_parallel"] = True
        if tensor > 1 and expert > 1 and experts % (expert * tensor) == 0:
            mesh["expert_tensor"] = 1
        if pipeline > 1:
            mesh["schedule"] = schedule or schedules[0]
            micro_batches = batch // (data * expert)
            if mesh["schedule"] == "interleaved":
                chunks = [one for one in (2, 3, 4, 5, 6, 7, 8) if one * pipeline <= layers and micro_batches % pipeline == 0]
                even = [one for one in chunks if layers % (one * pipeline) == 0]
                if not chunks:
                    return
                mesh["virtual_stages"] = rng.choice(even or chunks[:3])
        if mesh not in found:
            found.append(mesh)

    # Data parallelism alone, on all devices or on as many as the batch divides.
    add(largest)
    if splits and heads > 1:
        tensors = [one for one in divisors(per_node) if one > 1 and heads % one == 0 and one <= 8]
        nodes = world // per_node
        for tensor in tensors:
            add(world // tensor, tensor)
        # A pipeline over nodes with data inside them, the other way round, and one stage a device.
        if nodes > 1:
            add(per_node, pipeline=nodes)
        for pipeline in [one for one in divisors(world) if 1 < one <= min(16, layers)]:
            add(world // pipeline, pipeline=pipeline, schedule=rng.choice(schedules))
            for tensor in tensors:
                if world % (tensor * pipeline) == 0:
                    add(world // tensor // pipeline, tensor, pipeline, schedule=rng.choice(schedules))
        for expert in [one for one in divisors(experts) if 1 < one <= max(8, per_node)]:
            if world % expert == 0:
                add(world // expert, expert=expert)
                for pipeline in [one for one in divisors(world // expert) if 1 < one <= min(16, layers)]:
                    add(world // expert // pipeline, pipeline=pipeline, expert=expert, schedule=rng.choice(schedules))
                for tensor in tensors:
                    if world % (expert * tensor) == 0:
                        add(world // expert // tensor, tensor, expert=expert)
        if sequence >= 16384:
            for context in [2, 4, 8, 16]:
                for tensor in [1, *tensors]:
                    if world % (context * tensor) == 0:
                        add(world // context // tensor, tensor, context=context)
                        if rng.random() < 0.5:
                            add(world // context // tensor, tensor, context=context, context_method="ring")
    first, others = found[:1], found[1:]
    # Some of each manner.
    manners = {}
    for mesh in others:
        manners.setdefault(tuple(mesh[axis] > 1 for axis in ("data", "tensor", "pipeline", "expert", "context")), []).append(mesh)
    lists = [rng.sample(one, len(one)) for one in manners.values()]
    chosen = []
    while len(chosen) < MOST_MESHES and any(lists):
        for one in lists:
            if one and len(chosen) < MOST_MESHES:
                chosen.append(one.pop())
    return first + chosen


def mixed_meshes(job, plan, blocks):
    """Returns pipelines whose stages are cut by the speed of their devices: layouts for two kinds of nodes."""
    topology, batch = job["topology"], job["batch"]
    groups = topology["nodes"]
    if len(groups) < 2 or not SPLITS.get(job["stack"], True) or blocks < 8:
        return []
    order = sorted(groups, key=lambda group: group["name"] != plan.get("first_nodes"))
    rates = [DEVICES[group["devices"]["kind"]][1] for group in order for _ in range(group["count"] * group["devices"]["count"])]
    found = []
    for pipeline in [2, 3, 4, 5, 6, 8]:
        for tensor in [1, 2]:
            data = len(rates) // pipeline // tensor
            while data and batch % data:
                data -= 1
            if not data or 2 * data * tensor * pipeline < len(rates):
                continue
            width = data * tensor
            speeds = [min(rates[stage * width:(stage + 1) * width]) for stage in range(pipeline)]
            cuts, rest, left = [], blocks, sum(speeds)
            for speed in speeds:
                count = max(1, round(rest * speed / left))
                cuts.append(count)
                rest, left = rest - count, left - speed
            cuts[-1] += rest
            if min(cuts) > 0:
                found.append({"data": data, "tensor": tensor, "pipeline": pipeline, "cuts": cuts,
                              **({"sequence_parallel": True} if tensor > 1 else {})})
    return found[:4]


def blocks_of(foretell, plan):
    """Returns the number of blocks of a plan's model: what `simulate` says of cuts that cannot be."""
    _, error, _ = foretell.json("simulate", "--plan", foretell.write("impossible.yaml", plan | {"layout": {"data": 1, "cuts": [10**6]}}))
    said = re.search(r"does not divide (\d+) blocks", error)
    return int(said.group(1)) if said else 0


def with_less_memory(topology, headroom):
    """Returns a topology whose devices have what the headroom leaves."""
    kinds = {node["devices"]["kind"] for node in topology["nodes"]}
    usable = {kind: (DEVICES.get(kind) or TPUS[kind])[0] * (1 - headroom) for kind in kinds}
    return topology | {"devices": {f"{kind}-free": {"base": kind, "memory": f"{usable[kind]:.4f}GiB"} for kind in kinds},
                       "nodes": [node | {"devices": node["devices"] | {"kind": node["devices"]["kind"] + "-free"}} for node in topology["nodes"]]}


def simulate_experts(foretell, job, plan):
    """Returns the layouts that fit, each with its step."""
    rng = random.Random(f"layouts/{job['number']}")
    stack = plan.get("stack")
    base = plan | {"topology": foretell.write("free.yaml", with_less_memory(job["topology"], job["headroom"]))}
    base.pop("predicted", None)
    is_adapter = bool(job["method"])
    start, results, refused = time.time(), [], []

    def step(layout):
        answer, error, _ = foretell.json("simulate", "--plan", foretell.write("expert.yaml", base | {"layout": layout}), seconds=30)
        if answer is None:
            if "does not fit" not in error:
                refused.append((layout, error[-200:]))
            return None
        results.append((answer["step_seconds"] if answer["fits"] else None, layout))
        return answer["fits"]

    meshes = expert_meshes(job, rng, stack, plan)
    if len(job["topology"]["nodes"]) > 1:
        meshes += mixed_meshes(job, plan, blocks_of(foretell, base))
    for mesh in meshes:
        is_alone = mesh["tensor"] == mesh["pipeline"] == mesh.get("expert", 1) == mesh.get("context", 1) == 1
        zeros = ([0, 1, 2, 3] if is_alone and stack != "ddp" else [1]) if mesh["data"] * mesh.get("expert", 1) * mesh.get("context", 1) > 1 else [0]
        samples = job["batch"] // mesh["data"] // mesh.get("expert", 1)
        is_small = is_alone and (not isinstance(job["model"], dict) or job["model"]["family"] in ("bert", "vit", "t5"))
        sizes = [size for size in ((1, 4, 16, 32) if is_small else (1, 2, 4)) if samples % size == 0] or [1]
        for zero in zeros:
            # More samples at once need no less recomputation.
            least, too_slow = 0, False
            for size in sizes:
                fits = False
                policies = ["none", "selective", "full"]
                if job["model"] in ("resnet50", "vgg16"):
                    policies = ["none"]
                for policy in range(least, len(policies)):
                    if policies[policy] == "selective" and is_adapter:
                        continue
                    layout = mesh | {"micro_batch": size, "zero": zero}
                    layout |= {"recompute": policies[policy]} if policies[policy] != "none" else {}
                    # Frameworks have buckets of their own.
                    layout |= {"bucket": "160MiB"} if zero >= 2 and stack == "foretell" else {}
                    fits = step(layout)
                    if fits or time.time() - start > SECONDS_OF_EXPERTS:
                        least = policy
                        break
                if not fits:
                    break
            # What fits with less sharding needs no more, unless it had to recompute.
            if least == 0 and fits:
                break
        if time.time() - start > SECONDS_OF_EXPERTS:
            break
    if not any(seconds for seconds, _ in results) and stack == "foretell" and "host_memory" in job["topology"]["nodes"][0]:
        for mesh in meshes[:4]:
            if step(mesh | {"micro_batch": 1, "recompute": "full", "offload": "both"}):
                break
    return results, refused


def written(layout):
    """Returns a layout in few words."""
    names = {"data": "d", "tensor": "t", "pipeline": "p", "expert": "e", "context": "c", "micro_batch": "mb", "zero": "z", "virtual_stages": "v"}
    words = [f"{name}{layout[key]}" for key, name in names.items() if layout.get(key, 1) != 1 or key in ("data", "micro_batch", "zero")]
    words += [str(layout[key]) for key in ("schedule", "recompute", "offload", "cuts", "placement", "shares", "context_method", "shard_group")
              if layout.get(key) not in (None, "none", "1f1b", "gather")]
    return " ".join(words)


def described(job):
    """Returns a job in few words."""
    model = job["model"]
    if isinstance(model, dict):
        mixtures = model.get("mixtures")
        model = (f"{model['family']} {model['layers']}x{model['hidden']}" + (f" vocab {model['vocab']}" if "vocab" in model else "")
                 + (f" seq {model['sequence']}" if "sequence" in model else "") + (" window" if "window" in model else "")
                 + (" mtp" if "prediction_modules" in model else "") + (f" {mixtures['experts']} experts of {mixtures['ffn']}" if mixtures else ""))
    nodes = ", ".join(f"{node.get('count', 1)}x{node['devices']['count']} {node['devices']['kind']} "
                      f"{(node.get('nics') or {}).get('count', '')}x{(node.get('nics') or {}).get('bandwidth', '')}" for node in job["topology"]["nodes"])
    network = job["topology"]["network"]
    return f"{model}; {nodes}; {network['kind']} {network.get('oversubscription', '')}{network.get('transport', '')}; {' '.join(job['arguments'])}"


def run(foretell, job, limit, known):
    model = foretell.write("model.yaml", job["model"]) if isinstance(job["model"], dict) else job["model"]
    topology = foretell.write("topology.yaml", job["topology"])
    arguments = ["--model", model, "--topology", topology, *job["arguments"]]
    progress = foretell.folder / "progress.jsonl"
    progress.unlink(missing_ok=True)
    found, error, wall = foretell.json("plan", *arguments, "--time-limit", f"{limit:g}s", "--top", "3", "--progress", str(progress), seconds=limit + 60)
    result = {"number": job["number"], "job": described(job), "wall": wall, "error": error}
    if found:
        search = found["search"]
        lines = [json.loads(line).get("progress") or {} for line in progress.read_text().splitlines()] if progress.exists() else []
        result |= {"step": found["predicted"]["step_seconds"], "gap": search.get("gap"), "is_cut_off": search.get("is_cut_off"),
                   "layout": found["plan"]["layout"], "first": next((one["seconds"] for one in lines if one.get("best")), None)}
    if known is not None:
        return result | {"experts": known["experts"], "refused": known["refused"]}
    if not found:
        # The plan's other fields, from a search in which all fits.
        found, other, _ = foretell.json("plan", *arguments[:arguments.index("--headroom")], *arguments[arguments.index("--headroom") + 2:],
                                        "--memory-limit", "100TB", "--time-limit", "1s", seconds=60)
        if not found:
            return result | {"experts": [], "refused": [[{}, other[-300:]]]}
    plan = {key: value for key, value in found["plan"].items() if value is not None}
    plan["model"] = model
    experts, refused = simulate_experts(foretell, job, plan)
    return result | {"experts": experts, "refused": refused}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed")
    parser.add_argument("jobs", type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("--time-limit", default="10s")
    parser.add_argument("--foretell", default=str(ROOT / "target/release/foretell"))
    parser.add_argument("--out")
    parser.add_argument("--known")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--keep", help="a folder for each job's files")
    options = parser.parse_args()
    limit = float(options.time_limit.rstrip("s"))
    known = {}
    if options.known:
        known = {one["number"]: one for one in map(json.loads, open(options.known))}
    numbers = [int(one) for one in options.only.split(",")] if options.only else range(options.jobs)
    worse, worst, unanswered, overrun, panics, compared = [], (0, "-"), [], [], [], 0
    with tempfile.TemporaryDirectory() as scratch:
        for number in numbers:
            folder = pathlib.Path(options.keep or scratch) / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            job = draw_job(options.seed, number)
            result = run(Foretell(options.foretell, folder), job, limit, known.get(number))
            fitting = [(seconds, layout) for seconds, layout in result["experts"] if seconds]
            best = min(fitting, key=lambda one: one[0]) if fitting else None
            result["best"] = best
            if options.out:
                with open(options.out, "a") as file:
                    file.write(json.dumps(result) + "\n")
            is_over = result["wall"] > 1.1 * limit + 0.3
            overrun += [number] if is_over else []
            panics += [number] if "PANIC" in result["error"] else []
            print(f"[{number}] {result['job']}")
            if "step" not in result:
                said = result["error"].splitlines()[-1][:220] if result["error"] else ""
                print(f"    no answer in {result['wall']:.1f} s" + (f", but {best[0]:.4g} s [{written(best[1])}]" if best else "") + f": {said}")
                unanswered += [number] if best else []
            else:
                ratio = result["step"] / best[0] if best else None
                compared += ratio is not None
                gap = "none proven" if result["gap"] is None else f"{result['gap']:.1%}"
                first = "-" if result["first"] is None else f"{result['first']:.1f} s"
                print(f"    ratio {'-' if ratio is None else format(ratio, '.3f')}, gap {gap}{' cut off' if result['is_cut_off'] else ''}, "
                      f"{result['wall']:.1f} s{' OVER' if is_over else ''} (first answer {first}), "
                      f"{result['step']:.4g} s [{written(result['layout'])}], {len(fitting)} of {len(result['experts'])} experts' layouts fit"
                      + (f", best {best[0]:.4g} s [{written(best[1])}]" if best and (ratio > 1.001 or options.verbose) else ""))
                if ratio and ratio > 1.02:
                    worse.append(number)
                if ratio:
                    worst = max(worst, (ratio, number))
            if options.verbose:
                for seconds, layout in sorted(result["experts"], key=lambda one: one[0] or 1e99):
                    print(f"        {'does not fit' if seconds is None else format(seconds, '.5g')} [{written(layout)}]")
                for layout, error in result["refused"]:
                    print(f"        refused [{written(layout) if layout else ''}]: {error}")
            sys.stdout.flush()
    print(f"{len(worse)} of {compared} answers are worse by more than 2 % {worse}, the worst {worst[0]:.3f} ({worst[1]}); {len(unanswered)} without an "
          f"answer though an expert's layout fits {unanswered}; {len(overrun)} searches beyond the limit {overrun}; {len(panics)} panics {panics}")


if __name__ == "__main__":
    main()
