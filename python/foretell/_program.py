"""Starts the program. It must not know what commands answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Callable, Generic, Sequence, TypeVar

Answer = TypeVar("Answer")

# Seconds between two looks at a program that works.
LOOK = 0.1


class ForetellError(Exception):
    """The program could not do it (`status` 1), or the input is wrong (`status` 2). `diagnostic` is a stable code."""

    def __init__(self, message: str, *, status: int, code: str | None = None, diagnostic: str | None = None,
                 hint: str | None = None, file: str | None = None, line: int | None = None, column: int | None = None):
        super().__init__(f"{message}; hint: {hint}" if hint else message)
        self.message, self.status, self.code, self.diagnostic = message, status, code, diagnostic
        self.hint, self.file, self.line, self.column = hint, file, line, column


class Cancelled(ForetellError):
    """The command was ended by `Running.cancel`."""

    def __init__(self) -> None:
        super().__init__("the command was cancelled", status=1, code="cancelled")


def command_path() -> str:
    """The program: `FORETELL_PROGRAM`, else the one that this package brought, else the one in `PATH`."""
    named = os.environ.get("FORETELL_PROGRAM")
    if named:
        return named
    scripts = {sysconfig.get_path("scripts"), str(Path(sys.executable).parent)}
    user = sysconfig.get_path("scripts", f"{os.name}_user")
    for folder in (*sorted(filter(None, scripts)), user):
        if folder and (path := Path(folder) / "foretell").is_file():
            return str(path)
    found = shutil.which("foretell")
    if found is None:
        raise ForetellError("the program `foretell` is missing", status=2, hint="install it with `pip install foretell`")
    return found


def version() -> str:
    """The program's version."""
    text = subprocess.run([command_path(), "--version"], check=True, capture_output=True, text=True).stdout
    return text.split()[-1]


class Running(Generic[Answer]):
    """A command that works on its answer. The end of a `with` block ends it too.

    `finish` makes the answer of the document, `latest` says how far the command is, and `close` releases what it needs.
    """

    def __init__(self, arguments: Sequence[str], finish: Callable[[Any], Answer], *,
                 latest: Callable[[], Any] = lambda: None, close: Callable[[], None] = lambda: None):
        self._finish, self._latest, self._close = finish, latest, close
        self._is_cancelled = False
        # The answer, once it was asked for.
        self._answer: list[Answer] | None = None
        # Files, so that a long document never waits for a reader.
        self._output, self._messages = (tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2))
        try:
            self._process = subprocess.Popen(
                [command_path(), "--json", *arguments], stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._messages
            )
        except BaseException:
            self._close_files()
            raise

    def done(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def progress(self) -> Any:
        """How far a search is: a `Moment`; `None` before the first, and for other commands."""
        return self._latest()

    def cancel(self) -> None:
        """Ends the command. `result` then raises `Cancelled`."""
        if not self.done():
            self._is_cancelled = True
            self._process.kill()
            self._process.wait()
        self._close_files()

    def result(self, timeout: float | None = None, watch: Callable[[Any], None] | None = None) -> Answer:
        """Waits for the answer. `watch` is called with each new `progress`.

        After `timeout` seconds it raises `subprocess.TimeoutExpired`, and an interrupt goes through; the command then goes on,
        until `cancel` or the end of its `with` block.
        """
        if self._answer is None:
            if watch is not None:
                self._watch(timeout, watch)
            elif not self._wait(timeout):
                raise subprocess.TimeoutExpired(self._process.args, timeout or 0)
            if self._is_cancelled:
                raise Cancelled
            texts = []
            for file in (self._output, self._messages):
                file.seek(0)
                texts.append(file.read())
            self._answer = [self._finish(_document(self._process.returncode, *texts))]
            self._close_files()
        return self._answer[0]

    def _watch(self, timeout: float | None, watch: Callable[[Any], None]) -> None:
        seen, waited = None, 0.0
        while not self._wait(LOOK):
            waited += LOOK
            if timeout is not None and waited >= timeout:
                raise subprocess.TimeoutExpired(self._process.args, timeout)
            moment = self._latest()
            if moment is not None and moment != seen:
                seen = moment
                watch(moment)

    def _wait(self, timeout: float | None) -> bool:
        """Waits for the end. Returns whether it has come."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _close_files(self) -> None:
        self._output.close()
        self._messages.close()
        self._close()

    def __enter__(self) -> Running[Answer]:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        state = "cancelled" if self._is_cancelled else "ended" if self.done() else "working"
        return f"Running({self._process.args[2]}: {state})"


def document(arguments: Sequence[str], *, timeout: float | None = None) -> Any:
    """Runs a command with `--json` and returns its document."""
    with Running(arguments, lambda answer: answer) as running:
        return running.result(timeout)


def _document(status: int, output: str, messages: str) -> Any:
    """The document of a command that has ended, or its error."""
    try:
        answer = json.loads(output) if output.strip() else {}
    except ValueError:
        raise ForetellError("the program's answer is not JSON", status=status or 1) from None
    # A command may fail after its answer, as where the plan does not fit: the answer says so.
    error = answer.get("error") if isinstance(answer, dict) else None
    if status != 0 and (isinstance(error, dict) or not answer):
        error = error or {"message": messages.strip() or f"exit status {status}"}
        known = {name: error.get(name) for name in ("code", "diagnostic", "hint", "file", "line", "column")}
        raise ForetellError(error.get("message", ""), status=status, **known)
    return answer
