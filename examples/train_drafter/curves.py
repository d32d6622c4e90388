"""Loss and acceptance over training time, as CSV that resuming continues and as a PNG."""

from __future__ import annotations

import csv
from pathlib import Path

LOSS = ("step", "seconds", "loss", "lr")
ACCEPTANCE = ("step", "seconds", "epoch", "chain", "hits")


class Curves:
    """Appends rows to `loss.csv` and `acceptance.csv` of a run."""

    def __init__(self, run: Path, every: int = 10) -> None:
        self.run, self.every = run, every
        self.mean = 0.0
        self.window: list[float] = []

    def _append(self, name: str, header: tuple[str, ...], row: tuple) -> None:
        path = self.run / name
        self.run.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with open(path, "a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(header)
            writer.writerow(row)

    def loss(self, step: int, seconds: float, value: float, lr: float) -> None:
        """Note a step's loss; every `every` steps their mean becomes a row."""
        self.window.append(value)
        if step % self.every == 0:
            self.mean = sum(self.window) / len(self.window)
            self.window = []
            self._append(
                "loss.csv", LOSS, (step, round(seconds, 1), round(self.mean, 4), f"{lr:.3e}")
            )

    def acceptance(
        self, step: int, seconds: float, epoch: int, chain: float, hits: list[float]
    ) -> None:
        """Note a proxy evaluation and redraw the PNG."""
        shown = " ".join(f"{h:.4f}" for h in hits)
        row = (step, round(seconds, 1), epoch, round(chain, 4), shown)
        self._append("acceptance.csv", ACCEPTANCE, row)
        draw(self.run)

    def truncate(self, step: int) -> None:
        """Drop rows that a killed run wrote after its last checkpoint."""
        for name in ("loss.csv", "acceptance.csv"):
            path = self.run / name
            rows = read_rows(path)
            if rows:
                with open(path, "w", newline="") as file:
                    writer = csv.DictWriter(file, fieldnames=list(rows[0]))
                    writer.writeheader()
                    writer.writerows(row for row in rows if int(row["step"]) <= step)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a curve file; a half-written last line is left out."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values() and None not in row]


def draw(run: Path) -> bool:
    """Draw `curves.png`; False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    for at, (name, column, title) in enumerate(
        (("loss.csv", "loss", "training loss"), ("acceptance.csv", "chain", "proxy tokens/round"))
    ):
        rows = read_rows(run / name)
        axes = figure.add_subplot(1, 2, at + 1)
        axes.plot([float(r["seconds"]) / 60 for r in rows], [float(r[column]) for r in rows])
        axes.set_xlabel("minutes of training")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    figure.savefig(run / "curves.png", dpi=110)
    return True
