"""`python -m foretell.trace FILE.py:FUNCTION`: traces a training step of one's own; see `script` and `export`."""

import argparse

from . import script


def main():
    parser = argparse.ArgumentParser(prog="python -m foretell.trace", description=script.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", metavar="FILE.py:FUNCTION")
    parser.add_argument("--operators", action="store_true", help="print the kernels, the largest traffic first")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the forward graph for `foretell import torch`")
    parser.add_argument("--batch", type=int, help="the batch of the trace [default: the function's own]")
    parser.add_argument("--sequence", type=int, help="the sequence of the trace [default: the function's own]")
    args = parser.parse_args()
    if args.output:
        from . import export
        export.write(args.step, args.output, args.batch, args.sequence)
    else:
        script.report(args.step, args.operators)


if __name__ == "__main__":
    main()
