"""`python -m foretell.trace FILE.py:FUNCTION`: traces a training step of one's own; see `script`."""

import argparse

from . import script


def main():
    parser = argparse.ArgumentParser(prog="python -m foretell.trace", description=script.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", metavar="FILE.py:FUNCTION")
    parser.add_argument("--operators", action="store_true", help="print the kernels, the largest traffic first")
    args = parser.parse_args()
    script.report(args.step, args.operators)


if __name__ == "__main__":
    main()
