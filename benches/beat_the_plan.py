#!/usr/bin/env python3
"""Tries to find layouts that are faster than the planner's answer.

Draws random jobs: models (dense, mixture of experts, encoder-decoder, convolutional, recurrent), clusters (one or two kinds of nodes, odd
numbers of devices, slow links, several networks) and batches. Plans each one, simulates the written plan, and climbs: from the answer and
each alternative it changes one to three choices at random, among them buckets, cuts block by block, rank orders and recomputation by
stage, and keeps what is not slower. Reports:

  DIFFERS           the simulation of the written plan gives another step time than the search
  MISCOUNTED        the counts in the certificate do not add up to the size of the search space
  BELOW EVERY BOUND a layout is faster than the bound on all plan files: the bound is wrong
  below the space   a layout is faster than the lower bound of the space: it is outside the space, or the bound is wrong
  within gap        a layout is faster than the plan, but not than the lower bound of the space

At the end it prints how many jobs were beaten, and by how much at most.

With --two-kinds a cluster has two nodes with different devices and little memory. The climb then moves one or two blocks between stages, or
recomputes more or fewer blocks, also from the best layouts with two and with four stages.

Usage: cargo build --release && benches/beat_the_plan.py SEED SECONDS [--jobs N] [--two-kinds] [--foretell PATH] [--keep DIR]
Needs only Python 3. The cases depend only on the seed; the number of cases depends on the speed of the machine.
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
NAMED = ["resnet50", "vgg16", "t5-small", "gpt2", "vit_b_16", "bert-base-uncased", "mlp", "lstm-seq2seq"]
FAMILIES = ["gpt", "llama", "moe", "bert", "t5", "resnet", "lstm-seq2seq"]
DEVICES = ["a100-sxm-80g", "v100-sxm-32g", "h100-sxm-80g"]
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
COUNTED = ["alike", "needless", "indivisible", "out_of_memory", "bounded_out", "simulated"]
MOVES = 70


def divisors(number):
    return [one for one in range(1, number + 1) if number % one == 0]


def draw_model(rng):
    kind = rng.choice(FAMILIES + NAMED)
    if kind in NAMED and (kind not in FAMILIES or rng.random() < 0.5):
        return kind
    if kind == "resnet":
        return {"family": kind, "depth": rng.choice([18, 34, 50]), "image": rng.choice([64, 128, 224]), "width": rng.choice([32, 64, 128])}
    hidden = rng.choice([512, 768, 1024, 2048])
    if kind == "lstm-seq2seq":
        return {"family": kind, "layers": rng.choice([2, 4, 8]), "hidden": hidden, "source_vocab": 32000, "target_vocab": 32000,
                "source_sequence": rng.choice([32, 64]), "target_sequence": rng.choice([32, 64])}
    heads = rng.choice([8, 12, 16]) if hidden % 3 == 0 else rng.choice([8, 16])
    model = {"family": kind, "layers": rng.choice([3, 4, 6, 7, 8, 12]), "hidden": hidden, "heads": heads, "ffn": 4 * hidden,
             "vocab": rng.choice([8192, 32000, 50257])}
    if kind == "t5":
        return model | {"source_sequence": rng.choice([128, 512]), "target_sequence": rng.choice([64, 128, 512])}
    model["sequence"] = rng.choice([128, 512, 1024, 2048])
    if kind == "moe":
        model |= {"experts": rng.choice([4, 8]), "top_k": 2}
    if kind in ("llama", "moe"):
        model["kv_heads"] = rng.choice([heads, max(2, heads // 4)])
    return model


def draw_topology(rng):
    def node(index):
        return {"name": f"n{index}", "count": rng.choice([1, 2, 3]),
                "devices": {"kind": f"d{index}", "count": rng.choice([1, 2, 3, 4, 5, 8])},
                "link": rng.choice(["nvswitch-300GB/s", "nvswitch-150GB/s"]),
                "nics": {"count": 1, "bandwidth": rng.choice(["1Gbit/s", "10Gbit/s", "100Gbit/s", "400Gbit/s"])}}

    nodes = [node(index) for index in range(1 + (rng.random() < 0.3))]
    devices = {f"d{index}": {"base": rng.choice(DEVICES)} for index in range(len(nodes))}
    if rng.random() < 0.4:
        devices["d0"]["memory"] = rng.choice(["3GiB", "6GiB", "10GiB", "16GiB"])
    if rng.random() < 0.3:
        for one in nodes:
            one["host_memory"] = "500GB"
    networks = [{"kind": "fat-tree", "oversubscription": rng.choice([1, 2, 4]), "latency": "5us"}, {"kind": "switch", "latency": "2us"}]
    if sum(node["count"] for node in nodes) > 1:
        networks.append({"kind": "dragonfly", "nodes_per_router": 1, "routers_per_group": 2, "global_links": 2, "latency": "2us"})
    return {"name": "drawn", "devices": devices, "nodes": nodes, "network": rng.choice(networks)}


def change(rng, layout, world, batch, blocks, schedules):
    """Returns a copy of a layout with one to three random changes."""
    layout = dict(layout)
    for _ in range(rng.choice([1, 1, 2, 3])):
        what = rng.choice(["mesh", "zero", "micro", "schedule", "recompute", "stage", "sequence", "placement", "cuts", "cuts", "bucket",
                           "bucket", "context", "expert", "offload", "collective", "shards", "places"])
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
            schedule = rng.choice(schedules)
            chunks = {"zb-v": 2, "interleaved": rng.choice([2, 3, 4])}.get(schedule, 1)
            layout |= {"schedule": schedule, "virtual_stages": chunks}
            layout.pop("cuts", None)
        elif what == "recompute":
            layout["recompute"] = rng.choice(["none", "selective", "full", {"full_layers": 1}])
        elif what == "sequence":
            layout["sequence_parallel"] = not layout.get("sequence_parallel")
        elif what == "placement":
            layout["placement"] = rng.sample(["tensor", "context", "expert", "data", "pipeline"], 5)
        elif what == "cuts" and 1 < layout["pipeline"] * layout["virtual_stages"] <= blocks:
            chunks = layout["pipeline"] * layout["virtual_stages"]
            cuts = list(layout.get("cuts") or even(blocks, chunks))
            less, more = rng.sample(range(chunks), 2)
            if cuts[less] > 1:
                cuts[less] -= 1
                cuts[more] += 1
            layout["cuts"] = cuts
        elif what == "stage" and layout["pipeline"] > 1:
            most = -(-blocks // layout["pipeline"])
            policy = layout["recompute"]
            of_stages = list(policy.values())[0] if isinstance(policy, dict) else {"full": most}.get(policy, 0)
            of_stages = list(of_stages) if isinstance(of_stages, list) else [of_stages] * layout["pipeline"]
            stage = rng.randrange(layout["pipeline"])
            if stage < len(of_stages):
                of_stages[stage] = max(0, of_stages[stage] + rng.choice([-2, -1, 1, 2]))
                layout["recompute"] = {"full_layers_of_stages": of_stages} if any(of_stages) else "none"
        elif what == "places" and layout["pipeline"] > 1:
            layout["stage_places"] = rng.sample(range(layout["pipeline"]), layout["pipeline"])
        elif what == "bucket":
            layout["bucket"] = f"{2 ** rng.randrange(8, 21)}KiB"
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
    """Draws a model, a topology and a batch.

    The nodes are of two kinds, with little more memory than the fully sharded model state needs.
    """
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


def even(blocks, chunks):
    return [blocks // chunks + (index < blocks % chunks) for index in range(chunks)]


def climb(rng, layout, step, changed, moves):
    """Returns the time and layout that hill climbing by random changes finds, or None if the first layout does not fit."""
    best = step(layout)
    if best is None:
        return None
    for _ in range(moves):
        other = changed(layout)
        seconds = step(other)
        if seconds is not None and seconds <= best:
            best, layout = seconds, other
    return best, layout


def climb_two_kinds(rng, layout, layers, step):
    """Returns the time and layout that hill climbing over cuts and recomputation finds, or None if it does not apply.

    `step` returns the step time of a layout, or None if it does not fit.
    """
    best, stages = step(layout), layout["pipeline"]
    if best is None or "stages" in layout or layout["virtual_stages"] > 1 or stages == 1:
        return None
    cuts = layout.get("cuts") or even(layers, stages)
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


def blocks_of(foretell, plan, write):
    """Returns the number of blocks of a plan's model: what `simulate` says of cuts that cannot be."""
    impossible = {"data": 1, "cuts": [10**6]}
    _, error = foretell.json("simulate", "--plan", write("impossible.yaml", plan | {"layout": impossible}), seconds=60)
    said = re.search(r"does not divide (\d+) blocks", error)
    return int(said.group(1)) if said else 0


