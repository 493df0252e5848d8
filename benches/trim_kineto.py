#!/usr/bin/env python3
"""Keeps of a PyTorch profiler trace what `foretell import kineto` reads, for a small test file.

Usage: benches/trim_kineto.py TRACE STEPS OUT
"""
import json
import sys

CATEGORIES = {"cpu_op", "user_annotation", "kernel", "gpu_memcpy"}
# Their children are what counts.
WRAPPERS = ("aten::linear", "aten::to", "aten::_to_copy", "aten::view", "aten::t", "aten::transpose", "aten::as_strided", "aten::empty",
            "aten::resolve_conj", "aten::reshape", "aten::expand", "aten::detach", "detach", "aten::_unsafe_view", "aten::slice",
            "aten::copy_", "aten::fill_", "aten::zero_", "aten::narrow", "aten::select", "aten::item", "aten::_local_scalar_dense", "aten::resize_", "aten::split")


def main():
    source, steps, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    document = json.load(open(source))
    events = [event for event in document["traceEvents"] if event.get("ph") == "X" and event["cat"] in CATEGORIES]
    marks = sorted((event for event in events if event["name"].startswith("ProfilerStep#")), key=lambda event: event["ts"])[-steps:]
    start, end = marks[0]["ts"], marks[-1]["ts"] + marks[-1]["dur"]
    kept = []
    for event in events:
        name = event["name"]
        is_wrapper = name.startswith(WRAPPERS) or name.endswith("Backward0") and "evaluate_function" not in name
        is_short = event["dur"] < 5 and not name.startswith(("aten::mm", "aten::add", "aten::gelu"))
        if not start <= event["ts"] < end or is_wrapper or is_short:
            continue
        small = {"ph": "X", "cat": event["cat"], "name": name, "tid": event["tid"] - event["pid"]}
        small["ts"], small["dur"] = round(event["ts"] - start, 1), round(event["dur"], 1)
        if event["name"].startswith(("aten::mm", "aten::addmm", "aten::bmm")):
            small["args"] = {"Input Dims": event["args"]["Input Dims"]}
        kept.append(small)
    document["traceEvents"] = kept
    document["baseTimeNanoseconds"] += round(start * 1000)
    for name in ["traceName", "trace_id", "host_name"]:
        document.pop(name, None)
    rows = ",\n".join(json.dumps(event, separators=(",", ":")) for event in document.pop("traceEvents"))
    head = json.dumps(document, separators=(",", ":"))[:-1]
    open(out, "w").write(f'{head},"traceEvents":[\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()
