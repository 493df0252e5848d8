"""Operator tables, their formulas and their replay.

`PYTHONPATH=python python -m pytest python/tests/trace` (or `python -m unittest discover python/tests/trace`). The tables
of `models/tables` are compared with fresh traces at other sizes where torch and the frameworks are installed: some of
them, or every one with `FORETELL_TABLES=all`, or those whose file name contains a word with `FORETELL_TABLES=word`.
"""

import importlib.util
import math
import os
import unittest
from pathlib import Path

from foretell.trace import formula, loops, sizes
from foretell.trace.dtypes import WIDTHS
from foretell.trace.replay import Table, replay, unrolled

FOLDER = Path(__file__).parents[3] / "models" / "tables"
SOME = ["llama_flash_bf16.table", "llama_flash_checkpoint-full_autocast_adapter-lora-all.table", "gpt2_flash_autocast.table",
        "t5_sdpa_bf16.table", "whisper_sdpa_bf16.table", "mixtral_flash_mixed_adapter-lora-all_experts-grouped_mm.table",
        "llama_flash_mixed_loss-trl-fused.table", "llama_flash_checkpoint-full-offload_mixed.table",
        # Of older releases and torchtune: compared where these are installed.
        "mistral_flash_checkpoint-full-reentrant_mixed_adapter-lora-attention-dropout_kernels-foak_version-4.45.table",
        "mistral_flash_checkpoint-full-reentrant_bf16_adapter-lora-attention-dropout_version-4.48.table",
        "llama_framework-torchtune_sdpa_checkpoint-full_bf16.table"]

SMALL = """foretell-operator-table 1
versions torch=0
key architecture=small attention=none
symbols b s h
param once embedding f32 s h
param layer weight f32 h h
part forward.start
+ 1 4*b*s*h
part forward.layer
o aten.mm f32[b*s,h] f32[h,h] > f32[b*s,h]
+ 1 4*b*s*h
+ 2 512
- 2
part forward.end
+ 1 4
- forward.layer@last:1
part backward.start
- forward.end:1
part backward.layer
o aten.mm f32[h,^b*s] f32[b*s,h] > f32[h,h]
~ 1024
+ 1 4*h*h
g 1 weight
- forward.layer@-1:1
part backward.layer.first
+ 1 4*h*h
g 1 weight
- forward.start:1
part backward.end
"""


class Formulas(unittest.TestCase):
    def test_values(self):
        z = dict(b=3, s=10, v=7, E=5)
        self.assertEqual(formula.evaluate("4*b*(s-1)*v", z), 4 * 3 * 9 * 7)
        self.assertEqual(formula.evaluate("b*s/E", z), 6)
        self.assertEqual(formula.evaluate("32*ceil(s/32)", z), 32)
        with self.assertRaises(ValueError):
            formula.evaluate("s/3", z)

    def test_products_put_numbers_first(self):
        self.assertEqual(formula.product(2, "b*s", "d/2"), "b*s*d")
        self.assertEqual(formula.product(4, "b", "(s-1)", "v"), "4*b*(s-1)*v")
        self.assertEqual(formula.product(2, "b*s*t/E", "h"), "2*b*s*t/E*h")

    def test_dimensions_are_recognised(self):
        here, there = (sizes.resolve(x) for x in (sizes.PROBE, sizes.CHECK))
        keep = "b s h n k d f v".split()
        names = formula.Names({k: here[k] for k in keep}, {k: there[k] for k in keep}, ("s-1", "s+1", "n/k"))
        for text in ("b*s", "n*d", "k*d", "2*f", "d/2", "b*(s-1)", "(s+1)", "n/k"):
            value = formula.evaluate(text, here)
            self.assertEqual(formula.evaluate(names(value), there), formula.evaluate(text, there), text)
        self.assertFalse(names.unknown)

    def test_sizes_do_not_collide_below_three_factors(self):
        here, there = (sizes.resolve(x) for x in (sizes.PROBE, sizes.CHECK))
        keep = "b s h n k d f v r m".split()
        names = formula.Names({k: here[k] for k in keep}, {k: there[k] for k in keep}, ("s-1", "s+1"))
        for a in keep:
            for b in keep:
                value = formula.evaluate(f"{a}*{b}", here)
                self.assertEqual(formula.evaluate(names(value), there), formula.evaluate(f"{a}*{b}", there), f"{a}*{b}")


