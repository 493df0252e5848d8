#!/usr/bin/env python3
"""Cross-validates the hyperparameters of the fit to published runs. Uses the linearised fit that
`cargo run --release -p foretell-score --example fit -- fit FILE` writes to FILE.json, without simulation.

    benches/hyperparameters.py FILE.json          scores the current values, with groups and with sources left out
    benches/hyperparameters.py FILE.json search   coordinate search, over all sources and over half of them, scored on the others

Groups are left out in ten folds, each refitted with new row weights. Whole sources are left out by the closed form for fixed weights.
Needs numpy and scipy.
"""
import json
import random
import sys
from collections import Counter, defaultdict

import numpy as np
from scipy.linalg import cho_factor, cho_solve

# The values in score/examples/fit/{linear,solve,parameters}.rs: noise, Huber's threshold, exponents
# of the group and source weights, and the shares of variance that related values have in common. A
# branch's share is a share of what its family leaves.
FITTED = dict(noise=0.015, huber=0.7, group=0.5, source=0.9, family=0.7, branch=0.8, generation=0.8)
# The start of a search: the values that were set by hand until November 2026.
BY_HAND = dict(noise=0.04, huber=0.7, group=0.7, source=0.7, family=0.6, branch=0.8, generation=0.6)
SEARCHED = ["noise", "group", "source", "family", "generation"]


class Study:
    def __init__(self, path, seed=1, folds=10):
        fit = json.load(open(path))
        self.rows, parameters = fit["rows"], fit["parameters"]
        self.jacobian = np.zeros((len(self.rows), len(parameters)))
        for row, parameter, slope in fit["slopes"]:
            self.jacobian[row, parameter] = slope
        offsets = np.array([one["offset"] for one in parameters])
        self.unfitted = np.array([row["residual"] for row in self.rows]) - self.jacobian @ offsets
        self.sources = np.array([row["source"] for row in self.rows])
        self.groups = np.array([row["group"] for row in self.rows])
        owner = [one["owner"].split("(")[0] for one in parameters]
        self.of_device = np.array([one in ("Device", "Generation") for one in owner])
        self.is_common = np.array([one in ("Family", "Generation") for one in owner])
        self.is_branch = np.array([one == "Branch" for one in owner])
        self.has_kin = np.array([one["kin"] is not None for one in parameters])
        self.of_branch = np.array([one["kin"] is not None and owner[one["kin"]] == "Branch" for one in parameters])
        # The variance before it was divided between a value and its common part.
        self.variance = np.array([one["spread"] for one in parameters]) ** 2 / self.own(FITTED)
        names = sorted(set(self.groups))
        random.Random(seed).shuffle(names)
        source_of = dict(zip(self.groups, self.sources))
        names.sort(key=lambda name: source_of[name])
        fold = {name: place % folds for place, name in enumerate(names)}
        self.fold = np.array([fold[name] for name in self.groups])

    def weights(self, h):
        of_group = Counter(self.groups)
        weights = np.array([of_group[name] ** (h["group"] - 1) for name in self.groups])
        of_source = defaultdict(float)
        for name, weight in zip(self.sources, weights):
            of_source[name] += weight
        return weights * np.array([(of_source[name] / 10) ** (h["source"] - 1) for name in self.sources])

    def own(self, h):
        """Returns each parameter's share of the variance: a value's own part, or the part that related values have in common."""
        shares = np.where(self.of_device, h["generation"], h["family"])
        rest = (1 - shares) * np.where(self.of_branch, 1 - h["branch"], 1)
        own = np.where(self.is_common, shares, np.where(self.has_kin, rest, 1))
        return np.where(self.is_branch, (1 - shares) * h["branch"], own)

    def kernel(self, h):
        return (self.jacobian * (self.variance * self.own(h))) @ self.jacobian.T

    @staticmethod
    def refit(kernel, unfitted, weights, h, residuals):
        for _ in range(40):
            pulls = weights / h["noise"] ** 2 / np.sqrt(1 + (residuals / (h["noise"] * h["huber"])) ** 2)
            factor = cho_factor(kernel + np.diag(1 / pulls), lower=True)
            dual = cho_solve(factor, unfitted)
            moved = np.max(np.abs(dual / pulls - residuals))
            residuals = dual / pulls
            if moved < 1e-3:
                break
        return dual, residuals, factor

    def left_out(self, h):
        weights, kernel = self.weights(h), self.kernel(h)
        dual, residuals, factor = self.refit(kernel, self.unfitted, weights, h, self.unfitted)
        group, source = np.zeros_like(residuals), np.zeros_like(residuals)
        inverse = cho_solve(factor, np.eye(len(residuals)))
        for name in set(self.sources):
            of = np.where(self.sources == name)[0]
            source[of] = np.linalg.solve(inverse[np.ix_(of, of)], dual[of])
        for fold in set(self.fold):
            kept, out = np.where(self.fold != fold)[0], np.where(self.fold == fold)[0]
            found, _, _ = self.refit(kernel[np.ix_(kept, kept)], self.unfitted[kept], weights[kept], h, residuals[kept])
            group[out] = self.unfitted[out] - kernel[np.ix_(out, kept)] @ found
        return group, source

    def score(self, h, sources=None):
        """Returns the objective and the mean absolute errors over sources with groups and with sources left out.

        The objective weighs the first error by two thirds and the second by one third.
        """
        errors = [np.abs(np.exp(np.clip(one, -2, 1.2)) - 1) for one in self.left_out(h)]
        names = sorted(set(self.sources)) if sources is None else sources
        group, source = ([np.mean(error[self.sources == name]) for name in names] for error in errors)
        return (2 * np.mean(group) + np.mean(source)) / 3, np.mean(group), np.mean(source)

    def search(self, h, sources=None):
        best = self.score(h, sources)
        for _ in range(3):
            before = best
            for key in SEARCHED:
                if key == "noise":
                    tried = [h[key] * factor for factor in (0.5, 0.71, 1.41, 2)]
                elif key in ("group", "source"):
                    tried = [h[key] - 0.15, min(h[key] + 0.15, 1.0)]
                else:
                    tried = [h[key] * 0.8, 1 - (1 - h[key]) * 0.7]
                for value in tried:
                    found = self.score({**h, key: value}, sources)
                    if found < best:
                        best, h = found, {**h, key: value}
            if before[0] - best[0] < 2e-5:
                break
        return h


def main():
    study = Study(sys.argv[1])
    say = lambda name, found: print(f"{name:28} group left out {found[1]:.4f} source left out {found[2]:.4f}", flush=True)
    say("by hand", study.score(BY_HAND))
    say("fitted", study.score(FITTED))
    if sys.argv[2:] == ["search"]:
        names = sorted(set(study.sources))
        halves = [names[::2], names[1::2], names[: len(names) // 2], names[len(names) // 2 :]]
        found = study.search(dict(BY_HAND))
        say("searched over all", study.score(found))
        print({key: round(value, 3) for key, value in found.items()})
        for place, half in enumerate(halves):
            others = [name for name in names if name not in half]
            found = study.search(dict(BY_HAND), half)
            say(f"half {place}: the others by hand", study.score(BY_HAND, others))
            say(f"half {place}: the others", study.score(found, others))


if __name__ == "__main__":
    main()
