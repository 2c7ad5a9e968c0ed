"""torch's product of float16 matrices, which is cuBLAS's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .timing import Candidate, rounds_of, seconds_of


def find_torch() -> tuple[Any, str]:
    """torch, if it is here and has a GPU, and what stands for the rival in the results."""
    try:
        import torch
    except ImportError:
        return None, "torch is not installed"
    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__} finds no GPU"
    return torch, f"torch {torch.__version__}, cuBLAS of CUDA {torch.version.cuda}, float16"


class Rival:
    """``x Wᵀ`` of one shape, whose weights rotate as ours do.

    Parameters
    ----------
    torch : module
    n, k : int
    copies : int
        Of the weights.
    """

    def __init__(self, torch: Any, n: int, k: int, copies: int) -> None:
        self._torch, self._n, self._k = torch, n, k
        made = {"dtype": torch.float16, "device": "cuda"}
        self._weights = [torch.randn(n, k, **made) / k**0.5 for _ in range(copies)]

    def candidate(self, m: int) -> Candidate:
        """For `m` rows of x."""
        torch = self._torch
        x = torch.randn(m, self._k, dtype=torch.float16, device="cuda")
        y = torch.empty(m, self._n, dtype=torch.float16, device="cuda")

        def work(rounds: int) -> None:
            for _ in range(rounds):
                for weight in self._weights:
                    torch.mm(x, weight.t(), out=y)

        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):  # libraries begin, and take their memory, before a capture
            work(2)
        side.synchronize()
        graph = self._captured(work, 1)
        self._run(graph, 1)
        rounds = rounds_of(seconds_of(lambda times: self._run(graph, times)), len(self._weights))
        longer = self._captured(work, rounds)
        kept = (x, y)  # as long as the graph, which has their addresses

        def run(times: int) -> None:
            assert kept
            self._run(longer, times)

        return Candidate(run, len(self._weights) * rounds)

    def _captured(self, work: Callable[[int], None], rounds: int) -> Any:
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            work(rounds)
        return graph

    def _run(self, graph: Any, times: int) -> None:
        for _ in range(times):
            graph.replay()
        self._torch.cuda.synchronize()
