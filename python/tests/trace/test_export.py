"""A user's own step, traced as a graph. Needs torch; `python -m unittest discover python/tests/trace` runs these, too."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HAS_TORCH = importlib.util.find_spec("torch") is not None
STEPS = Path(__file__).parent / "steps.py"
STORED = Path(__file__).parents[3] / "models" / "tests" / "torch"
SLOW = {"resnet50"}


def place(name):
    return f"{STEPS}:{name}"


REAL = """
import importlib.util, json, sys, torch
from torch.utils.flop_counter import FlopCounterMode
from foretell.trace.script import OnTheCpu, load
made, counter = [], FlopCounterMode(display=False)
torch.nn.modules.module.register_module_forward_pre_hook(lambda m, _: made.append(m))
with OnTheCpu():
    module, step = load(sys.argv[1])
    with counter:
        step(**json.loads(sys.argv[2]))
print(json.dumps([sum(p.numel() for p in made[0].parameters()), counter.get_total_flops()]))
"""


def real(function, **sizes):
    """Parameters of a step's model, and FLOPs by `FlopCounterMode`, computed for real in a process of its own."""
    done = subprocess.run([sys.executable, "-c", REAL, place(function), json.dumps(sizes)], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    return json.loads(done.stdout.splitlines()[-1])


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Graphs(unittest.TestCase):
    def export(self, name, **sizes):
        from foretell.trace.export import export
        return export(place(name), **sizes)

    def elements(self, document):
        total = 0
        for p in document["parameters"]:
            size = 1
            for n in p["shape"]:
                size *= n
            total += size
        return total

    def test_parameters_and_flops_are_those_of_a_real_step(self):
        for name in ("mlp", "transformer", "cnn"):
            with self.subTest(name):
                document = self.export(name)
                measured = document["measured"][0]
                sizes = {k: measured[k] for k in ("batch", "sequence") if k in measured}
                parameters, flops = real(name, **sizes)
                self.assertEqual(self.elements(document), parameters)
                traced = measured["forward_flops"] + measured["backward_flops"]
                # Attention's backward recomputes products that its CPU kernel does not count.
                self.assertAlmostEqual(traced / flops, 1, delta=0.03 if name == "transformer" else 0)

    def test_values_are_read_after_they_are_made(self):
        for name in ("mlp", "hybrid", "unet", "experts"):
            document = self.export(name)
            made = len(document["parameters"]) + len(document["inputs"]) + len(document["constants"])
            for operator in document["operators"]:
                self.assertTrue(all(v < made for v in operator["in"]), operator)
                made += len(operator["out"])
            self.assertTrue(all(v < made for v in document["losses"]))

    def test_dimensions_say_how_they_grow(self):
        from foretell.trace.export import Inexpressible, dimension
        self.assertEqual(dimension([(4, 8, 96), (5, 8, 96)], "x"), 96)
        self.assertEqual(dimension([(4, 8, 96), (5, 8, 120)], "x"), [1, 24])
        self.assertEqual(dimension([(4, 8, 96), (5, 8, 120), (4, 16, 192)], "x"), [1, 0, 3])
        self.assertEqual(dimension([(4, 8, 9), (5, 8, 9), (4, 16, 17)], "x"), [0, 1, 1])
        self.assertEqual(dimension([(4, 8, 64), (5, 8, 64), (4, 16, 256)], "x"), [0, 0, 0, 1])
        self.assertEqual(dimension([(4, 8, 2), (5, 8, 2), (4, 16, 4)], "x"), [0, 0, 0.25])
        with self.assertRaises(Inexpressible):
            dimension([(4, 8, 5), (5, 8, 6)], "x")

    def test_stored_traces_are_those_of_today(self):
        """The structure; numbers of kernels and peaks are those of the torch that wrote them."""
        for file in sorted(STORED.glob("*.json")):
            if file.stem in SLOW and not os.environ.get("FORETELL_TABLES"):
                continue
            with self.subTest(file.stem):
                stored, today = json.loads(file.read_text()), self.export(file.stem)
                for key in ("parameters", "inputs", "losses", "blocks", "optimizer"):
                    self.assertEqual(stored[key], today[key], key)
                self.assertEqual([o["op"] for o in stored["operators"]], [o["op"] for o in today["operators"]])

    def test_blocks_and_checkpoints_are_marked(self):
        document = self.export("transformer")
        self.assertEqual(sorted(document["blocks"]), ["layers.0", "layers.1"])
        inside = {o["module"].split(".")[1] for o in document["operators"] if "checkpoint" in o}
        self.assertEqual(inside, {"0", "1"})

    def test_micro_batches_and_wrappers_are_taken_off(self):
        document = self.export("accumulated")
        assumed = "\n".join(document["assumed"])
        self.assertIn("accumulates the gradients of 2 equal micro-batches", assumed)
        self.assertIn("`DistributedDataParallel` wraps the model", assumed)
        self.assertEqual([p["name"] for p in document["parameters"]], ["0.weight", "0.bias", "2.weight", "2.bias"])
        self.assertEqual(sum(o["op"] == "aten.addmm" for o in document["operators"]), 2)

    def test_what_cannot_be_written_is_said(self):
        from foretell.trace.export import Inexpressible
        for name, expected in {"branching": "depend on its sizes", "without_backward": "calls no `backward",
                               "without_batch": "takes `batch`"}.items():
            with self.subTest(name), self.assertRaisesRegex(Inexpressible, expected):
                self.export(name)

    def test_a_file_is_written_and_the_peak_is_that_of_the_report(self):
        from foretell.trace import export, replay, script
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            export.write(place("mlp"), path)
            document = json.loads(path.read_text())
        self.assertEqual(document["format"], "foretell-torch-trace")
        self.assertEqual(document["measured"][0]["peak_bytes"], replay.replay_events(script.trace(place("mlp"))).peak)


if __name__ == "__main__":
    unittest.main()