class Keys(unittest.TestCase):
    def test_the_usual_words_of_a_key_are_left_out_of_its_file_name(self):
        from foretell.trace import matrix, table
        key = matrix.complete({"architecture": "llama", "version": "4.48"})
        self.assertEqual(table.file_name(key), "llama_flash_bf16_version-4.48.table")
        self.assertTrue(table.key_line(matrix.complete({"architecture": "llama"})).endswith(" head=usual version=latest"))

    def test_the_archive_has_the_newest_release_first(self):
        import tempfile
        from foretell.trace.pack import pack
        with tempfile.TemporaryDirectory() as folder:
            older = SMALL.replace("attention=none", "attention=none version=4.48")
            Path(folder, "a.table").write_text(older, encoding="utf-8")
            Path(folder, "b.table").write_text(older.replace("4.48", "latest"), encoding="utf-8")
            keys = [line for line in pack(Path(folder)).splitlines() if line.startswith("key ")]
        self.assertEqual([k.rpartition("=")[2] for k in keys], ["latest", "4.48"])


    def test_a_folder_of_tables_is_packed_and_unpacked(self):
        import tempfile
        from foretell.trace import pack
        lines = "".join(f"o aten.mul f32[{n}] > f32[{n}]\n" for n in range(100))
        long = SMALL.replace("key architecture=small attention=none", "key architecture=llama")
        tables = {"llama_flash_bf16.table": long, "llama_sdpa_bf16.table": long.replace("llama", "llama attention=sdpa"),
                  "llama_eager_bf16.table": long.replace("llama", "llama attention=eager").replace("- forward.start:1\n", lines),
                  "qwen3_flash_bf16.table": long.replace("llama", "qwen3").replace("- forward.start:1\n", "+ 9 4\n" + lines)}
        for names in (list(tables)[:2], list(tables)):
            with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as again:
                for name in names:
                    Path(folder, name).write_text(tables[name], encoding="utf-8")
                text = pack.pack(Path(folder))
                self.assertEqual("\n= 0\n" in text, len(names) > 2)
                pack.unpack(text, Path(again))
                for name in names:
                    self.assertEqual(Path(again, name).read_text(encoding="utf-8"), tables[name])


    def test_allocations_are_packed_as_distances(self):
        from foretell.trace import pack
        body = "\n".join(["+ 1 8", "+ 2 4*b", "- 1", "+ 7 4", "- forward.layer@-1:12", "- forward.layer@-1:10", "g 7 w", "loop 3", "- 9", "end"])
        packed = ["+8", "+4*b", "-1", "+ 7 4", "-forward.layer@-1:-12", "-forward.layer@-1:2", "g0 w", "loop 3", "--2", "end"]
        self.assertEqual(pack.relative(body).split("\n"), packed)
        self.assertEqual(pack.absolute(pack.relative(body)), body)


class Names(unittest.TestCase):
    def setUp(self):
        if not importlib.util.find_spec("torch"):
            self.skipTest("needs torch")

    def test_modules_of_each_expert_are_one_parameter(self):
        from foretell.trace.step import EXPERT, FIRST
        names = [f"block_sparse_moe.experts.{n}.w1.lora_A.default.weight" for n in (0, 1, 10)]
        self.assertEqual({EXPERT.sub(".experts.*.", name) for name in names}, {"block_sparse_moe.experts.*.w1.lora_A.default.weight"})
        self.assertEqual([bool(FIRST.search(name)) for name in names], [True, False, False])

    def test_two_stacks_have_names_of_their_own(self):
        from foretell.trace.step import names_of
        stacks = {"encoder": ("encoder.block", []), "decoder": ("decoder.block", [])}
        full = [f"{s}.block.{i}.q.weight" for s in stacks for i in range(4)] + ["encoder.block.0.bias.weight", "shared.weight"]
        names = names_of(full, stacks, 4)
        self.assertEqual(names[0], ("encoder", 0, "encoder.q.weight"))
        self.assertEqual(names[4], ("decoder", 0, "decoder.q.weight"))
        self.assertEqual(names[8:], [(None, None, "encoder.block.0.bias.weight"), (None, None, "shared.weight")])

    def test_a_module_that_is_wrapped_twice_keeps_its_wrapper_in_the_name(self):
        from foretell.trace.step import names_of
        full = ["base_model.model.layers.0.experts.base_layer.lora_A", "base_model.model.layers.0.experts.lora_A",
                "base_model.model.layers.0.q.base_layer.weight"]
        names = names_of(full, {"layer": ("base_model.model.layers", [])}, 1)
        self.assertEqual([name for _, _, name in names], ["experts.base_layer.lora_A", "experts.lora_A", "q.weight"])


