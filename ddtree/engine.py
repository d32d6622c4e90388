"""The public engine: loads a target and its drafter, and turns prompts into outputs."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from ddtree.config import SamplingParams
from ddtree.config.options import (
    Prompt,
    check_options,
    check_prompt,
    check_request,
    check_timeout,
    single_prompt,
    split_params,
    split_prompts,
)
from ddtree.models.loader import fingerprint
from ddtree.models.registry import build_models, resolve
from ddtree.parallel import connect, place
from ddtree.runtime.calls import Calls
from ddtree.runtime.loop import Loop
from ddtree.runtime.policy import resolve_budget
from ddtree.runtime.request import FINISHED, Request, RequestOutput
from ddtree.runtime.runner import get_ops
from ddtree.text import Text

PER_RANK = ("target", "draft", "device", "tokenizer", "revision", "local_files_only")
"""Options that may differ between ranks: folders and devices are each machine's own."""


@dataclass
class Delta:
    """What a stream yields: new text and ids; the last one carries the whole output."""

    text: str
    token_ids: list[int]
    output: RequestOutput | None = None


class Engine:
    """Generates text with a target model and a DFlash block drafter.

    The output is the target's own, token for token; the drafter makes it faster. One engine may
    be shared by threads: their requests run in one batch.

    Args:
        target: hub id or folder of a Llama or Qwen3 checkpoint (safetensors).
        draft: hub id or folder of a DFlash drafter made for it; None: plain decoding.
        dtype: "float32", "bfloat16", "float16" or a torch.dtype; default: the checkpoint's on
            CUDA, float32 on CPU.
        device: default: "cuda" where there is one, else "cpu".
        budget: tree nodes below the root per round; "auto" is 63 on GPU, and on CPU up to 8, those
            likely enough to be accepted; 0 is plain decoding.
        max_batch_size: requests that run at the same time.
        max_model_len: most tokens of a request, prompt and output; default: the target's limit.
        page_size: tokens per KV page, a power of two.
        num_pages: pages of the KV pools; default: room for `max_batch_size` full requests, within
            a quarter of the free memory on CPU and `memory_fraction` of all memory on CUDA.
        prefill_chunk: prompt tokens per step.
        kernels: "auto" (Triton's on CUDA, torch elsewhere), "triton" or "torch".
        cuda_graphs: on CUDA, capture the decode rounds at construction; False runs them eagerly.
        coupling: make draft trees with the noise that sampled tokens are chosen with, and by the
            drafter's calibration: more is accepted, the tokens are the same without.
        verify: "match", or "rejection", which samples drafts and is there to compare with: tokens
            then depend on the tree at temperature > 0, and rounds run eagerly.
        tokenizer: folder, hub id or tokenizer object; default: the target's.
        revision: branch, tag or commit of the target's hub repository.
        local_files_only: take hub files from the local cache only.
        process_group: ranks that the models are divided among (tensor parallelism); default:
            torch.distributed's default group or, under torchrun, all ranks; else this process.
            All ranks construct the engine, make the same calls one by one, and get the outputs.
        timeout: seconds after which a rank that does not answer during a step is given up.

    Raises:
        ValueError: an option's value is impossible; the message begins with its name.
    """

    def __init__(
        self,
        target: str,
        draft: str | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        budget: int | str = "auto",
        max_batch_size: int = 8,
        max_model_len: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        memory_fraction: float = 0.9,
        prefill_chunk: int = 2048,
        kernels: str = "auto",
        cuda_graphs: bool = True,
        coupling: bool = True,
        verify: str = "match",
        tokenizer: Any = None,
        revision: str | None = None,
        local_files_only: bool = False,
        process_group: Any = None,
        timeout: float = 60.0,
    ):
        options = {k: v for k, v in locals().items() if k not in ("self", "process_group")}
        check_timeout(timeout)
        self._parallel = parallel = connect(process_group, place(device).type, timeout)
        with parallel.guard():
            check_options(options, parallel.size)
            self._device = place(device, parallel.size > 1)
            asked, (budget, threshold) = budget, resolve_budget(budget, self._device.type)
            folder = resolve(target, revision, local_files_only, name="target")
            drafts = None if draft is None else resolve(draft, None, local_files_only, name="draft")
            if parallel.size > 1:
                prints = {"target": fingerprint(folder), "draft": drafts and fingerprint(drafts)}
                parallel.agree(prints | {k: v for k, v in options.items() if k not in PER_RANK})
            self._text = Text.load(folder if tokenizer is None else tokenizer, local_files_only)
            ops = get_ops(kernels, self._device)
            models = build_models(folder, drafts, ops, self._device, dtype, parallel)
            self._target, self._drafter = models
            if self._drafter is None and asked != "auto" and budget > 0:
                raise ValueError(f"budget: {budget} tree nodes need a drafter; give draft=... or 0")
            self._budget = budget if self._drafter is not None else 0
            limit = self._target.config.max_position_embeddings
            self.max_model_len = max_model_len or limit
            if self.max_model_len > limit:
                raise ValueError(f"max_model_len: the target has {limit}, got {max_model_len}")
            self._loop = Loop.build(
                self._target,
                self._drafter,
                ops,
                device=self._device,
                budget=(self._budget, threshold),
                max_batch_size=max_batch_size,
                max_model_len=self.max_model_len,
                page_size=page_size,
                num_pages=num_pages,
                memory_fraction=memory_fraction,
                prefill_chunk=prefill_chunk,
                cuda_graphs=cuda_graphs,
                coupling=coupling,
                rejection=verify == "rejection",
                progress=partial(tqdm, desc="capturing", unit="graph", disable=parallel.rank > 0),
            )
            self._calls = Calls(parallel, self._loop)
        self._lock, self._count, self._streams, self._closed = threading.RLock(), 0, 0, False

    # -- generating -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete one or several prompts, batched; the outputs come in the prompts' order.

        Args:
            prompts: a string, a flat list of token ids, or a list of those.
            params: for all prompts, or a list with one for each.
            progress: show a progress bar.

        Raises:
            ValueError: a prompt or a parameter is impossible; nothing has run then.
        """
        self._check_open()
        given = (prompts, params)
        return self._calls.run("generate", given, lambda: self._generate(*given, progress))

    def _generate(self, prompts: Any, params: Any, progress: bool) -> list[RequestOutput]:
        batch, names = split_prompts(prompts)
        jobs = zip(names, batch, split_params(params, len(batch)), strict=True)
        requests = [self._request(*job) for job in jobs]
        try:
            self._submit(requests)
            with tqdm(total=len(requests), unit="prompt", disable=not progress) as bar:
                while left := self._running(requests):
                    bar.update(len(requests) - left - bar.n)
                    self._step(requests)
                bar.update(len(requests) - bar.n)
        finally:
            self._cancel(requests)
        return [request.result() for request in requests]

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Yield one prompt's text and ids as they are generated; the last delta has the output.

        Several streams may be open at once: their requests share the batch. Closing a stream
        early cancels its request.

        Raises:
            ValueError: as `generate`; at the call, not at the first delta.
        """
        self._check_open()
        opened: list[Request] = []  # stays empty on ranks that follow

        def work() -> None:
            opened.append(self._request("prompt", single_prompt(prompt), *split_params(params, 1)))

        self._calls.run("stream", (prompt, params), work)
        self._streams += 1
        return self._stream(opened, self._calls, self._streams)

    def _stream(self, opened: list[Request], calls: Calls, number: int) -> Iterator[Delta]:
        source = self._deltas(opened)
        try:
            while (delta := calls.run("next", number, lambda: next(source, None))) is not None:
                yield delta
        finally:
            source.close()

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Any] | None = None,
        progress: bool = False,
        **chat_template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the tokenizer's chat template.

        Args:
            messages: a list of ``{"role": ..., "content": ...}``, or a list of such lists.
            tools, chat_template_kwargs: passed to the template, e.g. ``enable_thinking=False``.

        Raises:
            ValueError: as `generate`; or there is no tokenizer or no chat template.
        """
        several = isinstance(messages, (list, tuple)) and bool(messages)
        several = several and isinstance(messages[0], (list, tuple))
        conversations: Sequence[Any] = messages if several else [messages]
        prompts = [self._text.chat(c, tools, **chat_template_kwargs) for c in conversations]
        return self.generate(prompts, params, progress)

    # -- about the engine -------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The `transformers` tokenizer, or None when the target folder has none."""
        return self._text.tokenizer

    def describe(self) -> dict[str, Any]:
        """The engine's settings as they were resolved."""
        self._check_open()
        return {
            "target": self._target.config.architecture,
            "draft": None if self._drafter is None else "DFlashDraftModel",
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "device": str(self._device),
            "tensor_parallel_size": self._parallel.size,
            "rank": self._parallel.rank,
            "budget": self._budget,
            "max_model_len": self.max_model_len,
            **self._loop.describe(),
            **self._target.ops.describe(),
        }

    def close(self) -> None:
        """Cancel what is running and free the models and the KV pools."""
        with self._lock:
            if not self._closed:
                self._loop.reset()
                self._parallel.close()
                self._closed = True
                del self._calls, self._loop, self._target, self._drafter

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; construct a new one")

    def _request(self, name: str, prompt: Prompt, params: SamplingParams) -> Request:
        """Check one prompt with its parameters and make a request of it; queues nothing."""
        config = self._target.config
        ids = self._text.encode(prompt, name) if isinstance(prompt, str) else prompt
        ids = check_prompt(name, ids, config.vocab_size, self.max_model_len)
        eos = () if params.ignore_eos else config.eos_token_ids
        check_request(params, len(eos), config.vocab_size, self._budget, self._drafter is not None)
        stream = self._text.stream(
            params.skip_special_tokens,
            params.stop,
            params.include_stop_str_in_output,
            params.min_new_tokens,
        )
        limit = min(len(ids) + params.max_new_tokens, self.max_model_len)
        with self._lock:
            self._count += 1
            request = Request(self._count, ids, params, limit, self._budget, eos, stream)
        self._loop.scheduler.check(request)
        return request

    def _submit(self, requests: list[Request]) -> None:
        with self._lock:
            for request in requests:
                self._loop.scheduler.add(request)

    def _running(self, requests: list[Request]) -> int:
        return sum(request.status != FINISHED for request in requests)

    def _step(self, requests: list[Request]) -> None:
        """One step for everybody, unless another thread's step has just finished `requests`."""
        with self._lock:
            self._check_open()
            if self._running(requests):
                self._calls.step()

    def _cancel(self, requests: list[Request]) -> None:
        with self._lock:
            if not self._closed:
                self._loop.abort(requests)

    def _take(self, request: Request) -> tuple[str, list[int]]:
        with self._lock:
            return request.take()

    def _deltas(self, opened: list[Request]) -> Generator[Delta]:
        self._check_open()
        (request,) = opened
        try:
            self._submit(opened)
            while request.status != FINISHED:
                text, ids = self._take(request)
                if ids:
                    yield Delta(text, ids)
                else:
                    self._step(opened)
            text, ids = self._take(request)
            yield Delta(text, ids, request.result())
        finally:
            self._cancel(opened)
