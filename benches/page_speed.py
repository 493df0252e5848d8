#!/usr/bin/env python3
"""Changes fields of the planner's page at random, and says how long each answer takes to be drawn.

    cargo build --release && benches/page_speed.py target/release/foretell --changes 200

It starts `foretell serve` and headless Chromium (`FORETELL_CHROMIUM`, else `chromium`). Times are from
the key press, as the page's own clock has them: to the first answer, the simulated step and the
search's certificate, or to the message why a job cannot be planned. The last line has the memory of the
server and the page after all changes.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import tempfile
import time

MODELS = ["llama3-8b", "gpt2", "qwen3-8b", "llama3-70b", "resnet50"]
CLUSTERS = ["8xh100", "4xa100-80g", "2x8xh100@400Gbit/s", "dgx-a100-80g", "2xrtx-4090"]
METHODS = ["pretrain", "full", "lora", "qlora"]
BATCHES = ["8", "16", "32", "64", "128"]
SEQUENCES = ["512", "1024", "2048", "4096"]
FIELDS = {"model": MODELS, "topology": CLUSTERS, "method": METHODS, "batch": BATCHES, "sequence": SEQUENCES}
MARKS = ["first", "simulation", "certificate", "failure"]
PATIENCE = 60.0


class Browser:
    """Headless Chromium through its debugging pipe: JSON messages, each ended by a zero byte."""

    def __init__(self):
        program = os.environ.get("FORETELL_CHROMIUM", "chromium")
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = (
            'exec "$0" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run '
            '--remote-debugging-pipe --user-data-dir="$1" about:blank 3<&0 4>&1 </dev/null >/dev/null 2>&1'
        )
        self.process = subprocess.Popen(
            ["sh", "-c", command, program, self.profile.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.calls, self.session, self.rest = 0, None, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method, **parameters):
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self.next()
            if answer.get("id") == self.calls:
                assert "error" not in answer, answer
                return answer["result"]

    def next(self):
        while b"\0" not in self.rest:
            self.rest += os.read(self.process.stdout.fileno(), 1 << 16)
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def close(self):
        self.session = None
        self.process.stdin.write(b'{"id": 0, "method": "Browser.close"}\0')
        self.process.wait()


def change(browser, field, value, patience):
    """Changes a field as a person does. Returns the times until the page had its answers, or said why not."""
    browser.evaluate(
        f"""(() => {{
            const field = document.getElementById("{field}");
            field.value = {json.dumps(value)};
            performance.clearMarks();
            performance.mark("key");
            field.dispatchEvent(new Event("input"));
        }})()"""
    )
    marks = "Object.fromEntries(performance.getEntriesByType('mark').map((mark) => [mark.name, mark.startTime]))"
    end = time.monotonic() + patience
    while time.monotonic() < end:
        found = browser.evaluate(marks)
        if "failure" in found or ("simulation" in found and "certificate" in found):
            return {mark: found[mark] - found["key"] for mark in MARKS if mark in found}
        time.sleep(0.02)
    return {}


def resident(process):
    """The resident memory of a process and its children, in MiB."""
    total = 0
    for status in pathlib.Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        if int(fields["Pid"]) == process or int(fields["PPid"]) == process:
            total += int(fields.get("VmRSS", "0 kB").split()[0]) / 1024
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds until the next change, answered or not")
    parser.add_argument("--most-seconds", type=float, default=3600.0, help="no further change after this time")
    options = parser.parse_args()
    draw = random.Random(options.seed)

    server = subprocess.Popen([options.program, "serve", "--json"], stdout=subprocess.PIPE, text=True)
    text = ""
    while not text.rstrip().endswith("}"):
        text += server.stdout.readline()
    browser = Browser()
    try:
        browser.call("Page.navigate", url=json.loads(text)["url"])
        time.sleep(2)
        times, state, unanswered, slowest = {mark: [] for mark in MARKS}, {}, [], {}
        end, made = time.monotonic() + options.most_seconds, 0
        while made < options.changes and time.monotonic() < end:
            made += 1
            field = draw.choice(list(FIELDS))
            state[field] = draw.choice(FIELDS[field])
            found = change(browser, field, state[field], options.patience)
            if not found:
                unanswered.append(dict(state))
            for mark, taken in found.items():
                times[mark].append(taken)
                if taken >= max(times[mark]):
                    slowest[mark] = dict(state)
        print("| from the key press to | answers | p50 | p95 | longest |\n| --- | --- | --- | --- | --- |")
        for mark, taken in times.items():
            if len(taken) < 2:
                continue
            cuts = statistics.quantiles(taken, n=20)
            print(f"| {mark} | {len(taken)} | {statistics.median(taken):.0f} ms | {cuts[18]:.0f} ms | {max(taken):.0f} ms |")
        heap = browser.call("Runtime.getHeapUsage")["usedSize"] / 2**20
        print(f"\n{made} changes, {len(unanswered)} without any answer; server {resident(server.pid):.0f} MiB, heap of the page {heap:.1f} MiB")
        # Fields that no change has set have the page's own values.
        listed = [("unanswered", state) for state in unanswered] if options.patience >= PATIENCE else []
        for what, found in listed + list(slowest.items()):
            print(f"{what}: {found}")
    finally:
        browser.close()
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
