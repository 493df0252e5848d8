"""The virtual environment of benches that need packages from PyPI. It is made where it is missing."""
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ["torch", "torchvision", "transformers", "peft", "safetensors", "numpy", "pillow"]


def add_argument(parser):
    """Adds the option that names the environment."""
    default = os.environ.get("FORETELL_VENV", ROOT / "target/venv")
    parser.add_argument("--venv", type=pathlib.Path, default=pathlib.Path(default), help="virtual environment with PyTorch")


def python_of(venv):
    """Returns the Python of the environment."""
    python = pathlib.Path(venv).absolute() / "bin/python"
    if not python.exists():
        print(f"making the virtual environment {venv} with {', '.join(PACKAGES)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def enter(venv):
    """Starts the script again with the Python of the environment."""
    if pathlib.Path(sys.prefix).resolve() != pathlib.Path(venv).resolve():
        python = python_of(venv)
        os.execv(python, [python, *sys.argv])
