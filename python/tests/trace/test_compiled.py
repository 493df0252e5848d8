"""Compiled functions, traced without a GPU. Needs torch with Triton."""

import importlib.util
import unittest


def _gated(grad):
    """The kernels of a gate between products, and the bytes that each moves: forward, then backward."""
    import torch
    from torch._subclasses import FakeTensorMode
    from foretell.trace import compiled
    from foretell.trace.recorder import Allocation, Kernel, Recorder
    torch.autograd.set_multithreading_enabled(False)
    recorder = Recorder()
    gate = lambda x, a, b: torch.nn.functional.silu(x @ a) * (x @ b)
    function = compiled.Compiled(gate, recorder)
    with FakeTensorMode():
        x, a, b = (torch.empty(*shape, dtype=torch.bfloat16, requires_grad=grad) for shape in ((4096, 2048), (2048, 8192), (2048, 8192)))
        seen = []
        for _ in range(2):                                      # the first call compiles
            recorder.events.clear()
            with recorder:
                out = function(x, a, b)
                half = len(recorder.events)
                if grad:
                    out.backward(torch.empty(4096, 8192, dtype=torch.bfloat16))
        for events in (recorder.events[:half], recorder.events[half:]):
            kernels = [(e.name, sum(t.bytes for t in e.inputs + e.outputs)) for e in events if isinstance(e, Kernel)]
            seen.append((kernels, sum(isinstance(e, Allocation) for e in events)))
    return seen


@unittest.skipUnless(importlib.util.find_spec("torch") and importlib.util.find_spec("triton"), "needs torch with Triton")
class CompiledFunctions(unittest.TestCase):
    def test_what_is_between_products_is_one_kernel(self):
        from foretell.trace.table import forked
        (forward, allocations), (backward, _) = forked(_gated, True)
        wide = 2 * 4096 * 8192
        self.assertEqual([name for name, _ in forward], ["inductor.call", "inductor.mm", "inductor.mm", "inductor.fused"])
        self.assertEqual(forward[-1][1], 3 * wide, "it reads both products and writes their gate")
        self.assertEqual(allocations, 3, "both products are kept, and nothing else")
        fused = [size for name, size in backward if name == "inductor.fused"]
        self.assertEqual(sum(name.endswith("mm") for name, _ in backward), 4)
        self.assertEqual(fused, [5 * wide], "it reads both products and the gradient, and writes their gradients")

    def test_without_gradients_buffers_are_used_again(self):
        from foretell.trace.table import forked
        (forward, allocations), _ = forked(_gated, False)
        self.assertEqual([name for name, _ in forward].count("inductor.fused"), 1)
        self.assertEqual(allocations, 2, "the gate takes the place of a product")


if __name__ == "__main__":
    unittest.main()
