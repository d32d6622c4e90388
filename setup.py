"""Packaging of ddtree (tool settings live in pyproject.toml)."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "([^"]+)"$', (HERE / "ddtree" / "__init__.py").read_text("utf-8"), re.MULTILINE
)
README = HERE / "README.md"

DEMO = ["gguf>=0.17", "accelerate>=1.0"]
TEST = ["pytest>=8", "hypothesis>=6.100", "ruff", "mypy", "nbclient", "nbformat", "ipykernel"]

setup(
    name="ddtree",
    version=VERSION.group(1) if VERSION else "0.1.0",
    description="Speculative decoding with draft trees: exact output, fewer target forwards",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["ddtree", "ddtree.*"]),
    install_requires=["torch>=2.8", "transformers>=4.57", "safetensors", "einops", "tqdm"],
    extras_require={
        "gpu": ["triton", "flash-attn"],
        "demo": DEMO,
        "test": TEST + DEMO,
    },
    classifiers=[
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
