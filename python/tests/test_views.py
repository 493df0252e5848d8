"""`FORETELL_PROGRAM=target/debug/foretell PYTHONPATH=python python3 -m unittest discover python/tests`"""

import importlib.util
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import foretell

SMALL = {"model": "gpt2", "topology": "4xa100-80g", "global_batch": 64}
# A search that takes minutes.
LONG = {"model": "llama3-70b", "topology": "64x8xh100@400Gbit/s", "global_batch": 1024}


def texts(picture):
    """The texts of a picture. It raises unless the picture is well-formed XML."""
    return [element.text for element in ElementTree.fromstring(picture.svg).iter() if element.tag.endswith("text")]


class Views(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.answer = foretell.plan(**SMALL, top=3)

    def test_the_memory_bar_has_every_part_and_the_devices_memory(self):
        bar = self.answer.predicted.memory_bar()
        said = " ".join(texts(bar))
        self.assertIn(" of 80 GiB", said)
        for part in ("parameters", "gradients", "optimizer", "activations"):
            self.assertIn(part, said)
        self.assertEqual(foretell.simulate(self.answer).memory_bar().svg, bar.svg)

    def test_the_time_bar_has_the_steps_time(self):
        said = " ".join(texts(self.answer.predicted.time_bar()))
        self.assertIn("compute", said)

    def test_a_timeline_is_drawn_and_saved(self):
        picture = foretell.draw(self.answer)
        self.assertIn("One step, predicted", " ".join(filter(None, (text and text.strip() for text in texts(picture)))))
        self.assertEqual(picture._repr_svg_(), picture.svg)
        with tempfile.TemporaryDirectory() as folder:
            picture.save(Path(folder) / "timeline.svg")
            self.assertEqual((Path(folder) / "timeline.svg").read_text(encoding="utf-8"), picture.svg)
        self.assertIn("Memory", foretell.draw(self.answer, "memory").svg)
        with self.assertRaises(ValueError):
            foretell.draw(self.answer, "flame")

    def test_a_notebook_shows_bars_and_layouts(self):
        html = self.answer._repr_html_()
        self.assertEqual(html.count("<svg"), 2)
        self.assertIn("It fits", html)
        self.assertEqual(html.count("<tr><td>"), 3 + len(self.answer.predicted.to_dict()))

    def test_layouts_are_rows(self):
        rows = self.answer.rows()
        self.assertEqual(len(rows), 3)
        self.assertEqual(rows[0]["step_seconds"], self.answer.predicted.step_seconds)
        self.assertEqual(rows[0]["layout.data"], self.answer.plan["layout"]["data"])

    @unittest.skipUnless(importlib.util.find_spec("pandas"), "pandas is not installed")
    def test_layouts_are_a_frame(self):
        frame = self.answer.to_frame()
        self.assertEqual(list(frame["step_seconds"]), sorted(frame["step_seconds"]))
        table = foretell.plan("gpt2", "1xrtx-4090", global_batch=8, table="context,loss", time_limit="1s")
        self.assertIn("fits", table.to_frame().columns)
        self.assertIn("<table>", table._repr_html_())

    def test_a_search_without_a_gap_has_no_sentence_about_it(self):
        document = {**self.answer.to_dict(), "search": {}}
        self.assertNotIn("faster", foretell.Plan(document)._repr_html_())


class Searches(unittest.TestCase):
    def test_progress_is_told(self):
        moments = []
        answer = foretell.plan("gpt2-xl", "8x8xh100@400Gbit/s", progress=moments.append)
        self.assertTrue(moments and all(isinstance(moment, foretell.Moment) for moment in moments))
        self.assertIn("layouts simulated", str(moments[-1]))
        self.assertGreater(answer.predicted.step_seconds, 0)

    def test_a_search_is_followed_and_cancelled(self):
        with foretell.start_plan(**LONG) as running:
            self.assertFalse(running.done())
            with self.assertRaises(subprocess.TimeoutExpired):
                running.result(timeout=0.05)
            running.cancel()
            self.assertTrue(running.done())
            with self.assertRaises(foretell.Cancelled):
                running.result()

    def test_the_end_of_a_block_ends_the_search(self):
        with self.assertRaises(KeyboardInterrupt), foretell.start_plan(**LONG) as running:
            raise KeyboardInterrupt
        self.assertTrue(running.done())
        self.assertIn("cancelled", repr(running))

    def test_a_started_search_has_the_same_answer(self):
        with foretell.start_plan(**SMALL, top=2) as running:
            answer = running.result()
            self.assertIs(running.result(), answer)
        self.assertEqual(answer.plan, foretell.plan(**SMALL, top=2).plan)

    def test_a_mistake_raises_from_the_result(self):
        with foretell.start_plan("gtp2", "8xh100") as running, self.assertRaises(foretell.ForetellError) as raised:
            running.result()
        self.assertEqual(raised.exception.status, 2)


if __name__ == "__main__":
    unittest.main()
