"""`FORETELL_PROGRAM=target/debug/foretell PYTHONPATH=python python3 -m unittest discover python/tests`"""

import json
import os
import tempfile
import unittest
from pathlib import Path

import foretell

MODEL = {"family": "mlp", "widths": [64, 32, 10]}


class Foretell(unittest.TestCase):
    def test_a_plan_is_predicted_as_its_simulation(self):
        answer = foretell.plan(model="gpt2", topology="dgx-a100-80g", global_batch=64, fix={"tensor": 1, "pipeline": 1}, top=2)
        self.assertGreater(answer.predicted.step_seconds, 0)
        self.assertEqual(answer.plan["global_batch"], 64)
        self.assertEqual(len(answer.alternatives), 1)
        again = foretell.simulate(answer)
        self.assertAlmostEqual(again.step_seconds / answer.predicted.step_seconds, 1, places=6)
        self.assertIsInstance(again.breakdown_seconds, foretell.Breakdown)
        self.assertIn("step_seconds", again._repr_html_())

    def test_a_plan_of_files_or_mappings_can_be_simulated(self):
        before = os.getcwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                Path("model.yaml").write_text(json.dumps(MODEL), encoding="utf-8")
                for model in ("model.yaml", MODEL):
                    answer = foretell.plan(model=model, topology="dgx-a100-80g", global_batch=64, fix={"tensor": 1})
                    again = foretell.simulate(answer)
                    self.assertAlmostEqual(again.step_seconds / answer.predicted.step_seconds, 1, places=6)
            finally:
                os.chdir(before)

    def test_a_command_may_answer_with_a_list(self):
        self.assertIsInstance(foretell.run_command(["models"]), type(foretell.models()))

    def test_a_changed_plan_gives_another_step(self):
        plan = {"model": "gpt2", "topology": "dgx-a100-80g", "global_batch": 64, "layout": {"data": 8, "micro_batch": 8}}
        slow = foretell.simulate(plan)
        fast = foretell.simulate({**plan, "precision": "bf16"})
        self.assertLess(fast.step_seconds, slow.step_seconds)

    def test_a_mistake_raises_its_message_and_hint(self):
        with self.assertRaises(foretell.ForetellError) as raised:
            foretell.plan(model="gtp2", topology="dgx-h100")
        self.assertEqual(raised.exception.status, 2)
        self.assertIn("gtp2", str(raised.exception))

    def test_markup_in_a_document_is_escaped(self):
        self.assertNotIn("<b>", foretell.Record({"name": "<b>"})._repr_html_())

    def test_a_missing_field_is_an_attribute_error(self):
        with self.assertRaises(AttributeError):
            foretell.Record({"a": 1}).b


if __name__ == "__main__":
    unittest.main()
