#!/usr/bin/env python3
"""Writes executor/src/execute/scikit_learn.json: scores of samples, and what scikit-learn makes of
them. Needs numpy and scikit-learn: `pip install scikit-learn`."""

import json
import pathlib

import numpy
import sklearn
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support, roc_auc_score

TARGET = pathlib.Path(__file__).parents[2] / "executor/src/execute/scikit_learn.json"


def case(samples, classes, unpredicted, seed):
    """Scores in hundredths, so that some are equal. Class `unpredicted` is never the best."""
    random = numpy.random.default_rng(seed)
    labels = numpy.concatenate([numpy.arange(classes), random.integers(0, classes, samples - classes)])
    logits = random.normal(size=(samples, classes)) + 1.5 * numpy.eye(classes)[labels]
    if unpredicted is not None:
        logits[:, unpredicted] -= 9
    scores = numpy.exp(logits)
    scores = numpy.round(scores / scores.sum(axis=1, keepdims=True), 2).astype(numpy.float32)
    predictions = scores.argmax(axis=1)
    precision, recall, f1, support = precision_recall_fscore_support(labels, predictions, zero_division=0)
    macro = precision_recall_fscore_support(labels, predictions, average="macro", zero_division=0)
    areas = [roc_auc_score(labels == one, scores[:, one]) for one in range(classes)]
    return {
        "samples": [[*map(float, row), int(label)] for row, label in zip(scores, labels)],
        "precision": precision.tolist(),
        "recall": recall.tolist(),
        "f1": f1.tolist(),
        "support": support.tolist(),
        "macro": list(macro[:3]),
        # scikit-learn refuses scores whose sums are not exactly one. Its macro average is this
        # mean.
        "roc_auc": areas,
        "macro_roc_auc": float(numpy.mean(areas)),
        "confusion": confusion_matrix(labels, predictions).tolist(),
    }


cases = [case(40, 4, None, 1), case(60, 3, 1, 2), case(120, 10, 7, 3)]
TARGET.write_text(json.dumps({"scikit_learn": sklearn.__version__, "cases": cases}) + "\n")
print(f"{TARGET}: scikit-learn {sklearn.__version__}")
