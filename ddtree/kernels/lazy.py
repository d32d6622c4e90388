"""Triton kernels that stay plain functions until their first launch: importing needs no triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Arg = Any
    constexpr = Any
else:

    class Arg:
        """Annotates what a kernel gets at run time: a pointer, a number, a block of either."""

    class constexpr:
        """Annotates what a kernel is compiled for; triton goes by the name."""


tl: Any = None
"""Stands for `triton.language` in a module of kernels, which imports it from here; see `kernel`."""


class Kernel:
    """A function in Triton's language: a kernel, or what kernels call. Launch: `k[grid](...)`."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.compiled: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.jit()[grid]

    def __call__(self, *args: Any) -> Any:
        """Only for type checkers, where one kernel calls another: triton takes its place first."""
        raise TypeError(f"{self.function.__name__} runs on a device only, by k[grid](...)")

    def jit(self) -> Any:
        """The function under `triton.jit`; so are all others of its module, from then on.

        Triton looks names up in the module that a function was defined in. There, `tl` and the
        annotations become its own, and every `Kernel` what it made of it.
        """
        if self.compiled is None:
            import triton
            import triton.language

            scope = self.function.__globals__
            language = triton.language
            scope.update(tl=language, Arg=language.tensor, constexpr=language.constexpr)
            self.compiled = triton.jit(self.function)
            for name, value in list(scope.items()):
                if isinstance(value, Kernel):
                    scope[name] = value.jit()
        return self.compiled


def kernel(function: Callable[..., Any]) -> Kernel:
    """Decorate a function in Triton's language; annotate its arguments with `Arg`, `constexpr`."""
    return Kernel(function)