def beat(foretell, rng, folder, title, two_kinds):
    """Plans a random job and tries to beat the answer. Returns what came of it: the verdict, and by which share it was beaten."""
    if two_kinds:
        model, topology, batch = draw_two_kinds(rng)
    else:
        model, topology = draw_model(rng), draw_topology(rng)
    world = sum(node["count"] * node["devices"]["count"] for node in topology["nodes"])
    if not two_kinds:
        batch = rng.choice([None, 1, world, 4 * world, 7, 64, 96, 100])
    stack = rng.choice(["foretell", None])

    def write(name, value):
        # JSON is valid YAML.
        (folder / name).write_text(json.dumps(value))
        return str(folder / name)

    # All memory may be used, as in the simulations below.
    arguments = ["--model", write("model.yaml", model) if isinstance(model, dict) else model,
                 "--topology", write("topology.yaml", topology), "-o", str(folder / "plan.yaml"), "--time-limit", "40s", "--headroom", "0%",
                 *(["--global-batch", str(batch)] if batch else []), *(["--stack", stack] if stack else [])]
    fixed = "offload=none"
    found, error = foretell.json("plan", *arguments, *(["--fix", fixed] if two_kinds else []))
    kinds = [f"{node['count']} x {node['devices']['count']} {topology['devices'][node['devices']['kind']]}" for node in topology["nodes"]]
    print(f"[{title}] {json.dumps(model)}, batch {batch}, stack {stack}, {', '.join(kinds)}, {topology['network']['kind']}:")
    if found is None:
        print(f"  {error[-300:]}")
        return "no answer", 0.0
    search, plan, best = found["search"], found["plan"], found["predicted"]["step_seconds"]
    of_any = search["bound_of_any_layout_seconds"]
    print(f"  {best:.5f} s, bound {search['lower_bound_seconds']:.5f}, of any layout {of_any:.5f}, {search['layouts']} layouts, "
          f"{search['simulated']} simulated, {search['wall_seconds']:.1f} s: {json.dumps(plan['layout'])}")
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

    blocks = blocks_of(foretell, plan, write)
    starts = [plan["layout"]] + [alternative["plan"]["layout"] for alternative in found["alternatives"]]
    if two_kinds:
        of_stages = [foretell.json("plan", *arguments, "--fix", f"{fixed},pipeline={stages}")[0] for stages in (2, 4)]
        starts += [of["plan"]["layout"] for of in of_stages if of]
        tried = [climb_two_kinds(rng, layout, blocks, step) for layout in starts]
    else:
        # What the stack runs, if it has limits.
        listed = next((one["values"] for one in search["space"] if one["name"] == "schedule"), "")
        schedules = [name for name in SCHEDULES if name in listed.split(", ")] or SCHEDULES

        held = [one["name"] for one in search["space"] if one["values"] == "fixed"]

        def changed(layout):
            other = change(rng, layout, world, plan["global_batch"], blocks, schedules)
            return other if all(other.get(name) == layout.get(name) for name in held) else layout

        others = len(starts) - 1
        moves = [MOVES // 2 if others else MOVES] + [MOVES // 2 // max(1, others)] * others
        tried = [climb(rng, layout, step, changed, count) for layout, count in zip(starts, moves)]
    faster = [one for one in tried if one and one[0] < best * (1 - 1e-9)]
    if not faster:
        return "not beaten", 0.0
    seconds, layout = min(faster, key=lambda one: one[0])
    if seconds < of_any * (1 - 1e-9):
        verdict = "BELOW EVERY BOUND"
    elif seconds < search["lower_bound_seconds"] * (1 - 1e-9):
        verdict = "below the space"
    else:
        verdict = "within gap"
    print(f"  {verdict}: {seconds:.5f} s ({100 * (seconds / best - 1):.2f} %): {json.dumps(layout)}")
    return verdict, 1 - seconds / best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--jobs", type=int, help="end after so many jobs")
    parser.add_argument("--two-kinds", action="store_true")
    parser.add_argument("--foretell", default=str(ROOT / "target/release/foretell"))
    parser.add_argument("--keep", help="keep the files of the last case in this folder")
    arguments = parser.parse_args()
    until, number = time.monotonic() + arguments.seconds, 0
    verdicts, worst = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(arguments.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        while time.monotonic() < until and number != arguments.jobs:
            number += 1
            sys.stdout.flush()
            # Each case has its own generator, so that it does not depend on the cases before it.
            case = f"{arguments.seed}-{number}"
            verdict, share = beat(Foretell(arguments.foretell), random.Random(case), folder, case, arguments.two_kinds)
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
            worst[verdict] = max(worst.get(verdict, 0.0), share)
    said = [f"{count} {verdict}" + (f" (by {100 * worst[verdict]:.2f} % at most)" if worst[verdict] else "")
            for verdict, count in sorted(verdicts.items())]
    print(f"{number} jobs: {', '.join(said)}")
    raise SystemExit(1 if "BELOW EVERY BOUND" in verdicts else 0)


if __name__ == "__main__":
    main()
