#!/usr/bin/env python3
"""Cross-validates the hyperparameters of the fit to published runs. Uses the linearised fit that
`cargo run --release -p foretell-score --example fit -- fit FILE` writes to FILE.json, without simulation.

    benches/hyperparameters.py FILE.json          the error of the current values, with sources and with groups left out
    benches/hyperparameters.py FILE.json search   a coordinate search of the noise, the weights' exponents and the spread of each kind of value

Each refit computes the rows' robust weights afresh. Groups are left out in ten folds. The search minimises the error of left-out
sources plus four tenths of that of left-out groups, and so chooses by the same sources that it reports. Needs numpy and scipy.
"""
import json
import sys
from collections import Counter, defaultdict

import numpy as np
from scipy.linalg import cho_factor, cho_solve

# The values in score/src/fitting/{linear,solve}.rs: noise, Huber's threshold, exponents of the
# group and source weights.
FITTED = dict(noise=0.015, huber=0.7, group=0.7, source=0.9)
TRIED = dict(noise=(0.01, 0.02, 0.03, 0.045), group=(0.4, 0.5, 0.6, 0.8), source=(0.6, 0.7, 0.8, 1.0))
SPREADS = (0.5, 0.7, 1.4, 2.0)
FOLDS = 10


class Study:
    def __init__(self, path):
        fit = json.load(open(path))
        rows, parameters = fit["rows"], fit["parameters"]
        jacobian = np.zeros((len(rows), len(parameters)))
        for row, parameter, slope in fit["slopes"]:
            jacobian[row, parameter] = slope
        offsets = np.array([one["offset"] for one in parameters])
        self.unfitted = np.array([row["residual"] for row in rows]) - jacobian @ offsets
        # Values that are tied to a shared factor move nothing of their own.
        free = [index for index, one in enumerate(parameters) if one["kin"] is None and np.abs(jacobian[:, index]).max() > 1e-6]
        self.jacobian = jacobian[:, free]
        self.names = np.array([parameters[index]["name"] for index in free])
        self.spread = np.array([parameters[index]["spread"] for index in free])
        self.sources = np.array([row["source"] for row in rows])
        self.groups = np.array([row["group"] for row in rows])
        fold = {name: str(place % FOLDS) for place, name in enumerate(sorted(set(self.groups)))}
        self.folds = np.array([fold[name] for name in self.groups])

    def weights(self, h):
        of_group = Counter(self.groups)
        weights = np.array([of_group[name] ** (h["group"] - 1) for name in self.groups])
        of_source = defaultdict(float)
        for name, weight in zip(self.sources, weights):
            of_source[name] += weight
        return weights * np.array([(of_source[name] / 10) ** (h["source"] - 1) for name in self.sources])

    def refit(self, rows, precision, weights, h, residuals):
        """Returns the offsets that fit these rows, and the rows' residuals."""
        slopes, unfitted = self.jacobian[rows], self.unfitted[rows]
        for _ in range(40):
            pulls = weights[rows] / h["noise"] ** 2 / np.sqrt(1 + (residuals / (h["noise"] * h["huber"])) ** 2)
            factor = cho_factor(slopes.T @ (slopes * pulls[:, None]) + np.diag(precision), lower=True)
            offsets = cho_solve(factor, slopes.T @ (pulls * unfitted))
            found = unfitted - slopes @ offsets
            moved, residuals = np.max(np.abs(found - residuals)), found
            if moved < 1e-3:
                break
        return offsets, residuals

    def error(self, names, h, scale):
        """Returns the mean over sources of the absolute error when each name's rows are left out."""
        weights = self.weights(h)
        precision = np.array([1 / (spread * scale.get(name, 1.0)) ** 2 for name, spread in zip(self.names, self.spread)])
        everything = np.ones(len(names), dtype=bool)
        _, residuals = self.refit(everything, precision, weights, h, self.unfitted)
        left_out = np.zeros(len(names))
        for name in sorted(set(names)):
            kept = names != name
            offsets, _ = self.refit(kept, precision, weights, h, residuals[kept])
            left_out[~kept] = self.unfitted[~kept] - self.jacobian[~kept] @ offsets
        error = np.abs(np.exp(np.clip(left_out, -2, 1.2)) - 1)
        return float(np.mean([error[self.sources == source].mean() for source in sorted(set(self.sources))]))

    def score(self, h, scale):
        source, group = self.error(self.sources, h, scale), self.error(self.folds, h, scale)
        return source + 0.4 * group, source, group

    def search(self, h):
        scale, best = {}, self.score(h, {})
        for _ in range(3):
            before = best
            tries = [({**h, key: value}, scale) for key, values in TRIED.items() for value in values]
            tries += [(h, {**scale, name: scale.get(name, 1.0) * factor}) for name in sorted(set(self.names)) for factor in SPREADS]
            for tried_h, tried_scale in tries:
                found = self.score(tried_h, tried_scale)
                if found < best:
                    best, h, scale = found, tried_h, tried_scale
            if before[0] - best[0] < 5e-4:
                break
        return best, h, scale


def main():
    study = Study(sys.argv[1])
    say = lambda name, found: print(f"{name:10} {len(study.names)} values: sources left out {found[1]:.4f}, groups {found[2]:.4f}", flush=True)
    say("fitted", study.score(FITTED, {}))
    if sys.argv[2:] == ["search"]:
        best, h, scale = study.search(dict(FITTED))
        say("searched", best)
        print({**h, **{name: round(factor, 2) for name, factor in scale.items()}})


if __name__ == "__main__":
    main()
