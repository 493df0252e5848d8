#!/usr/bin/env python3
"""Fits the time of a layer to vTrain's single-node runs, without simulation. Uses only the rows that tests/published/split.yaml declares.

The model of a step has two parts. Once per step: a constant, and for each layer a constant and a time proportional to its parameters,
which is longer with data parallelism. Per micro-batch: the layers' times, each by hidden size, tensor size and sequences, and the logits'
time, proportional to sequences over tensor size. Prints these times in milliseconds and the mean error. Needs numpy and scipy.

    benches/vtrain_slopes.py
"""
import csv
import pathlib

import numpy as np
from scipy.optimize import least_squares

RUNS = pathlib.Path(__file__).parent.parent / "tests/published/runs.csv"


def is_declared(row):
    """Returns whether a row is in the declared split, as score/src/published.rs computes it."""
    sum = 0xCBF29CE484222325
    for byte in f"{row['table']} {row['model']} {row['gpu_norm']}".encode():
        sum = ((sum ^ byte) * 0x100000001B3) % 2**64
    return (sum ^ (sum >> 29) ^ (sum >> 43)) % 5 < 3


def number(row, column):
    return int(float(row[column]))


rows = [row for row in csv.DictReader(RUNS.open()) if row["table"] == "vtrain_single_node"]
rows = [row for row in rows if row["step_s"] and is_declared(row)]
columns = ("hidden", "layers", "tp", "pp", "dp", "mbs", "ga")
hidden, layers, tensor, pipeline, data, sequences, micro_batches = np.array([[number(row, one) for one in columns] for row in rows]).T
measured = np.array([float(row["step_s"]) for row in rows]) * 1e3
cells = sorted(set(zip(hidden, tensor, sequences)))
cell = np.array([cells.index(one) for one in zip(hidden, tensor, sequences)])


def step(values):
    layer, (once, narrow, wide, parameters, constant, hand_over, summed) = values[cell], values[len(cells):]
    of_stage = layers / pipeline
    logits = np.where(hidden == 1024, narrow, wide) * sequences / tensor
    update = (parameters + summed * (data > 1)) * (hidden / 1024) ** 2 * of_stage / tensor + constant * of_stage
    return once + update + micro_batches * (of_stage * layer + logits) + (pipeline - 1) * (of_stage * layer + hand_over)


start = np.log(np.r_[np.full(len(cells), 4.0), 10, 3, 4, 0.3, 0.1, 1, 0.1])
found = least_squares(lambda logs: np.log(step(np.exp(logs)) / measured), start, loss="soft_l1", f_scale=0.02)
values = np.exp(found.x)
errors = np.abs(step(values) / measured - 1)
print(f"{len(rows)} rows, mean error {errors.mean():.2%}, worst {errors.max():.1%}")
print("logits of a sequence, 1,024 and 2,048 features: {:.2f} and {:.2f} ms".format(*values[len(cells) + 1 : len(cells) + 3]))
for (width, ranks, size), value in zip(cells, values):
    print(f"width {width} tensor {ranks} sequences {size}: {value:5.2f} ms a layer")
