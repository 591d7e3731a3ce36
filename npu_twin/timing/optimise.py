"""A small robust least-squares fit for positive parameters: Levenberg-Marquardt on their logarithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Residuals = Callable[[Mapping[str, float]], Sequence[float]]


def fit(
    residuals: Residuals, start: Mapping[str, float], scale: float = 0.05, steps: int = 60
) -> dict[str, float]:
    """Return the values that minimise the sum of soft-L1 losses of `residuals`.

    Residuals far above `scale` count linearly instead of squared, so a few outliers do not bend the fit.
    The names and starting values come from `start`; every value stays positive.
    """
    import numpy as np

    names = list(start)
    x = np.log([start[n] for n in names])

    def evaluate(point: np.ndarray) -> np.ndarray:
        values = dict(zip(names, np.exp(point).tolist(), strict=True))
        return np.asarray(residuals(values), dtype=np.float64)

    def loss(r: np.ndarray) -> float:
        return float(np.sum(np.sqrt(1.0 + (r / scale) ** 2) - 1.0))

    damping = 1e-2
    r = evaluate(x)
    best = loss(r)
    for _ in range(steps):
        jacobian = np.empty((r.size, x.size))
        for i in range(x.size):
            moved = x.copy()
            moved[i] += 1e-5
            jacobian[:, i] = (evaluate(moved) - r) / 1e-5
        weight = 1.0 / np.sqrt(1.0 + (r / scale) ** 2)
        normal = jacobian.T @ (jacobian * weight[:, None])
        gradient = jacobian.T @ (r * weight)
        improved = False
        for _ in range(8):
            step = np.linalg.solve(
                normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(x.size)), -gradient
            )
            candidate = x + np.clip(step, -1.0, 1.0)
            moved_r = evaluate(candidate)
            now = loss(moved_r)
            if now < best:
                improved = best - now > 1e-7 * best
                x, r, best, damping = candidate, moved_r, now, max(damping / 5, 1e-9)
                break
            damping *= 4
        if not improved:
            break
    return dict(zip(names, np.exp(x).tolist(), strict=True))
