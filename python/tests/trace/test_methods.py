"""Methods of fine-tuning as `foretell execute` runs them by the frameworks: the law, and their equality with peft and TRL.

Each run takes half a minute, so they run where `FORETELL_METHODS=1` is set. They need torch, transformers, peft, trl and
bitsandbytes.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
SIZES = {"b": 4, "s": 64, "h": 128, "n": 4, "k": 4, "d": 32, "f": 256, "v": 512, "p": 64, "r": 8}
STEPS = 4
# The key's words, and what else a request says.
METHODS = {
    "lora": ({"adapter": "lora-all"}, {}),
    "qlora": ({"adapter": "qlora-all", "precision": "mixed"}, {}),
    "dpo": ({"adapter": "lora-all", "loss": "dpo"}, {"preference": "dpo"}),
    "dpo-full": ({"loss": "dpo"}, {"preference": "dpo"}),
    "dpo-precomputed": ({"adapter": "lora-all", "loss": "dpo-precomputed"}, {"preference": "dpo", "precomputed": True}),
    "dpo-qlora": ({"adapter": "qlora-all-bf16", "loss": "dpo", "precision": "mixed"}, {"preference": "dpo"}),
    "orpo": ({"adapter": "lora-all"}, {"preference": "orpo"}),
    "reward": ({"adapter": "lora-all", "loss": "reward"}, {"preference": "reward"}),
    "kto": ({"adapter": "lora-all"}, {"preference": "kto"}),
    "int8": ({"adapter": "int8lora-all", "precision": "mixed"}, {}),
}
LAWFUL = ["lora", "qlora", "dpo", "dpo-full", "dpo-precomputed", "orpo", "reward"]
CLOSE = 1e-3


def request(method, ranks=1, checkpoint=None):
    key, more = METHODS[method]
    rate = 1e-4 if method == "dpo-full" else 1e-3
    return {"key": {"architecture": "llama", "framework": "hf", "attention": "sdpa", "precision": "fp32", **key},
            "sizes": {**SIZES, "b": SIZES["b"] // ranks}, "layers": 2, "ranks": ranks, "threads": 1, "micro_batches": 1,
            "optimizer": "adamw", "steps": STEPS, "recipe": {"learning_rate": rate, "alpha": 16.0}, "seed": 0, "checkpoint": checkpoint, **more}


def python(*arguments):
    more = {"PYTHONPATH": str(HERE.parents[1]), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env={**os.environ, **more})
    if done.returncode:
        raise AssertionError(done.stderr[-3000:])


@unittest.skipUnless(os.environ.get("FORETELL_METHODS"), "set FORETELL_METHODS=1: it takes minutes")
class Methods(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)

    def trained(self, asked):
        question, answer = self.folder / "request.json", self.folder / "answer.json"
        question.write_text(json.dumps(asked))
        python("-m", "foretell.trace.train", question, answer)
        return json.loads(answer.read_text())["loss"]

    def assert_close(self, method, losses, others):
        self.assertEqual(len(losses), len(others))
        worst = max(abs(a - b) for a, b in zip(losses, others))
        print(f"  {method}: differ by {worst:.1e} at most; losses {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
        self.assertLess(worst, CLOSE)
        self.assertNotEqual(losses[0], losses[-1])

    def test_two_ranks_have_the_losses_of_one(self):
        for method in LAWFUL:
            with self.subTest(method):
                self.assert_close(method, self.trained(request(method)), self.trained(request(method, ranks=2)))

    def test_jobs_have_the_losses_of_peft_and_trl_started_directly(self):
        from safetensors.torch import load_file
        for method in ("lora", "qlora", "dpo"):
            with self.subTest(method):
                asked = request(method, checkpoint=str(self.folder / method))
                losses = self.trained(asked)
                saved, = (self.folder / method).iterdir()
                out = self.folder / f"{method}-direct"
                out.mkdir()
                python(HERE / "direct.py", self.folder / "request.json", method, saved / "base", out)
                self.assert_close(method, losses, json.loads((out / "losses.json").read_text()))
                ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (saved, out))
                self.assertEqual(ours.keys(), theirs.keys())
                for name, tensor in ours.items():
                    self.assertLess((tensor.float() - theirs[name].float()).abs().max().item(), 2e-3, name)

    def test_peft_loads_what_was_trained(self):
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
        from direct import sequences
        for method in ("lora", "qlora", "dpo"):
            with self.subTest(method):
                losses = self.trained(request(method, checkpoint=str(self.folder / method)))
                saved, = (self.folder / method).iterdir()
                base = AutoModelForCausalLM.from_pretrained(saved / "base", dtype=torch.float32)
                model = PeftModel.from_pretrained(base, saved)
                second = [p for name, p in model.named_parameters() if "lora_B" in name]
                self.assertEqual(len(second), 2 * 7)
                self.assertTrue(all(p.abs().max() > 0 for p in second))
                if method == "dpo":
                    continue
                with torch.no_grad():
                    rows = [sequences(0, number, 1, SIZES["s"], SIZES["v"]) for number in range(SIZES["b"])]
                    loss = sum(model(input_ids=ids, labels=labels).loss.item() for ids, labels in rows) / len(rows)
                self.assertLess(loss, losses[0] - 0.05)

    def test_every_other_method_trains(self):
        for method in ("dpo-qlora", "kto", "int8"):
            with self.subTest(method):
                losses = self.trained(request(method))
                self.assertLess(losses[-1], losses[0])


if __name__ == "__main__":
    unittest.main()
