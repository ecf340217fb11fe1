"""Triton kernels on CPU tensors: a backend that leaves them all to Triton's interpreter.

vLLM's Model Runner V2, which alone returns sampling masks, is written in Triton. Nothing here can
compile: the process must set ``TRITON_INTERPRET=1``.
"""

import importlib


def register() -> None:
    """A vLLM plugin: top-k and top-p by PyTorch, as on a machine without Triton.

    That one kernel asks its loop index for a tensor's method, which the interpreter's integer
    does not have.
    """
    sampler = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    sampler.HAS_TRITON = False  # type: ignore[attr-defined]  # vLLM's own switch
