"""The half of the backend that would compile, and never does."""

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget


class NoCompiler(BaseBackend):
    """Answers what Triton asks at import time."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Only the target of our own driver."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """A name for caches."""
        return "cpu-interpreter"

    def parse_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """As they come: nobody reads them."""
        return dict(options)

    def add_stages(self, stages: Any, options: Any, language: Any) -> NoReturn:
        """There is no stage: a kernel that comes here was not interpreted."""
        raise NotImplementedError("set TRITON_INTERPRET=1: this backend compiles nothing")

    def load_dialects(self, context: Any) -> NoReturn:
        """None to load."""
        raise NotImplementedError("set TRITON_INTERPRET=1: this backend compiles nothing")

    def get_module_map(self) -> dict[str, Any]:
        """No device functions."""
        return {}
