"""Traces one training step of a framework's own code without a GPU, and writes it as an operator table.

A table states every kernel, allocation and release of the step with sizes as formulas, so that it holds for any batch,
sequence length and number of layers of that architecture. The pieces, in the order in which they are used:

`sizes`     the sizes of the small model that is traced, chosen so that every dimension can be recognised
`models`    builds that model from the framework's own classes
`cuda`      makes a CPU take the operators that a GPU would take
`recorder`  logs kernels, allocations and releases of a step under fake tensors
`step`      runs forward, loss and backward the way a trainer does
`parts`     splits the log into the parts of a table, one per layer and direction
`dtypes`    widths of number formats
`formula`   names a size by a formula, and evaluates formulas
`table`     the command `python -m foretell.trace.table`
`replay`    expands a table at any sizes: peak memory and operators
`script`    traces a step of one's own: `python -m foretell.trace FILE.py:FUNCTION`
`wrappers`  takes DDP, FSDP and compilers off such a step
`graph`     logs which operator reads what another one made
`export`    writes that graph for `foretell import torch`, with every dimension as a formula of batch and sequence
`plain`, `tune`, `qlora`, `scans`  further models, torchtune's, 4-bit weights, kernels of linear attention
`older`, `losses`  older releases of transformers, losses of trainers
`loops`, `matrix`  loops in parts, the list of tables
"""
