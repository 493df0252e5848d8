#!/usr/bin/env python3
"""Tries to find layouts that are faster than the planner's answer.

Draws random models, clusters and batches. Plans each one, simulates the written plan, and simulates about seventy random variations of
the layouts in the answer. Reports:

  DIFFERS       the simulation of the written plan gives another step time than the search
  MISCOUNTED    the counts in the certificate do not add up to the size of the search space
  BELOW BOUND   a variation is faster than the lower bound: it is outside the search space, or the bound is wrong
  within gap    a variation is faster than the plan, but not than the lower bound

With --two-kinds a cluster has two nodes with different devices and little memory. A hill climb then replaces the random variations: it
moves one or two blocks between stages, or recomputes more or fewer blocks, and keeps what is not slower. It starts from each layout in the
answer and from the best ones with two and with four stages.

Usage: cargo build --release && benches/beat_the_plan.py SEED SECONDS [--two-kinds] [--foretell PATH] [--keep DIR]
Needs only Python 3. The cases depend only on the seed; the number of cases depends on the speed of the machine.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMED = ["resnet50", "vgg16", "t5-small", "gpt2", "vit_b_16", "bert-base-uncased", "mlp"]
LAYERS = {"gpt2": 12, "vit_b_16": 12, "bert-base-uncased": 12}
DEVICES = ["a100-sxm-80g", "v100-sxm-32g", "h100-sxm-80g"]
COUNTED = ["alike", "needless", "indivisible", "out_of_memory", "bounded_out", "simulated"]


def divisors(number):
    return [one for one in range(1, number + 1) if number % one == 0]


def draw_model(rng):
    kind = rng.choice(["gpt", "llama", "moe", "bert"] + NAMED)
    if kind in NAMED:
        return kind
    hidden = rng.choice([512, 768, 1024, 2048])
    heads = rng.choice([8, 12, 16]) if hidden % 3 == 0 else rng.choice([8, 16])
    model = {"family": kind, "layers": rng.choice([3, 4, 6, 7, 8, 12]), "hidden": hidden, "heads": heads, "ffn": 4 * hidden,
             "vocab": rng.choice([8192, 32000, 50257]), "sequence": rng.choice([128, 512, 1024, 2048])}
    if kind == "moe":
        model |= {"experts": rng.choice([4, 8]), "top_k": 2}
    if kind in ("llama", "moe"):
        model["kv_heads"] = rng.choice([heads, max(2, heads // 4)])
    return model


def draw_topology(rng):
    def node(index):
        return {"name": f"n{index}", "count": rng.choice([1, 2, 3]),
                "devices": {"kind": f"d{index}", "count": rng.choice([1, 2, 3, 4, 8])},
                "link": rng.choice(["nvswitch-300GB/s", "nvswitch-150GB/s"]),
                "nics": {"count": 1, "bandwidth": rng.choice(["10Gbit/s", "100Gbit/s", "400Gbit/s"])}}

    nodes = [node(index) for index in range(1 + (rng.random() < 0.3))]
    devices = {f"d{index}": {"base": rng.choice(DEVICES)} for index in range(len(nodes))}
    if rng.random() < 0.4:
        devices["d0"]["memory"] = rng.choice(["3GiB", "6GiB", "10GiB", "16GiB"])
    if rng.random() < 0.3:
        for one in nodes:
            one["host_memory"] = "500GB"
    network = {"kind": "fat-tree", "oversubscription": rng.choice([1, 2, 4]), "latency": "5us"}
    return {"name": "drawn", "devices": devices, "nodes": nodes, "network": network}


def change(rng, layout, world, batch, layers):
    """Returns a copy of a layout with one to three random changes."""
    layout = dict(layout)
    for _ in range(rng.choice([1, 1, 2, 3])):
        what = rng.choice(["mesh", "mesh", "zero", "micro", "schedule", "recompute", "sequence", "placement", "cuts", "bucket",
                           "context", "expert", "offload", "collective", "shards"])
        if what == "mesh":
            used = rng.choice([world, world, max(divisors(world)[:-1] or [1])])
            tensor = rng.choice(divisors(used))
            pipeline = rng.choice(divisors(used // tensor))
            layout |= {"data": used // tensor // pipeline, "tensor": tensor, "pipeline": pipeline, "context": 1, "expert": 1}
            for gone in ("placement", "cuts", "stages", "stage_places", "shares", "shard_group"):
                layout.pop(gone, None)
            if pipeline == 1:
                layout |= {"virtual_stages": 1, "schedule": "1f1b"}
        elif what == "zero":
            layout["zero"] = rng.choice([0, 1, 2, 3])
        elif what == "micro":
            layout["micro_batch"] = rng.choice(divisors(max(1, batch // layout["data"])))
        elif what == "schedule":
            schedule = rng.choice(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
            chunks = {"zb-v": 2, "interleaved": rng.choice([2, 3, 4])}.get(schedule, 1)
            layout |= {"schedule": schedule, "virtual_stages": chunks}
            layout.pop("cuts", None)
        elif what == "recompute":
            layout["recompute"] = rng.choice(["none", "selective", "full", {"full_layers": 1}])
        elif what == "sequence":
            layout["sequence_parallel"] = not layout.get("sequence_parallel")
        elif what == "placement":
            layout["placement"] = rng.sample(["tensor", "context", "expert", "data", "pipeline"], 5)
        elif what == "cuts" and layers and layout["pipeline"] * layout["virtual_stages"] > 1:
            chunks = layout["pipeline"] * layout["virtual_stages"]
            cuts = [layers // chunks + (index < layers % chunks) for index in range(chunks)]
            less, more = rng.randrange(chunks), rng.randrange(chunks)
            if cuts[less] > 1:
                cuts[less] -= 1
                cuts[more] += 1
            layout["cuts"] = cuts
        elif what == "bucket":
            layout["bucket"] = rng.choice(["5MiB", "25MiB", "50MiB", "100MiB", "160MiB", "400MiB"])
        elif what in ("context", "expert") and layout["data"] % 2 == 0:
            layout |= {"data": layout["data"] // 2, what: 2 * layout[what]}
        elif what == "offload":
            layout["offload"] = rng.choice(["none", "optimizer", "activations"])
        elif what == "collective":
            layout["collective"] = rng.choice(["ring", "tree", "automatic"])
        elif what == "shards":
            layout["shard_group"] = rng.choice(divisors(layout["data"]))
    return layout


def draw_two_kinds(rng):
    """Draws a model, a topology and a batch. The nodes are of two kinds, with little more memory than the fully sharded model state needs."""
    layers, hidden = rng.choice([8, 12, 16, 24, 32]), rng.choice([1024, 2048])
    model = {"family": rng.choice(["gpt", "llama"]), "layers": layers, "hidden": hidden, "heads": 16, "ffn": 4 * hidden,
             "vocab": rng.choice([8192, 32000, 50257]), "sequence": rng.choice([512, 1024, 2048])}
    count = rng.choice([1, 2, 4, 8])
    bases = rng.choice([("a100-sxm-80g", "v100-sxm-32g"), ("h100-sxm-80g", "a100-sxm-80g"), ("a100-sxm-80g", "a100-sxm-80g"),
                        ("h100-sxm-80g", "v100-sxm-32g")])
    state = (layers * 12 * hidden * hidden + 2 * model["vocab"] * hidden) * 16 / (2 * count) / 2**30
    devices = {f"d{index}": {"base": base, "memory": f"{round(state * rng.choice([1.3, 1.6, 2, 3, 5]) + 1, 2)}GiB"}
               for index, base in enumerate(bases)}
    nic = rng.choice(["10Gbit/s", "100Gbit/s", "400Gbit/s"])
    nodes = [{"name": f"n{index}", "count": 1, "devices": {"kind": kind, "count": count}, "link": "nvswitch-150GB/s",
              "nics": {"count": 1, "bandwidth": nic}} for index, kind in enumerate(devices)]
    network = {"kind": "fat-tree", "oversubscription": 1, "latency": "5us"}
    return model, {"name": "drawn", "devices": devices, "nodes": nodes, "network": network}, rng.choice([8, 16, 32]) * 2 * count


def climb(rng, layout, layers, step):
    """Returns the time and layout that hill climbing over cuts and recomputation finds, or None if it does not apply.

    `step` returns the step time of a layout, or None if it does not fit.
    """
    best, stages = step(layout), layout["pipeline"]
    if best is None or "stages" in layout or layout["virtual_stages"] > 1 or stages == 1:
        return None
    cuts = layout.get("cuts") or [layers // stages + (index < layers % stages) for index in range(stages)]
    policy = layout["recompute"]
    numbers = list(policy.values())[0] if isinstance(policy, dict) else {"full": layers}.get(policy, 0)
    again = [min(number, blocks) for number, blocks in zip(numbers if isinstance(numbers, list) else [numbers] * stages, cuts)]
    for _ in range(60):
        moved, computed = list(cuts), list(again)
        what = rng.random()
        if what < 0.7:
            less, more, by = *rng.sample(range(stages), 2), rng.choice([1, 1, 2])
            if moved[less] > by:
                moved[less], moved[more] = moved[less] - by, moved[more] + by
        if what > 0.4:
            stage = rng.randrange(stages)
            computed[stage] = max(0, computed[stage] + rng.choice([-2, -1, 1, 2]))
        computed = [min(number, blocks) for number, blocks in zip(computed, moved)]
        of_stages = {"full_layers_of_stages": computed} if any(computed) else "none"
        changed = layout | {"cuts": moved, "recompute": policy if policy == "selective" else of_stages}
        seconds = step(changed)
        if seconds is not None and seconds <= best:
            best, layout, cuts, again = seconds, changed, moved, computed
    return best, layout


class Foretell:
    def __init__(self, path):
        self.path = path

    def json(self, *arguments, seconds=240):
        """Returns (the JSON document, "") or (None, the error). A panic ends the script."""
        try:
            run = subprocess.run([self.path, *arguments, "--json"], capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return None, "it took too long"
        if "panicked" in run.stderr or run.returncode not in (0, 1, 2):
            raise SystemExit(f"PANIC: {' '.join(map(str, arguments))}\n{run.stderr}")
        return (json.loads(run.stdout), "") if run.returncode == 0 else (None, run.stderr.strip())


def beat(foretell, rng, folder, title, two_kinds):
    if two_kinds:
        model, topology, batch = draw_two_kinds(rng)
    else:
        model, topology = draw_model(rng), draw_topology(rng)
    world = sum(node["count"] * node["devices"]["count"] for node in topology["nodes"])
    if not two_kinds:
        batch = rng.choice([None, 1, world, 4 * world, 7, 64, 96, 100])

    def write(name, value):
        # JSON is valid YAML.
        (folder / name).write_text(json.dumps(value))
        return str(folder / name)

    arguments = ["--model", write("model.yaml", model) if isinstance(model, dict) else model,
                 "--topology", write("topology.yaml", topology), "-o", str(folder / "plan.yaml"), "--time-limit", "40s",
                 *(["--global-batch", str(batch)] if batch else [])]
    fixed = "offload=none"
    found, error = foretell.json("plan", *arguments, *(["--fix", fixed] if two_kinds else []))
    kinds = [f"{node['count']} x {node['devices']['count']} {topology['devices'][node['devices']['kind']]}" for node in topology["nodes"]]
    print(f"[{title}] {json.dumps(model)}, batch {batch}, {', '.join(kinds)}:")
    if found is None:
        print(f"  {error[-300:]}")
        return
    search, plan, best = found["search"], found["plan"], found["predicted"]["step_seconds"]
    print(f"  {best:.5f} s, bound {search['lower_bound_seconds']:.5f}, {search['layouts']} layouts, {search['simulated']} simulated, "
          f"{search['wall_seconds']:.1f} s: {json.dumps(plan['layout'])}")
    if sum(search[count] for count in COUNTED) != search["layouts"]:
        print(f"  MISCOUNTED: {search}")
    again, error = foretell.json("simulate", "--plan", str(folder / "plan.yaml"))
    if again is None or abs(again["step_seconds"] - best) > 1e-9 * best:
        print(f"  DIFFERS: {again and again['step_seconds']} {error}")
    known = {}

    def step(layout):
        """Returns the step time of a layout, or None if it does not fit."""
        key = json.dumps(layout, sort_keys=True)
        if key not in known:
            answer, _ = foretell.json("simulate", "--plan", write("changed.yaml", plan | {"layout": layout}), seconds=60)
            known[key] = answer["step_seconds"] if answer and answer["fits"] else None
        return known[key]

    layers = model["layers"] if isinstance(model, dict) else LAYERS.get(model, 0)
    starts = [alternative["plan"]["layout"] for alternative in found["alternatives"]] + [plan["layout"]]
    if two_kinds:
        of_stages = [foretell.json("plan", *arguments, "--fix", f"{fixed},pipeline={stages}")[0] for stages in (2, 4)]
        starts += [of["plan"]["layout"] for of in of_stages if of]
        tried = [climb(rng, layout, layers, step) for layout in starts]
    else:
        tried = []
        for _ in range(70):
            layout = rng.choice(starts)
            for _ in range(rng.choice([1, 2])):
                layout = change(rng, layout, world, plan["global_batch"], layers)
            seconds = step(layout)
            tried.append(None if seconds is None else (seconds, layout))
    faster = [one for one in tried if one and one[0] < best * (1 - 1e-9)]
    if faster:
        seconds, layout = min(faster, key=lambda one: one[0])
        is_proven = seconds >= search["lower_bound_seconds"] * (1 - 1e-9)
        print(f"  {'within gap' if is_proven else 'BELOW BOUND'}: {seconds:.5f} s ({100 * (seconds / best - 1):.2f} %): {json.dumps(layout)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--two-kinds", action="store_true")
    parser.add_argument("--foretell", default=str(ROOT / "target/release/foretell"))
    parser.add_argument("--keep", help="keep the files of the last case in this folder")
    arguments = parser.parse_args()
    until, number = time.monotonic() + arguments.seconds, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(arguments.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        while time.monotonic() < until:
            number += 1
            sys.stdout.flush()
            # Each case has its own generator, so that it does not depend on the cases before it.
            beat(Foretell(arguments.foretell), random.Random(f"{arguments.seed}-{number}"), folder, f"{arguments.seed}-{number}", arguments.two_kinds)


if __name__ == "__main__":
    main()
