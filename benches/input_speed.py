"""Compares reading a folder of pictures with PyTorch's DataLoader and torchvision's transforms.

    python benches/input_speed.py FOLDER --foretell PATH/read_pictures [--workers 1] [--pairs 5]

Both read the same pictures with the same number of workers: decode, random resized crop to 224,
flip, normalise. Prints, for each pair of runs, seconds of wall clock and of CPU time, and the ratio
(below 1: Foretell is faster). CPU time is the figure to trust on a machine that does other work.
Needs torch and torchvision.
"""

import argparse
import json
import resource
import statistics
import subprocess
import time

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def pytorch(folder: str, workers: int, pictures: int) -> tuple[float, float]:
    """Wall-clock and CPU seconds of one epoch."""
    normalise = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalise]
    dataset = datasets.ImageFolder(f"{folder}/train", transforms.Compose(steps))
    subset = torch.utils.data.Subset(dataset, torch.randperm(len(dataset))[:pictures].tolist())
    loader = DataLoader(subset, batch_size=32, num_workers=workers)

    def cpu() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)

    start, before = time.perf_counter(), cpu()
    count = sum(images.shape[0] for images, _ in loader)
    assert count == min(pictures, len(dataset))
    return time.perf_counter() - start, cpu() - before


def foretell(program: str, folder: str, workers: int, pictures: int) -> tuple[float, float]:
    """Wall-clock and CPU seconds of the same pictures."""
    command = [program, f"{folder}", str(workers), str(pictures)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return answer["wall_seconds"], answer["cpu_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--foretell", required=True)
    for name, default in (("workers", 1), ("pairs", 5), ("pictures", 400)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ratios = []
    for pair in range(arguments.pairs):
        sizes = (arguments.workers, arguments.pictures)
        theirs, ours = pytorch(arguments.folder, *sizes), foretell(arguments.foretell, arguments.folder, *sizes)
        ratios.append((ours[0] / theirs[0], ours[1] / theirs[1]))
        print(f"pair {pair}: PyTorch {theirs[0]:.2f} s wall, {theirs[1]:.2f} s CPU; Foretell {ours[0]:.2f} s, {ours[1]:.2f} s")
    wall, cpu = (statistics.median(column) for column in zip(*ratios))
    print(f"ratio, median of {arguments.pairs} pairs with {arguments.workers} workers: wall {wall:.2f}, CPU {cpu:.2f}")


if __name__ == "__main__":
    main()
