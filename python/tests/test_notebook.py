"""Runs the code of the notebooks in `docs/notebooks`, cell by cell, as a kernel does.

`jupyter execute --inplace docs/notebooks/plan-a-run.ipynb` (package `nbclient`) writes their outputs anew.
"""

import ast
import contextlib
import importlib.util
import io
import json
import unittest
from pathlib import Path

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def shown(source, names):
    """Runs a cell. Returns what a notebook would show of its last expression: markup, or a text; `None` if there is none."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    for form in ("_repr_html_", "_repr_svg_"):
        if hasattr(value, form):
            return getattr(value, form)()
    return repr(value)


@unittest.skipUnless(importlib.util.find_spec("pandas"), "pandas is not installed")
class Notebooks(unittest.TestCase):
    def test_every_cell_runs_and_shows_what_the_page_has(self):
        self.assertTrue(NOTEBOOKS)
        for path in NOTEBOOKS:
            names = {}
            for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
                if cell["cell_type"] != "code":
                    continue
                with self.subTest(cell=cell["id"]), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    view = shown("".join(cell["source"]), names)
                    has_result = any(output["output_type"] == "execute_result" for output in cell["outputs"])
                    self.assertEqual(view is not None, has_result)


if __name__ == "__main__":
    unittest.main()
