"""Reads safetensors checkpoints, tensor by tensor, and accounts for every one of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Set
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from ddtree.kernels.reference import TorchOps
from ddtree.parallel import Part

ALLOWED_FILES = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "*.tiktoken",
)
"""What is fetched from the hub: weights, configuration, tokenizer; never code or pickles."""
PROGRESS_BYTES = 2 * 2**30
"""Checkpoints from this size on are loaded under a progress bar."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOATS = {"F64", "F32", "F16", "BF16"}
INTEGERS = {"I64", "I32"}
PROBES, PROBE_BYTES = 64, 4096
SCRATCH_BYTES = 32 * 2**20
"""Weights below this size that are to be packed are read into one buffer: see `Checkpoint.pack`."""


def resolve(
    path_or_id: str | Path,
    revision: str | None = None,
    local_files_only: bool = False,
    name: str = "target",
) -> Path:
    """Return the checkpoint folder itself, or fetch a hub id and return its local folder.

    Args:
        revision: branch, tag or commit of the hub repository; a local folder has none.
        local_files_only: take hub files from the local cache only.
        name: the argument that errors speak of.

    Raises:
        ValueError: `path_or_id` is no folder, and no hub repository that can be reached.
    """
    if not isinstance(path_or_id, (str, Path)):
        raise ValueError(f"{name}: expected a folder or a hub id, got {path_or_id!r}")
    folder = Path(path_or_id).expanduser()
    if str(path_or_id) and folder.is_dir():
        return folder
    hub_id = str(path_or_id)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", hub_id):
        raise ValueError(f"{name}: {hub_id!r} is neither a folder nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        fetched = snapshot_download(
            hub_id,
            revision=revision,
            local_files_only=local_files_only,
            allow_patterns=list(ALLOWED_FILES),
            ignore_patterns=["*/*"],
        )
    except Exception as error:
        where = "in the local cache" if local_files_only else "on the hub"
        raise ValueError(
            f"{name}: {hub_id!r} is not a folder, and not found {where}: {error}"
        ) from error
    return Path(fetched)


