"""Starts the program. It must not know what commands answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Sequence


class ForetellError(Exception):
    """The program could not do it (`status` 1), or the input is wrong (`status` 2). `diagnostic` is a stable code."""

    def __init__(self, message: str, *, status: int, code: str | None = None, diagnostic: str | None = None,
                 hint: str | None = None, file: str | None = None, line: int | None = None, column: int | None = None):
        super().__init__(f"{message}; hint: {hint}" if hint else message)
        self.message, self.status, self.code, self.diagnostic = message, status, code, diagnostic
        self.hint, self.file, self.line, self.column = hint, file, line, column


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


def document(arguments: Sequence[str], *, timeout: float | None = None) -> Any:
    """Runs a command with `--json` and returns its document."""
    done = subprocess.run([command_path(), "--json", *arguments], capture_output=True, text=True, timeout=timeout)
    try:
        answer = json.loads(done.stdout) if done.stdout.strip() else {}
    except ValueError:
        raise ForetellError("the program's answer is not JSON", status=done.returncode or 1) from None
    # A command may fail after its answer, as where the plan does not fit: the answer says so.
    error = answer.get("error") if isinstance(answer, dict) else None
    if done.returncode != 0 and (isinstance(error, dict) or not answer):
        error = error or {"message": done.stderr.strip() or f"exit status {done.returncode}"}
        known = {name: error.get(name) for name in ("code", "diagnostic", "hint", "file", "line", "column")}
        raise ForetellError(error.get("message", ""), status=done.returncode, **known)
    return answer
