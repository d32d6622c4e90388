"""Who may import whom (DESIGN section 3), what `import ddtree` loads, and how long files get."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ddtree"
LONGEST_FILE = 350

HOST_ONLY = ("request", "plan", "pages", "scheduler", "policy")
"""Modules of `runtime` that decide on the host and never see a tensor."""


@dataclass(frozen=True)
class Rule:
    """What a room may import: from `ddtree`, at import time, and inside functions only."""

    ddtree: set[str]
    third_party: set[str]
    lazily: frozenset[str] = frozenset()


RULES = {
    "config": Rule(set(), set(), frozenset({"transformers"})),
    "parallel": Rule(set(), {"torch"}),
    "tree": Rule(set(), {"torch"}),
    "kernels": Rule(set(), {"torch"}, frozenset({"triton", "flash_attn"})),
    "state": Rule({"config"}, {"torch"}),
    "text": Rule({"config"}, set(), frozenset({"transformers"})),
    "trace": Rule({"config"}, set(), frozenset({"transformers"})),
    "models": Rule(
        {"config", "parallel", "state", "kernels"},
        {"torch", "einops", "safetensors", "tqdm"},
        # Checkpoints are named by hub ids too; transformers, which we need anyway, brings it.
        frozenset({"huggingface_hub"}),
    ),
    "runtime.host": Rule({"config", *(f"runtime.{name}" for name in HOST_ONLY)}, set()),
    "runtime": Rule({"config", "state", "parallel", "tree", "kernels", "runtime"}, {"torch"}),
    "engine": Rule({"config", "parallel", "models", "runtime", "text", "trace"}, {"torch", "tqdm"}),
    "": Rule({"config", "engine", "runtime", "trace", "text"}, set()),
}


def module_name(path):
    """`ddtree/runtime/step.py` -> "runtime.step"; a package's `__init__` -> its own name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def rule_of(name):
    room, _, rest = name.partition(".")
    if room == "runtime" and (not rest or rest.split(".")[0] in HOST_ONLY):
        return RULES["runtime.host"]
    return RULES[room]


def imports(tree):
    """(module, whether inside a function) of every import in a file's syntax tree."""
    found = []

    def walk(node, lazy):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, "relative imports hide the room"
                # `from ddtree import config` names a room; `from ddtree.config import X` does too.
                names = [f"{child.module}.{alias.name}" for alias in child.names]
                found.extend(
                    (name if child.module == "ddtree" else child.module, lazy) for name in names
                )
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            walk(child, lazy or inside)

    walk(tree, False)
    return found


def violations(name, source):
    """What a module named `name` (below `ddtree`) imports against the table."""
    rule, room = rule_of(name), name.split(".")[0]
    bad = []
    for module, lazy in imports(ast.parse(source)):
        top, _, below = module.partition(".")
        if top == "ddtree":
            target = below.split(".")[0]
            allowed = (
                below in rule.ddtree
                or target in rule.ddtree
                or (
                    # Rooms are open inside; `runtime` has walls of its own.
                    target == room and room != "runtime"
                )
            )
            if name == "runtime.runner" and below.startswith("runtime.scheduler"):
                allowed = False
        elif top in sys.stdlib_module_names:
            allowed = True
        else:
            allowed = top in rule.third_party or (lazy and top in rule.lazily)
        if not allowed:
            bad.append(module)
    return bad


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(ROOT)) for p in FILES])
def test_a_module_imports_only_what_its_room_may(path):
    assert violations(module_name(path), path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("runtime.scheduler", "import torch", ["torch"]),
        ("runtime.plan", "def f():\n    import torch.nn", ["torch.nn"]),
        ("runtime.request", "from ddtree.runtime.runner import Runner", ["ddtree.runtime.runner"]),
        ("runtime.request", "from ddtree.runtime import runner", ["ddtree.runtime"]),
        ("runtime.request", "from ddtree.runtime.plan import Plan", []),
        ("runtime.runner", "from ddtree.runtime.scheduler import S", ["ddtree.runtime.scheduler"]),
        ("runtime.step", "from ddtree.models.llama import L", ["ddtree.models.llama"]),
        ("text.stream", "import transformers", ["transformers"]),
        ("text.tokenizer", "def f():\n    from transformers import A", []),
        ("text.stream", "from ddtree import engine", ["ddtree.engine"]),
        ("kernels.attention", "import triton", ["triton"]),
        ("kernels.attention", "def f():\n    import triton.language as tl", []),
        ("tree.build", "from ddtree.config import C", ["ddtree.config"]),
        ("models.loader", "import numpy", ["numpy"]),
        ("engine", "from ddtree.kernels import get_ops", ["ddtree.kernels"]),
        (
            "config",
            "if True:\n    try:\n        import yaml\n    except ImportError: pass",
            ["yaml"],
        ),
    ],
)
def test_the_table_is_enforced(name, source, expected):
    assert violations(name, source) == expected


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(ROOT)) for p in FILES])
def test_a_file_is_one_thing(path):
    lines = path.read_text("utf-8").count("\n")
    assert lines <= LONGEST_FILE, f"{lines} lines: this is two things"


def loaded_by(statement):
    """Top-level names in `sys.modules` after `statement`, in a fresh interpreter."""
    code = f"{statement}; import sys; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_importing_ddtree_loads_nothing_heavy_beyond_torch():
    extra = loaded_by("import ddtree") - loaded_by("import torch") - set(sys.stdlib_module_names)
    # What the table lets modules import at import time, and what those stand on.
    light = {"ddtree", "einops", "safetensors", "tqdm"}
    heavy = {"transformers", "tokenizers", "huggingface_hub", "triton", "flash_attn", "accelerate"}
    assert not extra & heavy
    assert {name for name in extra if not name.startswith("_")} <= light


def test_the_host_half_of_the_runtime_works_without_torch():
    block = "import sys; sys.modules['torch'] = None; sys.modules['ddtree'] = type(sys)('ddtree')"
    path = f"sys.modules['ddtree'].__path__ = [{str(PACKAGE)!r}]"
    names = ", ".join(f"ddtree.runtime.{name}" for name in HOST_ONLY)
    assert "torch" not in loaded_by(f"{block}; {path}; import {names}; del sys.modules['torch']")
