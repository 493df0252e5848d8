#!/usr/bin/env python3
"""Chooses which values are fitted, and at which level: of all stacks, of a family, of a stack, or of a generation of
devices. Uses the
linearised fit that `cargo run --release -p foretell-score --example fit -- fit FILE` writes to FILE.json, without simulation.

    benches/hyperparameters.py FILE.json          scores the current levels, with sources and with groups left out
    benches/hyperparameters.py FILE.json search   coordinate search over the spreads of all levels; 0 drops a level

The search minimises the error of left-out sources, plus 0.3 of that of left-out groups, plus 0.012 % for each fitted value. Needs numpy.
"""
import json
import re
import sys
from collections import Counter, defaultdict

import numpy as np

# As in score/src/fitting/{linear,solve}.rs.
NOISE, HUBER, GROUP_POWER, SOURCE_POWER = 0.015, 0.7, 0.5, 0.9
PRICE = 0.00012
LEVELS = {"stack": ["EveryStack", "Family", "Stack"], "device": ["Generation"], "network": ["Network"]}
KIND = {level: kind for kind, levels in LEVELS.items() for level in levels}
FIELD = {"Family": "family", "Stack": "stack", "Generation": "generation"}


class Study:
    def __init__(self, path):
        fit = json.load(open(path))
        self.rows = fit["rows"]
        column = lambda key: np.array([row[key] for row in self.rows])
        self.source, self.group = column("source"), column("group")
        self.owners = {level: column(field) for level, field in FIELD.items()}
        parameters = [(*self.parse(one["owner"]), one["name"], one["spread"], one["offset"]) for one in fit["parameters"]]
        slopes = np.zeros((len(self.rows), len(parameters)))
        for row, parameter, slope in fit["slopes"]:
            slopes[row, parameter] = slope
        # A value moves a row alike at each level, so one column a value has all slopes.
        self.effects, self.spreads = {}, {}
        offsets = np.zeros(len(parameters))
        for index, (level, owner, name, spread, offset) in enumerate(parameters):
            effect = self.effects.setdefault((KIND[level], name), np.zeros(len(self.rows)))
            np.copyto(effect, slopes[:, index], where=slopes[:, index] != 0)
            self.spreads[level, name] = min(spread, self.spreads.get((level, name), spread))
            offsets[index] = offset
        self.unfitted = np.array([row["residual"] for row in self.rows]) - slopes @ offsets
        of_group = Counter(self.group)
        weights = np.array([of_group[name] ** (GROUP_POWER - 1) for name in self.group])
        of_source = defaultdict(float)
        for name, weight in zip(self.source, weights):
            of_source[name] += weight
        self.weights = weights * np.array([(of_source[name] / 10) ** (SOURCE_POWER - 1) for name in self.source])
        folds = {name: str(place % 20) for place, name in enumerate(sorted(of_group))}
        self.fold = np.array([folds[name] for name in self.group])

    @staticmethod
    def parse(owner):
        found = re.match(r'(\w+)\("(.*)"\)', owner)
        return found.groups() if found else (owner, "")

    def columns(self, spreads):
        columns, widths = [], []
        for (level, name), spread in spreads.items():
            effect = self.effects[KIND[level], name]
            if spread == 0:
                continue
            for owner in sorted(set(self.owners[level])) if level in FIELD else [None]:
                column = effect if owner is None else np.where(self.owners[level] == owner, effect, 0)
                if column.any():
                    columns.append(column)
                    widths.append(spread)
        return np.array(columns).T, np.array(widths)

    def residuals(self, jacobian, spreads, kept):
        residuals, prior = self.unfitted, np.diag(1 / spreads**2)
        for _ in range(40):
            pulls = self.weights * kept / NOISE**2 / np.sqrt(1 + (residuals / (NOISE * HUBER)) ** 2)
            weighted = jacobian * pulls[:, None]
            moved = self.unfitted - jacobian @ np.linalg.solve(weighted.T @ jacobian + prior, weighted.T @ self.unfitted)
            change, residuals = np.max(np.abs(moved - residuals)), moved
            if change < 1e-3:
                break
        return residuals

    def left_out(self, jacobian, spreads, names):
        found = np.zeros(len(self.rows))
        for name in set(names):
            found[names == name] = self.residuals(jacobian, spreads, names != name)[names == name]
        errors = np.abs(np.exp(np.clip(found, -2, 1.2)) - 1)
        return np.mean([errors[self.source == name].mean() for name in sorted(set(self.source))])

    def score(self, spreads):
        jacobian, widths = self.columns(spreads)
        source, group = (self.left_out(jacobian, widths, names) for names in (self.source, self.fold))
        return source + 0.3 * group + PRICE * len(widths), source, group, len(widths)

    def search(self):
        spreads = dict(self.spreads)
        for kind, name in self.effects:
            for level in LEVELS[kind]:
                spreads.setdefault((level, name), 0.0)
        best = self.score(spreads)
        for _ in range(3):
            before = best
            for key in list(spreads):
                usual = max(spread for (_, name), spread in self.spreads.items() if name == key[1])
                for value in (0, usual / 2, usual, usual * 1.7):
                    tried = {**spreads, key: value}
                    found = self.score(tried)
                    if found[0] < best[0] - 1e-5:
                        best, spreads = found, tried
                        print(key, round(value, 3), *(round(number, 4) for number in found), flush=True)
            if before[0] - best[0] < 2e-4:
                break
        return spreads


def main():
    study = Study(sys.argv[1])
    say = lambda found: print(f"{found[3]} values: sources left out {found[1]:.4f}, groups left out {found[2]:.4f}", flush=True)
    say(study.score(study.spreads))
    if sys.argv[2:] == ["search"]:
        spreads = study.search()
        say(study.score(spreads))
        for (level, name), spread in sorted(spreads.items(), key=lambda one: one[0][1]):
            print(f"{name:20} {level:12} {spread:.3f}")


if __name__ == "__main__":
    main()
