"""Trains models under several modes and plots their losses: one SVG with a panel for each model, and a CSV file.

Used by `benches/modes.py --curves`. Nothing here is timed: how long a run takes does not change its loss, except for
the order in which asynchronous workers arrive, whose staleness is stated as measured. Needs only Python 3.
"""
import csv
import json
import subprocess
from xml.sax.saxutils import escape

# model: (what a plan says of it, its recipe)
MODELS = {
    "MLP on digits": ("{family: mlp, widths: [64, 64, 10]}",
                      "global_batch: 64\noptimizer: sgd\ntraining: {learning_rate: 0.05, momentum: 0.9}\n"),
    "small ResNet on digits": ("examples/small-resnet.yaml",
                               "global_batch: 64\noptimizer: sgd\ntraining: {learning_rate: 0.02, momentum: 0.9}\n"),
    "small GPT on text": ("examples/small-gpt.yaml", "global_batch: 16\noptimizer: adamw\ntraining: {learning_rate: 0.001}\n"),
}
MODES = {
    "synchronous": "synchronous",
    "servers, staleness 0": "{parameter_server: {servers: 1}}",
    "servers, int8": "{parameter_server: {servers: 1, compression: int8}}",
    "servers, staleness 2": "{parameter_server: {servers: 1, staleness: 2}}",
    "servers, 1 backup worker": "{parameter_server: {servers: 1, backup_workers: 1}}",
    "servers, unbounded": "{parameter_server: {servers: 1, staleness: unbounded}}",
    "local SGD, 10": "{local_sgd: {every: 10}}",
    "DiLoCo, 10": "{local_sgd: {every: 10, outer: {optimizer: nesterov}}}",
    "streaming DiLoCo, 10": "{local_sgd: {every: 10, outer: {optimizer: nesterov}, fragments: 2, overlap: 2, compression: bf16}}",
    "ring, 1": "{decentralised: {graph: ring}}",
}
REPLICAS = 4
# Okabe and Ito's colours, which people tell apart who see red and green alike. Later ones dashed.
COLOURS = ["#000000", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"]
WIDTH, HEIGHT, MARGIN, LINE = 420, 260, 50, 15


def train(foretell, root, scratch, model, mode, steps, seed):
    """The losses of a run and the staleness of its pushes, or the reason why the mode is not possible."""
    reference, recipe = MODELS[model]
    reference = root / reference if reference.endswith(".yaml") else reference
    plan = scratch / "plan.yaml"
    batch = int(recipe.split("global_batch: ")[1].split("\n")[0])
    plan.write_text(f"model: {reference}\ntopology: local\n{recipe}layout: {{data: {REPLICAS}, micro_batch: {batch // REPLICAS}}}\n"
                    f"mode: {MODES[mode]}\n")
    done = subprocess.run([foretell, "execute", "--plan", plan, "--steps", str(steps), "--seed", str(seed), "--oversubscribe",
                           "--no-evaluation", "--save-every", "never", "--overwrite", "--run", scratch / "run", "--json"],
                          capture_output=True, text=True)
    document = json.loads(done.stdout)
    if done.returncode != 0:
        return None, document["error"]["message"]
    return document["loss"], document["staleness"]


def means(losses, window):
    """The mean of the last losses, at each step."""
    parts = [losses[max(0, step + 1 - window):step + 1] for step in range(len(losses))]
    return [sum(part) / len(part) if all(loss is not None for loss in part) else None for part in parts]


def style(mode):
    number = list(MODES).index(mode)
    dash = "" if number < len(COLOURS) else ' stroke-dasharray="5 3"'
    return f'stroke="{COLOURS[number % len(COLOURS)]}"{dash}'


def panel(model, runs, left, window):
    """A plot of one model: runs are (mode, losses, staleness), or (mode, None, reason)."""
    curves = [(mode, means(losses, window)) for mode, losses, _ in runs if losses]
    known = [loss for _, curve in curves for loss in curve if loss is not None]
    first = max((curve[0] for _, curve in curves if curve[0] is not None), default=1.0)
    # A run that diverges leaves the panel.
    top, steps = min(max(known, default=1.0), 1.3 * first), max((len(curve) for _, curve in curves), default=1)
    x = lambda step: left + step / max(steps - 1, 1) * WIDTH
    y = lambda loss: MARGIN + (1.0 - min(loss, top) / top) * HEIGHT
    out = [f'<text x="{left}" y="{MARGIN - 14}" font-weight="bold">{escape(model)}</text>',
           f'<rect x="{left}" y="{MARGIN}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>']
    for part in range(5):
        loss, step = top * part / 4, round((steps - 1) * part / 4)
        out.append(f'<text x="{left - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
        out.append(f'<text x="{x(step):.1f}" y="{MARGIN + HEIGHT + 16}" text-anchor="middle">{step + 1}</text>')
    for mode, curve in curves:
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(curve) if loss is not None)
        out.append(f'<polyline fill="none" stroke-width="1.5" {style(mode)} points="{points}"/>')
    for number, (mode, losses, more) in enumerate(runs):
        below = MARGIN + HEIGHT + 40 + number * LINE
        text = f"{mode}: not possible: {more}"
        if losses:
            last = means(losses, window)[-1]
            text = f"{mode}: loss {last:.3f} at last" if last is not None else f"{mode}: diverged"
            text += f", staleness {more['mean']:.2f} (at most {more['max']})" if more["max"] else ""
            out.append(f'<line x1="{left}" x2="{left + 22}" y1="{below - 4}" y2="{below - 4}" stroke-width="2" {style(mode)}/>')
        out.append(f'<text x="{left + 28}" y="{below}">{escape(text if len(text) < 75 else text[:72] + "...")}</text>')
    return out


def plot(results, window):
    """The SVG of all models: results are lists of runs, by model."""
    width = MARGIN + len(results) * (WIDTH + MARGIN + 20)
    height = MARGIN + HEIGHT + 60 + LINE * len(MODES)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
           f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="{MARGIN}" y="16">Training loss (mean of {window} steps) over steps, {REPLICAS} replicas, the same recipe in every '
           "mode; staleness of pushes as measured</text>"]
    for number, (model, runs) in enumerate(results.items()):
        out += panel(model, runs, MARGIN + number * (WIDTH + MARGIN + 20), window)
    return "\n".join(out + ["</svg>"]) + "\n"


def run(foretell, root, scratch, folder, models, steps, seed):
    """Trains everything, and writes `curves.csv` and `curves.svg` into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    with open(folder / "curves.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["model", "mode", "step", "loss", "mean_staleness"])
        for model in models:
            for mode in MODES:
                losses, more = train(foretell, root, scratch, model, mode, steps, seed)
                results.setdefault(model, []).append((mode, losses, more))
                if losses:
                    rows.writerows([model, mode, step, loss, more["mean"]] for step, loss in enumerate(losses))
                    file.flush()
                    print(f"{model}, {mode}: loss {losses[-1]}, mean staleness {more['mean']:.2f}", flush=True)
                else:
                    print(f"{model}, {mode}: not possible: {more}", flush=True)
                (folder / "curves.svg").write_text(plot(results, max(1, steps // 20)))
