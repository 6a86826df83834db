"""How good the orders are, and what they cost to find; on generated graphs, without Thunder.

    python -m benchmarks.sorting [--graphs 60] [--sizes 500,1000,2000,5000,10000,20000] [--annealing 100000]

Part one: graphs of 30-48 ops, each sort against the proven optimum. Part two: planning time and
peak of `sort="auto"` over the number of ops. Part three: randomly wired networks of 64 nodes, against a lower bound
and simulated annealing. Writes `results/sorting.json` and, with matplotlib, `results/sorting.png`; the command stands
in the JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

from rich.progress import track

from tests.checking import graphs as generators
from tests.checking import random_wiring
from thunder_mem.memory.graph import Graph
from thunder_mem.schedule.lower_bounds import certify, lower_bound
from thunder_mem.sorting import sort_graph

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("source", "lpmf", "backward_lpmf", "dfs", "bfs", "sift", "window", "auto")

# Ops a layer of the training shape has, to hit a given number of ops.
FAMILIES: dict[str, Callable[[int, int], Graph]] = {
    "layered": lambda seed, n: generators.layered(seed, n),
    "layered, wide": lambda seed, n: generators.layered(seed, n, width=max(12, n // 12)),
    "series-parallel": lambda seed, n: generators.series_parallel(seed, n),
    "training": lambda seed, n: generators.training(seed, n // 5),
    "training, recomputing": lambda seed, n: generators.training(seed, n // 6, recompute=True),
    "training, recomputing chains": lambda seed, n: generators.recomputed_chains(seed, n // 18),
}


WIRED: dict[str, Callable[[int, tuple[int, ...]], Graph]] = {
    "forward": random_wiring.forward,
    "with the mirrored backward": random_wiring.mirrored,
    "with one gradient for each edge": random_wiring.mirrored_by_edges,
}


def quality(make: Callable[[int, int], Graph], count: int, title: str) -> dict[str, object]:
    """Gaps to the optimum of every sort, and how often the default bound proves `auto` optimal."""
    gaps: dict[str, list[float]] = {name: [] for name in NAMES}
    proven = by_cut = above_source = bound_above_optimum = unsolved = 0
    for seed in track(range(count), f"{title}: gaps"):
        graph = make(seed, random.Random(seed).randint(30, 48))
        best = sort_graph(graph, "exact")
        unsolved += not best.optimal
        for name in NAMES:
            result = sort_graph(graph, name)
            gaps[name].append(result.peak_bytes / best.peak_bytes - 1)
        bound = lower_bound(graph, result.order)
        proven += certify(result.peak_bytes, bound).proven
        by_cut += lower_bound(graph, result.order, max_moves=0).bound_bytes == result.peak_bytes
        above_source += result.peak_bytes > result.source_peak_bytes
        bound_above_optimum += bound.bound_bytes > best.peak_bytes
    return {
        "graphs": count,
        "optimum_unknown": unsolved,
        "gap_percent": {
            name: {"mean": round(100 * mean(values), 3), "worst": round(100 * max(values), 3)}
            for name, values in gaps.items()
        },
        "auto_above_source": above_source,
        "bound_above_optimum": bound_above_optimum,
        "auto_proven_share": proven / count,
        "auto_proven_share_without_search": by_cut / count,
    }


def cost(make: Callable[[int, int], Graph], sizes: list[int], title: str) -> Iterator[dict[str, object]]:
    """What planning takes (best of three; CPU time too, for other jobs share the machine) and what it bought."""
    for size in track(sizes, f"{title}: time"):
        graph = make(1, size)
        wall, cpu = [], []
        for _ in range(3):
            fresh = Graph(graph.ops, graph.storages, graph.predecessors, graph.outputs)
            start, start_cpu = time.perf_counter(), time.process_time()
            result = sort_graph(fresh)
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
        start_cpu = time.process_time()
        bound = lower_bound(graph, result.order)
        bound_cpu_s = time.process_time() - start_cpu
        yield {
            "ops": len(graph),
            "edges": sum(map(len, graph.predecessors)),
            "auto_s": round(min(wall), 4),
            "auto_cpu_s": round(min(cpu), 4),
            "bound_cpu_s": round(bound_cpu_s, 4),
            "source_peak": result.source_peak_bytes,
            "auto_peak": result.peak_bytes,
            "bound": bound.bound_bytes,
            "bound_method": bound.method,
            "algorithm": result.algorithm,
        }


def wired(make: Callable[[int, tuple[int, ...]], Graph], sizes: tuple[int, ...], steps: int) -> list[dict[str, int]]:
    """Peaks of three randomly wired networks: of the sorts, of annealing from the source order, and the lower bound."""
    rows = []
    for seed in range(3):
        graph = make(seed, sizes)
        auto, best = sort_graph(graph), sort_graph(graph, "exact")
        rows.append(
            {
                "ops": len(graph),
                "source": auto.source_peak_bytes,
                "annealing": random_wiring.annealed_bytes(graph, steps),
                "auto": auto.peak_bytes,
                "exact": best.peak_bytes,
                "bound": best.peak_bytes if best.optimal else lower_bound(graph, best.order).bound_bytes,
            }
        )
    return rows


def plot(results: dict[str, object], path: Path) -> None:
    """Planning time over ops, one line a family, with the target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, rows in results["random_wiring"].items():  # type: ignore[attr-defined]
        print(name, rows)
    for name, points in results["cost"].items():  # type: ignore[attr-defined]
        axes.plot([p["ops"] for p in points], [p["auto_cpu_s"] for p in points], marker="o", label=name)
    axes.plot([500, 20_000], [0.1, 4.0], color="grey", linestyle=":", label="linear, 1 s at 5,000 ops")
    axes.set(xscale="log", yscale="log", xlabel="ops", ylabel='sort="auto", CPU s', title="Planning time")
    axes.legend(fontsize=8)
    axes.grid(True, which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=60, help="graphs per family in part one")
    parser.add_argument("--sizes", default="500,1000,2000,5000,10000,20000", help="numbers of ops in part two")
    parser.add_argument("--annealing", type=int, default=100_000, help="steps of annealing in part three")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    results = {
        "command": " ".join(["python -m benchmarks.sorting", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "quality": {name: quality(make, args.graphs, name) for name, make in FAMILIES.items()},
        "cost": {name: list(cost(make, sizes, name)) for name, make in FAMILIES.items()},
        "random_wiring": {
            f"{name}, {values} sizes": wired(make, nbytes, args.annealing)
            for name, make in track(WIRED.items(), "random wiring")
            for values, nbytes in (("equal", random_wiring.ALIKE), ("random", random_wiring.MIXED))
        },
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "sorting.json").write_text(json.dumps(results, indent=1) + "\n")
    try:
        plot(results, args.out / "sorting.png")
    except ImportError:
        print("no picture: matplotlib is not installed (pip install 'thunder-mem[plot]')")
    for name, row in results["quality"].items():  # type: ignore[attr-defined]
        print(name, row["gap_percent"]["auto"], "proven", row["auto_proven_share"])
    for name, rows in results["random_wiring"].items():  # type: ignore[attr-defined]
        print(name, rows)
    for name, points in results["cost"].items():  # type: ignore[attr-defined]
        print(name, [(p["ops"], p["auto_s"], p["auto_cpu_s"]) for p in points])


if __name__ == "__main__":
    main()
