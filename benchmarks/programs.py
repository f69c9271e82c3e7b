"""Runs programs for well-known packages plainly and with lagom on 2 and 3 ranks, and prints a table in Markdown.

    python -m benchmarks.programs [NAME ...] [--ranks 2 3] [--environment FOLDER]

The programs are those of tests/programs/packages. The environment with their packages is made in FOLDER, once. A line
of the table comes out as soon as its program has run; the exit status is 1 if any program was not equal.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from tests.package_runs import HERE, PROGRAMS, differences, executed, tolerance
from tests.packages import environment, fingerprint

PACKAGES = {
    "accelerate": "accelerate",
    "botorch": "botorch",
    "fastai": "fastai",
    "gpytorch": "gpytorch",
    "h5py": "h5py",
    "ignite": "pytorch-ignite",
    "keras": "keras",
    "lightning_fabric": "pytorch-lightning",
    "monai": "monai",
    "opacus": "opacus",
    "peft": "peft",
    "pyro": "pyro-ppl",
    "pytorch_lightning": "pytorch-lightning",
    "pytorch_metric_learning": "pytorch-metric-learning",
    "safetensors": "safetensors",
    "sentence_transformers": "sentence-transformers",
    "skorch": "skorch",
    "stable_baselines3": "stable-baselines3",
    "timm": "timm",
    "tokenizers": "tokenizers",
    "torch_geometric": "torch-geometric",
    "torchdata": "torchdata",
    "torchmetrics": "torchmetrics",
    "torchvision": "torchvision",
    "transformers": "transformers",
}
"""Names of distributions by the name that a program imports."""
HEADER = ["program", "what it does", "packages"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the programs and print the table; return 0 if all are equal, else 1."""
    args = _arguments(argv)
    python = environment(args.environment)
    (site,) = args.environment.glob("lib/python*/site-packages")
    versions = {
        re.sub("[-_.]+", "-", d.metadata["Name"].lower()): d.version for d in distributions(path=[str(site), *sys.path])
    }
    names = [*HEADER, *(f"`lagom run -n {n}`" for n in args.ranks), "time against one process"]
    print("|".join(["", *(f" {name} " for name in names), ""]), "|".join(["", *("---" for _ in names), ""]), sep="\n")
    equal = True
    for program in args.names or PROGRAMS:
        found, cells = _row(str(python), program, args.ranks)
        equal = equal and found
        print("|".join(["", *(f" {cell} " for cell in [*_description(program, versions), *cells]), ""]), flush=True)
    return int(not equal)


def _row(python: str, program: str, ranks: Sequence[int]) -> tuple[bool, list[str]]:
    """Return whether the runs on ranks gave the results of one process, and the cells of the program's row."""
    plain = executed(python, program)
    if plain.code:
        return False, [f"the plain run failed: {_last_line(plain.err)}", *("" for _ in ranks)]
    cells, times = [], []
    for number in ranks:
        run = executed(python, program, "-n", str(number))
        differing = differences(run, plain, tolerance(program)) if run.code == 0 else [_last_line(run.err)]
        cells.append("equal" if not differing else f"{len(differing)} differences: {differing[0][:200]}")
        times.append(f"{run.seconds / plain.seconds:.1f}")
    return all(cell == "equal" for cell in cells), [*cells, ", ".join(times)]


def _description(program: str, versions: dict[str, str]) -> list[str]:
    """Return the program's name, the first line of its docstring, and the packages that it imports."""
    text = (HERE / f"{program}.py").read_text()
    imported = re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
    packages = dict.fromkeys(PACKAGES[name] for name in imported if name in PACKAGES)
    return [f"`{program}`", ast.get_docstring(ast.parse(text)) or "", ", ".join(f"{p} {versions[p]}" for p in packages)]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs; all, if none is named")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3], help="numbers of ranks (2 3)")
    folder = Path.home() / ".cache" / "lagom" / f"programs-{fingerprint()}"
    parser.add_argument("--environment", type=Path, default=folder, help="where the packages are, or are installed")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(PROGRAMS):
        parser.error(f"no such programs: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
