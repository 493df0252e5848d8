#!/usr/bin/env python3
"""Writes the ONNX graphs of models/tests/onnx/: small files whose weights have shapes and no numbers.

The graphs are made with the `onnx` package, whose shape inference and checker they pass. `--torch FOLDER` instead exports PyTorch's
modules and small models of Transformers with both of PyTorch's exporters into a folder, to try the reader on files as people have them.
Those that are tests of the reader (FIXTURES) also go, without the numbers of their weights, into models/tests/onnx/.

Usage: benches/onnx_graphs.py [--torch FOLDER]      (needs onnx from PyPI; --torch also torch, onnxscript and transformers)
"""
import argparse
import pathlib
import warnings

import onnx
from onnx import TensorProto, helper

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "models/tests/onnx"


class Graph:
    """A graph under construction: each method adds a node and returns the name of its result."""

    def __init__(self, name, input_shape, kind=TensorProto.FLOAT):
        self.name, self.nodes, self.weights = name, [], []
        self.input = helper.make_tensor_value_info("x", kind, ["batch", *input_shape])

    def weight(self, name, *shape):
        tensor = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="weights.bin")
        self.weights.append(tensor)
        return name

    def numbers(self, name, *values):
        self.weights.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
        return name

    def node(self, kind, name, *inputs, outputs=1, **attributes):
        names = [name] + [f"{name}_{index}" for index in range(1, outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=name, **attributes))
        return name if outputs == 1 else names

    def conv(self, name, x, channels, size, stride=1, padding=0, bias=False, groups=1):
        inputs = [x, self.weight(f"{name}.weight", channels[1], channels[0] // groups, size, size)]
        if bias:
            inputs.append(self.weight(f"{name}.bias", channels[1]))
        return self.node("Conv", name, *inputs, kernel_shape=[size, size], strides=[stride, stride], pads=[padding] * 4, group=groups)

    def norm(self, name, x, channels):
        return self.node("BatchNormalization", name, x, *[self.weight(f"{name}.{part}", channels) for part in ("weight", "bias", "mean", "var")])

    def linear(self, name, x, inputs, outputs):
        return self.node("Gemm", name, x, self.weight(f"{name}.weight", outputs, inputs), self.weight(f"{name}.bias", outputs), transB=1)

    def save(self, output, shape):
        out = helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", *shape])
        graph = helper.make_graph(self.nodes, self.name, [self.input], [out], self.weights)
        model = helper.make_model(graph, producer_name="foretell", opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
        (FOLDER / f"{self.name}.onnx").write_bytes(model.SerializeToString())
        print(f"{self.name}: {len(self.nodes)} nodes, {len(inferred.graph.value_info)} shapes")


def mlp():
    g = Graph("mlp", [784])
    x = g.linear("fc1", "x", 784, 512)
    x = g.node("Relu", "relu1", x)
    x = g.node("MatMul", "fc2", x, g.weight("fc2.weight", 512, 256))
    x = g.node("Add", "fc2_bias", x, g.weight("fc2.bias", 256))
    x = g.node("Sigmoid", "sigmoid", x)
    x = g.linear("fc3", x, 256, 10)
    g.save(g.node("Softmax", "softmax", x, axis=-1), [10])


def cnn():
    """Residual connections, convolutions in groups, a pooling with padding, a concatenation."""
    g = Graph("cnn", [3, 32, 32])
    x = g.conv("stem", "x", (3, 16), 3, padding=1, bias=True)
    x = g.node("Relu", "stem_relu", x)
    for index in range(2):
        y = g.conv(f"block{index}.depthwise", x, (16, 16), 3, padding=1, groups=16)
        y = g.norm(f"block{index}.norm", y, 16)
        y = g.node("Clip", f"block{index}.clip", y)
        y = g.conv(f"block{index}.pointwise", y, (16, 16), 1)
        x = g.node("Add", f"block{index}.add", x, y)
    left = g.node("MaxPool", "left", x, kernel_shape=[2, 2], strides=[2, 2])
    right = g.conv("right", x, (16, 8), 2, stride=2)
    x = g.node("Concat", "joined", left, right, axis=1)
    x = g.node("AveragePool", "average", x, kernel_shape=[4, 4], strides=[4, 4])
    x = g.node("Flatten", "flat", x)
    g.save(g.linear("head", x, 24 * 4 * 4, 10), [10])


def resnet50():
    g = Graph("resnet50", [3, 224, 224])
    x = g.node("Relu", "relu", g.norm("bn1", g.conv("conv1", "x", (3, 64), 7, 2, 3), 64))
    x = g.node("MaxPool", "maxpool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage, count in enumerate([3, 4, 6, 3]):
        width = 64 << stage
        for index in range(count):
            name, stride = f"layer{stage + 1}.{index}", 2 if index == 0 and stage > 0 else 1
            y = g.node("Relu", f"{name}.relu1", g.norm(f"{name}.bn1", g.conv(f"{name}.conv1", x, (channels, width), 1), width))
            y = g.node("Relu", f"{name}.relu2", g.norm(f"{name}.bn2", g.conv(f"{name}.conv2", y, (width, width), 3, stride, 1), width))
            y = g.norm(f"{name}.bn3", g.conv(f"{name}.conv3", y, (width, 4 * width), 1), 4 * width)
            if channels != 4 * width:
                x = g.norm(f"{name}.downsample.1", g.conv(f"{name}.downsample.0", x, (channels, 4 * width), 1, stride), 4 * width)
            x, channels = g.node("Relu", f"{name}.relu3", g.node("Add", f"{name}.add", y, x)), 4 * width
    x = g.node("Flatten", "flat", g.node("GlobalAveragePool", "avgpool", x))
    g.save(g.linear("fc", x, 2048, 1000), [1000])


def transformer():
    """Two layers of an encoder on tokens, with attention as torch writes it: products, a scale, a mask, a softmax."""
    hidden, heads, sequence, vocabulary = 64, 4, 16, 500
    g = Graph("transformer", [sequence], TensorProto.INT64)
    x = g.node("Gather", "embed", g.weight("embed.weight", vocabulary, hidden), "x")
    x = g.node("Add", "positions", x, g.weight("positions.weight", 1, sequence, hidden))
    g.numbers("to_heads", 0, 0, heads, hidden // heads)
    g.numbers("from_heads", 0, 0, hidden)
    g.nodes.append(helper.make_node("Constant", [], ["scale"], value=helper.make_tensor("scale", TensorProto.FLOAT, [], [0.25])))
    mask = helper.make_tensor("mask", TensorProto.FLOAT, [1, 1, 1, 1], [0.0])
    g.nodes.append(helper.make_node("Constant", [], ["mask"], value=mask))
    for layer in range(2):
        def name(part):
            return f"layer{layer}.{part}"

        def linear(part, x, inputs, outputs):
            y = g.node("MatMul", name(part), x, g.weight(name(f"{part}.weight"), inputs, outputs))
            return g.node("Add", name(f"{part}.add"), y, g.weight(name(f"{part}.bias"), outputs))

        def norm(part, x):
            return g.node("LayerNormalization", name(part), x, g.weight(name(f"{part}.weight"), hidden), g.weight(name(f"{part}.bias"), hidden))

        y = norm("norm1", x)
        q, k, v = [g.node("Reshape", name(f"{part}.heads"), linear(part, y, hidden, hidden), "to_heads") for part in "qkv"]
        q, v = [g.node("Transpose", name(f"{part}.turned"), one, perm=[0, 2, 1, 3]) for part, one in (("q", q), ("v", v))]
        k = g.node("Transpose", name("k.turned"), k, perm=[0, 2, 3, 1])
        scores = g.node("Mul", name("scaled"), g.node("MatMul", name("scores"), q, k), "scale")
        scores = g.node("Softmax", name("softmax"), g.node("Add", name("masked"), scores, "mask"), axis=-1)
        y = g.node("Transpose", name("turned"), g.node("MatMul", name("values"), scores, v), perm=[0, 2, 1, 3])
        y = linear("out", g.node("Reshape", name("joined"), y, "from_heads"), hidden, hidden)
        x = g.node("Add", name("residual1"), x, y)
        y = g.node("Erf", name("erf"), linear("up", norm("norm2", x), hidden, 4 * hidden))
        x = g.node("Add", name("residual2"), x, linear("down", y, 4 * hidden, hidden))
    g.save(g.node("MatMul", "head", x, g.weight("head.weight", hidden, vocabulary)), [sequence, vocabulary])


def merged():
    """Rows of all samples in one dimension, and shapes computed by the graph, as PyTorch's exporter writes them."""
    g = Graph("merged", [16], TensorProto.INT64)
    x = g.node("Gather", "embed", g.weight("embed.weight", 500, 64), "x")
    x = g.node("Reshape", "rows", x, g.numbers("to_rows", -1, 64))
    x = g.node("Gemm", "qkv", x, g.weight("qkv.weight", 64, 192), g.weight("qkv.bias", 192))
    x = g.node("Reshape", "positions", x, g.numbers("to_positions", -1, 16, 192))
    g.numbers("sizes", 64, 64, 64)
    parts = [g.node("Reshape", f"{name}.heads", part, g.numbers(f"to_heads_{name}", 0, 16, -1, 16))
             for name, part in zip("qkv", g.node("Split", "split", x, "sizes", outputs=3, axis=2))]
    q, k, v = [g.node("Transpose", f"{name}.turned", part, perm=[0, 2, 1, 3]) for name, part in zip("qkv", parts)]
    shape = g.node("Shape", "shape", k)
    for name, values in {"first": [-9223372036854775808], "last": [9223372036854775807], "minus1": [-1], "minus2": [-2]}.items():
        g.numbers(name, *values)
    before, rows, columns = [g.node("Slice", f"slice{index}", shape, start, end)
                             for index, (start, end) in enumerate([("first", "minus2"), ("minus2", "minus1"), ("minus1", "last")])]
    k = g.node("Reshape", "k.matrices", k, g.node("Concat", "matrices", "minus1", rows, columns, axis=0))
    k = g.node("Transpose", "k.transposed", k, perm=[0, 2, 1])
    k = g.node("Reshape", "k.back", k, g.node("Concat", "back", before, columns, rows, axis=0))
    scores = g.node("Softmax", "softmax", g.node("MatMul", "scores", q, k), axis=-1)
    y = g.node("Transpose", "turned", g.node("MatMul", "values", scores, v), perm=[0, 2, 1, 3])
    y = g.node("Reshape", "joined", y, g.numbers("to_joined", -1, 64))
    g.save(g.node("MatMul", "head", g.node("Reshape", "whole", y, g.numbers("to_whole", -1, 16, 64)), g.weight("head.weight", 64, 500)), [16, 500])


def unknown():
    """Two operators that nobody understands, and one that is."""
    g = Graph("unknown", [8])
    x = g.node("Relu", "relu", "x")
    x = g.node("Hardmax", "hardmax", x)
    g.save(g.node("LpNormalization", "norm", x), [8])


# Sizes of all exported transformers: positions, features, heads, features of the feed-forward
# network, tokens, layers.
SEQUENCE, HIDDEN, HEADS, FFN, VOCABULARY, LAYERS = 16, 64, 4, 256, 500, 2

# Ways to export: which exporter, the size of the sample's batch, and whether the file leaves the
# batch open.
WAYS = {"": (True, 3, True), "stated": (True, 3, False), "one": (True, 1, False), "old": (False, 3, True), "old_stated": (False, 3, False)}

# Exports that are tests of the reader.
FIXTURES = ["encoder_first", "encoder_second", "encoder_second_one", "encoder_second_old", "attention", "vectors_old_stated", "vit", "gpt2",
            "bert", "llama", "roberta"]


def modules():
    """By name: a function that makes a model, the shape of its samples (of tokens if it has one dimension), where the batch is, inputs."""
    import transformers
    from torch import nn

    class Encoder(nn.Module):
        def __init__(self, batch_first, embed):
            super().__init__()
            layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, FFN, batch_first=batch_first)
            self.embed, self.encoder, self.head = embed, nn.TransformerEncoder(layer, LAYERS), nn.Linear(HIDDEN, VOCABULARY)

        def forward(self, x):
            return self.head(self.encoder(self.embed(x)))

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(HIDDEN, HEADS)

        def forward(self, q, k, v):
            return self.attention(q, k, v)[0]

    class Logits(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x).logits

    def of_transformers(config, model, **others):
        return lambda: Logits(getattr(transformers, model)(getattr(transformers, config)(**others)))

    sizes = dict(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=FFN)
    text = dict(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes)
    tokens, vectors = [SEQUENCE], [SEQUENCE, HIDDEN]
    convolutions = lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 32, 3, 2, groups=2), nn.GELU(),
                                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10))
    return {
        "cnn": (convolutions, [3, 32, 32], 0, 1),
        "encoder_first": (lambda: Encoder(True, nn.Embedding(VOCABULARY, HIDDEN)), tokens, 0, 1),
        "encoder_second": (lambda: Encoder(False, nn.Embedding(VOCABULARY, HIDDEN)), tokens, 1, 1),
        "vectors": (lambda: Encoder(False, nn.Identity()), vectors, 1, 1),
        "attention": (Attention, vectors, 1, 3),
        "vit": (of_transformers("ViTConfig", "ViTForImageClassification", image_size=32, patch_size=8, num_labels=10, **sizes), [3, 32, 32], 0, 1),
        "gpt2": (of_transformers("GPT2Config", "GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=64,
                                 use_cache=False), tokens, 0, 1),
        "bert": (of_transformers("BertConfig", "BertForMaskedLM", **text), tokens, 0, 1),
        "roberta": (of_transformers("RobertaConfig", "RobertaForMaskedLM", **text), tokens, 0, 1),
        "llama": (of_transformers("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=2, use_cache=False, **text), tokens, 0, 1),
    }


def without_numbers(path):
    """A graph whose weights have only their shapes, and whose nodes do not say where in Python they come from."""
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and any(extent > 1 for extent in tensor.dims):
            shape = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type, data_location=TensorProto.EXTERNAL)
            shape.external_data.add(key="location", value="weights.bin")
            tensor.CopyFrom(shape)
    for part in [model, model.graph, *model.graph.node]:
        part.doc_string = ""
        del part.metadata_props[:]
    del model.graph.value_info[:]
    return model


def export(folder):
    import torch

    warnings.filterwarnings("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    for name, (make, shape, axis, inputs) in modules().items():
        model = make().eval()
        # As after training: an exporter leaves out biases of zeros, and shares equal weights.
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        print(f"{name}: {sum(one.numel() for one in model.parameters()):,} parameters")
        for way, (is_new, batch, is_open) in WAYS.items():
            extents = [*shape[:axis], batch, *shape[axis:]]
            samples = tuple(torch.ones(extents, dtype=torch.long if len(shape) == 1 else torch.float) for _ in range(inputs))
            path = folder / f"{'_'.join(filter(None, [name, way]))}.onnx"
            try:
                if is_new:
                    shapes = tuple({axis: torch.export.Dim("batch")} for _ in samples) if is_open else None
                    torch.onnx.export(model, samples, path, dynamo=True, dynamic_shapes=shapes, verbose=False)
                else:
                    names = [f"x{index}" for index in range(inputs)]
                    axes = {one: {axis: "batch"} for one in names} if is_open else None
                    torch.onnx.export(model, samples, path, dynamo=False, input_names=names, dynamic_axes=axes)
            except torch.onnx.errors.OnnxExporterError as error:
                print(f"  {path.stem}: not exported: {str(error).splitlines()[-1]}")
                continue
            if path.stem in FIXTURES:
                (FOLDER / f"torch_{path.stem}.onnx").write_bytes(without_numbers(path).SerializeToString())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.torch:
        return export(arguments.torch)
    FOLDER.mkdir(exist_ok=True)
    for write in (mlp, cnn, resnet50, transformer, merged, unknown):
        write()


if __name__ == "__main__":
    main()