def fingerprint(folder: Path) -> str:
    """A few characters that tell checkpoints apart, without reading all of their weights.

    They depend on config.json, on names, sizes and headers of the safetensors files, and on
    `PROBES` pieces spread over each of them.
    """
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for probe in range(PROBES):
                file.seek(size * probe // PROBES)
                digest.update(file.read(PROBE_BYTES))
    return f"checkpoint {digest.hexdigest()[:12]}"


class Checkpoint:
    """The tensors of a checkpoint folder, read by name into `dtype` on `device`.

    As a context manager it checks at the end that nothing was left unread. Each tensor is read
    through a mapping of its own: one that lives as long as the whole file would keep every page
    read so far in memory, beside the weights made from it.

    Args:
        strip: optional prefix that tensor names may or may not carry.
        drafts: packed weights need not be exact.
        progress: show a progress bar; None shows it for big checkpoints only.

    Raises:
        ValueError: no safetensors file, a missing or broken shard, or an index that does not
            agree with its shards.
    """

    def __init__(
        self,
        folder: str | Path,
        ops: TorchOps,
        device: torch.device,
        dtype: torch.dtype,
        strip: str = "",
        drafts: bool = False,
        progress: bool | None = None,
    ):
        self.folder = Path(folder)
        self.ops, self.device, self.dtype, self.drafts = ops, device, dtype, drafts
        self._files: dict[str, tuple[Path, str]] = {}
        for stored, path in _tensor_files(self.folder).items():
            name = stored.removeprefix(strip)
            if name in self._files:
                raise ValueError(f"{path}: tensor {name} is there with and without {strip!r}")
            self._files[name] = path, stored
        self._unread = set(self._files)
        self._scratch = torch.empty(0, dtype=dtype, device=device)
        self._packing_copies = ops.packer.copies(self._scratch)
        size = sum(path.stat().st_size for path in {path for path, _ in self._files.values()})
        show = size >= PROGRESS_BYTES if progress is None else progress
        self._bar = tqdm(
            total=len(self._files),
            desc=f"loading {self.folder.name}",
            unit="tensor",
            disable=not show,
        )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
        if error is None and self._unread:
            names = sorted(self._unread)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(
                f"{self.folder}: the model has no place for tensor {', '.join(names[:5])}{more}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: tuple[int | Part, ...]) -> Tensor:
        """Return tensor `name`, which must have `shape`; of a `Part`, only that part.

        Raises:
            ValueError: the tensor is missing, has another shape, or is not floating point.
        """
        parts = tuple(map(Part.of, shape))
        sizes = [part.size for part in parts]
        out = torch.empty(sizes, dtype=self.dtype, device=self.device)
        self._fill(out, name, parts)
        return out

    def integers(self, name: str, size: int) -> Tensor:
        """Return the integers of tensor `name`, `[size]` int64 on CPU.

        Raises:
            ValueError: the tensor is missing, has another shape, or holds something else.
        """
        self._check(name, (size,), INTEGERS)
        path, stored = self._files[name]
        with safe_open(path, framework="pt") as file:
            found = file.get_tensor(stored).long()
        self._mark(name)
        return found

    def tied(self, name: str, shape: tuple[int | Part, int]) -> tuple[Tensor, Any]:
        """Return tensor `name` twice: as a table to look rows up in, and packed for `ops.linear`.

        Where packing copies, the table stays in the file, mapped, in the file's dtype: a second
        copy of a tied embedding would be a fifth of a small model, and few rows of it are used.
        The file must not be overwritten in place while the table lives.
        """
        if not self._packing_copies:
            table = self.read(name, shape)
            return table, self.ops.pack_linear(table)
        packed = self.pack({name: shape[0]}, shape[1])
        path, stored = self._files[name]
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(stored)[Part.of(shape[0]).slice], packed

    def stack(self, rows: Mapping[str, int | Part]) -> Tensor:
        """Read several tensors, name -> rows, one below the other.

        Returns:
            [sum of rows].
        """
        count = sum(Part.of(part).size for part in rows.values())
        out = torch.empty(count, dtype=self.dtype, device=self.device)
        self._fill_parts(out, rows, ())
        return out

    def pack(
        self, rows: Mapping[str, int | Part], in_features: int | Part, exact: bool = False
    ) -> Any:
        """Read several weights `[rows, in_features]`, stack them, and pack them for `ops.linear`.

        exact: even if the model drafts.

        Where packing copies, the unpacked weights go through one buffer: memory taken and freed
        between the packed ones would stay with the process as holes, a third of the weights with
        glibc. (Larger blocks than the buffer are given back to the system.)
        """
        columns = Part.of(in_features)
        shape = (sum(Part.of(part).size for part in rows.values()), columns.size)
        size = shape[0] * shape[1]
        if self._packing_copies and size * self.dtype.itemsize < SCRATCH_BYTES:
            if size > len(self._scratch):
                self._scratch = torch.empty(size, dtype=self.dtype, device=self.device)
            out = self._scratch[:size].view(shape)
        else:
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._fill_parts(out, rows, (columns,))
        return self.ops.pack_linear(out, self.drafts and not exact)

    def ignore(self, name: str, shape: tuple[int | Part, ...] | None = None) -> None:
        """Count tensor `name` as read if it is there; `shape` is checked where given."""
        if name in self._files:
            if shape is not None:
                self._check(name, tuple(Part.of(part).total for part in shape))
            self._mark(name)

    def _fill_parts(
        self, out: Tensor, rows: Mapping[str, int | Part], columns: tuple[Part, ...]
    ) -> None:
        parts = [Part.of(part) for part in rows.values()]
        places = out.split([part.size for part in parts])
        for place, name, part in zip(places, rows, parts, strict=True):
            self._fill(place, name, (part, *columns))

    def _fill(self, out: Tensor, name: str, parts: tuple[Part, ...]) -> None:
        self._check(name, tuple(part.total for part in parts))
        path, stored = self._files[name]
        with safe_open(path, framework="pt") as file:
            out.copy_(file.get_slice(stored)[tuple(part.slice for part in parts)])
        self._mark(name)

    def _check(self, name: str, shape: tuple[int, ...], dtypes: Set[str] = FLOATS) -> None:
        if name not in self._files:
            raise ValueError(f"{self.folder}: tensor {name} is missing, expected {list(shape)}")
        path, stored = self._files[name]
        with safe_open(path, framework="pt") as file:
            view = file.get_slice(stored)
            found, dtype = view.get_shape(), view.get_dtype()
        if tuple(found) != shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {list(found)}, expected {list(shape)}"
            )
        if dtype not in dtypes:
            raise ValueError(
                f"{path}: tensor {name} is stored as {dtype}; only {', '.join(sorted(dtypes))} "
                "are supported"
            )

    def _mark(self, name: str) -> None:
        if name in self._unread:
            self._unread.remove(name)
            self._bar.update()


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Map every tensor in the folder to the file that holds it."""
    if (folder / SINGLE_FILE).is_file():
        return dict.fromkeys(_names(folder / SINGLE_FILE), folder / SINGLE_FILE)
    if (folder / INDEX_FILE).is_file():
        return _sharded_files(folder)
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder}: only safetensors checkpoints are loaded (never pickles), but there is "
            f"only {', '.join(pickles)}"
        )
    raise ValueError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _sharded_files(folder: Path) -> dict[str, Path]:
    index = folder / INDEX_FILE
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} has no valid weight_map: {error!r}") from error
    files: dict[str, Path] = {}
    for shard in shards:
        if Path(shard).name != shard:
            raise ValueError(f"{index}: shard {shard!r} is not a plain file name")
        if not (folder / shard).is_file():
            raise ValueError(f"{folder}: shard {shard} is missing")
        for name in _names(folder / shard):
            if weight_map.get(name) != shard:
                raise ValueError(f"{folder / shard}: tensor {name} is not in {INDEX_FILE}")
            files[name] = folder / shard
    for name, shard in weight_map.items():
        if name not in files:
            raise ValueError(f"{folder / shard}: tensor {name} is missing")
    return files


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