class Loops(unittest.TestCase):
    def test_repeated_lines_are_written_once(self):
        lines = ["a"] + ["b", "c", "d", "e"] * 5 + ["f"]
        folded = loops.fold(lines, {5: "E", 4: "E-1"})
        self.assertEqual(folded, ["a", "loop E", "b", "c", "d", "e", "end", "f"])
        self.assertEqual(unrolled(folded, {"E": 5}), lines)


class Replay(unittest.TestCase):
    def test_a_small_table(self):
        table = Table(SMALL)
        z = dict(b=2, s=64, h=32)
        result = replay(table, z, 3)
        x, w = 4 * 2 * 64 * 32, 4 * 32 * 32
        self.assertEqual(result.forward_end, 3 * x + 512)       # the last layer's is gone, the loss is there
        self.assertEqual(result.peak, 4 * x + 512)
        self.assertEqual(result.gradients, 3)
        self.assertEqual(result.kernels["aten.mm"], [5, 3 * (2 * x + w) + 2 * (4 * 32 + x + w)])
        self.assertEqual(sum(len(v) for v in result.left.values()), 3)   # the gradients

    def test_a_release_of_nothing_is_an_error(self):
        with self.assertRaises(ValueError):
            replay(Table(SMALL.replace("- forward.end:1", "- forward.end:2")), dict(b=2, s=64, h=32), 3)


class Shipped(unittest.TestCase):
    """What the archive is packed from; the program's own test uses the same sizes."""

    SIZES = dict(b=2, u=64, s=256, h=512, n=8, k=4, d=64, f=1024, v=3000, r=8, E=8, t=2, m=256, e=256, w=128, p=512, c=2, q=128)

    def test_no_two_parameters_have_one_name_and_all_gradients_do(self):
        for path in sorted(FOLDER.glob("*.table")):
            with self.subTest(path.name):
                table = Table.load(path)
                names = [p[1] for p in table.parameters]
                self.assertEqual(len(set(names)), len(names))
                lines = {line for part in table.parts.values() for line in part if line.startswith("g ")}
                self.assertLessEqual({line.split(" ")[2] for line in lines}, set(names))
                self.assertIn("version", table.key)

    def test_a_gradient_is_as_large_as_its_parameter(self):
        for path in sorted(FOLDER.glob("*.table")):
            with self.subTest(path.name):
                table = Table.load(path)
                flags = ("adapter", "frozen", "buffer")
                bytes_of = {name: WIDTHS[dtype] * math.prod(formula.evaluate(x, self.SIZES) for x in rest
                                                            if x not in flags and not x.startswith("tied="))
                            for _, name, dtype, *rest in table.parameters}
                for part, lines in table.parts.items():
                    for place, name in (line.split(" ")[1:] for line in lines if line.startswith("g ")):
                        home, _, number = place.rpartition(":")
                        made = table.parts[part] if not home else table.parts[home.partition("@")[0]]
                        sizes = {formula.evaluate(x.split(" ")[2], self.SIZES) for x in made if x.startswith(f"+ {number} ")}
                        self.assertEqual(sizes, {bytes_of[name]}, name)

    def test_tables_expand_at_small_sizes_and_leave_gradients_alone(self):
        for path in sorted(FOLDER.glob("*.table")):
            with self.subTest(path.name):
                result = replay(Table.load(path), self.SIZES, 5)
                self.assertEqual(sum(len(v) for v in result.left.values()), result.gradients)
                self.assertGreater(result.gradients, 0)


@unittest.skipUnless(importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"), "needs torch and transformers")
class Tables(unittest.TestCase):
    def test_tables_agree_with_fresh_traces(self):
        from foretell.trace import table
        wanted = os.environ.get("FORETELL_TABLES", "")
        files = sorted(FOLDER.glob("*.table"))
        files = [f for f in files if wanted == "all" or (wanted in f.name if wanted else f.name in SOME)]
        if not files:
            self.skipTest("no tables")
        table.preload()
        for path in files:
            with self.subTest(path.name):
                text = path.read_text(encoding="utf-8")
                key = Table(text).key
                if not table.can_trace(key) or table.versions_of(key) != Table(text).versions:
                    self.skipTest("other versions are installed")
                figures = table.forked(table.check, Table(text).key, text)
                self.assertLess(abs(figures["peak_error"]), 1e-3)
                self.assertLess(abs(figures["forward_error"]), 1e-3)
                self.assertEqual(figures["kernels"], figures["kernels_told"])
                self.assertLess(abs(figures["bytes_error"]), 1e-3)
                self.assertEqual(*figures["gradients"])


if __name__ == "__main__":
    unittest.main()
